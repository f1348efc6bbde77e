"""Process-level features of a simulated rank: threads, locks and clocks, other processes, signals,
and modules.

Process-wide functions are replaced for the duration of a run. Threads that the user's modules or
executors start are scheduled, and their locks yield to other threads. Threads and locks of
libraries stay as they are: a data loader's threads talk to real processes.
"""

from __future__ import annotations

import _thread
import concurrent.futures.thread
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import multiprocessing.process
import os
import queue
import selectors
import signal
import subprocess  # to refuse launches
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch.autograd.profiler
import torch.distributed.rpc
import torch.multiprocessing

from bagua_ref.simulation.rank_world import SimulatedLock, SimulatedThread, rank_world
from bagua_ref.simulation.scheduler import Scheduler
from bagua_ref.simulation.tasks import PROGRAMS, is_user_code

_threading: Any = threading
_queue: Any = queue

_START = 1_700_000_000.0
"""`time.time()` at the start of a run."""

_CLOCK_STEP = 1e-5
"""Virtual seconds that reading a clock takes, so that a loop that polls it ends."""

_LOCKS = ("threading.py", "queue.py")
"""Modules that make locks for their callers."""

_REAL_LOCKS = (*_LOCKS, "<frozen importlib._bootstrap>")
"""Modules that make locks, and Python's imports; each rank has locks of its own there anyway."""

_OWN = str(Path(__file__).parents[2])

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
"""Programs that start ranks, as commands or as modules of Python."""

_POOLS = {
    "torch.utils.data.dataloader",
    "multiprocessing.pool",
    "multiprocessing.managers",
    "concurrent.futures.process",
}
"""Modules whose processes work for one rank."""


class Replacements(ExitStack):
    """Context in which attributes of modules and classes are replaced.

    Args:
        is_simulated: whether the calling thread belongs to a simulated rank; other threads use the
            originals.
    """

    def __init__(self, is_simulated: Callable[[], bool]) -> None:
        super().__init__()
        self.is_simulated = is_simulated

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute for all threads."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def function(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a function for simulated threads by ``function(original, ...)``."""
        original, is_simulated = getattr(owner, name), self.is_simulated

        def call(*args: Any, **options: Any) -> Any:
            return (
                function(original, *args, **options)
                if is_simulated()
                else original(*args, **options)
            )

        call.__name__, call.__doc__ = getattr(original, "__name__", name), original.__doc__
        self.put(owner, name, call)


def calling_frame(*modules: str) -> FrameType:
    """Return the innermost frame of a module other than this one and ``modules``, which are matched
    by the ends of file names.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename.endswith((__file__, *modules)) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def is_called_by_user(*modules: str) -> bool:
    """Return whether `calling_frame` is one of user code."""
    return is_user_code(calling_frame(*modules).f_code.co_filename)


def replace_threads(replacements: Replacements, scheduler: Scheduler) -> None:
    """Replace the start of user threads and executors' threads, so that they are scheduled; their
    locks, queues and joins yield to other threads.
    """

    def start(original: Callable[..., None], thread: threading.Thread) -> None:
        if _is_scheduled(thread):
            _start(scheduler, thread)
        else:
            original(thread)

    for owner, name in (
        (threading, "Lock"),
        (threading, "_allocate_lock"),
        (_thread, "allocate_lock"),
        (threading, "RLock"),
        (functools, "RLock"),
    ):
        replacements.function(owner, name, partial(_make_lock, scheduler, name == "RLock"))
    replacements.function(
        queue,
        "SimpleQueue",
        lambda original: _queue._PySimpleQueue() if _is_made_by_user() else original(),
    )
    replacements.put(RankLock, "scheduler", scheduler)
    for holder, name, lock in library_locks(len(sys.modules)):
        replacements.put(holder, name, lock)
    if sys.version_info < (3, 12):  # it holds a lock that all ranks share
        replacements.function(functools.cached_property, "__get__", _cached)
    replacements.function(threading.Thread, "start", start)
    replacements.function(threading, "main_thread", lambda original: rank_world().main_thread)
    # It is held while a worker is started, which lets other threads go on.
    replacements.put(concurrent.futures.thread, "_global_shutdown_lock", SimulatedLock(scheduler))


def _cached(original: Any, cached: Any, instance: Any, owner: Any = None) -> Any:
    """Return the value of a `functools.cached_property`."""
    if instance is None:
        return cached
    values = vars(instance)
    if cached.attrname not in values:
        values[cached.attrname] = cached.func(instance)
    return values[cached.attrname]


def replace_compiler(replacements: Replacements, scheduler: Scheduler) -> None:
    """Yield to other ranks while one compiles."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is None:
        return
    lock = _threading._PyRLock()
    lock._block = SimulatedLock(scheduler)
    replacements.put(compiler, "compile_lock", lock)


