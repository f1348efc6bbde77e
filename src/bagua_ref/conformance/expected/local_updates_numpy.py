"""Training of n ranks on local gradients: local SGD and DiLoCo with fragments (S9), in one loop
over all ranks.

Functions take gradients and return weights: by step, rank and parameter. Weights and gradients are
flat NumPy arrays of numbers of their dtype, held as float32 (float64 for float64); every operation
on them rounds to nearest-even. The inner optimizer is SGD; the outer one is torch's own, because
its rounding is part of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from bagua_ref.conformance.expected.algorithms_numpy import (
    full_precision,
    one_byte,
    step_of_sgd,
)
from bagua_ref.conformance.expected.compression_numpy import ErrorFeedback
from bagua_ref.conformance.expected.decentralized_numpy import library_mean
from bagua_ref.conformance.expected.kernels_numpy import Array, add, stored

Weights = list[Array]
"""One rank's parameters."""

Gradients = Sequence[Array | None]
"""One rank's gradients, by parameter; None: the rank does not use it in this step."""

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def fragment_of(sizes: list[int], count: int) -> list[int]:
    """Return the fragment index of each parameter, from the parameters' sizes in bytes (S9.3)."""
    total, found, last = sum(sizes), [], -1
    for i, size in enumerate(sizes):
        middle = sum(sizes[:i]) + Fraction(size, 2)
        share = math.floor(count * middle / total) if total else 0
        last = max(min(share, last + 1, count - 1), count - len(sizes) + i)
        found.append(last)
    return found


def places_of(sizes: list[int], count: int) -> list[list[int]]:
    """Return the parameter indices of each fragment, from the parameters' sizes in bytes (S9.3)."""
    found = fragment_of(sizes, count)
    return [
        [place for place, fragment in enumerate(found) if fragment == wanted]
        for wanted in range(count)
    ]


def is_averaged(t: int, *, period: int, offset: int = 0, warmup_steps: int = 0) -> bool:
    """Return whether local SGD averages weights after step t (S9.1)."""
    return t > warmup_steps and (t - warmup_steps - offset) % period == 0


def fragment_due(
    t: int, *, period: int, fragments: int, warmup_steps: int = 0, delay: int = 0
) -> int | None:
    """Return the fragment to apply after step t, or with its delay the one to send; None if there
    is none (S9.4).
    """
    gap, local_step = period // fragments, t - warmup_steps
    due = [
        p
        for p in range(fragments)
        if local_step > 0 and (local_step - ((p + 1) * gap - delay)) % period == 0
    ]
    return due[0] if due else None


def averaged(ranks: Sequence[Sequence[Any]], dtypes: list[str]) -> list[Any]:
    """Return the mean over the ranks, once per rank; None counts as 0, and is the mean if no rank
    has a gradient (S2.5).
    """
    means: list[Any] = []
    for column, dtype in zip(zip(*ranks, strict=True), dtypes, strict=True):
        zero = next((np.zeros_like(x) for x in column if x is not None), None)
        numbers: list[Any] = [zero if x is None else x for x in column]
        means.append(zero if zero is None else library_mean(numbers, dtype))
    return [list(means) for _ in ranks]


@dataclass
class InnerSGD:
    """torch's SGD on every rank: ``b <- momentum*b + grad``, starting with grad, then ``x <- x -
    lr*b``; b stays local.
    """

    lr: float
    momentum: float
    dtypes: list[str]
    _buffers: dict[tuple[int, int], Array] = field(default_factory=dict)

    def step(self, ranks: list[Weights], gradients: Sequence[Gradients]) -> list[Weights]:
        """Return the weights after a step on every rank."""
        return [
            [
                x if grad is None else self._moved((rank, place), x, grad)
                for place, (x, grad) in enumerate(zip(*pair, strict=True))
            ]
            for rank, pair in enumerate(zip(ranks, gradients, strict=True))
        ]

    def _moved(self, key: tuple[int, int], x: Array, grad: Array) -> Array:
        dtype = self.dtypes[key[1]]
        if self.momentum:
            if key in self._buffers:
                kept = stored(self._buffers[key] * x.dtype.type(self.momentum), dtype)
                grad = add(dtype, kept, grad)
            self._buffers[key] = grad
        return step_of_sgd(x, grad, self.lr, dtype)


def local_sgd(
    start: Weights,
    gradients: Sequence[Sequence[Gradients]],
    lr: float,
    dtypes: list[str],
    nodes: list[int],
    *,
    period: int,
    warmup_steps: int = 0,
    offset: int = 0,
    hierarchical: bool = False,
    momentum: float = 0.0,
) -> list[list[Weights]]:
    """Return the weights after each step (S9.1)."""
    ranks, history, inner = [start] * sum(nodes), [], InnerSGD(lr, momentum, dtypes)
    for t, given in enumerate(gradients, start=1):
        if t <= warmup_steps:
            given = averaged(given, dtypes)
        elif hierarchical:
            first = np.cumsum([0, *nodes])
            given = [
                x
                for place, size in enumerate(nodes)
                for x in averaged(given[first[place] : first[place] + size], dtypes)
            ]
        ranks = inner.step(ranks, given)
        if is_averaged(t, period=period, offset=offset, warmup_steps=warmup_steps):
            ranks = averaged(ranks, dtypes)
        history.append(ranks)
    return history


