"""Ranks in threads of one process, which talk to each other through a list until they are
connected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Ranks:
    """Ranks of a group, each in a thread."""

    def __init__(self, nranks: int) -> None:
        self.said: list[list[int]] = [[0]] * nranks
        self.shared = 0
        """How often they have said something."""
        self._all_here = threading.Barrier(nranks, timeout=20)

    def share(self, rank: int, note: Sequence[int]) -> list[list[int]]:
        self.said[rank] = list(note)
        if self._all_here.wait() == 0:
            self.shared += 1
        self._all_here.wait()
        said = list(self.said)
        self._all_here.wait()
        return said

    def run(
        self, function: Callable[[int, Callable[[Sequence[int]], list[list[int]]]], T]
    ) -> list[T]:
        """Return ``function(rank, share)`` of each rank, where ``share(note)`` returns the notes of
        all.
        """
        with ThreadPoolExecutor(len(self.said)) as pool:
            return list(
                pool.map(
                    lambda rank: function(rank, lambda note: self.share(rank, note)),
                    range(len(self.said)),
                )
            )
