"""Averages along graphs (S13.1 to S13.4), of all ranks at once; row r of the arrays belongs to rank r."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Weights: TypeAlias = Sequence[Sequence[Sequence[Any]]]
"""For each receiving rank, (source, weight) pairs."""


def doublings(n: int) -> int:
    """Return how often 1 must be doubled to reach n."""
    count = 0
    while 2**count < n:
        count += 1
    return count


def averaged(x: Array, mode: str | Sequence[Weights], t: int) -> Array:
    """Return every rank's average at step t, not yet rounded to the dtype.

    Args:
        x: of shape (n, m), float32 or float64.
        mode: a name, or graphs that follow each other in a cycle.
        t: the number of earlier averages.
    """
    if len(x) == 1:
        return x
    if not isinstance(mode, str):
        return weighted(x, mode[t % len(mode)])
    return _FORMULAS[mode](x, t)


def weighted(x: Array, graph: Weights) -> Array:
    """Return ``((+0 + w*x) + w*x) + ...`` in the order of each row."""
    result = np.zeros_like(x)
    for rank, row in enumerate(graph):
        for source, weight in row:
            product = x.dtype.type(weight) * x[source]
            result[rank] = result[rank] + product
    return result


def _sent_to(x: Array, distance: int) -> Array:
    """Return what each rank has received when rank r has sent to rank r + distance."""
    return np.roll(x, distance, axis=0)


def _over(total: Array, count: int) -> Array:
    result: Array = total / total.dtype.type(count)
    return result


def _one_peer_exponential(x: Array, t: int) -> Array:
    return _over(x + _sent_to(x, 2 ** (t % doublings(len(x)))), 2)


def _hypercube(x: Array, t: int) -> Array:
    edge = 1 << t % doublings(len(x))
    return _over(x + x[np.arange(len(x)) ^ edge], 2)


def _ring(x: Array, t: int) -> Array:
    if len(x) == 2:
        return _over(x + x[::-1], 2)
    total = x + _sent_to(x, 1)
    return _over(total + _sent_to(x, -1), 3)


def _exponential(x: Array, t: int) -> Array:
    total = np.zeros_like(x) + x
    for k in range(doublings(len(x))):
        total = total + _sent_to(x, 2**k)
    return _over(total, doublings(len(x)) + 1)


_FORMULAS: dict[str, Callable[[Array, int], Array]] = {
    "one_peer_exponential": _one_peer_exponential,
    "hypercube": _hypercube,
    "ring": _ring,
    "exponential": _exponential,
}
