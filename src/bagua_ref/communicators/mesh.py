"""Sockets between all ranks of a group, connected with the help of a slower way to talk to each other."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from array import array
from contextlib import ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Unreachable", "close_sockets", "connect_all", "listen_locally", "listen_towards"]

_LIMIT = 5.0
"""Seconds in which all sockets must be connected."""
_SILENCE = 1.0
"""Seconds after which a connection that says nothing does not come from a rank."""
_LONGEST = 256
"""Bytes in which a rank says where it listens."""
_TOKEN = 16
"""Bytes with which a rank shows that it belongs to the group; its number follows, in four bytes."""


class Unreachable(Exception):  # noqa: N818  it is never raised to a user
    """Some ranks do not reach each other; every rank of the group gets this exception."""


def connect_all(
    rank: int, nranks: int, listen: Callable[[], socket.socket], share: Callable[[Sequence[int]], list[list[int]]]
) -> dict[int, socket.socket]:
    """Connect all ranks of a group; return this one's socket to each other rank.

    Args:
        rank: this rank.
        nranks: the number of ranks.
        listen: returns a socket that listens where the other ranks reach it; OSError means that this rank cannot.
        share: exchanges equally many int64 with every rank; what it raises is raised here, too.

    Raises:
        Unreachable: not all ranks were connected within five seconds.
    """
    token, server, place, why = secrets.token_bytes(_TOKEN), None, [], ""
    try:
        server = listen()
        place = [int(server.family), *_address(server), token.hex()]
    except OSError as error:
        why = f": {error}"
    sockets = dict[int, socket.socket]()
    with server or nullcontext(), ExitStack() as opened:
        places = [json.loads(array("q", numbers).tobytes()) for numbers in share(_padded(place))]
        deadline = time.monotonic() + _LIMIT
        try:
            if server is not None and all(places):
                for peer in range(rank):
                    *where, secret = places[peer]
                    sockets[peer] = opened.enter_context(_greet(where, bytes.fromhex(secret) + rank.to_bytes(4, "big"), deadline))
                while len(sockets) < nranks - 1:
                    _welcome(server, token, sockets, opened, deadline)
        except OSError as error:
            why = f": {error}"
        reached = [bool(all_of_them) for (all_of_them,) in share([int(len(sockets) == nranks - 1)])]
        if not all(reached):
            raise Unreachable(f"not all ranks reach each other directly{why}")
        opened.pop_all()
    return sockets


def listen_towards(host: str, nranks: int) -> socket.socket:
    """Return a socket that listens on the address with which this rank would talk to ``host``."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.connect(address)  # this sends nothing, but chooses the address
            return socket.create_server((probe.getsockname()[0], 0), family=family, backlog=nranks)
    raise OSError(f"there is no way to {host!r}")


def listen_locally(nranks: int) -> socket.socket:
    """Return a socket that listens for processes of this machine, under a new name that belongs to no file (Linux)."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(f"\0bagua_ref/{secrets.token_hex(8)}")
        server.listen(nranks)
    except OSError:
        server.close()
        raise
    return server


def close_sockets(sockets: Mapping[int, socket.socket], pid: int) -> None:
    """Close sockets of process ``pid``, which the other ranks notice; a forked child only lets go of them."""
    for connected in sockets.values():
        if os.getpid() == pid:
            with suppress(OSError):  # the other end has closed it
                connected.shutdown(socket.SHUT_RDWR)
        connected.close()


def _address(server: socket.socket) -> list[Any]:
    name = server.getsockname()
    return [name.decode()] if isinstance(name, bytes) else list(name[:2])


def _padded(place: Sequence[Any]) -> Sequence[int]:
    return array("q", json.dumps(place).encode().ljust(_LONGEST))


def _greet(where: Sequence[Any], greeting: bytes, deadline: float) -> socket.socket:
    """Return a socket connected to ``where``, an address family and an address."""
    family, *address = where
    connected = socket.socket(family)
    try:
        connected.settimeout(_left(deadline))
        connected.connect(tuple(address) if len(address) > 1 else address[0])
        connected.sendall(greeting)
    except OSError:
        connected.close()
        raise
    return connected


def _welcome(server: socket.socket, token: bytes, sockets: dict[int, socket.socket], opened: ExitStack, deadline: float) -> None:
    """Accept a connection; close it unless it comes from a rank."""
    server.settimeout(_left(deadline))
    connected, greeting = server.accept()[0], b""
    connected.settimeout(min(_SILENCE, _left(deadline)))
    with suppress(OSError):
        while len(greeting) < _TOKEN + 4 and (more := connected.recv(_TOKEN + 4 - len(greeting))):
            greeting += more
    if hmac.compare_digest(greeting[:_TOKEN], token):
        sockets[int.from_bytes(greeting[_TOKEN:], "big")] = opened.enter_context(connected)
    else:
        connected.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"not within {_LIMIT:g} s")
    return left
