"""Real servers for the cache's tests, TLS before one, and helpers that look at processes."""

from __future__ import annotations

import contextlib
import secrets
import select
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bagua_ref.contrib.cache.servers import find_program

# A client that does not try again, and wait, where a connection is refused.
connect = partial(redis.Redis, retry=Retry(NoBackoff(), 0))
CERTIFICATE = Path(__file__).with_name("localhost.pem")


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the first true result of ``condition()``, or the last one."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server that can be killed, stopped and started again on its port, empty."""

    def __init__(self, *settings: str, password: str | None = "", port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.password = secrets.token_hex(8) if password == "" else password
        self.settings = settings
        self.start()

    def start(self) -> None:
        lines = ["bind 127.0.0.1", f"port {self.port}", 'save ""', *self.settings]
        if self.password:
            lines.append(f"requirepass {self.password}")
        self.process = subprocess.Popen(
            [find_program(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/"
        )
        self.process.stdin.write("\n".join(lines).encode())
        self.process.stdin.close()
        if self.port:
            assert eventually(self.answers), "the test's own server does not start"

    def answers(self) -> bool:
        with contextlib.suppress(redis.ConnectionError):
            return bool(self.client().ping())
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @property
    def host(self) -> dict[str, Any]:
        password = {"password": self.password} if self.password else {}
        return {"host": "127.0.0.1", "port": str(self.port), **password}

    def client(self) -> redis.Redis:
        return connect(port=self.port, password=self.password)

    def calls(self, command: str) -> int:
        """Return how often the server has run ``command``."""
        return self.client().info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]


@contextmanager
def servers(count: int, *settings: str) -> Iterator[list[Server]]:
    started = [Server(*settings) for _ in range(count)]
    try:
        yield started
    finally:
        for server in started:
            server.kill()


class _Proxy(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with (
            contextlib.suppress(
                OSError
            ),  # a client without the right certificate, or one that left
            self.server.context.wrap_socket(self.request, server_side=True) as outer,
            socket.create_connection(("127.0.0.1", self.server.port)) as inner,
        ):
            while True:
                for source in select.select([outer, inner], [], [])[0]:
                    data = source.recv(2**20)
                    while source is outer and outer.pending():
                        data += outer.recv(2**20)
                    (inner if source is outer else outer).sendall(data)
                    if not data:
                        return


@contextmanager
def tls_before(port: int) -> Iterator[int]:
    """Yield the port of a TLS server that passes everything on to ``port``."""
    proxy = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Proxy)
    proxy.daemon_threads, proxy.port = True, port
    proxy.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    proxy.context.load_cert_chain(CERTIFICATE)
    threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield proxy.server_address[1]
    finally:
        proxy.shutdown()
        proxy.server_close()


@contextmanager
def foreign_server(talk: Callable[[socket.socket], object]) -> Iterator[dict[str, Any]]:
    """Yield the address of a server that calls ``talk`` with each connection."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                talk(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield {"host": "127.0.0.1", "port": server.server_address[1]}
        server.shutdown()


def processes(*words: str) -> dict[int, str]:
    """Return the command lines of running processes (no zombies) that contain all ``words``, by
    process id.
    """
    return {
        pid: line
        for pid, (line, state, _) in _all_processes()
        if state != "Z" and all(word in line for word in words)
    }


def children(parent: int, *states: str) -> dict[int, str]:
    """Return the command lines of the children of ``parent``, in any of ``states``, by process id."""
    return {
        pid: line
        for pid, (line, state, ppid) in _all_processes()
        if ppid == parent and (not states or state in states)
    }


def _all_processes() -> Iterator[tuple[int, tuple[str, str, int]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                yield int(entry.name), (line.decode(errors="replace"), state, int(ppid))
