"""Redis as a store: running servers, or servers that the job starts (S8.1, S8.4)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bagua_ref.base.not_provided import explain_missing
from bagua_ref.contrib.cache import job_servers
from bagua_ref.contrib.cache.server import node_address, start_redis_daemon
from bagua_ref.contrib.utils.store import ClusterStore, Store, StoreError, encoded_key
from bagua_ref.env import checked_timeout, get_master_addr, get_node_rank

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
# a longer MSET is split, as Redis drops clients that send more than 1 GB at once
_COMMAND_BYTES = 64 * 1024**2
_ALIASES = {"unix_socket": "unix_socket_path", "tls": "ssl"}
_IN_CLUSTER = (
    "is part of a Redis Cluster, whose servers refuse requests for several keys; name independent"
    " servers in hosts: keys are distributed over them too"
)
_OF_CLUSTERS = ("AskError", "ClusterCrossSlotError", "ClusterDownError", "MovedError")
_WITHOUT_PASSWORD = ("Authentication required", "unauthenticated")
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


class RedisStore(ClusterStore):
    """Several Redis servers used as one store.

    Servers in ``hosts`` are asked once what they are, for at most a second each. One that does not
    answer may come later (S8.3).

    Args:
        hosts: the servers, each a dict with ``host`` and ``port`` or ``unix_socket_path``, and as
            needed ``username``, ``password``, ``db``, ``ssl=True``, ``ssl_ca_certs``,
            ``ssl_certfile``, ``ssl_keyfile``, ``ssl_cert_reqs``, ``ssl_check_hostname``. None: the
            job starts a server on each of its nodes (S8.4).
        cluster_mode: True: keys are spread over all servers (S8.1). False: node k uses only server
            k mod m.
        capacity_per_node: bytes that each started server may use before it evicts keys at random.
        timeout: seconds after which a server without a complete answer counts as down; each MiB
            that is moved adds a second, up to ten times ``timeout``.

    Raises:
        ValueError: an argument is out of range, a host has an unknown option, or the server there
            is part of a Redis Cluster or needs a password that is not given.
        BackendUnavailableError: no server program is installed on this machine.
        NotInitializedError: several ranks must start servers and have no process group yet.
    """

    _kind = "redis"

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
            hosts = job_servers.addresses(
                self._kind, checked_capacity(capacity_per_node), every_node=cluster_mode
            )
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
        """Stop this node's server if this job started it; all loaders of the node lose it. Servers
        in ``hosts`` keep running.
        """
        self.close()
        if self._is_ours:
            job_servers.shutdown(self._kind)


class FakeRedisStore(RedisStore):
    """A fakeredis server in the first rank of each node, for laptops and tests. It never evicts, so
    it can use up the memory.

    Args:
        cluster_mode: True: keys are spread over all nodes (S8.1). False: each node uses only its
            own server.
        capacity_per_node: accepted, but not enforced.
        timeout: see `RedisStore`.

    Raises:
        BackendUnavailableError: fakeredis is not installed.
        NotInitializedError: there are several ranks and no process group yet.
    """

    _kind = "fakeredis"

    def __init__(
        self,
        cluster_mode: bool = True,
        capacity_per_node: int = DEFAULT_CAPACITY,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        super().__init__(None, cluster_mode, capacity_per_node, timeout=timeout)


class _RedisStore(Store):
    """One Redis server. Each process opens its own connections when they are first needed; they are
    never pickled.
    """

    def __init__(
        self, host: str = "", port: int | str = 6379, *, timeout: float = TIMEOUT, **options: Any
    ) -> None:
        self._options = {"host": host, "port": int(port), **options}
        if "unix_socket_path" in options:
            del self._options["host"], self._options["port"]
        self._timeout = timeout
        self._forget()

    def __repr__(self) -> str:
        options = self._options
        return f"redis at {options.get('unix_socket_path') or '{host}:{port}'.format(**options)}"

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_timeout": self._timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def num_keys(self) -> int:
        """Return the number of keys."""
        with self._request() as client:
            count: int = self._checked("DBSIZE", client.execute_command("DBSIZE"), _is_count)
            return count

    def clear(self) -> None:
        """Delete all keys."""
        with self._request() as client:
            self._checked("FLUSHDB", client.execute_command("FLUSHDB"), _is_ok)

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        """Store every value under its key, in several commands if they exceed 64 MiB."""
        commands: list[list[str | bytes]] = [[]]
        size = 0
        for key, value in dictionary.items():
            if commands[-1] and size + len(value) > _COMMAND_BYTES:
                commands.append([])
                size = 0
            commands[-1] += (encoded_key(key), value)
            size += len(value)
        with self._request() as client:
            for command in filter(None, commands):
                self._checked("MSET", client.execute_command("MSET", *command), _is_ok)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the value stored under each of ``keys``, or None."""
        if not keys:
            return []
        with self._request(len(keys)) as client:
            found: list[bytes | None] = self._checked(
                "MGET",
                client.execute_command("MGET", *map(encoded_key, keys)),
                _is_value,
                len(keys),
            )
            return found

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each of ``keys`` has a value, without reading it."""
        with self._request() as client, client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.execute_command("EXISTS", encoded_key(key))
            return [
                bool(count)
                for count in self._checked("EXISTS", pipeline.execute(), _is_count, len(keys))
            ]

    def status(self) -> bool:
        """Return whether the server answers within a second and accepts the password."""
        probe = _RedisStore(**self._options, timeout=min(self._timeout, _PROBE_SECONDS))
        try:
            with probe._request() as client:
                return bool(client.execute_command("PING") == b"PONG")
        except StoreError:
            return False
        finally:
            probe.close()

    def check_server(self) -> None:
        """Raise ValueError if the server cannot be used as it is described; do nothing if it does
        not answer within a second.
        """
        probe = _RedisStore(**self._options, timeout=min(self._timeout, _PROBE_SECONDS))
        try:
            with probe._request() as client:
                answer = client.execute_command("INFO", "cluster")
        except StoreError as error:
            if misuse := self._misuse(error.__cause__):
                raise ValueError(misuse) from None
            return
        finally:
            probe.close()
        if isinstance(answer, bytes) and b"cluster_enabled:1" in answer:
            raise ValueError(f"{self} {_IN_CLUSTER}")

    def _misuse(self, error: BaseException | None) -> str:
        """Return advice if ``error`` says that the server cannot be used in this way, else an empty
        text.
        """
        import redis

        is_refusal = isinstance(error, (redis.AuthenticationError, redis.ResponseError))
        if is_refusal and any(words in str(error) for words in _WITHOUT_PASSWORD):
            return f"{self} needs a password; add 'password' to its entry in hosts"
        return f"{self} {_IN_CLUSTER}" if type(error).__name__ in _OF_CLUSTERS else ""

    def close(self) -> None:
        """Close this process's connections; they are opened again when needed."""
        client, pid = self._client, self._pid
        self._forget()
        # only the parent may close the connections that a forked child inherits
        if client is not None and pid == os.getpid():
            client[0].close()

    def _forget(self) -> None:
        # Not only for the first request: if a thread imports it while another forks a worker, the
        # worker waits for ever.
        import bagua_ref.contrib.cache.protocol  # noqa: F401

        self._client: tuple[Any, Any] | None = None
        self._pid = 0

    @contextmanager
    def _request(self, values: int = 0) -> Iterator[Any]:
        """Yield this process's client for a request, answered with ``values``; convert its errors
        into `StoreError`.
        """
        import redis

        if (ours := self._client) is None or self._pid != os.getpid():
            ours = self._client = self._connect()
            self._pid = os.getpid()
        client, limit = ours
        limit.start(values)
        try:
            yield client
        except (redis.RedisError, OSError) as error:
            if misuse := self._misuse(error):
                # Redis may be closing it
                client.connection_pool.disconnect(inuse_connections=False)
                raise StoreError(misuse) from error
            refused = isinstance(error, redis.ResponseError)
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, redis.TimeoutError):
                reason += f" (timeout={self._timeout:g})"
            raise StoreError(
                f"{self} {'refuses' if refused else 'fails'}: {reason}", refused
            ) from error

    def _checked(
        self, command: str, answer: Any, is_right: Callable[[Any], bool], count: int | None = None
    ) -> Any:
        """Return ``answer`` if it is right, or if it is a list of ``count`` right ones.

        Raises:
            StoreError: it has another shape.
        """
        if is_right(answer) if count is None else _is_list(answer, is_right, count):
            return answer
        what = repr(answer[:40] if isinstance(answer, bytes) else answer)
        if isinstance(answer, list):
            what = (
                "a list of"
                f" {', '.join(sorted({type(one).__name__ for one in answer})) or 'nothing'}"
                f" ({len(answer)})"
            )
        raise StoreError(
            f"{self} fails: it answers {command} with"
            f" {what}{f' instead of {count} values' if count else ''}"
        )

    def _connect(self) -> tuple[Any, Any]:
        """Return a client, which connects at its first use, and the limit of its requests."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        from bagua_ref.contrib.cache.protocol import AnswerReader, CommandPacker, Limit

        limit = Limit(self._timeout)
        client = redis.Redis(
            **self._options,
            # the same replies from every release of redis-py, and no round trip to negotiate
            protocol=2,
            socket_timeout=self._timeout,
            socket_connect_timeout=self._timeout,
            retry=Retry(NoBackoff(), 0),  # the guard around this store decides when to retry
        )
        client.response_callbacks.clear()  # answers as they came, for `_checked`
        # Set on the connections, as clients of older releases do not pass it on.
        client.connection_pool.connection_kwargs.update(
            parser_class=lambda socket_read_size: AnswerReader(limit),
            command_packer=CommandPacker(limit),
        )
        return client, limit


def _is_list(answer: Any, is_right: Callable[[Any], bool], count: int) -> bool:
    return isinstance(answer, list) and len(answer) == count and all(map(is_right, answer))


def _is_ok(answer: Any) -> bool:
    return bool(answer == b"OK")


def _is_count(answer: Any) -> bool:
    return isinstance(answer, int)


def _is_value(answer: Any) -> bool:
    return answer is None or isinstance(answer, bytes)


def bootstrap_redis_server(capacity_per_node: int) -> list[dict[str, Any]]:
    """Return the addresses of this job's servers, one per node, after starting them if needed
    (S8.4). Every rank calls this.
    """
    return job_servers.addresses("redis", checked_capacity(capacity_per_node), every_node=True)


def shutdown_redis_server() -> None:
    """Stop this node's server, if this process started it."""
    job_servers.shutdown("redis")


