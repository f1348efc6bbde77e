"""Connections in a forked child: they are refused there, and the child lets go of their sockets, which belong to its parent."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

import torch.distributed as dist

from bagua_ref.errors import CommunicationError

__all__ = ["Connected", "OfParent", "keep_forever", "leave_to_parent", "refuse_in_child"]

_connected: WeakSet[Connected] = WeakSet()


class Connected(Protocol):
    """An owner of connections."""

    def leave_to_parent(self) -> None:
        """Put `OfParent` in the place of every connection, and close its sockets here, so that they end with the parent."""


class OfParent:
    """Stands in for a connection of the parent process; every use of it raises `CommunicationError`.

    Destroying the connection would end the parent's, too: both processes share the epoll set that watches its sockets.
    """

    def __init__(self, connection: Any) -> None:
        keep_forever(connection)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse()


def leave_to_parent(connected: Connected) -> None:
    """Call ``connected.leave_to_parent()`` in every child that this process forks from now on."""
    _connected.add(connected)
    _watch_forks()


def refuse_in_child(pid: int) -> None:
    """Raise unless this is process ``pid``.

    Raises:
        CommunicationError: it was forked from that process.
    """
    if os.getpid() != pid:
        _refuse()


def keep_forever(thing: Any) -> None:
    """Keep ``thing`` until the process ends, even when the interpreter frees all modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _refuse() -> NoReturn:
    raise CommunicationError(
        "this process was forked after init_process_group() and cannot use its parent's process groups; call init_process_group() "
        "after the fork instead, start the process with multiprocessing's 'spawn', or do not communicate or train in it"
    )


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    for connected in list(_connected):
        keep_forever(connected)
        connected.leave_to_parent()
    if _connected:
        keep_forever(dict(dist.distributed_c10d._world.pg_map))
