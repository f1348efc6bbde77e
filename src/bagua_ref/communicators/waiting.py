"""What the ranks of a job wait for, so that ranks that wait for each other learn at once that none can go on."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bagua_ref.communicators.rendezvous import another_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._C._distributed_c10d import Store

__all__ = ["Waiting", "nobody_can_go_on"]

_PATIENCE = 5.0
"""Seconds after which a wait is published."""

_LEFT = "has left"

_GLANCE = 1.0
"""Seconds between two looks at the waits."""


@dataclass
class _Wait:
    what: str
    place: str
    """The collective: its communicator and number; "" for a wait that only ends when this rank's background thread goes on."""
    members: Sequence[int]
    interrupt: Callable[[str], None]
    is_background: bool
    since: float


class Waiting:
    """The waits of this rank's threads, published while they last longer than five seconds.

    A thread compares them with those of the other ranks. If every rank waits, and no collective has all of its members waiting in
    it, nobody can ever go on: all waits are interrupted, on every rank.

    Args:
        store: the job's store.
        rank: this rank.
        world_size: the number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._rank, self._world_size, self._job_store = rank, world_size, store
        self._waits: dict[int, _Wait] = {}
        self._foreground: set[int] = set()
        """Threads that have waited on behalf of the user's program."""
        self._lock = threading.Lock()
        self._published = False
        self._store: Store | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(
        self, what: str, place: str, members: Sequence[int], interrupt: Callable[[str], None], is_background: bool = False
    ) -> Iterator[None]:
        """Register a wait of the calling thread for as long as this context lasts.

        Args:
            what: its object in messages: "rank 3 waits " and this.
            place: the collective that it waits in, named alike on all ranks; "" if it waits for this rank's own thread.
            members: the ranks of the collective.
            interrupt: ends the wait, with the reason; called on another thread.
            is_background: whether the calling thread only does what other threads of this rank submit.
        """
        me = threading.get_ident()
        outer = self._waits.get(me)
        self._waits[me] = _Wait(what, place, members, interrupt, is_background, time.monotonic())
        if not is_background:
            self._foreground.add(me)
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._watch, name="bagua_ref watch of waits", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            if outer is None:
                del self._waits[me]
            else:
                self._waits[me] = outer
            if self._published and not self._stop.is_set():
                # By this thread and now: the other one may not run for long, and meanwhile other ranks would believe what it said.
                with suppress(RuntimeError):
                    self._publish([])

    def close(self) -> None:
        """Let the other ranks know that this one has left, and end the thread."""
        self._stop.set()
        with suppress(RuntimeError):
            self._publish([[_LEFT, "", []]])
        if self._thread is not None:
            self._thread.join(_GLANCE)

    def _publish(self, waits: list[Any]) -> None:
        with self._lock:
            if self._store is not None and (waits or self._published):
                self._store.set(f"waits/{self._rank}", json.dumps(waits))
                self._published = bool(waits)

    def _watch(self) -> None:
        seen = None
        with suppress(RuntimeError):  # the store is gone with the rank that served it, which the collectives notice
            self._store = another_connection(self._job_store)
            while not self._stop.wait(_GLANCE):
                mine = self._blocked()
                self._publish(mine)
                said = self._said() if mine else []
                verdict = self._verdict(mine) if mine else ""
                if said and said == seen and not verdict:
                    verdict = nobody_can_go_on(said)
                    for rank in range(self._world_size) if verdict else ():
                        self._store.set(f"verdict/{rank}", json.dumps([said[rank], verdict]))
                if verdict:
                    for wait in list(self._waits.values()):
                        wait.interrupt(verdict)
                seen = said

    def _blocked(self) -> list[Any]:
        """Return what this rank waits for, as lists that JSON can hold; none if one of its threads may still go on."""
        alive = {thread.ident for thread in threading.enumerate()}
        now = time.monotonic()
        long = {ident: wait for ident, wait in list(self._waits.items()) if now - wait.since > _PATIENCE}
        if not self._foreground & alive <= long.keys() or all(wait.is_background for wait in long.values()):
            return []
        if not all(wait.place for wait in long.values()) and not any(wait.is_background for wait in long.values()):
            return []  # the background thread is not waiting
        return [[wait.what, wait.place, list(wait.members)] for wait in long.values()]

    def _said(self) -> list[Any]:
        """Return every rank's waits; none if a rank waits for nothing."""
        assert self._store is not None
        said = []
        for rank in range(self._world_size):
            if not self._store.check([f"waits/{rank}"]):
                return []
            said.append(json.loads(self._store.get(f"waits/{rank}")))
            if not said[-1]:
                return []
        return said

    def _verdict(self, mine: list[Any]) -> str:
        """Return what another rank has found about these waits of mine."""
        assert self._store is not None
        if not self._store.check([f"verdict/{self._rank}"]):
            return ""
        waits, verdict = json.loads(self._store.get(f"verdict/{self._rank}"))
        return str(verdict) if waits == mine else ""


def nobody_can_go_on(waits: Sequence[Sequence[Any]]) -> str:
    """Return who waits for what if no rank can ever go on, else "".

    Args:
        waits: of each rank: what it waits for, in which collective, and the members of that.

    >>> nobody_can_go_on([[["in barrier", "all/7", [0, 1]]], [["in allreduce", "module/3", [0, 1]]]])
    'the ranks wait for each other and none can go on: rank 0 waits in barrier; rank 1 waits in allreduce'
    >>> nobody_can_go_on([[["in barrier", "all/7", [0, 1]]], [["in barrier", "all/7", [0, 1]]]])
    ''
    """
    where = [{place for _, place, _ in mine if place} for mine in waits]
    for mine in waits:
        for _, place, members in mine:
            if place and all(place in where[member] for member in members):
                return ""
    sentences = []
    for rank, mine in enumerate(waits):
        what = [what for what, place, _ in mine if place] or [_LEFT]
        sentences.append(f"rank {rank} {'' if what == [_LEFT] else 'waits '}{' and '.join(what)}")
    return f"the ranks wait for each other and none can go on: {'; '.join(sentences)}"
