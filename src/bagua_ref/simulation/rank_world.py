"""The world of one simulated rank: threads, locks, events, queues and a clock under the scheduler's
control.
"""

from __future__ import annotations

import queue
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from bagua_ref.base.launch_environment import Identity
from bagua_ref.base.runtime import World, current_world
from bagua_ref.simulation.communicator import SimulatedTransport
from bagua_ref.simulation.scheduler import Scheduler
from bagua_ref.simulation.tasks import Task, Ticket, place


class SimulatedRankWorld(World):
    """The world of one simulated rank: the scheduler controls its threads, locks, events, queues
    and clock.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        identity: Identity,
        transport: SimulatedTransport,
        process_state: Any = None,
        board: Any = None,
    ) -> None:
        self._scheduler, self._identity, self.board = scheduler, identity, board
        self.transport = transport
        self.process_state = process_state
        """This rank's part of the process's state, or None."""
        self.main_thread: Any = None
        """The rank's value of `threading.main_thread`."""
        self.started_threads: list[Any] = []
        """The threads that the rank's program has started by `threading`."""
        self.signal_handlers: dict[Any, Any] = {}
        """The handlers that the rank's program has set."""
        self.works = weakref.WeakSet[Any]()
        """The operations of `torch.distributed` in progress, whose handles the program keeps."""
        self.invariants: list[Callable[[], Any]] = []
        """The rank's invariants, registered by `always`."""

    def __repr__(self) -> str:
        return f"SimulatedRankWorld(rank {self._identity.rank} of {self._identity.world_size})"

    @property
    def identity(self) -> Identity:
        """This rank's position in the job."""
        return self._identity

    def spawn(self, function: Callable[[], None], name: str) -> SimulatedThread:
        """Run ``function()`` on a new thread of this rank, which is stopped silently when all
        ranks' main functions have returned.
        """
        return SimulatedThread(self._scheduler, self._scheduler.spawn(function, name))

    def event(self) -> SimulatedEvent:
        """Return a new event."""
        return SimulatedEvent(self._scheduler)

    def lock(self) -> SimulatedLock:
        """Return a new fair lock."""
        return SimulatedLock(self._scheduler)

    def queue(self) -> SimulatedQueue:
        """Return a new unbounded queue."""
        return SimulatedQueue(self._scheduler)

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds`` of virtual time."""
        self._scheduler.sleep(seconds)

    def now(self) -> float:
        """Return the virtual time after yielding to other threads; it advances only while every
        thread waits.
        """
        self._scheduler.poll()
        return self._scheduler.time

    def clock(self) -> float:
        """Return the virtual time without yielding to other threads."""
        return self._scheduler.time

    def check_invariants(self) -> None:
        """Check this rank's invariants; a violation ends the run."""
        for function in self.invariants:
            try:
                wrong = "is False" if function() is False else ""
            except Exception as error:
                wrong = f"raises {type(error).__name__}: {error}"
            if wrong:
                code = getattr(function, "__code__", None)
                where = f" ({place(code.co_filename, code.co_firstlineno)})" if code else ""
                name = getattr(function, "__name__", repr(function))
                self._scheduler.refuse(
                    "invariant",
                    f"breaks an invariant: {name}{where} {wrong}",
                    "a step or communication",
                )


def rank_world() -> SimulatedRankWorld:
    """Return the simulated world of the calling rank."""
    world = current_world()
    assert isinstance(world, SimulatedRankWorld)
    return world


def always(function: Callable[[], Any]) -> None:
    """Register ``function()`` as an invariant, checked after every later optimizer step and before
    every communication of the calling rank.

    If it returns False or raises an exception, ``bagua-ref sim`` and the fixture ``sim_world``
    report that; elsewhere it is not called. It must not communicate.

    >>> always(lambda: 1 + 1 == 2)
    """
    world = current_world()
    if isinstance(world, SimulatedRankWorld):
        world.invariants.append(function)


class SimulatedThread:
    """A thread of a simulated rank."""

    def __init__(self, scheduler: Scheduler, task: Task) -> None:
        self._scheduler, self._task = scheduler, task

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._scheduler.yield_()
        ticket = self._scheduler.ticket(f"for the end of {self._task!r}")
        self._task.joining.append(ticket)
        if not self._task.done:
            self._scheduler.wait(ticket, timeout)

    def is_alive(self) -> bool:
        """Return whether the thread is still running."""
        self._scheduler.poll()
        return not self._task.done


class _WaitQueue:
    """Threads that wait for the same thing, in first-come-first-served order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: deque[Ticket] = deque()

    def _serve(self) -> None:
        """Wake the waiting threads that can proceed."""
        raise NotImplementedError

    def _wait_in_queue(self, what: str, timeout: float | None) -> Ticket:
        self._scheduler.yield_()
        ticket = self._scheduler.ticket(what)
        # Queue first, then check what is available: the release of a lock by a finalizer in between
        # is not missed.
        self._waiting.append(ticket)
        self._serve()
        if not self._scheduler.wait(ticket, timeout):
            self._waiting.remove(ticket)
        return ticket


class SimulatedLock(_WaitQueue):
    """Lock like `threading.Lock`, but granted in the order of requests."""

    _held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; return False if ``timeout`` seconds (negative: no limit) pass first."""
        limit = timeout if blocking else 0
        return self._wait_in_queue("for a lock", None if limit < 0 else limit).granted

    def locked(self) -> bool:
        """Return whether the lock is held."""
        return self._held

    def release(self) -> None:
        """Hand the lock to the first waiter, without switching threads, because finalizers may call
        this.
        """
        if not self._held:
            raise RuntimeError("release of a lock that is not held")
        self._held = False
        self._serve()

    def _serve(self) -> None:
        if self._waiting and not self._held:
            self._held = True
            self._scheduler.grant(self._waiting.popleft())

    def _at_fork_reinit(self) -> None:
        self._held = False

    def __enter__(self) -> SimulatedLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class SimulatedEvent(_WaitQueue):
    """Event like `threading.Event`."""

    _is_set = False

    def set(self) -> None:
        """Wake all waiting threads."""
        self._is_set = True
        self._serve()
        self._scheduler.yield_(ends=False)

    def clear(self) -> None:
        """Clear the event: later calls of `wait` block."""
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether the event is set."""
        self._scheduler.poll()
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set; return False if ``timeout`` seconds pass first."""
        return self._wait_in_queue("for an event", timeout).granted

    def _serve(self) -> None:
        while self._is_set and self._waiting:
            self._scheduler.grant(self._waiting.popleft())


class SimulatedQueue(_WaitQueue):
    """Queue like `queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True) -> None:
        """Append ``item``; without ``block``, threads are not switched, as finalizers may call this
        anywhere.
        """
        self._items.append(item)
        self._serve()
        if block:
            self._scheduler.yield_(ends=False)

    def get(self, timeout: float | None = None) -> Any:
        """Remove and return the first item; raise `queue.Empty` if ``timeout`` seconds pass
        first.
        """
        ticket = self._wait_in_queue("for a queue's next item", timeout)
        if not ticket.granted:
            raise queue.Empty
        return ticket.value

    def _serve(self) -> None:
        while self._items and self._waiting:
            self._scheduler.grant(self._waiting.popleft(), self._items.popleft())
