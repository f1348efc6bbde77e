"""Exchange of gradients between n ranks (S3.1 to S3.3), and training with it (S2.1, S2.2, S2.5,
S5.1, S5.2, S5.5), computed for all ranks at once.

A rank's numbers are a flat array as in `kernels_numpy`.
``nodes`` is the number of ranks on each node, in rank order, if node leaders communicate; None: all
ranks do. Results of operations are the same on all ranks.

QAdam's warm-up is the installed ``torch.optim.Adam``, because that is how S5.5 defines it: its
fused operations are not the same on every processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bagua_ref.conformance.expected.codecs_scalar import MINMAX, compress_chunk, decompress_chunk
from bagua_ref.conformance.expected.kernels_numpy import (
    Array,
    add_scaled,
    added,
    divide,
    reduce_chunks,
    stored,
    update_momentum,
)

Exchange = Callable[[list[Array], str], Array]
"""Function from each rank's numbers of one bucket, and their dtype, to every rank's numbers after
the operation.
"""

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def step_of_sgd(x: Array, grad: Array, lr: float, dtype: str) -> Array:
    """Take a step of plain SGD; equals torch's if lr * grad is a number of the dtype."""
    return add_scaled(dtype, x, grad, -lr)


def restored(x: Array, dtype: str, codec: str = MINMAX) -> Array:
    """Return x after a round trip through compression as one chunk."""
    return np.array(
        decompress_chunk(codec, compress_chunk(codec, x.tolist(), dtype), x.size, dtype), x.dtype
    )


def split(ranks: list[Any], nodes: list[int]) -> list[list[Any]]:
    """Return the ranks grouped by node."""
    ends = np.cumsum(nodes)
    return [ranks[end - size : end] for end, size in zip(ends, nodes, strict=True)]


def padded(ranks: list[Array], nodes: list[int] | None) -> list[Array]:
    """Return each rank's numbers, padded with zeros to a multiple of the number of chunks (S2.2,
    S5.2).
    """
    return [np.pad(x, (0, -x.size % math.lcm(len(ranks), len(nodes or ranks)))) for x in ranks]


def low_precision(ranks: list[Array], dtype: str, average: bool) -> Array:
    """Send chunk t of every rank to rank t as one byte per element, reduce it there, and send back
    the result (S3.2).
    """
    chunks = zip(*(np.split(x, len(ranks)) for x in ranks), strict=True)
    reduced = [
        reduce_chunks(dtype, [restored(x, dtype) for x in chunk], average) for chunk in chunks
    ]
    return np.concatenate([restored(x, dtype) for x in reduced])


def inputs_of_leaders(
    ranks: list[Array], dtype: str, average: bool, nodes: list[int]
) -> list[Array]:
    """Return the leaders' inputs: the sums of nodes in float32; for the mean, divided by
    float32(n/L), rounded once (S3.3).
    """
    divisor = len(ranks) / len(nodes) if average else 1
    return [divide(dtype, added(node), divisor) for node in split(ranks, nodes)]


def centralized(
    ranks: list[Array], dtype: str, average: bool, one_byte: bool, nodes: list[int] | None
) -> Array:
    """Reduce all ranks' numbers, compressed to one byte per element or in full precision (S3.1 to
    S3.3).
    """
    if nodes is not None:
        ranks = inputs_of_leaders(ranks, dtype, average, nodes)
    return (
        low_precision(ranks, dtype, average) if one_byte else reduce_chunks(dtype, ranks, average)
    )


def buckets(sizes: list[int], dtypes: list[str], bucket_bytes: int) -> list[list[int]]:
    """Return the parameter indices of each bucket, in their order in memory (S2.1)."""
    found = []
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        places, filled = [], 0
        for place in range(len(sizes) - 1, -1, -1):
            if dtypes[place] == dtype:
                places.append(place)
                filled += sizes[place] * _BYTES[dtype]
                if filled >= bucket_bytes:
                    found.append(places)
                    places, filled = [], 0
        if places:
            found.append(places)
    return found


def full_precision(average: bool) -> Exchange:
    """Return the sum or mean over all ranks (S5.1)."""
    return lambda ranks, dtype: reduce_chunks(dtype, ranks, average)


def one_byte(average: bool, nodes: list[int] | None) -> Exchange:
    """Return the exchange of S5.2: pad with zeros, then send one byte per element."""
    return lambda ranks, dtype: centralized(padded(ranks, nodes), dtype, average, True, nodes)[
        : ranks[0].size
    ]


