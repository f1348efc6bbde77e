"""The kernels of S1, S3 and S5.5, one element at a time.

Arguments and results are Python floats that are numbers of the dtype named first.
"""

from __future__ import annotations

import math

from bagua_ref.conformance.expected.rounding import arithmetic, divide, to


def add(dtype: str, x: float, y: float) -> float:
    """Return x + y (S1)."""
    return to(dtype, arithmetic(dtype)(x + y))


def subtract(dtype: str, x: float, y: float) -> float:
    """Return x - y (S1)."""
    return to(dtype, arithmetic(dtype)(x - y))


def add_scaled(dtype: str, x: float, y: float, factor: float) -> float:
    """Return x + factor * y (S1)."""
    r = arithmetic(dtype)
    return to(dtype, r(x + r(r(factor) * y)))


def average(dtype: str, x: float, y: float) -> float:
    """Return (x + y) / 2 (S3.4)."""
    r = arithmetic(dtype)
    return to(dtype, r(r(x + y) / 2))


def quotient(dtype: str, x: float, divisor: float) -> float:
    """Return x / divisor (S3.3)."""
    r = arithmetic(dtype)
    return to(dtype, r(divide(x, r(divisor))))


def combine_ring(dtype: str, x: float, left: float, right: float, weight: float) -> float:
    """Return the first line of S3.5."""
    x = add_scaled(dtype, x, left, 1 / 3)
    x = add_scaled(dtype, x, right, 1 / 3)
    return add_scaled(dtype, x, weight, -5 / 3)


def async_average(dtype: str, x: float, reduced: float, snapshot: float, nranks: int) -> float:
    """Return x + (reduced / nranks - snapshot) (S3.6)."""
    r = arithmetic(dtype)
    return to(dtype, r(x + r(r(reduced / nranks) - snapshot)))


def update_momentum(dtype: str, m: float, grad: float, beta1: float) -> float:
    """Return beta1*m + (1-beta1)*grad (S5.5)."""
    r = arithmetic(dtype)
    return to(dtype, r(r(r(beta1) * m) + r(r(1.0 - beta1) * grad)))


def reduce_in_order(dtype: str, values: list[float], average: bool) -> float:
    """Return the sum from +0 on in order, or the mean (S3.7)."""
    r = arithmetic(dtype)
    total = 0.0
    for value in values:
        total = r(total + value)
    return to(dtype, r(total / len(values)) if average else total)


def ascending(keys: list[float]) -> list[int]:
    """Return the stable order of the keys; NaNs come last (S7.2)."""
    return sorted(range(len(keys)), key=lambda i: (True, 0.0) if math.isnan(keys[i]) else (False, keys[i]))
