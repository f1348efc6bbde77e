"""The kernels of S1, S3, S5.5 and S7.2 on entire arrays.

Arrays hold numbers of the dtype named first as float32 (float64 for float64); every NumPy operation
on them rounds to nearest-even, and `stored` then rounds to the dtype. This module imports nothing
of the code under test.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Array: TypeAlias = npt.NDArray[Any]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of computations on numbers of ``dtype``."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def array(x: torch.Tensor) -> Array:
    """Return a tensor's elements as a float32 array (float64 for float64)."""
    found: Array = x.to(wide(x.dtype)).numpy()
    return found


def stored(values: Array, dtype: str) -> Array:
    """Round to the dtype; return the values as float32."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        rounded = ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)
        return np.where(np.isfinite(values), rounded, values)
    return values


def add(dtype: str, x: Array, y: Array) -> Array:
    """Return x + y (S1)."""
    return stored(x + y, dtype)


def subtract(dtype: str, x: Array, y: Array) -> Array:
    """Return x - y (S1)."""
    return stored(x - y, dtype)


def add_scaled(dtype: str, x: Array, y: Array, factor: float) -> Array:
    """Return x + factor * y (S1)."""
    return stored(x + x.dtype.type(factor) * y, dtype)


def average(dtype: str, x: Array, y: Array) -> Array:
    """Return (x + y) / 2 (S3.4)."""
    return divide(dtype, x + y, 2)


def divide(dtype: str, x: Array, divisor: float) -> Array:
    """Return x / divisor (S3.3)."""
    return stored(x / x.dtype.type(divisor), dtype)


def combine_ring(dtype: str, x: Array, left: Array, right: Array, weight: Array) -> Array:
    """Return the first line of S3.5."""
    x = add_scaled(dtype, x, left, 1 / 3)
    x = add_scaled(dtype, x, right, 1 / 3)
    return add_scaled(dtype, x, weight, -5 / 3)


def async_average(dtype: str, x: Array, reduced: Array, snapshot: Array, nranks: int) -> Array:
    """Return x + (reduced / nranks - snapshot) (S3.6)."""
    return stored(x + (reduced / x.dtype.type(nranks) - snapshot), dtype)


def update_momentum(dtype: str, m: Array, grad: Array, beta1: float) -> Array:
    """Return beta1*m + (1-beta1)*grad (S5.5)."""
    return stored(m.dtype.type(beta1) * m + m.dtype.type(1 - beta1) * grad, dtype)


def added(arrays: list[Array]) -> Array:
    """Return ``((+0 + the first) + the second) + ...`` (S3.7)."""
    total: Array = functools.reduce(np.add, arrays, np.zeros_like(arrays[0]))
    return total


def reduce_chunks(dtype: str, chunks: list[Array], average: bool = True) -> Array:
    """Return the sum in order, or the mean, which is divided and rounded once (S3.7)."""
    return divide(dtype, added(chunks), len(chunks) if average else 1)


def order_by_complexity(keys: Array) -> Array:
    """Return the stable order of the keys; NaNs come last (S7.2)."""
    return np.argsort(keys, kind="stable")
