"""Sockets between ranks, and exchanges of integers over them: ranks in threads, and trainings."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.launch import launch
from tests.ranks_in_threads import Ranks
from tests.trainings import batch, network, wrap

import bagua_ref
from bagua_ref.algorithms import GradientAllReduceAlgorithm
from bagua_ref.communicators import sockets
from bagua_ref.communicators.sockets import Mesh
from bagua_ref.env import shares_memory
from bagua_ref.errors import CommunicationError

pytestmark = pytest.mark.slow

GONE = r"closed by peer|reset by peer"
SOON = timedelta(seconds=0.05)
INT64 = st.integers(-(2**63), 2**63 - 1)
HOSTS = ["localhost", ""]  # TCP and Unix sockets


def connect_all(
    nranks: int = 2, timeout: float = 20.0, host: str = "localhost"
) -> list[Mesh | None]:
    return Ranks(nranks).run(
        lambda rank, share: sockets.connect_all(rank, nranks, host, share, timeout)
    )


@contextmanager
def connected(nranks: int, timeout: float = 20.0, host: str = "localhost") -> Iterator[list[Mesh]]:
    found = [one for one in connect_all(nranks, timeout, host) if one is not None]
    assert len(found) == nranks
    try:
        yield found
    finally:
        for one in found:
            one.close()


@given(data=st.data(), nranks=st.sampled_from([1, 2, 5]), host=st.sampled_from(HOSTS))
def test_every_rank_gets_the_values_of_all_in_every_exchange(
    data: st.DataObject, nranks: int, host: str
) -> None:
    note = st.lists(INT64, min_size=(size := data.draw(st.integers(0, 6))), max_size=size)
    rounds = data.draw(
        st.lists(st.lists(note, min_size=nranks, max_size=nranks), min_size=1, max_size=4)
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
        with pytest.raises(RuntimeError, match="the last exchange has not been waited for"):
            fast.send([5])
        slow_work.wait()
        assert slow.received() == [[2], [1]]
        slow.send([3]).wait()
        fast_work.wait()
        assert slow.received() == fast.received() == [[4], [3]]


def test_messages_may_come_in_pieces_until_the_timeout() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    mesh = Mesh(0, {1: ours}, 0.3)
    with theirs:
        message = sockets.array("q", [2**32, 40, 1, 2, 7, -8]).tobytes()
        work = mesh.send([5, 6])
        for place in (11, 27):
            theirs.sendall(message[:place])
            message = message[place:]
            with pytest.raises(RuntimeError, match="timed out"):
                work.wait(SOON)
            assert not work.is_completed()
        theirs.sendall(message)
        work.wait()
        assert mesh.received() == [[5, 6], [7, -8]]
        assert [*mesh.peers[1].filled] == [(2**32, 40)]  # about shared memory
        work = mesh.send([5, 6])
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait()
        assert work.is_completed()
        mesh.close()


@pytest.mark.parametrize("host", HOSTS)
def test_a_rank_that_leaves_is_noticed_at_once_and_what_it_said_before_is_read(host: str) -> None:
    for index in range(2):
        with connected(3, host=host) as ranks:
            gone = list(ranks[0].peers)[index]
            work, begin = ranks[0].send([1]), time.monotonic()
            threading.Timer(0.1, ranks[gone].close).start()
            with pytest.raises(RuntimeError, match=GONE):
                work.wait()
            assert work.is_completed()
            assert time.monotonic() - begin < 10
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
        works = {
            "rank 1 of the group sent 1 numbers, this rank 2": one.send([1, 2]),
            "rank 0 of the group sent 2 numbers, this rank 1": other.send([1]),
        }
        for message, work in works.items():
            for _ in range(2):
                with pytest.raises(RuntimeError, match=message):
                    work.wait()
            assert work.is_completed()


def refuse(*_: Any) -> Any:
    raise OSError("not permitted")


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_where_a_rank_cannot_listen_or_be_reached_no_rank_uses_sockets(
    broken: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listen, place, ranks, timeout = sockets._listen, threading.local(), Ranks(3), 20.0

    def cannot(rank: int, share: Any) -> None:
        place.rank = rank
        assert sockets.connect_all(rank, 3, "localhost", share, timeout) is None

    def listens(host: str) -> socket.socket:
        return refuse() if place.rank == broken else listen(host)

    monkeypatch.setattr(sockets, "_listen", listens)
    with caplog.at_level(logging.INFO):
        ranks.run(cannot)
    assert ranks.shared == 2
    assert sorted("not permitted" in line for line in caplog.messages) == [False, False, True]
    assert all("gloo alone, which takes longer, as not all" in line for line in caplog.messages)

    def closed(host: str) -> socket.socket:
        server = listen(host)
        if place.rank == min(broken, 1):  # nobody connects to the last rank
            server.listen(0)
            server.shutdown(socket.SHUT_RDWR)
        return server

    monkeypatch.setattr(sockets, "_listen", closed)
    timeout = 1.0  # the others give up before it
    begin = time.monotonic()
    Ranks(3).run(cannot)
    assert time.monotonic() - begin < sockets._LIMIT
    gc.collect()  # an open socket would warn


@pytest.mark.parametrize("host", HOSTS)
def test_strangers_are_sent_away(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends nothing, or a rank's number without its secret."""
    listen, strangers = sockets._listen, list[socket.socket]()

    def disturbed(host: str) -> socket.socket:
        server = listen(host)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(19) + b"\2", bytes(7)):
            stranger = socket.socket(server.family)  # each rank's thread calls this
            stranger.connect(server.getsockname())
            stranger.sendall(said)
            strangers.append(stranger)
        return server

    monkeypatch.setattr(sockets, "_listen", disturbed)
    with connected(3, host=host) as ranks:
        works = [rank.send([index]) for index, rank in enumerate(ranks)]
        for rank, work in zip(ranks, works, strict=True):
            work.wait()
            assert rank.received() == [[0], [1], [2]]
    for stranger in strangers:
        stranger.settimeout(5)
        with stranger, suppress(ConnectionResetError):  # the last rank accepts nobody
            assert stranger.recv(1) == b""


