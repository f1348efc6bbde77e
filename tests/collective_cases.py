"""Test cases for every collective, with expected values in closed form; each case runs on every rank of any world.

Expected values are computed with Python's integers and operators, without the package. Each case takes the communicator under
test and returns nothing; a failed assertion on one rank fails the world.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import pytest
import torch
from torch import Tensor

import bagua_ref
from bagua_ref import ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
MOVABLE = (*FLOATS, *INTEGERS, torch.int16, torch.bool, torch.complex64)
SIZES = (0, 1, 7, 1000)
OPS = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def value(rank: int, i: int) -> int:
    """Return rank's tensor, whose elements are 1 or 2 so that products over nine ranks stay exact in bfloat16."""
    return 1 + (rank * 5 + i * 3 + i // 7) % 2


def filled(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([value(rank, i) for i in range(size)], dtype=torch.int64).to(dtype)


def combined(n: int, size: int, dtype: torch.dtype, op: ReduceOp) -> Tensor:
    total = torch.tensor([functools.reduce(OPS[op], (value(r, i) for r in range(n))) for i in range(size)], dtype=torch.int64)
    if op is ReduceOp.AVG:
        return (total.double() / n).to(torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)
    return total.to(dtype)  # integers wrap around


def reductions():
    for dtype in (*FLOATS, *INTEGERS):
        for op in OPS:
            if not (dtype in FLOATS and op in BITWISE) and not (dtype in INTEGERS and op is ReduceOp.AVG):
                yield dtype, op


def same(actual: Tensor, expected: Tensor) -> None:
    """Compare tensors exactly; torch.testing's first use in each worker would import half of torch."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected), f"{actual.view(-1)[:20]}... is not {expected.view(-1)[:20]}..."


def broadcast(comm) -> None:
    for dtype in MOVABLE:
        for src in range(comm.nranks()):
            for size in SIZES:
                x = filled(comm.rank(), size, dtype)
                bagua_ref.broadcast(x, src, comm)
                same(x, filled(src, size, dtype))
    scalar = torch.tensor(float(comm.rank()))
    bagua_ref.broadcast(scalar, comm.nranks() - 1, comm)
    assert scalar.item() == comm.nranks() - 1


def broadcast_object(comm) -> None:
    for src in range(comm.nranks()):
        sent = {"rank": comm.rank(), "long": "x" * 10_000 * (comm.rank() + 1), "nothing": None}
        received = bagua_ref.broadcast_object(sent, src, comm)
        assert received == {"rank": src, "long": "x" * 10_000 * (src + 1), "nothing": None}


def reduce(comm) -> None:
    n, rank = comm.nranks(), comm.rank()
    for dtype, op in reductions():
        for dst in {0, n - 1}:
            for size in SIZES:
                send, recv = filled(rank, size, dtype), torch.full((size,), 3).to(dtype)
                bagua_ref.reduce(send, recv, dst, op, comm)
                same(send, filled(rank, size, dtype))
                same(recv, combined(n, size, dtype, op) if rank == dst else torch.full((size,), 3).to(dtype))
                bagua_ref.reduce_inplace(send, dst, op, comm)
                same(send, combined(n, size, dtype, op) if rank == dst else filled(rank, size, dtype))


def allreduce(comm) -> None:
    n, rank = comm.nranks(), comm.rank()
    for dtype, op in reductions():
        for size in SIZES:
            send, recv = filled(rank, size, dtype), torch.zeros(size, dtype=dtype)
            bagua_ref.allreduce(send, recv, op, comm)
            same(send, filled(rank, size, dtype))
            same(recv, combined(n, size, dtype, op))
            bagua_ref.allreduce_inplace(send, op, comm)
            same(send, recv)


def allreduce_large(comm) -> None:
    """Sizes at which transports switch algorithms, and that no number of ranks divides."""
    n = comm.nranks()
    for dtype, op in reductions():
        size = 300_007 // dtype.itemsize
        pattern = combined(n, 14, dtype, op)  # value() has period 14.
        x = filled(comm.rank(), 14, dtype).repeat(size // 14 + 1)[:size]
        bagua_ref.allreduce_inplace(x, op, comm)
        same(x, pattern.repeat(size // 14 + 1)[:size])


def reduce_scatter(comm) -> None:
    n, rank = comm.nranks(), comm.rank()
    for dtype, op in reductions():
        for count in (0, 1, 5, 333):
            send, recv = filled(rank, n * count, dtype), torch.zeros(count, dtype=dtype)
            expected = combined(n, n * count, dtype, op)[rank * count : (rank + 1) * count]
            bagua_ref.reduce_scatter(send, recv, op, comm)
            same(send, filled(rank, n * count, dtype))
            same(recv, expected)
            bagua_ref.reduce_scatter_inplace(send, op, comm)
            others = filled(rank, n * count, dtype)
            others[rank * count : (rank + 1) * count] = expected
            same(send, others)  # the other chunks are unchanged


def allgather(comm) -> None:
    n, rank = comm.nranks(), comm.rank()
    for dtype in MOVABLE:
        for count in (0, 1, 5, 333):
            everything = torch.cat([filled(r, count, dtype) for r in range(n)])
            recv = torch.zeros(n * count, dtype=dtype)
            bagua_ref.allgather(filled(rank, count, dtype), recv, comm)
            same(recv, everything)
            x = torch.zeros(n * count, dtype=dtype)
            x[rank * count : (rank + 1) * count] = filled(rank, count, dtype)
            bagua_ref.allgather_inplace(x, comm)
            same(x, everything)


def gather(comm) -> None:
    n, rank = comm.nranks(), comm.rank()
    for dtype in MOVABLE:
        for dst in {0, n - 1}:
            for count in (0, 1, 333):
                everything = torch.cat([filled(r, count, dtype) for r in range(n)])
                recv = torch.zeros(n * count, dtype=dtype)
                bagua_ref.gather(filled(rank, count, dtype), recv, dst, comm)
                same(recv, everything if rank == dst else torch.zeros(n * count, dtype=dtype))
                x = filled(rank, count, dtype)
                if rank == dst:
                    x = torch.zeros(n * count, dtype=dtype)
                    x[rank * count : (rank + 1) * count] = filled(rank, count, dtype)
                bagua_ref.gather_inplace(x, count, dst, comm)
                same(x, everything if rank == dst else filled(rank, count, dtype))


def scatter(comm) -> None:
    n, rank = comm.nranks(), comm.rank()
    for dtype in MOVABLE:
        for src in {0, n - 1}:
            for count in (0, 1, 333):
                everything = filled(src, n * count, dtype)
                mine = everything[rank * count : (rank + 1) * count]
                send, recv = filled(rank, n * count, dtype), torch.zeros(count, dtype=dtype)
                bagua_ref.scatter(send, recv, src, comm)
                same(recv, mine)
                x = everything.clone() if rank == src else torch.zeros(count, dtype=dtype)
                bagua_ref.scatter_inplace(x, count, src, comm)
                same(x, everything if rank == src else mine)


def alltoall(comm) -> None:
    n, rank = comm.nranks(), comm.rank()
    for dtype in MOVABLE:
        for count in (0, 1, 333):
            expected = torch.cat([filled(s, n * count, dtype)[rank * count : (rank + 1) * count] for s in range(n)])
            send, recv = filled(rank, n * count, dtype), torch.zeros(n * count, dtype=dtype)
            bagua_ref.alltoall(send, recv, comm)
            same(send, filled(rank, n * count, dtype))
            same(recv, expected)
            bagua_ref.alltoall_inplace(send, comm)
            same(send, expected)


def alltoall_v(comm) -> None:
    """Rank s sends (s + 2 d) mod 4 elements to d, with a gap of one before each; some send nothing."""
    n, rank = comm.nranks(), comm.rank()

    def layout(counts):
        starts = [1]
        for count in counts[:-1]:
            starts.append(starts[-1] + count + 1)
        return starts, starts[-1] + counts[-1]

    def sent(s, d):
        return [100 * s + 10 * d + i for i in range((s + 2 * d) % 4)]

    for dtype in (torch.int64, torch.float32, torch.int16):
        send_counts = [len(sent(rank, d)) for d in range(n)]
        recv_counts = [len(sent(s, rank)) for s in range(n)]
        (send_displs, send_size), (recv_displs, recv_size) = layout(send_counts), layout(recv_counts)
        send, recv = torch.full((send_size,), -1, dtype=dtype), torch.full((recv_size,), -7, dtype=dtype)
        expected = recv.clone()
        for peer in range(n):
            send[send_displs[peer] :][: send_counts[peer]] = torch.tensor(sent(rank, peer)).to(dtype)
            expected[recv_displs[peer] :][: recv_counts[peer]] = torch.tensor(sent(peer, rank)).to(dtype)
        bagua_ref.alltoall_v(send, send_counts, send_displs, recv, recv_counts, recv_displs, comm)
        same(recv, expected)  # including the gaps

        counts = [(rank + peer) % 3 for peer in range(n)]  # the same in both directions
        displs, size = layout(counts)
        x, expected = torch.full((size,), -7, dtype=dtype), torch.full((size,), -7, dtype=dtype)
        for peer in range(n):
            x[displs[peer] :][: counts[peer]] = 10 * rank + peer
            expected[displs[peer] :][: counts[peer]] = 10 * peer + rank
        bagua_ref.alltoall_v_inplace(x, counts, displs, comm)
        same(x, expected)


def send_and_recv(comm) -> None:
    """Two messages from each rank to the next, in order; even ranks send first."""
    n, rank = comm.nranks(), comm.rank()
    if n == 1:
        return
    for dtype in MOVABLE:
        received = [torch.zeros(5, dtype=dtype), torch.zeros(2, dtype=dtype)]

        def send_both(dtype=dtype):
            bagua_ref.send(filled(rank, 5, dtype), (rank + 1) % n, comm)
            bagua_ref.send(filled(rank + 1, 2, dtype), (rank + 1) % n, comm)

        if rank % 2 == 0:
            send_both()
        for tensor in received:
            bagua_ref.recv(tensor, (rank - 1) % n, comm)
        if rank % 2 == 1:
            send_both()
        same(received[0], filled((rank - 1) % n, 5, dtype))
        same(received[1], filled((rank - 1) % n + 1, 2, dtype))


def exchange(comm) -> None:
    """A ring in both directions; with two ranks both neighbours are one rank, with one rank they are the rank itself."""
    n, rank = comm.nranks(), comm.rank()
    left, right = (rank - 1) % n, (rank + 1) % n
    for size in (0, 1, 100_000):
        to_left, to_right = torch.full((size,), 10.0 * rank), torch.full((size,), 10.0 * rank + 1)
        from_left, from_right = torch.zeros(size), torch.zeros(size)
        # Messages from the same rank arrive in the order in which they were sent.
        comm.exchange([(to_left, left), (to_right, right)], [(from_right, right), (from_left, left)])
        same(from_left, torch.full((size,), 10.0 * left + 1))
        same(from_right, torch.full((size,), 10.0 * right))


def coalesced(comm) -> None:
    n, rank = comm.nranks(), comm.rank()

    def tensors(r, large=False):
        return [
            torch.full((3, 2), float(r)),
            torch.full((2,), r, dtype=torch.int64),
            torch.full((4, 3), r + 0.5).t(),  # not contiguous
            torch.zeros(0),
            torch.full((2, 3, 4, 4), float(r), dtype=torch.bfloat16).to(memory_format=torch.channels_last),
            torch.nn.Parameter(torch.full((5,), float(r))),
            torch.tensor(float(r)),
            torch.full((9_000_000 if large else 1,), float(r)),  # above the size up to which tensors are copied together
        ]

    mine = tensors(rank, large=True)
    bagua_ref.broadcast_coalesced(mine, n - 1, comm)
    for actual, expected in zip(mine, tensors(n - 1, large=True), strict=True):
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
    mine = tensors(rank)
    bagua_ref.allreduce_coalesced_inplace(mine, comm=comm)
    for i, actual in enumerate(mine):
        assert torch.equal(actual, sum((tensors(r)[i] for r in range(1, n)), start=tensors(0)[i].detach()))
    bagua_ref.broadcast_coalesced([], 0, comm)
    for nan in (False, True):
        mine = [
            torch.full((2, 1), math.nan if nan else float(rank)).expand(2, 3),
            torch.full((1,), rank).expand(4),
            torch.zeros(3) + rank,
        ]
        bagua_ref.broadcast_coalesced(mine, 0, comm)
        assert str(mine[0].tolist()) == str([[math.nan if nan else 0.0] * 3] * 2)
        assert [t.tolist() for t in mine[1:]] == [[0] * 4, [0] * 3]
        assert [t.stride() for t in mine] == [(1, 0), (0,), (1,)]
    mine = [torch.full((1,), float(rank)).expand(4), torch.ones(2)]
    bagua_ref.allreduce_coalesced_inplace(mine, comm=comm)
    assert [t.tolist() for t in mine] == [[n * (n - 1) / 2] * 4, [n] * 2]
    apart = torch.arange(4.0) if rank == 0 else torch.zeros(1).expand(4)
    if rank == 0:
        bagua_ref.broadcast_coalesced([apart, torch.ones(2)], 0, comm)
    else:
        with pytest.raises(ValueError, match=r"shape \(4,\) and strides \(0,\) is expanded.*tensor.clone\(\)"):
            bagua_ref.broadcast_coalesced([apart, torch.ones(2)], 0, comm)
        assert apart.tolist() == [0.0] * 4


def parameters(comm) -> None:
    """Leaf tensors that require a gradient are accepted."""
    n, rank = comm.nranks(), comm.rank()
    for size in (3, 200_000):
        weight = torch.nn.Parameter(torch.full((n * size,), float(rank)))
        bagua_ref.broadcast(weight, n - 1, comm)
        assert torch.equal(weight, torch.full((n * size,), n - 1.0))
        bagua_ref.allreduce_inplace(weight, ReduceOp.AVG, comm)
        bagua_ref.reduce_scatter_inplace(weight, ReduceOp.AVG, comm)
        bagua_ref.reduce_inplace(weight, 0, ReduceOp.AVG, comm)
        bagua_ref.allgather_inplace(weight, comm)
        bagua_ref.alltoall_inplace(weight, comm)
        assert torch.equal(weight, torch.full((n * size,), n - 1.0))
        assert weight.is_leaf
        assert weight.requires_grad


def refusals(comm) -> None:
    """Bad input is refused before anything is sent, and the communicator stays usable."""
    n = comm.nranks()
    x = torch.ones(2 * n)
    bad = [
        (ValueError, "contiguous", lambda: bagua_ref.broadcast(torch.ones(3, 2).t(), 0, comm)),
        (ValueError, "contiguous", lambda: bagua_ref.allreduce_inplace(torch.ones(4)[::2], comm=comm)),
        (ValueError, "contiguous", lambda: bagua_ref.broadcast(torch.eye(2).to_sparse(), 0, comm)),
        (ValueError, "conjugated", lambda: bagua_ref.broadcast(torch.ones(2, dtype=torch.complex64).conj(), 0, comm)),
        (ValueError, "src=-1", lambda: bagua_ref.broadcast(x, -1, comm)),
        (ValueError, f"src={n}", lambda: bagua_ref.broadcast_object(x, n, comm)),
        (ValueError, f"dst={n}", lambda: bagua_ref.send(x, n, comm)),
        (ValueError, f"src={comm.rank()}", lambda: bagua_ref.recv(x, comm.rank(), comm)),
        (TypeError, "src=1.0", lambda: bagua_ref.broadcast(x, 1.0, comm)),
        (ValueError, "op=4", lambda: bagua_ref.allreduce_inplace(x, 4, comm)),
        (TypeError, "AVG", lambda: bagua_ref.allreduce_inplace(x.long(), ReduceOp.AVG, comm)),
        (TypeError, "BXOR", lambda: bagua_ref.reduce_scatter_inplace(x, ReduceOp.BXOR, comm)),
        (TypeError, "torch.bool", lambda: bagua_ref.allreduce_inplace(x.bool(), comm=comm)),
        (TypeError, "torch.int16", lambda: bagua_ref.allreduce_coalesced_inplace([x, x.short()], comm=comm)),
        (TypeError, "torch.float64", lambda: bagua_ref.allreduce(x, x.double(), comm=comm)),
        (ValueError, "elements", lambda: bagua_ref.allgather(x, torch.ones(2 * n * n + 1), comm)),
        (ValueError, "elements", lambda: bagua_ref.reduce_scatter(torch.ones(2 * n + 1), torch.ones(2), comm=comm)),
        (ValueError, "count", lambda: bagua_ref.gather_inplace(torch.ones(n + 1), n, 0, comm)),
        (ValueError, "counts", lambda: bagua_ref.alltoall_v_inplace(x, [-1] * n, [0] * n, comm)),
        (ValueError, "displs", lambda: bagua_ref.alltoall_v_inplace(x, [1] * n, [2 * n] * n, comm)),
        (TypeError, "Tensor", lambda: bagua_ref.broadcast([1.0], 0, comm)),
        (TypeError, "comm='global'", lambda: bagua_ref.broadcast(x, 0, "global")),
    ]
    if n > 1:
        odd = torch.ones(2 * n + 1)
        bad += [
            (ValueError, "chunks", lambda: bagua_ref.alltoall_inplace(odd, comm)),
            (ValueError, "chunks", lambda: bagua_ref.allgather_inplace(odd, comm)),
        ]
    for kind, message, call in bad:
        with pytest.raises(kind, match=message):
            call()
    bagua_ref.barrier(comm)
    bagua_ref.allreduce_inplace(x, comm=comm)
    same(x, torch.full((2 * n,), float(n)))


def integers_wrap_around(comm) -> None:
    """Integer sums and products wrap around, whichever ranks contribute the large values."""
    n, rank = comm.nranks(), comm.rank()

    def wrapped(number: int, dtype: torch.dtype) -> int:
        lowest, span = torch.iinfo(dtype).min, 2 ** (8 * dtype.itemsize)
        return (number - lowest) % span + lowest

    def brought(r: int, size: int, dtype: torch.dtype) -> list[int]:
        ends = torch.iinfo(dtype)
        return [ends.max - r - i % 5 if (r + i) % 3 else ends.min + r + i % 3 for i in range(size)]

    for dtype in INTEGERS:
        for op, combine in ((ReduceOp.SUM, sum), (ReduceOp.PRODUCT, math.prod)):
            for size in (n, 210 * n):
                columns = zip(*(brought(r, size, dtype) for r in range(n)), strict=True)
                expected = torch.tensor([wrapped(combine(column), dtype) for column in columns], dtype=dtype)
                everywhere(comm, torch.tensor(brought(rank, size, dtype), dtype=dtype), op, expected)


def extremes_of_nan(comm) -> None:
    """A NaN on one rank, at any position, makes MIN and MAX NaN at that position only."""
    n, rank = comm.nranks(), comm.rank()
    for dtype in FLOATS:
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            for who in range(n):
                for size in (n, 35 * n):
                    x, expected = filled(rank, size, dtype), combined(n, size, dtype, op)
                    places = slice(who, None, 3)
                    expected[places] = math.nan
                    if rank == who:
                        x[places] = math.nan
                    everywhere(comm, x, op, expected)


def everywhere(comm, x: Tensor, op: ReduceOp, expected: Tensor) -> None:
    """Check every reducing collective on ``x``, whose size is a multiple of the number of ranks."""
    n, rank = comm.nranks(), comm.rank()
    mine = expected.chunk(n)[rank]
    recv = torch.empty_like(x)
    comm.allreduce(x, recv, op)
    alike(recv, expected)
    comm.reduce(x, recv := torch.empty_like(x), n - 1, op)
    if rank == n - 1:
        alike(recv, expected)
    comm.reduce_scatter(x, recv := torch.empty_like(mine), op)
    alike(recv, mine)
    for reduce_all in (
        lambda y: comm.allreduce_inplace(y, op),
        lambda y: bagua_ref.allreduce_coalesced_inplace([y[:1], y[1:]], op, comm),
    ):
        reduce_all(y := x.clone())
        alike(y, expected)
    comm.reduce_scatter_inplace(y := x.clone(), op)
    alike(y.chunk(n)[rank], mine)
    comm.reduce_inplace(y := x.clone(), 0, op)
    if rank == 0:
        alike(y, expected)


def alike(actual: Tensor, expected: Tensor) -> None:
    """As `same`, but NaNs are equal."""
    same(actual.isnan(), expected.isnan())
    same(actual.nan_to_num(), expected.nan_to_num())


def backend_tensors(comm) -> None:
    """The original's calls: ``comm.allreduce_inplace(x.ensure_bagua_tensor().bagua_backend_tensor(), op)``, for each collective."""
    n, rank = comm.nranks(), comm.rank()

    def of(tensor: Tensor):
        return tensor.ensure_bagua_tensor().bagua_backend_tensor()

    def small(r: int) -> Tensor:
        return torch.full((2,), 10.0 * r + 1)

    def mean() -> Tensor:
        return torch.full((2,), 10.0 * (n - 1) / 2 + 1)

    everything = torch.cat([small(r) for r in range(n)])
    chunk = slice(2 * rank, 2 * rank + 2)
    last = n - 1
    comm.allreduce_inplace(of(x := small(rank)), ReduceOp.AVG)
    same(x, mean())
    comm.allreduce(of(small(rank)), of(x := torch.zeros(2)), int(ReduceOp.AVG))
    same(x, mean())
    comm.reduce(of(small(rank)), of(x := mean()), last, op=ReduceOp.AVG)
    same(x, mean())
    comm.reduce_inplace(of(x := small(rank)), last, ReduceOp.AVG)
    same(x, mean() if rank == last else small(rank))
    comm.broadcast(of(x := small(rank)), last)
    same(x, small(last))
    comm.allgather(of(small(rank)), of(x := torch.zeros(2 * n)))
    same(x, everything)
    comm.allgather_inplace(of(x := torch.full((2 * n,), 10.0 * rank + 1)))
    same(x, everything)
    comm.gather(of(small(rank)), of(x := everything.clone()), last)
    same(x, everything)
    comm.gather_inplace(of(x := everything.clone() if rank == last else small(rank)), 2, last)
    same(x, everything if rank == last else small(rank))
    comm.scatter(of(everything.clone()), of(x := torch.zeros(2)), last)
    same(x, small(rank))
    comm.scatter_inplace(of(x := everything.clone() if rank == last else torch.zeros(2)), 2, last)
    same(x, everything if rank == last else small(rank))
    comm.reduce_scatter(of(everything.clone()), of(x := torch.zeros(2)), ReduceOp.AVG)
    same(x, small(rank))
    comm.reduce_scatter_inplace(of(x := everything + rank), ReduceOp.AVG)
    same(x[chunk], small(rank) + (n - 1) / 2)
    comm.alltoall(of(everything.clone()), of(x := torch.zeros(2 * n)))
    same(x, small(rank).repeat(n))
    comm.alltoall_inplace(of(x := everything.clone()))
    same(x, small(rank).repeat(n))
    counts, displs = [2] * n, [2 * r for r in range(n)]
    comm.alltoall_v(of(everything.clone()), counts, displs, of(x := torch.zeros(2 * n)), counts, displs)
    same(x, small(rank).repeat(n))
    comm.alltoall_v_inplace(of(x := everything.clone()), counts, displs)
    same(x, small(rank).repeat(n))
    if n > 1 and rank < 2:
        (comm.send if rank == 0 else comm.recv)(of(x := small(rank)), 1 - rank)
        same(x, small(0))
    weight = torch.nn.Parameter(torch.zeros(2)).ensure_bagua_tensor(getter_closure=lambda p: p.grad)
    with pytest.raises(ValueError, match="no effective tensor; for a gradient call bagua_ensure_grad"):
        comm.allreduce_inplace(weight.bagua_backend_tensor())
    backend_tensor = weight.bagua_backend_tensor()
    weight.grad = small(rank)  # raised when the collective is called
    bagua_ref.allreduce_inplace(backend_tensor, ReduceOp.AVG, comm)
    same(weight.grad, mean())
    same(weight.detach(), torch.zeros(2))
    comm.reduce_scatter_inplace(of(weight := torch.nn.Parameter(everything.clone())), ReduceOp.AVG)
    same(weight.detach(), everything)


def outsiders_see_nothing(outside) -> None:
    """Every collective on a communicator without this rank returns immediately and changes nothing."""
    x, y = torch.arange(4.0), torch.arange(8.0)
    assert outside.rank() == -1
    for call in (
        lambda: bagua_ref.send(x, 0, outside),
        lambda: bagua_ref.recv(x, 0, outside),
        lambda: bagua_ref.broadcast(x, 0, outside),
        lambda: bagua_ref.broadcast_coalesced([x, y], 0, outside),
        lambda: bagua_ref.reduce(x, y, 0, comm=outside),
        lambda: bagua_ref.reduce_inplace(x, 0, comm=outside),
        lambda: bagua_ref.allreduce(x, y, comm=outside),
        lambda: bagua_ref.allreduce_inplace(x, comm=outside),
        lambda: bagua_ref.allreduce_coalesced_inplace([x, y], comm=outside),
        lambda: bagua_ref.allgather(x, y, outside),
        lambda: bagua_ref.allgather_inplace(x, outside),
        lambda: bagua_ref.gather(x, y, 0, outside),
        lambda: bagua_ref.gather_inplace(x, 2, 0, outside),
        lambda: bagua_ref.scatter(x, y, 0, outside),
        lambda: bagua_ref.scatter_inplace(x, 2, 0, outside),
        lambda: bagua_ref.reduce_scatter(y, x, comm=outside),
        lambda: bagua_ref.reduce_scatter_inplace(x, comm=outside),
        lambda: bagua_ref.alltoall(x, x, outside),
        lambda: bagua_ref.alltoall_inplace(x, outside),
        lambda: bagua_ref.alltoall_v(x, [1], [0], y, [1], [0], outside),
        lambda: bagua_ref.alltoall_v_inplace(x, [1], [0], outside),
        lambda: bagua_ref.barrier(outside),
    ):
        assert call() is None
    assert bagua_ref.broadcast_object("mine", 0, outside) == "mine"
    same(x, torch.arange(4.0))
    same(y, torch.arange(8.0))


CASES = (
    broadcast, broadcast_object, reduce, allreduce, allreduce_large, reduce_scatter, allgather, gather, scatter, alltoall,
    alltoall_v, send_and_recv, exchange, coalesced, parameters, integers_wrap_around, extremes_of_nan, backend_tensors, refusals,
)  # fmt: skip


def ones(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(count, dtype=dtype)


DIFFERENT_CALLS: dict[str, tuple[Any, Any, str, str]] = {
    "operations of a reduce_scatter": (
        lambda comm: comm.reduce_scatter_inplace(ones(2 * comm.nranks())),
        lambda comm: comm.reduce_scatter_inplace(ones(2 * comm.nranks()), ReduceOp.MAX),
        "reduce_scatter(op=SUM)", "reduce_scatter(op=MAX)",
    ),
    "operations of an allreduce": (
        lambda comm: comm.allreduce_inplace(ones(1)),
        lambda comm: comm.allreduce_inplace(ones(1), ReduceOp.AVG),
        "allreduce(op=SUM) of 1 float32 element", "allreduce(op=AVG)",
    ),
    "operations of a large allreduce": (
        lambda comm: comm.allreduce_inplace(ones(300_000)),
        lambda comm: comm.allreduce_inplace(ones(300_000), ReduceOp.AVG),
        "allreduce(op=SUM) of 300000 float32 elements", "allreduce(op=AVG)",
    ),
    "operations of a reduce": (
        lambda comm: comm.reduce_inplace(ones(2), 0),
        lambda comm: comm.reduce_inplace(ones(2), 0, ReduceOp.PRODUCT),
        "reduce(dst=0, op=SUM)", "reduce(dst=0, op=PRODUCT)",
    ),
    "dtypes of an allgather": (
        lambda comm: comm.allgather_inplace(ones(comm.nranks())),
        lambda comm: comm.allgather_inplace(ones(comm.nranks(), torch.int32)),
        "allgather() of 1 float32 element", "allgather() of 1 int32 element",
    ),
    "dtypes of an allreduce": (
        lambda comm: comm.allreduce_inplace(ones(4, torch.float16)),
        lambda comm: comm.allreduce_inplace(ones(4, torch.bfloat16)),
        "4 float16 elements", "4 bfloat16 elements",
    ),
    "sizes of an alltoall": (
        lambda comm: comm.alltoall_inplace(ones(comm.nranks())),
        lambda comm: comm.alltoall_inplace(ones(2 * comm.nranks())),
        "alltoall() of ", "alltoall() of ",
    ),
    "sizes of a scatter": (
        lambda comm: comm.scatter_inplace(ones(comm.nranks()) if comm.rank() == 0 else ones(1), 1, 0),
        lambda comm: comm.scatter_inplace(ones(2), 2, 0),
        "scatter(src=0) of 1 float32 element", "scatter(src=0) of 2 float32 elements",
    ),
    "an empty tensor": (
        lambda comm: comm.allreduce_inplace(ones(0)),
        lambda comm: comm.allreduce_inplace(ones(300)),
        "of 0 float32 elements", "of 300 float32 elements",
    ),
    "roots of a broadcast": (
        lambda comm: comm.broadcast(ones(2), 0),
        lambda comm: comm.broadcast(ones(2), 1),
        "broadcast(src=0)", "broadcast(src=1)",
    ),
    "roots of a gather": (
        lambda comm: comm.gather(ones(2), ones(2 * comm.nranks()), 0),
        lambda comm: comm.gather(ones(2), ones(2 * comm.nranks()), 1),
        "gather(dst=0)", "gather(dst=1)",
    ),
    "collectives": (
        lambda comm: comm.broadcast(ones(2), 0),
        lambda comm: comm.allreduce_inplace(ones(2)),
        "broadcast(src=0)", "allreduce(op=SUM)",
    ),
    "a barrier": (lambda comm: comm.barrier(), lambda comm: comm.alltoall_inplace(ones(comm.nranks())), "barrier()", "alltoall()"),
}  # fmt: skip
"""What the first ranks call, and what the last one calls instead; what the error says of either."""

DIFFERENT_MESSAGES: dict[str, tuple[Any, Any, str, str]] = {
    "dtypes": (
        lambda comm: comm.send(ones(2), 1),
        lambda comm: comm.recv(ones(2, torch.int32), 0),
        "2 float32 elements", "2 int32 elements",
    ),
    "sizes": (lambda comm: comm.send(ones(2), 1), lambda comm: comm.recv(ones(3), 0), "2 float32 elements", "3 float32 elements"),
    "counts of an alltoall_v": (
        lambda comm: comm.alltoall_v(ones(4), [1, 2], [0, 1], ones(4), [1, 1], [0, 1]),
        lambda comm: comm.alltoall_v(ones(4), [1, 1], [0, 1], ones(4), [3, 1], [0, 3]),
        "2 float32 elements", "3 float32 elements",
    ),
}  # fmt: skip
"""What rank 0 sends, and what rank 1 receives; what the error says of either."""
