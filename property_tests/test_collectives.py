"""Every collective in simulated worlds of 1 to 9 ranks on 1 to 4 uneven nodes, against values computed from the rank (S3.9)."""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_ref.communicators import collectives
from bagua_ref.simulation import SimulatedWorld
from bagua_ref.types import ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
MOVABLE = (*FLOATS, *INTEGERS, torch.int16, torch.bool, torch.complex64)
BITWISE = {ReduceOp.BAND: lambda a, b: a & b, ReduceOp.BOR: lambda a, b: a | b, ReduceOp.BXOR: lambda a, b: a ^ b}
COMBINE = {
    ReduceOp.SUM: lambda a, b: a + b,
    ReduceOp.AVG: lambda a, b: a + b,
    ReduceOp.PRODUCT: lambda a, b: a * b,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    **BITWISE,
}


@st.composite
def worlds(draw):
    n = draw(st.integers(1, 9))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
    nodes = [end - start for start, end in zip([0, *cuts], [*cuts, n], strict=True)]
    return SimulatedWorld(n, nodes=nodes, seed=draw(st.integers(0, 2**32)))


reductions = st.one_of(
    st.tuples(st.sampled_from([op for op in ReduceOp if op not in BITWISE]), st.sampled_from(FLOATS)),
    st.tuples(st.sampled_from([op for op in ReduceOp if op is not ReduceOp.AVG]), st.sampled_from(INTEGERS)),
)
counts = st.integers(0, 7)
dtypes = st.sampled_from(MOVABLE)


def value(rank, index):
    return (2 * rank + 3 * index + rank * index) % 5 + 1


def values(rank, count, dtype, start=0):
    numbers = torch.tensor([value(rank, index) for index in range(start, start + count)], dtype=torch.int64)
    return (numbers % 2 if dtype is torch.bool else numbers).to(dtype)


def reduced(op, n, count, dtype, start=0):
    """Integers are exact in float32; one rounding follows, or the wrapping of an integer type."""
    exact = [reduce(COMBINE[op], [value(rank, index) for rank in range(n)]) for index in range(start, start + count)]
    if not dtype.is_floating_point:
        return torch.tensor(exact, dtype=torch.int64).to(dtype)
    wide = np.float64 if dtype is torch.float64 else np.float32
    return torch.from_numpy(np.array(exact, dtype=wide) / wide(n if op is ReduceOp.AVG else 1)).to(dtype)


def nothing(count, dtype):
    return torch.full((count,), 99).to(dtype)


def assert_same(tensor, expected):
    assert tensor.dtype == expected.dtype
    assert torch.equal(tensor, expected)


@given(worlds(), reductions, counts)
def test_S3_9_allreduce_combines_all_ranks_on_all(world, reduction, count):
    op, dtype = reduction

    def program(comm):
        send, recv = values(comm.rank(), count, dtype), nothing(count, dtype)
        comm.allreduce(send, recv, op)
        assert_same(send, values(comm.rank(), count, dtype))
        comm.allreduce_inplace(send, op)
        return send, recv

    for pair in world.run(program):
        for tensor in pair:
            assert_same(tensor, reduced(op, world.world_size, count, dtype))


@given(worlds(), reductions, counts, st.data())
def test_S3_9_reduce_combines_all_ranks_on_dst_alone(world, reduction, count, data):
    op, dtype = reduction
    dst = data.draw(st.integers(0, world.world_size - 1))

    def program(comm):
        send, recv = values(comm.rank(), count, dtype), nothing(count, dtype)
        comm.reduce(send, recv, dst, op)
        assert_same(send, values(comm.rank(), count, dtype))
        comm.reduce_inplace(send, dst, op)
        return send, recv

    for rank, (inplace, recv) in enumerate(world.run(program)):
        total = reduced(op, world.world_size, count, dtype)
        assert_same(inplace, total if rank == dst else values(rank, count, dtype))
        assert_same(recv, total if rank == dst else nothing(count, dtype))


