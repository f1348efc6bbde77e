"""Exchange of gradients between n ranks (S3.1 to S3.3), and training on it (S2.1, S2.2, S2.5, S5.1, S5.2, S5.5), of all ranks.

A rank's numbers, and a parameter, are a flat list of Python floats that are numbers of the dtype. Gradients come by step, rank and
parameter; None where a rank does not use a parameter.

QAdam's warm-up is the installed ``torch.optim.Adam``, because that is how S5.5 defines it: its fused operations are not the same on
every processor. All that follows is one number at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bagua_ref.conformance.expected.codecs_scalar import compress_minmax, decompress_minmax
from bagua_ref.conformance.expected.decentralized_numpy import split
from bagua_ref.conformance.expected.kernels_scalar import arithmetic, divide, reduce_in_order, to, update_momentum

Numbers = list[float]
Parameters = list[Numbers]
Exchange = Callable[[Parameters, str], Parameters]
"""Each rank's numbers of one bucket, and their dtype -> the same after the operation."""

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def scatter_gather(xs: Parameters, dtype: str, average: bool) -> Parameters:
    """Add element by element in rank order (S3.1, S3.7)."""
    total = [reduce_in_order(dtype, list(column), average) for column in zip(*xs, strict=True)]
    return [list(total) for _ in xs]


def low_precision(xs: Parameters, dtype: str, average: bool) -> Parameters:
    """Send chunk t of every rank to rank t as one byte per element, reduce it there, and send back the result (S3.2)."""
    n, size = len(xs), len(xs[0]) // len(xs)
    result: Numbers = []
    for t in range(n):
        blocks = [compress_minmax(x[t * size : (t + 1) * size], dtype) for x in xs]
        total = scatter_gather([decompress_minmax(block, size, dtype) for block in blocks], dtype, average)[0]
        result += decompress_minmax(compress_minmax(total, dtype), size, dtype)
    return [list(result) for _ in xs]


def node_sum(node: Parameters, dtype: str, divisor: float | None) -> Numbers:
    """Return the leader's input: the node's sum in float32 divided by float32(n/L), rounded once (S3.3)."""
    r, wide = arithmetic(dtype), "float64" if dtype == "float64" else "float32"
    totals = [reduce_in_order(wide, list(column), False) for column in zip(*node, strict=True)]
    return [to(dtype, total if divisor is None else r(divide(total, r(divisor)))) for total in totals]


def centralized(xs: Parameters, dtype: str, average: bool, one_byte: bool, nodes: list[int] | None) -> Parameters:
    """Reduce all ranks' numbers, as one byte per element or in full; with ``nodes``, between their leaders (S3.1 to S3.3)."""
    operation = low_precision if one_byte else scatter_gather
    if nodes is None:
        return operation(xs, dtype, average)
    divisor = len(xs) / len(nodes) if average else None
    results = operation([node_sum(node, dtype, divisor) for node in split(xs, nodes)], dtype, average)
    return [list(result) for result, size in zip(results, nodes, strict=True) for _ in range(size)]


def buckets(sizes: list[int], dtypes: list[str], bucket_bytes: int) -> list[list[int]]:
    """Return which parameters share a bucket, in the order in which they lie there (S2.1)."""
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


def sgd(dtype: str, weights: Numbers, gradient: Numbers, lr: float) -> Numbers:
    """Return ``w - lr*g``, each operation rounded."""
    r = arithmetic(dtype)
    return [to(dtype, r(w - r(lr * g))) for w, g in zip(weights, gradient, strict=True)]


def full_precision(average: bool) -> Exchange:
    """Return the sum or mean over all ranks (S5.1)."""
    return lambda ranks, dtype: scatter_gather(ranks, dtype, average)


def one_byte(average: bool, nodes: list[int], between_leaders: bool) -> Exchange:
    """Return the exchange of S5.2: pad with zeros, then send one byte per element, between node leaders if asked to."""
    n, leaders = sum(nodes), len(nodes)
    alignment = n * leaders // math.gcd(n, leaders) if between_leaders else n

    def exchange(ranks: Parameters, dtype: str) -> Parameters:
        size = len(ranks[0])
        padded = [x + [0.0] * (-size % alignment) for x in ranks]
        return [x[:size] for x in centralized(padded, dtype, average, True, nodes if between_leaders else None)]

    return exchange


def train_on_gradients(
    weights: Parameters,
    gradients: list[list[list[Numbers | None]]],
    lr: float,
    dtypes: list[str],
    bucket_bytes: int,
    exchange: Exchange,
) -> list[Parameters]:
    """Return the weights after each step, which are the same on all ranks."""
    sizes = [len(w) for w in weights]
    layout = buckets(sizes, dtypes, bucket_bytes)
    history = []
    for ranks in gradients:
        weights = list(weights)
        for places in layout:
            dtype = dtypes[places[0]]
            brought = [[x for place in places for x in _used(rank[place], sizes[place])] for rank in ranks]
            result = exchange(brought, dtype)[0]
            for place in places:
                mine, result = result[: sizes[place]], result[sizes[place] :]
                weights[place] = sgd(dtype, weights[place], mine, lr)
        history.append(weights)
    return history


