"""Tests of the sockets on which ranks exchange a few integers: alone, with a rank in each thread,
and below trainings over gloo.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.launch import launch, on_every_process
from tests.ranks_in_threads import Ranks
from tests.trainings import batch, network, wrap

import bagua_ref
from bagua_ref.algorithms import GradientAllReduceAlgorithm
from bagua_ref.communicators import sockets
from bagua_ref.communicators.sockets import IntSockets
from bagua_ref.env import shares_memory
from bagua_ref.errors import CommunicationError

pytestmark = pytest.mark.slow

GONE = r"closed by peer|reset by peer"
SOON = timedelta(seconds=0.05)
INT64 = st.integers(-(2**63), 2**63 - 1)


def connect_all(
    nranks: int = 2, timeout: float = 20.0, host: str = "localhost"
) -> list[IntSockets | None]:
    def connect(rank: int, share: Any) -> IntSockets | None:
        found = sockets.connect_all(rank, nranks, host, share, timeout, "ranks use gloo")
        return None if found is None else IntSockets(found, timeout)

    return Ranks(nranks).run(connect)


@contextmanager
def connected(
    nranks: int, timeout: float = 20.0, host: str = "localhost"
) -> Iterator[list[IntSockets]]:
    found = [one for one in connect_all(nranks, timeout, host) if one is not None]
    assert len(found) == nranks
    try:
        yield found
    finally:
        for one in found:
            one.close()


@pytest.mark.parametrize("nranks", [1, 2, 5])
@pytest.mark.parametrize("host", ["localhost", ""], ids=["TCP", "Unix"])
@given(data=st.data())
def test_every_rank_gets_the_values_of_all_in_every_exchange(
    nranks: int, host: str, data: st.DataObject
) -> None:
    rounds = data.draw(
        st.integers(0, 6).flatmap(
            lambda size: st.lists(
                st.lists(
                    st.lists(INT64, min_size=size, max_size=size), min_size=nranks, max_size=nranks
                ),
                min_size=1,
                max_size=4,
            )
        )
    )
    with connected(nranks, host=host) as ranks:
        for said in rounds:
            works = [rank.send(note) for rank, note in zip(ranks, said, strict=True)]
            for rank, work in zip(ranks, works, strict=True):
                work.wait()
                assert work.is_completed()
                assert rank.received() == said


def test_a_rank_may_be_one_exchange_ahead() -> None:
    with connected(2) as (fast, slow):
        slow_work = slow.send([1])
        fast.send([2]).wait()
        fast_work = fast.send([4])
        slow_work.wait()
        assert slow.received() == [[2], [1]]
        slow.send([3]).wait()
        fast_work.wait()
        assert slow.received() == fast.received() == [[4], [3]]


def test_a_note_may_come_in_pieces() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    inet = IntSockets({1: ours}, 20.0)
    with theirs:
        message = sockets.array("q", [2, 7, -8]).tobytes()
        work = inet.send([5, 6])
        theirs.sendall(message[:11])
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(SOON)
        assert not work.is_completed()
        theirs.sendall(message[11:])
        work.wait()
        assert inet.received() == [[5, 6], [7, -8]]
        inet.close()


def test_waiting_ends_at_its_limit_and_has_failed_at_the_timeout() -> None:
    with connected(2, timeout=0.3) as (waiting, _):
        work = waiting.send([1])
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(SOON)
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait()
        assert work.is_completed()


@pytest.mark.parametrize("host", ["localhost", ""], ids=["TCP", "Unix"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_that_leaves_is_noticed_at_once_whoever_else_is_late(place: int, host: str) -> None:
    with connected(3, host=host) as ranks:
        gone = list(ranks[0]._sockets)[place]  # they are in the order of connecting
        work, begin = ranks[0].send([1]), time.monotonic()
        threading.Timer(0.3, ranks[gone].close).start()
        with pytest.raises(RuntimeError, match=GONE):
            work.wait()
        assert work.is_completed()
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize("host", ["localhost", ""], ids=["TCP", "Unix"])
def test_what_a_rank_said_before_it_left_is_read_and_sending_to_it_is_an_error(host: str) -> None:
    with connected(2, host=host) as (stays, leaves):
        work = stays.send([1])
        leaves.send([2])
        leaves.close()  # without having read what the other one sent
        work.wait()
        assert stays.received() == [[1], [2]]
        with suppress(RuntimeError):  # the first message may find out
            stays.send([1]).wait()
        stays._missing.clear()
        with pytest.raises(RuntimeError):
            stays.send([2])


def test_values_of_different_lengths_are_an_error_on_both_ranks() -> None:
    with connected(2) as (one, other):
        one_work, other_work = one.send([1, 2]), other.send([1])
        with pytest.raises(RuntimeError, match=r"rank 0 of the group sent 2 numbers, this rank 1"):
            other_work.wait()
        assert other_work.is_completed()
        other.close()
        with pytest.raises(RuntimeError, match=GONE):
            one_work.wait()


def test_an_exchange_that_was_not_waited_for_is_an_error_at_the_next() -> None:
    with connected(2) as (one, _):
        one.send([1])
        with pytest.raises(RuntimeError, match="the last exchange has not been waited for"):
            one.send([2])


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_where_a_rank_cannot_listen_or_be_reached_no_rank_uses_sockets(
    broken: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listen, greet, place = sockets._listen_towards, sockets._greet, threading.local()
    ranks, timeout = Ranks(3), 20.0

    def cannot(rank: int, share: Any) -> None:
        place.rank = rank
        found = sockets.connect_all(rank, 3, "localhost", share, timeout, "ranks use gloo")
        assert found is None

    def maybe(host: str) -> socket.socket:
        return refuse() if place.rank == broken else listen(host)

    monkeypatch.setattr(sockets, "_listen_towards", maybe)
    with caplog.at_level(logging.INFO):
        ranks.run(cannot)
    assert ranks.shared == 2
    assert sorted("not permitted" in line for line in caplog.messages) == [False, False, True]
    assert all(line.startswith("ranks use gloo, as not all") for line in caplog.messages)

    monkeypatch.setattr(sockets, "_listen_towards", listen)
    timeout = 1.0  # the others give up before it
    connects = max(broken, 1)  # rank 0 connects to nobody
    monkeypatch.setattr(
        sockets, "_greet", lambda *args: refuse() if place.rank == connects else greet(*args)
    )
    begin = time.monotonic()
    Ranks(3).run(cannot)
    assert time.monotonic() - begin < sockets._LIMIT
    gc.collect()  # an open socket would warn


@contextmanager
def disturbed(host: str, disturb: Callable[[socket.socket], None]) -> Iterator[None]:
    """Call ``disturb(server)`` for every socket that listens, before the ranks learn of it."""
    name = "_listen_towards" if host else "_listen_locally"
    listen: Callable[..., socket.socket] = getattr(sockets, name)

    def listen_and_disturb(*args: Any) -> socket.socket:
        server = listen(*args)
        disturb(server)
        return server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sockets, name, listen_and_disturb)
        yield


def exchange_once(nranks: int, host: str, timeout: float = 20.0) -> float:
    """Connect and exchange integers; return the seconds that it took."""
    begin = time.monotonic()
    with connected(nranks, timeout, host) as ranks:
        for rank, work in zip(
            ranks, [rank.send([place]) for place, rank in enumerate(ranks)], strict=True
        ):
            work.wait()
            assert rank.received() == [[place] for place in range(nranks)]
        return time.monotonic() - begin


@pytest.mark.parametrize("host", ["localhost", ""], ids=["TCP", "Unix"])
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(19) + b"\2", bytes(7)])
def test_a_stranger_at_the_port_is_sent_away_and_delays_nobody(said: bytes, host: str) -> None:
    strangers: list[socket.socket] = []

    def disturb(server: socket.socket) -> None:
        stranger = socket.socket(server.family)  # each rank's thread calls this
        stranger.connect(server.getsockname())
        stranger.sendall(said)
        strangers.append(stranger)

    with disturbed(host, disturb):
        assert exchange_once(3, host) < 2
    for stranger in strangers:
        stranger.settimeout(5)
        with stranger, suppress(ConnectionResetError):  # the last rank accepts nobody
            assert stranger.recv(1) == b""


@pytest.mark.parametrize("host", ["localhost", ""], ids=["TCP", "Unix"])
def test_a_stranger_who_sends_a_byte_now_and_then_delays_nobody(host: str) -> None:
    """Each byte once renewed the time that a stranger had, so that the ranks in their collective
    timed out.
    """
    over = threading.Event()

    def dribble(stranger: socket.socket) -> None:
        with stranger, suppress(OSError):
            while not over.wait(0.85):
                stranger.sendall(b"x")

    def disturb(server: socket.socket) -> None:
        for _ in range(3):
            stranger = socket.socket(server.family)
            stranger.connect(server.getsockname())
            threading.Thread(target=dribble, args=(stranger,), daemon=True).start()

    try:
        with disturbed(host, disturb):
            assert exchange_once(3, host, timeout=4.0) < 2
    finally:
        over.set()


@pytest.mark.parametrize("host", ["localhost", ""], ids=["TCP", "Unix"])
def test_ranks_connect_though_strangers_fill_the_backlog(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "SOMAXCONN", 1)
    welcome = sockets._welcome

    def welcome_later(*args: Any) -> None:
        time.sleep(0.2)  # the other rank finds the backlog full meanwhile
        welcome(*args)

    monkeypatch.setattr(sockets, "_welcome", welcome_later)
    strangers: list[socket.socket] = []

    def disturb(server: socket.socket) -> None:
        for _ in range(4):
            stranger = socket.socket(server.family)
            stranger.setblocking(False)
            stranger.connect_ex(server.getsockname())
            strangers.append(stranger)

    with disturbed(host, disturb):
        assert exchange_once(2, host) < 5
    for stranger in strangers:
        stranger.close()


def test_strangers_beyond_a_number_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would use up the descriptors of the process; the rank that they wait with here never
    comes.
    """
    monkeypatch.setattr(sockets, "_STRANGERS", 2)
    with (
        sockets._listen_towards("localhost") as server,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as opened,
    ):
        waiting = pool.submit(
            sockets._welcome, server, bytes(16), {1}, {}, opened, time.monotonic() + 3
        )
        strangers = [socket.create_connection(server.getsockname()[:2]) for _ in range(8)]
        for stranger in strangers[:5]:
            stranger.settimeout(2)
            assert stranger.recv(1) == b""
        strangers[-1].sendall(bytes(19) + b"\1")
        waiting.result()
    for stranger in strangers:
        stranger.close()


