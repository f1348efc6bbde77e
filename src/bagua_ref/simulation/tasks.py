"""Threads of a simulation: their waits, their rank's part of the process's state, and the lines of
user code that they run.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import math
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bagua_ref.base.ranks import describe_ends, format_ranks
from bagua_ref.errors import RankCall

_SENTENCES = 16
"""Maximal number of waits listed in a message."""


_this_core: Any = (
    getattr(ctypes.CDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None
)
"""Function that returns the core of the calling thread; None outside of Linux."""


class Unwind(BaseException):
    """Raised in a waiting thread to end it once the run is over."""


@dataclass(eq=False, slots=True)
class Ticket:
    """Ticket for a single wait of one thread.

    Attributes:
        what: the words that follow "rank 3 waits " in messages.
        collective: whether only other ranks can end this wait.
        call: the communication that it waits for, whose ``facts()`` are a `RankCall`.
        granted: whether the wait is over, with the result ``value``.
        deadline: virtual time at which the wait ends at the latest.
        passes: whether the wait ends by itself, like a sleep.
    """

    task: Task | None
    what: str
    collective: bool = False
    call: Any = None
    granted: bool = False
    value: Any = None
    deadline: float = math.inf
    passes: bool = False


@dataclass(eq=False, repr=False)
class Task:
    """A scheduled thread; ``rank`` is its rank, ``thread`` its name, or empty for the rank's main
    thread.
    """

    rank: int
    name: str
    is_main: bool
    function: Callable[[], None]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    joining: list[Ticket] = field(default_factory=list)
    ident: int | None = None
    system_id: int = 0
    ticket: Ticket | None = None
    ready: bool = False
    unwinding: bool = False
    done: bool = False
    killed: bool = False

    def __post_init__(self) -> None:
        self.thread = "" if self.is_main else self.name
        self._baton = threading.Lock()
        self._baton.acquire()

    def __repr__(self) -> str:
        return f"rank {self.rank}" if self.is_main else f"rank {self.rank}'s thread {self.name!r}"

    def wait_for_turn(self, let_another_run: Callable[[], None] = lambda: None) -> None:
        """Block the calling thread, which must be the task's, until it is scheduled."""
        # asked before another thread can change them
        cores = os.sched_getaffinity(0) if _this_core else ()
        self.system_id = threading.get_native_id()
        let_another_run()
        self._baton.acquire()
        if cores:
            with suppress(OSError):
                os.sched_setaffinity(0, cores)

    def give_turn(self) -> None:
        """Resume the task's thread, pinned to this core until it runs, as waking another core takes
        as long as most turns.
        """
        if self.system_id and _this_core:
            with suppress(OSError):
                os.sched_setaffinity(self.system_id, {_this_core()})
        self._baton.release()


class RankState:
    """A rank's own copy of process-wide state: torch's CPU generator and Python's `random`.

    A rank's state is saved when another rank continues, and restored before the rank continues. All
    ranks start with the caller's state.
    """

    def __init__(self) -> None:
        RankState.save(self)

    def save(self) -> None:
        """Copy the state from the process."""
        self._torch, self._python = torch.default_generator.get_state(), random.getstate()

    def restore(self) -> None:
        """Restore the state in the process."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)

    def resumed(self) -> None:
        """Prepare the calling thread when it resumes after another one."""


def blocked(task: Task) -> RankCall:
    """Return the call in which a thread waits, with the ranks that it waits for."""
    ticket, site = task.ticket, call_site(sys._current_frames().get(task.ident or 0))
    assert ticket is not None
    facts = (
        RankCall(task.rank, "", ticket.what, "", "", 0)
        if ticket.call is None
        else ticket.call.facts()
    )
    return facts._replace(thread=task.thread, file=site[0], line=site[1])


def who_waits(
    tasks: Iterable[Task], returned: Sequence[int], steps: Mapping[int, int | None]
) -> str:
    """Describe each waiting rank with its call, and the ranks that have ``returned``: those in
    ``steps`` as in `describe_ends`.
    """
    waits: dict[str, list[int]] = {}
    for task in sorted(tasks, key=lambda task: task.rank):
        if task.ticket is not None:
            where = "" if task.is_main else f" in thread {task.name!r}"
            waits.setdefault(f"{task.ticket.what}{where}", []).append(task.rank)
    sentences = [
        f"{format_ranks(ranks)} wait{'s' * (len(ranks) == 1)} {what}"
        for what, ranks in waits.items()
    ]
    if len(sentences) > _SENTENCES:
        sentences[_SENTENCES:] = [f"{len(sentences) - _SENTENCES} more wait"]
    if others := sorted(rank for rank in returned if rank not in steps):
        sentences.append(f"{format_ranks(others)} {'has' if len(others) == 1 else 'have'} returned")
    return "; ".join([*sentences, describe_ends(steps)] if steps else sentences)


_LIBRARIES = tuple(
    str(Path(file).resolve().parent) + os.sep
    for file in (os.__file__, torch.__file__, Path(__file__).parent)
)


PROGRAMS: set[str] = set()
"""The files that ranks run, which are user code even if they belong to a package."""


@functools.cache
def is_user_code(file: str) -> bool:
    """Return whether a file is user code: a program of the ranks, or a file outside of Python,
    installed packages and this package.
    """
    if file in PROGRAMS:
        return True
    if file.startswith("<"):
        return not file.startswith("<frozen ")
    path = Path(file).resolve()
    return not str(path).startswith(_LIBRARIES) and not any(map(_has_packages, path.parents))


@functools.cache
def _has_packages(folder: Path) -> bool:
    """Return whether a folder contains installed packages."""
    return folder.name in ("site-packages", "dist-packages") or any(folder.glob("*.dist-info"))


def call_site(frame: FrameType | None) -> tuple[str, int]:
    """Return file and line of the innermost user frame, from ``frame`` outwards; ("", 0) if there
    is none.
    """
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


_TRANSPARENT = ("distributed_c10d.py", "c10d_logger.py", "contextlib.py")


def is_called_directly(frame: FrameType | None) -> bool:
    """Return whether user code calls torch's collective directly, not through a library such as
    torch's own Join.
    """
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES[-1]) and not file.endswith(_TRANSPARENT):
            return False
        frame = frame.f_back
    return True


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a `torch.distributed.tensor.DTensor`, without importing its
    module, which takes a second.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def place(file: str, line: int) -> str:
    """Format a file and line as text."""
    return f"{file}:{line}" if file else "an unknown line"


def raise_site(error: BaseException) -> tuple[str, int]:
    """Return file and line of the innermost user frame in an exception's traceback, or of its
    innermost frame.
    """
    sites = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return ([site for site in sites if is_user_code(site[0])] or sites or [("", 0)])[-1]
