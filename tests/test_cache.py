"""Tests of CacheLoader: keys, batches, permissions, and servers that fail, in this process and with real
servers (S8.1, S8.2, S8.3, S8.5).
"""

from __future__ import annotations

import enum
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest
import redis
import torch
from tests.cache_jobs import Plain, Sample, epoch
from tests.cache_servers import Server, eventually, foreign_server, free_port, servers
from tests.same import assert_same
from torch.utils.data import DataLoader

from bagua_ref.contrib import CachedDataset, CacheLoader, cache_loader
from bagua_ref.contrib.cache import codec
from bagua_ref.contrib.cache.codec import encode
from bagua_ref.contrib.cache_loader import CacheStats
from bagua_ref.contrib.utils.redis_store import FakeRedisStore
from bagua_ref.errors import BackendUnavailableError

pytestmark = pytest.mark.slow


class Maker:
    """A load_fn that records its keys."""

    def __init__(self, make=lambda key: f"value of {key}") -> None:
        self.make, self.asked = make, []

    def __call__(self, key):
        self.asked.append(key)
        return self.make(key)

    def many(self, keys):
        return [self(key) for key in keys]


@pytest.fixture
def server() -> Iterator[Server]:
    with servers(1) as (one,):
        yield one


def on(server: Server, **options) -> CacheLoader:
    return CacheLoader(hosts=[server.host], **options)


def fresh(**options) -> CacheLoader:
    FakeRedisStore().shutdown()
    return CacheLoader("fakeredis", **options)


class Level(enum.IntEnum):
    LOW = 3


class Recording:
    def __fspath__(self) -> str:
        return "a/b.wav"


class Pair(NamedTuple):
    left: int
    right: float


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
        (
            (np.int64(1), [np.str_("a"), Recording(), torch.tensor(2)], (Level.LOW,)),
            "(1, ['a', 'a/b.wav', 2], (3,))",
        ),
        (Pair(1, np.float64(2)), "(1, 2.0)"),
        (os.fsdecode(b"caf\xe9.wav"), "caf\udce9.wav"),
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


def test_S8_1_what_a_text_need_not_identify_is_no_key():
    loader = fresh()
    for key in (
        np.arange(2000),
        torch.tensor([1, 2]),
        {1},
        {"a": 1},
        object(),
        (1, [{2}]),
        np.longdouble("0.1"),
    ):
        with pytest.raises(TypeError, match="a key of a cache cannot be or have"):
            loader.get(key, str)
    assert loader.num_keys() == 0


def test_S8_1_names_with_separators_share_no_keys():
    made = [fresh().get("_", str)]
    for name, key in (("n_1", "1"), ("n", "1_1"), ("n%5F1", "1"), ("", "n_1_1")):
        made.append(
            CacheLoader("fakeredis", dataset_name=name).get(key, lambda key, name=name: name)
        )
    assert made == ["_", "n_1", "n", "n%5F1", ""]


def test_a_batch_is_read_and_made_in_order_with_repeats():
    loader = fresh(writer_buffer_size=100)
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


def test_a_batch_costs_each_server_one_request_to_read_and_one_to_write():
    with servers(3) as started:
        loader = CacheLoader(hosts=[server.host for server in started])
        for batch in range(2):
            for _ in range(2):
                loader.get_many([f"{batch} {i}" for i in range(40)], lambda keys: keys)
        assert [server.calls("mget") for server in started] == [4] * 3
        assert [server.calls("mset") for server in started] == [2] * 3
        assert [server.calls("get") + server.calls("set") for server in started] == [0] * 3


def test_a_loader_as_context_writes_at_its_end_and_a_forgotten_one_too():
    with fresh(writer_buffer_size=9) as loader:
        loader.get("a", str)
    assert loader.store.num_keys() == 1
    forgotten = CacheLoader("fakeredis", writer_buffer_size=9)
    forgotten.get("b", str)
    del forgotten
    assert loader.store.num_keys() == 2


def test_an_exception_of_load_fn_passes_on_and_nothing_is_cached():
    loader, make = fresh(), Maker(lambda key: 1 / key)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loader.get(0, make)
    assert (make.asked, loader.num_keys()) == ([0, 0], 0)


