"""Costs of communication: the messages of each operation, their counts by kind of link, and their
time (S14).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

__all__ = [
    "FORWARD",
    "LinkCost",
    "LinkCosts",
    "Message",
    "Operation",
    "Round",
    "Traffic",
    "Wire",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "chunk_bytes",
    "gather",
    "loads_of",
    "one_round",
    "operation_seconds",
    "overlap",
    "parse_seconds",
    "reduce",
    "reduce_scatter",
    "round_seconds",
    "scatter",
    "traffic",
]

Message: TypeAlias = "tuple[int, int, int]"
"""(source rank, destination rank, bytes)."""

Round: TypeAlias = "list[Message]"
"""Messages sent at the same time."""

Operation: TypeAlias = "list[Round]"
"""Consecutive rounds: each begins when its predecessor has ended (S14.1). A single rank has
none.
"""

Wire: TypeAlias = "tuple[str, int, int]"
"""A link shared by messages: ("inside", source, destination), ("out", node, -1) or ("in", node, -1)
(S14.5).
"""

FORWARD = 1 / 3
"""Fraction of a pass spent in forward [defined]: backward computes two gradients for each product
of forward.
"""

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}


def chunk_bytes(elements: int, itemsize: int, n: int) -> list[int]:
    """Return the bytes of the n chunks of a tensor: chunk j has floor((j+1)N/n) - floor(jN/n) of
    its N elements (S14.1).

    >>> chunk_bytes(10, 4, 4)
    [8, 12, 8, 12]
    """
    return [((j + 1) * elements // n - j * elements // n) * itemsize for j in range(n)]


def reduce_scatter(chunks: Sequence[int]) -> Operation:
    """Return the ring in which rank r sends chunk (r - 1 - s) mod n to rank r + 1 in round s = 0
    ... n-2 (S14.1).

    Args:
        chunks: sizes in bytes of the n chunks; rank r ends with chunk r.

    >>> from bagua_ref.formulas.costs import reduce_scatter
    >>> reduce_scatter([4, 8, 12])[0]
    [(0, 1, 12), (1, 2, 4), (2, 0, 8)]

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", JPDC 2009.
    """
    return _ring(chunks, first=-1)


def all_gather(chunks: Sequence[int]) -> Operation:
    """Return the ring in which rank r sends chunk (r - s) mod n to rank r + 1 in round s = 0 ...
    n-2 (S14.1).

    >>> all_gather([4, 8, 12])[0]
    [(0, 1, 4), (1, 2, 8), (2, 0, 12)]
    """
    return _ring(chunks, first=0)


def all_reduce(chunks: Sequence[int]) -> Operation:
    """Return a reduce-scatter of the chunks and then their all-gather, 2(n-1) rounds (S14.1)."""
    return reduce_scatter(chunks) + all_gather(chunks)


def all_to_all(sizes: Sequence[Sequence[int]]) -> Operation:
    """Return the rounds s = 1 ... n-1 in which rank r sends its chunk for rank (r + s) mod n
    (S14.1).

    Args:
        sizes: ``sizes[r][d]`` is the number of bytes that rank r sends to rank d.
    """
    n = len(sizes)
    return [[(r, (r + s) % n, sizes[r][(r + s) % n]) for r in range(n)] for s in range(1, n)]


def broadcast(nbytes: int, n: int, root: int = 0) -> Operation:
    """Return the binomial tree in which v < 2^k sends all to v + 2^k < n in round k, v counted from
    the root (S14.1).

    >>> from bagua_ref.formulas.costs import broadcast
    >>> broadcast(8, 3, root=1)
    [[(1, 2, 8)], [(1, 0, 8)]]
    """
    steps = [2**k for k in range((n - 1).bit_length())]
    return [
        [((v + root) % n, (v + step + root) % n, nbytes) for v in range(min(step, n - step))]
        for step in steps
    ]


def reduce(nbytes: int, n: int, root: int = 0) -> Operation:
    """Return the reverse of `broadcast` (S14.1)."""
    return [
        [(dst, src, nbytes) for src, dst, nbytes in messages]
        for messages in reversed(broadcast(nbytes, n, root))
    ]


def gather(sizes: Sequence[int], root: int = 0) -> Operation:
    """Return the round in which each other rank r sends ``sizes[r]`` bytes to the root (S14.1)."""
    return one_round([(r, root, size) for r, size in enumerate(sizes)])


def scatter(sizes: Sequence[int], root: int = 0) -> Operation:
    """Return the round in which the root sends ``sizes[r]`` bytes to each other rank r (S14.1)."""
    return one_round([(root, r, size) for r, size in enumerate(sizes)])


def one_round(messages: Sequence[Message]) -> Operation:
    """Return an exchange: all messages in one round, but those of a rank to itself (S14.1)."""
    sent = [message for message in messages if message[0] != message[1]]
    return [sent] if sent else []


def _ring(chunks: Sequence[int], first: int) -> Operation:
    n = len(chunks)
    return [[(r, (r + 1) % n, chunks[(r + first - s) % n]) for r in range(n)] for s in range(n - 1)]


class Traffic(NamedTuple):
    """Counts of one rank's messages and bytes over one kind of link."""

    bytes_sent: int = 0
    messages_sent: int = 0
    bytes_received: int = 0
    messages_received: int = 0


