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
import time
import weakref
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import wait

_logger = logging.getLogger(__name__)
_LIMIT = 5.0
"""Seconds in which all sockets must be connected, or half of the group's timeout if that is
less.
"""
_GREETING = 0.5
"""Seconds in which a process that connects must authenticate itself."""
_HANG_UP = getattr(select, "POLLRDHUP", 0)
"""Linux reports a closed connection before its data have been read; elsewhere there is no such
flag.
"""
_LONGEST = 256
"""Bytes of the message with which a rank announces its address."""
_TOKEN = 16
"""Bytes of a rank's secret, with which the others authenticate themselves; their number follows, in
four bytes.
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

    Any process may connect to a rank that listens; those without its secret are disconnected.

    Args:
        rank: this rank.
        nranks: the number of ranks.
        host: a machine that all ranks reach; this rank listens on the address from which it would
            connect to it. "": all ranks are on one machine, and use Unix sockets.
        share: exchanges equally many int64 with every rank; its exceptions are raised here, too.
        timeout: seconds that the other ranks wait in ``share``.
        otherwise: the words that say, in the log, what happens without the sockets.
    """
    token, server, place, why = secrets.token_bytes(_TOKEN), None, [], ""
    try:
        server = _listen(host)
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
                    family, *address, secret = places[peer]
                    connected = opened.enter_context(socket.socket(family))
                    connected.settimeout(_left(deadline))
                    connected.connect(tuple(address) if len(address) > 1 else address[0])
                    connected.sendall(bytes.fromhex(secret) + rank.to_bytes(4, "big"))
                    sockets[peer] = connected
                missing = set(range(rank + 1, nranks))
                while missing:
                    server.settimeout(_left(deadline))
                    connected = opened.enter_context(server.accept()[0])
                    peer = _authenticate(connected, token)
                    if peer in missing:
                        missing.remove(peer)
                        sockets[peer] = connected
                    else:
                        connected.close()
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


def _listen(host: str) -> socket.socket:
    """Return a socket that listens on the address with which this rank would talk to ``host``; on a
    new name that belongs to no file (Linux) if that is "".
    """
    with ExitStack() as opened:
        if not host:
            server = opened.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(f"\0bagua_ref/{secrets.token_hex(8)}")
            server.listen(socket.SOMAXCONN)
            opened.pop_all()
            return server
    for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)  # this sends nothing, but chooses the address
            address = probe.getsockname()[0], 0
            return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
    raise OSError(f"no route to {host!r}")


def _authenticate(connected: socket.socket, token: bytes) -> int:
    """Return the rank of the process at the other end; -1 if it does not know the ``token``."""
    connected.settimeout(_GREETING)
    with suppress(OSError):
        greeting = connected.recv(_TOKEN + 4)
        if hmac.compare_digest(greeting[:_TOKEN], token):
            return int.from_bytes(greeting[_TOKEN:], "big")
    return -1


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
        poll = select.poll()
        peers = {one.fileno(): peer for peer, one in self._sockets.items() if one.fileno() >= 0}
        for file in peers:
            poll.register(file, _HANG_UP)
        return [peers[file] for file, _ in poll.poll(0)]


class Until:
    """A wait for messages; `wait` and `is_completed` are those of a torch.distributed work.

    Args:
        step: reads messages, after waiting for the first for some seconds at most; returns whether
            the wait is over, and raises RuntimeError if it never will be.
        timeout: seconds, from the first `wait` on, after which it has failed.
    """

    def __init__(self, step: Callable[[float], bool], timeout: float) -> None:
        self._step, self._timeout, self._deadline = step, timeout, math.inf

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        try:
            return self._step(0) or time.monotonic() >= self._deadline
        except RuntimeError:
            return True

    def wait(self, limit: timedelta = timedelta.max) -> None:
        """Wait until it is over, for ``limit`` at most.

        Raises:
            RuntimeError: it is not over in time; if `is_completed`, it never will be.
        """
        now = time.monotonic()
        self._deadline = min(self._deadline, now + self._timeout)
        until = min(self._deadline, now + limit.total_seconds())
        left = 0.0
        while not self._step(left):
            if (left := until - time.monotonic()) <= 0:
                raise RuntimeError("timed out")


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

    def send(self, values: Sequence[int]) -> Until:
        """Send ``values``, a few int64, to every other rank; return the wait for theirs.

        Raises:
            RuntimeError: a rank has left, or the last exchange has not been waited for.
        """
        if self._missing:
            raise RuntimeError("the last exchange has not been waited for")
        self._values = values
        self._bytes = dict.fromkeys(self._sockets, b"")
        self._missing = {one: peer for peer, one in self._sockets.items()}
        send(self._sockets.values(), array("q", [len(values), *values]).tobytes())
        return Until(self.is_complete, self._timeout)

    def is_complete(self, seconds: float = 0.0) -> bool:
        """Read, waiting at most ``seconds``; return whether the exchange is complete.

        Raises:
            RuntimeError: it will never be.
        """
        if seconds:
            wait(list(self._missing), seconds)
        size = 8 * (1 + len(self._values))
        for connected, peer in list(self._missing.items()):
            if (left := size - len(self._bytes[peer])) > 0:
                self._bytes[peer] += receive(connected, left)
            if len(self._bytes[peer]) == size:
                if (length := array("q", self._bytes[peer])[0]) != len(self._values):
                    raise RuntimeError(
                        f"rank {peer} of the group sent {length} numbers, this rank"
                        f" {len(self._values)}"
                    )
                del self._missing[connected]
        return not self._missing

    def received(self) -> list[list[int]]:
        """Return the values of all ranks, once the exchange is complete."""
        theirs = {peer: array("q", received).tolist()[1:] for peer, received in self._bytes.items()}
        return [
            theirs[rank] if rank in theirs else list(self._values)
            for rank in range(len(theirs) + 1)
        ]


def send(sockets: Collection[socket.socket], message: bytes) -> None:
    """Send a small ``message`` without waiting: there is room for hundreds, and no rank is two
    ahead.

    Raises:
        RuntimeError: a rank has left.
    """
    try:
        for connected in sockets:
            if connected.send(message) < len(message):
                raise RuntimeError("a rank does not read its messages")
    except OSError as error:
        raise RuntimeError(str(error)) from None


def receive(connected: socket.socket, size: int) -> bytes:
    """Return up to ``size`` bytes that have come, without waiting.

    Raises:
        RuntimeError: no more will come.
    """
    try:
        if received := connected.recv(size):
            return received
    except BlockingIOError:
        return b""
    except OSError as error:
        raise RuntimeError(str(error)) from None
    raise RuntimeError("connection closed by peer")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not in time")
    return left
