"""Faults of the cache's servers, each run for real during an epoch."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.cache_jobs import Plain, epoch
from tests.cache_servers import free_port, processes, servers
from tests.odd_servers import Talk, odd_server, redis_like
from torch.utils.data import DataLoader

from bagua_ref.contrib import CachedDataset
from bagua_ref.contrib.cache import codec
from bagua_ref.contrib.utils.redis_store import RedisStore, shutdown_redis_server

SAMPLES, BATCH = 64, 8


@dataclass(frozen=True)
class FaultReport:
    """What an epoch with a fault was like, in plain words, and how long it took."""

    survived: bool
    outcome: str
    seconds: float


FAULTS: dict[str, Callable[[], FaultReport]] = {}
SLOW: set[str] = set()
"""Those that take 2 s and more."""


def fault(
    name: str, slow: bool = False
) -> Callable[[Callable[[], FaultReport]], Callable[[], FaultReport]]:
    def register(run: Callable[[], FaultReport]) -> Callable[[], FaultReport]:
        FAULTS[name] = run
        if slow:
            SLOW.add(name)
        return run

    return register


def train(
    host: dict[str, Any] | None,
    harm: Callable[[], object] | None = None,
    workers: int = 0,
    **options: Any,
) -> FaultReport:
    """Run an epoch whose samples are checked; with ``harm``, the second epoch, and call it after a
    quarter of the batches.
    """
    options.update(hosts=[host] if host else None)
    dataset = CachedDataset(Plain(SAMPLES), **options)
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    if harm is not None:
        epoch(loader)
    before, started = dataset.stats(), time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            complete = epoch(harmed(loader, harm)) == list(range(SAMPLES))
            ended = "" if complete else "samples are missing"
        except AssertionError:
            ended = "samples are wrong"
        except Exception as error:
            ended = f"the epoch ends with {type(error).__name__}: {error}"
        finally:
            seconds = time.monotonic() - started
            dataset.close()
    now = dataset.stats()
    outcome = (
        ended
        or f"training goes on: {now.hits - before.hits} samples from the cache, {now.misses - before.misses} made again"
    )
    reasons = [
        re.sub(r"(127.0.0.1):\d+", r"\1", str(warning.message))
        for warning in said
        if "cache" in str(warning.message)
    ]
    return FaultReport(
        not ended,
        "; ".join([outcome, *(f'warns "{reason}"' for reason in dict.fromkeys(reasons))]),
        seconds,
    )


def harmed(loader: DataLoader, harm: Callable[[], object] | None) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        if harm is not None and number == SAMPLES // BATCH // 4:
            harm()
        yield batch


def odd(talk: Talk, **options: Any) -> FaultReport:
    with odd_server(talk) as host:
        return train(host, **options)


def with_values(change: Callable[[bytes], bytes]) -> FaultReport:
    """Change all values while training reads them."""
    with servers(1) as (server,):
        client = server.client()
        return train(
            server.host,
            lambda: [client.set(key, change(client.get(key))) for key in client.keys("*")],
        )


@fault("redis: kill -9 between two batches")
def killed() -> FaultReport:
    with servers(1) as (server,):
        return train(server.host, server.kill)


@fault("redis: kill -9, with two DataLoader workers", slow=True)
def killed_under_workers() -> FaultReport:
    with servers(1) as (server,):
        return train(server.host, server.kill, workers=2)


@fault("redis: kill -9 of the job's own server", slow=True)
def own_server_killed() -> FaultReport:
    shutdown_redis_server()

    def kill() -> None:
        port = RedisStore().stores[0]._options["port"]
        for pid in processes(f"-server 127.0.0.1:{port}"):
            os.kill(pid, signal.SIGKILL)

    try:
        return train(None, kill)
    finally:
        shutdown_redis_server()


def stopped_for(seconds: float) -> FaultReport:
    with servers(1) as (server,):
        timer = threading.Timer(seconds, server.resume)

        def stop() -> None:
            server.pause()
            timer.start()

        report = train(server.host, stop)
        timer.cancel()
        server.resume()
        return report


@fault("redis: SIGSTOP for 1 s")
def stopped_shortly() -> FaultReport:
    return stopped_for(1.0)


@fault("redis: SIGSTOP for ever", slow=True)
def stopped() -> FaultReport:
    return stopped_for(600.0)


@fault("redis: restarted empty")
def restarted() -> FaultReport:
    with servers(1) as (server,):
        return train(server.host, lambda: (server.kill(), server.start()))


@fault("redis: full, evicts nothing")
def full() -> FaultReport:
    with servers(1, "maxmemory 1", "maxmemory-policy noeviction") as (server,):
        return train(server.host)


@fault("redis: full while training reads")
def filled() -> FaultReport:
    with servers(1, "maxmemory-policy noeviction") as (server,):
        client = server.client()
        return train(
            server.host,
            lambda: (client.delete(*client.keys("*")[::2]), client.config_set("maxmemory", 1)),
        )


@fault("redis: wrong password")
def wrong_password() -> FaultReport:
    with servers(1) as (server,):
        return train({**server.host, "password": "wrong"})


@fault("redis: a password from now on")
def new_password() -> FaultReport:
    with servers(1) as (server,):
        server.client().config_set("requirepass", "")

        def require() -> None:
            server.client().config_set("requirepass", server.password)
            server.client().client_kill_filter(_type="normal", skipme=True)

        return train({"host": "127.0.0.1", "port": server.port}, require)


@fault("redis: a user who may not read")
def no_permission() -> FaultReport:
    with servers(1, "user trainer on >pass ~* +@all -mget") as (server,):
        return train(
            {"host": "127.0.0.1", "port": server.port, "username": "trainer", "password": "pass"}
        )


@fault("redis: no more clients allowed")
def too_many_clients() -> FaultReport:
    with servers(1, "maxclients 1") as (server,):
        kept = server.client()
        kept.ping()
        return train(server.host)


@fault("redis: a list where a value should be")
def other_type() -> FaultReport:
    with servers(1) as (server,):
        client = server.client()
        return train(
            server.host,
            lambda: [
                (client.delete(key), client.rpush(key, "element")) for key in client.keys("*")
            ],
        )


@fault("no server at the address")
def nobody() -> FaultReport:
    return train({"host": "127.0.0.1", "port": free_port()})


@fault("a host name that is unknown", slow=True)
def unknown_host() -> FaultReport:
    return train({"host": "no-such-host.invalid", "port": 6379})


@fault("values cut short")
def cut() -> FaultReport:
    return with_values(lambda value: value[:-1])


@fault("values with a bit flipped")
def flipped() -> FaultReport:
    return with_values(lambda value: value[:-1] + bytes([value[-1] ^ 1]))


@fault("values of someone else")
def foreign_values() -> FaultReport:
    return with_values(lambda value: pickle.dumps("someone else's value"))


class Attack:
    ran = False

    def __reduce__(self):
        return setattr, (Attack, "ran", True)


def forged(entry: bytes) -> bytes:
    """Return a value with the right length and checksum, as an attacker writes it."""
    return (
        codec._FRAME.pack(codec.VERSION, len(entry) + 16, codec.xxhash.xxh3_64_intdigest(entry))
        + entry
    )


@fault("values of an attacker: a pickle that runs code")
def pickles() -> FaultReport:
    report = with_values(lambda value: codec.encode(Attack(), allow_pickle=True))
    outcome = f"its code {'RAN' if Attack.ran else 'does not run'}; {report.outcome}"
    return FaultReport(report.survived and not Attack.ran, outcome, report.seconds)


@fault("values of an attacker: a billion elements in 30 bytes")
def amplified() -> FaultReport:
    return with_values(lambda value: forged(b"a\0\2\1f4" + (2**30).to_bytes(8, "little")))


@fault("values of an attacker: nested 10,000 deep")
def nested() -> FaultReport:
    return with_values(lambda value: forged(b"[\1\0\0\0" * 10_000 + b"N"))


def http(connection: Any) -> None:
    connection.recv(4096)
    connection.sendall(
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )


def endless(beginning: bytes, more: bytes) -> Talk:
    def talk(connection: Any) -> None:
        connection.recv(4096)
        connection.sendall(beginning)
        while True:
            connection.sendall(more)

    return talk


def silent(connection: Any) -> None:
    while connection.recv(4096):
        pass


FOREIGN = {
    "a web server": http,
    "an SSH server": lambda connection: (
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n") or connection.recv(1)
    ),
    "closes every connection": lambda connection: connection.close(),
    "random bytes": endless(b"", bytes(range(128, 256)) * 500),
    "a list without an end": endless(b"*999999999\r\n", 10_000 * b"$-1\r\n"),
    "a line without an end": endless(b"+", b"a" * 9000),
}
for name, talk in FOREIGN.items():
    fault(f"foreign server: {name}")(lambda talk=talk: odd(talk))
fault("foreign server: says nothing", slow=True)(lambda: odd(silent))

WRONG_SHAPES = {
    "too few values": b"*1\r\n$-1\r\n",
    "too many values": b"*9\r\n" + 9 * b"$-1\r\n",
    "no values": b"*0\r\n",
    "no list": b"*-1\r\n",
    "nil": b"$-1\r\n",
    "an integer": b":4\r\n",
    "a status": b"+OK\r\n",
    "one value": b"$2\r\nab\r\n",
    "integers": b"*8\r\n" + 8 * b":1\r\n",
    "an error among the values": b"*8\r\n-ERR no\r\n" + 7 * b"$-1\r\n",
    "lists": b"*8\r\n" + 8 * b"*1\r\n$1\r\na\r\n",
    "a list in a list, 5000 deep": b"*1\r\n" * 5000,
    "lists of billions": b"*4294967295\r\n" * 8,
    "a number that is none": b"*four\r\n",
    "a value without its end": b"*8\r\n$1\r\nabc" + 8 * b"$-1\r\n",
    "a value of negative length": b"*8\r\n$-7\r\n",
    "a value longer than Redis has": b"*8\r\n$536870913\r\n",
    "a map": b"%1\r\n+a\r\n+b\r\n",
}
for name, answer in WRONG_SHAPES.items():
    fault(f"answer of the wrong shape: {name}")(
        lambda answer=answer: odd(redis_like({b"MGET": answer}))
    )

DRIPS = {
    b"MGET": b"*8\r\n" + 8 * b"$-1\r\n",
    b"MSET": b"+OK but not at once\r\n",
    b"CLIENT": b"-ERR unknown command\r\n",
}
"""Answers of a server that sends a byte a second, by command; CLIENT is the first after
connecting.
"""
for command, answer in DRIPS.items():
    drip = redis_like({command: answer}, pause=1.0)
    fault(f"a byte a second: to {command.decode()}", slow=True)(lambda drip=drip: odd(drip))
fault("a byte a second: to everything", slow=True)(
    lambda: odd(redis_like({**DRIPS, b"PING": b"+PONG\r\n"}, pause=1.0))
)
