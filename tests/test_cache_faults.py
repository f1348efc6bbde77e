"""Tests of servers that fail or answer oddly: training goes on from the dataset, within the time limit (S8.3)."""

from __future__ import annotations

import socket
import time
import warnings

import pytest
from tests.cache_jobs import Plain, epoch
from tests.odd_servers import odd_server, redis_like
from torch.utils.data import DataLoader

from bagua_ref.contrib import CachedDataset, CacheLoader
from bagua_ref.contrib.utils.redis_store import RedisStore
from bagua_ref.contrib.utils.store import StoreError

WRONG_SHAPES = {
    "too few values": b"*1\r\n$-1\r\n",
    "too many values": b"*9\r\n" + 9 * b"$-1\r\n",
    "no values": b"*0\r\n",
    "no list": b"*-1\r\n",
    "nil": b"$-1\r\n",
    "an integer": b":4\r\n",
    "a status": b"+OK\r\n",
    "one value": b"$2\r\nab\r\n",
    "integers": b"*4\r\n:1\r\n:2\r\n:3\r\n:4\r\n",
    "an error among the values": b"*4\r\n$-1\r\n-ERR no\r\n$-1\r\n$-1\r\n",
    "lists": b"*4\r\n" + 4 * b"*1\r\n$1\r\na\r\n",
    "a list within lists": b"*1\r\n" * 5000,
    "a list of billions": b"*4294967295\r\n" * 8,
    "a number that is none": b"*four\r\n",
    "a value without its end": b"*4\r\n$1\r\nabc" + 4 * b"$-1\r\n",
    "a value of a negative length": b"*4\r\n$-7\r\n",
    "a value longer than Redis has": b"*4\r\n$536870913\r\n",
    "a new protocol's map": b"%1\r\n+a\r\n+b\r\n",
}


@pytest.mark.parametrize("answer", WRONG_SHAPES.values(), ids=WRONG_SHAPES)
def test_answers_of_the_wrong_shape_are_misses(answer):
    with odd_server(redis_like({b"MGET": answer})) as host:
        dataset = CachedDataset(Plain(12), hosts=[host], timeout=1)
        with pytest.warns(UserWarning, match=r"cache unavailable; continuing without it: redis at .* fails: ") as caught:
            assert epoch(DataLoader(dataset, batch_size=4)) == list(range(12))
        assert len(caught) == 1
        assert dataset.stats().errors >= 1
        assert dataset.stats().misses == 12


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
@pytest.mark.parametrize("answer", [b"$-1\r\n", b"*1\r\n$1\r\nx\r\n*0\r\n", b"+QUEUED\r\n", b"$2\r\n12\r\n", b"*2\r\n:1\r\n+x\r\n"])
def test_every_request_checks_its_answer(command, ask, answer):
    with odd_server(redis_like({command.encode(): answer})) as host:
        store = RedisStore(hosts=[host], timeout=1)
        if command == "MGET" and answer.startswith(b"*1"):
            assert ask(store) == b"x"
        else:
            with pytest.raises(StoreError, match=rf"redis at 127.0.0.1:\d+ fails: it answers {command} with "):
                ask(store)
        assert store.status()
        store.close()


def test_a_server_that_answers_ping_with_something_else_has_no_status():
    with odd_server(redis_like({b"PING": b":1\r\n"})) as host:
        assert not RedisStore(hosts=[host]).status()


def http(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def endless(beginning: bytes, more: bytes):
    def talk(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(beginning)
        while True:
            connection.sendall(more)

    return talk


FOREIGN = {
    "HTTP": (http, "is this a Redis"),
    "SSH": (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n") or connection.recv(1), "is this a Redis"),
    "TLS": (lambda connection: connection.recv(4096) and connection.sendall(b"\x15\x03\x01\0\2\2\x46"), "fails"),
    "closes": (lambda connection: connection.close(), "ConnectionError"),
    "garbage": (endless(b"", bytes(range(128, 256)) * 500), "is this a Redis|Connection has data"),
    "an endless status": (endless(b"+", b"a" * 9000), "is this a Redis"),
    "an endless number": (endless(b":", b"1" * 9000), "is this a Redis"),
    "silent": (lambda connection: connection.recv(1) and time.sleep(1.5), r"Timeout reading .* \(timeout=0.5\)"),
}


@pytest.mark.parametrize(("talk", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_server_is_named_and_does_without(talk, message):
    with odd_server(talk) as host:
        loader = CacheLoader(hosts=[host], timeout=0.5)
        started = time.monotonic()
        with pytest.warns(UserWarning, match=f"cache unavailable; continuing without it: redis at .*{message}"):
            assert loader.get_many([1, 2], lambda keys: keys) == [1, 2]
        assert time.monotonic() - started < 1.2
        assert not loader.store.status()


SLOW = {
    "MGET": b"*4\r\n" + 4 * b"$-1\r\n",
    "MSET": b"+OK but not at once\r\n",
    "AUTH": b"+OK\r\n",
    "CLIENT": b"-ERR unknown command\r\n",
    "PING": b"+PONG\r\n",
}


@pytest.mark.parametrize("commands", [*([name] for name in SLOW), list(SLOW)], ids=str)
def test_a_byte_now_and_then_keeps_no_limit_alive(commands):
    odd = {name.encode(): SLOW[name] for name in commands}
    with odd_server(redis_like(odd, pause=0.2)) as host:
        dataset = CachedDataset(Plain(40), hosts=[{**host, "password": "secret"}], timeout=0.5)
        started = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert epoch(DataLoader(dataset, batch_size=4)) == list(range(40))
        assert time.monotonic() - started < 2
        if commands != ["PING"]:
            assert dataset.stats().errors >= 1


def test_a_server_that_reads_a_byte_now_and_then_is_given_up():
    def talk(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        while connection.recv(4096):
            time.sleep(0.05)

    with odd_server(talk) as host:
        store, started = RedisStore(hosts=[host], timeout=0.4), time.monotonic()
        with pytest.raises(StoreError, match="TimeoutError"):
            store.mset({str(i): bytes(200_000) for i in range(100)})
        assert time.monotonic() - started < 2


def test_an_answer_that_keeps_coming_for_ever_is_given_up():
    with odd_server(endless(b"*999999999\r\n", 10_000 * b"$-1\r\n")) as host:
        store, started = RedisStore(hosts=[host], timeout=0.1), time.monotonic()
        with pytest.raises(StoreError, match=r"the answer is not complete \(timeout=0.1\)"):
            store.get("a")
        assert 0.9 < time.monotonic() - started < 2


def test_a_large_value_may_take_longer_than_the_timeout_if_it_keeps_coming():
    value = bytes(2_000_000)
    answer = b"*1\r\n$%d\r\n%b\r\n" % (len(value), value)
    with odd_server(redis_like({b"MGET": answer}, pause=0.02, size=50_000)) as host:
        started = time.monotonic()
        assert RedisStore(hosts=[host], timeout=0.3).get("a") == value
        assert time.monotonic() - started > 0.6
