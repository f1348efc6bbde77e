"""Tests of stores: the contract for every kind, sharding (S8.1), and connections to Redis."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import subprocess
from contextlib import contextmanager

import pytest
import redis
import xxhash
from tests.cache_servers import Server, connect, eventually, every_backend, free_port, need, servers

from bagua_ref.contrib import CacheLoader
from bagua_ref.contrib.cache.server import start_redis_server
from bagua_ref.contrib.utils.redis_store import (
    FakeRedisStore,
    RedisStore,
    _RedisStore,
    get_host_ip,
    shutdown_redis_server,
    start_redis_server_cli,
)
from bagua_ref.contrib.utils.store import ClusterStore, Store, StoreError
from bagua_ref.errors import BackendUnavailableError
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.slow


class DictStore(Store):
    """The simplest store that fulfils the contract."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: list[tuple[str, list[str]]] = []

    def set(self, key, value):
        self.mset({key: value})

    def get(self, key):
        return self.mget([key])[0]

    def num_keys(self):
        return len(self.values)

    def clear(self):
        self.values.clear()

    def mset(self, dictionary):
        self.requests.append(("mset", list(dictionary)))
        self.values.update(
            {k: v.encode() if isinstance(v, str) else v for k, v in dictionary.items()}
        )

    def mget(self, keys):
        self.requests.append(("mget", list(keys)))
        return [self.values.get(key) for key in keys]

    def status(self):
        return True


@every_backend
def test_every_store_keeps_the_contract(backend):
    need(backend)
    store = FakeRedisStore() if backend == "fakeredis" else RedisStore()
    store.clear()
    check_contract(store)
    store.close()
    check_contract(store)  # a closed store reopens


@pytest.mark.redis
def test_three_servers_are_one_store():
    with servers(3) as started:
        store = RedisStore(hosts=[server.host for server in started])
        check_contract(store)
        keys = [f"data_{i}" for i in range(300)]
        store.mset({key: key for key in keys})
        for index, server in enumerate(started):
            mine = sorted(
                key for key in keys if xxhash.xxh64(key.encode(), seed=0).intdigest() % 3 == index
            )
            assert sorted(key.decode() for key in server.client().keys("*")) == mine
            assert len(mine) > 50
        assert store.mget(keys) == [key.encode() for key in keys]
        assert store.num_keys() == 300


def check_contract(store: Store) -> None:
    assert store.status()
    assert store.num_keys() == 0
    store.set("text", "ä")
    store.set("bytes", b"\0\r\n\xff")
    assert store.get("text") == "ä".encode()
    assert store.get("bytes") == b"\0\r\n\xff"
    assert store.get("nothing") is None
    store.mset({"a": b"1", "text": b"2"})
    store.mset({})
    assert store.mget(["text", "nothing", "a", "text"]) == [b"2", None, b"1", b"2"]
    assert store.mget([]) == []
    assert store.contains(["a", "nothing", "a"]) == [True, False, True]
    assert store.num_keys() == 3
    large = os.urandom(5_000_000)
    store.mset({"large": large, "empty": b""})
    assert store.mget(["large", "empty"]) == [large, b""]
    store.clear()
    assert store.num_keys() == 0


def test_a_key_lives_where_its_hash_says():
    stores = [DictStore() for _ in range(5)]
    cluster = ClusterStore(stores)
    for i in range(100):
        key = f"name with ä_{i}"
        assert cluster.route(key) is stores[xxhash.xxh64_intdigest(key.encode("utf-8"), seed=0) % 5]
    assert xxhash.xxh64_intdigest(b"") == 0xEF46DB3751D8E999  # published test vector for seed 0
    cluster.set("k", b"v")
    assert cluster.route("k").get("k") == b"v"
    assert sum(store.num_keys() for store in stores) == 1


