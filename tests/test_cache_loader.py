"""Tests of CacheLoader: reads, writes, counts and failing stores (S8)."""

from __future__ import annotations

import enum
import os
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import redis
import torch
from tests.cache_servers import Server, eventually, every_backend, need, servers
from tests.cache_values import Pair, Sample, same

from bagua_ref.contrib import CacheLoader
from bagua_ref.contrib.cache import codec, guard
from bagua_ref.contrib.cache.codec import encode
from bagua_ref.contrib.cache.guard import CacheStats, Counters
from bagua_ref.errors import BackendUnavailableError


class Maker:
    """A load_fn that records its keys."""

    def __init__(self, make=lambda key: f"value of {key}") -> None:
        self.make, self.asked = make, []

    def __call__(self, key):
        self.asked.append(key)
        return self.make(key)


@pytest.fixture
def server() -> Iterator[Server]:
    with servers(1) as (one,):
        yield one


def on(server: Server, **options) -> CacheLoader:
    return CacheLoader(hosts=[server.host], **options)


def fresh(backend: str = "fakeredis", **options) -> CacheLoader:
    need(backend)
    loader = CacheLoader(backend, **options)
    loader.store.clear()
    return loader


class Level(enum.IntEnum):
    LOW = 3


class Recording:
    def __fspath__(self) -> str:
        return "a/b.wav"


