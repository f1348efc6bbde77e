"""Arguments and expected results of collectives: numbers that identify rank and place."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.inputs.strategies import Draw
from bagua_ref.types import ReduceOp

__all__ = [
    "BITWISE",
    "MOVABLE",
    "REDUCTIONS",
    "counts",
    "nothing",
    "reduced",
    "reductions",
    "root_of",
    "terms",
    "values",
]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int32", "int64")
MOVABLE = (*FLOATS, *INTEGERS, "bool")
BITWISE: dict[ReduceOp, Any] = {
    ReduceOp.BAND: lambda a, b: a & b, ReduceOp.BOR: lambda a, b: a | b, ReduceOp.BXOR: lambda a, b: a ^ b,
}  # fmt: skip
REDUCTIONS = (
    *((op, name) for op in ReduceOp if op not in BITWISE for name in FLOATS),
    *((op, name) for op in ReduceOp if op is not ReduceOp.AVG for name in INTEGERS),
)
reductions = st.sampled_from(REDUCTIONS)
counts = st.one_of(st.integers(0, 7), st.sampled_from([33, 257]))

_FACTOR = {torch.uint8: 77, torch.int8: 77, torch.int32: 0x3C6EF373, torch.int64: 0x2545F4914F6CDD1D}
"""Odd factors, so that products that wrap around differ if their factors do, and all bits of the dtype occur."""
_SPECIAL = (-0.0, float("inf"), float("-inf"), float("nan"))


def _numbers(rank: int, count: int, start: int, ranks: int, places: int, most: int) -> Tensor:
    place = torch.arange(start, start + count)
    return (ranks * rank + places * place + rank * place) % most + 1


def values(rank: int, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return a rank's values: they differ between places and between neighbouring ranks, and use all bits of the dtype."""
    numbers = _numbers(rank, count, start, 211, 31, 1021)
    if not dtype.is_floating_point:
        return (numbers % 2 if dtype is torch.bool else numbers * _FACTOR[dtype]).to(dtype)
    special = torch.tensor([*_SPECIAL, torch.finfo(dtype).smallest_normal / 4], dtype=torch.float64)
    thirds = torch.where(numbers % 2 == 0, numbers, -numbers).double() / 3
    return torch.where(numbers % 7 == 0, special[numbers % len(special)], thirds).to(dtype)


def terms(op: ReduceOp, rank: int, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return a rank's values for a reduction: sums are exact in any order, and only products wrap around."""
    small, bits = _numbers(rank, count, start, 2, 3, 5), 8 * dtype.itemsize
    if dtype.is_floating_point:
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return torch.where(small % 2 == 0, small, -small).double().div(3).to(dtype)
        beyond = {torch.float32: 2.0**-12, torch.float64: 2.0**-40}.get(dtype, 0.0)  # more digits than a narrower dtype can hold
        return (small * (1 + beyond)).to(dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX) or op in BITWISE:
        return values(rank, count, dtype, start)
    if op is ReduceOp.SUM and bits > 8:
        return ((small - 3) * (1 << (bits - 8)) + small).to(dtype)
    return (small - 3 if op is ReduceOp.SUM and dtype is torch.int8 else small).to(dtype)


def reduced(op: ReduceOp, n: int, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return the reduction of all ranks' terms: sums are exact and rounded once; products of integers wrap around."""
    brought = torch.stack([terms(op, rank, count, dtype, start) for rank in range(n)])
    wide = brought.double() if dtype.is_floating_point else brought.long()
    if op in BITWISE:
        combined: Tensor = reduce(BITWISE[op], wide.unbind())
        return combined.to(dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return (wide.amin(0) if op is ReduceOp.MIN else wide.amax(0)).to(dtype)
    total = wide.prod(0) if op is ReduceOp.PRODUCT else wide.sum(0)
    if op is not ReduceOp.AVG:
        return total.to(dtype)
    one_rounding = np.float64 if dtype is torch.float64 else np.float32
    return torch.from_numpy(total.numpy().astype(one_rounding) / one_rounding(n)).to(dtype)


def nothing(count: int, dtype: torch.dtype) -> Tensor:
    """Return the initial value of a tensor that is to be filled."""
    return torch.full((count,), 99).to(dtype)


def root_of(draw: Draw, nodes: tuple[int, ...]) -> int:
    """Draw a rank."""
    return int(draw(st.integers(0, sum(nodes) - 1)))
