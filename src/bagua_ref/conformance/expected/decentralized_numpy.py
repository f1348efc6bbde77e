"""Training of n ranks on averaged weights (S3.4, S3.5, S5.3, S5.4, S13), in one loop over all
ranks.

Functions take gradients and return weights: NumPy arrays as in `algorithms_numpy`, like ``nodes``.
Averages along graphs (S13.1 to S13.4) are computed on arrays whose row r belongs to rank r.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bagua_ref.conformance.expected.algorithms_numpy import (
    restored,
    split,
    step_of_sgd,
)
from bagua_ref.conformance.expected.codecs_scalar import MINMAX
from bagua_ref.conformance.expected.kernels_numpy import (
    Array,
    add,
    combine_ring,
    divide,
    reduce_chunks,
    stored,
)

Weights: TypeAlias = Sequence[Sequence[Sequence[Any]]]
"""A graph: for each receiving rank, (source, weight) pairs."""
Mode: TypeAlias = "str | Sequence[Weights]"
"""The choice of peers: the name of a mode, or a cycle of graphs."""


def between_leaders(
    operation: Callable[[list[Array]], list[Array]],
    ranks: list[Array],
    dtype: str,
    nodes: list[int] | None,
) -> list[Array]:
    """Apply an operation to the arrays of all ranks; with ``nodes``, to node means, whose results
    all ranks of a node get.
    """
    if nodes is None:
        return operation(ranks)
    results = operation([reduce_chunks(dtype, node) for node in split(ranks, nodes)])
    return [x.copy() for x, size in zip(results, nodes, strict=True) for _ in range(size)]


def library_mean(ranks: list[Array], dtype: str) -> Array:
    """Return the mean, summed in rank order as the simulated world does; a library may use another
    order (S3.7).
    """
    return divide(dtype, functools.reduce(np.add, ranks), len(ranks))


def pairs(n: int, step: int) -> dict[int, int]:
    """Return the pairs of a step: rank i of the first half with rank ``i + step`` of the second
    half, cyclically (S3.4).
    """
    half = n // 2
    found = {i: half + (i + step) % half for i in range(half)}
    return found | {b: a for a, b in found.items()}


def average(
    ranks: list[Array], dtype: str, mode: Mode, nodes: list[int] | None, step: int
) -> list[Array]:
    """Return the weights after averaging round ``step`` (S3.4, S13)."""
    if mode == "all":
        return [library_mean(ranks, dtype) for _ in ranks]

    def of_some(talking: list[Array]) -> list[Array]:
        return [stored(x, dtype) for x in averaged(np.stack(talking), mode, step)]

    return between_leaders(of_some, ranks, dtype, nodes)


@dataclass
class Ring:
    """Each rank's replicas: its own weights, its left and its right neighbour's (S3.5)."""

    W: list[Array]
    L: list[Array]
    R: list[Array]

    @classmethod
    def of(cls, ranks: list[Array]) -> Ring:
        """Return the replicas at the start, from every rank's weights."""
        return cls(ranks, [*ranks[-1:], *ranks[:-1]], [*ranks[1:], *ranks[:1]])

    def step(self, ranks: list[Array], dtype: str, codec: str = MINMAX) -> list[Array]:
        """Return every rank's new weights."""
        moved = zip(ranks, self.L, self.R, self.W, strict=True)
        changes = [restored(combine_ring(dtype, *row), dtype, codec) for row in moved]
        left, right = [*changes[-1:], *changes[:-1]], [*changes[1:], *changes[:1]]
        self.W = [add(dtype, x, change) for x, change in zip(self.W, changes, strict=True)]
        self.L = [add(dtype, x, change) for x, change in zip(self.L, left, strict=True)]
        self.R = [add(dtype, x, change) for x, change in zip(self.R, right, strict=True)]
        return self.W


def train_decentralized(
    start: Array,
    gradients: list[list[Array]],
    lr: float,
    dtype: str,
    nodes: list[int] | None,
    mode: Mode | None,
    interval: int,
    codec: str = MINMAX,
) -> list[list[Array]]:
    """Return the weights after each step, by rank; ``gradients[step][rank]`` were computed before
    the averaging (S5.3).

    Without a mode, ranks average on the ring with this codec, after the optimizer's step (S5.4).
    """
    ranks, history = [start.copy() for _ in gradients[0]], []
    ring = Ring.of([start for _ in nodes or ranks])
    for step, grads in enumerate(gradients):
        averages = step % interval == 0
        if averages and mode is not None:
            ranks = average(ranks, dtype, mode, nodes, step // interval)
        ranks = [step_of_sgd(x, grad, lr, dtype) for x, grad in zip(ranks, grads, strict=True)]
        if averages and mode is None:
            ranks = between_leaders(lambda x: ring.step(x, dtype, codec), ranks, dtype, nodes)
        history.append(ranks)
    return history


def doublings(n: int) -> int:
    """Return ceil(log2 n), by doubling."""
    count = 0
    while 2**count < n:
        count += 1
    return count


def averaged(x: Array, mode: Mode, t: int) -> Array:
    """Return every rank's average at step t, before rounding to the dtype.

    Args:
        x: array of shape (n, m), float32 or float64.
        mode: name of a mode, or a cycle of graphs.
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
    """Return the array that each rank receives when rank r sends to rank r + distance."""
    return np.roll(x, distance, axis=0)


def _over(total: Array, count: int) -> Array:
    result: Array = total / total.dtype.type(count)
    return result


def _shift_one(x: Array, t: int) -> Array:
    peers = pairs(len(x), t)
    return _over(x[[peers[rank] for rank in range(len(x))]] + x, 2)


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
    "shift_one": _shift_one,
    "one_peer_exponential": _one_peer_exponential,
    "hypercube": _hypercube,
    "ring": _ring,
    "exponential": _exponential,
}
