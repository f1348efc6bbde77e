"""Messages to and from a program under test, and the life of its processes.

A message is one line of JSON and the bytes of the tensors that it lists;
docs/conformance/other-languages.md describes them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from bagua_ref.conformance.cases.tensor_files import CODES, bytes_of, name_of

__all__ = ["DTYPES", "WORKER", "Link", "ProgramError", "Programs", "exit_text"]

WORKER = "BAGUA_REF_WORKER"
"""The environment variable of a worker, which is killed with all that it has started."""

DTYPES = {name_of(dtype): dtype for dtype in CODES if dtype is not torch.uint64}
"""The dtypes of tensors in messages, by their names there."""

_PROTOCOL = 1
_LONGEST_LINE, _MOST_BYTES = 1 << 20, 1 << 26


def exit_text(code: int) -> str:
    """Return the name of the signal that ended a process, or its exit status.

    >>> exit_text(-11), exit_text(3)
    ('signal SIGSEGV', 'exit code 3')
    """
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


class ProgramError(RuntimeError):
    """A program under test broke the protocol, answered with an error, or ended."""


class Link:
    """A connection to one process of a program; `sent` counts the requests about its parts on all
    connections of this process.

    Args:
        connection: the socket on which both sides speak.
        name: of the process, for messages.
        errors: what the program has written to its standard error.
        seconds: see `limit`.
        process: the process.
    """

    sent: ClassVar[int] = 0

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        errors: IO[bytes],
        seconds: float,
        process: subprocess.Popen[bytes],
    ) -> None:
        self._connection, self.name, self._errors, self._process = connection, name, errors, process
        self._answers = connection.makefile("rb")
        self.limit(seconds)
        self.broken = False
        """Whether an answer was missing or wrong, so that nothing that follows could be
        understood.
        """

    def limit(self, seconds: float) -> None:
        """Wait so long for an answer, or for a part of it."""
        self._seconds = seconds
        self._connection.settimeout(seconds)

    def ask(
        self,
        call: str,
        tensors: Mapping[str, Tensor] | None = None,
        most_bytes: int = _MOST_BYTES,
        **values: Any,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the header and the tensors with which the program answers.

        Args:
            call: what is asked.
            tensors: are sent, by name.
            most_bytes: that the answer's tensors may have together.
            values: other members of the header.

        Raises:
            ProgramError: it answered with an error, with something else than a message, or not at
                all.
        """
        if self.broken:
            raise ProgramError(f"{self.name} has failed before")
        tensors = tensors or {}
        entries = [
            {"name": name, "dtype": name_of(x.dtype), "shape": list(x.shape)}
            for name, x in tensors.items()
        ]
        header = {"call": call, **values, "tensors": entries}
        Link.sent += call not in ("hello", "world")
        request = b"".join(
            [
                json.dumps(header, separators=(",", ":")).encode(),
                b"\n",
                *map(bytes_of, tensors.values()),
            ]
        )
        try:
            self._connection.sendall(request)
            found, received = self.receive(most_bytes)
        except TimeoutError:
            raise self._failure(call, f"no answer within {self._seconds:g} s") from None
        except ValueError as error:
            raise self._failure(call, str(error)) from None
        except OSError as error:
            raise self._failure(call, f"{error}{how_ended(self._process)}") from None
        if "error" in found:
            raise ProgramError(f"{self.name} answered {call} with an error: {found['error']}")
        return found, received

    def ask_for(
        self,
        call: str,
        wanted: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor] | None = None,
        **values: Any,
    ) -> None:
        """Ask, and copy the answer into the tensors ``wanted``; it must have exactly these names,
        dtypes and shapes.
        """
        room = sum(x.numel() * x.element_size() for x in wanted.values())
        _, found = self.ask(call, tensors, room, **values)
        shown = {name: (str(x.dtype), list(x.shape)) for name, x in found.items()}
        expected = {name: (str(x.dtype), list(x.shape)) for name, x in wanted.items()}
        if shown != expected:
            raise self._failure(call, f"it has the tensors {shown} instead of {expected}")
        for name, x in wanted.items():
            x.copy_(found[name])

    def receive(self, most_bytes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the next message's header and tensors; raise ValueError if it is none, and OSError
        if it ends early.
        """
        line = self._answers.readline(_LONGEST_LINE)
        if not line:
            raise ConnectionError("the program has ended")
        try:
            header = json.loads(line)
            entries = [
                (str(e["name"]), DTYPES[e["dtype"]], [int(size) for size in e["shape"]])
                for e in header["tensors"]
            ]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{line[:200]!r} is not the header of an answer ({type(error).__name__}: {error})"
            ) from None
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in entries]
        if any(size < 0 for _, _, shape in entries for size in shape) or sum(sizes) > most_bytes:
            raise ValueError(
                f"the answer announces tensors of {sizes} bytes, where at most {most_bytes} are"
                " expected"
            )
        tensors = {}
        for (name, dtype, shape), size in zip(entries, sizes, strict=True):
            data = bytearray(self._answers.read(size))
            if len(data) < size:
                raise ConnectionError(
                    f"the program has ended after {len(data)} of {size} bytes of {name}"
                )
            flat = (
                torch.frombuffer(data, dtype=torch.uint8)
                if size
                else torch.empty(0, dtype=torch.uint8)
            )
            tensors[name] = flat.view(dtype).view(shape)
        return header, tensors

    def _failure(self, call: str, what: str) -> ProgramError:
        self.broken = True
        return ProgramError(f"{self.name}: answer to {call}: {what}{_said(self._errors)}")


def how_ended(process: subprocess.Popen[bytes]) -> str:
    """Return the signal or status with which a process has ended, if it does so within a second."""
    try:
        code = process.wait(1)
    except subprocess.TimeoutExpired:
        return ""
    return f" with {exit_text(code)}"


def _said(errors: IO[bytes]) -> str:
    errors.seek(0)
    said = errors.read()[-2000:].decode(errors="replace").strip()
    return f"; its standard error ends with:\n{said}" if said else ""


class Programs:
    """Processes of one program, one per rank, which speak on standard input and output. They end at
    the latest when this object or its process does, and see their input end if that is killed.

    Args:
        command: the program and its arguments, in the shell's syntax; no shell runs it.
        folder: an empty folder for its files, which is removed in the end.
        ranks: how many processes.
        seconds: in which they must give each answer.

    Raises:
        ProgramError: it cannot be started.
    """

    def __init__(self, command: str, folder: Path, ranks: int = 1, seconds: float = 60.0) -> None:
        self._command, self._words, self._seconds = command, _split(command), seconds
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 # as long as the processes live
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._processes, folder)
        self.links: list[Link] = []
        """By rank."""
        try:
            self.grow(ranks)
        except OSError as error:
            self.end()
            raise ProgramError(f"{command!r} cannot be started: {error}") from None

    def grow(self, ranks: int) -> None:
        """Start processes until there are so many."""
        for rank in range(len(self.links), ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                process = self._start(theirs)
            name = f"{self._command!r}, process {rank}"
            self.links.append(Link(ours, name, self._errors, self._seconds, process))

    @property
    def broken(self) -> bool:
        """Whether one of the processes has failed."""
        return any(link.broken for link in self.links)

    def end(self) -> None:
        """Kill the processes."""
        self._end()

    def hello(self) -> dict[str, Any]:
        """Return what the program says it has."""
        said, _ = self.links[0].ask("hello", protocol=_PROTOCOL)
        if said.get("protocol") != _PROTOCOL:
            raise ProgramError(
                f"the program speaks version {said.get('protocol')!r} of the protocol, and this is"
                f" version {_PROTOCOL}"
            )
        return said

    def _start(self, end: socket.socket) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603 # the user's own command, without a shell
            self._words,
            stdin=end.fileno(),
            stdout=end.fileno(),
            stderr=self._errors,
            # What a worker starts stays in its group, which is killed whole.
            start_new_session=WORKER not in os.environ,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )
        self._processes.append(process)
        threading.Thread(target=process.wait, daemon=True).start()  # no zombies
        return process


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ProgramError(f"{command!r} is not a command: {error}") from None
    if not words:
        raise ProgramError(f"{command!r} is not a command: it is empty")
    return words


def _end(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            if WORKER not in os.environ:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)