def _make_lock(scheduler: Scheduler, reentrant: bool, original: Callable[[], Any]) -> Any:
    """Return a lock for the calling code: one per rank, but a real one for a library's threads that
    are not simulated.
    """
    caller = calling_frame()
    condition = caller.f_locals.get("self") if caller.f_code.co_name == "wait" else None
    if isinstance(condition, threading.Condition):
        # a waiter of a condition is like the condition's lock
        lock = vars(condition)["_lock"]
        is_simulated = isinstance(lock, RankLock) and lock.is_users
        return SimulatedLock(scheduler) if is_simulated else original()
    file = caller.f_code.co_filename
    if _is_made_by_user():
        return RankLock(reentrant, is_users=True)
    is_real = file.endswith(_REAL_LOCKS) or file.startswith(_OWN) or "concurrent" in file
    return original() if is_real else RankLock(reentrant)


class RankLock:
    """A lock shared by the ranks of a simulation: each rank has its own, as in a separate process.

    Threads that are not simulated exclude each other, and all ranks.

    Args:
        reentrant: whether it is like `threading.RLock`.
        is_users: whether the program made the lock, so that only simulated threads use it.
    """

    scheduler: Scheduler | None = None
    """The scheduler of the current run."""

    def __init__(self, reentrant: bool, is_users: bool = False) -> None:
        self._reentrant, self.is_users = reentrant, is_users
        self._simulated = weakref.WeakKeyDictionary[Scheduler, dict[int, Any]]()
        self.shared = _real_lock()
        """Lock held while a thread that is not simulated, or any rank, holds this lock."""
        self.holders = 0
        """The number of ranks that hold this lock."""
        self._creator = self._own() if is_users else self._wrapped(self.shared)

    def _wrapped(self, block: Any) -> Any:
        if not self._reentrant:
            return block
        lock = _threading._PyRLock.__new__(_threading._PyRLock)
        lock._block, lock._owner, lock._count = block, None, 0
        return lock

    def _own(self) -> Any:
        scheduler = RankLock.scheduler
        if scheduler is None or not scheduler.is_calling():
            return self._creator
        of_ranks, rank = self._simulated.setdefault(scheduler, {}), scheduler.calling().rank
        if rank not in of_ranks:
            block = SimulatedLock(scheduler) if self.is_users else _RankBlock(scheduler, self)
            of_ranks[rank] = self._wrapped(block)
        return of_ranks[rank]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock; see `threading.Lock`."""
        return bool(self._own().acquire(blocking, timeout))

    def release(self) -> None:
        """Release the lock."""
        self._own().release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS_OF_LOCKS or not hasattr(self._creator, name):
            raise AttributeError(name)
        # A condition takes these once, for all ranks.
        return lambda *args: getattr(self._own(), name)(*args)


class _RankBlock(SimulatedLock):
    """One rank's part of a library's lock. Acquiring a free one does not switch threads, as
    libraries do so while they import their modules.
    """

    def __init__(self, scheduler: Scheduler, lock: RankLock) -> None:
        super().__init__(scheduler)
        self._lock = lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._held or self._waiting:
            if not super().acquire(blocking, timeout):
                return False
        else:
            self._held = True
        if not self._lock.holders and not self._lock.shared.acquire(blocking, timeout):
            super().release()
            return False
        self._lock.holders += 1
        return True

    def release(self) -> None:
        super().release()
        self._lock.holders -= 1
        if not self._lock.holders:
            self._lock.shared.release()


_real_lock = _thread.allocate_lock

_METHODS_OF_LOCKS = (
    "locked",
    "_at_fork_reinit",
    "_is_owned",
    "_release_save",
    "_acquire_restore",
    "_recursion_count",
)


_LOCKING = (logging, warnings)
"""Python's modules that hold a lock where `torch.compile` may begin to compile."""


@functools.lru_cache(maxsize=1)
def library_locks(modules: int) -> list[tuple[Any, str, RankLock]]:
    """Return per-rank replacements of the locks in modules of installed packages, logging and
    warnings: owners, names and locks. ``modules``, the number of modules, invalidates the cache.
    """
    kinds = (type(threading.Lock()), type(threading.RLock()))
    found = [
        (module, name, value)
        for module in list(sys.modules.values())
        if module in _LOCKING or "-packages" in (getattr(module, "__file__", None) or "")
        for name, value in list(vars(module).items())
        if type(value) in kinds
    ]
    locks = {id(lock): RankLock(hasattr(lock, "_is_owned")) for _, _, lock in found}
    return [(owner, name, locks[id(lock)]) for owner, name, lock in found]


