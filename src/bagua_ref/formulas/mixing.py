"""Speed at which averaging along graphs brings ranks to consensus: spectral gap, and rounds to a
tolerance (S13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from bagua_ref.formulas.graphs import Graph

__all__ = ["Mixing", "matrix", "mixing"]

Matrix: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_DOUBLINGS = 40
"""Maximal number of doublings: graphs that have not reached the tolerance after 2^40 periods never
do, up to rounding.
"""


@dataclass(frozen=True)
class Mixing:
    """Contraction of the ranks' distance from their mean under repetition of a period of graphs.

    With W_t the `matrix` of round t, J the matrix of 1/n and P the rounds of a period, a round
    multiplies the ranks' distances from their mean by W_t - J.

    Attributes:
        period: P.
        contraction: the second-largest singular value of the product W_(P-1) ... W_0, which is the
            largest of product - J: the largest factor by which a period multiplies the distance
            (root of the sum of squares over ranks).
        rounds: the first round after which any distance is at most ``tolerance`` times what it was;
            None: never.
        exact: whether the distance is then 0, apart from rounding while averaging.
    """

    period: int
    contraction: float
    rounds: int | None
    exact: bool

    @property
    def spectral_gap(self) -> float:
        """1 - contraction: of a whole period."""
        return 1 - self.contraction

    @property
    def gap_per_round(self) -> float:
        """1 - contraction^(1/P): the geometric mean over the rounds of a period, to compare graphs
        of different periods.
        """
        return 1 - float(self.contraction ** (1 / self.period))


def matrix(graph: Graph) -> Matrix:
    """Return the mixing matrix: entry (r, s) is the weight with which rank r receives from rank s.

    >>> matrix([[(0, 0.75), (1, 0.25)], [(1, 0.75), (0, 0.25)]])
    array([[0.75, 0.25], [0.25, 0.75]])
    """
    weights = np.zeros((len(graph), len(graph)))
    for rank, row in enumerate(graph):
        for source, weight in row:
            weights[rank, source] = weight
    return weights


def mixing(graphs: Sequence[Graph], tolerance: float = 1e-6) -> Mixing:
    """Return the speed of consensus of ranks that average along these graphs repeatedly, computed
    in float64.

    Args:
        graphs: the graphs of one period, doubly stochastic, in order.
        tolerance: between 0 and 1, both excluded.

    Raises:
        ValueError: no graphs, or the tolerance is out of range.

    >>> from bagua_ref.graphs import hypercube, ring
    >>> mixing([hypercube(t, 8) for t in range(3)])
    Mixing(period=3, contraction=0.0, rounds=3, exact=True)
    >>> found = mixing([ring(0, 8)]); found.rounds, f"{found.spectral_gap:.3f}"
    (64, '0.195')
    """
    if not graphs:
        raise ValueError("graphs=[] must hold at least one graph")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance={tolerance} must be between 0 and 1")
    n = len(graphs[0])
    # As every W is doubly stochastic, (W - J)(V - J) = WV - J: J's rounding errors do not add up
    # below.
    rounds = [matrix(graph) - 1 / n for graph in graphs]
    period = np.eye(n) - 1 / n
    for step in rounds:
        period = step @ period
    count, left = _first_round(rounds, period, tolerance)
    return Mixing(len(graphs), _norm(period), count, exact=left == 0)


def _first_round(
    rounds: list[Matrix], period: Matrix, tolerance: float
) -> tuple[int | None, float]:
    """Return the first round after which the distance is within tolerance (None: never), and the
    distance after it.
    """
    powers = [period]
    while _norm(powers[-1]) > tolerance:
        if len(powers) > _DOUBLINGS:
            return None, _norm(powers[-1])
        powers.append(powers[-1] @ powers[-1])
    product, periods = np.eye(len(period)) - 1 / len(period), 0
    for place in range(len(powers) - 2, -1, -1):  # the most periods that do not suffice
        more = powers[place] @ product
        if _norm(more) > tolerance:
            product, periods = more, periods + 2**place
    count = periods * len(rounds)
    for step in rounds:
        if _norm(product) <= tolerance:
            break
        product, count = step @ product, count + 1
    return count, _norm(product)


def _norm(product: Matrix) -> float:
    return float(np.linalg.norm(product, 2))
