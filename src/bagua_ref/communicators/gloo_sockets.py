"""Sockets and threads of gloo's process groups, and sockets of torch's store.

Sockets are identified so that they can be shut down at once, or closed in a forked child.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
"""The C library; only used where `open_sockets` finds sockets."""
_MOST = 4
"""Maximum number of sockets that start listening while a group is created; one of them is
gloo's.
"""
_PAUSE = 0.006
"""Polling interval of gloo's threads, in seconds: longer than Python's switch interval, after which
a thread that waits for the GIL gets it.
"""


def let_gloo_rest(limit: float = 1.0) -> None:
    """Wait until gloo's threads are idle, for at most ``limit`` seconds.

    After a collective has ended, the thread of gloo that ran it frees its tensors, for which it
    needs the GIL. If the interpreter ends before that, it aborts the process ("terminate called
    without an active exception"); if the process group is freed before that, as by a
    DistributedDataParallel that is its last owner, both wait for each other forever
    (pytorch/pytorch#179291 and #56297).
    """
    deadline, looks = time.monotonic() + limit, 0
    while looks < 2 and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        looks = 0 if _gloo_computes() else looks + 1


def _gloo_computes() -> bool:
    """Return whether a thread of gloo is running; False on systems without /proc."""
    for file in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            name, _, fields = file.read_text().rpartition(") ")
            if "(pt_gloo" in name and not fields.startswith("S"):
                return True
    return False


def open_sockets() -> dict[int, int]:
    """Map descriptors of this process's sockets to inodes; empty without /proc or if all
    descriptors are in use.
    """
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the folder itself
                status = os.stat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


class GlooSockets:
    """The sockets that connect this rank with the others in a gloo process group.

    gloo does not reveal its descriptors, so they are identified: sockets opened since the group's
    creation began, one end of which has a port on which a rank of the group listens. Other threads
    may open sockets at the same time.

    Args:
        before: the `open_sockets` before the group was created.
    """

    def __init__(self, before: dict[int, int]) -> None:
        self._sockets = {
            file: inode for file, inode in open_sockets().items() if before.get(file) != inode
        }
        own = [ports[0] for file in self._sockets if (ports := _ports(file)) and ports[1] is None][
            :_MOST
        ]
        self.listening = own + [0] * (_MOST - len(own))
        """Ports on which this rank may be listening, padded with zeros."""

    def find(self, listening: Sequence[Sequence[int]], rank: int) -> None:
        """Identify this ``rank``'s connections, given the ports on which all ranks are
        ``listening``.
        """
        theirs = {
            port for peer, ports in enumerate(listening) if peer != rank for port in ports
        } - {0}
        for file in list(self._sockets):
            local, remote = _ports(file) or (None, None)
            if remote is None or not (local in self.listening or remote in theirs):
                del self._sockets[file]

    def shut_down(self) -> None:
        """Shut down all connections, which both ends notice at once."""
        for file in self._open():
            _libc.shutdown(file, socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        """Close a forked child's copies of the sockets, so that the connections end with the
        parent.
        """
        for file in self._open():
            os.close(file)

    def _open(self) -> list[int]:
        return [file for file, inode in self._sockets.items() if _inode(file) == inode]


def sockets_of_server(store: Store) -> list[int]:
    """Return the socket descriptors of the server of ``store``, if it runs in this process or its
    parent; else none.
    """
    store = getattr(store, "_underlying_non_prefix_store", store)
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return []
    port = store.port
    ports = {file: found for file in open_sockets() if (found := _ports(file)) and found[0] == port}
    return list(ports) if (port, None) in ports.values() else []


def _inode(file: int) -> int:
    try:
        return os.fstat(file).st_ino
    except OSError:
        return 0


def _ports(file: int) -> tuple[int, int | None] | None:
    """Return the local and remote port of a TCP socket; the remote port is None if it is not
    connected. None for other files.
    """
    local, remote = _port(_libc.getsockname, file), _port(_libc.getpeername, file)
    return None if local is None else (local, remote)


def _port(name_of: Any, file: int) -> int | None:
    # Not with a socket object, which would change the socket's timeout to
    # socket.getdefaulttimeout().
    address, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if name_of(file, address, ctypes.byref(size)) != 0:
        return None
    family = int.from_bytes(address.raw[:2], sys.byteorder)
    return (
        int.from_bytes(address.raw[2:4], "big")
        if family in (socket.AF_INET, socket.AF_INET6)
        else None
    )
