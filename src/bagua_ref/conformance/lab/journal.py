"""The input that a check is trying, in memory that survives a process that hangs or crashes."""

from __future__ import annotations

import mmap
import pickle
import struct
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Journal"]

_HEAD = struct.Struct("<dqq")  # since when a call runs (0: none does), bytes of its input, calls so far
_SIZE = 1 << 20


class Journal:
    """One page for one check; parent and child see the same memory after a fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + _SIZE)

    @contextmanager
    def call(self, what: Any) -> Iterator[None]:
        """Say that ``what`` is under way until the block ends.

        Args:
            what: can be pickled: the name of a call and its arguments by name, or a script up to it, or None.
        """
        data = pickle.dumps(what)
        if len(data) > _SIZE:
            data = b""
        calls = self.calls + 1
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        self._memory[: _HEAD.size] = _HEAD.pack(time.monotonic(), len(data), calls)
        try:
            yield
        finally:
            self._memory[: _HEAD.size] = _HEAD.pack(0.0, len(data), calls)

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return int(_HEAD.unpack(self._memory[: _HEAD.size])[2])

    def clear(self) -> None:
        """Forget all calls."""
        self._memory[: _HEAD.size] = _HEAD.pack(0.0, 0, 0)

    def seconds(self) -> float:
        """Return for how long the present call has been running; 0 if none is."""
        since = _HEAD.unpack(self._memory[: _HEAD.size])[0]
        return time.monotonic() - since if since else 0.0

    def last(self) -> Any:
        """Return what the last call was given; None if there was none, or it was too large to write down."""
        length = _HEAD.unpack(self._memory[: _HEAD.size])[1]
        return pickle.loads(self._memory[_HEAD.size : _HEAD.size + length]) if length else None  # noqa: S301 - written by us
