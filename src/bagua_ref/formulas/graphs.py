"""Graphs of decentralized averaging: sources and weights of each rank, as pure functions of step
and size (S3.4, S13).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "MODES",
    "Graph",
    "GraphFunction",
    "Mode",
    "PeerSelection",
    "check_mode",
    "checked_graph",
    "complete",
    "exponential",
    "hypercube",
    "in_turn",
    "one_peer_exponential",
    "ring",
    "shift_one",
    "shift_one_peer",
]

Graph: TypeAlias = "list[list[tuple[int, float]]]"
"""For each receiving rank, the (source rank, weight) pairs of its average, in the order of the
sum.
"""

GraphFunction: TypeAlias = "Callable[[int, int], Sequence[Sequence[tuple[int, float]]]]"
"""``(t, n) -> graph`` of n ranks at step t, which counts from 0."""

PeerSelection: TypeAlias = "str | GraphFunction"
"""The name of a mode, or a graph function."""

_NEAR_ONE = 1e-6
"""Maximal deviation of the sum of a row or column from 1 (S13.4)."""


def complete(t: int, n: int) -> Graph:
    """Return the graph in which each rank averages with all ranks (S3.4, "all").

    >>> complete(0, 2)
    [[(0, 0.5), (1, 0.5)], [(0, 0.5), (1, 0.5)]]
    """
    _check(t, n)
    return _means([list(range(n))] * n)


def shift_one_peer(rank: int, nranks: int, step: int) -> int:
    """Return the peer of ``rank`` at ``step``: a rank of the other half, the next one at each step
    (S3.4).

    With h = nranks/2, it is ``(step + rank) mod h + h`` for the first half and ``(rank - h - step)
    mod h`` for the second. This is an involution, and in h steps each rank is paired with every
    rank of the other half.

    Args:
        rank: from 0 to nranks - 1.
        nranks: the number of ranks, even.
        step: the number of earlier averaging rounds.

    Raises:
        ValueError: nranks is odd or less than 2, or rank is not one of them.

    >>> [shift_one_peer(rank, 4, 0) for rank in range(4)], [shift_one_peer(rank, 4, 1) for rank in range(4)]
    ([2, 3, 0, 1], [3, 2, 1, 0])
    """
    if nranks < 2 or nranks % 2:
        raise ValueError(
            f"nranks={nranks} must be even and at least 2, as each rank averages with one other"
        )
    if not 0 <= rank < nranks:
        raise ValueError(f"rank={rank} must be from 0 to {nranks - 1}")
    half = nranks // 2
    return (step + rank) % half + half if rank < half else (rank - half - step) % half


def shift_one(t: int, n: int) -> Graph:
    """Return the graph in which each rank averages with its `shift_one_peer`; n must be even
    (S3.4).

    >>> shift_one(1, 4)[0]
    [(0, 0.5), (3, 0.5)]
    """
    _check(t, n)
    return _means([[r, shift_one_peer(r, n, t)] for r in range(n)])


def one_peer_exponential(t: int, n: int) -> Graph:
    """Return the directed graph in which rank r averages with rank (r - 2^(t mod K)) mod n, K =
    ceil(log2 n) (S13.1).

    If n is a power of two, any K consecutive graphs give every rank the mean over all ranks; for
    other n, no number of graphs does.

    >>> [row[1] for row in one_peer_exponential(1, 4)]
    [(2, 0.5), (3, 0.5), (0, 0.5), (1, 0.5)]

    Source: Ying et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training",
    NeurIPS 2021 (arXiv:2110.13363).
    """
    _check(t, n)
    distance = 2 ** (t % _doublings(n)) if n > 1 else 0
    return _means([[r, (r - distance) % n] for r in range(n)])


def hypercube(t: int, n: int) -> Graph:
    """Return the graph in which rank r averages with rank r xor 2^(t mod K), K = log2 n; n must be
    a power of two (S13.2).

    Any K consecutive graphs give every rank the mean over all ranks.

    Raises:
        ValueError: n is not a power of two.

    >>> [row[1] for row in hypercube(0, 4)]
    [(1, 0.5), (0, 0.5), (3, 0.5), (2, 0.5)]
    """
    _check(t, n)
    if not _is_power_of_two(n):
        raise ValueError(
            f"n={n} must be a power of two, as the ranks are the corners of a hypercube"
        )
    distance = 2 ** (t % _doublings(n)) if n > 1 else 0
    return _means([[r, r ^ distance] for r in range(n)])


def ring(t: int, n: int) -> Graph:
    """Return the graph in which rank r averages with both neighbours, (r - 1) mod n and (r + 1) mod
    n, at every step (S13.3).

    >>> [[source for source, _ in row] for row in ring(0, 4)], [[source for source, _ in row] for row in ring(0, 2)]
    ([[0, 3, 1], [1, 0, 2], [2, 1, 3], [3, 2, 0]], [[0, 1], [1, 0]])
    """
    _check(t, n)
    return _means([[r, (r - 1) % n, (r + 1) % n] for r in range(n)])


def exponential(t: int, n: int) -> Graph:
    """Return the directed graph in which rank r averages with ranks (r - 2^k) mod n, k = 0 ...
    ceil(log2 n) - 1 (S13.3).

    >>> [source for source, _ in exponential(0, 6)[0]]
    [0, 5, 4, 2]
    """
    _check(t, n)
    return _means([[r, *((r - 2**k) % n for k in range(_doublings(n)))] for r in range(n)])


class Mode(NamedTuple):
    """A named way to choose peers.

    Attributes:
        graph: ``(t, n) -> graph``.
        period: ``n -> P``: the graphs of steps t and t + P are equal.
        sizes: the allowed n in words, for messages.
        takes: returns whether n is allowed.
    """

    graph: Callable[[int, int], Graph]
    period: Callable[[int], int] = lambda n: 1
    sizes: str = "any number"
    takes: Callable[[int], bool] = lambda n: True

    def graphs(self, n: int) -> list[Graph]:
        """Return the graphs of one period."""
        return [self.graph(t, n) for t in range(self.period(n))]


def _doublings(n: int) -> int:
    """Return ceil(log2 n), computed with integers."""
    return (n - 1).bit_length()


def _at_least_once(n: int) -> int:
    return max(1, _doublings(n))


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


MODES = {
    "all": Mode(complete),
    "shift_one": Mode(shift_one, lambda n: n // 2, "an even number", lambda n: n % 2 == 0),
    "one_peer_exponential": Mode(one_peer_exponential, _at_least_once),
    "hypercube": Mode(hypercube, _at_least_once, "a power of two", _is_power_of_two),
    "ring": Mode(ring),
    "exponential": Mode(exponential),
}
"""The named values of ``peer_selection_mode``."""


def in_turn(graphs: Sequence[Graph]) -> GraphFunction:
    """Return a function ``(t, n) -> graph`` that cycles through these graphs.

    Args:
        graphs: at least one, all for the same number of ranks.

    >>> alone, swapped = [[(0, 1.0)], [(1, 1.0)]], [[(0, 0.0), (1, 1.0)], [(1, 0.0), (0, 1.0)]]
    >>> in_turn([alone, swapped])(3, 2) == swapped
    True
    """
    if not graphs:
        raise ValueError("graphs=[] must hold at least one graph")
    return lambda t, n: graphs[t % len(graphs)]


def check_mode(peer_selection_mode: Any) -> None:
    """Raise ValueError unless ``peer_selection_mode`` is a name in `MODES` or a function."""
    if not callable(peer_selection_mode) and peer_selection_mode not in tuple(MODES):
        names = ", ".join(map(repr, MODES))
        raise ValueError(
            f"peer_selection_mode={peer_selection_mode!r} must be {names} or a function (t, n) ->"
            " graph"
        )


def checked_graph(graph: Any, n: int) -> Graph:
    """Convert ``graph``, returned by a user's function for ``n`` ranks, to a `Graph`; it must be
    doubly stochastic (S13.4).

    Raises:
        ValueError: there are not n rows; a row or column does not sum to 1 within 1e-6, in float64;
            a row lacks its own rank, or has a source twice, one that does not exist, or a weight
            that is negative or not finite.
        TypeError: a row is not a list of pairs of a rank and a number.

    >>> checked_graph([[(0, 0.75), (1, 0.25)], [(0, 0.25), (1, 0.5)]], 2)
    Traceback (most recent call last):
    ...
    ValueError: row 1 (sources of rank 1) has weights that sum to 0.75; they must sum to 1 (within
    1e-06)
    """
    if not isinstance(graph, (list, tuple)):
        raise TypeError(
            f"the graph is a {type(graph).__name__}; it must be a list with a row for each of the"
            f" {n} ranks"
        )
    if len(graph) != n:
        raise ValueError(f"the graph has {len(graph)} rows; it must have {n}, one for each rank")
    rows = [_checked_row(rank, row, n) for rank, row in enumerate(graph)]
    columns: list[list[float]] = [[] for _ in rows]
    for row in rows:
        for source, weight in row:
            columns[source].append(weight)
    for rank, row in enumerate(rows):
        _check_sum(f"row {rank} (sources of rank {rank})", [weight for _, weight in row])
    for rank, column in enumerate(columns):
        _check_sum(f"column {rank} (receivers of rank {rank})", column)
    return rows


def _checked_row(rank: int, row: Any, n: int) -> list[tuple[int, float]]:
    try:
        pairs = [(operator.index(source), float(weight)) for source, weight in row]
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"row {rank} of the graph is {row!r}; it must be a list of pairs (source rank, weight)"
        ) from None
    sources: set[int] = set()
    for source, weight in pairs:
        if not 0 <= source < n:
            raise ValueError(
                f"row {rank} has source {source}; sources must be ranks from 0 to {n - 1}"
            )
        if source in sources:
            raise ValueError(f"row {rank} has source {source} twice; each source may appear once")
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"row {rank} has weight {weight} for source {source}; weights must be finite and"
                " not negative"
            )
        sources.add(source)
    if rank not in sources:
        raise ValueError(
            f"row {rank} has sources {sorted(sources)}; rank {rank} itself must be one of them,"
            " even with weight 0"
        )
    return pairs


def _check_sum(what: str, weights: list[float]) -> None:
    total = math.fsum(weights)
    if abs(total - 1) > _NEAR_ONE:
        raise ValueError(
            f"{what} has weights that sum to {total}; they must sum to 1 (within {_NEAR_ONE})"
        )


def _check(t: int, n: int) -> None:
    for name, value, least in (("t", t, 0), ("n", n, 1)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be an int, {least} or more")
        if value < least:
            raise ValueError(f"{name}={value} must be {least} or more")


def _means(sources: list[list[int]]) -> Graph:
    """Return the graph in which each rank averages its distinct sources with equal weights."""
    distinct = [list(dict.fromkeys(row)) for row in sources]
    return [[(source, 1 / len(row)) for source in row] for row in distinct]
