"""The threads, locks and clocks of simulated ranks: Python's own, on the scheduler and its virtual time.

Threads that the user's modules or executors start are scheduled, and the locks that they make let other threads go on. Threads
and locks of libraries stay as they are: a data loader's threads talk to real processes.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bagua_ref.communicators.call_sites import is_user_code
from bagua_ref.communicators.scheduler import Scheduler
from bagua_ref.simulation.rank_world import SimulatedLock, SimulatedThread, rank_world
from bagua_ref.simulation.torch_distributed.replacements import Replacements, calling_frame, is_called_by_user

__all__ = ["as_current_thread", "end_threads", "replace_clocks", "replace_threads"]

_threading: Any = threading
_queue: Any = queue

_START = 1_700_000_000.0
"""`time.time()` at the start of a run."""

_CLOCK_STEP = 1e-5
"""Virtual seconds that reading a clock takes, so that a loop that polls it ends."""

_LOCKS = ("threading.py", "queue.py", "threads.py")
"""Modules that make locks for their callers."""


def replace_threads(replacements: Replacements, scheduler: Scheduler) -> None:
    """Schedule the user's threads, and those of executors; make their locks, queues and joins let other threads go on."""

    def start(original: Callable[..., None], thread: threading.Thread) -> None:
        if _is_scheduled(thread):
            _start(scheduler, thread)
        else:
            original(thread)

    for owner, name, make in (
        (threading, "Lock", partial(SimulatedLock, scheduler)),
        (threading, "_allocate_lock", partial(SimulatedLock, scheduler)),
        (threading, "RLock", _threading._PyRLock),
        (queue, "SimpleQueue", _queue._PySimpleQueue),
    ):
        replacements.function(owner, name, lambda original, make=make: make() if _makes_simulated_lock() else original())
    replacements.function(threading.Thread, "start", start)
    replacements.function(threading, "main_thread", lambda original: rank_world().main_thread)
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is not None:  # a rank that compiles holds it while it lets others go on
        lock = _threading._PyRLock()
        lock._block = SimulatedLock(scheduler)
        replacements.put(compiler, "compile_lock", lock)
    # It is held while a worker is started, which lets other threads go on.
    replacements.put(concurrent.futures.thread, "_global_shutdown_lock", SimulatedLock(scheduler))


def _makes_simulated_lock() -> bool:
    frame = calling_frame(*_LOCKS)
    inner: Any = sys._getframe(2)
    while inner is not frame:
        own = inner.f_locals.get("self") if inner.f_code.co_name == "wait" else None
        if isinstance(own, threading.Condition):  # a waiter of a condition is like the condition's lock
            lock = vars(own)["_lock"]
            return isinstance(getattr(lock, "_block", lock), SimulatedLock)
        inner = inner.f_back
    file = frame.f_code.co_filename
    return is_user_code(file) or "concurrent" in file


def _is_scheduled(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    if target is concurrent.futures.thread._worker:
        return True
    run = type(thread).run.__code__.co_filename
    return is_called_by_user(*_LOCKS) or is_user_code(run) or is_user_code(getattr(target, "__code__", _start.__code__).co_filename)


def _start(scheduler: Scheduler, thread: threading.Thread) -> None:
    def run() -> None:
        with as_current_thread(thread):
            try:
                with contextlib.suppress(SystemExit):  # as Python's threads do
                    thread.run()
            except Exception as error:
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))

    simulated = SimulatedThread(scheduler, scheduler.spawn(run, thread.name, yields=False))
    thread.join, thread.is_alive = simulated.join, simulated.is_alive  # type: ignore[method-assign]
    vars(thread)["_started"].set()
    rank_world().started_threads.append(thread)


@contextmanager
def as_current_thread(thread: threading.Thread) -> Iterator[None]:
    """Make ``thread`` the one that `threading.current_thread` returns here."""
    ident = threading.get_ident()
    carrier = _threading._active[ident]
    _threading._active[ident] = thread
    vars(thread)["_ident"] = ident
    try:
        yield
    finally:
        _threading._active[ident] = carrier


def end_threads(threads: list[threading.Thread]) -> None:
    """Wait for a rank's threads as a process does at its end: for those that are not daemons, and for executors' work."""
    for thread in threads:
        if getattr(thread, "_target", None) is concurrent.futures.thread._worker:
            executor = vars(thread)["_args"][0]()
            if executor is not None:
                executor.shutdown(wait=True)
        elif not thread.daemon:
            thread.join()


def replace_clocks(replacements: Replacements, scheduler: Scheduler) -> None:
    """Make Python's clocks virtual, and sleeping take virtual time."""

    def now(start: float) -> float:
        if is_called_by_user("threads.py"):
            scheduler.poll()
        scheduler.time += _CLOCK_STEP
        return start + scheduler.time

    def select(original: Any, selector: Any, timeout: float | None = None) -> Any:
        events = original(selector, 0)
        if events or not timeout or timeout < 0:
            return events or (original(selector) if timeout is None else events)
        scheduler.sleep(timeout)
        return original(selector, 0)

    for name, start in (("time", _START), ("monotonic", 0.0), ("perf_counter", 0.0)):
        replacements.function(time, name, lambda original, start=start: now(start))
        replacements.function(time, f"{name}_ns", lambda original, start=start: int(now(start) * 1e9))
    replacements.function(time, "sleep", lambda original, seconds: scheduler.sleep(seconds))
    replacements.function(selectors.DefaultSelector, "select", select)
    # These modules' own names for `time.monotonic`, for timeouts of locks and queues.
    for module, name in ((threading, "_time"), (queue, "time")):
        replacements.function(module, name, lambda original: scheduler.time)
