"""What ranks bring to a collective, and what comes of it: numbers that tell rank and place."""

from __future__ import annotations

from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st

from bagua_ref.conformance.violation import Violation
from bagua_ref.types import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from bagua_ref.conformance.checks import Draw

__all__ = ["BITWISE", "MOVABLE", "counts", "nothing", "reduced", "reductions", "root_of", "values", "written_down"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int8", "int32", "int64")
MOVABLE = (*FLOATS, *INTEGERS, "bool")
BITWISE: dict[ReduceOp, Any] = {
    ReduceOp.BAND: lambda a, b: a & b, ReduceOp.BOR: lambda a, b: a | b, ReduceOp.BXOR: lambda a, b: a ^ b,
}  # fmt: skip
COMBINE: dict[ReduceOp, Any] = {
    ReduceOp.SUM: lambda a, b: a + b, ReduceOp.AVG: lambda a, b: a + b, ReduceOp.PRODUCT: lambda a, b: a * b,
    ReduceOp.MIN: min, ReduceOp.MAX: max, **BITWISE,
}  # fmt: skip
reductions = st.one_of(
    st.tuples(st.sampled_from([op for op in ReduceOp if op not in BITWISE]), st.sampled_from(FLOATS)),
    st.tuples(st.sampled_from([op for op in ReduceOp if op is not ReduceOp.AVG]), st.sampled_from(INTEGERS)),
)
counts = st.integers(0, 7)


def _value(rank: int, index: int) -> int:
    return (2 * rank + 3 * index + rank * index) % 5 + 1


def values(rank: int, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return what rank ``rank`` brings; every rank's and place's numbers differ."""
    numbers = torch.tensor([_value(rank, index) for index in range(start, start + count)], dtype=torch.int64)
    return (numbers % 2 if dtype is torch.bool else numbers).to(dtype)


def reduced(op: ReduceOp, n: int, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Integers are exact in float32; one rounding follows, or the wrapping of an integer type."""
    exact = [reduce(COMBINE[op], [_value(rank, index) for rank in range(n)]) for index in range(start, start + count)]
    if not dtype.is_floating_point:
        return torch.tensor(exact, dtype=torch.int64).to(dtype)
    wide = np.float64 if dtype is torch.float64 else np.float32
    return torch.from_numpy(np.array(exact, dtype=wide) / wide(n if op is ReduceOp.AVG else 1)).to(dtype)


def nothing(count: int, dtype: torch.dtype) -> Tensor:
    """Return what a tensor holds that is to be filled."""
    return torch.full((count,), 99).to(dtype)


def root_of(draw: Draw, nodes: tuple[int, ...]) -> int:
    """Draw a rank."""
    return int(draw(st.integers(0, sum(nodes) - 1)))


@contextmanager
def written_down(script: str) -> Iterator[None]:
    """Give a violation the script that shows it."""
    try:
        yield
    except Violation as violation:
        violation.snippet = script
        raise
