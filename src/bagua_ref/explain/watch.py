"""A watchdog in each process: it dumps the rank's activity when a rank hangs, fails or is
terminated.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import linecache
import math
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import torch._C._distributed_c10d as native
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bagua_ref.base.runtime import current_world
from bagua_ref.env import get_rank, get_world_size
from bagua_ref.errors import CommunicationError

__all__ = ["HangWatch", "explain_hangs"]

_MOST = 300.0
"""Maximal seconds after which a wait is dumped; many timeouts are half an hour."""

_SIZE = "FR" if hasattr(native, "_dump_fr_trace") else "NCCL_TRACE"
_ENVIRONMENT = {f"TORCH_{_SIZE}_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}

_COUNTER = "bagua_ref.explain_hangs"
"""The key in the job's store that counts dumps, so that all ranks dump when one does."""

_COMMUNICATION = re.compile(r"gloo|NCCL|[Tt]imed out|[Cc]onnection (closed|reset)")
"""Pattern of communication errors, including those raised outside of torch.distributed's files."""

_Frames = Sequence[tuple[FrameType, int]]


class HangWatch:
    """The watchdog that `explain_hangs` starts.

    Attributes:
        folder: folder of the dumps.
    """

    def __init__(self, folder: str | Path, after: float | None = None) -> None:
        self.folder, self._after = Path(folder), after
        self._moved: dict[int, tuple[int, float]] = {}  # thread -> stack's hash, last change
        self._groups: dict[str, list[int]] = {}
        self._store: Any = None
        self._seen, self._moves = 0, 0
        self._content: dict[str, Any] | None = None
        self._has_failed = False
        self._mutex, self._written = threading.Lock(), threading.Event()
        self._previous: Any = None
        self._wakeup = -1
        self._excepthook = sys.excepthook
        self._thread = threading.Thread(target=self._run, name="explain_hangs", daemon=True)
        self._receive, self._send = -1, -1
        self._crash: IO[str] | None = None

    def start(self) -> None:
        """Install the hooks and start the thread."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self._paths():
            path.unlink(missing_ok=True)  # left over from an earlier run
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if "RANK" in os.environ:
            self._watch_crashes()
        self._receive, self._send = os.pipe()
        os.set_blocking(self._send, False)
        previous = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and previous is not None:
            # A Python handler runs only when the main thread's wait ends; the file descriptor is
            # written to at once.
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._wakeup = signal.set_wakeup_fd(self._send, warn_on_full_buffer=False)
        sys.excepthook = self._on_exception
        atexit.register(self.close, "exit")
        self._thread.start()

    def close(self, reason: str = "") -> None:
        """Stop the watchdog; restore signals and hooks unless others have replaced them.

        Args:
            reason: reason for a last dump, which is omitted if an exception was dumped.
        """
        if self._receive < 0:
            return
        atexit.unregister(self.close)
        os.write(self._send, b"\0")
        self._thread.join()
        if reason and self._content is None:
            self.dump(reason)
        elif self._content is not None and not self._has_failed:
            self._content["ended"] = True  # the wait has ended, too
            _write(self._paths()[1], json.dumps(self._content).encode())
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)
            if (other := signal.set_wakeup_fd(self._wakeup)) != self._send:
                signal.set_wakeup_fd(other)
        if self._crash is not None:
            # It stays open: the program may have enabled faulthandler meanwhile, which cannot be
            # detected.
            Path(self._crash.name).unlink(missing_ok=True)
        os.close(self._receive)
        os.close(self._send)
        self._receive = -1

    def _watch_crashes(self) -> None:
        """Enable faulthandler, unless the program has, so that crashes of native code write all
        stacks.
        """
        if self._crash is None and not faulthandler.is_enabled():
            path = self.folder / f"rank_{self._rank()}.crash"
            self._crash = path.open("w", encoding="utf-8")
            faulthandler.enable(self._crash)

    def dump(self, reason: str, error: BaseException | None = None) -> None:
        """Write this rank's state: its flight recorder, stacks and groups."""
        with self._mutex:
            recorder, stacks = self._paths()
            content: dict[str, Any] = {
                "rank": self._rank(),
                "world_size": dist.get_world_size() if dist.is_initialized() else get_world_size(),
                "time": time.time(),
                "reason": reason,
                "after": self._patience(),
                "error": None,
                "threads": [],
            }
            stacks_of = sys._current_frames()
            for thread in threading.enumerate():
                if thread.ident not in stacks_of or thread is self._thread:
                    continue
                stack = list(traceback.walk_stack(stacks_of[thread.ident]))
                seconds = time.monotonic() - self._moved.get(thread.ident, (0, math.inf))[1]
                if error is not None and thread is threading.current_thread():
                    stack = list(traceback.walk_tb(error.__traceback__))[::-1]
                    seconds = 1e9
                    content["error"] = {
                        "type": type(error).__name__,
                        "message": str(error),
                        "communication": _is_communication(error),
                    }
                content["threads"].append(
                    {
                        "name": "" if thread is threading.main_thread() else thread.name,
                        "seconds": max(seconds, 0.0),
                        "call": _call(stack),
                        "frames": [
                            {
                                "function": frame.name,
                                "filename": frame.filename,
                                "line": frame.lineno,
                                "text": frame.line,
                            }
                            for frame in traceback.StackSummary.extract(iter(stack))
                        ],
                    }
                )
                for frame, _ in stack:
                    if frame.f_code.co_name == "_new_group_with_tag":  # under way
                        variables = frame.f_locals
                        if variables.get("group_name"):
                            self._groups[variables["group_name"]] = list(variables["ranks"])
            content["threads"].sort(key=lambda one: one["name"])
            content["groups"] = self._groups | _groups()
            _write(stacks, json.dumps(content).encode())
            self._content, self._moves = content, 0
            for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # torch 2.6 has the first
                data = getattr(native, name, bytes)()
                if b"profiling_name" in data:
                    _write(recorder, data)
                    break

    def _paths(self) -> tuple[Path, Path]:
        rank = self._rank()
        return self.folder / f"torch_trace_rank_{rank}", self.folder / f"stacks_rank_{rank}.json"

    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else get_rank()

    def _patience(self) -> float:
        """Return the duration in seconds after which a wait is dumped."""
        if self._after is not None:
            return self._after
        try:
            device = c10d._get_default_group()._device_types[0]
            options = c10d._get_default_group()._get_backend(device).options
            return min(_MOST, 0.8 * options._timeout.total_seconds())
        except (AttributeError, RuntimeError, ValueError, LookupError):
            return _MOST

    def _run(self) -> None:
        """Main loop of the watchdog's thread: check for hangs once a second, and immediately after
        a signal.
        """
        while True:
            signals = b""
            if select.select([self._receive], [], [], min(1.0, self._patience() / 10))[0]:
                signals = os.read(self._receive, 4096)
            if b"\0" in signals:
                return
            if signals and self._wakeup >= 0:
                with contextlib.suppress(OSError):  # its owner has closed it
                    os.write(self._wakeup, signals)
            if signal.SIGTERM in signals:
                if self._is_new():
                    self.dump("SIGTERM")
                self._written.set()
                handler = signal.getsignal(signal.SIGTERM)
                if handler == self._on_signal and self._previous == signal.SIG_DFL:
                    # The main thread may be blocked, and only it may call signal.signal.
                    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
                    os.kill(os.getpid(), signal.SIGTERM)
            self._look()

    def _look(self) -> None:
        """Dump if a call has been stuck for too long, or if another rank has dumped."""
        now, oldest = time.monotonic(), math.inf
        for thread, frame in sys._current_frames().items():
            stack = list(traceback.walk_stack(frame))
            where = hash(tuple((id(frame), frame.f_lasti) for frame, _ in stack))
            before, since = self._moved.get(thread, (where, now))
            self._moved[thread] = where, since if before == where else now
            self._moves += before != where and thread == threading.main_thread().ident
            if before == where and _call(stack):
                oldest = min(oldest, since)
        if not dist.is_initialized():
            return
        self._watch_crashes()
        self._groups |= _groups()
        dump = getattr(native, "_dump_fr_trace_json", None)
        for entry in json.loads(dump(True, True)).get("entries", []) if dump else []:
            oldest = min(oldest, now - (time.time() - entry["time_created_ns"] / 1e9))
        count, patience = self._count(0), self._patience()
        if self._is_new() and (now - oldest >= patience or count > self._seen):
            self.dump("timeout" if now - oldest >= patience else "another rank")
            count = self._count(int(now - oldest >= patience))
        self._seen = count

    def _is_new(self) -> bool:
        """Return whether the main thread has moved since the last dump; if not, that dump describes
        the same incident better, as other ranks' dumps are of the same time.
        """
        return self._content is None or self._moves > 3

    def _count(self, more: int) -> int:
        """Add ``more`` to the count of ranks' dumps in the store; return the count."""
        try:
            if self._store is None:
                store: Any = c10d._get_default_store()
                self._store = store.clone()
            return int(self._store.add(_COUNTER, more))
        except (RuntimeError, ValueError, AttributeError):
            return self._seen  # the store's process has ended

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._written.wait(10)
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            self._has_failed = True
            if self._is_new() or not _is_communication(error):
                self.dump("exception", error)
                self._count(1)
        finally:
            self._excepthook(kind, error, trace)


