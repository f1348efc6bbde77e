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
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bagua_ref.conformance.cases.tensor_files import name_of
from bagua_ref.conformance.vectors.answers import answer

__all__ = ["KINDS", "Case", "Numbers", "canonical", "numbers_of", "tensor_of"]


Shape: TypeAlias = "int | tuple[int, ...]"


@dataclass(frozen=True)
class Case:
    """One golden vector.

    Attributes:
        suite: the group of operations, and the name of its files.
        operation: what to compute; ``docs/reference/vectors.md`` lists them.
        clause: of the specification.
        dtype: of the numbers.
        name: tells it from the operation's other cases of this dtype.
        inputs: tensors by name.
        parameters: JSON values.
        flags: some of ``"valid"``, ordinary numbers; ``"edge"``, numbers at the edge of a format or
            a rule; and ``"poison"``, a chunk that S4.4 poisons.
        tolerance: the name of a row of `bagua_ref.conformance.expected.tolerances`.
        magnitudes: for ``SUM(n)``: per output, the sum or mean of the absolute values that were
            added, one for all elements or one for each.
    """

    suite: str
    operation: str
    clause: str
    dtype: torch.dtype
    name: str
    inputs: dict[str, Tensor]
    parameters: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ("valid",)
    tolerance: str = "EXACT"
    magnitudes: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The case's name among all: suite, operation, dtype and name."""
        return f"{self.suite}/{self.operation}/{name_of(self.dtype)}/{self.name}"

    @property
    def seed(self) -> int:
        """The CRC-32 of the id, from which most inputs are drawn."""
        return zlib.crc32(self.id.encode())

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        """The expected outputs, by name."""
        found = answer(
            self.suite, self.operation, name_of(self.dtype), self.parameters, self.inputs
        )
        return {name: canonical(x) for name, x in found.items()}

    def magnitude(self, output: str) -> Tensor | None:
        """Return the magnitude of each element of an output; None if its tolerance needs none."""
        found = self.magnitudes.get(output)
        return torch.full(self.outputs[output].shape, found) if isinstance(found, float) else found


def numbers_of(*parts: str | torch.dtype) -> Numbers:
    """Return the numbers that belong to a case's id, given in its parts, or to any other text."""
    return Numbers(
        zlib.crc32(
            "/".join(part if isinstance(part, str) else name_of(part) for part in parts).encode()
        )
    )


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
    x = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    if x.dtype in _NAN_BITS:
        integer, bits = _NAN_BITS[x.dtype]
        x = torch.where(x.isnan(), torch.tensor(bits, dtype=integer).view(x.dtype), x)
    return x


def tensor_of(values: list[float], dtype: torch.dtype) -> Tensor:
    """Return the values rounded to dtype, 16-bit ones by way of float32, as not every processor
    rounds float64 at once.
    """
    wide = torch.tensor(values, dtype=torch.float64)
    return canonical(wide if dtype is torch.float64 else wide.to(torch.float32).to(dtype))


class Numbers:
    """A stream of numbers; `random.Random.random` is the same in every version of Python.

    >>> Numbers(1).below(100), Numbers(1).uniform(2, torch.float32)
    (13, tensor([-2.9251,  2.7795]))
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 # the same numbers on every machine

    def unit(self) -> float:
        """Return a number from 0 up to 1, a multiple of 2**-53."""
        return self._random.random()

    def below(self, limit: int) -> int:
        """Return an integer from 0 to limit - 1."""
        return int(self.unit() * limit)

    def between(self, low: float, high: float) -> float:
        """Return a number from low to high."""
        return low + (high - low) * self.unit()

    def each(self, shape: Shape, dtype: torch.dtype, number: Callable[[], float]) -> Tensor:
        """Call ``number`` for one element after another; return the results."""
        shape = (shape,) if isinstance(shape, int) else shape
        return tensor_of([number() for _ in range(math.prod(shape))], dtype).view(shape)

    def uniform(self, shape: Shape, dtype: torch.dtype, low: float = -4, high: float = 4) -> Tensor:
        """Return numbers from low to high."""
        return self.each(shape, dtype, lambda: self.between(low, high))

    def of(self, kind: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return numbers of a kind: of `KINDS`, or ``"eighths"``; sums of a few of these are exact
        in any order in every dtype.
        """
        return self.each(shape, dtype, lambda: _FORMULAS[kind](self, dtype))


def _special(numbers: Numbers, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    edges = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        info.max,
        -info.max,
        info.tiny,
        -info.tiny,
        info.tiny / 4,
        1 + info.eps,
    ]
    edges += [float("inf"), float("-inf"), float("nan")]
    return edges[numbers.below(len(edges))]


_SPAN = {torch.float16: 10, torch.bfloat16: 30, torch.float32: 30, torch.float64: 100}

_FORMULAS: dict[str, Callable[[Numbers, torch.dtype], float]] = {
    "plain": lambda x, dtype: x.between(-4, 4),
    "halves": lambda x, dtype: (x.below(1201) - 600) / 2,
    "wide": lambda x, dtype: (
        x.between(-2, 2) * 2.0 ** (x.below(2 * _SPAN[dtype] + 1) - _SPAN[dtype])
    ),
    "denormal": lambda x, dtype: (x.below(65) - 32) * torch.finfo(dtype).tiny / 16,
    "huge": lambda x, dtype: (x.below(17) - 8) / 8 * torch.finfo(dtype).max,
    "special": _special,
    "zeros": lambda x, dtype: (0.0, -0.0)[x.below(2)],
    "eighths": lambda x, dtype: (x.below(31) - 15) / 8,
}
KINDS = {
    "plain": "valid",
    "halves": "valid",  # sums of a few are exact in any order in float32
    "wide": "valid",  # of many magnitudes
    "denormal": "edge",  # half of them
    "huge": "edge",  # sums soon exceed the largest number
    # infinities, NaN, zeros of both signs and the ends of the range, among ordinary numbers
    "special": "edge",
    "zeros": "edge",  # of both signs
}
"""Kinds of numbers, and the flag that a case of them gets."""
