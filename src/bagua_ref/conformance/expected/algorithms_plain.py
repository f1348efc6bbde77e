"""Exchange of gradients between n ranks (S3.1 to S3.3), and training on it (S2.1, S2.2, S2.5, S5.1, S5.2), for all ranks at once.

A rank's numbers, and a parameter, are a flat list of Python floats that are numbers of the dtype. Gradients come by step, rank and
parameter; None where a rank does not use a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bagua_ref.conformance.expected.codecs_scalar import compress_minmax, decompress_minmax
from bagua_ref.conformance.expected.kernels_scalar import arithmetic, divide, reduce_in_order, to

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
        arrived = []
        for x in xs:
            block = compress_minmax(x[t * size : (t + 1) * size], dtype)
            arrived.append(decompress_minmax(block, size, dtype))
        total = [reduce_in_order(dtype, list(column), average) for column in zip(*arrived, strict=True)]
        result += decompress_minmax(compress_minmax(total, dtype), size, dtype)
    return [list(result) for _ in xs]


def node_sum(node: Parameters, dtype: str, divisor: float | None) -> Numbers:
    """Return the leader's input: the node's sum in float32 divided by float32(n/L), rounded once (S3.3)."""
    r, wide = arithmetic(dtype), "float64" if dtype == "float64" else "float32"
    totals = [reduce_in_order(wide, list(column), False) for column in zip(*node, strict=True)]
    return [to(dtype, total if divisor is None else r(divide(total, r(divisor)))) for total in totals]


def hierarchical(operation: Callable[..., Parameters], xs: Parameters, nodes: list[int], dtype: str, average: bool) -> Parameters:
    """Run ``operation`` between node leaders; ``nodes`` is the number of ranks on each node, in rank order (S3.3)."""
    divisor = len(xs) / len(nodes) if average else None
    starts = [sum(nodes[:place]) for place in range(len(nodes))]
    leaders = [node_sum(xs[start : start + size], dtype, divisor) for start, size in zip(starts, nodes, strict=True)]
    results = operation(leaders, dtype, average)
    return [list(results[place]) for place, size in enumerate(nodes) for _ in range(size)]


def centralized(xs: Parameters, dtype: str, average: bool, one_byte: bool, nodes: list[int] | None) -> Parameters:
    """Reduce all ranks' numbers, as one byte per element or in full; with ``nodes``, between their leaders (S3.1 to S3.3)."""
    operation = low_precision if one_byte else scatter_gather
    return operation(xs, dtype, average) if nodes is None else hierarchical(operation, xs, nodes, dtype, average)


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