def traffic(operation: Operation, node_of: Sequence[int]) -> list[dict[str, Traffic]]:
    """Count each rank's messages and bytes, "inside" its node and "between" nodes: exact integers
    (S14.1).

    Args:
        operation: operation between ranks 0 to n-1.
        node_of: the node of each rank.

    >>> traffic(all_reduce(chunk_bytes(4, 4, 2)), node_of=[0, 1])[0]["between"]
    Traffic(bytes_sent=16, messages_sent=2, bytes_received=16, messages_received=2)
    """
    counts = [{"inside": [0] * 4, "between": [0] * 4} for _ in node_of]
    for src, dst, nbytes in (message for messages in operation for message in messages):
        kind = "inside" if node_of[src] == node_of[dst] else "between"
        for rank, place in ((src, 0), (dst, 2)):
            counts[rank][kind][place] += nbytes
            counts[rank][kind][place + 1] += 1
    return [{kind: Traffic(*count) for kind, count in own.items()} for own in counts]


class LinkCost(NamedTuple):
    """The cost of a link: b bytes take alpha + b * beta seconds (S14.2)."""

    alpha: float
    beta: float


class LinkCosts(NamedTuple):
    """The costs of links between nodes, and of those inside a node."""

    between: LinkCost
    inside: LinkCost

    @classmethod
    def parse(cls, text: str) -> LinkCosts:
        """Parse ``BANDWIDTH,LATENCY`` of all links, or of those between nodes and then those inside
        nodes.

        Raises:
            ValueError: the text has another form.

        >>> LinkCosts.parse("1Gbit,20ms,10GB,5us")
        LinkCosts(between=LinkCost(alpha=0.02, beta=8e-09), inside=LinkCost(alpha=5e-06,
        beta=1e-10))
        """
        parts = text.split(",")
        if len(parts) not in (2, 4):
            raise ValueError(
                f"link={text!r} must be BANDWIDTH,LATENCY such as 1Gbit,20ms, or two such pairs:"
                " between nodes, and inside a node"
            )
        links = [
            LinkCost(parse_seconds(latency, 0.0), _beta(band))
            for band, latency in zip(parts[::2], parts[1::2], strict=True)
        ]
        return cls(links[0], links[-1])


def parse_seconds(text: str, least: float = 1e-9) -> float:
    """Parse a duration such as 120ms; return seconds. Raise ValueError for other text, or for less
    than ``least`` seconds.
    """
    number, unit = _split(text)
    seconds = number / _PER_SECOND.get(unit, math.nan)
    if not least <= seconds < 1e9:
        raise ValueError(
            f"time {text!r} must be a number{' above 0' * (least > 0)} of s, ms or us, such as 20ms"
        )
    return seconds


