"""Repeated tests of the cache: a killed rank's server ends with it, and no worker loses values
(S8.2, S8.4).
"""

from __future__ import annotations

import random
import time

import pytest
from tests.cache_jobs import start_server_job
from tests.cache_servers import eventually, every_backend, need, processes, servers
from tests.test_cached_dataset import assert_each_sample_is_made_once, held_workers

pytestmark = [pytest.mark.slow, pytest.mark.redis]
TIMES = 10


def started_by(rank: int) -> set[int]:
    """Return the watchdogs of ``rank``; a server dies with its watchdog."""
    return set(processes("watchdog.py", f" {rank} "))


def test_a_rank_killed_at_any_moment_leaves_no_server():
    need()
    chance = random.Random(0)
    before = set(processes("-server 127.0.0.1:"))
    seen = 0
    for _ in range(TIMES):
        process, _ = start_server_job()
        moment = chance.uniform(0.0, 0.3)
        # Importing takes seconds; the moment that matters is just after the watchdog was started.
        assert eventually(lambda pid=process.pid: started_by(pid))
        time.sleep(moment)
        seen += len(set(processes("-server 127.0.0.1:")) - before)
        process.kill()
        process.join()
        assert eventually(lambda pid=process.pid: not started_by(pid))
        assert eventually(lambda: set(processes("-server 127.0.0.1:")) <= before)
    assert seen >= TIMES // 4, "most were killed before there was a server"


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_that_nobody_ends_never_lose_a_value(context):
    with servers(1) as (server,):
        for _ in range(TIMES // 4):
            server.client().flushall()
            held_workers(server, context, None)
            assert server.client().dbsize() == 30


@every_backend
@pytest.mark.parametrize("batch_size", [16, None])
def test_spawned_workers_make_each_sample_once(backend, batch_size):
    options = {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}
    assert_each_sample_is_made_once(backend, batch_size, options)
