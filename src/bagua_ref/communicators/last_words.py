"""Last words: why a rank gave up a connection, told to the other ranks through their store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua_ref.communicators.rendezvous import another_connection, ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store

__all__ = ["LastWords"]

_SOMEBODY = "last words"
"""A key that exists once any rank has told why it gives up: one question to the store instead of one per rank."""


class LastWords:
    """Why the ranks of one communicator gave it up.

    Args:
        store: a store of these ranks only.
        ranks: their global ranks, for messages.
        rank: the place of this process among them.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self._own_connection: Store | None = None

    def tell(self, why: str) -> None:
        """Tell the other ranks why this one gives up."""

        def write(store: Store) -> None:
            store.set(f"last words/{self._rank}", why)
            store.set(_SOMEBODY, "")

        ask(self._store, write)

    def of_others(self, limit: float = 5.0) -> str:
        """Return what the other ranks told, "" if they told nothing, or the store does not answer within ``limit`` seconds."""
        heard: list[str] = []
        ask(self._store, lambda store: heard.append(self._read(store)), limit)
        return heard[0] if heard else ""

    def heard_so_far(self) -> str:
        """As `of_others`, for a thread that asks again and again and may wait for the store.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        if self._own_connection is None:
            self._own_connection = another_connection(self._store)
        return self._read(self._own_connection)

    def _read(self, store: Store) -> str:
        told: dict[int, str] = {}
        for place, rank in enumerate(self._ranks) if store.check([_SOMEBODY]) else ():
            if place != self._rank and store.check([f"last words/{place}"]):
                told[rank] = store.get(f"last words/{place}").decode()
        first = {rank: why for rank, why in told.items() if "gave up" not in why}  # the others followed
        return "; ".join(f"rank {rank} gave up: {why}" for rank, why in (first or told).items())
