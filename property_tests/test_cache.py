"""Properties of the cache against a dict, on real servers that are killed and restarted (S8.1 to S8.3, S8.5)."""

from __future__ import annotations

import multiprocessing
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
from tests.cache_servers import Server, servers
from tests.same import assert_same

from bagua_ref.contrib import CachedDataset, CacheLoader, cache_loader

keys = st.integers(0, 11)
sizes = st.integers(1, 7)
name_of_run = lambda: f"{os.getpid()} {time.monotonic_ns()}"  # noqa: E731


class CacheMachine(RuleBasedStateMachine):
    """Two servers and a loader, with a dict for the expected content of each server.

    The model is exact about waiting keys, stored keys and hits. A killed server is empty afterwards.
    """

    pool: list[Server]

    @initialize(size=sizes, name=st.sampled_from(["", "data"]))
    def begin(self, size, name):
        for server in self.pool:
            server.client().flushall()
        self.size, self.name = size, name
        self.is_up = [True] * len(self.pool)
        self.loader = CacheLoader(
            hosts=[server.host for server in self.pool], dataset_name=name, writer_buffer_size=size
        )
        self.stored: list[dict[int, int]] = [{} for _ in self.pool]
        self.waiting: dict[int, int] = {}
        self.made = 0
        self.asked = 0

    def shard(self, key):
        return xxhash.xxh64(f"{self.name}_{key}".encode(), seed=0).intdigest() % len(self.pool)

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
        return self.waiting.get(key, self.stored[self.shard(key)].get(key))

    def check(self, key, value, before):
        known = self.expected(key)
        assert_same(value["key"], torch.tensor(key))
        if known is None:
            assert before < value["made"] <= self.made
            self.waiting[key] = value["made"]
        else:
            assert value["made"] == known
        value["key"].zero_()  # must change neither the buffer nor the cache
        self.asked += 1

    @rule(key=keys)
    def get(self, key):
        before = self.made
        self.check(key, self.loader.get(key, self.make), before)
        if len(self.waiting) >= self.size:  # a batch is written when complete
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

    @rule(close=st.booleans())
    def flush(self, close):
        if close:
            self.loader.close()
        else:
            self.loader.flush()
        self.written()

    @precondition(lambda self: all(self.is_up))
    @rule()
    def count(self):
        in_servers = sum(server.client().dbsize() for server in self.pool)
        assert in_servers == sum(map(len, self.stored))
        counted = self.loader.num_keys()
        self.written()
        assert counted == sum(map(len, self.stored))

    @rule(which=st.integers(0, 1))
    def kill_or_restart(self, which):
        if self.is_up[which]:
            self.pool[which].kill()
            self.stored[which] = {}
        else:
            self.pool[which].start()
        self.is_up[which] = not self.is_up[which]

    @rule(which=st.integers(0, 1))
    def replace(self, which):
        """Kill and start between two requests; the loader must cope with the closed connection."""
        if self.is_up[which]:
            self.pool[which].kill()
            self.pool[which].start()
            self.stored[which] = {}

    @rule(key=keys, damage=st.binary(max_size=40))
    def damage(self, key, damage):
        which = self.shard(key)
        if self.is_up[which] and key not in self.waiting:
            self.pool[which].client().set(f"{self.name}_{key}", damage)
            self.stored[which].pop(key, None)
            self.get(key)
            self.flush(close=False)  # until then, the server counts a key of which nobody knows

    @invariant()
    def counters_tell(self):
        if hasattr(self, "loader"):
            stats = self.loader.stats()
            assert stats.hits + stats.misses == self.asked

    def teardown(self):
        if hasattr(self, "loader"):
            # otherwise its collection writes the waiting values, during the next example
            self.loader.close()
            for server, up in zip(self.pool, self.is_up, strict=True):
                if not up:
                    server.start()


def test_S8_2_S8_3_the_cache_is_a_dict_that_may_forget(monkeypatch):
    for pause in ("_FIRST_PAUSE", "_LONG_PAUSE", "_LONGEST_PAUSE"):  # which tests/ cover
        monkeypatch.setattr(cache_loader, pause, 0.0)
    with servers(2) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        machine = type("Machine", (CacheMachine,), {"pool": pool})
        examples = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=25)
        run_state_machine_as_test(machine, settings=examples)


