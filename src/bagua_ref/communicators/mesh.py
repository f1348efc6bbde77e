"""Sockets between all ranks of a group, connected with the help of a slower channel."""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import select
import socket
import struct
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

__all__ = [
    "Sockets",
    "Unreachable",
    "Until",
    "close_sockets",
    "connect_all",
    "listen_locally",
    "listen_towards",
    "receive",
    "routes_towards",
]

_LIMIT = 5.0
"""Seconds in which all sockets must be connected, or half of the group's timeout if that is
less.
"""
_STRANGERS = 64
"""Connections beyond one for each rank that may be open before they have authenticated
themselves.
"""
_HANG_UP = getattr(select, "POLLRDHUP", 0)
"""Linux reports a closed connection before its data have been read; elsewhere there is no such
flag.
"""
_PAUSE = 0.005
"""Seconds between two attempts to connect to a rank whose backlog is full."""
_LONGEST = 256
"""Bytes of the message with which a rank announces its address."""
_TOKEN = 16
"""Bytes of the group's secret, with which a rank authenticates itself; its number follows, in four
bytes.
"""


class Unreachable(Exception):  # noqa: N818  it is never raised to a user
    """Some ranks cannot reach each other; every rank of the group gets this exception."""


def connect_all(
    rank: int,
    nranks: int,
    listen: Callable[[], socket.socket],
    share: Callable[[Sequence[int]], list[list[int]]],
    timeout: float,
) -> dict[int, socket.socket]:
    """Connect all ranks of a group; return this one's socket to each other rank.

    Any process may connect to a rank that listens. Over Unix sockets, only processes of the same
    user are accepted; over TCP, only those with the group's secret. Others are disconnected and
    delay no rank.

    Args:
        rank: this rank.
        nranks: the number of ranks.
        listen: returns a socket that listens where the other ranks reach it; raises OSError if it
            cannot.
        share: exchanges equally many int64 with every rank; its exceptions are raised here, too.
        timeout: seconds that the other ranks wait in ``share``.

    Raises:
        Unreachable: not all ranks were connected within five seconds, or half of ``timeout``.
    """
    token, server, place, why = secrets.token_bytes(_TOKEN), None, [], ""
    try:
        server = listen()
        name = server.getsockname()
        place = [
            int(server.family),
            *([name.decode()] if isinstance(name, bytes) else name[:2]),
            token.hex(),
        ]
    except OSError as error:
        why = f": {error}"
    sockets, own = dict[int, socket.socket](), json.dumps(place).encode().ljust(_LONGEST)
    with server or nullcontext(), ExitStack() as opened:
        places = [json.loads(array("q", numbers).tobytes()) for numbers in share(array("q", own))]
        deadline = time.monotonic() + min(_LIMIT, timeout / 2)
        try:
            if server is not None and all(places):
                for peer in range(rank):
                    *where, secret = places[peer]
                    sockets[peer] = opened.enter_context(
                        _greet(where, bytes.fromhex(secret) + rank.to_bytes(4, "big"), deadline)
                    )
                _welcome(server, token, set(range(rank + 1, nranks)), sockets, opened, deadline)
        except OSError as error:
            why = f": {error}"
        reached = [bool(all_of_them) for (all_of_them,) in share([int(len(sockets) == nranks - 1)])]
        if not all(reached):
            raise Unreachable(f"not all ranks can reach each other directly{why}")
        opened.pop_all()
    return sockets


def listen_towards(host: str) -> socket.socket:
    """Return a socket that listens on the address with which this rank would talk to ``host``."""
    for family, address in routes_towards(host):
        with suppress(OSError):
            return socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
    raise OSError(f"no route to {host!r}")


def routes_towards(host: str) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Yield families and addresses from which this machine would talk to ``host``; raise OSError if
    nobody knows its name.
    """
    for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.connect(place)  # this sends nothing, but chooses the address
            yield family, probe.getsockname()[0]


def listen_locally() -> socket.socket:
    """Return a socket that listens for processes of this machine, under a new name that belongs to
    no file (Linux).
    """
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(f"\0bagua_ref/{secrets.token_hex(8)}")
        server.listen(socket.SOMAXCONN)
    except OSError:
        server.close()
        raise
    return server


def close_sockets(sockets: Mapping[int, socket.socket], pid: int) -> None:
    """Close sockets of process ``pid``, which the other ranks notice; a forked child only closes
    its copies.
    """
    for connected in sockets.values():
        if os.getpid() == pid:
            with suppress(OSError):  # the other end has closed it
                connected.shutdown(socket.SHUT_RDWR)
        connected.close()


class Sockets:
    """A socket to each other rank of a group, used without waiting.

    Args:
        sockets: the connected sockets, by rank.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        for connected in sockets.values():
            connected.setblocking(False)
        self._sockets = sockets
        self.close = weakref.finalize(self, close_sockets, sockets, os.getpid())
        """Close the sockets, which the other ranks notice; also called when this is
        garbage-collected.
        """
        self.close.atexit = False

    def hung_up(self) -> list[int]:
        """Return the ranks that have closed their ends."""
        poll, peers = (
            select.poll(),
            {one.fileno(): peer for peer, one in self._sockets.items() if one.fileno() >= 0},
        )
        for file in peers:
            poll.register(file, _HANG_UP)
        return [peers[file] for file, _ in poll.poll(0)]


