"""Cases of collectives on 1 to 5 ranks, one row of every tensor for each rank (S3.9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends.base import FLOATS
from bagua_ref.conformance.vectors.case import Case, canonical, case_id, name_of, seed_of
from bagua_ref.conformance.vectors.numbers import Numbers, tensor_of
from bagua_ref.simulation import SimulatedWorld
from bagua_ref.types import ReduceOp

__all__ = ["collective_cases"]

_SUITE, _SINCE = "collectives", "2"
_INTEGERS = (torch.uint8, torch.int64)
_CHUNK = 3
"""Elements that a rank sends to each of the others."""


def collective_cases() -> Iterator[Case]:
    """Yield every case of suite ``collectives``."""
    for n in (1, 2, 3, 5):
        for dtype in (*FLOATS, *_INTEGERS):
            yield from _moves(n, dtype)
        yield _alltoall_v(n)
    for n in (2, 3, 5):
        for dtype in FLOATS:
            for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
                yield from _reductions(n, dtype, op)
        for dtype in _INTEGERS:
            for op in ReduceOp:
                if op is not ReduceOp.AVG:
                    yield from _reductions(n, dtype, op)


def _case(operation: str, dtype: torch.dtype, name: str, inputs: dict[str, Tensor], out: Tensor, **parameters: Any) -> Case:
    return Case(_SUITE, operation, "S3.9", name_of(dtype), name, inputs, {"out": canonical(out)}, parameters, since=_SINCE)


def _on_ranks(n: int, program: Callable[[Any], Tensor]) -> list[Tensor]:
    return SimulatedWorld(n).run(program)


def _moves(n: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yield what only moves values."""
    size, root = n * _CHUNK, n // 2
    x = _values(Numbers(seed_of(case_id(_SUITE, "moves", name_of(dtype), str(n)))), n * size, dtype).view(n, size)

    def broadcast(comm: Any) -> Tensor:
        mine = x[comm.rank()].clone()
        comm.broadcast(mine, root)
        return mine

    def gather(comm: Any) -> Tensor:
        out = torch.empty(n * size, dtype=dtype)
        comm.gather(x[comm.rank()], out, root)
        return out

    def allgather(comm: Any) -> Tensor:
        out = torch.empty(n * size, dtype=dtype)
        comm.allgather(x[comm.rank()], out)
        return out

    def scatter(comm: Any) -> Tensor:
        out = torch.empty(_CHUNK, dtype=dtype)
        comm.scatter(x[root], out, root)
        return out

    def alltoall(comm: Any) -> Tensor:
        out = torch.empty(size, dtype=dtype)
        comm.alltoall(x[comm.rank()], out)
        return out

    name = str(n)
    yield _case("broadcast", dtype, name, {"x": x}, torch.stack(_on_ranks(n, broadcast)), root=root)
    yield _case("gather", dtype, name, {"x": x}, _on_ranks(n, gather)[root], root=root)
    yield _case("allgather", dtype, name, {"x": x}, torch.stack(_on_ranks(n, allgather)))
    yield _case("scatter", dtype, name, {"x": x[root]}, torch.stack(_on_ranks(n, scatter)), root=root, nranks=n)
    yield _case("alltoall", dtype, name, {"x": x}, torch.stack(_on_ranks(n, alltoall)))


def _alltoall_v(n: int) -> Case:
    """Return an exchange of unequal counts, some of them 0, with gaps between what is sent and between what arrives."""
    counts = [[(2 * source + 3 * destination) % 4 for destination in range(n)] for source in range(n)]
    arriving = [[counts[source][destination] for source in range(n)] for destination in range(n)]
    send_displs, recv_displs = [_with_gaps(row, 1) for row in counts], [_with_gaps(row, 2) for row in arriving]
    x = torch.arange(n * 5 * n, dtype=torch.int64).view(n, 5 * n) + 1000
    before = -torch.arange(n * 6 * n, dtype=torch.int64).view(n, 6 * n) - 1

    def program(comm: Any) -> Tensor:
        r, out = comm.rank(), before[comm.rank()].clone()
        comm.alltoall_v(x[r], counts[r], send_displs[r], out, arriving[r], recv_displs[r])
        return out

    inputs = {
        "x": x, "before": before, "send_counts": torch.tensor(counts), "send_displs": torch.tensor(send_displs),
        "recv_counts": torch.tensor(arriving), "recv_displs": torch.tensor(recv_displs),
    }  # fmt: skip
    return _case("alltoall_v", torch.int64, str(n), inputs, torch.stack(_on_ranks(n, program)))


