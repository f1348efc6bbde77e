"""Compressed rounds of n ranks: PowerSGD (S10) of one gradient, any codec with error memory and
top-k (S11) of one bucket.

Functions take gradients, error memories and factors and return their successors, by rank where they
differ between ranks. Matrices and transmitted numbers are NumPy arrays of float32 (float64 for
float64). Bases depend on rounding, spans do not: compare PowerSGD's results and memories, round by
round from equal e and Q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from bagua_ref.conformance.expected.algorithms_numpy import inputs_of_leaders, padded, restored
from bagua_ref.conformance.expected.kernels_numpy import Array, added, divide, stored


def compressed_rank(shape: tuple[int, ...], rank: int, rate: float) -> int:
    """Return the compression rank r of a gradient of this shape, 0 if it is not compressed
    (S10.1).
    """
    if len(shape) < 2:
        return 0
    n, m = shape[0], math.prod(shape[1:])
    r = min(n, m, rank)
    return r if (n + m) * r * rate < n * m else 0


def orthonormal(matrix: Array) -> Array:
    """Return the matrix with orthonormal columns, or zeros in place of dependent ones (S10.3)."""
    wide = matrix.astype(np.float64)
    # else squares may overflow
    v: Array = np.ldexp(wide, -np.frexp(np.abs(wide).max(axis=0))[1])
    before = [dot(column, column) ** 0.5 for column in v.T]
    for i in range(v.shape[1]):
        norm = dot(v[:, i], v[:, i]) ** 0.5
        v[:, i] = v[:, i] / norm if norm > 1e-6 * before[i] else 0.0
        for j in range(i + 1, v.shape[1]):
            v[:, j] = v[:, j] - dot(v[:, i], v[:, j]) * v[:, i]
    return v.astype(matrix.dtype)


def dot(a: Array, b: Array) -> float:
    """Return the inner product, summed in index order: a library's order, and with it the last
    bits, depend on the processor.
    """
    return float(np.add.accumulate(a * b)[-1])


def product(a: Array, b: Array) -> Array:
    """Return the matrix product; each element's terms are summed in index order."""
    found: Array = np.add.accumulate(a[:, :, None] * b, axis=1)[:, -1]
    return found


def fresh(m: int, r: int, seed: int, k: int, i: int) -> Array:
    """Return N, the random columns of a round (S10.2)."""
    found: Array = torch.randn(
        m, r, generator=torch.Generator().manual_seed(seed + 1000003 * k + 7919 * i)
    ).numpy()
    return found


def start(q: Array | None, shape: tuple[int, int], dtype: type, seed: int, k: int, i: int) -> Array:
    """Return Q at the start of round k; ``q`` is that of the last round, None if there was none
    (S10.2).
    """
    columns: Array = fresh(*shape, seed, k, i).astype(dtype)
    found = orthonormal(columns if q is None else q)
    zero = [j for j in range(shape[1]) if not found[:, j].any()]
    if zero:
        found[:, zero] = columns[:, zero]
        found = orthonormal(found)
    return found


@dataclass
class LowRankRound:
    """Results of a round.

    Attributes:
        result: the averaged gradient.
        errors: e by rank; None without memory.
        q: Q for the next round; None if there is none yet.
    """

    result: Array
    errors: list[Array] | None
    q: Array | None


def power_sgd_round(
    gradients: list[Array],
    errors: list[Array] | None,
    q: Array | None,
    rank: int,
    *,
    memory: str | None,
    warm_start: bool = True,
    seed: int = 0,
    k: int = 0,
    i: int = 0,
) -> LowRankRound:
    """Return the results of a compressed round (S10.2 to S10.4).

    Args:
        gradients: n x m matrices, by rank.
        errors: e by rank; None without memory.
        q: m x r, Q after the last round; None in the first one.
        rank: the compression rank r.
        memory: "local", "averaged" or None.
        warm_start: as the algorithm's, like ``seed``.
        seed: likewise.
        k: number of earlier compressed rounds.
        i: the parameter's index.
    """
    given = gradients if errors is None else [g + e for g, e in zip(gradients, errors, strict=True)]
    m = given[0].shape[1]
    columns = start(q if warm_start else None, (m, rank), given[0].dtype.type, seed, k, i)
    with np.errstate(invalid="ignore", over="ignore"):
        p_sum = added([product(x, columns) for x in given])
        p = orthonormal(p_sum) if np.isfinite(p_sum).all() else p_sum
        own = [product(x.T, p) for x in given]
        q_mean = added(own) / given[0].dtype.type(len(given))
    if not (np.isfinite(p_sum).all() and np.isfinite(q_mean).all()):
        return LowRankRound(np.full_like(given[0], np.nan), errors, q)
    result = product(p, q_mean.T)
    left = None
    if memory == "local":
        left = [x - product(p, mine.T) for x, mine in zip(given, own, strict=True)]
    if memory == "averaged":
        left = [x - result for x in given]
    return LowRankRound(result, left, q_mean)


def norm(arrays: list[Array]) -> float:
    """Return an upper bound of an element's magnitude in projections of these matrices."""
    return max(
        [
            float(np.abs(x).max()) * sum(x.shape) ** 0.5
            for x in arrays
            if x.size and np.isfinite(x).all()
        ],
        default=0.0,
    )


def is_tame(columns: Array, size: float | None = None) -> bool:
    """Return whether the span of the columns is independent of rounding; columns of zeros do not
    count.

    Args:
        columns: the columns of one matrix.
        size: magnitude to which rounding errors are relative, such as `norm` of the summands, which
            may cancel. None: each column's norm.
    """
    columns = columns.astype(np.float64)
    if size is None:
        columns = np.ldexp(columns, -np.frexp(np.abs(columns).max(axis=0))[1])
    sizes = np.linalg.norm(columns, axis=0)
    if not np.isfinite(sizes).all():
        return False
    columns = columns[:, sizes > 0] / (sizes[sizes > 0] if size is None else size)
    values = np.linalg.svd(columns, compute_uv=False)
    return columns.shape[1] <= columns.shape[0] and (not values.size or bool(values[-1] > 1e-2))