def _is_made_by_user() -> bool:
    """Return whether the creator of a lock or queue is user code or a thread executor."""
    frame = calling_frame(*_LOCKS)
    while "concurrent" in frame.f_code.co_filename and frame.f_back is not None:
        # A real thread waits for the processes of such a pool.
        if frame.f_code.co_filename.endswith("process.py"):
            return False
        if frame.f_code.co_filename.endswith("thread.py"):
            return True
        frame = frame.f_back
    return is_user_code(frame.f_code.co_filename)


def _is_scheduled(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    if target is concurrent.futures.thread._worker:
        return True
    run = type(thread).run.__code__.co_filename
    return (
        is_called_by_user(*_LOCKS)
        or is_user_code(run)
        or is_user_code(getattr(target, "__code__", _start.__code__).co_filename)
    )


def _start(scheduler: Scheduler, thread: threading.Thread) -> None:
    def run() -> None:
        with as_current_thread(thread):
            try:
                with contextlib.suppress(SystemExit):  # as Python's threads do
                    thread.run()
            except Exception as error:
                threading.excepthook(
                    threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
                )

    simulated = SimulatedThread(scheduler, scheduler.spawn(run, thread.name, yields=False))
    thread.join, thread.is_alive = simulated.join, simulated.is_alive  # type: ignore[method-assign]
    vars(thread)["_started"].set()
    rank_world().started_threads.append(thread)


@contextmanager
def as_current_thread(thread: threading.Thread) -> Iterator[None]:
    """Make `threading.current_thread` return ``thread`` in this context."""
    ident = threading.get_ident()
    carrier = _threading._active[ident]
    _threading._active[ident] = thread
    vars(thread)["_ident"] = ident
    try:
        yield
    finally:
        _threading._active[ident] = carrier


def end_threads(threads: list[threading.Thread]) -> None:
    """Wait for a rank's threads like a process at its exit: non-daemon threads, and executors'
    pending work.
    """
    for thread in threads:
        if getattr(thread, "_target", None) is concurrent.futures.thread._worker:
            executor = vars(thread)["_args"][0]()
            if executor is not None:
                executor.shutdown(wait=True)
        elif not thread.daemon:
            thread.join()


def replace_clocks(replacements: Replacements, scheduler: Scheduler) -> None:
    """Replace Python's clocks by virtual ones; sleeping takes virtual time."""

    def now(start: float) -> float:
        if is_called_by_user():
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
        replacements.function(
            time, f"{name}_ns", lambda original, start=start: int(now(start) * 1e9)
        )
    replacements.function(time, "sleep", lambda original, seconds: scheduler.sleep(seconds))
    replacements.function(selectors.DefaultSelector, "select", select)
    # These modules' own names for `time.monotonic`, for timeouts of locks and queues.
    for module, name in ((threading, "_time"), (queue, "time")):
        replacements.function(module, name, lambda original: scheduler.time)


def replace_processes(replacements: Replacements, scheduler: Scheduler) -> None:
    """Run functions that ``spawn`` would start in processes on the ranks; refuse other launches;
    record signal handlers.
    """

    def refuse(what: str) -> NoReturn:
        advice = (
            "; a simulated world has its ranks already. Start them by"
            " torch.multiprocessing.spawn(function, nprocs=ranks of "
        )
        advice += "the node), or let the script be started by torchrun"
        scheduler.refuse("unsupported", f"starts {what}", what, advice)

    def spawn(
        original: Any,
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        *rest: Any,
        **options: Any,
    ) -> Any:
        identity = rank_world().identity
        if nprocs != identity.local_world_size:
            refuse(f"{nprocs} processes on a node of {identity.local_world_size} ranks")
        fn(identity.local_rank, *args)
        return None if join else SimpleNamespace(join=lambda timeout=None: True)  # they have ended

    def start(original: Callable[..., None], process: Any) -> None:
        modules = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None)}
        if not modules & _POOLS:
            refuse(f"process {process.name!r}")
        original(process)

    def popen(
        original: Callable[..., None], self: Any, args: Any, *rest: Any, **options: Any
    ) -> None:
        given: list[Any] = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        words = [part for word in given for part in os.fsdecode(word).split()]
        module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
        if Path(words[0]).name.startswith(_LAUNCHERS) or any(
            name.startswith((*_LAUNCHERS, "torch.distributed")) for name in module
        ):
            refuse(f"process {' '.join(words[:4])!r}")
        if len(rest) < 10 and options.get("env") is None:
            options["env"] = dict(os.environ)  # C code knows only the process's
        original(self, args, *rest, **options)

    def set_handler(original: Any, number: Any, handler: Any) -> Any:
        handlers = rank_world().signal_handlers
        previous = handlers.get(number, signal.SIG_DFL)
        handlers[number] = handler
        return previous

    replacements.function(torch.multiprocessing, "spawn", spawn)
    replacements.function(
        torch.distributed.rpc,
        "init_rpc",
        lambda original, *args, **options: refuse("torch.distributed.rpc"),
    )
    replacements.function(multiprocessing.process.BaseProcess, "start", start)
    replacements.function(subprocess.Popen, "__init__", popen)
    replacements.function(signal, "signal", set_handler)
    replacements.function(
        signal,
        "getsignal",
        lambda original, number: rank_world().signal_handlers.get(number, signal.SIG_DFL),
    )


