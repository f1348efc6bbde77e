"""Redis servers for checks of a cache, which end with their process, and scripts about a cache
loader that has them as stores.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bagua_ref.conformance.lab.journal import end_with
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.play import Play
from bagua_ref.conformance.lab.violation import Violation
from bagua_ref.contrib.cache.fake_server import start_fake_server
from bagua_ref.contrib.cache.server import find_program, start_redis_server
from bagua_ref.errors import BackendUnavailableError

__all__ = [
    "LOADER",
    "CacheScript",
    "Refusals",
    "ScriptedServer",
    "assert_keys",
    "assert_within",
    "cache_script",
    "in_worker",
    "reason_to_skip",
    "start_servers",
]

_LOOPBACK = "127.0.0.1"
_CAPACITY = 64 * 1024**2
LOADER = ("CacheLoader",)
_pools: weakref.WeakKeyDictionary[Lab, list[ScriptedServer]] = weakref.WeakKeyDictionary()


def reason_to_skip() -> str:
    """Return why no cache can be checked on this machine; empty if one can."""
    if _has_program() or importlib.util.find_spec("fakeredis") is not None:
        return ""
    return "there is no server: install redis-server or valkey-server, or the package fakeredis"


def _has_program() -> bool:
    try:
        find_program()
    except BackendUnavailableError:
        return False
    return True


class ScriptedServer:
    """A redis-server, or the package's server in Python if there is none; it ends with this
    process.

    Attributes:
        host: an entry of ``hosts=``, with host, port and password.
    """

    def __init__(self) -> None:
        self._is_real = _has_program()
        self._server: Any = None
        self.host: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        """Start the server, empty, at its previous address; does nothing if it is running."""
        import redis

        if self.has_died():
            self.kill()
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
        """Kill the server and its connections; does nothing if it is not running."""
        if self._server is not None:
            self._client.close()
            self._server.stop()
            self._server = None

    def has_died(self) -> bool:
        """Return whether it has ended, and was not killed."""
        return self._server is not None and not self._server.is_running()

    def refuse_writes(self, refuse: bool = True) -> None:
        """Refuse writes like a full server that evicts nothing, or accept them again."""
        self._refuses = refuse
        if self._is_real:
            self._client.config_set("maxmemory-policy", "noeviction")
            self._client.config_set("maxmemory", 1 if refuse else _CAPACITY)
        else:
            listener = self._server._listener
            listener.database = (
                _Full(listener.database)
                if refuse
                else getattr(listener.database, "emptier", listener.database)
            )

    def reset(self) -> None:
        """Start the server if needed, empty it, and accept writes."""
        self.start()
        if self._refuses:
            self.refuse_writes(False)
        self._client.flushall()

    def keys(self) -> list[str]:
        """Return all keys."""
        found: Any = self._client.keys("*")
        return sorted(map(_text, found))

    def expiring(self) -> list[str]:
        """Return the keys that have a time to live."""
        return [
            key
            for key in self.keys()
            if self._client.ttl(key.encode("utf-8", "surrogatepass")) != -1
        ]

    def get(self, key: str) -> bytes:
        """Return the bytes of an existing key."""
        found: Any = self._client.get(key)
        return bytes(found)

    def set(self, key: str, data: bytes) -> None:
        """Set the bytes of a key."""
        self._client.set(key, data)


def _text(key: bytes) -> str:
    try:
        return key.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return repr(key)


class _Full:
    """A fakeredis database that refuses writes."""

    def __init__(self, emptier: Any) -> None:
        self.emptier = emptier

    def execute_command(self, name: str, *arguments: Any) -> Any:
        import redis

        if name in ("SET", "MSET", "SETEX", "SETNX"):
            raise redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'.")
        return self.emptier.execute_command(name, *arguments)


class Refusals:
    """A listener in the place of a dead server: it closes and counts connections.

    Args:
        host: the server's.

    Attributes:
        count: number of connections.
    """

    def __init__(self, host: dict[str, Any]) -> None:
        self.count = 0
        self._last: Any = None
        self._listener = socket.create_server((host["host"], host["port"]))

    def __enter__(self) -> Refusals:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        address = self._listener.getsockname()
        with socket.socket() as last:  # accepted after all that still wait to be
            last.bind((address[0], 0))
            self._last = last.getsockname()
            last.connect(address)
            self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            connection, address = self._listener.accept()
            connection.close()
            if address == self._last:
                return
            self.count += 1


def start_servers(count: int) -> list[ScriptedServer]:
    """Start servers that end with this process."""
    return [ScriptedServer() for _ in range(count)]


def assert_keys(servers: Sequence[ScriptedServer], wanted: Sequence[Sequence[str]]) -> None:
    """Raise AssertionError unless each server has exactly these keys."""
    for place, (server, keys) in enumerate(zip(servers, wanted, strict=True)):
        found = server.keys()
        assert found == sorted(keys), (
            f"store {place} has the keys {found} instead of {sorted(keys)}"
        )


def assert_within(seconds: float, condition: Callable[[], Any], what: str) -> None:
    """Raise AssertionError unless ``condition()`` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds:g} s: {what}"
        time.sleep(0.02)