# Permissions


def test_objects_may_be_pickled_on_servers_of_this_job():
    loader = fresh()
    loader.get("a", lambda key: Sample(torch.ones(2), 3))
    assert_same(loader.get("a", Maker()), Sample(torch.ones(2), 3))
    with pytest.raises(TypeError, match="dict of its fields"):
        loader.get("b", lambda key: np.zeros(2, "i4,i4"))


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
    assert (make.asked, careful.stats().errors) == (["a"], 1)
    # replaced by a value that needs no pickle
    assert careful.get("a", make) == trusting.get("a", make) == "value of a"


class Attack:
    ran = False

    def __reduce__(self):
        return setattr, (Attack, "ran", True)


# Values that are damaged, or another key's

GOOD = encode(list(range(100)), False, b"d_0")
DAMAGE = {
    "truncated": GOOD[:-1],
    "changed": GOOD[:-1] + bytes([GOOD[-1] ^ 1]),
    "foreign": pickle.dumps({"some": "thing"}),
    "empty": b"",
    "another version": bytes([codec.VERSION + 1]) + GOOD[1:],
    "another key": encode("value of 1", False, b"d_1"),
    "a pickle": encode(Attack(), True, b"d_0"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_S8_3_damage_is_counted_warned_about_once_and_made_anew(damage):
    loader, make = fresh(dataset_name="d", allow_pickle=False), Maker()
    for _ in range(2):
        loader.store.set("d_0", damage)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert loader.get(0, make) == "value of 0"
        assert ["'d_0' is computed again" in str(one.message) for one in caught] == [True] * (
            len(make.asked) == 1
        )
        assert loader.get(0, make) == "value of 0"
    assert make.asked == [0, 0]
    assert not Attack.ran
    assert loader.stats() == CacheStats(
        2, 2, 2, loader.stats().bytes_read, loader.stats().bytes_written
    )


def test_a_value_that_is_too_large_is_returned_and_not_kept(monkeypatch):
    loader = fresh()
    monkeypatch.setattr(codec, "_LARGEST", 100)
    large = bytes(200)
    with pytest.warns(UserWarning, match="at most 100"):
        assert loader.get_many(
            ["a", "b", "b"], lambda keys: (large if key == "b" else key for key in keys)
        ) == ["a", large, large]
    assert (loader.num_keys(), loader.stats().errors) == (1, 1)


# Interruptions


class Alarm(Exception):  # noqa: N818
    """What a handler raises; no error of a server."""


INTERRUPTIONS = [
    KeyboardInterrupt,
    TimeoutError,
    redis.TimeoutError,
]


# Python reports what is raised in a finalizer, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("raised", INTERRUPTIONS, ids=lambda kind: kind.__module__ + kind.__name__)
def test_S8_3_an_interrupted_request_raises_what_the_handler_raised_and_mixes_up_no_values(
    server, raised
):
    """Real signals at any moment; a server that waits makes it likely between request and answer."""
    loader, plain = on(server), server.client()
    loader.get_many(range(20), lambda keys: keys)
    error = raised("now")

    def handler(_: int, frame: FrameType) -> None:
        names = {found.f_code.co_name for found, _ in traceback.walk_stack(frame)}
        if names & {"__del__", "can_read"}:
            # Python ignores what is raised in the first; redis-py connects again after the second.
            signal.setitimer(signal.ITIMER_REAL, 0.0003)
        else:
            raise error

    before = signal.signal(signal.SIGALRM, handler)
    interrupted = 0
    try:
        for attempt in range(40):
            if attempt % 4 == 0:
                plain.execute_command("CLIENT", "PAUSE", "30", "ALL")
            caught: BaseException | None = None
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003 * (1 + attempt % 13))
                for first in range(1, 15):
                    assert loader.get_many([first, first + 1], None) == [first, first + 1]
                    assert loader.contains([first, "none"]) == [True, False]
                time.sleep(1)
            except BaseException as found:
                caught = found
            assert caught in (error, None)
            interrupted += caught is error
            assert loader.get_many([3, 17, 5], None) == [3, 17, 5]
            assert loader.num_keys() == 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 30  # redis-py itself ignores exceptions in some places where it connects
    assert (loader.stats().errors, loader.stats().misses) == (0, 20)


def test_S8_3_a_failure_after_an_interruption_is_not_taken_for_it(server):
    loader = on(server)

    def handler(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        time.sleep(5)
    except Alarm:  # it is being handled while the server fails
        server.kill()
        with pytest.warns(UserWarning, match="cache unavailable"):
            assert loader.get("a", str) == "a"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_S8_2_a_signal_while_values_are_written_loses_no_answer(server):
    loader = on(server, writer_buffer_size=50)
    loader.get_many(range(10), lambda keys: [bytes(100_000)] * 10, flush=False)

    def handler(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    try:
        server.client().execute_command("CLIENT", "PAUSE", "100", "ALL")
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Alarm):
            loader.flush()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert loader.get_many(range(10), None) == [bytes(100_000)] * 10  # they still wait
    assert loader.num_keys() == 10
    assert loader.stats().errors == 0


# Servers that fail


def ask_often(loader: CacheLoader, make: Maker) -> None:
    for i in range(50):
        assert loader.get(i, make) == f"value of {i}"
    assert 1 <= loader.stats().errors < 20  # it does not ask the server each time
    assert eventually(
        lambda: loader.get(f"more {len(make.asked)}", make) and loader.stats().errors >= 3
    )


def get_for(seconds: float, loader: CacheLoader, make: Maker) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert loader.get("a", make) == "value of a"


def test_S8_3_without_its_server_load_fn_serves(server):
    loader, make = on(server, writer_buffer_size=4), Maker()
    loader.get("a", make)
    loader.flush()
    server.kill()
    with pytest.warns(
        UserWarning, match=r"cache unavailable; continuing without it: redis at 127.0.0.1:\d+ fails"
    ) as caught:
        ask_often(loader, make)
    assert len(caught) == 1
    assert make.asked[:51] == ["a", *range(50)]
    assert loader.num_keys() == 0
    loader.close()
    server.start()
    assert eventually(
        lambda: loader.get("b", make) and (loader.flush() or server.client().dbsize())
    )
    made = len(make.asked)
    assert loader.get("b", make) == "value of b"
    assert len(make.asked) == made


def test_S8_3_a_server_that_stops_answering_costs_its_timeout_once_in_a_while(server, monkeypatch):
    monkeypatch.setattr(cache_loader, "_TIMES_SPENT", 4)
    loader, make = on(server, timeout=0.5), Maker()
    loader.get("a", make)
    server.pause()
    with pytest.warns(UserWarning, match="Timeout") as caught:
        get_for(1, loader, make)
    assert len(caught) == 1
    assert len(make.asked) > 100  # far from a timeout for each sample
    assert loader.stats().errors == 1
    server.resume()
    assert eventually(lambda: loader.get("a", make) and loader.stats().hits)


def test_S8_3_a_full_server_that_refuses_is_still_read():
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


FOREIGN = {
    "a web server": lambda connection: (
        connection.recv(4096),
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    ),
    "closes every connection": lambda connection: connection.close(),
    "says nothing": lambda connection: [None for _ in iter(lambda: connection.recv(4096), b"")],
    "answers everything with OK": lambda connection: [
        connection.sendall(b"+OK\r\n") for _ in iter(lambda: connection.recv(4096), b"")
    ],
    "too few values": lambda connection: [
        connection.sendall(b"*1\r\n$-1\r\n") for _ in iter(lambda: connection.recv(4096), b"")
    ],
}


@pytest.mark.parametrize("talk", FOREIGN.values(), ids=FOREIGN)
def test_S8_3_training_survives_a_server_that_is_no_redis(talk):
    with foreign_server(talk) as host:
        dataset = CachedDataset(Plain(64), hosts=[host], timeout=0.3)
        with pytest.warns(UserWarning, match="cache unavailable") as caught:
            assert epoch(DataLoader(dataset, batch_size=8)) == list(range(64))
        assert len(caught) == 1
        assert (dataset.stats().misses, dataset.stats().hits) == (64, 0)
        assert not dataset.cache_loader.store.status()


def killed(server: Server) -> None:
    server.kill()


@pytest.mark.parametrize(
    ("harm", "reason", "workers"),
    [
        (killed, "ConnectionError", 0),
        (killed, "ConnectionError", 2),
        (lambda server: (server.kill(), server.start()), None, 0),
        (lambda server: server.client().config_set("maxmemory", 1), "OutOfMemoryError", 0),
        (
            lambda server: (
                server.client().config_set("requirepass", "new"),
                redis.Redis(port=server.port, password="new").client_kill_filter(
                    _type="normal", skipme=True
                ),
            ),
            "AuthenticationError",
            0,
        ),
    ],
    ids=["killed", "killed under workers", "restarted empty", "full", "new password"],
)
def test_S8_3_training_survives_an_outage_in_the_middle(harm, reason, workers):
    with (
        servers(1, "maxmemory-policy allkeys-random") as (server,),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        dataset = CachedDataset(Plain(64), hosts=[server.host])
        options = {"multiprocessing_context": "fork"} if workers else {}
        loader = DataLoader(dataset, batch_size=8, num_workers=workers, **options)
        assert epoch(loader) == list(range(64))
        batches = iter(loader)
        seen = [next(batches) for _ in range(2)]
        harm(server)
        assert epoch([*seen, *batches]) == list(range(64))
        assert epoch(loader) == list(range(64))
    said = [str(one.message) for one in caught if "cache" in str(one.message)]
    if not workers:  # whose own warnings go to standard error
        assert len(said) == (reason is not None)
        assert all(reason in text for text in said)


def test_S8_3_nobody_at_the_address_and_an_unknown_name_are_survived():
    for host in ({"host": "127.0.0.1", "port": free_port()}, {"host": "no-such-host.invalid"}):
        with pytest.warns(UserWarning, match="cache unavailable"):
            assert CacheLoader(hosts=[host]).get_many([1, 2], lambda keys: keys) == [1, 2]


# Processes and threads


def test_a_pickled_loader_reads_the_same_servers_and_counts_by_itself(server):
    loader, make = on(server, writer_buffer_size=5), Maker()
    loader.get("waiting", make)
    loader.get_many(["a"], make.many, flush=False)
    copy = pickle.loads(pickle.dumps(loader))
    copy.flush()
    assert server.client().dbsize() == 0  # a copy does not write what waits in the original
    loader.flush()
    assert copy.get("a", make) == "value of a"
    assert make.asked == ["waiting", "a"]
    assert copy.stats() == CacheStats(hits=1, bytes_read=copy.stats().bytes_read)
    assert loader.stats().hits == 0


def test_threads_share_a_loader(server):
    loader, wrong = on(server, writer_buffer_size=7), []

    def work():
        for i in range(100):
            found = loader.get(i % 40, lambda key: torch.full((3,), float(key))).tolist()
            if found != [i % 40] * 3:
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


# Arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"backend": "memcached"},
            ValueError,
            "backend='memcached' must be one of 'redis', 'fakeredis'",
        ),
        ({"writer_buffer_size": 0}, ValueError, "writer_buffer_size=0 must be 1 or more"),
        ({"hosts": [{"host": "a"}]}, ValueError, "needs backend='redis'"),
        ({"capacity": 3}, TypeError, "capacity"),
        ({"dataset_name": 5}, TypeError, "dataset_name=5 is a int; it must be a str"),
        ({"dataset_name": b"a"}, TypeError, "dataset_name=b'a' is a bytes"),
    ],
)
def test_wrong_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        CacheLoader(**{"backend": "fakeredis", **options})


def test_without_fakeredis_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fakeredis", None)
    with pytest.raises(BackendUnavailableError, match="pip install fakeredis"):
        CacheLoader("fakeredis")


def test_the_hit_rate_is_0_before_the_first_value():
    assert (CacheStats().hit_rate, CacheStats(hits=3, misses=1).hit_rate) == (0, 0.75)
