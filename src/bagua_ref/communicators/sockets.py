"""Sockets between all ranks of a group, set up through a slower channel, and the messages over
them: a few int64 exchanged by all ranks, and notifications about pieces in shared memory.

A message stays in the operating system until it is read, so that no thread must wake up for it. A
message of gloo wakes a thread at both ends twice, which takes half a millisecond per step on two
cores.
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta

_logger = logging.getLogger(__name__)
_LIMIT = 5.0
"""Seconds within which all sockets must be connected, at most half of the group's timeout."""
_GREETING = 0.5
"""Seconds within which a connecting process must authenticate itself."""
_LONGEST = 256
"""Bytes of the message that announces a rank's address."""
_TOKEN = 16
"""Bytes of a rank's secret, which authenticates the others; the sender's rank follows in four
bytes.
"""
_HEADER = struct.Struct("<qq")
"""Header of a message: `_INTS` and the number of integers that follow; `TAKEN` and 0; or, for a
piece in shared memory, its collective, at least 2**32, and the size of its tensor in bytes.
"""
TAKEN, _INTS = 0, 1


def connect_all(
    rank: int,
    nranks: int,
    host: str,
    share: Callable[[Sequence[int]], list[list[int]]],
    timeout: float,
) -> Mesh | None:
    """Connect all ranks of a group by sockets; return None on every rank if some were not connected
    within five seconds, or half of ``timeout``.

    Any process can connect to a listening rank; processes that do not know its secret are
    disconnected.

    Args:
        rank: this rank.
        nranks: the number of ranks.
        host: a machine that all ranks reach; this rank listens on the address from which it would
            connect to it. "": all ranks are on one machine, and use Unix sockets.
        share: function that exchanges the same number of int64 with every rank; its exceptions are
            propagated.
        timeout: seconds that the other ranks wait in ``share``, and that any wait for a message
            lasts at most.
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
            _logger.info(
                "ranks communicate over gloo alone, which takes longer, as not all can reach each"
                " other directly%s",
                why,
            )
            return None
        opened.pop_all()
    for connected in sockets.values():
        if host:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Mesh(rank, sockets, timeout)


def _listen(host: str) -> socket.socket:
    """Return a socket that listens on the local address of the route to ``host``; if that is "", on
    a new abstract Unix address (Linux).
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
    """Return the rank of the process at the other end; -1 if it does not send the ``token``."""
    connected.settimeout(_GREETING)
    with suppress(OSError):
        greeting = connected.recv(_TOKEN + 4)
        if hmac.compare_digest(greeting[:_TOKEN], token):
            return int.from_bytes(greeting[_TOKEN:], "big")
    return -1


def close_sockets(sockets: Mapping[int, socket.socket], pid: int) -> None:
    """Close sockets of process ``pid``, which ends the connections; a forked child only closes its
    copies.
    """
    for connected in sockets.values():
        if os.getpid() == pid:
            with suppress(OSError):  # the other end has closed it
                connected.shutdown(socket.SHUT_RDWR)
        connected.close()


