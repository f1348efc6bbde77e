"""Last words: why a rank gave up a connection, told to the other ranks through their store."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from bagua_ref.communicators.rendezvous import another_connection, ask
from bagua_ref.communicators.scheduler import format_ranks
from bagua_ref.communicators.waiting import Waiting, has_ended

__all__ = ["LastWords"]

_SOMEBODY = "last words"
"""A key that exists once any rank has told why it gives up: one question to the store instead of one per rank."""
_QUESTION = 5.0
"""Seconds for a question to the store about a rank that has gone."""
_LAST_QUESTION = 0.5
"""The same if a rank's process has ended, which perhaps served the store."""
_LAST_BREATH = 0.2
"""Seconds between the end of a rank's sockets and that of its process."""
_ANSWER = 3.0
"""Seconds in which ranks whose calls differ have told each other what they call."""


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

    def tell(self, why: str, anew: bool = True) -> None:
        """Tell the other ranks why this one gives up; without ``anew``, no connection to the store is opened for that."""

        def write(store: Store) -> None:
            store.set(f"last words/{self._rank}", why)
            store.set(_SOMEBODY, "")

        ask(self._store, write, anew=anew)

    def of_others(self, limit: float = 5.0) -> str:
        """Return what the other ranks told, "" if they told nothing, or the store does not answer within ``limit`` seconds."""
        heard: list[str] = []
        ask(self._store, lambda store: heard.append(self._read(store)), limit)
        return heard[0] if heard else ""

    def why_gone(self, waits: Waiting, hung_up: Sequence[int]) -> str:
        """Return what is known of why a connection has ended, "" if nothing is.

        Args:
            waits: the job's.
            hung_up: places of the ranks whose sockets are closed.
        """
        others = [rank for place, rank in enumerate(self._ranks) if place != self._rank]
        closed = [self._ranks[place] for place in hung_up]
        ended = waits.ended(others, 0)
        limit = _LAST_QUESTION if ended else _QUESTION  # the store may have ended with the rank that served it
        began = time.monotonic()
        told = self.of_others(limit)
        if not told and time.monotonic() - began < limit:
            told = waits.why_gone(self._ranks, limit)
        # Its sockets close a little before a process has ended.
        if told or (ended := ended or waits.ended(closed or others, _LAST_BREATH)):
            return told or has_ended(ended)
        return f"{format_ranks(closed)} {'have' if len(closed) > 1 else 'has'} died or left" if closed else ""

    def of_different_calls(self, call: str) -> str:
        """Tell the others which ``call`` this rank makes, as theirs are different; return who calls what."""
        calls: dict[str, list[int]] = {call: [self._ranks[self._rank]]}

        def tell_and_read(store: Store) -> None:
            store.set(f"call/{self._rank}", call)
            missing, until = {*range(len(self._ranks))} - {self._rank}, time.monotonic() + _ANSWER
            while missing and time.monotonic() < until:
                for place in [place for place in missing if store.check([f"call/{place}"])]:
                    missing.remove(place)
                    calls.setdefault(store.get(f"call/{place}").decode(), []).append(self._ranks[place])
                time.sleep(0.002)

        ask(self._store, tell_and_read, 2 * _ANSWER)
        who = [(sorted(ranks), what) for what, ranks in calls.items()]
        said = ", ".join(f"{format_ranks(ranks)} call{'s' * (len(ranks) == 1)} {what}" for ranks, what in sorted(who))
        return f"{said}; all ranks must call the same collective with the same arguments, sizes and dtypes"

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