def test_a_cluster_asks_each_store_once():
    stores = [DictStore() for _ in range(3)]
    cluster = ClusterStore(stores)
    keys = [f"k{i}" for i in range(60)]
    cluster.mset({key: key for key in keys})
    assert cluster.mget(keys[::-1]) == [key.encode() for key in keys[::-1]]
    assert [[kind for kind, _ in store.requests] for store in stores] == [["mset", "mget"]] * 3


def test_a_cluster_needs_a_store():
    with pytest.raises(ValueError, match="stores"):
        ClusterStore([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": []}, r"hosts=\[\] must name at least one server"),
        ({"hosts": [{"port": 1}]}, "without 'host' or 'unix_socket_path'"),
        (
            {"hosts": [{"host": "a", "pasword": "b"}]},
            "'pasword'; known are host, port, username, password",
        ),
        ({"hosts": [{"host": "a", "port": "x"}]}, "port='x'"),
        ({"capacity_per_node": 0}, "capacity_per_node=0"),
        ({"capacity_per_node": 1.5}, "capacity_per_node=1.5"),
        ({"hosts": [{"host": "a"}], "timeout": 0}, "timeout=0"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RedisStore(**options)


@pytest.mark.parametrize(
    "hosts", ["localhost:6379", {"host": "localhost", "password": "secret"}, ["localhost:6379"]]
)
def test_hosts_must_be_a_list_of_dicts(hosts):
    with pytest.raises(
        TypeError,
        match=r"hosts must be a list of dicts, such as \[\{'host': 'localhost', 'port': 6379\}\]",
    ):
        RedisStore(hosts=hosts)


def test_not_cluster_mode_takes_the_nodes_own_server():
    hosts = [{"host": f"server{i}", "port": i} for i in range(2)]
    taken = SimulatedWorld(5, nodes=[1, 2, 1, 1]).run(
        lambda comm: repr(RedisStore(hosts=hosts, cluster_mode=False))
    )
    assert taken == [f"RedisStore(redis at server{i}:{i})" for i in (0, 1, 1, 0, 1)]


def test_passwords_are_not_shown():
    store = RedisStore(hosts=[{"host": "h", "port": 1, "password": "secret", "username": "user"}])
    assert "secret" not in repr(store)


def test_a_store_that_is_down_says_so():
    store = RedisStore(hosts=[{"host": "127.0.0.1", "port": 1}])
    assert not store.status()
    with pytest.raises(StoreError, match=r"redis at 127.0.0.1:1 fails: ConnectionError") as raised:
        store.get("a")
    assert not raised.value.refused


@pytest.mark.redis
def test_a_wrong_password_is_no_status_and_an_error():
    with servers(1) as (server,):
        store = RedisStore(hosts=[{**server.host, "password": "wrong"}])
        assert not store.status()
        with pytest.raises(StoreError, match="AuthenticationError"):
            store.set("a", b"")


@pytest.mark.redis
def test_a_forgotten_password_is_asked_for():
    with servers(1) as (server,):
        for password in ({}, {"password": None}, {"password": ""}):
            host = {"host": "127.0.0.1", "port": server.port, **password}
            with pytest.raises(
                ValueError,
                match=(
                    rf"redis at 127.0.0.1:{server.port} needs a password; add 'password' to its"
                    r" entry in hosts"
                ),
            ):
                CacheLoader(hosts=[host])
        server.kill()
        store = RedisStore(hosts=[host])
        server.start()
        for count in (1, 20):  # before the password, Redis reads no commands of more than 10 words
            for ask in (store.mget, lambda keys: store.mset(dict.fromkeys(keys, b"1"))):
                with pytest.raises(StoreError, match="add 'password'") as raised:
                    ask([str(number) for number in range(count)])
                assert not raised.value.refused


def get_often(loader: CacheLoader) -> None:
    for _ in range(20):
        assert loader.get_many(range(20), lambda keys: keys) == list(range(20))
    assert 1 <= loader.stats().errors <= 10


@pytest.mark.redis
def test_a_server_that_wants_a_password_later_is_asked_now_and_then():
    with servers(1) as (server,):
        server.kill()
        loader = CacheLoader(hosts=[{"host": "127.0.0.1", "port": server.port}])
        server.start()
        with pytest.warns(UserWarning, match="add 'password' to its entry in hosts") as said:
            get_often(loader)
        assert len(said) == 1


@pytest.mark.redis
def test_a_redis_cluster_is_refused(tmp_path):
    # its servers talk to each other at port + 10,000
    port = next(port for port in iter(free_port, 0) if port < 55_000)
    server = Server("cluster-enabled yes", f"cluster-config-file {tmp_path}/nodes.conf", port=port)
    try:
        server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        assert eventually(
            lambda: b"cluster_state:ok" in server.client().execute_command("CLUSTER", "INFO")
        )
        for make in (RedisStore, CacheLoader):
            with pytest.raises(
                ValueError, match=r"is part of a Redis Cluster, .*name independent servers in hosts"
            ):
                make(hosts=[server.host])
        server.kill()
        loader = CacheLoader(hosts=[server.host])
        server.start()
        with pytest.warns(UserWarning, match="is part of a Redis Cluster") as said:
            get_often(loader)
        assert len(said) == 1
    finally:
        server.kill()


@pytest.mark.parametrize(
    "store",
    [
        RedisStore(hosts=[{"host": "127.0.0.1", "port": 1}]),
        ClusterStore([DictStore(), DictStore()]),
    ],
)
@pytest.mark.parametrize("key", [5, b"a", None, ("a",)])
def test_keys_of_stores_are_str(store, key):
    for ask in (
        lambda: store.get(key),
        lambda: store.set(key, b""),
        lambda: store.mget(["a", key]),
        lambda: store.mset({"a": b"", key: b""}),
        lambda: store.contains(["a", key]),
    ):
        with pytest.raises(TypeError, match=r"key=.* of a store is a \w+; it must be a str"):
            ask()


@pytest.mark.redis
def test_a_user_of_its_own(tmp_path):
    with servers(1, "user trainer on >pass ~* +@all") as (server,):
        store = RedisStore(
            hosts=[
                {
                    "host": "127.0.0.1",
                    "port": server.port,
                    "username": "trainer",
                    "password": "pass",
                }
            ]
        )
        check_contract(store)


@pytest.mark.redis
def test_a_unix_socket(tmp_path):
    path = tmp_path / "redis.sock"
    server = Server(f"unixsocket {path}", port=0, password=None)
    try:
        for name in ("unix_socket", "unix_socket_path"):
            store = RedisStore(hosts=[{name: str(path)}])
            assert eventually(store.status)
            assert repr(store) == f"RedisStore(redis at {path})"
        check_contract(store)
    finally:
        server.kill()


@pytest.mark.redis
def test_tls(tmp_path):
    need()
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += [
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True)
    port = free_port()
    settings = [
        f"tls-port {port}",
        f"tls-cert-file {certificate}",
        f"tls-key-file {key}",
        f"tls-ca-cert-file {certificate}",
    ]
    server = Server(*settings, "tls-auth-clients no", port=0, password="secret")
    try:
        host = {"host": "127.0.0.1", "port": port, "password": "secret", "ssl": True}
        trusting = RedisStore(hosts=[{**host, "ssl_ca_certs": str(certificate)}])
        assert eventually(trusting.status)
        check_contract(trusting)
        assert not RedisStore(hosts=[host]).status()  # the certificate is self-signed
        del host["ssl"]
        assert RedisStore(hosts=[{**host, "tls": True, "ssl_ca_certs": str(certificate)}]).status()
    finally:
        server.kill()


@pytest.mark.redis
def test_long_writes_are_cut_into_commands(monkeypatch):
    from bagua_ref.contrib.utils import redis_store

    monkeypatch.setattr(redis_store, "_COMMAND_BYTES", 1000)
    with servers(1) as (server,):
        store = RedisStore(hosts=[server.host])
        store.mset({f"k{i}": bytes(400) for i in range(5)} | {"long": bytes(5000)})
        assert store.num_keys() == 6
        assert server.calls("mset") == 4


@pytest.mark.redis
def test_a_pickled_store_carries_no_connection():
    with servers(1) as (server,):
        store = _RedisStore(**server.host)
        store.set("a", b"1")
        copy = pickle.loads(pickle.dumps(store))
        assert copy._client is None
        assert copy.get("a") == b"1"
        assert copy._client is not store._client


@contextmanager
def daemon(*args, process=False):
    """Start a daemon from a process that ends before the daemon is used; yield its port and stop it
    at the end.
    """
    need()
    port = free_port()
    try:
        if process:
            starter = multiprocessing.get_context("forkserver").Process(
                target=start_redis_server_cli, args=(port, 50_000_000, *args)
            )
            starter.start()
            starter.join(60)
            assert starter.exitcode == 0
        else:
            assert start_redis_server_cli(port, 50_000_000, *args) is None
        yield port
    finally:
        password = args[args.index("--requirepass") + 1] if "--requirepass" in args else None
        connect(port=port, password=password).shutdown(nosave=True)
    assert eventually(lambda: not _RedisStore("127.0.0.1", port).status())


@pytest.mark.redis
def test_a_server_started_by_hand_outlives_the_process_that_started_it():
    with daemon(process=True) as port:
        host = {"host": "127.0.0.1", "port": port}
        store = RedisStore(hosts=[host])
        assert store.status()
        store.set("a", b"1")
        store.shutdown()  # leaves a server running that it did not start
        shutdown_redis_server()
        assert RedisStore(hosts=[host]).get("a") == b"1"
        settings = connect(port=port).config_get("max*") | connect(port=port).config_get("save")
        assert settings["maxmemory"] == "50000000"
        assert settings["maxmemory-policy"] == "allkeys-random"
        assert settings["save"] == ""
        assert connect(port=port).config_get("bind")["bind"] == "127.0.0.1"
        with pytest.raises(BackendUnavailableError, match=f"port {port} is already in use"):
            start_redis_server_cli(port, 50_000_000)


@pytest.mark.redis
def test_a_server_started_by_hand_takes_further_arguments():
    with daemon("--requirepass", "secret", "--maxclients 17") as port:
        with pytest.raises(redis.AuthenticationError):
            connect(port=port).ping()
        assert connect(port=port, password="secret").config_get("maxclients")["maxclients"] == "17"


@pytest.mark.redis
def test_a_server_that_does_not_start_says_why():
    need()
    with pytest.raises(BackendUnavailableError, match=r"does not start on port .*no-such-setting"):
        start_redis_server_cli(free_port(), 50_000_000, "--no-such-setting", "1")


@pytest.mark.parametrize(
    ("port", "capacity", "named"),
    [(0, 10, "port=0"), ("6379", 10, "port='6379'"), (6379, 0, "capacity=0")],
)
def test_a_server_by_hand_with_bad_arguments(port, capacity, named):
    with pytest.raises(ValueError, match=named):
        start_redis_server_cli(port, capacity)


@pytest.mark.redis
def test_a_server_of_this_process_and_its_end():
    need()
    server = start_redis_server("127.0.0.1", 50_000_000, free_port(), "--maxclients", "17")
    try:
        assert "password" not in repr(server)
        client = connect(**server.address)
        assert client.config_get("maxclients")["maxclients"] == "17"
        assert client.config_get("maxmemory")["maxmemory"] == "50000000"
        with pytest.raises(redis.AuthenticationError):
            connect(port=server.port).ping()
    finally:
        server.stop()
    assert not _RedisStore(**server.address).status()
    server.stop()
    shutdown_redis_server()
    shutdown_redis_server()


def test_the_hosts_address_is_one_that_can_be_bound():
    import socket

    with socket.socket() as probe:
        probe.bind((get_host_ip(), 0))