def reach(
    gradients: list[Array],
    errors: list[Array] | None,
    q: Array | None,
    rank: int,
    *,
    warm_start: bool,
    seed: int,
    k: int,
    i: int,
) -> float:
    """Return an upper bound of an element's sum in a round; inf where rounding decides the span of
    the columns.

    The arguments are those of `power_sgd_round`.
    """
    every, known = [*gradients, *(errors or [])], q if warm_start else None
    columns, size = (
        start(known, (every[0].shape[1], rank), every[0].dtype.type, seed, k, i),
        norm(every),
    )
    return (
        size
        if is_tame(added(every) @ columns, size) and (known is None or is_tame(known))
        else math.inf
    )


def gram(q: Array) -> Array:
    """Return the projection Q Q^T in float64, which does not depend on the basis."""
    wide = q.astype(np.float64)
    return product(wide, wide.T)


def error_feedback_round(
    inputs: list[Array],
    workers: list[Array],
    servers: list[Array],
    codec: str,
    dtype: str,
    filled: int,
    average: bool = True,
) -> tuple[Array, list[Array], list[Array]]:
    """Return the result and every rank's error memories, e and f.

    Args:
        inputs: x by rank, m elements with padding, numbers of ``dtype`` held as float32.
        workers: e by rank, each of m elements.
        servers: f by rank, each of m / n elements.
        codec: name of the codec.
        dtype: dtype of the result.
        filled: number of elements before the padding.
        average: the mean instead of the sum.
    """
    n, m = len(inputs), len(inputs[0])
    chunks = [slice(place * m // n, (place + 1) * m // n) for place in range(n)]
    sent = [x + e for x, e in zip(inputs, workers, strict=True)]
    arrived = [
        np.concatenate([restored(p[chunk], "float32", codec) for chunk in chunks]) for p in sent
    ]
    totals = [added([d[chunk] for d in arrived]) for chunk in chunks]
    reduced = [
        (total / np.float32(n) if average else total) + f
        for total, f in zip(totals, servers, strict=True)
    ]
    result = np.concatenate([restored(y, "float32", codec) for y in reduced])

    def remembered(new: Array, old: Array, chunk: slice) -> Array:
        """Return the new error memory; it keeps the old values where the result is NaN, and zeros
        in the padding.
        """
        is_padding = np.arange(m)[chunk] >= filled
        return np.where(is_padding, np.float32(0), np.where(np.isnan(result[chunk]), old, new))

    new_workers = [
        remembered(p - d, e, slice(m)) for p, d, e in zip(sent, arrived, workers, strict=True)
    ]
    new_servers = [
        remembered(y - result[chunk], f, chunk)
        for y, f, chunk in zip(reduced, servers, chunks, strict=True)
    ]
    return stored(result, dtype), new_workers, new_servers


@dataclass
class ErrorFeedback:
    """All rounds of a bucket with error memory (S11.1), between all ranks or between node leaders
    (S3.3).

    Args:
        nodes: number of ranks on each node, whose leaders then have the memories; None: all ranks
            have memories.
        codec: name of the codec.
        dtype: dtype of the bucket.
        average: the mean instead of the sum.
    """

    nodes: list[int] | None
    codec: str
    dtype: str
    average: bool = True
    workers: list[Array] = field(default_factory=list)
    servers: list[Array] = field(default_factory=list)

    def round(self, ranks: list[Array]) -> Array:
        """Return the elements after a round, the same on every rank, without S5.2's padding."""
        given, filled = padded(ranks, self.nodes), ranks[0].size
        if self.nodes is not None:
            given = inputs_of_leaders(given, self.dtype, self.average, self.nodes)
        if not self.workers:
            self.workers = [np.zeros_like(x) for x in given]
            self.servers = [np.zeros(x.size // len(given), np.float32) for x in given]
        result, self.workers, self.servers = error_feedback_round(
            given, self.workers, self.servers, self.codec, self.dtype, filled, self.average
        )
        return result[:filled]


def sent_count(m: int, ratio: float) -> int:
    """Return k, the number of elements to send; a Python float is a float64."""
    return min(m, max(1, math.ceil(ratio * m)))


def kept(p: Array, k: int) -> list[int]:
    """Return the indices of the elements to send, ascending: NaN first, then the largest absolute
    values, equal ones in order.
    """
    is_nan = np.isnan(p)
    found: list[int] = np.sort(np.lexsort((-np.where(is_nan, 0, np.abs(p)), ~is_nan))[:k]).tolist()
    return found


def topk_round(
    gradients: list[Array], errors: list[Array] | None, ratio: float, dtype: str
) -> tuple[Array, list[Array] | None]:
    """Return the averaged gradient, and the new error memory of every rank.

    Args:
        gradients: m elements by rank, numbers of ``dtype`` held as float32.
        errors: e by rank; None: no memory.
        ratio: fraction of the m elements to send, rounded up to k.
        dtype: dtype of the result.
    """
    given = (
        [g.copy() for g in gradients]
        if errors is None
        else [g + e for g, e in zip(gradients, errors, strict=True)]
    )
    k = sent_count(given[0].size, ratio)
    total = np.zeros_like(given[0])
    left = given if all(np.isfinite(p).all() for p in given) else errors
    for p in given:
        sent = kept(p, k)
        total[sent] = total[sent] + p[sent]
        p[sent] = 0
    return divide(dtype, total, len(given)), None if errors is None else left
