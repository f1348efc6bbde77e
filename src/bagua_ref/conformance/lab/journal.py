"""The input that a check is trying, in memory that survives a process that hangs or crashes."""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bagua_ref.conformance.targets.process_link import exit_text

__all__ = ["Journal", "ProcessDied", "end_with"]

# start of the current call (0: none), bytes of its input, calls so far, whether a rehearsal ended
_HEAD = struct.Struct("<dqq?")
_SIZE = 1 << 26  # pages that are not written take no memory


class ProcessDied(BaseException):
    """A call ended the process in a rehearsal; the message is its signal or exit code."""


class Journal:
    """The current call of a check, in memory that parent and child share after a fork.

    Attributes:
        rehearses: whether `rehearse` does something.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + _SIZE)
        self.rehearses = False
        self._deadly: tuple[int, str] | None = None
        """The number of the call that ended the rehearsal's process, and how."""

    @contextmanager
    def call(self, what: Any) -> Iterator[None]:
        """Note that ``what`` is running until the block ends.

        Args:
            what: a picklable pair: the name of a call, and its arguments by name, the script up to
                the call, or None.

        Raises:
            ProcessDied: this call ended the rehearsal's process.
        """
        file = io.BytesIO()
        _TensorPickler(file).dump(what)
        data = file.getbuffer() if file.tell() <= _SIZE else pickle.dumps((what[0], None))
        calls = self.calls + 1
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        self._memory[: _HEAD.size] = _HEAD.pack(time.monotonic(), len(data), calls, False)
        try:
            if self._deadly is not None and calls == self._deadly[0]:
                raise ProcessDied(self._deadly[1])
            yield
        finally:
            self._memory[: _HEAD.size] = _HEAD.pack(0.0, len(data), calls, False)

    def rehearse(self, work: Callable[[], object]) -> None:
        """Do ``work`` in a forked process first; if a call ends that process, the same call raises
        `ProcessDied` in this one.

        So Hypothesis can make the input of a crash smaller. Does nothing unless ``rehearses`` is
        set.
        """
        if not self.rehearses:
            return
        start, parent, self._deadly = self.calls, os.getpid(), None
        self.clear(start)
        pid = os.fork()
        if pid == 0:
            end_with(parent)
            with contextlib.suppress(BaseException):
                work()
            self._memory[: _HEAD.size] = _HEAD.pack(0.0, 0, self.calls, True)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if not _HEAD.unpack(self._memory[: _HEAD.size])[3]:
            self._deadly = self.calls, exit_text(code)
        self.clear(start)

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return int(_HEAD.unpack(self._memory[: _HEAD.size])[2])

    def clear(self, calls: int = 0) -> None:
        """Forget all calls, of which there have been ``calls``."""
        self._memory[: _HEAD.size] = _HEAD.pack(0.0, 0, calls, False)

    def seconds(self) -> float:
        """Return how long the current call has been running; 0 if none is."""
        since = _HEAD.unpack(self._memory[: _HEAD.size])[0]
        return time.monotonic() - since if since else 0.0

    def last(self) -> Any:
        """Return the note of the last call, without arguments that are too large; None if there was
        no call.
        """
        length = _HEAD.unpack(self._memory[: _HEAD.size])[1]
        data = self._memory[_HEAD.size : _HEAD.size + length]
        return pickle.loads(data) if length else None  # noqa: S301 # written by us


class _TensorPickler(pickle.Pickler):
    """Pickles contiguous tensors as bytes: as torch pickles them takes longer than most kernels."""

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is not Tensor
            or value.layout is not torch.strided
            or value.device.type != "cpu"
        ):
            return NotImplemented
        if (
            value.requires_grad
            or value.is_conj()
            or value.is_neg()
            or value.is_nested
            or value.is_quantized
        ):
            return NotImplemented
        if not value.is_contiguous():
            return NotImplemented
        # one element may have any stride, and none 0
        data = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
        return _tensor_of, (value.dtype, value.shape, data.numpy().tobytes())


def _tensor_of(dtype: torch.dtype, shape: torch.Size, data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


def end_with(parent: int) -> None:
    """Let this process end with its parent, as nothing else would end one that hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_wait_for_end, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _wait_for_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)
