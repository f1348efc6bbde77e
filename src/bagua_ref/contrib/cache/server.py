"""Starting Redis: a private server with a random password that ends with this process (S8.4), or a
daemon on loopback.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from pathlib import Path
from typing import Any

from bagua_ref.base.runtime import find_free_port
from bagua_ref.communicators.mesh import routes_towards
from bagua_ref.errors import BackendUnavailableError

__all__ = [
    "STOP_PRIORITY",
    "CacheServer",
    "RedisServer",
    "find_program",
    "node_address",
    "start_redis_daemon",
    "start_redis_server",
]

PROGRAMS = ("redis-server", "valkey-server")
LOOPBACK = "127.0.0.1"
_START_SECONDS = 20.0
_PORTS_TO_TRY = 5

STOP_PRIORITY = -10
"""The priority of stopping servers at exit: after buffers are written and child processes, which
write theirs, are joined.
"""


@dataclass
class CacheServer(ABC):
    """A server of this process for one node's cache.

    Attributes:
        host: the address that it listens on.
        port: the port that it listens on.
        capacity: bytes that it may use; a server in Python never evicts.
        password: the password for clients; never displayed.
    """

    host: str
    port: int
    capacity: int
    password: str = field(repr=False)

    @property
    def address(self) -> dict[str, Any]:
        """The connection options for clients, as an entry of ``hosts=``."""
        return {"host": self.host, "port": self.port, "password": self.password}

    @abstractmethod
    def stop(self) -> None:
        """End the server; does nothing if it has ended."""

    @abstractmethod
    def is_running(self) -> bool:
        """Return whether it answers."""


@dataclass
class RedisServer(CacheServer):
    """A Redis that this process started. It ends with `stop`, at exit, or when this process ends
    for any other reason.
    """

    _watchdog: subprocess.Popen[bytes] = field(repr=False)
    _finalizer: Any = field(repr=False, default=None)

    def stop(self) -> None:
        """End the server and its watchdog; does nothing if they have ended."""
        if self._finalizer is not None:
            self._finalizer()

    def is_running(self) -> bool:
        """Return whether it answers."""
        return self._watchdog.poll() is None and _answers(self.host, self.port, self.password)


def find_program() -> str:
    """Return the path of redis-server or valkey-server.

    Raises:
        BackendUnavailableError: neither is on PATH; the message names three alternatives.
    """
    for program in PROGRAMS:
        if (path := shutil.which(program)) is not None:
            return path
    raise BackendUnavailableError(
        "backend='redis' starts a server, but neither redis-server nor valkey-server is on PATH."
        " Alternatives: install one (`apt install redis-server`, `conda install redis-server`);"
        " pass hosts=[{'host': ..., 'port': ...}] to use a running Redis; or use"
        " backend='fakeredis' (`pip install fakeredis`), a small one in Python for laptops and"
        " tests"
    )


def start_redis_server(
    host: str, capacity: int, port: int | None = None, *arguments: str
) -> RedisServer:
    """Start a private Redis for this job, and return when it answers.

    Password and settings are passed through a pipe, so that neither the list of processes nor a
    file shows them.

    Args:
        host: the address to listen on.
        capacity: bytes that it may use before it evicts keys at random.
        port: the port to listen on; None: a free one.
        arguments: further arguments of the server.

    Raises:
        BackendUnavailableError: there is no server program, or it does not start; the message
            quotes its output.
    """
    program = find_program()
    said = ""
    for _ in range(1 if port else _PORTS_TO_TRY):
        password = secrets.token_urlsafe(32)
        server = _start(program, host, port or find_free_port(), capacity, password, arguments)
        said = _wait_until_up(server._watchdog.stdout, server.is_running)
        if not said:
            server._watchdog.stdout.close()  # type: ignore[union-attr]
            server._finalizer = util.Finalize(
                None, _stop, (server._watchdog,), exitpriority=STOP_PRIORITY
            )
            return server
        _stop(server._watchdog)
    raise BackendUnavailableError(f"{program} does not start on {host}: {said}")


def start_redis_daemon(port: int, capacity: int, *arguments: str) -> None:
    """Start a Redis on loopback that outlives this process, without a password, and return when it
    answers.

    Args:
        port: the port to listen on.
        capacity: bytes that it may use before it evicts keys at random.
        arguments: further arguments of the server, such as ``"--requirepass"``, which override the
            defaults.

    Raises:
        BackendUnavailableError: there is no server program, or it does not start; the message
            quotes its output.
    """
    program = find_program()
    if _listens(port):
        raise BackendUnavailableError(f"{program} does not start: port {port} is already in use")
    settings = _settings(LOOPBACK, port, capacity)
    command = [
        program,
        *(word for name, value in settings.items() for word in (f"--{name}", str(value))),
        *arguments,
    ]
    # The shell exits at once, which detaches the server; the server's own --daemonize would not
    # report why it fails.
    shell = subprocess.Popen(  # noqa: S603 # the script is constant, all else are its arguments
        ["/bin/sh", "-c", '"$@" &', "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert shell.stdout is not None
    with shell, shell.stdout as output:
        if said := _wait_until_up(output, lambda: _listens(port)):
            raise BackendUnavailableError(f"{program} does not start on port {port}: {said}")


def _settings(host: str, port: int, capacity: int) -> dict[str, Any]:
    """Return the settings of a cache, which stores nothing on disk and evicts keys at random."""
    return {
        "bind": host,
        "port": port,
        "protected-mode": "yes",
        "maxmemory": capacity,
        "maxmemory-policy": "allkeys-random",
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "loglevel": "warning",
        "logfile": "",
    }


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
        return True
    except OSError:
        return False


def _start(
    program: str, host: str, port: int, capacity: int, password: str, arguments: tuple[str, ...]
) -> RedisServer:
    settings = {**_settings(host, port, capacity), "requirepass": password}
    watchdog = subprocess.Popen(  # noqa: S603 # this interpreter, our own file and the program found on PATH
        [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).with_name("watchdog.py")),
            str(os.getpid()),
            program,
            "-",
            *arguments,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in a terminal must not end the server before its clients
    )
    assert watchdog.stdin is not None
    watchdog.stdin.write(
        "".join(
            f"{name} {value if value != '' else chr(34) * 2}\n" for name, value in settings.items()
        ).encode()
    )
    watchdog.stdin.close()
    return RedisServer(host, port, capacity, password, watchdog)


def _wait_until_up(output: Any, is_up: Callable[[], bool]) -> str:
    """Return "" once the server is up, or else why not: the end of its output, if it ends first."""
    said, deadline = b"", time.monotonic() + _START_SECONDS
    while not is_up():
        if select.select([output], [], [], 0.01)[0]:
            more = os.read(output.fileno(), 4096)
            if not more:
                return (
                    "; ".join(said.decode(errors="replace").splitlines()[-3:])
                    or "it exited at once without output"
                )
            said += more
        elif time.monotonic() > deadline:
            return f"no answer within {_START_SECONDS:g} s"
    return ""


def _answers(host: str, port: int, password: str) -> bool:
    """Return whether a server there accepts the password; one that is not ours has another password
    or none.
    """
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            received, right = b"", b"+OK\r\n+PONG\r\n"
            while (
                received != right and right.startswith(received) and (more := connection.recv(4096))
            ):
                received += more
            return received == right
    except OSError:
        return False


def _stop(watchdog: subprocess.Popen[bytes]) -> None:
    watchdog.terminate()
    try:
        watchdog.wait(timeout=10)
    except subprocess.TimeoutExpired:  # stopped by a signal, for example; the server dies with it
        watchdog.kill()
        watchdog.wait()
    if watchdog.stdout is not None:
        watchdog.stdout.close()


def node_address(master: str) -> str:
    """Return the address by which other nodes reach this one: that of the route to ``master``, or
    of the default route.
    """
    # an address that is not in use: nothing is sent, only the route is looked up
    for target in (master, "192.0.2.1"):
        with suppress(OSError):
            for _, address in routes_towards(target):
                if not address.startswith("127.") and address != "::1":
                    return address
    return LOOPBACK
