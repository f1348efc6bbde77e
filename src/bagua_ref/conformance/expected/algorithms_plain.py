"""Training of n ranks that exchange gradients (S2.1, S2.2, S2.5, S5.1, S5.2), in one loop over all ranks.

A parameter is a flat list of Python floats that are numbers of its dtype. Gradients come by step, rank and parameter; None where
a rank does not use a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bagua_ref.conformance.expected.comm_ops_scalar import hierarchical, low_precision
from bagua_ref.conformance.expected.rounding import arithmetic, to

Numbers = list[float]
Parameters = list[Numbers]
Exchange = Callable[[Parameters, str], Parameters]
"""Each rank's numbers of one bucket, and their dtype -> the same after the operation."""

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


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
    """Return the sum or mean over all ranks (S5.1), exact and then rounded once."""

    def exchange(ranks: Parameters, dtype: str) -> Parameters:
        divisor = len(ranks) if average else 1
        total = [to(dtype, math.fsum(column) / divisor) for column in zip(*ranks, strict=True)]
        return [total for _ in ranks]

    return exchange


def one_byte(average: bool, nodes: list[int], between_leaders: bool) -> Exchange:
    """Return the exchange of S5.2: pad with zeros, then send one byte per element, between node leaders if asked to."""
    n, leaders = sum(nodes), len(nodes)
    alignment = n * leaders // math.gcd(n, leaders) if between_leaders else n

    def exchange(ranks: Parameters, dtype: str) -> Parameters:
        size = len(ranks[0])
        padded = [x + [0.0] * (-size % alignment) for x in ranks]
        if between_leaders:
            results = hierarchical(low_precision, padded, nodes, dtype, average)
        else:
            results = low_precision(padded, dtype, average)
        return [x[:size] for x in results]

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
