"""Diagnosis of missing ranks: which ranks of a job are waiting, have given up or have ended, and
texts about this in errors (S2.5).

Each rank publishes its waits in the job's store. One thread compares the waits of all ranks, to
detect a deadlock within seconds; another one watches processes on this machine and collectives on
a device.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from bagua_ref.base.ranks import describe_ends, format_ranks
from bagua_ref.base.runtime import current_world, is_background_thread
from bagua_ref.communicators.processes import Processes
from bagua_ref.communicators.rendezvous import (
    another_connection,
    ask,
    first_sentence,
    interruptible,
)
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

T = TypeVar("T")
_collective_call: ContextVar[str] = ContextVar("bagua_ref.collective_call", default="")

_PATIENCE = 5.0
"""Duration in seconds after which a wait can be part of a deadlock, at most half of its timeout."""

_EARLY = 1.0
"""Duration in seconds after which a wait is published, and ends if a rank has given up; at most a
quarter of its patience.
"""

_CONNECTING = 0.5
"""Patience of ranks that are connecting, in seconds: they may wait inside a library that cannot be
interrupted.
"""

_HAS_LEFT = [True, [], {}, ""]
"""Record published by a rank that has left."""

_LONGEST = 1000
"""Maximum length of an exception's text as reported to other ranks."""

_LIMIT = 2.0
"""Seconds to wait for the thread that uses the store; after that, the store counts as
unreachable.
"""

_LAST = 5.0
"""Seconds that a rank which serves the store waits for the others at its end, so that they can read
the reason.
"""

_INTERVAL = 1.0
"""Seconds between two checks of the waits."""

_GRACE = 0.3
"""Seconds within which a rank must have received the last messages of a process that ended."""

_TICK = 0.1
"""Polling interval, in seconds, of device work, and of processes once some have ended."""

_REPLY = 5.0
"""Seconds to wait for the store's reply after a rank has left."""

_SHORT_REPLY = 0.5
"""Seconds to wait for the store's reply if the process that ended may have served it."""

_EXIT_DELAY = 0.2
"""Seconds between the closing of a rank's sockets and the end of its process."""

_GROUPS = 100
"""Number of groups, newest first, whose passed collectives are published."""

_COMPARING = 3.0
"""Seconds for ranks with different calls to exchange their calls."""


@contextmanager
def collective_call(name: str) -> Iterator[None]:
    """Context in which messages about this thread's waits name the collective function ``name``."""
    token = _collective_call.set(name)
    try:
        yield
    finally:
        _collective_call.reset(token)


def title(group: str, rank: int, members: Sequence[int]) -> str:
    """Describe ``rank`` as one of the ``members`` of ``group``; all are global ranks."""
    return f"rank {rank} in group {group!r} of {format_ranks(members)}"


_numbers = itertools.count(1)


@dataclass(eq=False)
class _Wait:
    what: str
    place: str
    members: Sequence[int]
    interrupt: Callable[..., None]
    is_background: bool
    timeout: float
    work: Any = None
    """Device work that no thread waits for; None if a thread waits."""
    since: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=_numbers.__next__)
    """Distinguishes this rank's waits in the same collective, such as a second attempt."""

    @property
    def patience(self) -> float:
        return min(_PATIENCE, self.timeout / 2)

    @property
    def group(self) -> str:
        return self.place.rpartition("/")[0]

    def lasts(self, seconds: float) -> bool:
        return time.monotonic() - self.since > seconds


