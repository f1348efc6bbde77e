"""Waits of a job's ranks, published so that errors can name missing ranks and deadlocks are found
at once.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from bagua_ref.base.ranks import describe_ends, format_ranks
from bagua_ref.base.runtime import current_world
from bagua_ref.communicators.processes import Processes
from bagua_ref.communicators.rendezvous import another_connection, ask

__all__ = ["Waiting", "collective_call", "describe_deadlock", "has_ended"]

_collective_call: ContextVar[str] = ContextVar("bagua_ref.collective_call", default="")

_PATIENCE = 5.0
"""Seconds after which a wait is published, or half of its timeout if that is less."""

_EARLY = 1.0
"""Seconds after which a wait is named to ranks that time out, and ends if a rank has given up; a
quarter of its patience if that is less.
"""

_LEFT = "has left"
_HAS_LEFT = [[_LEFT, "", [], 0]]
"""The published waits of a rank that has left."""

_LONGEST = 1000
"""Characters of an exception's text that are reported to the other ranks."""

_LIMIT = 2.0
"""Seconds to wait for the thread that asks the store; after that, the store counts as
unreachable.
"""

_LAST = 5.0
"""Seconds for which a rank that serves the store waits for the others when it ends, so that they
can read why.
"""

_INTERVAL = 1.0
"""Seconds between two checks of the waits."""

_GRACE = 0.3
"""Seconds in which a rank must have received what another one had sent before its process ended."""


@contextmanager
def collective_call(name: str) -> Iterator[None]:
    """Let messages about this thread's waits say that it is in ``name``, a function that all ranks
    call together.
    """
    token = _collective_call.set(name)
    try:
        yield
    finally:
        _collective_call.reset(token)


@dataclass
class _Wait:
    what: str
    place: str
    """The collective: its communicator and number; "" for a wait that only ends when this rank's
    background thread goes on.
    """
    members: Sequence[int]
    interrupt: Callable[[str], None]
    who_gave_up: Callable[[], str]
    is_background: bool
    since: float
    patience: float
    number: int
    """Tells it from other waits of this rank in the same collective, such as a second try."""


