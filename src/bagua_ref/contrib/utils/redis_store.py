"""Redis stores: existing servers, or servers started by the job (S8.1, S8.4)."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import get_worker_info

from bagua_ref.base.not_provided import explain_missing
from bagua_ref.contrib.cache import servers
from bagua_ref.contrib.cache.client import connect, of_signal_handler
from bagua_ref.contrib.utils.store import ClusterStore, Store, StoreError, encoded_key
from bagua_ref.env import checked_timeout, get_master_addr, get_node_rank
from bagua_ref.errors import BackendUnavailableError

__all__ = [
    "FakeRedisStore",
    "RedisStore",
    "bootstrap_redis_server",
    "checked_capacity",
    "get_host_ip",
    "shutdown_redis_server",
    "start_redis_server_cli",
]

DEFAULT_CAPACITY = 107_374_182_400
TIMEOUT = 5.0
_PROBE_SECONDS = 1.0
# A longer MSET is split: hiredis joins the values of one before it sends any, which takes a third of
# the time, and Redis drops clients that send more than 1 GB at once.
_COMMAND_BYTES = 1024**2
_OPTIONS = (
    "host",
    "port",
    "username",
    "password",
    "db",
    "unix_socket_path",
    "ssl",
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
)
_T = TypeVar("_T")


class RedisStore(ClusterStore):
    """Several Redis servers used as one store.

    The configuration of servers in ``hosts`` is checked once, for at most a second each. A server
    that does not answer may start later (S8.3).

    Args:
        hosts: the servers, each a dict with ``host`` and ``port`` or ``unix_socket_path``, and as
            needed ``username``, ``password``, ``db``, ``ssl=True``, ``ssl_ca_certs``,
            ``ssl_certfile``, ``ssl_keyfile``, ``ssl_cert_reqs``, ``ssl_check_hostname``. None: the
            job starts a server on each of its nodes (S8.4).
        cluster_mode: True: keys are spread over all servers (S8.1). False: node k uses only server
            k mod m.
        capacity_per_node: memory limit of each started server in bytes, above which keys are
            evicted at random.
        timeout: seconds without a byte after which a server counts as down.

    Raises:
        ValueError: an argument is out of range, a host has an unknown option, or the server there
            is part of a Redis Cluster or needs a password that is not given.
        BackendUnavailableError: this machine has no server program.
        NotInitializedError: several ranks must start servers and have no process group yet.
    """

    stores: list[_RedisStore]

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int = DEFAULT_CAPACITY,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        timeout = checked_timeout(timeout)
        self.cluster_mode, self._is_ours = cluster_mode, hosts is None
        if hosts is None:
            capacity = checked_capacity(capacity_per_node)
            hosts = servers.addresses(capacity, every_node=cluster_mode)
        elif isinstance(hosts, (str, Mapping)) or not all(
            isinstance(host, Mapping) for host in hosts
        ):
            raise TypeError(
                "hosts must be a list of dicts, such as [{'host': 'localhost', 'port': 6379}]"
            )
        elif not hosts:
            raise ValueError("hosts=[] must name at least one server; None starts one on each node")
        elif not cluster_mode:
            hosts = [hosts[get_node_rank() % len(hosts)]]
        stores = [_RedisStore(**_checked_host(host), timeout=timeout) for host in hosts]
        super().__init__(stores)
        for store in () if self._is_ours else stores:
            store.check_server()

    def shutdown(self) -> None:
        """Stop this node's server if this job started it, for all loaders of the node. Servers in
        ``hosts`` keep running.
        """
        self.close()
        if self._is_ours:
            servers.shutdown()


class FakeRedisStore(RedisStore):
    """A fakeredis in this process, for tests: other processes, including DataLoader workers, have
    their own. It never evicts.

    Args:
        cluster_mode: accepted, without effect.
        capacity_per_node: accepted, but not enforced.
        timeout: accepted, without effect.

    Raises:
        BackendUnavailableError: fakeredis is not installed.
    """

    def __init__(
        self,
        cluster_mode: bool = True,
        capacity_per_node: int = DEFAULT_CAPACITY,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        checked_timeout(timeout)
        checked_capacity(capacity_per_node)
        self.cluster_mode, self._is_ours = cluster_mode, False
        _fake_server()
        ClusterStore.__init__(self, [_FakeStore()])

    def shutdown(self) -> None:
        """Discard this process's values."""
        self.close()
        _fakes.pop(os.getpid(), None)