def _with_gaps(counts: list[int], gap: int) -> list[int]:
    """Return displacements at which the last peer's values come first, with a gap before each peer's."""
    displs, place = [0] * len(counts), 0
    for peer in reversed(range(len(counts))):
        place += gap
        displs[peer] = place
        place += counts[peer]
    return displs


def _reductions(n: int, dtype: torch.dtype, op: ReduceOp) -> Iterator[Case]:
    """Yield a reduction to all, to one, and in chunks."""
    size, root, name = n * _CHUNK, n - 1, f"{op.name.lower()}-{n}"
    x = _terms(Numbers(seed_of(case_id(_SUITE, "reductions", name_of(dtype), name))), op, n * size, dtype).view(n, size)

    def allreduce(comm: Any) -> Tensor:
        mine = x[comm.rank()].clone()
        comm.allreduce_inplace(mine, op)
        return mine

    def reduce(comm: Any) -> Tensor:
        mine = x[comm.rank()].clone()
        comm.reduce_inplace(mine, root, op)
        return mine

    def reduce_scatter(comm: Any) -> Tensor:
        out = torch.empty(_CHUNK, dtype=dtype)
        comm.reduce_scatter(x[comm.rank()], out, op)
        return out

    settings: dict[str, dict[str, Any]] = {"allreduce": {}, "reduce": {"root": root}, "reduce_scatter": {}}
    for program in (allreduce, reduce, reduce_scatter):
        operation = program.__name__
        out = canonical(torch.stack(_on_ranks(n, program)))
        parameters, tolerance, magnitudes = {"op": op.name, **settings[operation]}, "EXACT", {}
        if op is ReduceOp.AVG and n & (n - 1):  # a quotient is rounded; where, is the library's choice
            total = x.double().abs().sum(0) / n
            tolerance = f"SUM({n})"
            magnitudes = {"out": total.view(n, -1) if operation == "reduce_scatter" else total.expand(n, -1).contiguous()}
        flags = ("valid", "edge") if op in (ReduceOp.MIN, ReduceOp.MAX) or not dtype.is_floating_point else ("valid",)
        yield Case(
            _SUITE, operation, "S3.9", name_of(dtype), name, {"x": x}, {"out": out}, parameters, flags, tolerance, magnitudes,
            since=_SINCE,
        )  # fmt: skip


def _values(numbers: Numbers, size: int, dtype: torch.dtype) -> Tensor:
    """Return numbers that use all bits of the dtype."""
    if dtype.is_floating_point:
        return canonical(torch.where(torch.arange(size) % 4 == 0, numbers.special(size, dtype), numbers.wide(size, dtype)))
    bits = 8 * dtype.itemsize
    return torch.tensor([numbers.below(256) - (0 if bits == 8 else 128) for _ in range(size)]).mul(1 << (bits - 8)).to(dtype)


def _terms(numbers: Numbers, op: ReduceOp, size: int, dtype: torch.dtype) -> Tensor:
    """Return terms whose reduction is the same in any order; integers wrap around, and the largest of a NaN is NaN."""
    if not dtype.is_floating_point:
        return _values(numbers, size, dtype) + torch.tensor([numbers.below(8) for _ in range(size)]).to(dtype)
    if op is ReduceOp.PRODUCT:
        return tensor_of([(1.0, -1.0, 2.0, -0.5, 3.0)[numbers.below(5)] for _ in range(size)], dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        infinite = tensor_of([(1.0, float("inf"), float("-inf"), float("nan"))[numbers.below(4)] for _ in range(size)], dtype)
        return canonical(torch.where(torch.arange(size) % 5 == 0, infinite, numbers.wide(size, dtype)))
    return numbers.eighths(size, dtype)