def _is_communication(error: BaseException) -> bool:
    """Return whether communication raised this error, which may thus be caused by another rank."""
    kinds = (dist.DistError, CommunicationError)
    return isinstance(error, kinds) or bool(_COMMUNICATION.search(str(error)))


def _groups() -> dict[str, list[int]]:
    """Return the global ranks of each group in this process, by name."""
    names, world = dict(c10d._world.pg_names), c10d._world.pg_group_ranks
    return {
        name: sorted(world[group], key=world[group].__getitem__) for group, name in names.items()
    }


def _call(stack: _Frames) -> dict[str, Any]:
    """Return the call of torch.distributed in which a thread waits, from its frames' variables."""
    for frame, _ in reversed(stack):
        name = frame.f_code.co_name
        if frame.f_code.co_filename == c10d.__file__ and name[0] != "_":
            return _describe_call(name, frame.f_locals)
    operations = [
        operation
        for frame, line in stack
        if ".wait(" in linecache.getline(frame.f_code.co_filename, line)
        for value in frame.f_locals.values()
        if isinstance(value, list)
        for operation in value
        if isinstance(operation, dist.P2POp)
    ]
    if not operations:
        return {}
    sides = {dist.isend: "isend(dst=", dist.irecv: "irecv(src="}
    texts = [f"{sides[one.op]}{one.peer})" for one in operations]
    return {
        "operation": f"batch_isend_irecv({', '.join(texts)})",
        "group": c10d._world.pg_names.get(operations[0].group, ""),
        "peers": sorted({one.peer for one in operations}),
    }