def silence_profiler(replacements: Replacements) -> None:
    """Disable torch's profiler: a process has only one, which two ranks cannot use at a time."""

    def no_result(original: Any) -> Any:
        def save(path: str) -> None:
            Path(path).write_text('{"traceEvents": []}')

        return SimpleNamespace(
            trace_start_ns=lambda: 0, events=list, experimental_event_tree=list, save=save
        )

    profiler = torch.autograd.profiler
    for name in ("_prepare_profiler", "_enable_profiler"):
        replacements.function(profiler, name, lambda original, *args, **options: None)
    replacements.function(profiler, "_disable_profiler", no_result)


def separate_logging(replacements: Replacements) -> None:
    """Separate the logging handlers of each rank: a copy of the process's, and those that it adds
    itself.
    """
    lists: dict[tuple[int, logging.Logger], list[logging.Handler]] = {}

    def get(logger: logging.Logger) -> list[logging.Handler]:
        if not replacements.is_simulated():
            return vars(logger)["handlers"]  # type: ignore[no-any-return]
        key = rank_world().identity.rank, logger
        if key not in lists:
            lists[key] = list(vars(logger)["handlers"])
        return lists[key]

    def put(logger: logging.Logger, handlers: list[logging.Handler]) -> None:
        if replacements.is_simulated():
            vars(logger).setdefault("handlers", [])
            lists[rank_world().identity.rank, logger] = handlers
        else:
            vars(logger)["handlers"] = handlers

    def restore() -> None:
        del logging.Logger.handlers
        for logger, level in levels:
            logger.setLevel(level)

    levels = [
        (logger, logger.level)
        for logger in [logging.root, *logging.root.manager.loggerDict.values()]
        if isinstance(logger, logging.Logger)
    ]
    replacements.callback(restore)
    logging.Logger.handlers = property(get, put)  # type: ignore[assignment]


class UserModules(importlib.abc.MetaPathFinder):
    """Import finder for user modules; each rank gets its own copy of a module imported during the
    run.

    Args:
        modules_of_rank: returns the calling rank's modules by name.
    """

    def __init__(self, modules_of_rank: Callable[[], dict[str, ModuleType | None] | None]) -> None:
        self._modules_of_rank = modules_of_rank

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        """Find a module as Python does; register user modules for the rank."""
        modules = self._modules_of_rank()
        if modules is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            # A package of several folders has no file of its own.
            files = (
                [f"{folder}/" for folder in spec.submodule_search_locations or ()]
                if spec.origin is None
                else [spec.origin]
            )
            if all(file.endswith((".py", "/")) and is_user_code(file) for file in files):
                modules.setdefault(fullname, None)
        return spec


def run_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Run a script as a simulated rank's main program, with its own ``__main__``, arguments and
    modules.

    Args:
        path: path of the script.
        arguments: command-line arguments.
    """
    source = Path(path).read_bytes()
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    _run_main(compile(source, str(path), "exec"), str(path), arguments)


def run_module(name: str, arguments: Sequence[str] = ()) -> None:
    """Run a module, or a package's ``__main__``, as ``python -m`` does."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r} to run")
    code = compile(Path(spec.origin).read_bytes(), spec.origin, "exec")
    _run_main(code, spec.origin, arguments, __package__=spec.parent, __spec__=spec)


def _run_main(code: Any, path: str, arguments: Sequence[str], **names: Any) -> None:
    PROGRAMS.add(path)
    is_user_code.cache_clear()
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, **names)
    rank_world().process_state.modules["__main__"] = main
    sys.modules["__main__"] = main
    sys.argv = [path, *arguments]
    exec(code, main.__dict__)  # noqa: S102 # the user's own program