@given(worlds(), reductions, counts)
def test_S3_9_reduce_scatter_gives_each_rank_its_chunk(world, reduction, count):
    (op, dtype), n = reduction, world.world_size

    def program(comm):
        send, recv = values(comm.rank(), n * count, dtype), nothing(count, dtype)
        comm.reduce_scatter(send, recv, op)
        assert_same(send, values(comm.rank(), n * count, dtype))
        comm.reduce_scatter_inplace(send, op)
        return send, recv

    for rank, (inplace, recv) in enumerate(world.run(program)):
        own = slice(rank * count, (rank + 1) * count)
        expected = values(rank, n * count, dtype)
        expected[own] = reduced(op, n, count, dtype, start=rank * count)
        assert_same(inplace, expected)
        assert_same(recv, expected[own])


@given(worlds(), dtypes, counts, st.data())
def test_S3_9_broadcast_gives_every_rank_what_src_has(world, dtype, count, data):
    src = data.draw(st.integers(0, world.world_size - 1))

    def program(comm):
        tensor = values(comm.rank(), count, dtype)
        comm.broadcast(tensor, src)
        return tensor

    for tensor in world.run(program):
        assert_same(tensor, values(src, count, dtype))


@given(worlds(), dtypes, counts, st.data())
def test_S3_9_gather_and_allgather_collect_in_rank_order(world, dtype, count, data):
    n = world.world_size
    dst = data.draw(st.integers(0, n - 1))
    everything = torch.cat([values(rank, count, dtype) for rank in range(n)])

    def own_in_place(rank):
        tensor = nothing(n * count, dtype)
        tensor[rank * count : (rank + 1) * count] = values(rank, count, dtype)
        return tensor

    def program(comm):
        rank = comm.rank()
        send, all_recv, recv, all_inplace = (
            values(rank, count, dtype),
            *(nothing(n * count, dtype) for _ in "ab"),
            own_in_place(rank),
        )
        comm.allgather(send, all_recv)
        comm.allgather_inplace(all_inplace)
        comm.gather(send, recv, dst)
        assert_same(send, values(rank, count, dtype))
        inplace = own_in_place(rank) if rank == dst else send.clone()
        comm.gather_inplace(inplace, count, dst)
        return all_recv, all_inplace, recv, inplace

    for rank, (all_recv, all_inplace, recv, inplace) in enumerate(world.run(program)):
        assert_same(all_recv, everything)
        assert_same(all_inplace, everything)
        assert_same(recv, everything if rank == dst else nothing(n * count, dtype))
        assert_same(inplace, everything if rank == dst else values(rank, count, dtype))


@given(worlds(), dtypes, counts, st.data())
def test_S3_9_scatter_gives_chunk_r_to_rank_r(world, dtype, count, data):
    n = world.world_size
    src = data.draw(st.integers(0, n - 1))

    def program(comm):
        send, recv = values(comm.rank(), n * count, dtype), nothing(count, dtype)
        comm.scatter(send, recv, src)
        inplace = send.clone() if comm.rank() == src else nothing(count, dtype)
        comm.scatter_inplace(inplace, count, src)
        assert_same(send, values(comm.rank(), n * count, dtype))
        return recv, inplace

    for rank, (recv, inplace) in enumerate(world.run(program)):
        assert_same(recv, values(src, count, dtype, start=rank * count))
        assert_same(inplace, values(src, n * count, dtype) if rank == src else recv)


@given(worlds(), dtypes, counts)
def test_S3_9_alltoall_transposes_chunks(world, dtype, count):
    n = world.world_size

    def program(comm):
        send, recv = values(comm.rank(), n * count, dtype), nothing(n * count, dtype)
        comm.alltoall(send, recv)
        assert_same(send, values(comm.rank(), n * count, dtype))
        comm.alltoall_inplace(send)
        return send, recv

    for rank, pair in enumerate(world.run(program)):
        for tensor in pair:
            assert_same(tensor, torch.cat([values(peer, count, dtype, start=rank * count) for peer in range(n)]))


