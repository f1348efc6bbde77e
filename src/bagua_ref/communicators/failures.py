"""Failures of connections: reports of ranks that gave one up, and deadlines of collectives on a
device (S2.5).
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_ref.base.ranks import format_ranks
from bagua_ref.communicators.rendezvous import (
    Prefixed,
    address_of,
    another_connection,
    ask,
    first_sentence,
)
from bagua_ref.communicators.waiting import Waiting, has_ended
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

__all__ = ["FailureReports", "Watchdog", "connecting"]

_ANYBODY = "gave up"
"""A key that exists once any rank has reported a failure: one request to the store instead of one
per rank.
"""
_REPLY = 5.0
"""Seconds to wait for the store when a rank has left."""
_SHORT_REPLY = 0.5
"""Seconds to wait for the store when a process has ended that may have served it."""
_EXIT_DELAY = 0.2
"""Seconds between the end of a rank's sockets and that of its process."""
_COMPARING = 3.0
"""Seconds in which ranks whose calls differ exchange them."""


class FailureReports:
    """Reports of ranks of one communicator that gave it up, with their reasons.

    Args:
        store: a store of these ranks only.
        ranks: their global ranks, for messages.
        rank: the place of this process among them.
    """

    def __init__(self, store: Store, ranks: Sequence[int], rank: int) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self._own_connection: Store | None = None

    def report(self, why: str, anew: bool = True) -> None:
        """Publish the reason ``why`` this rank gives up; without ``anew``, over the existing
        connection to the store.
        """

        def write(store: Store) -> None:
            store.set(f"gave up/{self._rank}", why)
            store.set(_ANYBODY, "")

        ask(self._store, write, None, anew=anew)

    def reason_for_end(self, waits: Waiting, hung_up: Sequence[int]) -> str:
        """Return the reason for the end of a connection, "" if it is unknown.

        Args:
            waits: the job's.
            hung_up: places of the ranks whose sockets are closed.
        """
        others = [rank for place, rank in enumerate(self._ranks) if place != self._rank]
        closed = [self._ranks[place] for place in hung_up]
        ended = waits.processes.ended(others, 0)
        # the store may have ended with the rank that served it
        limit = _SHORT_REPLY if ended else _REPLY
        began = time.monotonic()
        reported = ask(self._store, self._read, "", limit)
        if not reported and time.monotonic() - began < limit:
            reported = waits.exit_reasons(self._ranks, limit)
        # sockets close a little before a last report is in the store and the process has ended
        if not reported and not ended:
            ended = waits.processes.ended(closed or others, _EXIT_DELAY)
            reported = waits.exit_reasons(self._ranks, _SHORT_REPLY)
        if reported or ended:
            return reported or has_ended(ended)
        return (
            f"{format_ranks(closed)} {'have' if len(closed) > 1 else 'has'} died or left"
            if closed
            else ""
        )

    def describe_mismatch(self, call: str) -> str:
        """Publish this rank's ``call``, from which others differ; return a sentence that lists all
        ranks' calls.
        """
        calls: dict[str, list[int]] = {call: [self._ranks[self._rank]]}

        def publish_and_read(store: Store) -> None:
            store.set(f"call/{self._rank}", call)
            missing, until = (
                {*range(len(self._ranks))} - {self._rank},
                time.monotonic() + _COMPARING,
            )
            while missing and time.monotonic() < until:
                for place in [place for place in missing if store.check([f"call/{place}"])]:
                    missing.remove(place)
                    calls.setdefault(store.get(f"call/{place}").decode(), []).append(
                        self._ranks[place]
                    )
                time.sleep(0.002)

        ask(self._store, publish_and_read, None, 2 * _COMPARING)
        who = [(sorted(ranks), what) for what, ranks in calls.items()]
        calling = ", ".join(
            f"{format_ranks(ranks)} call{'s' * (len(ranks) == 1)} {what}"
            for ranks, what in sorted(who)
        )
        return (
            f"{calling}; all ranks must call the same collective with the same arguments, sizes and"
            " dtypes"
        )

    def poll(self) -> str:
        """Return the other ranks' reports, for a thread that asks repeatedly and may wait for the
        store.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        if self._own_connection is None:
            self._own_connection = another_connection(self._store)
        return self._read(self._own_connection)

    def _read(self, store: Store) -> str:
        """Return the other ranks' reports; "" if there is none."""
        reports: dict[int, str] = {}
        for place, rank in enumerate(self._ranks) if store.check([_ANYBODY]) else ():
            if place != self._rank and store.check([f"gave up/{place}"]):
                reports[rank] = store.get(f"gave up/{place}").decode()
        # the others followed
        first = {rank: why for rank, why in reports.items() if "gave up" not in why}
        return "; ".join(f"rank {rank} gave up: {why}" for rank, why in (first or reports).items())


