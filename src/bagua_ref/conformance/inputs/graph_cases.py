"""Graphs for decentralized averaging, and worlds of the sizes that they take (S13)."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from bagua_ref.conformance.inputs.strategies import seeds

__all__ = ["NAMES", "Graph", "doubly_stochastic", "flawed", "graph_cases", "sized_worlds", "sizes_of"]

Graph = list[list[tuple[int, float]]]

NAMES = ("one_peer_exponential", "hypercube", "ring", "exponential")


def sized_worlds(between: bool, sizes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    """Ranks per node, for as many ranks (``between``: leaders) as ``sizes`` draws."""

    def nodes(n: int) -> st.SearchStrategy[tuple[int, ...]]:
        if between:
            return st.tuples(*[st.integers(1, 2)] * n)
        return st.sampled_from(sorted({(n,), (1,) * n, (n - n // 2, n // 2) if n > 1 else (n,)}))

    return sizes.flatmap(nodes)


def sizes_of(name: str, largest: int, smallest: int = 1) -> st.SearchStrategy[int]:
    """Numbers of ranks that a mode takes."""
    return st.sampled_from([n for n in range(smallest, largest + 1) if name != "hypercube" or n & (n - 1) == 0])


def doubly_stochastic(n: int, seed: int) -> Graph:
    """Return a mixture of a few permutations (Birkhoff), in which each rank has its sources in an order of its own."""
    generator = np.random.default_rng([seed, 13])
    permutations = [generator.permutation(n) for _ in range(generator.integers(1, 4))]
    shares = generator.dirichlet(np.ones(len(permutations))) if seed % 2 else np.full(len(permutations), 1 / len(permutations))
    matrix = np.zeros((n, n))
    for permutation, share in zip(permutations, shares, strict=True):
        matrix[np.arange(n), permutation] += share
    rows = []
    for rank in range(n):
        sources = generator.permutation([source for source in range(n) if matrix[rank, source] or source == rank])
        # Numbers of float32, which all implementations read alike.
        rows.append([(int(source), float(np.float32(matrix[rank, source]))) for source in sources])
    return rows


@st.composite
def graph_cases(draw: st.DrawFn, largest: int, changing: bool = False) -> tuple[str | list[Graph], tuple[int, ...], bool]:
    """A mode or graphs in a cycle, a world that it takes, and whether to average between leaders.

    Args:
        draw: Hypothesis's.
        largest: the largest number of ranks or leaders that talk.
        changing: only such that consecutive graphs differ.
    """
    between = draw(st.booleans())
    name = draw(st.sampled_from(["", *(NAMES[:2] if changing else NAMES)]))
    nodes = draw(sized_worlds(between, sizes_of(name, largest, 3 if changing else 1)))
    if name:
        return name, nodes, between
    n = len(nodes) if between else sum(nodes)
    return [doubly_stochastic(n, draw(seeds)) for _ in range(draw(st.integers(1 + changing, 3)))], nodes, between


def flawed(n: int, a: int) -> list[Graph]:
    """Return graphs of n ranks that are doubly stochastic but for one flaw, at rank a."""
    b = (a + 1) % n
    rows = [[(rank, 1.0)] for rank in range(n)]
    flaws: list[dict[int, list[tuple[int, float]]]] = [
        {a: [(a, 1 + 2e-6)]},
        {a: [(a, 1 - 2e-6)]},
        {a: [(a, 1.0), (a, 0.0)]},
        {a: [(a, 1.0), (n, 0.0)]},
        {a: [(a, 1.0), (-1, 0.0)]},
        {a: [(a, float("nan"))]},
        {a: []},
    ]
    if n > 1:
        flaws.append({a: [(b, 1.0)], b: [(a, 1.0)]})  # own ranks missing
        flaws.append({a: [(a, 0.5), (b, 0.5)]})  # columns
        flaws.append({a: [(a, 1.0), (b, 0.5)], b: [(b, 0.5)]})  # rows
        flaws.append({a: [(a, 2.0), (b, -1.0)], b: [(b, 2.0), (a, -1.0)]})
    return [rows[1:], [*rows, [(n, 1.0)]]] + [[flaw.get(rank, row) for rank, row in enumerate(rows)] for flaw in flaws]