def train_on_gradients(
    start: Array, gradients: list[list[Array]], lr: float, dtype: str, exchange: Exchange
) -> list[Array]:
    """Return a bucket's weights after each step, equal on all ranks; gradients are indexed by step
    and rank (S5.1, S5.2).
    """
    weights, history = start, []
    for ranks in gradients:
        weights = step_of_sgd(weights, exchange(ranks, dtype), lr, dtype)
        history.append(weights)
    return history


@dataclass
class QAdam:
    """QAdam on n ranks at once, whose weights and moments are equal at every step.

    Args:
        weights: each parameter's numbers.
        options: each parameter's ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        warmup_steps: the last step with exact gradients.
        exchanges: for each bucket, the parameter indices in order, and the exchange of its momenta.
        dtype: dtype of all parameters.
    """

    weights: list[Array]
    options: list[dict[str, Any]]
    warmup_steps: int
    exchanges: list[tuple[list[int], Exchange]]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self.weights, self.s = list(self.weights), 0
        self.m, self.v = ([np.zeros_like(w) for w in self.weights] for _ in range(2))
        kind = getattr(torch, self.dtype)
        self._in_torch = [torch.nn.Parameter(torch.tensor(w).to(kind)) for w in self.weights]
        groups = [{"params": [p], **o} for p, o in zip(self._in_torch, self.options, strict=True)]
        self._adam = torch.optim.Adam(groups, foreach=False)

    @np.errstate(all="ignore")
    def step(self, gradients: list[list[Array | None]]) -> None:
        """Take a step with every rank's gradients, None for parameters that a rank does not use.

        A parameter that no rank uses has no gradient and keeps its weights and moments; elsewhere
        a missing gradient is zero (S2.5).
        """
        self.s += 1
        used = [any(rank[place] is not None for rank in gradients) for place in range(len(self.m))]
        if self.s > self.warmup_steps:
            self._exchange_momenta(gradients, used)
        if self.s < self.warmup_steps:
            self._step_adam(gradients, used)
            return
        for place, w in enumerate(self.weights):
            if not used[place]:
                continue
            options = {name: self.options[place][name] for name in ("lr", "betas", "eps")}
            self.weights[place] = step_along_momentum(
                self.dtype,
                w,
                self.m[place],
                self.v[place],
                self.s,
                keeps_zeros=self.s > self.warmup_steps,
                **options,
            )

    def _step_adam(self, gradients: list[list[Array | None]], used: list[bool]) -> None:
        for place, parameter in enumerate(self._in_torch):
            mean = reduce_chunks(self.dtype, [self._gradient(rank, place) for rank in gradients])
            parameter.grad = torch.tensor(mean).to(parameter.dtype) if used[place] else None
        self._adam.step()
        for place, parameter in enumerate(self._in_torch):
            if not used[place]:
                continue
            state, kind = self._adam.state[parameter], self.weights[place].dtype
            kept = (parameter, state["exp_avg"], state["exp_avg_sq"])
            self.weights[place], self.m[place], self.v[place] = (
                np.array(x.tolist(), kind) for x in kept
            )

    def _gradient(self, rank: list[Array | None], place: int) -> Array:
        given = rank[place]
        return np.zeros_like(self.weights[place]) if given is None else given

    def _exchange_momenta(self, gradients: list[list[Array | None]], used: list[bool]) -> None:
        for bucket, exchange in self.exchanges:
            momenta = [
                [
                    update_momentum(
                        self.dtype,
                        self.m[place],
                        self._gradient(rank, place),
                        self.options[place]["betas"][0],
                    )
                    for place in bucket
                ]
                for rank in gradients
            ]
            result = exchange([np.concatenate(of_rank) for of_rank in momenta], self.dtype)
            ends = np.cumsum([self.m[place].size for place in bucket])[:-1]
            for place, m in zip(bucket, np.split(result, ends), strict=True):
                if used[place]:
                    self.m[place] = m


def step_along_momentum(
    dtype: str,
    weights: Array,
    m: Array,
    v: Array,
    s: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    keeps_zeros: bool = True,
) -> Array:
    """Return one parameter's weights after step s of S5.5; with ``keeps_zeros``, they are unchanged
    where v is 0.
    """
    number = weights.dtype.type
    step_size, correction = number(-lr / (1 - betas[0] ** s)), number((1 - betas[1] ** s) ** 0.5)
    # A float16 denominator is formed in float32, where eps does not vanish.
    wider = "float32" if dtype == "float16" else dtype
    # its last bit is torch's own (S1)
    root = np.array(torch.tensor(v).to(getattr(torch, wider)).sqrt().tolist(), v.dtype)
    denominator = stored(
        stored(root / correction, wider) + stored(np.full(1, eps, v.dtype), wider), wider
    )
    moved = stored(weights + step_size * m / denominator, dtype)
    return np.where((root == 0) & keeps_zeros, weights, moved)