class Peers:
    """One rank's knowledge of all ranks of its job: their waits, failures and ends.

    A deadlock means that every rank is waiting, but no collective has all of its members waiting in
    it; then all waits are interrupted, on every rank. A wait is also interrupted if another rank
    has given up the group, or if the process of an awaited rank has ended, unless that rank has
    reported its end.

    Each rank publishes a record of its waits once they have lasted a while: whether all of its
    threads are waiting, the waits, the collectives that it has passed, and its last operation if it
    is not waiting. During normal training, nothing is published.

    A collective's place is ``group/number``; a place without a number comes only once.

    Args:
        store: the job's store.
        rank: this rank.
        world_size: the number of ranks.
        processes: watcher of the ranks' processes, as far as they can be watched.
    """

    def __init__(self, store: Store, rank: int, world_size: int, processes: Processes) -> None:
        self._rank, self._world_size, self.processes = rank, world_size, processes
        self._store = another_connection(store)  # in which no request waits for another rank
        self._waits: dict[int, _Wait] = {}
        self._works: list[_Wait] = []
        self._foreground: set[int] = set()
        """Threads that have waited on behalf of the user's program."""
        self._lock = threading.Lock()
        self._record: list[Any] = []
        """The published record."""
        self._blocked: list[Any] = []
        """The compared part of the last record in which all threads were waiting."""
        self._passed: dict[str, float] = {}
        """Number of the last collective that has ended, by the stem of its place; infinite after a
        failure, when the group is not used again.
        """
        self._last_wait = 0.0, math.inf
        """End time of the last wait, and its patience."""
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._has_works = False
        """Whether there was any device work, so that a thread must poll it."""

    # Waits, of threads and of works on a device.

    @contextmanager
    def waiting(
        self,
        what: str,
        place: str,
        members: Sequence[int],
        interrupt: Callable[[str], None],
        is_background: bool = False,
        timeout: float = math.inf,
    ) -> Iterator[None]:
        """Context that registers a wait of the calling thread.

        Args:
            what: the words that follow "rank 3 waits " in messages.
            place: the collective in which it waits, with the same name on all ranks; "" for a wait
                for this rank's own thread.
            members: the ranks of the collective.
            interrupt: function that ends the wait, given the reason; called on another thread.
            is_background: whether the calling thread only runs tasks submitted by other threads of
                this rank.
            timeout: seconds after which the wait ends by itself.
        """
        me = threading.get_ident()
        if not is_background:
            self._foreground.add(me)
            if call := _collective_call.get():
                what = f"in {call} ({what.removeprefix('in ')})"
        outer = self._waits.get(me)
        wait = self._waits[me] = _Wait(what, place, members, interrupt, is_background, timeout)
        self._start()
        try:
            yield
            self._pass(place)
        except BaseException:
            if place:
                self._passed[_split(place)[0]] = math.inf
            raise
        finally:
            with self._with_store() as reached:
                self._last_wait = time.monotonic(), wait.patience
                if outer is None:
                    del self._waits[me]
                else:
                    self._waits[me] = outer
                if reached and self._record[:1] == [True]:
                    # By this thread and now: the watch may be late, and other ranks would rely on
                    # what it last published.
                    self._publish()

    def watch_work(
        self,
        work: Any,
        what: str,
        place: str,
        members: Sequence[int],
        interrupt: Callable[..., None],
        timeout: float,
    ) -> None:
        """Register a wait, like `waiting`, for work on a device until it is completed; no thread
        waits for it.

        After ``timeout`` seconds, the work is interrupted with a message about the missing ranks.
        Works are checked in the order in which they were added.
        """
        self._works.append(_Wait(what, place, members, interrupt, True, timeout, work))
        self._start()
        if not (
            self._has_works or self._stop.is_set()
        ):  # waking the thread in each step would take a training longer
            self._has_works = True
            self.processes.wake()

    def under_way(self) -> list[dict[str, Any]]:
        """Return the current waits of this rank's threads: ``for`` (a description), the ``ranks``
        involved, and ``since`` (monotonic time).
        """
        waits = list(self._waits.values())
        return [
            {"for": wait.what, "ranks": list(wait.members), "since": wait.since} for wait in waits
        ]

    def meet(self, group: str, members: Sequence[int], timeout: float, make: Callable[[], T]) -> T:
        """Wait until all ``members`` of ``group`` have called this, then return ``make()``, in
        which they connect to each other.

        Raises:
            CommunicationTimeoutError: members did not arrive in time; the message names them.
            CommunicationError: ``make`` failed, which is reported to the others, or the wait was
                interrupted.
        """
        who, keys = title(group, self._rank, members), {r: f"here/{group}/{r}" for r in members}
        reasons, given_up, place = list[str](), threading.Event(), f"{group}/come"
        deadline = time.monotonic() + timeout

        def come() -> None:
            pause = 0.001
            self._store.set(keys[self._rank], "")
            while not self._store.check(list(keys.values())) and not given_up.wait(pause):
                pause = min(1.5 * pause, 0.1)

        def check() -> None:
            if reasons:
                raise CommunicationError(f"connect on {who}: {reasons[0]}")
            if place.endswith("come") and time.monotonic() > deadline:
                missing: list[int] = self._ask(
                    lambda store: [rank for rank in members if not store.check([keys[rank]])], []
                )
                why = "the job's store does not answer"
                if missing:
                    why = self.who_is_missing(place, missing, timeout)
                raise CommunicationTimeoutError(
                    f"connect on {who}: timed out after {timeout:g} s; {why}"
                )

        def wait(function: Callable[[], Any]) -> Any:
            what, limit = f"in connect of group {group!r}", min(timeout, 2 * _CONNECTING)
            with self.waiting(what, place, members, reasons.append, is_background_thread(), limit):
                return interruptible(function, check, min(0.2, timeout))

        try:
            wait(come)
            place = f"{group}/connect"
            made: T = wait(make)
            return made
        except BaseException as error:
            if place.endswith("come"):
                given_up.set()
                # Otherwise a later rank would wait for this one inside the library.
                self._ask(lambda store: store.delete_key(keys[self._rank]), False)
            if isinstance(error, CommunicationError) or not isinstance(error, RuntimeError):
                raise
            # This rank may be out of descriptors; the others wait inside the library.
            self.give_up(group, first_sentence(error))
            raise self.failure("connect", group, members, place, error, timeout) from None

    # Errors.

    def failure(
        self,
        collective: str,
        group: str,
        members: Sequence[int],
        place: str,
        error: Exception,
        timeout: float,
        hung_up: Collection[int] = (),
    ) -> CommunicationError:
        """Return the exception for a collective that failed with a library's ``error``; report a
        timeout to the other ranks.

        Args:
            collective: name of the collective.
            group: the communicator's name.
            members: the ranks of the communicator.
            place: place of the collective.
            error: exception of the library.
            timeout: seconds without progress after which it fails.
            hung_up: the ranks whose sockets are closed.
        """
        why, who = first_sentence(error), title(group, self._rank, members)
        if re.search(r"time(d )?out", why, re.IGNORECASE):
            # this rank still waits: its background thread may be here, and its training thread asks
            # what that waits for
            what, background = f"in {collective} of group {group!r}", is_background_thread()
            with self.waiting(what, place, members, lambda _: None, background, timeout):
                missing = (
                    self.who_is_missing(place, members, timeout)
                    or "all ranks have come to it, but not all data arrived"
                )
            self.give_up(group, f"{collective} timed out after {timeout:g} s; {missing}")
            return CommunicationTimeoutError(
                f"{collective} on {who}: timed out after {timeout:g} s; {missing} ({why})"
            )
        reason = (
            self._why_ended(group, [rank for rank in members if rank != self._rank], hung_up)
            or f"this rank failed, or another one has died or left ({why})"
        )
        return CommunicationError(f"{collective} on {who} failed; {reason}")

    def give_up(self, group: str, why: str) -> None:
        """Publish the reason ``why`` this rank gives up ``group``; only the first rank's reason is
        kept.
        """
        report = f"rank {self._rank} gave up: {why}"
        self._ask(lambda store: store.compare_set(f"gave up/{group}", "", report), b"")

    def _who_gave_up(self, group: str) -> str:
        """Return another rank's report of giving up ``group``; "" if there is none."""
        if not self._store.check([key := f"gave up/{group}"]):
            return ""
        report = self._store.get(key).decode()
        return "" if report.startswith(f"rank {self._rank} ") else report

    def different_calls(self, group: str, members: Sequence[int], call: str) -> str:
        """Publish this rank's ``call``, which differs from others; return a sentence that lists the
        calls of all ranks.
        """
        calls: dict[str, list[int]] = {call: [self._rank]}
        keys = {rank: f"call/{group}/{rank}" for rank in members}

        def publish_and_read(store: Store) -> None:
            store.set(keys.pop(self._rank), call)
            until = time.monotonic() + _COMPARING
            while keys and time.monotonic() < until:
                for rank in [rank for rank, key in keys.items() if store.check([key])]:
                    theirs = store.get(keys.pop(rank)).decode()
                    calls.setdefault(theirs, []).append(rank)
                time.sleep(0.002)

        self._ask(publish_and_read, None, 2 * _COMPARING)
        calling = ", ".join(
            f"{format_ranks(ranks)} call{'s' * (len(ranks) == 1)} {what}"
            for ranks, what in sorted((sorted(ranks), what) for what, ranks in calls.items())
        )
        why = keys and self._why_ended(group, list(keys), ())
        return (
            f"in group {group!r} {calling}; all ranks must call the same collective with the same"
            " arguments, sizes and dtypes" + (f"; {why}" if why else "")
        )

    def who_is_missing(
        self, place: str, members: Sequence[int], timeout: float, what: str = "did not come"
    ) -> str:
        """Describe the ``members`` that are not waiting in the collective ``place``: their other
        waits, or their last operation.

        This waits long enough for ranks that arrived late to publish it.

        Args:
            place: the collective.
            members: the ranks of the collective.
            timeout: timeout of the wait.
            what: the words after "rank 3 ".
        """
        until = time.monotonic() + min(_PATIENCE, timeout / 2) / 2
        stem, number = _split(place)

        def read(store: Store) -> str:
            while True:
                missing: dict[str, list[int]] = {}
                for rank in (rank for rank in members if rank != self._rank):
                    key = f"waits/{rank}"
                    record = json.loads(store.get(key)) if store.check([key]) else []
                    _, waits, passed, last = record or [False, [], {}, ""]
                    if passed.get(stem, -1) < number and place not in [its for _, its, *_ in waits]:
                        why = " and ".join(words for words, *_ in waits)
                        why = f", waiting {why}" if why else last and f"; last reported: {last}"
                        if self.processes.is_stopped(rank):
                            why += "; its process is stopped"
                        missing.setdefault(why, []).append(rank)
                if not missing or time.monotonic() > until:
                    return "; ".join(
                        f"{format_ranks(ranks)} {what}{why}" for why, ranks in missing.items()
                    )
                time.sleep(_TICK)

        return self._ask(read, "")

    def missing_in_background(self, what: str, timeout: float) -> str:
        """Describe the ranks that this rank's background threads are waiting for; see
        `who_is_missing`.
        """
        # A wait that has just failed, as another rank gave up, is gone before its error is reported.
        until = time.monotonic() + min(_PATIENCE, timeout / 2)
        while True:
            waits = [
                wait for wait in self._waits.copy().values() if wait.is_background and wait.place
            ]
            if waits or time.monotonic() > until:
                break
            time.sleep(_TICK)
        found = (self.who_is_missing(wait.place, wait.members, timeout, what) for wait in waits)
        return "; ".join(filter(None, found))

    def _why_ended(self, group: str, others: Sequence[int], hung_up: Collection[int]) -> str:
        """Return the reason why a connection to the ``others`` in ``group`` has ended; "" if
        unknown.
        """

        def read(store: Store) -> str:
            return self._who_gave_up(group) or "; ".join(
                filter(None, [self._deadlock()[1], *_ends(store, others)])
            )

        # sockets close a little before a last report is in the store and the process has ended;
        # longer on a busy machine, but there it is known of processes whether they have ended
        suspects = hung_up or others
        watched = self.processes.are_watched(suspects)
        until = time.monotonic() + (_LIMIT if watched else _EXIT_DELAY)
        while True:
            ended = self.processes.ended(others)
            # the store may have ended with the rank that served it
            reported = self._ask(read, "", _SHORT_REPLY if ended else _REPLY)
            if reported or ended or time.monotonic() > until:
                break
            self.processes.ended(suspects, _TICK / 2)
        if reported or ended:
            return reported or has_ended(ended)
        closed = sorted(hung_up)
        have = "have" if len(closed) > 1 else "has"
        return f"{format_ranks(closed)} {have} died or left" if closed else ""

    # The end of this rank.

    def leave(self, error: BaseException | None = None, steps: int | None = None) -> None:
        """Report the end of this rank to the others, and stop the threads; can be called while the
        interpreter is shutting down.

        Args:
            error: the exception that ends the rank; None: a normal end.
            steps: number of optimizer steps; None: the rank trained nothing.
        """
        end = "" if error is None else f"{type(error).__name__}: {error}"[:_LONGEST]
        self._stop.set()
        # `ask` would start a thread, which newer Pythons refuse by then
        with self._with_store() as reached:
            if reached:
                self._store.set(f"left/{self._rank}", json.dumps([end, steps]))
                self._store.set(f"waits/{self._rank}", json.dumps(_HAS_LEFT))
        self.processes.wake()
        for thread in self._threads:
            thread.join(_LIMIT)
        self.processes.close()

    def await_exits(self) -> None:
        """Wait until all ranks have reported their ends, for at most five seconds, since the store
        ends with this process.
        """
        with self._with_store() as reached:
            if reached:
                keys = [f"left/{rank}" for rank in range(self._world_size)]
                self._store.wait(keys, timedelta(seconds=_LAST))

    # The threads.

    def _start(self) -> None:
        if not self._threads and not self._stop.is_set():
            self._threads = [
                threading.Thread(target=watch, name=f"bagua_ref watch of {what}", daemon=True)
                for what, watch in (("waits", self._watch), ("processes", self._watch_here))
            ]
            for thread in self._threads:
                thread.start()

    def _ask(self, use: Callable[[Store], T], otherwise: T, limit: float = _REPLY) -> T:
        return ask(self._store, use, otherwise, limit, anew=False)

    @contextmanager
    def _with_store(self) -> Iterator[bool]:
        """Acquire the lock for using the store; yield False if the watch thread, which may hang in
        a request, does not release it in time.
        """
        reached = self._lock.acquire(timeout=_LIMIT)
        try:
            with suppress(RuntimeError):  # the store has ended
                yield reached
        finally:
            if reached:
                self._lock.release()

    def _pass(self, place: str) -> None:
        stem, number = _split(place)
        if number < math.inf:
            self._passed[stem] = number

    def _publish(self) -> None:
        """Publish this rank's record; the caller holds the lock, so that no wait can end between
        being read and being published.
        """
        waits = [[w.what, w.place, list(w.members), w.number] for w in self._early() if w.place]
        (ended, patience), last = self._last_wait, ""
        if not self._waits and time.monotonic() - ended > patience:
            last = str(next(reversed(current_world().operations), "")) + _handled()
        for stem in list(self._passed)[:-_GROUPS]:
            del self._passed[stem]
        record: list[Any] = []
        if waits or last or math.inf in self._passed.values():
            record = [self._is_blocked(), waits, self._passed.copy(), last]
        if record != self._record and not self._stop.is_set():
            self._store.set(f"waits/{self._rank}", json.dumps(record))
            self._record = record
            if record[:1] == [True]:
                self._blocked = record[:2]

    def _is_blocked(self) -> bool:
        """Return whether all threads of this rank have been waiting for long, so that none may make
        progress.
        """
        alive = {thread.ident for thread in threading.enumerate()}
        long = {me: wait for me, wait in self._waits.copy().items() if wait.lasts(wait.patience)}
        in_background = [wait.is_background for wait in long.values()]
        return (
            self._foreground & alive <= long.keys()
            and not all(in_background)
            # the background thread, for which another one waits, does, too
            and (any(in_background) or all(wait.place for wait in long.values()))
        )

    def _watch(self) -> None:
        before: list[Any] = []
        # the store ended with the rank that served it, which the collectives notice
        with suppress(RuntimeError):
            while not self._stop.wait(min([_INTERVAL, *(w.patience / 4 for w in self._all())])):
                with self._lock:
                    self._publish()
                    before, verdict = self._find_deadlock(before)
                for wait in self._waits.copy().values() if verdict else self._early():
                    if why := verdict or (wait.place and self._who_gave_up(wait.group)):
                        self._interrupt(wait, why)

    def _find_deadlock(self, before: list[Any]) -> tuple[list[Any], str]:
        """Return the records of all ranks, if this rank is blocked, and a description of the
        deadlock, if they equal the records ``before``.
        """
        keys = [f"waits/{rank}" for rank in range(self._world_size)]
        if self._record[:1] != [True] or not self._store.check(keys):
            return [], ""
        records = [json.loads(text)[:2] for text in self._store.multi_get(keys)]
        told, verdict = self._deadlock()
        if (
            not verdict
            and records == before
            and all(record[:1] == [True] for record in records)
            and (found := describe_deadlock([waits for _, waits in records]))
            # A rank that has been told of an earlier deadlock and has not heard it yet goes on soon.
            and not any(
                old == new != _HAS_LEFT[:2] for old, new in zip(told, records, strict=False)
            )
        ):
            verdict = "; ".join([found, *_ends(self._store, range(self._world_size))])
            self._store.set("deadlock", json.dumps([records, verdict]))
        return records, verdict

    def _deadlock(self) -> tuple[list[Any], str]:
        """Return the records of all ranks at the last deadlock, and its description if this rank is
        part of it; empty if there was none.
        """
        if not self._store.check(["deadlock"]):
            return [], ""
        records, words = json.loads(self._store.get("deadlock"))
        return records, words if records[self._rank] == self._blocked else ""

    def _watch_here(self) -> None:
        others, ended = set(range(self._world_size)) - {self._rank}, dict[int, float]()
        while not self._stop.is_set():
            pause = _TICK if ended or self._has_works else math.inf
            for rank in self.processes.ended(others, pause):
                others.remove(rank)
                left = [f"left/{rank}"]
                if not self._ask(lambda store, left=left: store.check(left), False, _GRACE):  # type: ignore[misc]
                    ended[rank] = time.monotonic()
            self._forget_works()
            self._interrupt_waits(ended)

    def _forget_works(self) -> None:
        """Remove pending work that is done; a function of its own, as its variables keep work alive."""
        # Works mostly end in order, and asking one costs a training time: those after the first
        # that is under way are not asked.
        for wait in itertools.takewhile(lambda wait: _is_done(wait.work), self._works.copy()):
            self._works.remove(wait)
            self._pass(wait.place)

    def _interrupt_waits(self, ended: Mapping[int, float]) -> None:
        """Interrupt waits for dead ranks, and late device work.

        Args:
            ended: the time at which each dead rank's process ended.
        """
        now = time.monotonic()
        for wait in self._all():
            dead = ended.keys() & set(wait.members)
            if dead and now - max(wait.since, *(ended[rank] for rank in dead)) > _GRACE:
                self._interrupt(wait, has_ended(dead))
            elif wait.work is not None and wait.lasts(wait.timeout) and not _is_done(wait.work):
                # those who have passed do not wait in it either
                what = "may not have come"
                who = self.who_is_missing(wait.place, wait.members, wait.timeout, what)
                late = f"{wait.what} timed out after {wait.timeout:g} s" + (who and f"; {who}")
                self._interrupt(wait, late, CommunicationTimeoutError)

    def _interrupt(self, wait: _Wait, *why: Any) -> None:
        if wait.work is None:
            wait.interrupt(*why)
        elif wait in self._works:
            self._works.remove(wait)
            # the connection has gone, or its library fails to abort what has failed
            with suppress(ReferenceError, RuntimeError):
                wait.interrupt(*why)

    def _all(self) -> list[_Wait]:
        return [*self._waits.copy().values(), *self._works.copy()]

    def _early(self) -> list[_Wait]:
        """Return the waits that have lasted long enough to be published."""
        waits = self._all()
        a_while = min([_EARLY, *(wait.patience / 4 for wait in waits)])
        return [wait for wait in waits if wait.lasts(a_while)]


