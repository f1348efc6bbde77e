"""Arguments and expected results of collectives: numbers that identify rank and index."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import Draw
from bagua_ref.conformance.cases.table import FLOATS, REDUCED
from bagua_ref.conformance.expected import collectives_plain as plain
from bagua_ref.types import ReduceOp

__all__ = [
    "BITWISE",
    "FLOATS",
    "METHODS",
    "MOVABLE",
    "REDUCED",
    "REDUCING",
    "REDUCTIONS",
    "CollectiveCall",
    "collective_call",
    "counts",
    "nothing",
    "root_of",
    "terms",
    "values",
]

MOVABLE = (*FLOATS, *REDUCED, "int16", "bool", "complex64", "complex128")
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
REDUCTIONS = (
    *((op, name) for op in ReduceOp if op not in BITWISE for name in FLOATS),
    *((op, name) for op in ReduceOp if op is not ReduceOp.AVG for name in REDUCED),
)
REDUCING = ("allreduce", "reduce", "reduce_scatter")
METHODS = (*REDUCING, "broadcast", "allgather", "gather", "scatter", "alltoall")
"""The collectives on tensors; all but broadcast also end in ``_inplace``."""

counts = st.integers(0, 7) | st.integers(8, 300)

_FACTOR = {
    torch.uint8: 77,
    torch.int8: 77,
    torch.int16: 20_277,
    torch.int32: 0x3C6EF373,
    torch.int64: 0x2545F4914F6CDD1D,
}
"""Odd factors, so that wrapped products differ if their factors do, and all bits of the dtype
occur.
"""
_SPECIAL = (-0.0, float("inf"), float("-inf"), float("nan"))


def _numbers(rank: int, count: int, start: int, ranks: int, places: int, most: int) -> Tensor:
    place = torch.arange(start, start + count)
    return (ranks * rank + places * place + rank * place) % most + 1


def values(rank: int, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return a rank's values: distinct between indices and between neighbouring ranks, using all
    bits of the dtype.
    """
    numbers = _numbers(rank, count, start, 211, 31, 1021)
    if dtype.is_complex:
        return (numbers * (1 - 2j) / 3).to(dtype)
    if not dtype.is_floating_point:
        return (numbers % 2 if dtype is torch.bool else numbers * _FACTOR[dtype]).to(dtype)
    special = torch.tensor([*_SPECIAL, torch.finfo(dtype).smallest_normal / 4], dtype=torch.float64)
    thirds = torch.where(numbers % 2 == 0, numbers, -numbers).double() / 3
    return torch.where(numbers % 7 == 0, special[numbers % len(special)], thirds).to(dtype)


def terms(op: ReduceOp, rank: int, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return a rank's values for a reduction: float sums are exact in any order, integer sums wrap
    around.
    """
    small, bits = _numbers(rank, count, start, 2, 3, 5), 8 * dtype.itemsize
    if dtype.is_floating_point:
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return torch.where(small % 2 == 0, small, -small).double().div(3).to(dtype)
        # more digits than a narrower dtype can hold
        beyond = {torch.float32: 2.0**-12, torch.float64: 2.0**-40}.get(dtype, 0.0)
        return (small * (1 + beyond)).to(dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX) or op in BITWISE:
        return values(rank, count, dtype, start)
    return ((small - 3) * (1 << (bits - 2)) + small if op is ReduceOp.SUM else small).to(dtype)


def nothing(count: int, dtype: torch.dtype) -> Tensor:
    """Return the initial value of an output tensor: 99 everywhere."""
    return torch.full((count,), 99).to(dtype)


def root_of(draw: Draw, nodes: tuple[int, ...]) -> int:
    """Draw a rank."""
    return int(draw(st.integers(0, sum(nodes) - 1)))


@dataclass(frozen=True)
class CollectiveCall:
    """A call of a collective: its arguments and expected tensors, by rank.

    Attributes:
        method: method name of communicators.
        brought: each rank's arguments.
        expected: each rank's tensors, in the order of its arguments.
        terms: n if results may differ by ``SUM(n)``: libraries round 16-bit sums at each step, and
            products and means in another order. 0: exact.
    """

    method: str
    brought: list[list[Any]]
    expected: list[list[Tensor]]
    terms: int = 0


def collective_call(
    method: str,
    op: ReduceOp,
    n: int,
    count: int,
    dtype: torch.dtype,
    root: int,
    start: int = 0,
    x: Tensor | None = None,
) -> CollectiveCall:
    """Return a call of one of `METHODS`, or its form in place, on n ranks.

    Args:
        method: method name.
        op: operator of reductions.
        n: number of ranks.
        count: elements of a chunk: each rank has one chunk, or n of what is reduced and scattered,
            scattered or exchanged.
        dtype: dtype of all tensors.
        root: the rank that sends or receives.
        start: index of the first element in the sequence of values.
        x: the values, one row per rank; None: values that identify rank and index.
    """
    name, everyone = method.removesuffix("_inplace"), range(n)
    bring = partial(terms, op) if name in REDUCING else values
    size = (
        count if name in ("allreduce", "reduce", "broadcast", "allgather", "gather") else n * count
    )
    x = torch.stack([bring(rank, size, dtype, start) for rank in everyone]) if x is None else x
    short, long = nothing(count, dtype), nothing(n * count, dtype)

    def with_own(whole: Tensor, own: Tensor, rank: int) -> Tensor:
        """Return a copy of ``whole``, n chunks, with chunk ``rank`` replaced by ``own``."""
        found = whole.clone()
        found[rank * count : (rank + 1) * count] = own
        return found

    given = {"broadcast": (root,), "reduce": (op.name, root), "scatter": (n,)}
    how = given.get(name, (op.name,) if name in REDUCING else ())
    result = getattr(plain, name)(x[root] if name == "scatter" else x, *how)
    wanted = [result] * n if name == "gather" else list(result)
    received = long if name in ("gather", "allgather", "alltoall") else short
    more: tuple[Any, ...] = (op,) if name in REDUCING else ()
    if name in ("reduce", "broadcast", "gather", "scatter"):
        more = (root, *more)
    if name in ("reduce", "gather"):  # the other ranks receive nothing
        kept = [received if method == name else mine for mine in x]
        wanted = [wanted[rank] if rank == root else kept[rank] for rank in everyone]
    near = (
        n
        if name in REDUCING
        and dtype.is_floating_point
        and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
        else 0
    )
    if method == name and name != "broadcast":
        brought = [[mine, received, *more] for mine in x]
        return CollectiveCall(
            method, brought, [[mine, result] for mine, result in zip(x, wanted, strict=True)], near
        )
    mine = list(x)
    if name == "reduce_scatter":
        wanted = [with_own(x[rank], wanted[rank], rank) for rank in everyone]
    elif name == "allgather":
        mine = [with_own(long, x[rank], rank) for rank in everyone]
    elif name == "gather":
        mine[root], more = with_own(long, x[root], root), (count, root)
    elif name == "scatter":
        mine, more = [x[root] if rank == root else short for rank in everyone], (count, root)
        wanted[root] = x[root]
    return CollectiveCall(
        method, [[own, *more] for own in mine], [[result] for result in wanted], near
    )