def in_worker(
    work: Callable[[], Any], meanwhile: Callable[[], Any] = lambda: None, as_script: bool = False
) -> None:
    """Run ``work()`` in a forked process, like a DataLoader's worker, and wait for a clean exit.

    Args:
        work: runs in the process.
        meanwhile: runs in this one, at the same time.
        as_script: let the process be and end as a script does: it is the main one, and its exit
            handlers run.

    Raises:
        AssertionError: ``work()`` raised an exception.
    """
    context = multiprocessing.get_context("fork")
    inbox, outbox = context.Pipe(duplex=False)
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    process = context.Process(target=_work, args=(work, os.getpid(), outbox, as_script))
    # a check's process is a daemon, which may not start processes otherwise
    is_daemon = config.pop("daemon", None)
    try:
        process.start()
    finally:
        if is_daemon is not None:
            config["daemon"] = is_daemon
    outbox.close()
    try:
        said = inbox.recv()  # that it has begun
        meanwhile()
        said = inbox.recv()
    except EOFError:
        said = "ended without an answer"
    inbox.close()
    # its exit code is not checked: Python's shutdown may fail in a process forked from a thread
    process.join()
    if said.startswith("raised NotImplementedError"):
        raise NotImplementedError(f"a worker {said}")
    assert not said, f"a worker {said}"


def _work(work: Callable[[], Any], parent: int, outbox: Any, as_script: bool) -> None:
    end_with(parent)
    outbox.send("ended without an answer")
    try:
        if as_script:
            _become_script()
        work()
        if as_script:
            atexit._run_exitfuncs()
    except Exception as error:
        outbox.send(f"raised {type(error).__name__}: {error}")
    else:
        outbox.send("")
    if as_script:
        os._exit(0)  # without what only ends a worker


def _become_script() -> None:
    """Let this process pass for the main one, without the exit handlers of its parent."""
    process = multiprocessing.current_process()
    process.name, process._config["daemon"] = "MainProcess", False  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    for inherited in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        inherited.atexit = False


def _shared_servers(lab: Lab, count: int) -> list[ScriptedServer]:
    """Return servers as if they had just been started; a check's inputs share them, one input at a
    time.
    """
    pool = _pools.setdefault(lab, [])
    for server in start_servers(max(0, count - len(pool))):
        pool.append(server)
        lab.resources.callback(server.kill)
    for server in pool:
        server.reset()
    return pool[:count]


class CacheScript(Play):
    """A script about ``loader``, whose stores are ``servers``."""

    def __init__(self, lab: Lab, servers: int, load: str) -> None:
        rooms = ("inputs.cache_values", "lab.servers")
        super().__init__(
            lab, "cache", *(f"from bagua_ref.conformance.{room} import *" for room in rooms)
        )
        self.names["start_servers"] = partial(_shared_servers, lab)
        self.do(
            f"servers = start_servers({servers})\nhosts = [server.host for server in servers]\nload"
            f" = {load}"
        )

    def warnings_of(self, lines: str) -> None:
        """Run lines, which may access ``loader``, and flush it; the warnings are in ``seen``."""
        inner = "".join(f"    {line}\n" for line in lines.splitlines())
        self.do(
            "import warnings\n\nwith warnings.catch_warnings(record=True) as seen:\n"
            f"    warnings.simplefilter('always')\n{inner}    loader.flush()"
        )

    def loader(
        self, name: str = "data", size: int = 1, variable: str = "loader", more: str = ""
    ) -> None:
        """Make a loader."""
        arguments = f"hosts=hosts, dataset_name={name!r}, writer_buffer_size={size}{more}"
        self.do(f"{variable} = cache.CacheLoader(backend='redis', {arguments})")


@contextlib.contextmanager
def cache_script(
    lab: Lab, servers: int = 1, load: str = "Source()", dataset: str | None = None, size: int = 1
) -> Iterator[CacheScript]:
    """Give a script with the source of a ``load`` function and, if a dataset is named, with a
    loader of that buffer size.

    What it leaves behind is ended: the next one has the same servers.
    """
    script = CacheScript(lab, servers, load)
    try:
        if dataset is not None:
            script.loader(dataset, size)
        yield script
    except Violation as violation:
        if died := [
            place
            for place, server in enumerate(script.names.get("servers", ()))
            if server.has_died()
        ]:
            raise Violation(
                f"{violation}; meanwhile, store {died[0]}, a server of the check, had died",
                violation.snippet,
            ) from violation.__cause__
        raise
    finally:
        for name, left in script.names.items():
            if hasattr(left, "num_keys"):
                with (
                    contextlib.suppress(Exception),
                    lab.journal.call(("close", script.script.and_then(f"{name}.close()"))),
                ):
                    left.close()