@given(worlds(), dtypes, st.integers(0, 3), st.integers(0, 2))
def test_S3_9_alltoall_v_moves_counts_between_displacements(world, dtype, most, gap):
    """Rank s sends (s + d) mod (most + 1) elements to d; every block is followed by a gap that stays as it was."""
    n = world.world_size

    def layout(rank):
        sizes = [(rank + peer) % (most + 1) for peer in range(n)]
        return sizes, [sum(sizes[:peer]) + gap * peer for peer in range(n)]

    def program(comm):
        sizes, displs = layout(comm.rank())
        total = sum(sizes) + gap * n
        send, recv = values(comm.rank(), total, dtype), nothing(total, dtype)
        comm.alltoall_v(send, sizes, displs, recv, sizes, displs)
        assert_same(send, values(comm.rank(), total, dtype))
        comm.alltoall_v_inplace(send, sizes, displs)
        return send, recv

    for rank, (inplace, recv) in enumerate(world.run(program)):
        sizes, displs = layout(rank)
        expected_recv, expected_inplace = nothing(recv.numel(), dtype), values(rank, recv.numel(), dtype)
        for peer in range(n):
            block = values(peer, sizes[peer], dtype, start=layout(peer)[1][rank])
            expected_recv[displs[peer] : displs[peer] + sizes[peer]] = block
            expected_inplace[displs[peer] : displs[peer] + sizes[peer]] = block
        assert_same(recv, expected_recv)
        assert_same(inplace, expected_inplace)


@given(worlds(), dtypes, st.data())
def test_S3_9_exchange_delivers_each_message_in_order(world, dtype, data):
    n = world.world_size
    ranks = st.integers(0, n - 1)
    messages = data.draw(st.lists(st.tuples(ranks, ranks, counts), max_size=20))

    def program(comm):
        rank = comm.rank()
        sends = [(values(index, count, dtype), dst) for index, (src, dst, count) in enumerate(messages) if src == rank]
        recvs = [(nothing(count, dtype), src) for src, dst, count in messages if dst == rank]
        comm.exchange(sends, recvs)
        return [tensor for tensor, _ in recvs]

    for rank, received in enumerate(world.run(program)):
        expected = [values(index, count, dtype) for index, (_, dst, count) in enumerate(messages) if dst == rank]
        assert len(received) == len(expected)
        for tensor, sent in zip(received, expected, strict=True):
            assert_same(tensor, sent)


@given(worlds(), dtypes, counts)
def test_S3_9_a_chain_of_sends_passes_a_message_along(world, dtype, count):
    def program(comm):
        tensor = values(0, count, dtype) if comm.rank() == 0 else nothing(count, dtype)
        if comm.rank() > 0:
            comm.recv(tensor, comm.rank() - 1)
        if comm.rank() < comm.nranks() - 1:
            comm.send(tensor, comm.rank() + 1)
        return tensor

    for tensor in world.run(program):
        assert_same(tensor, values(0, count, dtype))


@given(worlds(), st.data())
def test_S3_9_broadcast_object_gives_every_rank_src_s_object(world, data):
    src = data.draw(st.integers(0, world.world_size - 1))
    simple = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
    obj = data.draw(st.recursive(simple, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5))
    results = world.run(lambda comm: comm.broadcast_object(obj if comm.rank() == src else comm.rank(), src))
    assert results == [obj] * world.world_size


@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=9), st.sampled_from(FLOATS))
def test_S3_9_floats_are_combined_in_rank_order_and_rounded_once(rows, dtype):
    tensors = [torch.tensor(row, dtype=torch.float32).to(dtype) for row in rows]
    wide = np.float64 if dtype is torch.float64 else np.float32
    arrays = [tensor.to(torch.float64).numpy().astype(wide) for tensor in tensors]
    functions = {
        ReduceOp.SUM: np.add,
        ReduceOp.AVG: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }
    for op, function in functions.items():
        with np.errstate(all="ignore"):
            expected = reduce(function, arrays) / wide(len(rows) if op is ReduceOp.AVG else 1)
        result = collectives.combine(tensors, op)
        torch.testing.assert_close(result, torch.from_numpy(expected).to(dtype), rtol=0, atol=0, equal_nan=True)
