"""A golden vector, and the numbers that its inputs are drawn from: the same on every machine and in
every version.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.conformance.cases.answers import answer
from bagua_ref.conformance.expected.codecs_scalar import grid

__all__ = ["KINDS", "Case", "Numbers", "canonical", "tensor_of"]


@dataclass(frozen=True)
class Case:
    """One golden vector.

    Attributes:
        operation: a suite, which names the files, and what to compute; ``docs/vectors.md``
            lists them.
        clause: of the specification.
        dtype: of the numbers, by name.
        name: tells it from the operation's other cases of this dtype.
        inputs: tensors by name.
        parameters: JSON values by name.
        flag: ``"valid"``: ordinary numbers; ``"edge"``: at the edge of a format or a rule.
        tolerance: a row of `bagua_ref.conformance.expected.tolerances`.
        magnitudes: for ``SUM(n)``: per output, a bound of the sum or mean of the absolute values
            that were added.
    """

    operation: str
    clause: str
    dtype: str
    name: str
    inputs: dict[str, Tensor]
    parameters: dict[str, Any] = field(default_factory=dict)
    flag: str = "valid"
    tolerance: str = "EXACT"
    magnitudes: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The case's name among all: suite, operation, dtype and name."""
        return f"{self.operation}/{self.dtype}/{self.name}"

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        """The expected outputs, by name."""
        found = answer(self.operation, self.dtype, self.inputs, self.parameters)
        return {name: canonical(x) for name, x in found.items()}


_NAN_BITS = {
    torch.float16: (torch.int16, 0x7E00),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float64: (torch.int64, 0x7FF8000000000000),
}


def canonical(x: Tensor) -> Tensor:
    """Return a contiguous copy whose NaNs have the bits of S4.4, which processors choose otherwise.

    >>> canonical(-torch.tensor([float("nan")])).view(torch.int32).item() == 0x7FC00000
    True
    """
    x = x.clone(memory_format=torch.contiguous_format)
    if x.dtype in _NAN_BITS:
        integer, bits = _NAN_BITS[x.dtype]
        x = torch.where(x.isnan(), torch.tensor(bits, dtype=integer).view(x.dtype), x)
    return x


def tensor_of(values: Any, dtype: str, scale: float = 1) -> Tensor:
    """Return the scaled values rounded to dtype, 16-bit ones by way of float32, as not every
    processor rounds float64 at once.
    """
    wide = torch.from_numpy(np.array(values, float)) * scale  # also of "inf" and "nan"
    return wide if dtype == "float64" else wide.float().to(getattr(torch, dtype))


class Numbers:
    """A stream of numbers that belongs to a text; `random.Random.random` is the same in every
    version of Python.

    >>> Numbers("a case").integers([2, 2], 100)
    tensor([[53, 43],
            [11, 79]])
    """

    def __init__(self, *parts: str) -> None:
        seed = zlib.crc32("/".join(parts).encode())
        self._random = random.Random(seed)  # noqa: S311 # the same numbers on every machine

    def below(self, limit: int) -> int:
        """Return an integer from 0 to limit - 1."""
        return int(self._random.random() * limit)

    def between(self, low: float, high: float) -> float:
        """Return a number from low to high."""
        return low + (high - low) * self._random.random()

    def integers(self, shape: list[int], limit: int) -> Tensor:
        """Return integers from 0 to limit - 1."""
        drawn = [self.below(limit) for _ in range(math.prod(shape))]
        return torch.tensor(drawn, dtype=torch.int64).view(shape)

    def of(self, kind: str, shape: list[int], dtype: str) -> Tensor:
        """Return numbers of a kind: of `KINDS`, or another that rows name."""
        size, found = math.prod(shape), getattr(torch, dtype)
        if kind == "bits":
            return (
                self.integers([size, found.itemsize], 256).to(torch.uint8).view(found).view(shape)
            )
        if kind in ("near ties", "half a level"):
            return (
                _near_ties(self, size, dtype)
                if kind == "near ties"
                else _half_a_level(self, size, dtype)
            )
        info = torch.finfo(found)
        return tensor_of([_FORMULAS[kind](self, info) for _ in range(size)], dtype).view(shape)


def _near_ties(numbers: Numbers, size: int, dtype: str) -> Tensor:
    """Return numbers whose products with MinMaxUInt8's scale lie within some steps of k + 1/2, where
    rounding too late or too early shows.
    """
    low = numbers.between(-4, 4)
    low, high = tensor_of([low, low + numbers.between(0, 4)], dtype).tolist()
    scale, _, lower = grid(low, high)
    x = (numbers.integers([size - 2], 255).double() + lower + 0.5) / scale
    moved = x.float().view(torch.int32) + (numbers.integers([size - 2], 5) - 2).to(torch.int32)
    return tensor_of([low, high, *moved.view(torch.float32).clamp(low, high).tolist()], dtype)


def _half_a_level(numbers: Numbers, size: int, dtype: str) -> Tensor:
    """Return ends with max*scale close to k + 1/2, where S4.6's bound is tight, and numbers between
    them.
    """
    half = numbers.below(254) + 0.5
    low = -numbers.between(1, 2) * 2.0 ** (numbers.below(16) - 8)
    high = -half * low / (255 - half)
    return tensor_of([low, high, *(numbers.between(low, high) for _ in range(size - 2))], dtype)


def _special(numbers: Numbers, info: torch.finfo) -> float:
    edges = (0.0, 1.0, info.max, info.tiny, info.tiny / 4, 1 + info.eps, math.inf, math.nan)
    return (1, -1)[numbers.below(2)] * edges[numbers.below(len(edges))]


def _wide(numbers: Numbers, info: torch.finfo) -> float:
    span = {16: 10, 32: 30, 64: 100}[info.bits]
    return numbers.between(-2, 2) * 2.0 ** (numbers.below(2 * span + 1) - span)


_FORMULAS: dict[str, Callable[[Numbers, torch.finfo], float]] = {
    "plain": lambda x, info: x.between(-4, 4),
    "wide": _wide,
    "denormal": lambda x, info: (x.below(65) - 32) * info.tiny / 16,
    "huge": lambda x, info: (x.below(17) - 8) / 8 * info.max,
    "special": _special,
    "zeros": lambda x, info: (0.0, -0.0)[x.below(2)],
    # sums and products of a few of these are exact in any order in every dtype
    "eighths": lambda x, info: (x.below(31) - 15) / 8,
    "sevens": lambda x, info: (x.below(15) - 7) / 8,
    "factors": lambda x, info: (1.0, -1.0, 2.0, -0.5, 3.0)[x.below(5)],
    "extremes": lambda x, info: (_wide(x, info), math.inf, -math.inf, math.nan)[
        max(0, x.below(12) - 8)
    ],
    "signs": lambda x, info: (1.5, -1.5)[x.below(2)],
    "small": lambda x, info: x.between(-0.25, 0.25),
    "tenths": lambda x, info: x.between(-0.1, 0.1),
    "unit": lambda x, info: x.between(-1, 1),
    "weights": lambda x, info: x.between(1, 2),
    "squares": lambda x, info: x.between(0.5, 1),
    "squares or 0": lambda x, info: x.between(0.5, 1) * x.below(2),
}
KINDS = {
    "plain": "valid",
    "wide": "valid",  # of many magnitudes
    "denormal": "edge",  # half of them
    "huge": "edge",  # sums soon exceed the largest number
    "special": "edge",  # infinities, NaN, zeros of both signs and the ends of the range
    "zeros": "edge",  # of both signs
}
"""Kinds of numbers, and the flag that a case of them gets."""
