"""Messages to and from a program under test, and the life of its processes.

A message is one line of JSON and the bytes of the tensors that it lists;
docs/conformance/other-languages.md describes them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from bagua_ref.record.tensor_files import CODES, bytes_of, name_of

__all__ = ["DTYPES", "REQUESTS", "Link", "ProgramError", "Programs", "exit_text"]

DTYPES = {name_of(dtype): dtype for dtype in CODES if dtype is not torch.uint64}
"""The dtypes of tensors in messages, by their names there."""

REQUESTS = "BAGUA_REF_REQUESTS"
"""The environment variable that names a folder for the requests to each process, as they are
sent.
"""

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
        process: the process, or the launcher that has started it.
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
        self._keep(request)
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

    def _keep(self, request: bytes) -> None:
        """Append a request to the process's file in the folder that the environment names, if it
        names one.
        """
        if folder := os.environ.get(REQUESTS):
            number = re.sub(r"\D", "", self.name.rpartition(",")[2]) or "0"
            with (Path(folder) / f"rank{number}-{self._process.pid}.requests").open("ab") as file:
                file.write(request)

    def _failure(self, call: str, what: str) -> ProgramError:
        self.broken = True
        return ProgramError(f"{self.name}: answer to {call}: {what}{_said(self._errors)}")


def how_ended(process: subprocess.Popen[bytes]) -> str:
    """Return the signal or status with which a process or its launcher has ended, if it does so
    within a second.
    """
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
    """Processes of one program, which end at the latest when this object or its process does.

    Args:
        command: the program and its arguments, in the shell's syntax; no shell runs it.
        launch: a command that starts ``{ranks}`` processes of it, which then connect to the port of
            this machine that the variable BAGUA_REF_CONNECT names, and first send their rank; None:
            they speak on standard input and output.
        ranks: how many processes.
        seconds: in which they must connect, and give each answer.

    Raises:
        ProgramError: it cannot be started, does not connect, or speaks another version of the
            protocol.
    """

    def __init__(
        self, command: str, launch: str | None = None, ranks: int = 1, seconds: float = 60.0
    ) -> None:
        self._command, self._words, self._seconds = command, _split(command), seconds
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 # as long as the processes live
        self.folder = Path(tempfile.mkdtemp(prefix="bagua_ref-"))
        """For the ranks' files; removed in the end."""
        self._groups: list[int] = []
        self._watcher = _watcher(self.folder)
        self._end = weakref.finalize(self, _end, self._groups, self._watcher, self.folder)
        self.links: list[Link] = []
        """By rank."""
        try:
            if launch is None:
                self.grow(ranks)
            else:
                self._launch(_split(launch.format(ranks=ranks)), ranks)
        except OSError as error:
            self.end()
            raise ProgramError(f"{command!r} cannot be started: {error}") from None
        except BaseException:
            self.end()
            raise

    def grow(self, ranks: int) -> None:
        """Start processes that speak on standard input and output until there are so many."""
        for rank in range(len(self.links), ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                process = self._start(self._words, theirs)
            self.links.append(
                Link(
                    ours, f"{self._command!r}, process {rank}", self._errors, self._seconds, process
                )
            )

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

    def _start(self, words: Sequence[str], ends: Any, address: str = "") -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "TMPDIR": str(self.folder),
            **({"BAGUA_REF_CONNECT": address} if address else {}),
        }
        process = subprocess.Popen(  # noqa: S603 # the user's own command, without a shell
            words,
            stdin=ends,
            stdout=ends,
            stderr=self._errors,
            start_new_session=True,
            env=environment,
        )
        os.write(self._watcher, f"{process.pid}\n".encode())
        self._groups.append(process.pid)
        threading.Thread(target=process.wait, daemon=True).start()  # no zombies
        return process

    def _launch(self, launcher: Sequence[str], ranks: int) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=ranks) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            self._accept(
                server, self._start([*launcher, *self._words], subprocess.DEVNULL, address), ranks
            )

    def _accept(self, server: socket.socket, launcher: subprocess.Popen[bytes], ranks: int) -> None:
        found: dict[int, Link] = {}
        until = time.monotonic() + self._seconds
        while len(found) < ranks:
            server.settimeout(0.2)
            try:
                connection, _ = server.accept()
                link = Link(
                    connection,
                    f"{self._command!r}, rank {len(found)} to connect",
                    self._errors,
                    self._seconds,
                    launcher,
                )
                rank = link.receive(0)[0].get("rank")
                if not isinstance(rank, int) or not 0 <= rank < ranks or rank in found:
                    raise ProgramError(
                        f"a process of {self._command!r} says that it is rank {rank!r} of {ranks}"
                    )
            except TimeoutError:
                if launcher.poll() is None and time.monotonic() < until:
                    continue
                ended = (
                    ""
                    if launcher.poll() is None
                    else f", and the launcher has ended{how_ended(launcher)}"
                )
                what = f"{len(found)} of {ranks} ranks have connected{ended}"
                raise ProgramError(f"{self._command!r}: {what}{_said(self._errors)}") from None
            except (OSError, ValueError) as error:
                raise ProgramError(
                    f"{self._command!r}: a rank has connected and failed:"
                    f" {error}{_said(self._errors)}"
                ) from None
            link.name = f"{self._command!r}, rank {rank}"
            found[rank] = link
        self.links = [found[rank] for rank in range(ranks)]


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ProgramError(f"{command!r} is not a command: {error}") from None
    if not words:
        raise ProgramError(f"{command!r} is not a command: it is empty")
    return words


def _watcher(folder: Path) -> int:
    """Start a shell that ends the processes and removes the folder when this process has ended,
    whatever ends it.

    Return the pipe to which their ids are written, a line each; it closes with this process.
    """
    script = (
        'folder=$1; shift; while read -r g; do set -- "$@" "$g"; done; for g in "$@"; do kill -s'
        ' TERM -- "-$g"; done; sleep 1; for g in "$@"; do kill -s KILL -- "-$g"; done; rm -rf --'
        ' "$folder"'
    )
    watched, ours = os.pipe()
    try:
        subprocess.Popen(  # noqa: S603 # the script is constant, the folder its argument
            ["/bin/sh", "-c", script, "sh", str(folder)],
            stdin=watched,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(watched)
    return ours


def _end(groups: Sequence[int], watcher: int, folder: Path) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(group, signal.SIGKILL)
    os.close(watcher)
    shutil.rmtree(folder, ignore_errors=True)
