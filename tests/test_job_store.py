"""Tests of errors in finding the job's store and the other ranks, with real sockets and processes
(S1).
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import failing_ranks as faults
from tests.launch import launch, outcomes

import bagua_ref
from bagua_ref.communicators.job_store import job_store
from bagua_ref.communicators.rendezvous import rendezvous
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

pytestmark = pytest.mark.slow

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def init(
    monkeypatch: pytest.MonkeyPatch, rank: int, host: str, port: Any, timeout: float
) -> CommunicationError:
    """Return the error of ``init_process_group`` of one of two ranks; it must come in time and
    leave nothing behind.
    """
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))
    began = time.monotonic()
    with pytest.raises(CommunicationError) as raised:
        bagua_ref.init_process_group(timeout=timeout)
    assert time.monotonic() - began < timeout + 2
    assert not bagua_ref.is_initialized()
    assert not dist.is_initialized()
    return raised.value


@contextmanager
def other_program(reply: bytes | None) -> Iterator[int]:
    """Yield a port at which a program answers each connection with ``reply``; None: not at all."""
    connections = []

    def serve() -> None:
        while True:
            try:
                connections.append(server.accept()[0])
                if reply is not None:
                    connections[-1].recv(1)
                    connections[-1].sendall(reply)
            except OSError:
                if server.fileno() == -1:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    for connection in connections:
        connection.close()


def test_S1_nobody_listens_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = bagua_ref.env.find_free_network_port()
    threads = set(threading.enumerate())
    error = init(monkeypatch, 1, "127.0.0.1", port, 0.5)
    assert isinstance(error, CommunicationTimeoutError)
    expected = (
        "rank 1 timed out after 0.5 s connecting to the job's store, which rank 0 serves at"
        f" 127.0.0.1:{port} "
    )
    assert str(error).startswith(expected)
    assert "Connection refused" in str(error)
    time.sleep(0.3)
    assert set(threading.enumerate()) <= threads
    assert "MASTER_ADDR" in str(error)


def test_S1_the_store_of_torchrun_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    error = init(monkeypatch, 0, "127.0.0.1", bagua_ref.env.find_free_network_port(), 0.3)
    assert (
        "rank 0 timed out after 0.3 s connecting to the job's store, which torchrun serves at"
        " 127.0.0.1:" in str(error)
    )


@pytest.mark.parametrize(
    ("rank", "host"), [(0, "no-such-host.invalid"), (1, "no-such-host.invalid"), (1, "x" * 70)]
)
def test_S1_an_address_that_is_unknown(
    rank: int, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = init(monkeypatch, rank, host, bagua_ref.env.find_free_network_port(), 0.3)
    assert isinstance(error, CommunicationTimeoutError)
    assert f"rank {rank} timed out after 0.3 s connecting" in str(error)
    assert f"at {host}:" in str(error)


@pytest.mark.parametrize(
    "reply", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "HTTP"]
)
def test_S1_the_port_of_another_program(
    reply: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_program(reply) as port:
        error = init(monkeypatch, 1, "127.0.0.1", port, 0.5)
        assert re.match(
            rf"rank 1 (timed out after|tried for) 0\.5 s .*127\.0\.0\.1:{port}", str(error)
        )
        assert re.search("does not answer as a store|Ping failed", str(error))
        error = init(monkeypatch, 0, "127.0.0.1", port, 0.5)
        assert (
            f"rank 0 cannot listen at 127.0.0.1:{port}, as another program has the port; set"
            " MASTER_PORT" in str(error)
        )
        assert isinstance(error.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PORT", "seven", "PORT='seven'"),
        ("PORT", "65536", "PORT=65536"),
        ("PORT", "", "PORT is not"),
        ("ADDR", "", "ADDR is not"),
    ],
)
def test_S1_an_address_that_is_none(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, other in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value if name == f"MASTER_{variable}" else other)
    with pytest.raises(ValueError, match=f"MASTER_{message}"):
        bagua_ref.init_process_group(timeout=0.5)


def test_S1_ranks_wait_for_a_store_that_is_served_later(monkeypatch: pytest.MonkeyPatch) -> None:
    port = bagua_ref.env.find_free_network_port()
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    served: list[Any] = []
    late = threading.Timer(
        0.5,
        lambda: served.append(
            dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        ),
    )
    late.start()
    store, rank, world_size = job_store(None, -1, -1, 20.0)
    late.join()
    store.set("met", b"yes")
    assert (served[0].get("met"), rank, world_size) == (b"yes", 1, 2)
    assert store.timeout == timedelta(seconds=20)  # not what is left of it


def test_S1_the_store_ends_while_ranks_meet() -> None:
    store = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = store[0].port
    client = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    threading.Timer(0.3, store.clear).start()
    with pytest.raises(
        CommunicationError, match=rf"^rank 1 lost the store at 127\.0\.0\.1:{port} after 0\.\d s"
    ) as raised:
        rendezvous(client, 1, 2, None, 20.0)
    assert isinstance(raised.value.__cause__, RuntimeError)


def without_rank_2() -> str:
    faults.serve_the_store()
    rank = bagua_ref.get_rank()
    if rank == 2:
        return ""
    with pytest.raises(CommunicationTimeoutError) as raised:
        bagua_ref.init_process_group(timeout=1 if rank == 0 else 20)
    assert not dist.is_initialized()
    return str(raised.value)


def test_S1_all_ranks_learn_who_is_missing_when_rank_0_gives_up() -> None:
    for rank, message in enumerate(launch(without_rank_2, 3, init=False)[:2]):
        assert re.fullmatch(
            rf"rank {rank} timed out after [0123]\.\d s waiting for rank 2 of 3 in the store at"
            r" 127\.0\.0\.1:\d+",
            message,
        )


def die_once_rank_1_waits() -> None:
    store = dist.PrefixStore(
        "bagua_ref",
        dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False),
    )
    store.wait([f"{store.get('proposed').decode()}/answer1"])
    os.kill(os.getpid(), signal.SIGKILL)


def rank_0_is_killed() -> str:
    faults.serve_the_store()
    rank = bagua_ref.get_rank()
    if rank == 0:
        threading.Thread(target=die_once_rank_1_waits, daemon=True).start()
    elif rank == 2:
        return ""
    with pytest.raises(CommunicationError) as raised:
        bagua_ref.init_process_group(timeout=60)
    return str(raised.value)


def test_S1_a_rank_0_that_dies_in_init_process_group_ends_the_wait_of_the_others() -> None:
    began = time.monotonic()
    waiting = outcomes(rank_0_is_killed, 3, init=False)[1]
    assert time.monotonic() - began < 25
    assert waiting.traceback == ""
    assert "rank 1 lost the store at 127.0.0.1:" in waiting.result


def dies_after_meeting(place: str, name: str) -> str:
    """Rank 1 ends between the rendezvous and the connections, or in the barrier after them."""
    if bagua_ref.get_rank() == 1:
        setattr(importlib.import_module(place), name, lambda *_: os._exit(3))
    with pytest.raises(CommunicationError) as raised:
        bagua_ref.init_process_group(timeout=20)
    assert not dist.is_initialized()
    return str(raised.value)


@pytest.mark.parametrize(
    ("place", "name"),
    [("bagua_ref.groups.process_group", "_make_torch_group"), ("torch.distributed", "barrier")],
)
def test_S1_a_rank_that_dies_while_ranks_connect(place: str, name: str) -> None:
    survivor = outcomes(dies_after_meeting, 2, place, name, init=False)[0]
    assert survivor.traceback == ""
    assert re.fullmatch(
        r"connect on rank 0 in group 'torch\.distributed' of ranks 0-1(:| failed;) the process of"
        r" rank 1 has ended.*",
        survivor.result,
    )


def store_is_stopped() -> str:
    """Rank 1 serves a store and stops; rank 0 gives up in time and lets it go on."""
    agents = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    if bagua_ref.get_rank() == 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        agents.set("server", f"{os.getpid()} {store.port}")
        agents.wait(["connected"])
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    pid, port = map(int, agents.get("server").split())
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    agents.set("connected", "")
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    try:
        with pytest.raises(CommunicationTimeoutError) as raised:
            bagua_ref.init_process_group(store, 0, 2, timeout=0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    return str(raised.value)


def test_S1_a_store_that_is_stopped() -> None:
    message = launch(store_is_stopped, 2, init=False)[0]
    assert re.match(
        r"rank 0 timed out after 0\.5 s: the store at 127\.0\.0\.1:\d+ does not answer", message
    )


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def come_and_go_on_one_port(times: int) -> list[int]:
    """Return the number of open descriptors after each job; the ranks do not wait for each other,
    and nothing is collected.
    """
    faults.serve_the_store()
    gc.disable()
    counts: list[int] = []
    deadline = time.monotonic() + 30
    for _ in range(times):
        bagua_ref.init_process_group(timeout=30)
        bagua_ref.allreduce_inplace(torch.ones(3))
        if bagua_ref.get_rank() == 0 and len(counts) % 10 == 5:
            # rank 1 begins its next job meanwhile, and meets this one's store, which is about to
            # end
            time.sleep(0.3)
        bagua_ref.destroy_process_group()
        while len(counts) > 1 and open_descriptors() > counts[1] and time.monotonic() < deadline:
            # torch's threads, which are late on a busy machine, close what ranks have left
            time.sleep(0.01)
        counts.append(open_descriptors())
    gc.enable()
    return counts


def test_S1_jobs_may_follow_each_other_on_one_port_and_leave_no_descriptors() -> None:
    """A rank that is faster than rank 0 meets the store of the last job."""
    for counts in launch(come_and_go_on_one_port, 2, 12, init=False):
        assert max(counts[2:]) <= counts[1]


def lacks(descriptors: int) -> tuple[float, str]:
    """Rank 1 may open so few more descriptors; return how long this rank was held up by that, and
    its error.
    """
    bagua_ref.init_process_group(timeout=60)
    begin = time.monotonic()
    if bagua_ref.get_rank() == 1:
        limit = open_descriptors() - 1 + descriptors
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    error = ""
    try:
        faults.begin("gradient_allreduce", 1)
    except CommunicationError as raised:
        error = str(raised)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    return time.monotonic() - begin, error


@pytest.mark.parametrize("descriptors", [0, 2])
def test_S2_5_a_rank_that_lacks_descriptors_does_not_make_the_others_wait_until_the_timeout(
    descriptors: int,
) -> None:
    """With a few more, gloo itself ends the process; with more than these, ranks cannot share
    memory, and train over gloo.
    """
    (seconds, error), (_, own) = (o.result for o in outcomes(lacks, 2, descriptors, init=False))
    assert seconds < 20
    assert own
    assert "rank 1 gave up: " in error