class Waiting:
    """The waits of this rank's threads, published while they last longer than five seconds.

    A thread compares them with those of the other ranks. If every rank waits, and no collective has
    all of its members waiting in
    it, that is a deadlock: all waits are interrupted, on every rank. A wait in a collective that
    another rank has given up is interrupted, too. Another thread interrupts waits for a rank whose
    process has ended, unless that rank has left.

    Args:
        store: the job's store.
        rank: this rank.
        world_size: the number of ranks.
        processes: those of the ranks, as far as they can be watched.
    """

    def __init__(self, store: Store, rank: int, world_size: int, processes: Processes) -> None:
        self._rank, self._world_size, self._job_store = rank, world_size, store
        self.processes = processes
        self._waits: dict[int, _Wait] = {}
        self._numbers = itertools.count(1)
        self._foreground: set[int] = set()
        """Threads that have waited on behalf of the user's program."""
        self._lock = threading.Lock()
        self._published: list[Any] = []
        """The waits that this rank last published, which block it."""
        self._is_blocked = False
        """Whether they still stand in the store."""
        self._seen: list[Any] = ["", []]
        """What was last published for ranks that time out: this rank's last operation if it waits
        for nobody, and the waits that have lasted a while.
        """
        self._last_wait = 0.0, math.inf
        """The end of the last wait, and its patience."""
        self._failed: list[list[str]] = []
        """The waits that ended with an error; the other ranks may ask for them a little later."""
        self._store: Store | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextmanager
    def waiting(
        self,
        what: str,
        place: str,
        members: Sequence[int],
        interrupt: Callable[[str], None],
        is_background: bool = False,
        timeout: float = math.inf,
        who_gave_up: Callable[[], str] = lambda: "",
    ) -> Iterator[None]:
        """Register a wait of the calling thread for as long as this context lasts.

        Args:
            what: the words that follow "rank 3 waits " in messages.
            place: the collective that it waits in, named alike on all ranks; "" if it waits for
                this rank's own thread.
            members: the ranks of the collective.
            interrupt: ends the wait, with the reason; called on another thread.
            is_background: whether the calling thread only does what other threads of this rank
                submit.
            timeout: seconds after which the wait ends by itself.
            who_gave_up: returns the ranks that have given up the collective, and why, in words; any
                interrupts the wait. Called on another thread once the wait is long.
        """
        me = threading.get_ident()
        if not is_background and (call := _collective_call.get()):
            what = f"in {call} ({what.removeprefix('in ')})"
        outer = self._waits.get(me)
        patience = min(_PATIENCE, timeout / 2)
        self._waits[me] = _Wait(
            what=what,
            place=place,
            members=members,
            interrupt=interrupt,
            who_gave_up=who_gave_up,
            is_background=is_background,
            since=time.monotonic(),
            patience=patience,
            number=next(self._numbers),
        )
        if not is_background:
            self._foreground.add(me)
        if not self._threads and not self._stop.is_set():
            watches = {"waits": self._watch} | (
                {"processes": self._watch_processes} if self.processes else {}
            )
            self._threads = [
                threading.Thread(target=watch, name=f"bagua_ref watch of {what}", daemon=True)
                for what, watch in watches.items()
            ]
            for thread in self._threads:
                thread.start()
        try:
            yield
        except BaseException:
            self._failed.append([what, place])
            raise
        finally:
            with self._with_store() as reached:
                self._last_wait = time.monotonic(), patience
                if outer is None:
                    del self._waits[me]
                else:
                    self._waits[me] = outer
                if reached and self._is_blocked and not self._stop.is_set():
                    # By this thread and now: the watch may be late, and other ranks would rely on
                    # what it last published.
                    self._publish([])

    def under_way(self) -> list[dict[str, Any]]:
        """Return the waits of this rank's threads: ``for`` (in words), the ``ranks`` in it, and
        ``since`` (monotonic time).
        """
        waits = list(self._waits.values())
        return [
            {"for": wait.what, "ranks": list(wait.members), "since": wait.since} for wait in waits
        ]

    def who_is_missing(
        self, place: str, members: Sequence[int], timeout: float, what: str = "did not come"
    ) -> str:
        """Describe the ``members`` that do not wait in the collective ``place``: their other waits,
        or their last operation.

        This waits until a rank that has come late must have said so.

        Args:
            place: the collective.
            members: its ranks.
            timeout: that of the wait.
            what: the words after "rank 3 ".
        """
        until = time.monotonic() + min(_PATIENCE, timeout / 2) / 2

        def read(store: Store) -> str:
            while True:
                missing: dict[str, list[int]] = {}
                for rank in (rank for rank in members if rank != self._rank):
                    key = f"seen/{rank}"
                    last, seen = json.loads(store.get(key)) if store.check([key]) else ("", [])
                    if place not in [its for _, its in seen]:
                        why = " and ".join(words for words, _ in seen)
                        why = f", waiting {why}" if why else last and f"; last reported: {last}"
                        if self.processes.is_stopped(rank):
                            why += "; its process is stopped"
                        missing.setdefault(why, []).append(rank)
                if not missing or time.monotonic() > until:
                    return "; ".join(
                        f"{format_ranks(ranks)} {what}{why}" for why, ranks in missing.items()
                    )
                time.sleep(_GRACE / 3)

        return ask(self._job_store, read, "")

    def missing_in_background(self, what: str, timeout: float) -> str:
        """Describe the ranks for which this rank's background threads wait, as `who_is_missing`."""
        # A wait that has just failed, as another rank gave up, is gone before its error is reported.
        until = time.monotonic() + min(_PATIENCE, timeout / 2)
        while True:
            waits = [
                wait for wait in self._waits.copy().values() if wait.is_background and wait.place
            ]
            if waits or time.monotonic() > until:
                break
            time.sleep(_GRACE / 3)
        found = (self.who_is_missing(wait.place, wait.members, timeout, what) for wait in waits)
        return "; ".join(filter(None, found))

    def exit_reasons(self, members: Sequence[int], limit: float = 5.0) -> str:
        """Describe the ends of ``members``, or the deadlock; "" if neither is known within
        ``limit`` seconds.
        """

        def read(store: Store) -> str:
            others = [rank for rank in members if rank != self._rank]
            return "; ".join(
                filter(None, [_verdict(store, self._rank, self._published), *_ends(store, others)])
            )

        return ask(self._job_store, read, "", limit)

    def report_exit(self, error: BaseException | None, steps: int | None = None) -> None:
        """Report the end of this rank to the others; may be called while the interpreter ends.

        Args:
            error: the exception that ends it; None: it ends normally.
            steps: its optimizer steps; None: it trained nothing.
        """
        end = json.dumps(
            ["" if error is None else f"{type(error).__name__}: {error}"[:_LONGEST], steps]
        )
        # `ask` would start a thread, which newer Pythons refuse by then
        with self._with_store() as reached:
            if reached:
                (self._store or self._job_store).set(f"left/{self._rank}", end)

    def await_exits(self) -> None:
        """Wait until all ranks have reported their ends, at most five seconds: the store ends with
        this process.
        """
        with self._with_store() as reached:
            if reached:
                keys = [f"left/{rank}" for rank in range(self._world_size)]
                (self._store or self._job_store).wait(keys, timedelta(seconds=_LAST))

    def close(self) -> None:
        """Let the other ranks know that this one has left, and end the thread."""
        self._stop.set()
        with self._with_store() as reached:
            if reached:
                (self._store or self._job_store).set(f"waits/{self._rank}", json.dumps(_HAS_LEFT))
        self.processes.wake()
        for thread in self._threads:
            thread.join(_INTERVAL)
        self.processes.close()

    @contextmanager
    def _with_store(self) -> Iterator[bool]:
        """Hold the lock, if the store can be reached: the watch, which holds it while it asks the
        store, may hang there.
        """
        reached = self._lock.acquire(timeout=_LIMIT)
        try:
            with suppress(RuntimeError):  # the store has ended
                yield reached
        finally:
            if reached:
                self._lock.release()

    def _publish(self, waits: list[Any]) -> None:
        """Publish ``waits``; the caller holds the lock, so that no wait ends between being seen and
        being published.
        """
        if self._store is not None and (waits or self._is_blocked):
            self._store.set(f"waits/{self._rank}", json.dumps(waits))
            self._published, self._is_blocked = waits or self._published, bool(waits)

    def _watch(self) -> None:
        before = None
        # the store ended with the rank that served it, which the collectives notice
        with suppress(RuntimeError):
            self._store = another_connection(self._job_store)
            while not self._stop.wait(
                min([_INTERVAL, *(wait.patience / 4 for wait in list(self._waits.values()))])
            ):
                with self._lock:
                    before, verdict = self._check(before)
                for wait in self._waits.copy().values() if verdict else self._long(True).values():
                    if why := verdict or wait.who_gave_up():
                        wait.interrupt(why)

    def _watch_processes(self) -> None:
        others, ended = set(range(self._world_size)) - {self._rank}, dict[int, float]()
        while not self._stop.is_set():
            for rank in self.processes.ended(others, _GRACE / 3 if ended else math.inf):
                others.remove(rank)
                if not self._has_left(rank):
                    ended[rank] = time.monotonic()
            for wait in list(self._waits.values()):
                dead = ended.keys() & set(wait.members)
                if (
                    dead
                    and time.monotonic() - max(wait.since, *(ended[rank] for rank in dead)) > _GRACE
                ):
                    wait.interrupt(has_ended(dead))

    def _has_left(self, rank: int) -> bool:
        key = f"waits/{rank}"
        return ask(
            self._job_store,
            lambda store: store.check([key]) and json.loads(store.get(key)) == _HAS_LEFT,
            False,
            _GRACE,
        )

    def _check(self, before: list[Any] | None) -> tuple[list[Any], str]:
        """Publish this rank's waits; return those of all ranks and, if they have not changed, their
        deadlock in words.
        """
        assert self._store is not None
        mine = self._blocked()
        self._publish(mine)
        ended, patience = self._last_wait
        seen = [
            "",
            self._failed + [[w.what, w.place] for w in self._long(True).values() if w.place],
        ]
        if not self._waits and time.monotonic() - ended > patience:
            seen[0] = str(next(reversed(current_world().operations), ""))
        if seen != self._seen:
            self._store.set(f"seen/{self._rank}", json.dumps(seen))
            self._seen = seen
        keys = [f"waits/{rank}" for rank in range(self._world_size)] if mine else []
        waits = (
            [json.loads(published) for published in self._store.multi_get(keys)]
            if keys and self._store.check(keys)
            else []
        )
        verdict = _verdict(self._store, self._rank, mine) if mine else ""
        if (
            waits
            and all(waits)
            and waits == before
            and not verdict
            and (deadlock := describe_deadlock(waits))
            # A rank that has been told of an earlier deadlock and has not heard it yet goes on soon.
            and not any(
                its != _HAS_LEFT and _verdict(self._store, rank, its)
                for rank, its in enumerate(waits)
            )
        ):
            verdict = "; ".join([deadlock, *_ends(self._store, range(self._world_size))])
            for rank in range(self._world_size):
                self._store.set(f"verdict/{rank}", json.dumps([waits[rank], verdict]))
        return waits, verdict

    def _long(self, early: bool = False) -> dict[int, _Wait]:
        """Return the waits of this rank's threads that have lasted for long, or for a while."""
        now, waits = time.monotonic(), self._waits.copy()
        a_while = min([_EARLY, *(wait.patience / 4 for wait in waits.values())])
        return {
            ident: wait
            for ident, wait in waits.items()
            if now - wait.since > (a_while if early else wait.patience)
        }

    def _blocked(self) -> list[Any]:
        """Return this rank's waits, as lists that JSON can hold; none if one of its threads may
        still go on.
        """
        alive = {thread.ident for thread in threading.enumerate()}
        long = self._long()
        if not self._foreground & alive <= long.keys() or all(
            wait.is_background for wait in long.values()
        ):
            return []
        if not all(wait.place for wait in long.values()) and not any(
            wait.is_background for wait in long.values()
        ):
            return []  # the background thread is not waiting
        return [[wait.what, wait.place, list(wait.members), wait.number] for wait in long.values()]