@dataclass
class DiLoCo:
    """All ranks of a training with DiLoCo (S9.2 to S9.5); `step` takes every rank's gradients.

    Args:
        start: the weights at the beginning, equal on all ranks.
        n: the number of ranks.
        lr: learning rate of the inner SGD.
        dtypes: dtypes of the parameters.
        fragments: the parameter indices of each fragment.
        outer: factory of a fragment's outer optimizer.
        period: as in S9.2, like the others.
        delay: likewise.
        mix: likewise.
        warmup_steps: likewise.
        compression: None or "MinMaxUInt8".
        error_feedback: as in S9.2; each fragment has memories.
        momentum: momentum of the inner SGD.

    Attributes:
        ranks: every rank's weights.
        g: the global copy; None before step warmup_steps + 1.
    """

    start: Weights
    n: int
    lr: float
    dtypes: list[str]
    fragments: list[list[int]]
    outer: Outer
    _: KW_ONLY
    period: int
    delay: int = 0
    mix: float = 0.0
    warmup_steps: int = 0
    compression: str | None = None
    error_feedback: bool = False
    momentum: float = 0.0

    def __post_init__(self) -> None:
        self.ranks, self.t = [self.start] * self.n, 0
        self.g: Weights | None = None
        self._inner = InnerSGD(self.lr, self.momentum, self.dtypes)
        self._sent: dict[int, Weights] = {}
        self._memories: dict[int, ErrorFeedback] = {}

    def _due(self, delay: int) -> int | None:
        return fragment_due(
            self.t,
            period=self.period,
            fragments=len(self.fragments),
            warmup_steps=self.warmup_steps,
            delay=delay,
        )

    def step(self, gradients: Sequence[Gradients]) -> None:
        """Take step t on every rank.

        Raises:
            ArithmeticError: a mean of differences is not finite; nothing has been applied.
        """
        self.t += 1
        if self.t == self.warmup_steps + 1:
            self.g = [x.copy() for x in self.ranks[0]]
            self._in_torch = [torch.nn.Parameter(torch.from_numpy(g.copy())) for g in self.g]
            self._optimizers = [
                self.outer([self._in_torch[place] for place in places]) for places in self.fragments
            ]
        given = averaged(gradients, self.dtypes) if self.t <= self.warmup_steps else gradients
        self.ranks = self._inner.step(self.ranks, given)
        if (sent := self._due(self.delay)) is not None:
            self._sent[sent] = self._mean_difference(sent)
        if (applied := self._due(0)) is not None and applied in self._sent:
            self._apply(applied, self._sent.pop(applied))

    def _mean_difference(self, p: int) -> Weights:
        """Return D of a fragment by parameter, the mean of g - x over ranks (S9.5)."""
        assert self.g is not None
        exchange = (
            full_precision(average=True)
            if self.compression is None
            else one_byte(average=True, nodes=None)
        )
        found: dict[int, Array] = {}
        for wide in (np.float32, np.float64):  # a flat buffer for each dtype of g
            places = [place for place in self.fragments[p] if self.g[place].dtype == wide]
            if not places:
                continue
            flats = [
                np.concatenate([self.g[place] - x[place] for place in places]) for x in self.ranks
            ]
            mean = (
                self._with_memory(p, flats)
                if self.error_feedback
                else exchange(flats, str(flats[0].dtype))
            )
            for place in places:
                found[place], mean = mean[: self.g[place].size], mean[self.g[place].size :]
        return [found[place] for place in self.fragments[p]]

    def _with_memory(self, p: int, flats: list[Array]) -> Array:
        """Return a fragment's mean over ranks, compressed with error memories; these stay as they
        were if the mean is not finite (S9.5).
        """
        memory = self._memories.setdefault(p, ErrorFeedback(None, str(self.compression), "float32"))
        before = memory.workers, memory.servers
        mean = memory.round(flats)
        if not np.isfinite(mean).all():
            memory.workers, memory.servers = before
        return mean

    def _apply(self, p: int, mean: Weights) -> None:
        """Step the fragment's outer optimizer with D, and update every rank's weights (S9.4)."""
        assert self.g is not None
        if not all(np.isfinite(d).all() for d in mean):
            raise ArithmeticError(f"D of fragment {p} is not finite")
        for place, d in zip(self.fragments[p], mean, strict=True):
            self._in_torch[place].grad = torch.from_numpy(d.copy())
        self._optimizers[p].step()
        for place in self.fragments[p]:
            self._in_torch[place].grad = None
            self.g[place] = self._in_torch[place].detach().numpy().copy()
        self.ranks = [
            [
                mixed(x, self.g[place], self.mix, dtype) if place in self.fragments[p] else x
                for place, (x, dtype) in enumerate(zip(weights, self.dtypes, strict=True))
            ]
            for weights in self.ranks
        ]


def mixed(x: Array, g: Array, mix: float, dtype: str) -> Array:
    """Return the mixture of x and g (S9.4)."""
    factor: Any = x.dtype.type
    if mix == 0:
        return stored(g, dtype)
    if mix < 0.5:
        return stored(g + factor(mix) * (x - g), dtype)
    return stored(x - (x - g) * factor(1 - mix), dtype)
