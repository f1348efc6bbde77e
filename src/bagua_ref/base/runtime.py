"""The world of one rank: its identity, threads, locks and clock; and CUDA streams, which order the
work of its threads on a device.

All blocking calls go through the current `World`, so that a simulation can schedule them. The
current world is a ContextVar. A thread started by `World.spawn` inherits it; other threads see the
process's real world.

On a CUDA device, operations are queued on the calling thread's current stream, and streams run
concurrently. An event marks a point in a stream, for which another stream can wait without the host
(S2.4, S2.5). On a CPU, operations are synchronous: streams and events are None.
"""

from __future__ import annotations

import contextvars
import math
import queue
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch

from bagua_ref.base.launch_environment import Identity
from bagua_ref.types import Group, Transport

__all__ = [
    "Event",
    "Identity",
    "Lock",
    "Queue",
    "Thread",
    "World",
    "current_stream",
    "current_world",
    "hold",
    "is_background_thread",
    "order_after",
    "record_event",
    "side_stream",
    "use_stream",
    "use_world",
]

_REMEMBERED = 256
"""Number of recent operations kept per rank."""


class Event(Protocol):
    """Protocol of `threading.Event`."""

    def set(self) -> None: ...  # noqa: D102
    def clear(self) -> None: ...  # noqa: D102
    def is_set(self) -> bool: ...  # noqa: D102
    def wait(self, timeout: float | None = None) -> bool: ...  # noqa: D102


class Lock(Protocol):
    """Protocol of a `threading.Lock` that is fair: granted in the order of requests."""

    def acquire(self, *, timeout: float = -1) -> bool: ...  # noqa: D102
    def release(self) -> None: ...  # noqa: D102
    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: object) -> None: ...


class Queue(Protocol):
    """Protocol of `queue.SimpleQueue`; ``get`` raises `queue.Empty` after ``timeout`` seconds."""

    def put(self, item: Any, block: bool = True) -> None: ...  # noqa: D102
    def get(self, *, timeout: float | None = None) -> Any: ...  # noqa: D102


class Thread(Protocol):
    """A thread started by `World.spawn`."""

    def join(self, timeout: float | None = None) -> None: ...  # noqa: D102


