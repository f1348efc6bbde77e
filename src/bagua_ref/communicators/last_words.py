"""Last words: why a rank gave up a connection, told to the other ranks through their store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua_ref.communicators.rendezvous import ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store

__all__ = ["LastWords"]


class LastWords:
    """Why the ranks of one communicator gave it up.

    Args:
        store: a store of these ranks only.
        ranks: their global ranks, for messages.
        rank: the place of this process among them.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank

    def tell(self, why: str) -> None:
        """Tell the other ranks why this one gives up."""
        ask(self._store, lambda store: store.set(f"last words/{self._rank}", why))

    def of_others(self) -> str:
        """Return what the other ranks told, "" if they told nothing, or the store cannot be reached."""
        told: dict[int, str] = {}

        def read(store: Store) -> None:
            for place, rank in enumerate(self._ranks):
                if place != self._rank and store.check([f"last words/{place}"]):
                    told[rank] = store.get(f"last words/{place}").decode()

        ask(self._store, read)
        first = {rank: why for rank, why in told.items() if "gave up" not in why}  # the others followed
        return "; ".join(f"rank {rank} gave up: {why}" for rank, why in (first or told).items())
