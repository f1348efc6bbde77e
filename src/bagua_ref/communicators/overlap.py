"""Computing while the bytes of a collective are on the wire."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

__all__ = ["Overlap"]

_ENDED = math.nan
"""Compares with no position."""


class Overlap:
    """What a rank computes while a collective moves its chunks: those it sends are filled, and those it receives are read.

    Both go on step by step, on the thread that calls the collective, and reading never gets ahead of filling. How far they are when
    which bytes move is the transport's choice, and nothing that other ranks see. Bytes are counted from a chunk's beginning.

    Args:
        fill: computes the bytes to send, and yields how many are final.
        read: yields how many bytes must have arrived before its next step, which uses them.

    >>> def fill():
    ...     print("first half"); yield 2
    ...     print("second half"); yield 4
    >>> def read():
    ...     yield 3
    ...     print("the first three have come")
    >>> overlap = Overlap(fill(), read())
    >>> overlap.fill(1); overlap.read(1); overlap.fill(4); overlap.read(4)
    first half
    second half
    the first three have come
    """

    def __init__(self, fill: Iterator[int], read: Iterator[int]) -> None:
        self._fill, self._read = fill, read
        self._filled = self._needed = -1.0

    def fill(self, size: int) -> None:
        """Go on until the first ``size`` bytes of every chunk to send are final."""
        while self._filled < size:
            self._filled = next(self._fill, _ENDED)

    def read(self, size: int) -> None:
        """Go on as far as the first ``size`` bytes of every chunk received allow."""
        while self._needed <= size:
            self._needed = next(self._read, _ENDED)

    def finish(self) -> None:
        """Take the steps that are left, when all bytes have moved."""
        self.fill(sys.maxsize)
        self.read(sys.maxsize)
