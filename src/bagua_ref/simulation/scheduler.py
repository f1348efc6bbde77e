"""Deterministic scheduler of threads: one runs at a time, in an order drawn from a seed, on a
virtual clock.

It handles threads, waiting and time. Messages between ranks are in
`bagua_ref.simulation.communicator`, locks and queues in `bagua_ref.simulation.rank_world`.
"""

from __future__ import annotations

import _imp
import gc
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from bagua_ref.errors import RankCall, SimulationError
from bagua_ref.simulation.tasks import (
    RankState,
    Task,
    Ticket,
    Unwind,
    blocked,
    call_site,
    place,
    raise_site,
    who_waits,
)

_POLLS = 10_000
"""Consecutive polls after which sleeping threads are woken, so that a polling loop ends."""

_WAKE_UPS = 100_000
"""Consecutive deadlines that woke only background threads, after which ranks that wait without a
limit count as stuck.
"""

_COLLECT, _FEW = 20_000, 512
"""Number of switches between two garbage collections, for up to this number of threads; more
threads have longer intervals, as each collection visits all ranks' objects.
"""

_SIGNALS = 0.5
"""Seconds between two checks for a signal, such as that of Ctrl-C, by a simulation's caller."""

_UNYIELDING = 10.0
"""Real seconds without yielding and without processor time after which a thread ends the run: it is
blocked outside of the simulation, as by a lock of C++. One that computes may take its time.
"""


_IDLE = 0.01
"""Seconds of processor time in `_SIGNALS` up to which a thread counts as blocked."""


def _processor_time(task: Task | None) -> float:
    """Return the CPU seconds of a task's thread, 0 if unknown."""
    if task is None:
        return 0.0
    with suppress(OSError):  # not Linux, or it has just ended
        own = Path(f"/proc/self/task/{task.system_id}/schedstat")
        return int(own.read_text().split()[0]) / 1e9
    return 0.0


