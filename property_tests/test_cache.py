"""Properties of the cache against a dict, while servers are killed and restarted (S8.1 to S8.3)."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.cache_servers import Server, eventually, every_backend, need
from tests.cache_values import same

from bagua_ref.contrib import CachedDataset, CacheLoader
from bagua_ref.contrib.cache import guard
from bagua_ref.contrib.cache.fake_server import start_fake_server

keys = st.integers(0, 11)
sizes = st.integers(1, 7)


class FakeServerProcess:
    """A fakeredis server that, like `Server`, can be killed and started again on its port,
    empty.
    """

    def __init__(self) -> None:
        self.server = start_fake_server("127.0.0.1", 1)
        self.host = self.server.address

    def kill(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server = start_fake_server("127.0.0.1", 1, self.host["port"])
        self.server._listener.password = self.host["password"].encode()


class CacheMachine(RuleBasedStateMachine):
    """Two servers and a loader, with a dict for the expected content of each server.

    Without failures the model is exact about waiting keys, stored keys and hits. A killed server is
    empty afterwards; whether a write reached it in the meantime is then looked up.
    """

    make_server: type = FakeServerProcess
    pool: list = []

    @initialize(size=sizes, name=st.sampled_from(["", "data"]))
    def begin(self, size, name):
        for server in self.pool:
            server.kill()
            server.start()
        self.servers, self.size, self.name = self.pool, size, name
        self.is_up = [True] * len(self.servers)
        self.loader = CacheLoader(
            hosts=[server.host for server in self.servers],
            dataset_name=name,
            writer_buffer_size=size,
        )
        self.stored: list[dict[int, int]] = [{} for _ in self.servers]
        self.waiting: dict[int, int] = {}
        self.made = 0
        self.asked = 0

    def shard(self, key):
        return xxhash.xxh64(f"{self.name}_{key}".encode(), seed=0).intdigest() % len(self.servers)

    def make(self, key):
        self.made += 1
        return {"key": torch.tensor(key), "made": self.made}

    def written(self):
        """Move waiting values to the servers to which the loader must have tried to write them."""
        for key, value in self.waiting.items():
            if self.is_up[self.shard(key)]:
                self.stored[self.shard(key)][key] = value
        self.waiting = {}

    def expected(self, key):
        return self.waiting.get(
            key, self.stored[self.shard(key)].get(key) if self.is_up[self.shard(key)] else None
        )

    def check(self, key, value, before):
        known = self.expected(key)
        assert same(value["key"], torch.tensor(key))
        if known is None:
            assert before < value["made"] <= self.made
            self.waiting[key] = value["made"]
        else:
            assert value["made"] == known
        value["key"].zero_()  # must not change the buffer or the cache
        self.asked += 1

    @rule(key=keys)
    def get(self, key):
        before = self.made
        self.check(key, self.loader.get(key, self.make), before)
        if len(self.waiting) >= self.size:
            self.written()

    @rule(batch=st.lists(keys, min_size=1, max_size=8))
    def get_batch(self, batch):
        before = self.made
        values = self.loader.get_many(batch, lambda keys: [self.make(key) for key in keys])
        missing = any(self.expected(key) is None for key in batch)
        for key, value in zip(batch, values, strict=True):
            self.check(key, value, before)
        if missing:
            self.written()

    @rule()
    def flush(self):
        self.loader.flush()
        self.written()

    @rule()
    def close(self):
        self.loader.close()
        self.written()

    @precondition(lambda self: all(self.is_up))
    @rule()
    def count(self):
        counted = self.loader.num_keys()
        self.written()
        assert counted == sum(map(len, self.stored))

    @rule(which=st.integers(0, 1))
    def kill(self, which):
        if self.is_up[which]:
            self.servers[which].kill()
            self.is_up[which], self.stored[which] = False, {}

    @rule(which=st.integers(0, 1))
    def restart(self, which):
        if not self.is_up[which]:
            self.servers[which].start()
            self.is_up[which] = True
            # The loader reconnects by itself after its pause.
            assert eventually(lambda: self.loader._guarded.stores[which]._reading.is_over())

    @rule(which=st.integers(0, 1))
    def replace(self, which):
        """Kill and start between two requests; the loader must cope with the closed connection."""
        if self.is_up[which]:
            self.servers[which].kill()
            self.servers[which].start()
            self.stored[which] = {}

    @rule(key=keys, damage=st.binary(max_size=40))
    def damage(self, key, damage):
        if self.is_up[self.shard(key)]:
            fresh = type(self.loader.store.stores[0])(**self.servers[self.shard(key)].host)
            fresh.set(f"{self.name}_{key}", damage)
            fresh.close()
            self.stored[self.shard(key)].pop(key, None)
            if key in self.waiting:
                return
            before = self.made
            self.check(key, self.loader.get(key, self.make), before)
            if len(self.waiting) >= self.size:
                self.written()

    @invariant()
    def counters_tell(self):
        if hasattr(self, "loader"):
            stats = self.loader.stats()
            assert stats.hits + stats.misses == self.asked
            assert len(self.loader._buffer._values) == len(self.waiting) < self.size

    def teardown(self):
        if hasattr(self, "loader"):
            # otherwise its collection writes the waiting values, during the next example
            self.loader.close()
        for server, up in zip(self.pool, getattr(self, "is_up", []), strict=False):
            if not up:
                server.start()


@every_backend
def test_S8_2_S8_3_the_cache_is_a_dict_that_may_forget(backend, monkeypatch):
    need(backend)
    monkeypatch.setattr(guard, "_FIRST_PAUSE", 0.0)  # examples in tests/ cover the pause
    monkeypatch.setattr(guard, "_LONG_PAUSE", 0.0)
    monkeypatch.setattr(guard, "_LONGEST_PAUSE", 0.0)
    make_server = FakeServerProcess if backend == "fakeredis" else Server
    machine = type("Machine", (CacheMachine,), {"pool": [make_server(), make_server()]})
    examples = (
        settings.default.max_examples
        if backend == "fakeredis"
        else settings.default.max_examples // 2
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_state_machine_as_test(
                machine, settings=settings(max_examples=examples, stateful_step_count=25)
            )
    finally:
        for server in machine.pool:
            server.kill()


@every_backend
@given(indices=st.lists(st.integers(0, 30), max_size=40), batch_size=st.integers(1, 9))
def test_S8_2_a_cached_dataset_returns_what_the_dataset_does(backend, indices, batch_size):
    need(backend)
    samples = [{"index": i, "pixels": torch.full((i % 4,), i)} for i in range(31)]
    dataset = CachedDataset(samples, backend, dataset_name=f"{os.getpid()} {time.monotonic_ns()}")
    for _ in range(2):
        for start in range(0, len(indices), batch_size):
            part = indices[start : start + batch_size]
            assert same(dataset.__getitems__(part), [samples[i] for i in part])
    stats = dataset.stats()
    assert stats.errors == 0
    assert stats.hits + stats.misses == 2 * len(indices)
    assert stats.hits >= len(indices)


def test_a_run_in_ci_without_a_server_is_red(monkeypatch):
    monkeypatch.setattr("tests.cache_servers.PROGRAM", None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="must run the cache's tests on a real server"):
        need("redis")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="redis-server"):
        need("redis")
    need("fakeredis")