def test_an_error_of_the_other_exchange_closes_everything() -> None:
    def share(note: Sequence[int]) -> list[list[int]]:
        raise CommunicationError("a rank has died")

    with pytest.raises(CommunicationError, match="a rank has died"):
        sockets.connect_all(0, 2, "localhost", share, 20.0)
    gc.collect()


def test_addresses_of_the_sixth_version() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there are no addresses of version 6 here")
    with connected(2, host="::1") as (one, other):
        assert one.peers[1].socket.family == other.peers[0].socket.family == socket.AF_INET6


def test_a_forked_child_leaves_the_sockets_to_its_parent_and_forgotten_ones_are_closed() -> None:
    with connected(2) as (one, other):
        if (child := os.fork()) == 0:
            one.close()
            os._exit(0)
        os.waitpid(child, 0)
        work = one.send([1])
        other.send([2])
        work.wait()
        assert one.received() == [[1], [2]]
    one, forgotten = (ends for ends in connect_all() if ends is not None)
    del forgotten, other
    gc.collect()
    with pytest.raises(RuntimeError, match=GONE):
        one.send([1]).wait()
    one.close()


def train(
    steps: int, skipped_by: int | None = None
) -> tuple[torch.Tensor, set[socket.AddressFamily]]:
    """Train; return the weights and the kind of the sockets that carry the integers, if any do."""
    torch.manual_seed(0)
    module, optimizer = wrap(
        network(), GradientAllReduceAlgorithm(), lr=0.1, process_group=bagua_ref.new_group()
    )
    for step in range(steps):
        optimizer.zero_grad()
        module(batch(bagua_ref.get_rank(), step)).square().mean().backward()
        if bagua_ref.get_rank() != skipped_by or step != 1:
            optimizer.step()
    connection: Any = module._bagua.process_group.get_global_communicator()._connection
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    between = connection._mesh.peers.values() if connection._mesh is not None else ()
    return weights, {peer.socket.family for peer in between}


def train_with_and_without_sockets() -> tuple[list[Any], list[str]]:
    found, errors = [], []
    listen: Callable[..., Any] = sockets._listen
    for index in range(4):
        if index > 1 and bagua_ref.get_rank() == 1:  # one rank is enough
            sockets._listen = refuse
        if index % 2 == 0:
            found.append(train(4))
        else:
            with pytest.raises(
                CommunicationError, match=r"rank 1 has taken 1 optimizer steps, ranks 0, 2 have tak"
            ) as raised:
                train(4, skipped_by=1)
            errors.append(str(raised.value).partition(";")[0])
            del raised
        sockets._listen = listen
    return found, errors


def test_trainings_use_sockets_where_they_can_and_end_alike() -> None:
    over_gloo = launch(train_with_and_without_sockets, 3, over_gloo=True)
    over_unix = launch(train_with_and_without_sockets, 3)
    for rank in (*over_gloo, *over_unix):
        (_, kinds), (_, without) = rank[0]
        assert kinds
        assert without == set()
    assert all(rank[0][0][1] <= {socket.AF_INET, socket.AF_INET6} for rank in over_gloo)
    assert not shares_memory() or all(rank[0][0][1] == {socket.AF_UNIX} for rank in over_unix)
    weights = [[rank[0][index][0] for rank in over_gloo + over_unix] for index in range(2)]
    # without sockets, no memory is shared either; sums in it are in another order than gloo's
    assert all(torch.equal(one, weights[0][0]) for one in weights[0][:3] + weights[1])
    assert all(torch.equal(one, weights[0][3]) for one in weights[0][3:])
    for ranks in (over_gloo, over_unix):
        assert all(rank[1] == ranks[0][1] for rank in ranks)
