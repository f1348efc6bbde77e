"""A Redis in Python for laptops and tests: fakeredis in this process, behind a TCP port for the
node's other processes (S8.4).

fakeredis has a TCP server, but that has no password and drops the connection when a reply fills the
socket's buffer. This one implements what the cache needs.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bagua_ref.contrib.cache.server import CacheServer
from bagua_ref.errors import BackendUnavailableError

__all__ = ["FakeServer", "start_fake_server"]

_LARGEST = 512 * 1024**2
_BEFORE_PASSWORD = 10, 16 * 1024
"""The most strings of a command, and bytes of a string, that Redis and this server read from a
client without the password.
"""


@dataclass
class FakeServer(CacheServer):
    """A server inside this process, which ends with it."""

    _listener: _Listener = field(repr=False)

    def stop(self) -> None:
        """End the server and its connections."""
        if not self.is_running():
            return
        self._listener.shutdown()
        self._listener.server_close()
        for connection in list(self._listener.connections):
            with contextlib.suppress(OSError):  # the client has disconnected
                connection.shutdown(socket.SHUT_RDWR)

    def is_running(self) -> bool:
        """Return whether it accepts connections."""
        return self._listener.fileno() != -1


def start_fake_server(host: str, capacity: int, port: int = 0) -> FakeServer:
    """Start a server on a thread of this process.

    Raises:
        BackendUnavailableError: fakeredis is not installed.
    """
    try:
        import fakeredis
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend='fakeredis' needs fakeredis ({error}); install with: pip install fakeredis"
        ) from error
    password = secrets.token_urlsafe(32)
    database = fakeredis.FakeStrictRedis(server=fakeredis.FakeServer())
    listener = _Listener((host, port), password, database)
    threading.Thread(
        target=listener.serve_forever, args=(0.05,), name="bagua_ref fakeredis", daemon=True
    ).start()
    return FakeServer(host, listener.server_address[1], capacity, password, listener)


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, place: tuple[str, int], password: str, database: Any) -> None:
        super().__init__(place, _Handler)
        self.password, self.database = password.encode(), database
        self.turn = threading.Lock()
        self.connections: set[Any] = set()


class _Handler(socketserver.StreamRequestHandler):
    """The connection of one client, whose commands are arrays of strings."""

    server: _Listener
    disable_nagle_algorithm = True

    def handle(self) -> None:
        self.server.connections.add(self.connection)
        trusted = False
        try:
            while command := self._read_command(trusted):
                name = command[0].upper()
                if name == b"AUTH":
                    trusted = hmac.compare_digest(command[-1], self.server.password)
                    self._answer(True if trusted else ValueError("WRONGPASS invalid password"))
                elif not trusted:
                    self._answer(ValueError("NOAUTH Authentication required."))
                else:
                    self._answer(self._run(name, command[1:]))
        except OSError:
            return  # the client has disconnected, or the server stops
        finally:
            self.server.connections.discard(self.connection)

    def _run(self, name: bytes, arguments: list[bytes]) -> Any:
        import redis

        if name == b"PING":
            return "PONG"
        if name in (b"CLIENT", b"SELECT"):
            return True  # there is only one database, and no list of clients
        try:
            with self.server.turn:
                return self.server.database.execute_command(name.decode(), *arguments)
        except redis.RedisError as error:
            return error

    def _read_command(self, trusted: bool) -> list[bytes]:
        """Return the next command; none at the end, and where a client sends something else or,
        without the password, much.
        """
        most, longest = (_LARGEST, _LARGEST) if trusted else _BEFORE_PASSWORD
        command: list[bytes] = []
        for _ in range(self._read_number(b"*", most)):
            length = self._read_number(b"$", longest)
            command.append(self.rfile.read(length + 2)[:length])
            if len(command[-1]) < length:
                return []
        return command

    def _read_number(self, mark: bytes, most: int) -> int:
        """Return the number on a line that begins with ``mark``; raise OSError, which ends the
        connection, if there is none.
        """
        found = re.fullmatch(rb"(.)([0-9]{1,9})\r\n", self.rfile.readline(16), re.DOTALL)
        if found is None or found[1] != mark or int(found[2]) > most:
            raise ConnectionAbortedError("not a command")
        return int(found[2])

    def _answer(self, value: Any) -> None:
        self.wfile.write(b"".join(_encoded(value)))


def _encoded(value: Any) -> Iterator[bytes]:
    if isinstance(value, Exception):
        yield (
            b"-%s\r\n"
            % (str(value) if str(value).split(" ")[0].isupper() else f"ERR {value}").encode()
        )
    elif isinstance(value, str) or value is True:
        yield b"+%s\r\n" % ("OK" if value is True else value).encode()
    elif value is None:
        yield b"$-1\r\n"
    elif isinstance(value, int):
        yield b":%d\r\n" % value
    elif isinstance(value, bytes):
        yield b"$%d\r\n" % len(value)
        yield value
        yield b"\r\n"
    else:
        yield b"*%d\r\n" % len(value)
        for item in value:
            yield from _encoded(item)
