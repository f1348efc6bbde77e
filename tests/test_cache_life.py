"""Tests of a job's cache servers: discovery and shutdown (S8.4)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import torch
import torch.distributed as dist
from tests.cache_jobs import Plain, epoch, start_server_job
from tests.cache_servers import (
    PROGRAM,
    connect,
    eventually,
    every_backend,
    need,
    processes,
    zombies_of,
)
from tests.launch import launch, on_every_process, outcomes

import bagua_ref
from bagua_ref.contrib import CachedDataset, CacheLoader
from bagua_ref.contrib.cache import job_servers
from bagua_ref.contrib.cache import server as server_module
from bagua_ref.contrib.cache.server import node_address, start_redis_server
from bagua_ref.contrib.utils.redis_store import (
    FakeRedisStore,
    RedisStore,
    bootstrap_redis_server,
    shutdown_redis_server,
)
from bagua_ref.errors import BackendUnavailableError, CommunicationTimeoutError, NotInitializedError

pytestmark = pytest.mark.slow


def servers_of(rank: int) -> list[int]:
    """Return the watchdog and server processes of a rank."""
    watchdogs = list(processes("watchdog.py", f" {rank} "))
    found = []
    for pid in processes("-server 127.0.0.1:"):
        parent = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        if parent in watchdogs:
            found.append(pid)
    return watchdogs + found


def temporary_files() -> set[str]:
    return {str(path) for folder in ("/tmp", "/dev/shm", "/") for path in Path(folder).iterdir()}


@pytest.mark.redis
@pytest.mark.parametrize(("number", "has_child"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_the_server_ends_with_the_process_that_started_it(number, has_child):
    need()
    before = temporary_files()
    process, pipe = start_server_job(has_child)
    port, child = pipe.recv()
    try:
        mine = servers_of(process.pid)
        assert len(mine) == 2
        os.kill(process.pid, number)
        process.join()
        assert eventually(lambda: not any(pid in processes("") for pid in mine))
        assert not any(f":{port}" in line for line in processes("-server").values())
    finally:
        process.kill()
        if child is not None:
            os.kill(child, signal.SIGKILL)  # it stayed alive
    assert {
        path for path in temporary_files() - before if "redis" in path or "dump" in path
    } == set()


@pytest.mark.redis
@pytest.mark.parametrize("victim", [0, 1], ids=["watchdog", "server"])
def test_a_killed_server_or_watchdog_leaves_neither_zombie_nor_server(victim):
    need()
    shutdown_redis_server()
    loader = CacheLoader(timeout=1)
    mine = servers_of(os.getpid())
    os.kill(mine[victim], signal.SIGKILL)
    assert eventually(lambda: mine[1] not in processes(""))
    with pytest.warns(UserWarning, match="cache unavailable"):
        assert loader.get("a", str) == "a"
    if victim == 1:
        time.sleep(0.3)  # so that the watchdog can notice
        assert zombies_of(os.getpid()) == []
    again = CacheLoader()  # starts another server
    assert again.get("a", str) == "a"
    assert again.num_keys() == 1
    assert zombies_of(os.getpid()) == []
    shutdown_redis_server()
    assert servers_of(os.getpid()) == []
    assert zombies_of(os.getpid()) == []


@pytest.mark.redis
def test_the_password_is_in_no_process_list_environment_or_file():
    need()
    (address,) = bootstrap_redis_server(107_374_182_400)
    password = address["password"]
    assert len(password) >= 32
    assert address["host"] == "127.0.0.1"
    for pid in servers_of(os.getpid()):
        for place in ("cmdline", "environ"):
            assert password.encode() not in (Path("/proc") / str(pid) / place).read_bytes()
        for descriptor in (Path("/proc") / str(pid) / "fd").iterdir():
            assert not os.path.isfile(descriptor)
    listing = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=True).stdout
    assert password not in listing
    assert password not in repr(CacheLoader())
    assert password not in repr(job_servers._own)


def test_the_small_server_asks_for_its_password_too():
    CacheLoader("fakeredis").get("a", str)
    (address,) = job_servers.addresses("fakeredis", 107_374_182_400, every_node=True)
    assert address["host"] == "127.0.0.1"
    for password in (None, "guess"):
        client = connect(port=address["port"], password=password, protocol=2)
        with pytest.raises(
            (redis.AuthenticationError, redis.ResponseError), match=r"password|Authentication"
        ):
            client.get("_a")
    assert redis.Redis(**address, protocol=2).get("_a") is not None


@pytest.mark.redis
def test_the_server_listens_on_loopback_only():
    need()
    (address,) = bootstrap_redis_server(107_374_182_400)
    hexadecimal = f":{address['port']:04X} "
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
        if hexadecimal in line and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F{hexadecimal.strip()}"]


def test_a_worker_that_is_forked_while_a_thread_starts_a_server_finds_the_others(monkeypatch):
    FakeRedisStore()
    begun, end = threading.Event(), threading.Event()

    def start(host: str, capacity: int) -> None:
        begun.set()
        end.wait()
        raise BackendUnavailableError("not today")

    monkeypatch.setattr(job_servers, "start_redis_server", start)
    shutdown_redis_server()
    with ThreadPoolExecutor() as pool:
        made = pool.submit(RedisStore)
        begun.wait()
        worker = multiprocessing.get_context("fork").Process(target=FakeRedisStore)
        worker.start()
        worker.join(30)
        worker.kill()  # if it waits
        end.set()
        assert isinstance(made.exception(), BackendUnavailableError)
    worker.join()
    assert worker.exitcode == 0


@pytest.mark.redis
def test_two_jobs_on_one_node_have_servers_of_their_own_that_end_with_them():
    need()
    jobs = [start_server_job() for _ in range(2)]
    ports = [pipe.recv()[0] for _, pipe in jobs]
    assert ports[0] != ports[1]
    theirs = [servers_of(process.pid) for process, _ in jobs]
    assert [len(one) for one in theirs] == [2, 2]
    for number, (process, pipe) in enumerate(jobs):
        pipe.send("end")
        process.join()
        assert process.exitcode == 0
        assert [pid in processes("") for one in theirs for pid in one] == [number < 0] * 2 + [
            number < 1
        ] * 2


@every_backend
def test_loaders_of_a_process_share_one_server(backend):
    need(backend)
    first, second = (
        CacheLoader(backend, dataset_name="first"),
        CacheLoader(backend, dataset_name="second"),
    )
    assert first.store.stores[0]._options == second.store.stores[0]._options
    with pytest.warns(UserWarning, match="capacity_per_node=12345 has no effect"):
        CacheLoader(backend, capacity_per_node=12345)


@every_backend
def test_after_a_shutdown_the_next_loader_starts_anew(backend):
    need(backend)
    first = CacheLoader(backend)
    first.get("a", str)
    first.store.shutdown()
    assert not first.store.status()
    second = CacheLoader(backend)
    assert second.num_keys() == 0
    assert second.store.status()


def test_a_port_that_is_taken_is_left_for_another(monkeypatch):
    need()
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = iter([taken.port, taken.port, *[0] * 9])
    free = server_module.find_free_port

    monkeypatch.setattr(server_module, "find_free_port", lambda: next(ports) or free())
    server = start_redis_server("127.0.0.1", 10_000_000)
    assert server.is_running()
    server.stop()
    assert not server.is_running()
    with pytest.raises(
        BackendUnavailableError,
        match=rf"does not start on 127.0.0.1: .*{taken.port}.*ddress already in use",
    ):
        start_redis_server("127.0.0.1", 10_000_000, taken.port)
    with pytest.raises(BackendUnavailableError, match="nonsense"):
        start_redis_server("127.0.0.1", 10_000_000, None, "--nonsense", "1")


def test_a_program_that_does_nothing_is_an_error(monkeypatch, tmp_path):
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(BackendUnavailableError, match="exited at once without output"):
        start_redis_server("127.0.0.1", 10_000_000)
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(server_module, "_START_SECONDS", 0.3)
    with pytest.raises(BackendUnavailableError, match="no answer within"):
        start_redis_server("127.0.0.1", 10_000_000)
    assert processes("sleep 60", str(tmp_path)) == {}
    assert servers_of(os.getpid()) == [] or PROGRAM


def test_valkey_is_taken_where_redis_is_not(monkeypatch, tmp_path):
    need()
    (tmp_path / "valkey-server").symlink_to(PROGRAM)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server_module.find_program() == str(tmp_path / "valkey-server")
    server = start_redis_server("127.0.0.1", 10_000_000)
    assert server.is_running()
    server.stop()


def test_an_address_for_other_nodes():
    assert node_address("no such host.invalid") == node_address("127.0.0.1")


# Several ranks


def place_of_server(backend: str, cluster_mode: bool) -> tuple[list[int], list[str], int]:
    loader = CacheLoader(backend, cluster_mode=cluster_mode)
    rank = bagua_ref.get_rank() if bagua_ref.is_initialized() else dist.get_rank()
    loader.get(rank, str)
    sync()
    keys = loader.num_keys()
    again = CacheLoader(backend, dataset_name="again", cluster_mode=cluster_mode)
    assert again.store.stores[0]._options == loader.store.stores[0]._options
    mine = servers_of(os.getpid()) if backend == "redis" else []
    sync()
    options = [store._options for store in loader.store.stores]
    return (
        [option["port"] for option in options],
        [option["host"] for option in options],
        keys,
        len(mine),
    )


def sync() -> None:
    if bagua_ref.is_initialized():
        bagua_ref.barrier()
    else:
        dist.barrier()


@pytest.mark.parametrize(
    ("backend", "cluster_mode"),
    [pytest.param("redis", True, marks=pytest.mark.redis), ("fakeredis", False)],
)
def test_ranks_of_a_node_share_a_server_and_nodes_share_a_cluster(backend, cluster_mode):
    need(backend)
    found = launch(place_of_server, 3, backend, cluster_mode, nodes=(2, 1))
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
    if backend == "redis":
        assert mine == (2, 0, 2)


def with_torchs_group() -> tuple[list[int], list[str], int]:
    dist.init_process_group("gloo")
    found = place_of_server("fakeredis", True)
    dist.destroy_process_group()
    return found


def test_torchs_group_alone_is_enough():
    found = launch(with_torchs_group, 3, nodes=(2, 1), init=False)
    assert found[0][0] == found[1][0] == found[2][0]
    assert len(found[0][0]) == 2


@on_every_process(2, init=False)
def test_several_ranks_need_a_group_to_find_the_server():
    with pytest.raises(NotInitializedError, match=r"init_process_group\(\) first, or pass hosts="):
        CacheLoader("fakeredis")
    assert CacheLoader(hosts=[{"host": "127.0.0.1", "port": 1}]).dataset_name == ""


def without_a_program() -> str:
    os.environ["PATH"] = "/nowhere"
    with pytest.raises(BackendUnavailableError, match="backend='fakeredis'") as raised:
        CacheLoader()
    return str(raised.value)


def test_all_ranks_hear_that_there_is_no_program():
    told = launch(without_a_program, 2)
    assert told[0] == told[1]


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


@pytest.mark.redis
def test_kill_9_of_the_first_rank_ends_the_server_and_the_others_go_on(tmp_path):
    need()
    (tmp_path / "servers").touch()
    ended = outcomes(killed_rank, 2, str(tmp_path))
    assert ended[0].exitcode == -signal.SIGKILL
    assert ended[1].result == list(range(64)), ended[1].traceback


@on_every_process(2)
def test_ranks_that_shut_down_together_meet_at_a_new_server_and_a_new_group_finds_the_one_that_runs():
    loader = CacheLoader("fakeredis")
    loader.get(bagua_ref.get_rank(), str)
    bagua_ref.barrier()
    assert loader.num_keys() == 2
    bagua_ref.barrier()
    loader.store.shutdown()
    again = CacheLoader("fakeredis")
    assert again.store.status()
    assert again.num_keys() == 0
    loader = again
    bagua_ref.barrier()
    bagua_ref.destroy_process_group()
    bagua_ref.init_process_group(timeout=60)
    again = CacheLoader("fakeredis", dataset_name="again")
    again.get(bagua_ref.get_rank(), str)
    bagua_ref.barrier()
    assert loader.num_keys() == 2


def test_who_waits_for_a_rank_says_for_which_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_servers, "_WAIT_SECONDS", 0.1)
    with pytest.raises(
        CommunicationTimeoutError,
        match=r"timed out after [\de.-]+ s waiting for rank 1 of 2; every rank must make its first",
    ):
        job_servers._exchange(dist.HashStore(), "rank", 0, range(2), "a machine")

    class Gone(dist.HashStore):  # as if the rank that holds the store had left
        def wait(self, *arguments: object) -> None:
            raise dist.DistNetworkError("Connection was likely closed")

    with pytest.raises(
        CommunicationTimeoutError,
        match=r"timed out after [\de.-]+ s waiting for rank 0 of 2; .*Connection was likely closed",
    ):
        job_servers._exchange(Gone(), "rank", 0, range(2), "a machine")
