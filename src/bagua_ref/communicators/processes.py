"""Processes of a job: detection of other ranks' exits, and protection of forked children, which
must not use connections.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import socket
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from bagua_ref.errors import CommunicationError

_logger = logging.getLogger(__name__)
_BOOT = "/proc/sys/kernel/random/boot_id"
"""File with a random name of the machine, new at each boot."""


def machine(namespace: str) -> str:
    """Return a unique name of this machine and of the process's ``namespace`` ("pid" or "net") on
    it; "" if the system hides it.
    """
    try:
        with open(_BOOT) as file:
            return f"{file.read().strip()} {os.stat(f'/proc/self/ns/{namespace}').st_ino}"
    except OSError:
        return ""


def node_name() -> str:
    """Return this node's name: the launcher's, else the host name."""
    return os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", socket.gethostname()))


def this_process() -> list[Any]:
    """Return this process's machine and PID namespace, PID and start time; ["", 0, 0] if it cannot
    be watched.
    """
    where = machine("pid") if hasattr(os, "pidfd_open") else ""
    return [where, os.getpid(), _start_time(os.getpid())] if where else ["", 0, 0]


class Processes:
    """Watcher of other ranks' processes on this machine, through file descriptors that become
    readable when a process ends.

    Args:
        found: the result of `this_process` on each rank.
        rank: this rank.
    """

    def __init__(self, found: Sequence[Sequence[Any]], rank: int) -> None:
        self._files: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._ended: set[int] = set()
        self._wakes, self._wake = os.pipe()
        for other, (where, pid, started) in enumerate(found):
            if other != rank and where and where == found[rank][0]:
                self._watch(other, pid, started)

    def _watch(self, rank: int, pid: int, started: int) -> None:
        try:
            self._files[rank], self._pids[rank] = os.pidfd_open(pid), pid
            if _start_time(pid) != started:  # the PID is another process's by now
                self._ended.add(rank)
        except (ProcessLookupError, FileNotFoundError):
            self._ended.add(rank)
        except OSError as error:
            _logger.info(
                "the process of rank %d cannot be watched: %s; its end is noticed when its sockets"
                " close",
                rank,
                error,
            )

    def are_watched(self, ranks: Collection[int]) -> bool:
        """Return whether an exit of each of ``ranks`` would be detected."""
        return set(ranks) <= self._files.keys() | self._ended

    def ended(self, ranks: Iterable[int], seconds: float = 0.0) -> set[int]:
        """Return the dead ones of ``ranks``; if there are none, wait for one.

        Args:
            ranks: ranks with a process on this machine.
            seconds: the limit of the wait; inf: until `wake`.
        """
        among = set(ranks)
        if not self._ended & among:
            rank_of = {file: rank for rank, file in self._files.items() if rank in among}
            poll, forever = select.poll(), math.isinf(seconds)
            for file in (*rank_of, self._wakes) if forever else rank_of:
                poll.register(file, select.POLLIN)
            for file, event in poll.poll(None if forever else math.ceil(1000 * seconds)):
                if file == self._wakes:
                    os.read(file, 4096)
                elif event & select.POLLIN:
                    self._ended.add(rank_of[file])
        return self._ended & among

    def is_stopped(self, rank: int) -> bool:
        """Return whether the process of ``rank`` is on this machine and was stopped by a signal."""
        with suppress(KeyError, OSError):
            return _fields(self._pids[rank])[0] in "Tt"
        return False

    def wake(self) -> None:
        """Wake the thread that waits in `ended` without a limit, or will do so next."""
        os.write(self._wake, b"x")

    def close(self) -> None:
        """Stop watching, and close all descriptors."""
        files, self._files = [*self._files.values(), self._wakes, self._wake], {}
        for file in files:
            os.close(file)


def _start_time(pid: int) -> int:
    """Return the start time of process ``pid``, in clock ticks since boot."""
    return int(_fields(pid)[19])


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the process state on."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


_connected: WeakSet[Any] = WeakSet()
"""Objects that own connections."""


def leave_to_parent(connected: Any) -> None:
    """Register ``connected``, so that every forked child of this process calls
    ``connected.leave_to_parent()``.

    The method closes sockets in the child, so that connections end with the parent.
    """
    _connected.add(connected)
    _watch_forks()


def refuse_in_child(pid: int) -> None:
    """Raise CommunicationError if this is a forked child of process ``pid``.

    Raises:
        CommunicationError: this process was forked from process ``pid``.
    """
    if os.getpid() != pid:
        raise CommunicationError(
            "this process was forked after init_process_group() and cannot use its parent's process"
            " groups; call init_process_group() after the fork instead, start the process with"
            " multiprocessing's 'spawn', or do not communicate or train in it"
        )


def keep_forever(thing: Any) -> None:
    """Keep ``thing`` alive until the process ends, even while the interpreter frees all modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    for connected in list(_connected):
        keep_forever(connected)
        connected.leave_to_parent()
    if _connected:
        keep_forever(dict(dist.distributed_c10d._world.pg_map))