def _describe_call(name: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a call of torch.distributed with its known arguments."""
    group: Any = variables.get("group")
    if group is None and dist.is_initialized():
        group = c10d._get_default_group()
    found: dict[str, Any] = {"group": c10d._world.pg_names.get(group, "")}
    found["members"] = members = _groups().get(found["group"])
    arguments, peer = "", None
    for side in ("src", "dst"):
        if side in variables:
            own, peer = variables.get(f"group_{side}"), variables[side]
            peer = members[own] if members and own is not None else peer
            arguments = f"{side}={peer}"
    if variables.get("tag"):
        arguments += f", tag={variables['tag']}"
    tensor: Any = variables.get("tensor")
    tensors = f" of {_describe_tensor(tensor)}" if isinstance(tensor, Tensor) else ""
    if name in ("send", "recv", "isend", "irecv"):
        found["peers"] = [] if peer is None else [peer]
    elif peer is not None:
        found["root"] = peer
    elif name == "new_group":
        arguments = f"{variables.get('ranks')}"
    elif name.startswith("all_to_all") and members:
        for side, way in (("sent", "input"), ("received", "output")):
            found[side] = _splits(variables, way, members)
    return {"operation": f"{name}({arguments}){tensors}", **found}


def _splits(variables: Mapping[str, Any], way: str, members: Sequence[int]) -> dict[int, int]:
    """Return the numbers of elements that an all-to-all sends to each rank or receives from it."""
    counts = [tensor.numel() for tensor in variables.get(f"{way}_tensor_list", ())]
    tensor = variables.get(way)
    if isinstance(tensor, Tensor):
        rows = variables.get(f"{way}_split_sizes") or [len(tensor) // len(members)] * len(members)
        counts = [count * math.prod(tensor.shape[1:]) for count in rows]
    return dict(zip(members, counts, strict=False))


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(f"{path.name}.part.new")
    part.write_bytes(data)
    part.replace(path)


def explain_hangs(folder: str | Path, *, after: float | None = None) -> HangWatch:
    """Watch this process, and dump its state into ``folder`` when the job hangs, for ``bagua-ref
    explain FOLDER``.

    Call it once on every rank, before or after ``init_process_group``; all ranks can share the
    folder. A daemon thread looks once a second. It writes torch's flight recorder, the stack of
    each thread and the ranks of each group when a call of this rank has waited too long, when
    another rank has written, after SIGTERM (also while the main thread is blocked, and before other
    handlers), after an exception that nothing catches, and at the end. Unless the program has enabled
    `faulthandler`, this does: a crash of native code writes the stacks, too.

    Args:
        folder: created if missing. Files of this rank from an earlier run are removed.
        after: duration in seconds after which a wait is too long; None: 80 % of the timeout of the
            default group, at most 300.

    Returns:
        The watch; its ``close()`` ends it, and ``dump("reason")`` writes at once.

    Raises:
        ValueError: ``after`` is not positive.
        OSError: the folder cannot be created.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bagua_ref.explain_hangs(folder).close()
    """
    if after is not None and not after > 0:
        raise ValueError(f"after={after!r} must be a positive number of seconds, or None")
    watch = HangWatch(folder, after)
    if current_world().board is None:  # simulated ranks share a process, and have their own verdict
        watch.start()
    return watch