def _split(place: str) -> tuple[str, float]:
    """Split a collective's place into its stem and number; infinity if it has none."""
    stem = place.rstrip("0123456789")
    return stem, int(place[len(stem) :]) if stem != place else math.inf


def _handled() -> str:
    """Describe the exception that the main thread is handling, such as Ctrl-C between two steps; ""
    if there is none. A program may stay in a handler for long.
    """
    found = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    return "" if error is None else f", while it handles {type(error).__name__}"


def _is_done(work: Any) -> bool:
    """Return whether ``work`` is completed; failed work never is, so that it times out."""
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False


def _ends(store: Store, ranks: Iterable[int]) -> list[str]:
    """Describe the reported ends of those ``ranks`` that have ended."""
    ends = {
        rank: json.loads(store.get(key)) for rank in ranks if store.check([key := f"left/{rank}"])
    }
    normal = {rank: steps for rank, (error, steps) in ends.items() if not error}
    reasons = [f"rank {rank} ended with {error}" for rank, (error, _) in ends.items() if error]
    return [*reasons, describe_ends(normal)] if normal else reasons


def has_ended(ranks: Collection[int]) -> str:
    """Describe in words that the processes of ``ranks`` have ended.

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
    """Describe the waits of all ranks if they form a deadlock, else return "".

    Args:
        waits: the waits of each rank, each with a description, the collective, its members, and a
            number.

    >>> ours = ["in barrier", "all/7", [0, 1], 5]
    >>> describe_deadlock([[ours], [["in allreduce", "module/3", [0, 1], 6]]])
    'deadlock: every rank is waiting for another: rank 0 waits in barrier; rank 1 waits in
    allreduce'
    >>> describe_deadlock([[ours], [ours]])
    ''
    """
    where = [{place for _, place, *_ in mine} for mine in waits]
    for mine in waits:
        for _, place, members, _ in mine:
            if all(place in where[member] for member in members):
                return ""
    sentences = []
    for rank, mine in enumerate(waits):
        what = " and ".join(what for what, *_ in mine)
        sentences.append(f"rank {rank} waits {what}" if what else f"rank {rank} has left")
    return f"deadlock: every rank is waiting for another: {'; '.join(sentences)}"