class FairLock:
    """A lock that is granted in the order of requests."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: list[threading.Lock] = []

    def acquire(self, timeout: float = -1) -> bool:
        """Acquire the lock; return False if ``timeout`` seconds pass first (negative: no limit)."""
        with self._mutex:
            if not self._held:
                self._held = True
                return True
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        if ticket.acquire(timeout=timeout):
            return True
        with self._mutex:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                return False
        return True  # handed over just before the timeout

    def release(self) -> None:
        """Hand the lock to the first waiter."""
        with self._mutex:
            if not self._held:
                raise RuntimeError("release of a lock that is not held")
            if self._waiting:
                self._waiting.pop(0).release()
            else:
                self._held = False

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class World:
    """The runtime environment of one rank: real threads and the monotonic clock of this process. In
    a simulation, `bagua_ref.simulation.SimulatedWorld` creates one for each rank.
    """

    default_group: Group | None = None
    """The group that ``init_process_group()`` made."""

    transport: Transport | None = None
    """The connections between ranks; None before ``init_process_group()`` outside of
    simulations.
    """

    board: Any = None
    """An in-memory torch store shared by all ranks of a simulation; None outside of one."""

    meter: Any = None
    """The `bagua_ref.observe.meter.Meter` of the most recently wrapped module; None before that."""

    known_identity: Identity | None = None
    """Identity set by ``init_process_group()``, which may know more than the environment
    variables.
    """

    was_in_job = False
    """Whether this process was in an earlier job, whose store may still answer at the next job's
    address.
    """

    @cached_property
    def operations(self) -> deque[Any]:
        """The most recent operations of this rank, oldest first, as recorded by
        `bagua_ref.observe.meter`.
        """
        return deque(maxlen=_REMEMBERED)

    @cached_property
    def engines(self) -> weakref.WeakValueDictionary[str, Any]:
        """The communication engine of each wrapped module, by the module's name."""
        return weakref.WeakValueDictionary()

    @cached_property
    def names(self) -> Counter[str]:
        """Number of modules wrapped without a name, by class."""
        return Counter()

    @property
    def identity(self) -> Identity:
        """This rank's identity in the job, set by ``init_process_group()``, or read from the
        environment before that.
        """
        return self.known_identity or Identity.from_environment()

    def spawn(self, function: Callable[[], None], name: str) -> Thread:
        """Run ``function()`` on a new daemon thread with a copy of the caller's context."""
        context = contextvars.copy_context()
        context.run(_in_background.set, True)
        thread = threading.Thread(target=context.run, args=(function,), name=name, daemon=True)
        thread.start()
        return thread

    def event(self) -> Event:
        """Return a new event."""
        return threading.Event()

    def lock(self) -> Lock:
        """Return a new fair lock."""
        return FairLock()

    def queue(self) -> Queue:
        """Return a new unbounded queue."""
        return queue.SimpleQueue[Any]()

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``."""
        time.sleep(seconds)

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        return time.monotonic()

    def clock(self) -> float:
        """Return `now` for measurements: in a simulation, no other thread runs during this call."""
        return time.monotonic()

    @property
    def peers(self) -> Any:
        """The state of the other ranks (`bagua_ref.communicators.missing.Peers`); None in a
        simulation, and before this process has joined a job.
        """
        return getattr(self.transport, "peers", None)

    def waiting_for_own_thread(
        self, interrupt: Callable[[str], None], timeout: float = math.inf
    ) -> AbstractContextManager[None]:
        """Context in which the calling thread waits for a thread of this rank, at most ``timeout``
        seconds; ``interrupt(reason)`` ends the wait.
        """
        if self.peers is None:
            return nullcontext()
        what = "for its background thread"
        return self.peers.waiting(what, "", (), interrupt, timeout=timeout)  # type: ignore[no-any-return]


_real_world = World()
_in_background: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "bagua_ref_in_background", default=False
)
_current: contextvars.ContextVar[World] = contextvars.ContextVar(
    "bagua_ref_world", default=_real_world
)


def is_background_thread() -> bool:
    """Return whether `World.spawn` started the calling thread."""
    return _in_background.get()


def current_world() -> World:
    """Return the world of the calling thread: the real one, except inside a simulation."""
    return _current.get()


@contextmanager
def use_world(world: World) -> Iterator[World]:
    """Context in which ``world`` is the current world."""
    token = _current.set(world)
    try:
        yield world
    finally:
        _current.reset(token)


_streams: dict[tuple[int, int], Any] = {}
"""All streams that were current so far, by device and handle."""


def current_stream(device: torch.device) -> Any:
    """Return the calling thread's stream on ``device``; None on the CPU."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    # each parameter's hook asks, and torch's stream takes much longer
    place = index, torch._C._cuda_getCurrentRawStream(index)
    stream = _streams.get(place)
    if stream is None:
        stream = _streams[place] = torch.cuda.current_stream(device)
    return stream


def side_stream(device: torch.device) -> Any:
    """Return a new high-priority stream; None on the CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def record_event(device: torch.device) -> Any:
    """Record an event on the calling thread's stream, after all work queued there so far; None on
    the CPU.
    """
    return current_stream(device).record_event() if device.type == "cuda" else None


def order_after(event: Any, device: torch.device) -> None:
    """Make later work on the calling thread's stream wait for ``event``, if there is one; the host
    does not wait.
    """
    if event is not None:
        current_stream(device).wait_event(event)


def hold(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Prevent reuse of the memory of ``tensors`` until the work queued on the calling thread's
    stream is done.
    """
    if device.type == "cuda":
        for tensor in tensors:
            tensor.record_stream(current_stream(device))


@contextmanager
def use_stream(stream: Any, device: torch.device) -> Iterator[None]:
    """Context that makes ``device`` and ``stream`` current for the calling thread; None keeps the
    stream.
    """
    if device.type != "cuda":
        yield
        return
    device_before, stream_before = torch.cuda.current_device(), current_stream(device)
    # Not by torch's contexts, which look into the environment each time.
    torch.cuda.set_stream(stream_before if stream is None else stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(stream_before)
        if torch.cuda.current_device() != device_before:
            torch.cuda.set_device(device_before)


def find_free_port() -> int:
    """Return a TCP port that was free a moment ago, when a socket was bound to it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