class Until:
    """A wait for messages; `wait` and `is_completed` are those of a torch.distributed work.

    Args:
        holds: reads messages, without waiting, and returns whether the wait is over.
        end_reason: returns the reason that it never will be; "" while it may.
        listen: waits for messages, for some seconds at most.
        timeout: seconds, from the first `wait` on, after which it has failed.
    """

    def __init__(
        self,
        holds: Callable[[], bool],
        end_reason: Callable[[], str],
        listen: Callable[[float], object],
        timeout: float,
    ) -> None:
        self._holds, self._end_reason, self._listen, self._timeout = (
            holds,
            end_reason,
            listen,
            timeout,
        )
        self._deadline = math.inf

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._holds() or bool(self._end_reason()) or time.monotonic() >= self._deadline

    def wait(self, limit: timedelta = timedelta.max) -> None:
        """Wait until it is over, for ``limit`` at most.

        Raises:
            RuntimeError: it is not over in time; if `is_completed`, it never will be.
        """
        now = time.monotonic()
        self._deadline = min(self._deadline, now + self._timeout)
        until = min(self._deadline, now + limit.total_seconds())
        while not self._holds():
            if why := self._end_reason():
                raise RuntimeError(why)
            if (left := until - time.monotonic()) <= 0:
                raise RuntimeError("timed out")
            self._listen(left)


def _greet(where: Sequence[Any], greeting: bytes, deadline: float) -> socket.socket:
    """Return a socket connected to ``where``, an address family and an address."""
    family, *address = where
    while True:
        connected = socket.socket(family)
        try:
            connected.settimeout(_left(deadline))
            connected.connect(tuple(address) if len(address) > 1 else address[0])
            _check_user(connected)
            connected.sendall(greeting)
            return connected
        except BlockingIOError:
            # a Unix socket whose backlog is full, perhaps of strangers, which the rank disconnects
            connected.close()
            time.sleep(_PAUSE)
        except OSError:
            connected.close()
            raise


def _welcome(
    server: socket.socket,
    token: bytes,
    missing: set[int],
    sockets: dict[int, socket.socket],
    opened: ExitStack,
    deadline: float,
) -> None:
    """Accept connections until all ranks ``missing`` have connected, in any order; close those that
    do not come from them.
    """
    server.setblocking(False)
    greetings: dict[socket.socket, bytes] = {}  # bytes received so far, in the order of connecting
    try:
        while missing:
            ready = wait([server, *greetings], _left(deadline))
            if server in ready:
                with suppress(BlockingIOError, ConnectionError):  # it has already disconnected
                    _accept(server, greetings)
            for connected in list(greetings):
                more, ended = (
                    receive(connected, _TOKEN + 4 - len(greetings[connected]))
                    if connected in ready
                    else (b"", "")
                )
                greetings[connected] += more
                if len(greetings[connected]) == _TOKEN + 4:
                    greeting = greetings.pop(connected)
                    peer = int.from_bytes(greeting[_TOKEN:], "big")
                    if hmac.compare_digest(greeting[:_TOKEN], token) and peer in missing:
                        missing.remove(peer)
                        sockets[peer] = opened.enter_context(connected)
                    else:
                        connected.close()
                elif ended or len(greetings) > len(missing) + _STRANGERS:
                    del greetings[connected]
                    connected.close()
    finally:
        for connected in greetings:
            connected.close()


def _accept(server: socket.socket, greetings: dict[socket.socket, bytes]) -> None:
    connected, _ = server.accept()
    try:
        _check_user(connected)
    except OSError:
        connected.close()
    else:
        connected.setblocking(False)
        greetings[connected] = b""


def receive(connected: socket.socket, size: int) -> tuple[bytes, str]:
    """Return up to ``size`` bytes that have come, without waiting, and the reason that no more
    will; "" while they may.
    """
    try:
        received = connected.recv(size)
    except BlockingIOError:
        return b"", ""
    except OSError as error:
        return b"", str(error)
    return received, "" if received else "connection closed by peer"


def _check_user(connected: socket.socket) -> None:
    """Raise OSError if a process of another user is at the other end of a Unix socket."""
    # Linux; others do not listen on Unix sockets
    if hasattr(socket, "SO_PEERCRED") and connected.family == socket.AF_UNIX:
        _, user, _ = struct.unpack(
            "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if user != os.geteuid():
            raise PermissionError(f"a process of user {user} is at the other end")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not in time")
    return left
