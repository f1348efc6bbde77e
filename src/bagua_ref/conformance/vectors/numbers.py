"""Seeded random numbers from integers and exact floats only, the same on every machine and version."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["KINDS", "Numbers", "tensor_of"]


def tensor_of(values: list[float], dtype: torch.dtype) -> Tensor:
    """Return the values rounded to dtype, 16-bit ones by way of float32, as not every processor rounds float64 at once."""
    wide = torch.tensor(values, dtype=torch.float64)
    return wide if dtype is torch.float64 else wide.to(torch.float32).to(dtype)


class Numbers:
    """A stream of numbers; `random.Random.random` is the same in every version of Python.

    >>> Numbers(1).below(100), Numbers(1).uniform(2, torch.float32)
    (13, tensor([-2.9251,  2.7795]))
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # nosec B311 # the same numbers on every machine

    def unit(self) -> float:
        """Return a number from 0 up to 1, a multiple of 2**-53."""
        return self._random.random()

    def below(self, limit: int) -> int:
        """Return an integer from 0 to limit - 1."""
        return int(self.unit() * limit)

    def between(self, low: float, high: float) -> float:
        """Return a number from low to high."""
        return low + (high - low) * self.unit()

    def uniform(self, size: int, dtype: torch.dtype, low: float = -4, high: float = 4) -> Tensor:
        """Return ``size`` numbers from low to high."""
        return tensor_of([self.between(low, high) for _ in range(size)], dtype)

    def halves(self, size: int, dtype: torch.dtype, limit: int = 600) -> Tensor:
        """Return halves of integers up to ``limit``: sums of a few are exact in any order in float32."""
        return tensor_of([(self.below(2 * limit + 1) - limit) / 2 for _ in range(size)], dtype)

    def eighths(self, size: int, dtype: torch.dtype, limit: int = 15) -> Tensor:
        """Return multiples of 1/8 below 2: sums of a few are exact in any order in every dtype."""
        return tensor_of([(self.below(2 * limit + 1) - limit) / 8 for _ in range(size)], dtype)

    def wide(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return numbers of many magnitudes."""
        span = {torch.float16: 10, torch.bfloat16: 30, torch.float32: 30, torch.float64: 100}[dtype]
        return tensor_of([self.between(-2, 2) * 2.0 ** (self.below(2 * span + 1) - span) for _ in range(size)], dtype)

    def denormal(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return multiples of 1/16 of the smallest normal number: half of them are denormal."""
        tiny = torch.finfo(dtype).tiny
        return tensor_of([(self.below(65) - 32) * tiny / 16 for _ in range(size)], dtype)

    def huge(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return multiples of 1/8 of the largest number, which sums soon exceed."""
        return tensor_of([(self.below(17) - 8) / 8 * torch.finfo(dtype).max for _ in range(size)], dtype)

    def special(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return infinities, NaN, zeros of both signs, and the ends of the range among ordinary numbers."""
        info = torch.finfo(dtype)
        edges = [0.0, -0.0, 1.0, -1.0, info.max, -info.max, info.tiny, -info.tiny, info.tiny / 4, 1 + info.eps]
        edges += [float("inf"), float("-inf"), float("nan")]
        return tensor_of([edges[self.below(len(edges))] for _ in range(size)], dtype)

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros of both signs."""
        return tensor_of([(0.0, -0.0)[self.below(2)] for _ in range(size)], dtype)


KINDS: dict[str, tuple[str, Callable[[Numbers, int, torch.dtype], Tensor]]] = {
    "plain": ("valid", Numbers.uniform),
    "halves": ("valid", Numbers.halves),
    "wide": ("valid", Numbers.wide),
    "denormal": ("edge", Numbers.denormal),
    "huge": ("edge", Numbers.huge),
    "special": ("edge", Numbers.special),
    "zeros": ("edge", Numbers.zeros),
}
"""Kinds of numbers: the flag that a case of them gets, and how they are drawn."""
