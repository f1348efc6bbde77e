"""Pseudo-random numbers of many kinds from a seed: the same on every machine and in every
version.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.conformance.cases.tensor_files import name_of
from bagua_ref.conformance.expected.codecs_scalar import grid


def tensor_of(values: Any, dtype: str, scale: float = 1) -> Tensor:
    """Return scaled values rounded to dtype; 16-bit dtypes are rounded via float32, as not every
    processor rounds float64 directly.
    """
    wide = torch.from_numpy(np.array(values, float)) * scale  # also of "inf" and "nan"
    return wide if dtype == "float64" else wide.float().to(getattr(torch, dtype))


class Numbers:
    """A stream of pseudo-random numbers seeded by a text. It uses NumPy's `RandomState`, which,
    unlike the newer generators, is the same in every version.

    >>> Numbers("a case").integers([2, 2], 100)
    tensor([[53, 43],
            [11, 79]])
    """

    def __init__(self, *parts: str, random: np.random.RandomState | None = None) -> None:
        self._random = random or np.random.RandomState()
        self._random.seed([zlib.crc32("/".join(parts).encode())])

    def unit(self, *shape: int) -> Any:
        """Return numbers from 0 to 1; a scalar without a shape."""
        return self._random.random_sample(shape or None)

    def below(self, limit: int, *shape: int) -> Any:
        """Return integers from 0 to limit - 1."""
        return np.floor(self.unit(*shape) * limit).astype(int)

    def between(self, low: float, high: float, *shape: int) -> Any:
        """Return numbers from low to high."""
        return low + (high - low) * self.unit(*shape)

    def integers(self, shape: list[int], limit: int) -> Tensor:
        """Return integers from 0 to limit - 1 as a tensor."""
        return torch.as_tensor(self.below(limit, *shape))

    def of(self, kind: str, shape: list[int], dtype: str) -> Tensor:
        """Return numbers of one of the kinds tabulated below, or arbitrary bits."""
        size, found = math.prod(shape), getattr(torch, dtype)
        if not size:
            return torch.empty(shape, dtype=found)
        if kind == "bits":
            drawn = self.integers([size * found.itemsize], 256).to(torch.uint8)
            return drawn.view(found).view(shape)
        if kind in _RANGES:
            values = self.between(*_RANGES[kind], size)
        elif kind in _CHOICES:
            values = _choose(self.unit(size), _CHOICES[kind])
        else:
            values = _FORMULAS[kind](self, size, torch.finfo(found))
        return tensor_of(values, dtype).view(shape)


_BULK = np.random.RandomState()
"""The generator of `bulk`, as making one takes ten times as long as seeding it."""


def bulk(dtype: torch.dtype, kind: str, seed: int, size: int, *, finite: bool = False) -> Tensor:
    """Return ``size`` numbers of a kind, determined by the seed; with ``finite``, 1 replaces
    numbers that are not finite.
    """
    found = Numbers(kind, str(seed), random=_BULK).of(kind, [size], name_of(dtype))
    return torch.where(found.isfinite(), found, 1) if finite else found


def edges(info: torch.finfo) -> list[float]:
    """Return the positive numbers at the ends of a dtype's ranges."""
    return [0.0, 1.0, info.max, info.tiny, info.tiny / 4, 1 + info.eps, math.inf, math.nan]


def _choose(u: Any, options: Sequence[float]) -> Any:
    return np.array(options)[np.floor(u * len(options)).astype(int)]


def _special(x: Numbers, n: int, info: torch.finfo) -> Any:
    sign, which = x.unit(n, 2).T
    return np.copysign(_choose(which, edges(info)), _choose(sign, (1, -1)))


def _wide(u: Any, info: torch.finfo) -> Any:
    span = {16: 10, 32: 30, 64: 100}[info.bits]
    return np.ldexp(-2 + 4 * u[:, 0], np.floor(u[:, 1] * (2 * span + 1)).astype(int) - span)


def _extremes(x: Numbers, n: int, info: torch.finfo) -> Any:
    u = x.unit(n, 3)
    others = _choose(u[:, 2], [*[0.0] * 9, math.inf, -math.inf, math.nan])
    return np.where(others == 0, _wide(u, info), others)