class _RedisStore(Store):
    """A single Redis server. Each request opens and closes a connection; `CacheLoader` keeps its
    own connections.
    """

    def __init__(
        self, host: str = "", port: int | str = 6379, *, timeout: float = TIMEOUT, **options: Any
    ) -> None:
        self._options = {"host": host, "port": int(port), **options}
        if "unix_socket_path" in options:
            del self._options["host"], self._options["port"]
        self._timeout = timeout
        # If a thread imports redis for the first request while another forks a worker, the worker waits
        # for ever.
        import encodings.idna  # noqa: F401

        self.connect()

    def __repr__(self) -> str:
        options = self._options
        return f"redis at {options.get('unix_socket_path') or '{host}:{port}'.format(**options)}"

    def connect(self, most: float = float("inf")) -> Any:
        """Return a new redis-py client of this server, with timeout ``most`` in seconds."""
        return connect(self._options, min(self._timeout, most))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask(methodcaller("dbsize")))

    def clear(self) -> None:
        """Delete all keys."""
        self._ask(methodcaller("flushdb"))

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        """Store values under their keys, in several commands if they exceed 1 MiB."""
        for part in commands({encoded_key(key): value for key, value in dictionary.items()}):
            self._ask(methodcaller("mset", part))

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values stored under ``keys``, None for those without a value."""
        names = list(map(encoded_key, keys))
        return self._ask(methodcaller("mget", names)) if names else []

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each of ``keys`` has a value, without reading it."""
        names = list(map(encoded_key, keys))
        return self._ask(partial(existing, keys=names))

    def status(self) -> bool:
        """Return whether the server answers within a second and accepts the password."""
        try:
            return bool(self._ask(methodcaller("ping"), is_probe=True))
        except StoreError:
            return False

    def check_server(self) -> None:
        """Raise ValueError if the server's configuration does not work for a cache; no effect if it
        does not answer within a second.
        """
        try:
            info = self._ask(methodcaller("info", "cluster"), is_probe=True)
        except StoreError as error:
            if advice := self.advice(error.__cause__):
                raise ValueError(f"{self} {advice}") from None
            return
        if info.get("cluster_enabled"):
            raise ValueError(f"{self} {_IN_CLUSTER}")

    def advice(self, error: BaseException | None) -> str:
        """Return advice if ``error`` means that the server's configuration does not work, else
        "".
        """
        if any(words in str(error) for words in ("Authentication required", "unauthenticated")):
            return "needs a password; add 'password' to its entry in hosts"
        of_clusters = ("AskError", "ClusterCrossSlotError", "ClusterDownError", "MovedError")
        return _IN_CLUSTER if type(error).__name__ in of_clusters else ""

    def failure(self, error: Exception) -> StoreError:
        """Convert the error of a failed request to a `StoreError` that names the server."""
        import redis

        if advice := self.advice(error):
            return StoreError(f"{self} {advice}")
        refused = isinstance(error, redis.ResponseError)
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, redis.TimeoutError):
            reason += f" (timeout={self._timeout:g})"
        return StoreError(f"{self} {'refuses' if refused else 'fails'}: {reason}", refused)

    def _ask(self, request: Callable[[Any], _T], is_probe: bool = False) -> _T:
        """Send a request and return the answer; convert redis-py's errors to `StoreError`."""
        handled = sys.exc_info()[1]
        with self.connect(_PROBE_SECONDS) if is_probe else self.connect() as client:
            try:
                return request(client)
            except Exception as error:
                if (raised := of_signal_handler(error, handled)) is not None:
                    raise raised from None
                raise self.failure(error) from error


_IN_CLUSTER = (
    "is part of a Redis Cluster, whose servers refuse requests for several keys; name independent"
    " servers in hosts: keys are distributed over them too"
)


