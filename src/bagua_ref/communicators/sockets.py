"""Sockets between all ranks of a group, connected with the help of a slower channel, and exchanges
of a few int64 over them.

A message waits in the operating system until it is read, so that no thread wakes for it. A message
of gloo wakes a thread at both ends twice, which takes half a millisecond of a step on two cores.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import secrets
import select
import socket
import struct
import time
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

__all__ = [
    "IntSockets",
    "Sockets",
    "Until",
    "close_sockets",
    "connect_all",
    "receive",
]

_logger = logging.getLogger(__name__)
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


def connect_all(
    rank: int,
    nranks: int,
    host: str,
    share: Callable[[Sequence[int]], list[list[int]]],
    timeout: float,
    otherwise: str,
) -> dict[int, socket.socket] | None:
    """Connect all ranks of a group; return this one's socket to each other rank, or None, on every
    rank, if some were not connected within five seconds, or half of ``timeout``.

    Any process may connect to a rank that listens. Over Unix sockets, only processes of the same
    user are accepted; over TCP, only those with the group's secret. Others are disconnected and
    delay no rank.

    Args:
        rank: this rank.
        nranks: the number of ranks.
        host: a machine that all ranks reach; this rank listens on the address from which it would
            connect to it. "": all ranks are on one machine.
        share: exchanges equally many int64 with every rank; its exceptions are raised here, too.
        timeout: seconds that the other ranks wait in ``share``.
        otherwise: the words that say, in the log, what happens without the sockets.
    """
    token, server, place, why = secrets.token_bytes(_TOKEN), None, [], ""
    try:
        server = _listen_towards(host) if host else _listen_locally()
        name = server.getsockname()
        address = [name.decode()] if isinstance(name, bytes) else name[:2]
        place = [int(server.family), *address, token.hex()]
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
                    greeting = bytes.fromhex(secret) + rank.to_bytes(4, "big")
                    sockets[peer] = opened.enter_context(_greet(where, greeting, deadline))
                _welcome(server, token, set(range(rank + 1, nranks)), sockets, opened, deadline)
        except OSError as error:
            why = f": {error}"
        if not all(all_of_them for (all_of_them,) in share([int(len(sockets) == nranks - 1)])):
            _logger.info("%s, as not all ranks can reach each other directly%s", otherwise, why)
            return None
        opened.pop_all()
    for connected in sockets.values():
        if host:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def _listen_towards(host: str) -> socket.socket:
    """Return a socket that listens on the address with which this rank would talk to ``host``."""
    for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)  # this sends nothing, but chooses the address
            address = probe.getsockname()[0], 0
            return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
    raise OSError(f"no route to {host!r}")


def _listen_locally() -> socket.socket:
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


class IntSockets(Sockets):
    """A socket to each other rank of a group, and one exchange at a time.

    Args:
        sockets: a connected socket to each other rank.
        timeout: seconds of waiting after which an exchange has failed.
    """

    def __init__(self, sockets: dict[int, socket.socket], timeout: float) -> None:
        super().__init__(sockets)
        self._timeout = timeout
        self._values: Sequence[int] = []
        self._bytes: dict[int, bytes] = {}
        self._missing: dict[socket.socket, int] = {}
        self._failed = ""
        """The reason that the exchange will never be complete."""

    def send(self, values: Sequence[int]) -> Until:
        """Send ``values``, a few int64, to every other rank; return the wait for theirs.

        Raises:
            RuntimeError: a rank has left, or the last exchange has not been waited for.
        """
        if self._missing:
            raise RuntimeError("the last exchange has not been waited for")
        self._values = values
        self._bytes, self._missing = (
            dict.fromkeys(self._sockets, b""),
            {one: peer for peer, one in self._sockets.items()},
        )
        message = array("q", [len(values), *values]).tobytes()
        try:
            for connected in self._sockets.values():
                # there is room for hundreds, and no rank is two ahead
                if connected.send(message) < len(message):
                    raise RuntimeError("a rank does not read its messages")
        except OSError as error:
            raise RuntimeError(str(error)) from None
        return Until(
            self.are_complete,
            lambda: self._failed,
            lambda left: wait(list(self._missing), left),
            self._timeout,
        )

    def are_complete(self) -> bool:
        """Read without waiting; return whether the exchange is complete."""
        size = 8 * (1 + len(self._values))
        for connected, peer in [] if self._failed else list(self._missing.items()):
            more, self._failed = receive(connected, size - len(self._bytes[peer]))
            self._bytes[peer] += more
            if len(self._bytes[peer]) == size:
                del self._missing[connected]
                if (length := array("q", self._bytes[peer])[0]) != len(self._values):
                    self._failed = (
                        f"rank {peer} of the group sent {length} numbers, this rank"
                        f" {len(self._values)}"
                    )
            if self._failed:
                break
        return not self._failed and not self._missing

    def received(self) -> list[list[int]]:
        """Return the values of all ranks, once the exchange is complete."""
        theirs = {peer: array("q", received).tolist()[1:] for peer, received in self._bytes.items()}
        return [
            theirs[rank] if rank in theirs else list(self._values)
            for rank in range(len(theirs) + 1)
        ]


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
