"""Readiness of buckets as a pure state machine, without threads or tensors (S2.4)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

__all__ = ["Readiness"]

Item = TypeVar("Item", bound="Hashable")


class Readiness(Generic[Item]):
    """Marks items and determines which buckets to schedule, always in the order in which they were registered (S2.4).

    A round begins with the first mark and is complete when every bucket has been scheduled; the next mark begins another round.
    While ``hold`` is True a complete round does not end: any mark is then an error, as the item's bucket has already run.

    Args:
        buckets: the items of each bucket, no item twice.

    >>> readiness = Readiness([["a", "b"], ["c"]])
    >>> readiness.mark("c"), readiness.mark("a"), readiness.mark("b")
    ([], [], [0, 1])
    """

    def __init__(self, buckets: Sequence[Sequence[Item]]) -> None:
        self._bucket_of = {item: place for place, items in enumerate(buckets) for item in items}
        if len(self._bucket_of) != sum(map(len, buckets)):
            raise ValueError("an item is in two buckets, or twice in one")
        self._items = [tuple(items) for items in buckets]
        self.hold = False
        self.reset()

    def reset(self) -> None:
        """Clear all marks and begin a new round."""
        self._unmarked = self._bucket_of.copy()
        """What has not been marked in this round, and its bucket: a mark then looks at one place in memory, not at three."""
        self._missing = [len(items) for items in self._items]
        self._next = 0
        """Buckets before this one have been scheduled in this round."""

    @property
    def complete(self) -> bool:
        """Whether every bucket was scheduled in this round."""
        return self._next == len(self._items)

    @property
    def idle(self) -> bool:
        """Whether the next mark, if it is allowed, begins a round."""
        return len(self._unmarked) == len(self._bucket_of) or (self.complete and not self.hold)

    @property
    def started(self) -> bool:
        """Whether anything was marked in this round, and not every bucket scheduled."""
        return len(self._unmarked) < len(self._bucket_of) and not self.complete

    def tick(self, item: Item) -> bool:
        """Return True and `mark` ``item`` if that neither begins a round nor completes a bucket, as for most items."""
        place = self._unmarked.get(item)
        if place is None or self._missing[place] < 2 or len(self._unmarked) == len(self._bucket_of):
            return False
        del self._unmarked[item]
        self._missing[place] -= 1
        return True

    def mark(self, item: Item) -> list[int]:
        """Mark ``item``; return the buckets to schedule now, in order.

        Marking an item again before its bucket is scheduled has no effect.

        Raises:
            ValueError: its bucket was already scheduled in this round.
            KeyError: it is in no bucket.
        """
        place = self._bucket_of[item]
        if place < self._next:
            if self.hold or not self.complete:
                raise ValueError(f"{item} was marked again in a round in which its bucket had already been scheduled")
            self.reset()
        if self._unmarked.pop(item, None) is None:
            return []
        self._missing[place] -= 1
        if self._missing[place] or place > self._next:
            return []
        while self._next < len(self._items) and self._missing[self._next] == 0:
            self._next += 1
        return list(range(place, self._next))

    def unmarked(self) -> dict[int, list[Item]]:
        """Return the unmarked items of each bucket that has not been scheduled in this round."""
        return {
            place: [item for item in self._items[place] if item in self._unmarked] for place in range(self._next, len(self._items))
        }
