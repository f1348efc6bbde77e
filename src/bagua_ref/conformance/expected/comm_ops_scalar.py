"""The centralized operations (S3.1 to S3.3) on lists of Python floats, for all ranks at once.

``xs`` holds each rank's numbers, which are numbers of the dtype; so does what is returned.
"""

from __future__ import annotations

from collections.abc import Callable

from bagua_ref.conformance.expected.codec_scalar import compress_chunk, decompress_chunk
from bagua_ref.conformance.expected.kernels_scalar import reduce_in_order
from bagua_ref.conformance.expected.rounding import arithmetic, divide, to

Ranks = list[list[float]]


def scatter_gather(xs: Ranks, dtype: str, average: bool) -> Ranks:
    """Add element by element in rank order (S3.1, S3.7)."""
    total = [reduce_in_order(dtype, list(column), average) for column in zip(*xs, strict=True)]
    return [list(total) for _ in xs]


def low_precision(xs: Ranks, dtype: str, average: bool) -> Ranks:
    """Send chunk t of every rank to rank t as one byte per element, reduce it there, and send back the result (S3.2)."""
    n, size = len(xs), len(xs[0]) // len(xs)
    result: list[float] = []
    for t in range(n):
        arrived = []
        for x in xs:
            block = compress_chunk(x[t * size : (t + 1) * size], dtype)
            arrived.append(decompress_chunk(block, size, dtype))
        total = [reduce_in_order(dtype, list(column), average) for column in zip(*arrived, strict=True)]
        result += decompress_chunk(compress_chunk(total, dtype), size, dtype)
    return [list(result) for _ in xs]


def node_sum(node: Ranks, dtype: str, divisor: float | None) -> list[float]:
    """Return the leader's input: the node's sum in float32 divided by float32(n/L), rounded once (S3.3)."""
    r = arithmetic(dtype)
    result = []
    for column in zip(*node, strict=True):
        total = 0.0
        for value in column:
            total = r(total + value)
        result.append(to(dtype, total if divisor is None else r(divide(total, r(divisor)))))
    return result


def hierarchical(operation: Callable[..., Ranks], xs: Ranks, nodes: list[int], dtype: str, average: bool) -> Ranks:
    """Run ``operation`` between node leaders; ``nodes`` is the number of ranks on each node, in rank order (S3.3)."""
    divisor = len(xs) / len(nodes) if average else None
    starts = [sum(nodes[:place]) for place in range(len(nodes))]
    leaders = [node_sum(xs[start : start + size], dtype, divisor) for start, size in zip(starts, nodes, strict=True)]
    results = operation(leaders, dtype, average)
    return [list(results[place]) for place, size in enumerate(nodes) for _ in range(size)]
