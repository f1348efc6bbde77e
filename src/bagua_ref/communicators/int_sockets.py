"""Sockets for a few int64, which wait in the operating system until they are read, so that no
thread wakes for them.

A message of gloo wakes a thread at both ends twice, which takes half a millisecond of a step on two
cores.
"""

from __future__ import annotations

import logging
import socket
from array import array
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from bagua_ref.communicators.mesh import (
    Sockets,
    Unreachable,
    Until,
    connect_all,
    listen_locally,
    listen_towards,
    receive,
)

__all__ = ["IntSockets", "connect"]

_logger = logging.getLogger(__name__)


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


def connect(
    rank: int,
    nranks: int,
    host: str,
    share: Callable[[Sequence[int]], list[list[int]]],
    timeout: float,
) -> IntSockets | None:
    """Connect all ranks of a group; return this one's sockets, or None, on every rank, if some
    ranks do not reach each other.

    Args:
        rank: this rank.
        nranks: the number of ranks.
        host: a machine that all ranks reach; this rank listens on the address from which it would
            connect to it. "": all ranks are on one machine.
        share: exchanges int64 in another way; its exceptions are raised here, too.
        timeout: seconds without progress after which waiting raises.
    """
    try:
        sockets = connect_all(
            rank, nranks, lambda: listen_towards(host) if host else listen_locally(), share, timeout
        )
    except Unreachable as why:
        _logger.info(
            "ranks compare their calls over gloo, as %s; a step takes a little longer", why
        )
        return None
    for connected in sockets.values() if host else ():
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return IntSockets(sockets, timeout)