def _near_ties(x: Numbers, n: int, info: torch.finfo, size: float = 1) -> Any:
    """Return numbers whose products with MinMaxUInt8's scale lie within a few steps of k + 1/2, to
    expose rounding too late or too early.
    """
    low = x.between(-4, 4)
    ends = tensor_of([low, low + x.between(0, 4)], info.dtype, size).tolist()
    scale, _, lower = grid(*ends)
    between = torch.from_numpy((x.below(255, max(n - 2, 0)) + lower + 0.5) / scale).float()
    steps = x.integers([len(between)], 5) - 2
    moved = (between.view(torch.int32) + steps.int()).view(torch.float32).clamp(*ends)
    return [*ends, *moved.tolist()][:n]


def _half_a_level(x: Numbers, n: int, info: torch.finfo) -> Any:
    """Return numbers whose minimum and maximum have max*scale close to k + 1/2, where S4.6's bound
    is tight.
    """
    half = x.below(254) + 0.5
    low = -x.between(1, 2) * 2.0 ** (x.below(16) - 8)
    high = -half * low / (255 - half)
    return [low, high, *x.between(low, high, n - 2)]


def _ties(x: Numbers, n: int, info: torch.finfo) -> Any:
    digits = round(-math.log2(info.eps)) + 1
    return (x.below(2 ** (digits + 1) + 1, n) - 2**digits) * 2.0 ** -x.below(digits + 1, n)


def _levels(x: Numbers, n: int, info: torch.finfo) -> Any:
    """Return multiples of half a level from low to low + 255 steps."""
    places = x.below(511, n) / 2
    places[:2] = [0, 255][:n]
    return ((x.below(1200) - 600) / 2 + places) * 2.0 ** (x.below(7) - 3)


def _power(x: Numbers, info: torch.finfo) -> Any:
    return x.below(12 if info.dtype == "float16" else 17) - 8


_RANGES = {
    "plain": (-4, 4),
    "tame": (-4, 4),
    "small": (-0.25, 0.25),
    "tenths": (-0.1, 0.1),
    "unit": (-1, 1),
    "weights": (1, 2),
    "squares": (0.5, 1),
}
_CHOICES = {
    "zeros": (0.0, -0.0),
    "signs": (1.5, -1.5),
    "factors": (1.0, -1.0, 2.0, -0.5, 3.0),
    # sums and products of a few of these are exact in any order in every dtype
    "eighths": tuple(k / 8 for k in range(-15, 16)),
    "sevens": tuple(k / 8 for k in range(-7, 8)),
}
_FORMULAS: dict[str, Callable[[Numbers, int, torch.finfo], Any]] = {
    "wide": lambda x, n, info: _wide(x.unit(n, 2), info),
    "denormal": lambda x, n, info: (x.below(65, n) - 32) * info.tiny / 16,
    "huge": lambda x, n, info: (x.below(17, n) - 8) / 8 * info.max,
    "special": _special,
    "extremes": _extremes,
    "squares or 0": lambda x, n, info: (lambda u: (0.5 + u[0] / 2) * (u[1] >= 0.5))(x.unit(n, 2).T),
    "near ties": _near_ties,
    "half a level": _half_a_level,
    "edges": _special,
    "ties": _ties,  # few bits, so that sums end in ties
    "near": lambda x, n, info: x.between(1, 4) * (1 + info.eps * (x.below(65, n) - 32)),
    "grid": _levels,
    "halfway": lambda x, n, info: _near_ties(x, n, info, 10.0 ** (x.below(7) - 3)),
    # a small range far from zero
    "narrow": lambda x, n, info: (
        x.between(-2, 2) * 10.0 ** (_power(x, info) / 3) + x.between(-1, 1, n) * 1e-6
    ),
    "tiny": lambda x, n, info: (x.below(129, n) - 64) * info.tiny * info.eps * 2.0 ** x.below(10),
    "constant": lambda x, n, info: np.full(n, x.between(-4, 4) * 10.0 ** _power(x, info)),
    "sparse": lambda x, n, info: _choose(x.unit(n), (0.0, -0.0, 1 - 2 * x.below(2))),
    # a range and a distance from zero that are not large relative to 1e-7
    "epsilon": lambda x, n, info: (
        (1 - 2 * x.below(2)) * (10.0 ** x.between(-9, -5, 2) @ [np.ones(n), x.unit(n)])
    ),
}
