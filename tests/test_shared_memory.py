"""Tests of the memory that processes of one machine share: alone, with a rank in each thread, and
between processes.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.launch import launch
from tests.ranks_in_threads import Ranks

import bagua_ref
from bagua_ref import ReduceOp
from bagua_ref.communicators import shared_memory, sockets
from bagua_ref.communicators.collectives import combine
from bagua_ref.communicators.pipelining import ComputingError
from bagua_ref.communicators.shared_memory import SharedMemory
from bagua_ref.communicators.sockets import Until
from bagua_ref.errors import CommunicationError
from bagua_ref.groups.communication import _get_default_group

pytestmark = pytest.mark.slow

GONE = r"closed by peer|Broken pipe|reset by peer"
PAGE = 4096
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]


@contextmanager
def sharing(nranks: int, timeout: float = 20.0, piece: int = PAGE) -> Iterator[list[SharedMemory]]:
    """Ranks whose slots have ``piece`` bytes, so that few elements make many pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_LARGEST", piece)
        found = Ranks(nranks).run(lambda rank, share: connect(rank, nranks, share, timeout))
    memories = [one for one in found if one is not None]
    assert len(memories) == nranks
    try:
        yield memories
    finally:
        for one in memories:
            close(one)


def connect(rank: int, nranks: int, share: Any, timeout: float) -> SharedMemory | None:
    mesh = sockets.connect_all(rank, nranks, "", share, timeout)
    return None if mesh is None else shared_memory.connect(mesh, share)


def close(memory: SharedMemory) -> None:
    """Close its sockets, as the connection does."""
    memory._mesh.close()


def finish(works: Iterable[Until]) -> None:
    for work in works:
        work.wait()


def at_once(*functions: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(functions)) as pool:
        for done in [pool.submit(function) for function in functions]:
            done.result()


def operations(dtype: torch.dtype) -> list[ReduceOp]:
    floats = dtype.is_floating_point
    return [
        op
        for op in ReduceOp
        if not (floats and op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))
        and not (op is ReduceOp.AVG and not floats)
    ]