class Name(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "a name"

    __repr__ = __format__ = __str__


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (np.str_("a"), "a"),
        (np.bytes_(b"a"), "b'a'"),
        (Name("a"), "a"),
        (Level.LOW, "3"),
        (torch.tensor([5]), "5"),
        (np.float64(0.1), "0.1"),
        (np.longdouble(0.5), "0.5"),
        (Path("a"), "a"),
        (Recording(), "a/b.wav"),
        ((Recording(),), "('a/b.wav',)"),
        (
            (np.int64(1), [np.str_("a"), Path("b"), torch.tensor(2)], (Level.LOW,)),
            "(1, ['a', 'b', 2], (3,))",
        ),
        (Pair(1, np.float64(2)), "(1, 2.0)"),
        (torch.Size([2, 3]), "(2, 3)"),
        (os.fsdecode(b"caf\xe9.wav"), "caf\udce9.wav"),
        ("\ud83d\ude00", "\ud83d\ude00"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_S8_1_a_key_is_its_text(key, text):
    loader = fresh(dataset_name="d")
    assert loader.get(key, lambda key: "value") == "value"
    assert loader.store.contains([f"d_{text}"]) == [True]
    assert loader.get(text, lambda key: "other") == "value"
    assert loader.contains([key]) == [True]
    assert loader.num_keys() == 1


@every_backend
def test_a_loader_as_context_writes_at_its_end_and_a_forgotten_one_too(backend):
    with fresh(backend, writer_buffer_size=9) as loader:
        loader.get("a", Maker())
    assert loader.store.num_keys() == 1
    forgotten = CacheLoader(backend, writer_buffer_size=9)
    forgotten.get("b", Maker())
    del forgotten
    assert loader.store.num_keys() == 2


@every_backend
def test_a_batch_is_read_and_made_in_order_with_repeats(backend):
    loader = fresh(backend, writer_buffer_size=100)
    loader.get("b", lambda key: [key])
    asked = []

    def load_many(keys):
        asked.extend(keys)
        return ([key] for key in keys)

    first = loader.get_many(["a", "b", "c", "a", "b"], load_many)
    assert first == [["a"], ["b"], ["c"], ["a"], ["b"]]
    assert asked == ["a", "c"]
    assert loader.store.num_keys() == 3  # written immediately, with the values that waited
    again = loader.get_many(["a", "b", "c", "a", "b"], None)
    assert again == first
    for values in (first, again):
        assert len({id(value) for value in values}) == 5  # each sample is an object of its own
    with pytest.raises(ValueError, match="load_many returned 1 values for 2 keys"):
        loader.get_many(["x", "y"], lambda keys: [1])


@pytest.mark.redis
def test_a_batch_costs_one_request_to_read_and_one_to_write():
    with servers(3) as started:
        loader = CacheLoader(hosts=[server.host for server in started])
        for batch in range(2):
            loader.get_many([f"{batch} {i}" for i in range(40)], lambda keys: keys)
            loader.get_many([f"{batch} {i}" for i in range(40)], lambda keys: keys)
        assert [server.calls("mget") for server in started] == [4] * 3
        assert [server.calls("mset") for server in started] == [2] * 3
        assert [server.calls("get") + server.calls("set") for server in started] == [0] * 3


def test_objects_may_be_pickled_on_servers_of_this_job():
    loader = fresh()
    loader.get("a", lambda key: Sample(torch.ones(2), 3))
    assert same(loader.get("a", Maker()), Sample(torch.ones(2), 3))
    with pytest.raises(TypeError, match="allow_pickle=True"):
        CacheLoader("fakeredis", dataset_name="no", allow_pickle=False).get(
            "a", lambda key: Sample(1)
        )
    with pytest.raises(TypeError, match="dict of its fields"):
        loader.get("b", lambda key: np.zeros(2, "i4,i4"))


@pytest.mark.redis
def test_a_foreign_server_may_hold_no_pickle_without_permission(server):
    with pytest.raises(
        TypeError, match=r"tests.*Sample cannot be cached without pickle.*hosts=.*allow_pickle=True"
    ):
        on(server).get("a", lambda key: Sample(1))
    trusting = on(server, allow_pickle=True)
    assert trusting.get("a", lambda key: Sample(1)) == Sample(1)
    make, careful = Maker(), on(server)
    with pytest.warns(UserWarning, match=r"'_a' is computed again: .*allow_pickle=True"):
        assert careful.get("a", make) == "value of a"
    assert make.asked == ["a"]
    assert careful.stats().errors == 1
    # replaced by a value that needs no pickle
    assert careful.get("a", make) == trusting.get("a", make) == "value of a"


DAMAGE = {
    "truncated": encode(list(range(100)), False)[:-1],
    "foreign": pickle.dumps({"some": "thing"}),
    "another version": bytes([codec.VERSION + 1]) + encode(1, False)[1:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_counted_warned_about_once_and_made_anew(damage):
    loader, make = fresh(dataset_name="d"), Maker()
    loader.store.mset({f"d_{i}": damage for i in range(3)})
    with pytest.warns(UserWarning, match="'d_0' is computed again") as caught:
        values = loader.get_many([0, 1, 2], lambda keys: [make(key) for key in keys])
    assert values == [f"value of {i}" for i in range(3)]
    assert len(caught) == 1
    assert (loader.stats().errors, loader.stats().misses, loader.stats().hits) == (3, 3, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.get(0, make) == "value of 0"
        loader.store.set("d_0", damage)
        assert loader.get(0, make) == "value of 0"
    assert make.asked == [0, 1, 2, 0]
    assert loader.stats().errors == 4


@pytest.mark.redis
def test_a_key_that_holds_no_string_is_a_miss(server):
    server.client().rpush("_a", "element")
    loader = on(server)
    assert loader.get("a", lambda key: 1) == 1
    assert loader.get("a", lambda key: 2) == 1


def test_a_value_that_is_too_large_is_returned_and_not_kept(monkeypatch):
    loader = fresh()
    monkeypatch.setattr(codec, "_LARGEST", 100)
    with pytest.warns(UserWarning, match="at most 100"):
        assert loader.get_many(
            ["a", "b", "b"], lambda keys: (bytes(200) if key == "b" else key for key in keys)
        ) == [
            "a",
            bytes(200),
            bytes(200),
        ]
    assert loader.num_keys() == 1
    assert loader.stats().errors == 1


@pytest.mark.redis
def test_without_its_server_load_fn_serves(server):
    loader, make = on(server, writer_buffer_size=4), Maker()
    loader.get("a", make)
    loader.flush()
    server.kill()

    def train():
        for i in range(50):
            assert loader.get(i, make) == f"value of {i}"
            assert len(loader._buffer._values) < 4
        assert 1 <= loader.stats().errors < 20  # it does not contact the store each time
        assert eventually(
            lambda: loader.get(f"more {len(make.asked)}", make) and loader.stats().errors >= 3
        )

    with pytest.warns(
        UserWarning, match=r"cache unavailable; continuing without it: redis at 127.0.0.1:\d+ fails"
    ) as caught:
        train()
    assert len(caught) == 1
    assert make.asked[:51] == ["a", *range(50)]
    assert loader.num_keys() == 0
    loader.close()
    server.start()

    def comes_back():
        loader.get("b", make)
        loader.flush()
        return server.client().dbsize()

    assert eventually(comes_back)
    made = len(make.asked)
    assert loader.get("b", make) == "value of b"
    assert len(make.asked) == made


@pytest.mark.slow
@pytest.mark.redis
def test_a_server_that_stops_answering_costs_its_timeout_once_in_a_while(server):
    loader, make = on(server, timeout=0.5), Maker()
    loader.get("a", make)
    server.pause()
    started = time.monotonic()
    with pytest.warns(UserWarning, match="Timeout") as caught:
        assert [loader.get("a", make) for _ in range(200)] == 200 * ["value of a"]
    assert len(caught) == 1
    assert time.monotonic() - started < 5
    server.resume()
    assert eventually(lambda: loader.get("a", make) and loader.stats().hits)


@pytest.mark.redis
def test_a_full_server_that_refuses_is_still_read():
    with servers(1, "maxmemory 3mb", "maxmemory-policy noeviction") as (server,):
        loader, make = on(server), Maker(lambda key: bytes(100_000))
        with pytest.warns(UserWarning, match=r"refuses: OutOfMemoryError") as caught:
            assert [len(loader.get(i, make)) for i in range(60)] == 60 * [100_000]
        assert len(caught) == 1
        made = len(make.asked)
        for _ in range(5):
            assert loader.get(0, make) == bytes(100_000)
        assert len(make.asked) == made
        assert 0 < loader.num_keys() < 60
        assert loader.stats().errors >= 1


@pytest.mark.redis
def test_capacity_is_kept_by_evicting():
    need()
    from tests.cache_servers import free_port

    from bagua_ref.contrib.cache.server import start_redis_server

    server = start_redis_server("127.0.0.1", 10_000_000, free_port())
    try:
        loader, make = CacheLoader(hosts=[server.address]), Maker(lambda key: bytes(100_000))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                for i in range(200):
                    assert len(loader.get(i, make)) == 100_000
        assert 20 < loader.num_keys() < 100
        assert loader.stats().errors == 0
        assert 200 < len(make.asked) < 400
        client = redis.Redis(**server.address)
        assert client.info("memory")["used_memory"] < 12_000_000
        assert client.info("stats")["evicted_keys"] > 100
        configured = (
            client.config_get("maxmemory-policy")
            | client.config_get("save")
            | client.config_get("appendonly")
        )
        assert configured == {"maxmemory-policy": "allkeys-random", "save": "", "appendonly": "no"}
    finally:
        server.stop()


def test_a_pickled_loader_reads_the_same_store_and_counts_by_itself():
    loader, make = fresh(writer_buffer_size=5), Maker()
    loader.get("waiting", make)
    loader.get_many(["a"], lambda keys: [make(key) for key in keys], flush=False)
    copy = pickle.loads(pickle.dumps(loader))
    assert copy._buffer._values == {}
    loader.flush()
    assert copy.get("a", make) == "value of a"
    assert make.asked == ["waiting", "a"]
    assert copy.stats() == CacheStats(1, 0, 0, copy.stats().bytes_read, 0)
    assert loader.stats().hits == 0


def test_threads_share_a_loader():
    loader, wrong = fresh(writer_buffer_size=7), []

    def work():
        for i in range(100):
            if (
                loader.get(i % 40, lambda key: torch.full((3,), float(key))).tolist()
                != [i % 40] * 3
            ):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert loader.num_keys() == 40
    stats = loader.stats()
    assert (stats.hits + stats.misses, stats.errors) == (400, 0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"backend": "memcached"},
            ValueError,
            "backend='memcached' must be one of 'redis', 'fakeredis'",
        ),
        (
            {"backend": "fakeredis", "writer_buffer_size": 0},
            ValueError,
            "writer_buffer_size=0 must be 1 or more",
        ),
        ({"backend": "fakeredis", "hosts": [{"host": "a"}]}, ValueError, "needs backend='redis'"),
        ({"backend": "fakeredis", "capacity": 3}, TypeError, "capacity"),
        (
            {"backend": "fakeredis", "dataset_name": 5},
            TypeError,
            "dataset_name=5 is a int; it must be a str",
        ),
        ({"backend": "fakeredis", "dataset_name": b"a"}, TypeError, "dataset_name=b'a' is a bytes"),
    ],
)
def test_wrong_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        CacheLoader(**options)


def test_without_a_program_there_are_three_ways_out(monkeypatch):
    from bagua_ref.contrib.utils import redis_store

    redis_store.shutdown_redis_server()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        BackendUnavailableError,
        match=r"(?s)redis-server nor valkey-server.*install.*hosts=.*backend='fakeredis'",
    ):
        CacheLoader()


def test_without_fakeredis_the_error_names_the_package(monkeypatch):
    from bagua_ref.contrib.utils.redis_store import FakeRedisStore

    FakeRedisStore().shutdown()
    monkeypatch.setitem(__import__("sys").modules, "fakeredis", None)
    with pytest.raises(BackendUnavailableError, match="pip install fakeredis"):
        CacheLoader("fakeredis")


def test_counts_read_well():
    assert repr(CacheStats(3, 1, 2, 2_500_000, 999)) == (
        "CacheStats(hits=3, misses=1 (75.0% hits), errors=2, read 2.5 MB, written 999 B)"
    )
    assert CacheStats(0, 0, 0, 0, 0).hit_rate == 0
    assert "read 3.0 TB" in repr(CacheStats(0, 0, 0, 3 * 10**12, 0))


def test_counters_outlive_more_processes_than_there_are_rows(monkeypatch):
    shared = Counters()
    monkeypatch.setattr(guard, "_is_alive", lambda pid: False)
    for pid in range(1000, 1000 + 3 * 256):
        monkeypatch.setattr(guard, "os", SimpleNamespace(getpid=lambda pid=pid: pid))
        shared.add(hits=1, bytes_read=10)
        shared.add(errors=2)
    assert shared.total() == CacheStats(
        hits=768, misses=0, errors=1536, bytes_read=7680, bytes_written=0
    )