def _verdict(store: Store, rank: int, waits: list[Any]) -> str:
    """Return the deadlock that has been found with these waits of ``rank``; "" if none."""
    if not store.check([f"verdict/{rank}"]):
        return ""
    its, verdict = json.loads(store.get(f"verdict/{rank}"))
    return str(verdict) if its == waits else ""


def _ends(store: Store, ranks: Iterable[int]) -> list[str]:
    """Describe the ends that those of ``ranks`` which have ended have reported."""
    ends = {
        rank: json.loads(store.get(key)) for rank in ranks if store.check([key := f"left/{rank}"])
    }
    normal = {rank: steps for rank, (error, steps) in ends.items() if not error}
    reasons = [f"rank {rank} ended with {error}" for rank, (error, _) in ends.items() if error]
    return [*reasons, describe_ends(normal)] if normal else reasons


def has_ended(ranks: Collection[int]) -> str:
    """Describe the end of the processes of ``ranks``.

    >>> has_ended({1})
    'the process of rank 1 has ended'
    >>> has_ended({3, 2})
    'the processes of ranks 2-3 have ended'
    """
    several = len(ranks) > 1
    return (
        f"the process{'es' * several} of {format_ranks(sorted(ranks))}"
        f" {'have' if several else 'has'} ended"
    )


def describe_deadlock(waits: Sequence[Sequence[Any]]) -> str:
    """Describe the waits of all ranks if they are a deadlock, else return "".

    Args:
        waits: those of each rank: a description, the collective, its members, and a number.

    >>> ours = ["in barrier", "all/7", [0, 1], 5]
    >>> describe_deadlock([[ours], [["in allreduce", "module/3", [0, 1], 6]]])
    'deadlock: every rank is waiting for another: rank 0 waits in barrier; rank 1 waits in
    allreduce'
    >>> describe_deadlock([[ours], [ours]])
    ''
    """
    where = [{place for _, place, *_ in mine if place} for mine in waits]
    for mine in waits:
        for _, place, members, _ in mine:
            if place and all(place in where[member] for member in members):
                return ""
    sentences = []
    for rank, mine in enumerate(waits):
        what = [what for what, place, *_ in mine if place] or [_LEFT]
        sentences.append(f"rank {rank} {'' if what == [_LEFT] else 'waits '}{' and '.join(what)}")
    return f"deadlock: every rank is waiting for another: {'; '.join(sentences)}"
