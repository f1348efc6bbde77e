"""A program under test: its process, and one request after another with the answer to each.

A message is a line of JSON with the bytes of tensors in base64;
docs/vectors.md describes them.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from bagua_ref.base.untrusted import one_line
from bagua_ref.conformance.cases.tensor_files import CODES, bytes_of, name_of

DTYPES = {name_of(dtype): dtype for dtype in CODES if dtype is not torch.uint64}
"""Name in messages -> dtype of tensors."""


class ProgramError(RuntimeError):
    """A program under test violated the protocol, answered with an error, or ended."""


class Program:
    """A process of a program under test; it is killed with this object or with its parent process.
    If the parent is killed, the program sees end-of-file on its input.

    Args:
        command: the program and its arguments, in the shell's syntax; no shell runs it.
        seconds: time limit of each answer.
        folder: folder for the program's temporary files.

    Attributes:
        sent: number of requests about parts that this process has sent to programs.
        world: number of the world in which the process is a rank; requests of other worlds are
            rejected.
        broken: whether an answer was missing or wrong, after which the connection is unusable.

    Raises:
        ProgramError: it cannot be started.
    """

    sent: ClassVar[int] = 0

    def __init__(self, command: str, seconds: float, folder: str) -> None:
        self.command, self.seconds, self.world, self.broken = command, seconds, 0, False
        self._number, self._lock = 0, threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 # as long as the process lives
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(  # noqa: S603 # the user's own, without a shell
                    shlex.split(command),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._errors,
                    env={**os.environ, "TMPDIR": folder},
                )
            except (OSError, ValueError, IndexError) as error:
                raise ProgramError(f"{command!r} cannot be started: {error}") from None
        ours.settimeout(seconds)
        self._stream = ours.makefile("rwb")
        self.end = weakref.finalize(self, _end, self._process, ours)
        """Kills the process when called."""

    @property
    def busy(self) -> bool:
        """Whether a request is in progress, or the connection is broken."""
        return self.broken or self._lock.locked()

    def ask(
        self,
        call: str,
        tensors: Mapping[str, Tensor] | None = None,
        wanted: Mapping[str, Tensor] | None = None,
        of_world: int = 0,
        **members: Any,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Send a request; return the members and the tensors of the answer.

        Args:
            call: name of the request.
            tensors: tensors to send, by name.
            wanted: output tensors that the answer must contain, by name; None: any.
            of_world: number of the world if the request is to a rank, else 0.
            members: other members of the request.

        Raises:
            ProgramError: the program answered with an error, answered another question, or did not
                answer.
        """
        with self._lock:
            if self.broken or of_world not in (0, self.world):
                raise ProgramError(f"{self.command!r} has failed before")
            self._number += 1
            Program.sent += call not in ("hello", "world")
            sent = {name: _packed(x) for name, x in (tensors or {}).items()}
            request = {"id": self._number, "call": call, **members, "tensors": sent}
            self.broken = True  # unless this succeeds
            line = b""
            try:
                self._stream.write(json.dumps(request).encode() + b"\n")
                self._stream.flush()
                line = self._stream.readline()
                answer = json.loads(line)
                if answer["id"] != self._number:
                    raise ValueError(f"its id is {answer['id']!r}, not {self._number}")
                found = {name: _unpacked(x) for name, x in answer.get("tensors", {}).items()}
                if wanted is not None and "error" not in answer and _kinds(found) != _kinds(wanted):
                    raise ValueError(f"it has {_kinds(found)}, not {_kinds(wanted)}")
            except TimeoutError:
                raise self._failure(request, f"no answer within {self.seconds:g} s") from None
            except Exception as error:  # any malformed answer
                ended = not line.endswith(b"\n")  # before the end of its answer
                wrong = f"{type(error).__name__}: {error}; the answer was {line[:500]!r}"
                raise self._failure(request, self._how_ended() if ended else wrong) from None
            self.broken = False
        if "error" in answer:
            said = one_line(str(answer["error"]))
            raise ProgramError(f"{self.command!r} answered {call} with an error: {said}")
        for name, x in (wanted or {}).items():
            x.copy_(found[name])
        return answer, found

    def _how_ended(self) -> str:
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return "the program has closed its output"
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"the program has ended with {how}"

    def _failure(self, request: dict[str, Any], what: str) -> ProgramError:
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").strip()
        return ProgramError(
            f'{self.command!r}: expected one line of JSON with "id": {request["id"]} as the answer'
            f" to {request['call']}, but {what}\nthe request was {json.dumps(request)[:2000]}"
            + (f"\nits standard error ends with:\n{said}" if said else "")
        )


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.kill()
    connection.close()
    process.wait()


def _packed(x: Tensor) -> dict[str, Any]:
    data = base64.b64encode(bytes_of(x)).decode()
    return {"dtype": name_of(x.dtype), "shape": list(x.shape), "data": data}


def _unpacked(packed: dict[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(packed["data"], validate=True))
    dtype, shape = DTYPES[packed["dtype"]], torch.Size(packed["shape"])
    if len(data) != shape.numel() * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {packed['dtype']} of shape {list(shape)}")
    return (
        torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    )


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{name_of(x.dtype)}{list(x.shape)}" for name, x in tensors.items()}