def _beta(text: str) -> float:
    number, unit = _split(text.removesuffix("/s"))
    # 1Gbps, as links are sold; a small b is a bit
    known = re.fullmatch(r"([kKmMgGtT]?)(bit|bps|b|B|Bps)", unit)
    bits = number * _PREFIXES[known[1].upper()] * (8 if "B" in known[2] else 1) if known else 0.0
    if not 0 < bits < math.inf:
        raise ValueError(
            f"bandwidth {text!r} must be a number above 0 of bit or B a second, with k, M, G or T,"
            " such as 1Gbit, 1Gbps or 10MB"
        )
    return 8 / bits


def _split(text: str) -> tuple[float, str]:
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e-?\d+)?)\s*([A-Za-z]*)", text.strip())
    return (float(found[1]), found[2]) if found else (math.nan, "")


def loads_of(messages: Sequence[Message], node_of: Sequence[int]) -> dict[Wire, int]:
    """Return the bytes of a round on each link (S14.5).

    Inside a node, each pair of ranks has a link of its own in each direction. Between nodes, each
    node has one outgoing and one incoming link, which its ranks share: their bytes are summed.

    >>> loads_of([(0, 2, 5), (1, 3, 7)], node_of=[0, 0, 1, 1])
    {('out', 0, -1): 12, ('in', 1, -1): 12}
    """
    loads: dict[Wire, int] = {}
    for src, dst, nbytes in messages:
        out, in_ = node_of[src], node_of[dst]
        for wire in [("inside", src, dst)] if out == in_ else [("out", out, -1), ("in", in_, -1)]:
            loads[wire] = loads.get(wire, 0) + nbytes
    return loads


def round_seconds(loads: Mapping[Wire, int], links: LinkCosts) -> float:
    """Return the time of a round, the longest of its links: max(alpha + b * beta), b the bytes on
    the link (S14.2).
    """
    costs = (
        (links.inside if wire[0] == "inside" else links.between, nbytes)
        for wire, nbytes in loads.items()
    )
    return max((link.alpha + nbytes * link.beta for link, nbytes in costs), default=0.0)


def operation_seconds(operation: Operation, node_of: Sequence[int], links: LinkCosts) -> float:
    """Return the time of an operation, the sum of its rounds' (S14.2).

    >>> links = LinkCosts.parse("1Gbit,20ms")
    >>> round(operation_seconds(all_reduce(chunk_bytes(1_000_000, 4, 2)), [0, 1], links), 9)
    0.072
    """
    return sum((round_seconds(loads_of(messages, node_of), links) for messages in operation), 0.0)


def overlap(
    forward: float,
    backward: float,
    nbytes: Sequence[int],
    seconds: Sequence[float],
    after: float = 0.0,
) -> tuple[float, float]:
    """Return the duration of a step whose buckets communicate during backward, and its exposed
    communication, in seconds (S14.4).

    Bucket i is ready at forward + backward * (bytes up to and with i) / total. Its operation starts
    when it is ready and the one before has ended. step = max(forward + backward, end of the last
    operation) + after.

    Args:
        forward: seconds.
        backward: seconds.
        nbytes: size of each bucket in order of readiness; at least one is not 0.
        seconds: duration of each bucket's operation.
        after: seconds of the rest of the step, such as the optimizer.

    >>> overlap(1.0, 2.0, [10, 10], [0.5, 1.5])
    (4.5, 1.5)
    """
    compute, ended, total = forward + backward, 0.0, sum(nbytes)
    for upto, duration in zip(accumulate(nbytes), seconds, strict=True):
        ended = max(forward + backward * upto / total, ended) + duration
    return max(compute, ended) + after, max(0.0, ended - compute)