def test_processes_of_another_user_are_not_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(sockets, "_LIMIT", 0.3)
    with caplog.at_level(logging.INFO):
        assert connect_all(host="") == [None] * 2
    assert f"a process of user {os.getuid()} is at the other end" in caplog.text
    assert all(one is not None for one in connect_all())  # over TCP there are no users


def test_an_error_of_the_other_exchange_closes_everything() -> None:
    def share(note: Sequence[int]) -> list[list[int]]:
        raise CommunicationError("a rank has died")

    with pytest.raises(CommunicationError, match="a rank has died"):
        sockets.connect_all(0, 2, "localhost", share, 20.0, "")
    gc.collect()


def test_addresses_of_the_sixth_version(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there are no addresses of version 6 here")
    ranks = [one for one in connect_all(host="::1") if one is not None]
    assert [one._sockets[peer].family for one, peer in zip(ranks, (1, 0), strict=True)] == [
        socket.AF_INET6
    ] * 2
    for one in ranks:
        one.close()


def test_a_forked_child_that_lets_go_of_the_sockets_leaves_them_to_its_parent() -> None:
    with connected(2) as (one, other):
        if (child := os.fork()) == 0:
            one.close()
            os._exit(0)
        os.waitpid(child, 0)
        work = one.send([1])
        other.send([2])
        work.wait()
        assert one.received() == [[1], [2]]


def test_sockets_that_nobody_refers_to_are_closed() -> None:
    one, other = connect_all()
    assert one is not None
    del other
    gc.collect()
    with pytest.raises(RuntimeError, match=GONE):
        one.send([1]).wait()
    one.close()


def train(
    steps: int, skipped_by: int | None = None
) -> tuple[torch.Tensor, set[socket.AddressFamily]]:
    """Train over gloo; return the weights and the kind of the sockets that carry the integers, if
    any do.
    """
    module, optimizer = wrap(network(), GradientAllReduceAlgorithm(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        module(batch(bagua_ref.get_rank(), step)).square().mean().backward()
        if bagua_ref.get_rank() != skipped_by or step != 1:
            optimizer.step()
    connection: Any = module._bagua.process_group.get_global_communicator()._connection
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    between = connection._sockets._sockets.values() if connection._sockets is not None else ()
    return weights, {one.family for one in between}


def train_without_sockets(
    steps: int, skipped_by: int | None = None
) -> tuple[torch.Tensor, set[socket.AddressFamily]]:
    if bagua_ref.get_rank() == 1:  # one rank is enough
        sockets._listen_towards = sockets._listen_locally = refuse
    return train(steps, skipped_by)


def refuse(*_: Any) -> socket.socket:
    raise OSError("not permitted")


def disagree(function: Callable[..., Any]) -> str:
    with pytest.raises(
        CommunicationError, match=r"rank 1 has taken 1 optimizer steps, ranks 0, 2 have taken 2"
    ) as raised:
        function(4, skipped_by=1)
    return str(raised.value)


def test_gloo_trainings_use_sockets_where_they_can_and_end_alike() -> None:
    without, over_tcp = (
        launch(function, 3, 4, over_gloo=True) for function in (train_without_sockets, train)
    )
    over_unix = launch(train, 3, 4)
    assert [kinds for _, kinds in without] == [set()] * 3
    assert all(kinds and kinds <= {socket.AF_INET, socket.AF_INET6} for _, kinds in over_tcp)
    assert not shares_memory() or [kinds for _, kinds in over_unix] == [{socket.AF_UNIX}] * 3
    assert all(torch.equal(weights, without[0][0]) for weights, _ in (*without, *over_tcp))
    # its sums are in another order than gloo's
    assert all(torch.equal(weights, over_unix[0][0]) for weights, _ in over_unix)


@pytest.mark.parametrize("function", [train, train_without_sockets])
def test_ranks_that_disagree_are_told_in_either_way(function: Callable[..., Any]) -> None:
    assert len(set(launch(disagree, 3, function))) == 1


def open_sockets() -> int:
    return sum(
        os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        for name in os.listdir("/proc/self/fd")
        if exists(name)
    )


def exists(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


@on_every_process(2)
def test_groups_that_are_gone_leave_no_sockets() -> None:
    counts = []
    for _ in range(4):
        module, optimizer = wrap(
            network(), GradientAllReduceAlgorithm(), lr=0.1, process_group=bagua_ref.new_group()
        )
        module(batch(bagua_ref.get_rank(), 0)).square().mean().backward()
        optimizer.step()
        module.bagua_resynchronize()
        del module, optimizer
        gc.collect()
        bagua_ref.barrier()
        counts.append(open_sockets())
    assert max(counts[1:]) <= counts[0] + 2, counts
