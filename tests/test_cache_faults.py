"""Tests of servers that fail or answer oddly: training goes on from the dataset, within the time
limit (S8.3).
"""

from __future__ import annotations

import socket
import time
import warnings

import pytest
import redis
from tests.cache_faults import DRIPS, FAULTS, FOREIGN, SLOW, endless, http, silent
from tests.cache_jobs import Plain, epoch
from tests.odd_servers import odd_server, redis_like
from torch.utils.data import DataLoader

from bagua_ref.contrib import CachedDataset
from bagua_ref.contrib.cache.protocol import CommandPacker, Limit
from bagua_ref.contrib.cache.server import _answers
from bagua_ref.contrib.utils.redis_store import RedisStore
from bagua_ref.contrib.utils.store import StoreError

WITHOUT_REDIS = ("no server", "foreign server", "answer of the wrong shape")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.startswith(WITHOUT_REDIS) else pytest.mark.redis)
        for name in FAULTS
        if name not in SLOW
    ],
)
def test_training_survives(name):
    report = FAULTS[name]()
    assert report.survived, report.outcome
    assert report.seconds < 4  # less than the timeout
    if name.startswith(WITHOUT_REDIS):
        assert (
            '64 made again; warns "cache unavailable; continuing without it: redis at'
            in report.outcome
        )


@pytest.mark.parametrize(
    ("command", "ask"),
    [
        ("MGET", lambda store: store.get("a")),
        ("MSET", lambda store: store.set("a", b"1")),
        ("EXISTS", lambda store: store.contains(["a", "b"])),
        ("DBSIZE", lambda store: store.num_keys()),
        ("FLUSHDB", lambda store: store.clear()),
    ],
)
@pytest.mark.parametrize(
    "answer",
    [
        b"$-1\r\n",
        b"*1\r\n$1\r\nx\r\n*0\r\n",
        b"+QUEUED\r\n",
        b"$2\r\n12\r\n",
        b"*2\r\n:1\r\n+x\r\n",
    ],
)
def test_every_request_checks_its_answer(command, ask, answer):
    with odd_server(redis_like({command.encode(): answer})) as host:
        store = RedisStore(hosts=[host], timeout=1)
        if command == "MGET" and answer.startswith(b"*1"):
            assert ask(store) == b"x"
        else:
            with pytest.raises(
                StoreError,
                match=(
                    rf"redis at .* fails: (it answers {command} with|InvalidResponse: a list of) "
                ),
            ):
                ask(store)
        assert store.status()
        store.close()


def test_a_server_that_answers_ping_with_something_else_has_no_status():
    with odd_server(redis_like({b"PING": b":1\r\n"})) as host:
        assert not RedisStore(hosts=[host]).status()


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_server_is_named_and_has_no_status(name):
    with odd_server(FOREIGN[name]) as host:
        store = RedisStore(hosts=[host])
        assert not store.status()
        with pytest.raises(
            StoreError,
            match=(
                r"closed the connection|reset by peer|is this a Redis|longer than the \d that were"
                r" asked for"
            ),
        ):
            store.get("a")


def test_a_server_that_says_nothing_takes_the_timeout():
    with odd_server(silent) as host:
        started = time.monotonic()
        store = RedisStore(hosts=[host], timeout=0.5)  # asks what the server is
        assert time.monotonic() - started < 1
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"Timeout reading .* \(timeout=0.5\)"):
            store.get("a")
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("commands", [*([name] for name in DRIPS), list(DRIPS)], ids=str)
def test_a_byte_now_and_then_keeps_no_limit_alive(commands):
    odd = {name: DRIPS[name] for name in commands}
    with odd_server(redis_like(odd, pause=0.2)) as host:
        dataset = CachedDataset(Plain(40), hosts=[host], timeout=0.5)
        started = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert epoch(DataLoader(dataset, batch_size=4)) == list(range(40))
        assert time.monotonic() - started < 2
        assert dataset.stats().errors >= 1


def test_a_server_that_stops_reading_is_given_up():
    def talk(connection: socket.socket) -> None:
        while b"MSET" not in connection.recv(50_000):
            connection.sendall(b"+OK\r\n")
        time.sleep(1)

    with odd_server(talk) as host:
        store, started = RedisStore(hosts=[host], timeout=0.4), time.monotonic()
        with pytest.raises(StoreError, match="TimeoutError: Timeout writing"):
            store.mset({str(i): bytes(200_000) for i in range(100)})
        assert time.monotonic() - started < 2


def test_a_server_that_reads_too_slowly_is_given_up():
    pieces, sent = CommandPacker(Limit(0.3)).pack("MSET", *(50 * ["key", bytes(2**17)])), []
    with pytest.raises(redis.TimeoutError, match="not complete"):
        sent.extend(time.sleep(0.3) for _ in pieces)  # 0.4 MiB a second
    assert len(sent) <= 4


def test_an_answer_that_keeps_coming_for_ever_is_given_up():
    talk = redis_like(
        {b"MGET": b"*1\r\n$90000000\r\n" + bytes(30_000_000)}, pause=0.01, size=100_000
    )
    with odd_server(talk) as host:
        store, started = RedisStore(hosts=[host], timeout=0.1), time.monotonic()
        with pytest.raises(StoreError, match=r"TimeoutError: .* \(timeout=0.1\)"):
            store.get("a")
        assert 0.9 < time.monotonic() - started < 2


def test_a_large_value_may_take_longer_than_the_timeout_if_it_keeps_coming():
    value = bytes(2_000_000)
    answer = b"*1\r\n$%d\r\n%b\r\n" % (len(value), value)
    with odd_server(redis_like({b"MGET": answer}, pause=0.02, size=50_000)) as host:
        started = time.monotonic()
        assert RedisStore(hosts=[host], timeout=0.3).get("a") == value
        assert time.monotonic() - started > 0.6


@pytest.mark.parametrize(
    "talk",
    [endless(b"", b"a" * 9000), endless(b"+OK\r\n", b"+PONG "), http],
    ids=["noise", "almost", "HTTP"],
)
def test_what_listens_on_the_port_of_a_job_s_own_server_is_told_apart(talk):
    with odd_server(talk) as host:
        started = time.monotonic()
        assert not _answers(host["host"], host["port"], "password")
        assert time.monotonic() - started < 1