def start_redis_server_cli(port: int, capacity: int, *args: str) -> None:
    """Start a Redis on loopback that outlives this process, for ``RedisStore(hosts=[...])``; return
    when it answers.

    It has no password unless ``args`` sets one, so every user of this machine can read it. End it
    with ``redis-cli -p PORT shutdown``. The servers that a job starts for itself are different
    (S8.4).

    Args:
        port: the port to listen on.
        capacity: bytes that it may use before it evicts keys at random; nothing is stored on disk.
        args: further arguments of the program, such as ``"--requirepass", "secret"``; they override
            the defaults.

    Raises:
        BackendUnavailableError: there is no server program, or it does not start, for example
            because the port is in use.
        ValueError: port or capacity is out of range.
    """
    if not isinstance(port, int) or not 0 < port < 2**16:
        raise ValueError(f"port={port!r} must be an int from 1 to 65535")
    start_redis_daemon(port, checked_capacity(capacity, "capacity"), *args)


def get_host_ip() -> str:
    """Return the address by which other nodes reach this one."""
    return node_address(get_master_addr())


def checked_capacity(capacity: int, name: str = "capacity_per_node") -> int:
    """Return ``capacity``, the argument ``name``; ValueError unless it is a positive integer."""
    if not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"{name}={capacity!r} must be a positive number of bytes")
    return capacity


def _checked_host(host: Mapping[str, Any]) -> dict[str, Any]:
    options = {_ALIASES.get(name, name): value for name, value in host.items()}
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise ValueError(
            f"hosts has a server with {unknown[0]!r}; known are {', '.join([*_OPTIONS, *_ALIASES])}"
        )
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