@pytest.mark.parametrize("nranks", [2, 3, 5])
@given(data=st.data())
def test_S3_9_an_all_reduce_combines_in_the_order_of_ranks(
    nranks: int, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    op = data.draw(st.sampled_from(operations(dtype)))
    elements = PAGE // dtype.itemsize
    size = data.draw(st.one_of(st.integers(1, 3 * nranks), st.integers(1, 7 * nranks * elements)))
    seeds = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    inputs = [(100 * torch.randn(size, generator=seeds)).to(dtype) for _ in range(nranks)]
    expected = combine(inputs, op)
    tensors = [one.clone() for one in inputs]
    with sharing(nranks) as ranks:
        for _ in range(2):
            for tensor, value in zip(tensors, inputs, strict=True):
                tensor.copy_(value)
            at_once(
                *(
                    lambda m=m, t=t: finish(m.allreduce(t, op))
                    for m, t in zip(ranks, tensors, strict=True)
                )
            )
            for tensor in tensors:
                torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("nranks", [2, 4])
@given(data=st.data())
def test_messages_arrive_whole_and_in_order_whoever_sends_how_many_to_whom(
    nranks: int, data: st.DataObject
) -> None:
    message = st.tuples(
        st.integers(0, nranks - 1), st.integers(0, nranks - 1), st.integers(1, 9 * PAGE)
    )
    plan = [m for m in data.draw(st.lists(message, min_size=1, max_size=10)) if m[0] != m[1]]
    sent = [torch.randint(256, (size,), dtype=torch.uint8) for _, _, size in plan]
    received = [torch.zeros_like(one) for one in sent]

    def exchange(memory: SharedMemory, rank: int) -> None:
        sends = [
            (tensor, dst) for (src, dst, _), tensor in zip(plan, sent, strict=True) if src == rank
        ]
        recvs = [
            (tensor, src)
            for (src, dst, _), tensor in zip(plan, received, strict=True)
            if dst == rank
        ]
        if sends or recvs:
            finish(memory.exchange(sends, recvs, "exchange"))

    with sharing(nranks) as ranks:
        for _ in range(2):
            for tensor in received:
                tensor.zero_()
            at_once(*(lambda m=m, r=r: exchange(m, r) for r, m in enumerate(ranks)))
            assert all(torch.equal(one, other) for one, other in zip(sent, received, strict=True))


def test_what_is_sent_is_computed_before_and_what_is_received_is_read_after_piece_by_piece() -> (
    None
):
    size, events = 3 * PAGE + 5, list[tuple[str, slice]]()
    outgoing, incoming = (
        torch.zeros(2, size, dtype=torch.uint8),
        torch.zeros(2, size, dtype=torch.uint8),
    )

    def fill(piece: slice) -> None:
        outgoing[0, piece] = 7
        events.append(("fill", piece))

    def read(piece: slice) -> None:
        assert torch.all(incoming[0, piece] == 9)
        events.append(("read", piece))

    outgoing[1] = 9
    with sharing(2) as (one, other):
        at_once(
            lambda: finish(
                one.exchange([(outgoing[0], 1)], [(incoming[0], 1)], "alltoall", fill, read)
            ),
            lambda: finish(other.exchange([(outgoing[1], 0)], [(incoming[1], 0)], "alltoall")),
        )
    assert torch.all(incoming[1] == 7)
    pieces = [slice(start, start + PAGE) for start in range(0, size, PAGE)]
    assert [piece for kind, piece in events if kind == "fill"] == pieces
    assert [piece for kind, piece in events if kind == "read"] == pieces
    assert all(events.index(("fill", piece)) < events.index(("read", piece)) for piece in pieces)


def allreduce(memory: SharedMemory, size: int = 10) -> None:
    finish(memory.allreduce(torch.ones(size), ReduceOp.SUM))


@pytest.mark.parametrize("size", [10, 20 * PAGE])
def test_a_rank_that_leaves_is_noticed_at_once(size: int) -> None:
    with sharing(3) as ranks:
        threading.Timer(0.3, close, [ranks[1]]).start()
        begin = time.monotonic()
        for rank in (0, 2):
            with pytest.raises(RuntimeError, match=GONE):
                allreduce(ranks[rank], size)
            close(ranks[rank])
        assert time.monotonic() - begin < 10


def test_what_a_rank_sent_before_it_left_is_received() -> None:
    with sharing(2) as (stays, leaves):
        finish(leaves.exchange([(torch.full((4 * PAGE // 4,), 3.0), 0)], [], "exchange"))
        close(leaves)
        received = torch.zeros(4 * PAGE // 4)
        finish(stays.exchange([], [(received, 1)], "exchange"))
        assert torch.all(received == 3)
        with pytest.raises(RuntimeError, match=GONE):
            finish(stays.exchange([(received, 1)], [], "exchange"))


@pytest.mark.parametrize("room", [1, 4, 5])
def test_a_sender_waits_for_a_receiver_only_when_its_slots_are_full(room: int) -> None:
    with sharing(2, timeout=0.3) as (sender, receiver):
        message = torch.arange(room * PAGE // 4, dtype=torch.float32)
        if room <= 4:
            finish(sender.exchange([(message, 1)], [], "exchange"))
        else:
            with pytest.raises(RuntimeError, match="timed out"):
                finish(sender.exchange([(message, 1)], [], "exchange"))
        received = torch.zeros_like(message[: 4 * PAGE // 4])
        if room <= 4:
            finish(receiver.exchange([], [(received, 0)], "exchange"))
            assert torch.equal(received, message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda memory: memory.allreduce(torch.ones(11), ReduceOp.SUM),
            "sent 44 bytes, where this rank expects 40 bytes",
        ),
        (
            lambda memory: memory.allreduce(torch.ones(10), ReduceOp.MAX),
            "data of another collective",
        ),
        (
            lambda memory: memory.allreduce(torch.ones(10, dtype=torch.int32), ReduceOp.SUM),
            "another collective",
        ),
        (
            lambda memory: memory.exchange(
                [(torch.ones(10), 0)], [(torch.ones(10), 0)], "alltoall"
            ),
            "another collective",
        ),
    ],
    ids=["size", "operation", "dtype", "collective"],
)
def test_ranks_in_different_collectives_are_told(
    call: Callable[[SharedMemory], Iterable[Until]], message: str
) -> None:
    with sharing(2) as (one, other), ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(lambda: finish(call(other)))
        with pytest.raises(ComputingError) as raised:
            allreduce(one)
        close(one)
        assert isinstance(theirs.exception(), (ComputingError, RuntimeError))
    assert isinstance(raised.value.error, CommunicationError)
    assert "rank 1 of the group has sent" in str(raised.value.error)
    assert message in str(raised.value.error)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_where_a_rank_cannot_share_memory_no_rank_does(
    broken: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    share_slots = shared_memory._share_slots

    def maybe(mesh: Any, limit: float) -> Any:
        result = share_slots(mesh, limit)
        if mesh.rank == broken:
            raise OSError("not permitted")
        return result

    monkeypatch.setattr(shared_memory, "_share_slots", maybe)
    with caplog.at_level(logging.INFO):
        assert Ranks(3).run(lambda rank, share: connect(rank, 3, share, 20.0)) == [None] * 3
    assert all("gloo alone, which takes longer, as they cannot" in m for m in caplog.messages)
    assert sum("not permitted" in m for m in caplog.messages) == 1
    gc.collect()  # an open socket would warn


def test_memory_that_nobody_refers_to_is_given_back_with_its_sockets() -> None:
    files = os.listdir("/proc/self/fd")
    with sharing(3):
        pass
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(files)
    with open("/proc/self/maps") as maps:
        assert "memfd:bagua_ref" not in maps.read()


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_REF_SHARED_MEMORY", "no")
    with pytest.raises(ValueError, match=r"BAGUA_REF_SHARED_MEMORY='no' must be 0 or 1"):
        shared_memory.shared_by()


def test_a_system_that_hides_its_name_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua_ref.communicators.processes._BOOT", "/no/such/file")
    assert shared_memory.shared_by() == ""


# Between processes.


def sharing_in_turn() -> list[bool]:
    """Return whether memory was shared: by all ranks; with one on another node; one that may not;
    one in another network.
    """
    found, stat, node = [], os.stat, os.environ["GROUP_RANK"]
    for obstacle in ("", "node", "variable", "network"):
        os.environ["BAGUA_REF_SHARED_MEMORY"], os.environ["GROUP_RANK"] = "1", node
        if os.environ["RANK"] == "1":
            if obstacle == "variable":
                os.environ["BAGUA_REF_SHARED_MEMORY"] = "0"
            elif obstacle == "node":
                os.environ["GROUP_RANK"] = "1"
            elif obstacle == "network":
                os.stat = lambda path, **options: stat(
                    "/proc/self/ns/uts" if path == "/proc/self/ns/net" else path, **options
                )  # type: ignore[assignment]
        bagua_ref.init_process_group()
        x = torch.full((1000,), float(bagua_ref.get_rank()))
        bagua_ref.allreduce_inplace(x)
        assert torch.all(x == sum(range(bagua_ref.get_world_size())))
        connection: Any = _get_default_group().get_global_communicator()._connection
        found.append(connection.memory is not None)
        bagua_ref.destroy_process_group()
    return found


def test_ranks_share_memory_if_all_are_on_one_node_of_one_machine_and_may() -> None:
    assert launch(sharing_in_turn, 3, init=False) == [[True, False, False, False]] * 3