class Peer:
    """The non-blocking socket to another rank, and the messages received from it.

    Attributes:
        rank: the other rank.
        socket: a connected socket.
        ints: lists of integers received from the other rank, oldest first.
        filled: collective and size of each piece that the other rank has put into shared memory.
        taken: number of this rank's pieces that the other rank has taken from shared memory.
        end_reason: why the connection has ended; "" while it is open.
    """

    def __init__(self, rank: int, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.rank, self.socket = rank, connected
        self.ints: deque[tuple[int, ...]] = deque()
        self.filled: deque[tuple[int, int]] = deque()
        self.taken = 0
        self.end_reason = ""
        self._received = b""

    def send(self, kind: int, size: int, *values: int) -> None:
        """Send a message without blocking; the socket buffers hundreds, and no rank is two ahead.

        Raises:
            RuntimeError: the socket's buffer is full.
        """
        message = _HEADER.pack(kind, size)
        if values:  # notes about pieces have none, and there are many
            message += struct.pack(f"<{len(values)}q", *values)
        try:
            sent = self.socket.send(message)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.end_reason = self.end_reason or str(error)
            return
        if sent < len(message):
            raise RuntimeError(f"rank {self.rank} of the group does not read its messages")

    def read(self) -> bool:
        """Read available messages; return whether there were any bytes."""
        received = b""
        try:
            received = self.socket.recv(4096)
            why = "connection closed by peer"
        except BlockingIOError:
            return False
        except OSError as error:
            why = str(error)
        if not received:
            self.end_reason = self.end_reason or why
            return False
        data, begin = self._received + received, 0
        while len(data) - begin >= _HEADER.size:
            kind, size = _HEADER.unpack_from(data, begin)
            end = begin + _HEADER.size + (8 * size if kind == _INTS else 0)
            if len(data) < end:
                break
            if kind == _INTS:
                self.ints.append(struct.unpack_from(f"<{size}q", data, begin + _HEADER.size))
            elif kind == TAKEN:
                self.taken += 1
            else:
                self.filled.append((kind, size))
            begin = end
        self._received = data[begin:]
        return True


class Mesh:
    """The sockets to all other ranks of a group, with one exchange of integers at a time.

    Args:
        rank: this rank.
        sockets: a connected socket to each other rank.
        timeout: time limit of a wait for messages, in seconds.

    Attributes:
        peers: the other ranks, in their order.
        close: closes the sockets, which the other ranks notice; also called when this is
            garbage-collected.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.peers = {peer: Peer(peer, sockets[peer]) for peer in sorted(sockets)}
        self._by_file = {peer.socket.fileno(): peer for peer in self.peers.values()}
        self._poll = select.poll()
        for file in self._by_file:
            self._poll.register(file, select.POLLIN)
        self._values: dict[int, list[int]] = {}
        self._missing: list[Peer] = []
        self.close = weakref.finalize(self, close_sockets, sockets, os.getpid())
        self.close.atexit = False

    def send(self, values: Sequence[int]) -> Until:
        """Send ``values``, a few int64, to every other rank; return a work that waits for theirs.

        Raises:
            RuntimeError: a rank has left, or the last exchange has not been waited for.
        """
        if self._missing:
            raise RuntimeError("the last exchange has not been waited for")
        self._values, self._missing = {self.rank: list(values)}, list(self.peers.values())
        for peer in self._missing:
            peer.send(_INTS, len(values), *values)
            if peer.end_reason:
                raise RuntimeError(peer.end_reason)
        return Until(self.is_complete, self.timeout)

    def is_complete(self, seconds: float = 0.0) -> bool:
        """Read messages for at most ``seconds``; return whether the exchange is complete.

        Raises:
            RuntimeError: the exchange can no longer be completed.
        """
        if seconds:
            self._listen(seconds)
        for peer in self._missing.copy():
            if not peer.ints:
                peer.read()
            if peer.ints:
                own, theirs = self._values[self.rank], peer.ints[0]
                if len(theirs) != len(own):
                    raise RuntimeError(
                        f"rank {peer.rank} of the group sent {len(theirs)} numbers, this rank"
                        f" {len(own)}"
                    )
                self._values[peer.rank] = list(peer.ints.popleft())
                self._missing.remove(peer)
            elif peer.end_reason:
                raise RuntimeError(peer.end_reason)
        return not self._missing

    def received(self) -> list[list[int]]:
        """Return the values of all ranks; the exchange must be complete."""
        return [self._values[rank] for rank in range(len(self._values))]

    def until(self, peer: Peer, holds: Callable[[], bool]) -> Iterator[Until]:
        """Yield a work that waits until ``holds()`` becomes true through messages of ``peer``;
        nothing if it is true already.
        """
        if not holds():
            peer.read()
            if not holds():

                def step(seconds: float) -> bool:
                    if seconds:
                        self._listen(seconds)
                    if not holds() and peer.end_reason:
                        raise RuntimeError(peer.end_reason)
                    return holds()

                yield Until(step, self.timeout)

    def hung_up(self) -> list[int]:
        """Return the ranks that have closed their connections, after reading their last
        messages.
        """
        for peer in self.peers.values():
            while peer.read():
                pass
        return [rank for rank, peer in self.peers.items() if peer.end_reason]

    def _listen(self, seconds: float) -> None:
        """Read messages of all ranks; wait at most ``seconds`` for the first one."""
        for file, _ in self._poll.poll(max(1, math.ceil(1000 * seconds))):
            peer = self._by_file[file]
            peer.read()
            if peer.end_reason:
                self._poll.unregister(file)


class Until:
    """Work that waits for messages; `wait` and `is_completed` are those of a torch.distributed
    work.

    Args:
        step: function that waits at most the given seconds for messages and reads them; returns
            whether the wait is over, and raises RuntimeError if it never will be.
        timeout: time limit in seconds, counted from the first `wait`.
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
        """Wait for the messages, at most ``limit``.

        Raises:
            RuntimeError: the wait timed out; if `is_completed`, for good.
        """
        now = time.monotonic()
        self._deadline = min(self._deadline, now + self._timeout)
        until = min(self._deadline, now + limit.total_seconds())
        left = 0.0
        while not self._step(left):
            if (left := until - time.monotonic()) <= 0:
                raise RuntimeError("timed out")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not in time")
    return left
