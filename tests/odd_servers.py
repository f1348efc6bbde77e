"""Servers that are not what the cache expects: each handles its connections, on threads, as a
function says.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Talk = Callable[[socket.socket], None]


@contextlib.contextmanager
def odd_server(talk: Talk) -> Iterator[dict[str, Any]]:
    """Yield the address, as an entry of ``hosts=``, of a server that calls ``talk`` with every
    connection.
    """
    connections = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connections.append(self.request)
            with contextlib.suppress(OSError):  # the client has disconnected, or the server stops
                talk(self.request)

    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield {"host": "127.0.0.1", "port": listener.server_address[1]}
        finally:
            listener.shutdown()
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            thread.join()


def redis_like(odd: Mapping[bytes, bytes], pause: float = 0.0, size: int = 1) -> Talk:
    """Return the talk of an empty Redis that keeps nothing, but answers the commands named in
    ``odd`` with the bytes given there.

    Args:
        odd: answers by the command's name.
        pause: if not 0, odd answers are sent in pieces, with a pause of so many seconds after each.
        size: bytes in a piece.
    """

    def talk(connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            while command := read_command(stream):
                answer = odd.get(command[0])
                if answer is None:
                    connection.sendall(_usual(command))
                elif not pause:
                    connection.sendall(answer)
                else:
                    for at in range(0, len(answer), size):
                        connection.sendall(answer[at : at + size])
                        time.sleep(pause)

    return talk


def read_command(stream: Any) -> list[bytes]:
    head = stream.readline()
    return [stream.read(int(stream.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:] or 0))]


def _usual(command: list[bytes]) -> bytes:
    name, count = command[0], len(command) - 1
    usual = {
        b"PING": b"+PONG\r\n",
        b"GET": b"$-1\r\n",
        b"MGET": b"*%d\r\n" % count + count * b"$-1\r\n",
    }
    return usual.get(name, b":0\r\n" if name in (b"EXISTS", b"DBSIZE") else b"+OK\r\n")
