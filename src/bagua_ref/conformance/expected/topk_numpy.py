"""Top-k of n ranks (S11.2), one bucket and one round at a time."""

from __future__ import annotations

import math

import numpy as np

from bagua_ref.conformance.expected.decentralized_numpy import Array, stored

__all__ = ["kept", "sent_count", "topk_round"]


def sent_count(m: int, ratio: float) -> int:
    """Return k; a Python float is a float64."""
    return min(m, max(1, math.ceil(ratio * m)))


def kept(p: Array, k: int) -> list[int]:
    """Return the indices that a rank sends, ascending: NaN first, then the largest absolute values, equal ones in order."""
    is_nan = np.isnan(p)
    found: list[int] = np.sort(np.lexsort((-np.where(is_nan, 0, np.abs(p)), ~is_nan))[:k]).tolist()
    return found


def topk_round(gradients: list[Array], errors: list[Array] | None, ratio: float, dtype: str) -> tuple[Array, list[Array] | None]:
    """Return the averaged gradient, and what every rank keeps.

    Args:
        gradients: m elements by rank, numbers of ``dtype`` held as float32.
        errors: e by rank; None: no memory.
        ratio: k is this part of m, rounded up.
        dtype: of the result.
    """
    given = [g.copy() for g in gradients] if errors is None else [g + e for g, e in zip(gradients, errors, strict=True)]
    k = sent_count(given[0].size, ratio)
    total = np.zeros_like(given[0])
    left = given if all(np.isfinite(p).all() for p in given) else errors
    for p in given:
        sent = kept(p, k)
        total[sent] = total[sent] + p[sent]
        p[sent] = 0
    return stored(total / np.float32(len(given)), dtype), None if errors is None else left
