"""The input that a check is trying, in memory that survives a process that hangs or crashes."""

from __future__ import annotations

import mmap
import pickle
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Journal"]

_HEAD = struct.Struct("<dqq")  # start of the current call (0: none), bytes of its input, calls so far
_SIZE = 1 << 26  # pages that are not written take no memory


class Journal:
    """The current call of a check, in memory that parent and child share after a fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + _SIZE)

    @contextmanager
    def call(self, what: Any) -> Iterator[None]:
        """Note that ``what`` is running until the block ends.

        Args:
            what: a picklable pair: the name of a call, and its arguments by name, the script up to the call, or None.
        """
        data = pickle.dumps(what)
        if len(data) > _SIZE:
            data = pickle.dumps((what[0], None))
        calls = self.calls + 1
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        self._memory[: _HEAD.size] = _HEAD.pack(time.monotonic(), len(data), calls)
        try:
            yield
        finally:
            self._memory[: _HEAD.size] = _HEAD.pack(0.0, len(data), calls)

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return int(_HEAD.unpack(self._memory[: _HEAD.size])[2])

    def clear(self) -> None:
        """Forget all calls."""
        self._memory[: _HEAD.size] = _HEAD.pack(0.0, 0, 0)

    def seconds(self) -> float:
        """Return how long the current call has been running; 0 if none is."""
        since = _HEAD.unpack(self._memory[: _HEAD.size])[0]
        return time.monotonic() - since if since else 0.0

    def last(self) -> Any:
        """Return what the last call noted, without arguments that are too large; None if there was no call."""
        length = _HEAD.unpack(self._memory[: _HEAD.size])[1]
        data = self._memory[_HEAD.size : _HEAD.size + length]
        return pickle.loads(data) if length else None  # noqa: S301  # nosec B301 # written by us