def _used(gradient: Numbers | None, size: int) -> Numbers:
    """Return a zero gradient for a parameter that is not used (S2.5)."""
    return [0.0] * size if gradient is None else gradient


class QAdam:
    """QAdam on n ranks at once, which hold the same weights and moments at every step.

    Args:
        weights: each parameter's numbers.
        options: each parameter's ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        warmup_steps: the last step with exact gradients.
        nodes: number of ranks on each node.
        buckets: places of the parameters in each bucket, in order.
        hierarchical: compress between node leaders.
        dtype: of all parameters.
        exchanges: of each bucket's momenta; None: S5.2's.
    """

    def __init__(
        self,
        weights: Parameters,
        options: list[dict[str, Any]],
        warmup_steps: int,
        nodes: list[int],
        buckets: list[list[int]],
        hierarchical: bool,
        dtype: str = "float32",
        exchanges: list[Exchange] | None = None,
    ) -> None:
        self.weights, self.options, self.warmup_steps = [list(w) for w in weights], options, warmup_steps
        self.nodes, self.buckets, self.hierarchical, self.dtype = nodes, buckets, hierarchical, dtype
        self._exchanges = exchanges or [one_byte(average=True, nodes=nodes, between_leaders=hierarchical)] * len(buckets)
        self.m: Parameters = [[0.0] * len(w) for w in weights]
        self.v: Parameters = [[0.0] * len(w) for w in weights]
        self.s = 0
        self._in_torch = [torch.nn.Parameter(torch.tensor(w, dtype=getattr(torch, dtype))) for w in weights]
        groups = [{"params": [p], **o} for p, o in zip(self._in_torch, options, strict=True)]
        self._adam = torch.optim.Adam(groups, foreach=False)

    def step(self, gradients: list[Parameters], options: list[dict[str, Any]] | None = None) -> None:
        """Take a step with every rank's gradients; ``options`` replace the previous ones, as a scheduler does."""
        self.options = options or self.options
        self.s += 1
        if self.s > self.warmup_steps:
            self._exchange_momenta(gradients)
        if self.s < self.warmup_steps:
            self._step_adam(gradients)
        else:
            for place in range(len(self.weights)):
                self._step_frozen(place)

    def _step_adam(self, gradients: list[Parameters]) -> None:
        for place, parameter in enumerate(self._in_torch):
            columns = zip(*[rank[place] for rank in gradients], strict=True)
            mean = [reduce_in_order(self.dtype, list(column), True) for column in columns]
            parameter.grad = torch.tensor(mean, dtype=parameter.dtype)
            self._adam.param_groups[place].update(self.options[place])
        self._adam.step()
        for place, parameter in enumerate(self._in_torch):
            self.weights[place] = parameter.tolist()
            self.m[place] = self._adam.state[parameter]["exp_avg"].tolist()
            self.v[place] = self._adam.state[parameter]["exp_avg_sq"].tolist()

    def _exchange_momenta(self, gradients: list[Parameters]) -> None:
        for bucket, exchange in zip(self.buckets, self._exchanges, strict=True):
            xs = []
            for rank in gradients:
                x: list[float] = []
                for place in bucket:
                    beta1 = self.options[place]["betas"][0]
                    x += [update_momentum(self.dtype, m, g, beta1) for m, g in zip(self.m[place], rank[place], strict=True)]
                xs.append(x)
            results = exchange(xs, self.dtype)
            assert all(np.array_equal(result, results[0], equal_nan=True) for result in results)
            for place in bucket:
                size = len(self.m[place])
                self.m[place], results[0] = results[0][:size], results[0][size:]

    def _step_frozen(self, place: int) -> None:
        options = {name: self.options[place][name] for name in ("lr", "betas", "eps")}
        m, v, past = self.m[place], self.v[place], self.s > self.warmup_steps
        self.weights[place] = step_along_momentum(self.dtype, self.weights[place], m, v, self.s, keeps_zeros=past, **options)


def step_along_momentum(
    dtype: str,
    weights: list[float],
    m: list[float],
    v: list[float],
    s: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    keeps_zeros: bool = True,
) -> list[float]:
    """Return one parameter's weights after step s of S5.5; where v is 0, they stay as they are if ``keeps_zeros``."""
    r = arithmetic(dtype)
    step_size, correction = r(-lr / (1 - betas[0] ** s)), r((1 - betas[1] ** s) ** 0.5)
    # A float16 denominator is formed in float32, where eps does not vanish.
    wide = "float32" if dtype == "float16" else dtype
    roots = torch.tensor(v, dtype=getattr(torch, wide)).sqrt().tolist()  # its last bit is torch's own (S1)
    moved = list(weights)
    for i, (p, momentum, root) in enumerate(zip(weights, m, roots, strict=True)):
        if root == 0 and keeps_zeros:
            continue
        denominator = to(wide, r(to(wide, r(divide(root, correction))) + to(wide, r(eps))))
        moved[i] = to(dtype, r(p + r(divide(r(step_size * momentum), denominator))))
    return moved
