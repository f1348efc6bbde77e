"""Servers for the cache's tests, started independently of the package, and helpers that inspect
processes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")

connect = partial(redis.Redis, retry=Retry(NoBackoff(), 0))
"""A client that does not try again, and wait, where a connection is refused."""

every_backend = pytest.mark.parametrize(
    "backend", ["fakeredis", pytest.param("redis", marks=pytest.mark.redis)]
)


def need(backend: str = "redis") -> None:
    """Skip a test whose server is not installed; fail it in CI, where it must be."""
    if backend == "redis" and PROGRAM is None:
        reason = "needs redis-server or valkey-server on PATH"
        if "CI" in os.environ:
            pytest.fail(f"{reason}: CI must run the cache's tests on a real server")
        pytest.skip(reason)


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
    """A redis-server that can be killed, stopped and started again on its port, empty."""

    def __init__(self, *settings: str, password: str | None = "", port: int | None = None) -> None:
        need()
        self.port = free_port() if port is None else port
        self.password = secrets.token_hex(8) if password == "" else password
        self.settings = settings
        self.start()

    def start(self) -> None:
        lines = ["bind 127.0.0.1", f"port {self.port}", 'save ""', *self.settings]
        if self.password:
            lines.append(f"requirepass {self.password}")
        self.process = subprocess.Popen(
            [PROGRAM, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/"
        )
        self.process.stdin.write("\n".join(lines).encode())
        self.process.stdin.close()
        if self.port:
            assert eventually(lambda: answers(self.client())), (
                "the test's own server does not start"
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @property
    def host(self) -> dict[str, Any]:
        return {
            "host": "127.0.0.1",
            "port": str(self.port),
            **({"password": self.password} if self.password else {}),
        }

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


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def processes(*words: str) -> dict[int, str]:
    """Return the command lines of running processes (no zombies) that contain all ``words``, by
    process id.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z" and all(word in line for word in words):
                found[int(entry.name)] = line
    return found


def zombies_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state == "Z" and int(ppid) == parent:
                found.append(int(entry.name))
    return found