@pytest.fixture(scope="module")
def server():
    with servers(1) as (one,):
        yield one


@given(indices=st.lists(st.integers(0, 30), max_size=40), batch_size=st.integers(1, 9))
def test_S8_2_a_cached_dataset_returns_what_the_dataset_does(server, indices, batch_size):
    samples = [{"index": i, "pixels": torch.full((i % 4,), i)} for i in range(31)]
    dataset = CachedDataset(samples, hosts=[server.host], dataset_name=name_of_run())
    for _ in range(2):
        for start in range(0, len(indices), batch_size):
            part = indices[start : start + batch_size]
            assert_same(dataset.__getitems__(part), [samples[i] for i in part])
    stats = dataset.stats()
    assert stats.errors == 0
    assert stats.hits + stats.misses == 2 * len(indices)
    assert stats.hits >= len(indices)


@given(made=st.lists(keys, min_size=1, max_size=6, unique=True), reads=st.lists(keys, max_size=20))
def test_S8_2_a_value_that_waits_to_be_written_survives_being_read(server, made, reads):
    loader = CacheLoader(hosts=[server.host], dataset_name=name_of_run(), writer_buffer_size=100)
    server.client().flushall()
    for key in made:
        loader.get(key, str)
    for key in reads:
        if key in made:
            assert loader.get(key, None) == loader.get_many([key, key], None)[1] == str(key)
    assert server.client().dbsize() == 0
    loader.flush()
    assert sorted(server.client().keys("*")) == sorted(loader._stored_name(key) for key in made)


@given(refused=st.lists(keys, min_size=1, max_size=6, unique=True))
def test_S8_3_refused_writes_count_as_errors(server, refused):
    server.client().config_set("maxmemory-policy", "noeviction")
    server.client().config_set("maxmemory", 1)
    try:
        loader = CacheLoader(hosts=[server.host], dataset_name=name_of_run())
        with pytest.warns(UserWarning, match="refuses: OutOfMemoryError"):
            assert [loader.get(key, str) for key in refused] == list(map(str, refused))
        assert loader.get_many(refused, lambda keys: keys) == refused  # nothing has been kept
        stats = loader.stats()
        assert 1 <= stats.errors <= 2 * len(refused)  # there are pauses
        assert (stats.misses, stats.bytes_written) == (2 * len(refused), 0)
    finally:
        server.client().config_set("maxmemory", 0)


class Key:
    """An object that needs pickle, and may be a key of a dict."""

    def __eq__(self, other):
        return isinstance(other, Key)

    def __hash__(self):
        return 1


@given(before=st.dictionaries(st.integers(), st.text()), depth=st.integers(0, 3))
def test_S8_5_objects_as_keys_of_dicts_are_pickled_only_with_permission(server, before, depth):
    value = {**before, Key(): 1}
    for _ in range(depth):
        value = {(1, "a"): [value]}
    careful, trusting = (
        CacheLoader(hosts=[server.host], dataset_name=name_of_run(), allow_pickle=allowed)
        for allowed in (False, True)
    )
    with pytest.raises(TypeError, match="Key cannot be cached without pickle"):
        careful.get("a", lambda key: value)
    assert trusting.get("a", lambda key: value) == trusting.get("a", None) == value
    assert careful.stats().bytes_written == 0


@given(parents=st.sets(keys, max_size=5), childs=st.sets(keys, max_size=5))
def test_S8_2_a_fork_does_not_write_its_parents_values(server, parents, childs):
    server.client().flushall()
    loader = CacheLoader(hosts=[server.host], dataset_name="x", writer_buffer_size=100)
    for key in parents:
        loader.get(key, lambda key: "the parent's")

    def child() -> None:
        for key in childs:
            loader.get(key, lambda key: "the child's")

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert set(server.client().keys("*")) == {f"x_{key}".encode() for key in childs}
    loader.flush()
    assert set(server.client().keys("*")) == {f"x_{key}".encode() for key in childs | parents}
    wanted = {key: "the parent's" if key in parents else "the child's" for key in childs | parents}
    assert {key: loader.get(key, None) for key in wanted} == wanted
