"""Compression of n ranks with error memory (S11), one bucket and one round at a time: any codec, and top-k."""

from __future__ import annotations

import math

import numpy as np

from bagua_ref.conformance.expected.decentralized_numpy import Array, added, restored, stored

__all__ = ["error_feedback_round", "kept", "sent_count", "topk_round"]


def error_feedback_round(
    inputs: list[Array], workers: list[Array], servers: list[Array], codec: str, dtype: str, filled: int, average: bool = True
) -> tuple[Array, list[Array], list[Array]]:
    """Return the result, and what every rank keeps: e and f.

    Args:
        inputs: x by rank, m elements with padding, numbers of ``dtype`` held as float32.
        workers: e by rank, of m elements.
        servers: f by rank, of m / n elements.
        codec: its name.
        dtype: of the result.
        filled: the elements before the padding.
        average: the mean instead of the sum.
    """
    n, m = len(inputs), len(inputs[0])
    chunks = [slice(place * m // n, (place + 1) * m // n) for place in range(n)]
    sent = [x + e for x, e in zip(inputs, workers, strict=True)]
    arrived = [np.concatenate([restored(p[chunk], "float32", codec) for chunk in chunks]) for p in sent]
    new_workers = [p - d for p, d in zip(sent, arrived, strict=True)]
    result, new_servers = np.zeros(m, np.float32), []
    for chunk, server in zip(chunks, servers, strict=True):
        total = added([d[chunk] for d in arrived])
        y = (total / np.float32(n) if average else total) + server
        result[chunk] = restored(y, "float32", codec)
        new_servers.append(y - result[chunk])
    for place in range(m):
        owner, within = divmod(place, m // n)
        if place >= filled:
            new_servers[owner][within] = 0
        elif np.isnan(result[place]):
            new_servers[owner][within] = servers[owner][within]
        for new, old in zip(new_workers, workers, strict=True):
            if place >= filled:
                new[place] = 0
            elif np.isnan(result[place]):
                new[place] = old[place]
    return stored(result, dtype), new_workers, new_servers


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