class _FakeStore(_RedisStore):
    """The fakeredis of the calling process."""

    def __repr__(self) -> str:
        return "fakeredis of this process"

    def connect(self, most: float = 0) -> Any:
        """Return a new client of fakeredis."""
        import fakeredis

        return fakeredis.FakeRedis(server=_fake_server())


# By process id: a forked process has its own, as another thread may hold its parent's lock.
_fakes: dict[int, Any] = {}


def _fake_server() -> Any:
    try:
        import fakeredis
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend='fakeredis' needs fakeredis ({error}); install with: pip install fakeredis"
        ) from error
    if os.getpid() not in _fakes:
        if get_worker_info() is not None:
            warnings.warn(
                "backend='fakeredis' keeps values in one process, so this DataLoader worker begins"
                " without any, and they are lost when it ends; pip install 'bagua_ref[cache]' and"
                " use backend='redis' to share them",
                stacklevel=2,
            )
        _fakes.setdefault(os.getpid(), fakeredis.FakeServer())
    return _fakes[os.getpid()]


def commands(values: Mapping[bytes, Any]) -> Iterator[dict[bytes, Any]]:
    """Split ``values`` into parts of about 1 MiB."""
    part: dict[bytes, Any] = {}
    size = 0
    for key, value in values.items():
        if part and size + len(value) > _COMMAND_BYTES:
            yield part
            part, size = {}, 0
        part[key] = value
        size += len(value)
    if part:
        yield part


def existing(client: Any, keys: Sequence[bytes]) -> list[bool]:
    """Return which of ``keys`` a server has."""
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.exists(key)
        return list(map(bool, pipeline.execute()))


def bootstrap_redis_server(capacity_per_node: int) -> list[dict[str, Any]]:
    """Start this job's servers, one per node, if needed; return their addresses (S8.4). Every rank
    calls this.
    """
    return servers.addresses(checked_capacity(capacity_per_node), every_node=True)


def shutdown_redis_server() -> None:
    """Stop this node's server, if this process started it."""
    servers.shutdown()


def start_redis_server_cli(port: int, capacity: int, *args: str) -> None:
    """Start a Redis server on loopback that outlives this process, for ``RedisStore(hosts=[...])``;
    return once it answers.

    It has no password unless ``args`` sets one, so every user of this machine can read it. Stop it
    with ``redis-cli -p PORT shutdown``. The servers that a job starts for itself are different
    (S8.4).

    Args:
        port: the port to listen on.
        capacity: memory limit in bytes, above which keys are evicted at random; nothing is stored
            on disk.
        args: further arguments of the program, such as ``"--requirepass", "secret"``; they override
            the defaults.

    Raises:
        BackendUnavailableError: there is no server program, or it does not start, for example
            because the port is in use.
        ValueError: port or capacity is out of range.
    """
    if not isinstance(port, int) or not 0 < port < 2**16:
        raise ValueError(f"port={port!r} must be an int from 1 to 65535")
    servers.start_redis_daemon(port, checked_capacity(capacity, "capacity"), *args)


def get_host_ip() -> str:
    """Return the address of this node for other nodes."""
    return servers.node_address(get_master_addr())


def checked_capacity(capacity: int, name: str = "capacity_per_node") -> int:
    """Return the argument ``name``, ``capacity``; raise ValueError unless it is a positive
    integer.
    """
    if not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"{name}={capacity!r} must be a positive number of bytes")
    return capacity


def _checked_host(host: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(host)
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise ValueError(f"hosts has a server with {unknown[0]!r}; known are {', '.join(_OPTIONS)}")
    if "host" not in options and "unix_socket_path" not in options:
        raise ValueError(
            f"hosts has a server without 'host' or 'unix_socket_path'; it has {sorted(options)}"
        )
    try:
        options["port"] = int(options.get("port", 6379))
    except (TypeError, ValueError):
        raise ValueError(
            f"hosts has a server with port={options['port']!r}; it must be a number"
        ) from None
    return options


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("contrib.utils.redis_store")
