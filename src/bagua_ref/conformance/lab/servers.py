"""Redis servers for checks of a cache: started, inspected, killed, and ended with their process."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from bagua_ref.contrib.cache.fake_server import start_fake_server
from bagua_ref.contrib.cache.server import find_program, start_redis_server
from bagua_ref.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CacheServer", "ServerPool", "assert_keys", "assert_within", "in_worker", "reason_without_servers", "start_servers"]

_LOOPBACK = "127.0.0.1"
_CAPACITY = 64 * 1024**2


def reason_without_servers() -> str:
    """Return why no server can be started here; empty if one can."""
    if _has_program() or importlib.util.find_spec("fakeredis") is not None:
        return ""
    return "there is no server: install redis-server or valkey-server, or the package fakeredis"


def _has_program() -> bool:
    try:
        find_program()
    except BackendUnavailableError:
        return False
    return True


class CacheServer:
    """A real redis-server, or else the package's small one in Python, which ends with this process.

    Attributes:
        host: an entry of ``hosts=``, with host, port and password.
    """

    def __init__(self) -> None:
        self._is_real = _has_program()
        self._server: Any = None
        self.host: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        """Start it, empty, where it was before; nothing if it runs."""
        import redis

        if self._server is not None:
            return
        port = self.host.get("port", 0)
        start: Any = start_redis_server if self._is_real else start_fake_server
        self._server = start(_LOOPBACK, _CAPACITY, *([port] if port else []))
        address = self._server.address
        if not self.host:
            self.host = address
        elif self._is_real:
            with redis.Redis(**address, protocol=2) as client:
                client.config_set("requirepass", self.host["password"])
        else:
            self._server._listener.password = self.host["password"].encode()
        self._client = redis.Redis(**self.host, protocol=2, single_connection_client=True)
        self._refuses = False

    def kill(self) -> None:
        """End it and its connections at once; nothing if it does not run."""
        if self._server is not None:
            self._client.close()
            self._server.stop()
            self._server = None

    def refuse_writes(self, refuse: bool = True) -> None:
        """Behave as one that is full and evicts nothing, or no longer."""
        self._refuses = refuse
        if self._is_real:
            self._client.config_set("maxmemory-policy", "noeviction")
            self._client.config_set("maxmemory", 1 if refuse else _CAPACITY)
        else:
            listener = self._server._listener
            listener.database = _Full(listener.database) if refuse else getattr(listener.database, "emptier", listener.database)

    def reset(self) -> None:
        """Run, be empty, and take writes."""
        self.start()
        if self._refuses:
            self.refuse_writes(False)
        self._client.flushall()

    def keys(self) -> list[str]:
        """Return the keys that it has."""
        found: Any = self._client.keys("*")
        return sorted(key.decode(errors="replace") for key in found)

    def get(self, key: str) -> bytes:
        """Return the bytes under a key that it has."""
        found: Any = self._client.get(key)
        return bytes(found)

    def set(self, key: str, data: bytes) -> None:
        """Write bytes under a key."""
        self._client.set(key, data)


class _Full:
    """A database of fakeredis that takes no more."""

    def __init__(self, emptier: Any) -> None:
        self.emptier = emptier

    def execute_command(self, name: str, *arguments: Any) -> Any:
        import redis

        if name in ("SET", "MSET", "SETEX", "SETNX"):
            raise redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'.")
        return self.emptier.execute_command(name, *arguments)


def start_servers(count: int) -> list[CacheServer]:
    """Start servers, which end when this process does."""
    return [CacheServer() for _ in range(count)]


class ServerPool:
    """Servers that all inputs of a check share, one input after another."""

    def __init__(self) -> None:
        self._servers: list[CacheServer] = []

    def start_servers(self, count: int) -> list[CacheServer]:
        """Return servers as if they had just been started."""
        self._servers += start_servers(max(0, count - len(self._servers)))
        for server in self._servers:
            server.reset()
        return self._servers[:count]

    def close(self) -> None:
        """End them all."""
        for server in self._servers:
            server.kill()


def assert_keys(servers: Sequence[CacheServer], wanted: Sequence[Sequence[str]]) -> None:
    """Raise AssertionError unless each server has exactly these keys."""
    for place, (server, keys) in enumerate(zip(servers, wanted, strict=True)):
        found = server.keys()
        assert found == sorted(keys), f"store {place} has the keys {found} instead of {sorted(keys)}"


def assert_within(seconds: float, condition: Callable[[], Any], what: str) -> None:
    """Raise AssertionError unless ``condition()`` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def in_worker(work: Callable[[], Any]) -> None:
    """Run ``work()`` in a forked process, as a DataLoader's worker does, and let that end cleanly.

    Raises:
        AssertionError: it raised something.
    """
    context = multiprocessing.get_context("fork")
    inbox, outbox = context.Pipe(duplex=False)
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    process = context.Process(target=_work, args=(work, os.getpid(), outbox))
    is_daemon = config.pop("daemon", None)  # a daemon, as the process of a check is, may otherwise start none
    try:
        process.start()
    finally:
        if is_daemon is not None:
            config["daemon"] = is_daemon
    outbox.close()
    try:
        said = inbox.recv()
    except EOFError:
        said = "ended without a word"
    inbox.close()
    process.join()  # not its exit code: Python's own shutdown may fail where somebody forked from a thread
    assert not said, f"a worker {said}"


def _work(work: Callable[[], Any], parent: int, outbox: Any) -> None:
    # Whoever ends a check that hangs here must not leave this process behind.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        return
    try:
        work()
    except Exception as error:
        outbox.send(f"raised {type(error).__name__}: {error}")
    else:
        outbox.send("")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)