class _OtherFailed(RuntimeError):  # noqa: N818  it is never raised to a user
    """Another rank cannot connect."""


@contextmanager
def connecting(
    store: Store, rank: int, world_size: int, ended: Callable[[list[int], float], Collection[int]]
) -> Iterator[Callable[[], None]]:
    """Let all ranks make torch's default group inside; if that fails, name the ranks that have not
    begun.

    Yields a function that raises RuntimeError if another rank has reported a failure in the store,
    or has ``ended``.

    Raises:
        CommunicationTimeoutError: they did not come in time.
        CommunicationError: it failed otherwise; there is no default group then.
    """
    began, reports = (
        time.monotonic(),
        FailureReports(Prefixed("connecting", store), range(world_size), rank),
    )

    def check() -> None:
        if dead := ended([other for other in range(world_size) if other != rank], 0):
            raise _OtherFailed(f"the process of {format_ranks(sorted(dead))} has ended")
        if reported := reports.poll():
            raise _OtherFailed(reported)

    try:
        store.set(f"connecting{rank}", "")
        yield check
    except RuntimeError as error:
        waited = time.monotonic() - began
        if dist.is_initialized():
            dist.destroy_process_group()
        missing, why = list[int](), first_sentence(error)
        if not isinstance(error, _OtherFailed):  # or gloo still uses the store
            reports.report(why, anew=False)
            begun = lambda store: [  # noqa: E731
                r for r in range(world_size) if not store.check([f"connecting{r}"])
            ]
            missing = ask(store, begun, missing, anew=False)
        timed_out = re.search(r"time(d )?out", str(error), re.IGNORECASE)
        raise (CommunicationTimeoutError if timed_out else CommunicationError)(
            f"rank {rank} could not connect to the ranks that it found in the store at"
            f" {address_of(store)}, after {waited:.1f} s:"
            f" {f'{format_ranks(missing)} of {world_size} did not come' if missing else 'a rank has died or left'}"
            f" ({why})"
        ) from error


_INTERVAL = 0.05
"""Seconds between two checks of the works."""

_LINGER = 200
"""Checks without a work after which the thread ends: starting one in each step would take a
training more time than the checks.
"""


class Watchdog:
    """Deadlines of works, checked on a thread that ends a while after the last one."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Any, float, Callable[[], None]]] = []
        """Works with their deadlines, and what gives them up."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: Any, timeout: float, give_up: Callable[[], None]) -> None:
        """Call ``give_up()`` unless ``work.is_completed()`` within ``timeout`` seconds.

        Args:
            work: a torch.distributed work; works are checked in the order in which they were added.
            timeout: in seconds.
            give_up: called once, on the watch's thread.
        """
        with self._lock:
            self._under_way.append((work, time.monotonic() + timeout, give_up))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._check, name="bagua_ref watch of collectives", daemon=True
                )
                self._thread.start()

    def _check(self) -> None:
        idle = 0
        while True:
            for give_up in self._late():
                with suppress(ReferenceError):  # the connection has gone
                    give_up()
            with self._lock:
                idle = 0 if self._under_way else idle + 1
                if idle > _LINGER:
                    self._thread = None
                    return
            time.sleep(_INTERVAL)

    def _late(self) -> list[Callable[[], None]]:
        """Forget works that are done or late; return the functions that give the late ones up."""
        # not while works are asked, which may take a thread that adds one its time
        with self._lock:
            now, watched = time.monotonic(), list(self._under_way)
        # Works mostly end in order, and asking one costs a training time: those after the first
        # that is under way are not asked.
        over = list(itertools.takewhile(lambda entry: _is_done(entry[0]), watched))
        overdue = [entry for entry in watched[len(over) :] if now > entry[1]]
        late = [entry for entry in overdue if not _is_done(entry[0])]
        gone = {id(entry) for entry in (*over, *overdue)}
        with self._lock:
            self._under_way = [entry for entry in self._under_way if id(entry) not in gone]
        return [give_up for _, _, give_up in late]


def _is_done(work: Any) -> bool:
    """Return whether ``work`` has finished; a failed one never does, so it is given up at its
    deadline.
    """
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False
