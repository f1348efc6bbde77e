"""Properties of the cache against a dict, on real servers that are killed and restarted (S8.1 to S8.3, S8.5)."""

from __future__ import annotations

import warnings

import torch
import xxhash
from hypothesis import settings
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

from bagua_ref.contrib import CacheLoader, cache_loader

keys = st.integers(0, 11)
sizes = st.integers(1, 7)


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