class Scheduler:
    """Runs one main function per rank and the threads that they spawn, exactly one at a time.

    A thread runs until it waits or yields. When no thread can run, the clock advances to the
    earliest deadline. When that cannot help, because ranks wait for each other, the run ends with a
    SimulationError that says who waits for what. Time may pass for a sleep and for a spawned
    thread's wait with a timeout. A main thread's timeout is a watchdog: it fires only while no rank
    is in a collective, as otherwise the SimulationError reports the same earlier and in more
    detail.

    Each rank has its own part of the process's global state; other globals are shared.

    Args:
        choose: takes the number of ready threads, which are in the order in which they became
            ready, and returns the index of the next one. A program and ``choose`` determine the
            interleaving.
        rank_states: for each rank, the state that is put into the process while one of its threads
            runs.
    """

    def __init__(self, choose: Callable[[int], int], rank_states: Sequence[RankState]) -> None:
        self.time = 0.0
        self._choose = choose
        self._tasks: dict[Task, None] = {}
        self._threads: list[threading.Thread] = []
        self._ready: list[Task] = []
        self._current: Task | None = None
        self._returned: list[int] = []
        self._polls = self._wake_ups = self._switches = self._steps = 0
        self._collect_at = _COLLECT
        self._switching = self._ending = self._abandoned = False
        self._failure: BaseException | None = None
        self.on_communication: Callable[[Any], None] = lambda call: None
        """Callback of a thread with each of its communications, before it takes place."""
        self.on_transfer: Callable[[Sequence[Any], Callable[[], None]], None] = (
            lambda calls, finish: finish()
        )
        """Callback with the calls of a collective or message once all are present; it calls
        ``finish``, immediately or later.
        """
        self.on_wait: Callable[[Ticket, bool], None] = lambda ticket, over: None
        """Callback of a thread with its ticket, before and after each wait."""
        self.timer: tuple[float, Callable[[], None]] = (math.inf, lambda: None)
        """Time and function of the next event that no thread causes."""
        self.timeouts_fire = False
        """Whether ranks in a deadlock wait until their timeouts, instead of ending the run."""
        # where the exception that ended the run was raised
        self.failed_call: RankCall | None = None
        self.steps_at_end: dict[int, int] = {}  # optimizer steps of ranks that have returned
        self._over = threading.Lock()
        self._states = rank_states
        self.messages: list[tuple[str, list[Tensor]]] | None = None
        """If not None, a list to which each collective is appended: its name, and the data that
        each rank sends.
        """

    # For the caller of a simulation.

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Run function r as rank r's main thread, until all have returned or one has raised;
        re-raise its exception.
        """
        self._over.acquire()
        # Finalizers may wake threads. Automatic garbage collection would make the interleaving
        # depend on earlier allocations.
        collects = gc.isenabled()
        gc.disable()
        outside = RankState()
        try:
            for rank, function in enumerate(functions):
                self._start(Task(rank, f"rank {rank}", True, function))
            first = self._pick()
            assert first is not None
            self._resume(first)
            seen, since = (-1, 0.0), 0.0
            # a signal that comes just before a wait is handled only after it
            while not self._over.acquire(timeout=_SIGNALS):
                now = self._steps, _processor_time(self._current)
                if now[0] != seen[0] or now[1] > seen[1] + _IDLE:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > _UNYIELDING:
                    self._abandoned = True
                    raise self._unyielding()
        except BaseException:
            # KeyboardInterrupt, or no more threads: the running thread ends the others at its next
            # step
            self._ending = True
            if self._current is None and self._tasks:
                self._resume(next(iter(self._tasks)))
            raise
        finally:
            for thread in self._threads:
                if not self._abandoned:  # a thread that does not yield may never end
                    thread.join()
            outside.restore()
            if collects:
                gc.enable()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # For the threads.

    def spawn(self, function: Callable[[], None], name: str, yields: bool = True) -> Task:
        """Start a thread of the calling thread's rank; with ``yields``, it may run immediately."""
        task = Task(self.calling().rank, name, False, function)
        self._start(task)
        if yields:
            self.yield_()
        return task

    def forget(self) -> None:
        """Forget the calling thread, in a process forked from the simulation."""
        self._current = None

    def ticket(self, what: str, collective: bool = False, call: Any = None) -> Ticket:
        """Return a ticket for the calling thread. Outside of the run, it cannot be used to wait,
        and collectives are an error.
        """
        return Ticket(
            self.calling() if collective or self.is_calling() else None, what, collective, call
        )

    def end(self, error: BaseException) -> NoReturn:
        """End the run with ``error``: the calling thread, and later the others, are unwound past
        all exception handlers.
        """
        self._fail(error)
        self.calling().unwinding = True
        raise Unwind

    def refuse(self, kind: str, does: str, operation: str, advice: str = "") -> NoReturn:
        """End the run with an error: the calling rank does something forbidden or not simulated."""
        file, line = call_site(sys._getframe(1))
        task = self.calling()
        text = f"rank {task.rank} {does} at {place(file, line)}{advice}"
        self.end(
            SimulationError(
                text, kind, (RankCall(task.rank, task.thread, operation, "", file, line),)
            )
        )

    def kill(self) -> NoReturn:
        """Stop the threads of the calling thread's rank, as if the rank's process had been
        killed.
        """
        task = self.calling()
        for other in [other for other in self._tasks if other.rank == task.rank]:
            other.killed = True
            if other is not task:
                self._make_ready(other)
        task.unwinding = True
        raise Unwind

    def grant(self, ticket: Ticket, value: Any = None) -> None:
        """Complete a ticket, and make the thread waiting for it ready."""
        ticket.granted, ticket.value = True, value
        self._polls = 0
        if ticket.task is not None and ticket.task.ticket is ticket:
            self._make_ready(ticket.task)

    def wait(self, ticket: Ticket, timeout: float | None = None, passes: bool = False) -> bool:
        """Wait until the ticket is granted, at most ``timeout`` virtual seconds; return whether it
        was.

        Args:
            ticket: ticket of the calling thread.
            timeout: limit in virtual seconds; None: no limit.
            passes: whether this wait ends by itself, as a sleep does.
        """
        if ticket.granted:
            return True
        if timeout is not None and timeout <= 0:
            self.poll()
            return ticket.granted
        task = self.calling()
        self.on_wait(ticket, False)
        ticket.deadline = math.inf if timeout is None else self.time + timeout
        ticket.passes = passes or (
            timeout is not None and not task.is_main and not ticket.collective
        )
        self._polls = 0
        task.ticket = ticket  # from here on a grant makes the task ready, even one by a finalizer
        if not ticket.granted or task.ready:
            self._switch(task)
        task.ticket = None
        self.on_wait(ticket, True)
        return ticket.granted

    def sleep(self, seconds: float, what: str = "to sleep") -> None:
        """Sleep for a number of virtual seconds."""
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds!r} to sleep must be 0 or more")
        self.yield_()
        self.wait(self.ticket(what), seconds, passes=True)

    def yield_(self, ends: bool = True, last: bool = False) -> None:
        """Yield to any thread that can run. Outside of the run, this does nothing.

        Args:
            ends: whether the thread may be ended here once the run is over; False in calls by
                finalizers, which cannot raise.
            last: whether the thread counts as the one that has been ready for longest.
        """
        task = self._current
        if self._switching or task is None or task.ident != threading.get_ident():
            return
        if (
            _imp.lock_held()
        ):  # by this thread, in the midst of an import: the others may import, too
            return
        self._steps += 1
        if not task.unwinding:
            self._make_ready(task)
            if last:
                self._ready.insert(0, self._ready.pop())
            self._switch(task, ends)

    def poll(self) -> None:
        """Yield in a polling call; many consecutive ones wake sleeping threads."""
        self._polls += 1
        if self._polls > _POLLS:
            passing = [
                t.ticket.deadline
                for t in self._tasks
                if t.ticket and t.ticket.passes and not t.ready
            ]
            if not self._fires(passing) and passing:
                self._advance(min(passing))
        self.yield_(last=True)  # a schedule that prefers the newest would let it poll for ever

    def is_calling(self) -> bool:
        """Return whether the calling thread belongs to the simulation."""
        return self._current is not None and self._current.ident == threading.get_ident()

    def calling(self) -> Task:
        """Return the task of the calling thread; raise SimulationError if it does not belong to the
        simulation.
        """
        task = self._current
        if task is None or task.ident != threading.get_ident():
            raise SimulationError(
                f"thread {threading.current_thread().name!r} would have to wait for simulated"
                " ranks, but is not one of this run's threads; start threads by"
                " bagua_ref.runtime.current_world().spawn and use a communicator only during"
                " its run"
            )
        return task

    # Switching between threads.

    def _start(self, task: Task) -> None:
        thread = threading.Thread(target=self._main, args=(task,), name=task.name, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._tasks[task] = None
        self._make_ready(task)

    def _main(self, task: Task) -> None:
        task.wait_for_turn()
        task.ident = threading.get_ident()
        try:
            if not self._ending:
                self._states[task.rank].resumed()
                # brings torch's number, one, into this thread, in which MKL would start others
                torch.get_num_threads()
                # a backward stays on the rank's thread
                with torch.autograd.set_multithreading_enabled(False):
                    task.context.run(task.function)
        except Unwind:
            pass  # the run is over, and its reason is recorded
        except BaseException as error:
            if not task.unwinding:
                if self._failure is None:
                    self.failed_call = RankCall(
                        task.rank, task.thread, type(error).__name__, "", *raise_site(error)
                    )
                self._fail(error, f"raised in {task!r} of the simulated world")
        self._finish(task)

    def _fail(self, error: BaseException, note: str = "") -> None:
        if self._failure is None:
            self._failure = error
            if note and hasattr(error, "add_note"):
                error.add_note(note)
        self._ending = True

    def _finish(self, task: Task) -> None:
        task.done = True
        # Freed here, not when the thread exits: by then, the next one is running.
        del self._tasks[task], task.function, task.context
        for ticket in task.joining:
            self.grant(ticket)
        if task.is_main:
            self._returned.append(task.rank)
            self._ending = self._ending or len(self._returned) == len(self._states)
        following = self._pick()
        if following is None:
            self._exchange_states(task, None)
            self._current, self._switching = None, False
            self._over.release()
        else:
            self._resume(following)

    def _make_ready(self, task: Task) -> None:
        if not task.ready and not task.done:
            task.ready = True
            self._ready.append(task)

    def _switch(self, task: Task, ends: bool = True) -> None:
        """Run the next thread, until this task is scheduled again."""
        if not self._ending and not task.killed:
            following = self._pick()
            if following is None or following is task:
                self._switching = False
            else:
                task.wait_for_turn(partial(self._resume, following))
                self._states[task.rank].resumed()
        if (self._ending or task.killed) and ends:
            task.unwinding = True
            raise Unwind

    def _pick(self) -> Task | None:
        """Return the next task to run. Until it runs, finalizers must not switch threads."""
        self._switching = True
        while not self._ready and not self._ending:
            self._let_time_pass()
        if self._ending:
            return next(iter(self._tasks), None)
        try:
            task = self._ready.pop(self._choose(len(self._ready)))
        except SimulationError as error:
            self._fail(error)
            return next(iter(self._tasks))
        task.ready = False
        if task.is_main:
            self._wake_ups = 0
        return task

    def _resume(self, task: Task) -> None:
        if self._current is None or self._current.rank != task.rank:
            self._exchange_states(self._current, task)
        self._switches += 1
        if self._switches >= self._collect_at:
            gc.collect()
            self._collect_at = self._switches + _COLLECT * (1 + len(self._tasks) // _FEW)
        self._current = task
        self._switching = False
        task.give_turn()

    def _exchange_states(self, before: Task | None, after: Task | None) -> None:
        if self._abandoned:  # the process is its caller's again
            return
        if before is not None:
            self._states[before.rank].save()
        if after is not None:
            self._states[after.rank].restore()

    # Time.

    def _let_time_pass(self) -> None:
        """Advance the clock to the earliest deadline, when no thread can run; end the run with an
        error if that cannot help.
        """
        tickets = [task.ticket for task in self._tasks if task.ticket]
        if self._fires([ticket.deadline for ticket in tickets]):
            return
        timed = [ticket for ticket in tickets if ticket.deadline < math.inf]
        # A rank's own timeout is a watchdog. While ranks wait for each other, it would only report
        # later what is known now.
        stuck = (
            not self.timeouts_fire
            and self.timer[0] == math.inf
            and any(ticket.collective for ticket in tickets)
        )
        if not any(ticket.passes or not stuck for ticket in timed):
            self._fail(self._deadlock())
            return
        if not any(ticket.task and ticket.task.is_main for ticket in timed):
            self._wake_ups += 1
            if self._wake_ups > _WAKE_UPS:
                self._fail(
                    self._deadlock(
                        f"only background threads woke up, {_WAKE_UPS} times until {self.time} s"
                    )
                )
                return
        self._advance(min(ticket.deadline for ticket in timed))

    def _fires(self, deadlines: Sequence[float]) -> bool:
        """Fire the timer, unless a deadline is earlier: advance the clock and call its function;
        return whether it fired.
        """
        moment, happen = self.timer
        if moment == math.inf or moment > min(deadlines, default=math.inf):
            return False
        self._advance(moment)
        happen()
        return True

    def _advance(self, time: float) -> None:
        self.time = max(self.time, time)
        for task in self._tasks:
            if task.ticket is not None and task.ticket.deadline <= self.time:
                self._make_ready(task)

    def _deadlock(
        self, text: str = "deadlock: every simulated rank is waiting for another"
    ) -> SimulationError:
        calls = tuple(
            blocked(task)
            for task in sorted(self._tasks, key=lambda task: task.rank)
            if task.ticket is not None
        )
        ended = any(rank in self._returned for call in calls for rank in call.waits_for)
        waits = who_waits(self._tasks, self._returned, self.steps_at_end if ended else {})
        return SimulationError(f"{text}: {waits}", "ended" if ended else "deadlock", calls)

    def _unyielding(self) -> SimulationError:
        task = self._current
        frame = sys._current_frames().get(task.ident or 0) if task else None
        site = call_site(frame)
        text = (
            f"{task!r} has been blocked for {_UNYIELDING:g} real seconds outside of the simulation,"
            f" at {place(*site)}, as by a lock of C++ or a wait for another process; its stack is"
        )
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        calls = (RankCall(task.rank, task.thread, "", "", *site),) if task else ()
        return SimulationError(f"{text}\n{stack}", kind="unyielding", calls=calls)
