"""Worlds, weights, gradients and options of the checked trainings, and graphs for decentralized
averaging (S13).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import Draw, bulk, seeds
from bagua_ref.conformance.cases.table import GRAPHS

__all__ = [
    "BOUNDARY",
    "EVERY_MATRIX",
    "GRAPHS",
    "ONE_BUCKET",
    "PLAIN",
    "ByRank",
    "Graph",
    "any_gradients",
    "any_weights",
    "doubly_stochastic",
    "each_gradient",
    "exact_gradients",
    "flawed",
    "given_fragments",
    "graph_cases",
    "grid_weights",
    "matrices",
    "matrix_weights",
    "momenta",
    "multi_rank_worlds",
    "not_finite_in_places",
    "of_rank",
    "on_a_grid",
    "outer_optimizer",
    "outer_optimizers",
    "poisoned_at",
    "schedules",
    "sized_worlds",
    "sizes_of",
    "tame",
    "used_by_few",
    "used_parts",
    "usual",
    "worlds_of",
]

ONE_BUCKET = 2**20
"""A bucket size so large that every training here has one bucket per dtype."""

ByRank = list[list[dict[int, Tensor]]]
"""Gradients by rank and step, each by the parameter's index."""

multi_rank_worlds = st.sampled_from([(2,), (1, 1), (2, 1), (3,), (2, 2)])


def sized_worlds(dtype: torch.dtype) -> st.SearchStrategy[tuple[int, ...]]:
    """Worlds; for 16-bit dtypes at most 2 ranks, because their sums do not depend on the order."""
    few, more = [(2,), (1, 1), (1,)], [(2, 1), (3,), (1, 2, 1), (3, 3), (7,)]
    return st.sampled_from(few if dtype.itemsize == 2 else [*few, *more])


# Weights.

_shapes = st.sampled_from([(1,), (3,), (3, 2), (17,), (2, 1, 5), (), (0,)])
matrices = st.sampled_from([(5, 9), (9, 5), (6, 2), (3, 2, 3), (8, 7), (4, 3, 2, 2), (12, 6)])
_others = st.sampled_from([(), (7,), (0,), (0, 3), (1,)])

BOUNDARY = [
    *[(4, 4), (4, 5), (5, 4), (3, 6), (6, 3), (3, 7), (2, 3, 4), (4, 3, 2)],
    *[(2, 12), (12, 2), (6, 4), (8, 8), (24,), (1, 30), (0, 3)],
]
"""Shapes on both sides of powersgd's compression criterion at usual rates."""


def on_a_grid(seed: int, like: Tensor, limit: int, multiple: int = 1) -> Tensor:
    """Return multiples of ``multiple``/4 up to ``limit * multiple`` with the shape and dtype of
    ``like``; sums of a few are exact in any order.
    """
    drawn = np.random.default_rng([seed, 4]).integers(-limit, limit, like.numel(), endpoint=True)
    return (torch.from_numpy(drawn) * multiple / 4).to(like.dtype).view(like.shape)


def grid_weights(
    draw: Draw, dtypes: list[torch.dtype], forms: Sequence[tuple[int, ...]] | None = None
) -> list[Tensor]:
    """Weights that are multiples of 1/4 up to 8; their shapes are drawn unless passed."""
    forms = [draw(_shapes) for _ in dtypes] if forms is None else forms
    seed = draw(seeds)
    like = [torch.empty(form, dtype=dtype) for dtype, form in zip(dtypes, forms, strict=True)]
    return [_laid_out(on_a_grid(seed + p, w, 32), seed // 7 + p) for p, w in enumerate(like)]


def _laid_out(w: Tensor, seed: int) -> Tensor:
    """Return a parameter in one of torch's layouts: row-major, transposed, or channels-last."""
    if w.dim() == 4 and seed % 2:
        return w.contiguous(memory_format=torch.channels_last)
    if w.dim() > 1 and seed % 3 == 0:
        return w.transpose(0, 1).contiguous().transpose(0, 1)
    return w


def any_weights(draw: Draw, dtype: torch.dtype, most: int = 4, fewest: int = 1) -> list[Tensor]:
    """``fewest`` to ``most`` parameters of multiples of 1/4."""
    return grid_weights(draw, [dtype] * draw(st.integers(fewest, most)))


def matrix_weights(draw: Draw, dtype: torch.dtype, most: int = 2) -> list[Tensor]:
    """1 to ``most`` matrices, among other parameters."""
    forms = [draw(matrices) for _ in range(draw(st.integers(1, most)))] + [
        draw(_others) for _ in range(draw(st.integers(0, 2)))
    ]
    order = np.random.default_rng(draw(seeds)).permutation(len(forms))
    return grid_weights(draw, [dtype] * len(forms), [forms[place] for place in order])


# Gradients.

any_kind = ("tame", "tame", "ties", "near", "grid", "halfway", "narrow", "constant", "sparse")
tame = ("tame", "tame", "ties", "near", "sparse")
"""Kinds of gradients that leave weights far from the largest number."""
usual = ("tame", "tame", "tame", "ties", "sparse")
"""Kinds of gradients whose matrices are seldom close to a lower rank."""


def any_gradients(
    draw: Draw, like: list[Tensor], ranks: int, steps: int, kinds: Sequence[str]
) -> ByRank:
    """Gradients of one of these kinds for each parameter, by rank and step."""
    drawn, seed = [draw(st.sampled_from(kinds)) for _ in like], draw(seeds)

    def gradient(number: int, place: int, w: Tensor) -> Tensor:
        return bulk(
            w.dtype, drawn[place], seed + 997 * number + place, w.numel(), finite=True
        ).view(w.shape)

    return _by_rank(like, ranks, steps, gradient)


def exact_gradients(draw: Draw, like: list[Tensor], ranks: int, steps: int) -> ByRank:
    """Gradients whose sum and mean over ranks are exact in any summation order."""
    seed = draw(seeds)
    return _by_rank(
        like,
        ranks,
        steps,
        lambda number, place, w: on_a_grid(seed + 997 * number + place, w, 4, ranks),
    )


def _by_rank(
    like: list[Tensor], ranks: int, steps: int, gradient: Callable[[int, int, Tensor], Tensor]
) -> ByRank:
    places = [*enumerate(like)][::-1]
    return [
        [{p: gradient(rank * steps + step, p, w) for p, w in places} for step in range(steps)]
        for rank in range(ranks)
    ]


def each_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[ByRank], ByRank]:
    """Return a function that applies ``change`` to every gradient."""
    return lambda gradients: [
        [{place: change(g) for place, g in given.items()} for given in rank] for rank in gradients
    ]


def poisoned_at(draw: Draw, step: int) -> Callable[[ByRank], ByRank]:
    """Return a function that makes one element of one rank's first gradient at a step NaN or
    infinite.
    """

    def poisoned(gradients: ByRank) -> ByRank:
        x = gradients[draw(st.integers(0, len(gradients) - 1))][step][0].view(-1)
        x[draw(st.integers(0, x.numel() - 1))] = draw(
            st.sampled_from([float("nan"), float("inf"), -float("inf")])
        )
        return gradients

    return poisoned


def not_finite_in_places(draw: Draw) -> Callable[[ByRank], ByRank]:
    """Return a function that makes one element of each gradient NaN or infinite on some ranks, so
    that infinities of both signs meet.
    """
    generator = np.random.default_rng(draw(seeds))

    def poisoned(gradients: ByRank) -> ByRank:
        for step, given in enumerate(gradients[0]):
            for place, like in given.items():
                at = int(generator.integers(max(1, like.numel())))
                for rank in gradients:
                    if generator.integers(2):
                        special = generator.choice([np.nan, np.inf, -np.inf, np.inf, -np.inf])
                        rank[step][place].view(-1)[at : at + 1] = float(special)
        return gradients

    return poisoned


def used_parts(draw: Draw, gradients: ByRank) -> ByRank:
    """Remove some parameters' gradients from each rank's steps, some from all steps of a rank, and
    some from all ranks of a step.
    """
    found, every = [], sorted(gradients[0][0])
    places = st.sets(st.sampled_from(every), max_size=len(every) - 1)
    of_step = [draw(places | st.just(set[int]())) for _ in gradients[0]]
    for rank in gradients:
        never = draw(places)
        left = [
            {place: g for place, g in given.items() if place not in never | of_all | draw(places)}
            for given, of_all in zip(rank, of_step, strict=True)
        ]
        found.append(
            [mine or dict([min(given.items())]) for mine, given in zip(left, rank, strict=True)]
        )
    return found


def used_by_few(draw: Draw, gradients: ByRank) -> ByRank:
    """Remove half of the gradients of each rank and step, and a fifth from all ranks of a step."""
    generator, count = np.random.default_rng(draw(seeds)), len(gradients[0][0])
    for step in range(len(gradients[0])):
        of_all = generator.random(count) < 0.2
        for rank in gradients:
            left = ~of_all & (generator.random(count) < 0.5)
            left[0] = True  # each rank uses one
            rank[step] = {place: g for place, g in rank[step].items() if left[place]}
    return gradients


def of_rank(draw: Draw, like: Tensor, ranks: int, rank: int) -> list[Tensor]:
    """Return a gradient for each rank: each has full rank as a matrix, but their mean has at most
    ``rank``.
    """
    shape, seed = (like.shape[0], like.numel() // like.shape[0]), draw(seeds)
    parts = [
        bulk(torch.float64, "tame", seed + place, size * rank) for place, size in enumerate(shape)
    ]
    mean = parts[0].view(-1, rank) @ parts[1].view(rank, -1)
    noise = [
        bulk(torch.float64, "tame", seed + 2 + r, like.numel()).view(shape) for r in range(ranks)
    ]
    centre = torch.stack(noise).mean(0)
    return [(mean + x - centre).to(like.dtype).view(like.shape) for x in noise]


# Options of powersgd (S10) and of local updates (S9).

EVERY_MATRIX = 0.01
"""A compression rate at which every matrix is compressed."""

PLAIN: dict[str, Any] = {"class": "SGD", "lr": 1.0}
"""The outer optimizer of the identities."""

outer_optimizers = st.sampled_from(
    [
        PLAIN,
        {"class": "SGD", "lr": 0.5, "momentum": 0.5},
        {"class": "SGD", "lr": 1.0, "momentum": 0.5, "nesterov": True},
        {"class": "SGD", "lr": 0.5, "momentum": 0.5, "weight_decay": 0.5},
    ]
)
"""Outer optimizers with exact products, so that a fused multiply-add gives the same result."""

momenta = st.sampled_from([0.0, 0.5])
"""Momenta of inner optimizers."""


def outer_optimizer(
    settings: dict[str, Any] | None,
) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """Return the factory of a fragment's outer optimizer (S9.2)."""
    options = dict(settings or {"class": "SGD", "lr": 0.7, "momentum": 0.9, "nesterov": True})
    name = options.pop("class")
    return lambda tensors: getattr(torch.optim, name)(tensors, **options)


@st.composite
def given_fragments(
    draw: st.DrawFn, parameters: int, fewest: int = 1, most: int = 4
) -> list[list[int]]:
    """Lists of parameter indices, together a permutation of all."""
    count, generator = (
        draw(st.integers(fewest, min(most, parameters))),
        np.random.default_rng(draw(seeds)),
    )
    order = generator.permutation(parameters).tolist()
    cuts = (
        sorted(generator.choice(parameters - 1, count - 1, replace=False) + 1) if count > 1 else []
    )
    return [order[a:b] for a, b in itertools.pairwise([0, *cuts, parameters])]


def schedules(
    draw: Draw,
    parameters: int,
    *,
    gaps: st.SearchStrategy[int] | None = None,
    smallest_gap: int = 1,
    fewest: int = 1,
    most: int = 4,
) -> dict[str, Any]:
    """Options of diloco for a number of parameters: the fragments and the steps at which each is
    sent and applied.
    """
    count: int = draw(st.integers(min(fewest, parameters), min(most, parameters)))
    fragments: int | list[list[int]] = count
    if draw(st.booleans()):
        fragments = draw(given_fragments(parameters, count, count))
    gap = draw(st.integers(smallest_gap, 3) if gaps is None else gaps)
    return {"period": gap * count, "fragments": fragments, "delay": draw(st.integers(0, gap - 1))}


# Graphs.

Graph = list[list[tuple[int, float]]]


def worlds_of(between: bool, sizes: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
    """Ranks per node; ``sizes`` draws the total number of ranks (``between``: of leaders)."""

    def nodes(n: int) -> st.SearchStrategy[tuple[int, ...]]:
        if between:
            return st.tuples(*[st.integers(1, 2)] * n)
        return st.sampled_from(sorted({(n,), (1,) * n, (n - n // 2, n // 2) if n > 1 else (n,)}))

    return sizes.flatmap(nodes)


def sizes_of(name: str, largest: int, smallest: int = 1) -> st.SearchStrategy[int]:
    """Numbers of ranks that a mode supports."""
    return st.sampled_from(
        [n for n in range(smallest, largest + 1) if name != "hypercube" or n & (n - 1) == 0]
    )


def doubly_stochastic(n: int, seed: int) -> Graph:
    """Return a doubly stochastic graph, the mixture of a few permutations (Birkhoff); the order of
    sources differs between ranks.
    """
    generator = np.random.default_rng([seed, 13])
    permutations = [generator.permutation(n) for _ in range(generator.integers(1, 4))]
    shares = (
        generator.dirichlet(np.ones(len(permutations)))
        if seed % 2
        else np.full(len(permutations), 1 / len(permutations))
    )
    matrix = np.zeros((n, n))
    for permutation, share in zip(permutations, shares, strict=True):
        matrix[np.arange(n), permutation] += share
    rows = []
    for rank in range(n):
        sources = generator.permutation(
            [source for source in range(n) if matrix[rank, source] or source == rank]
        )
        # Numbers of float32, which all implementations read alike.
        rows.append([(int(source), float(np.float32(matrix[rank, source]))) for source in sources])
    return rows


@st.composite
def graph_cases(
    draw: st.DrawFn, largest: int, changing: bool = False
) -> tuple[str | list[Graph], tuple[int, ...], bool]:
    """A mode or a cycle of graphs, a world that it supports, and whether leaders average.

    Args:
        draw: Hypothesis's draw function.
        largest: the maximum number of ranks, or of leaders, that average.
        changing: whether consecutive graphs must differ.
    """
    between = draw(st.booleans())
    name = draw(st.sampled_from(["", *(GRAPHS[:2] if changing else GRAPHS)]))
    nodes = draw(worlds_of(between, sizes_of(name, largest, 3 if changing else 1)))
    if name:
        return name, nodes, between
    n = len(nodes) if between else sum(nodes)
    return (
        [doubly_stochastic(n, draw(seeds)) for _ in range(draw(st.integers(1 + changing, 3)))],
        nodes,
        between,
    )


def flawed(n: int, a: int) -> list[Graph]:
    """Return graphs of n ranks that would be doubly stochastic without one flaw at rank a."""
    b = (a + 1) % n
    rows = [[(rank, 1.0)] for rank in range(n)]
    flaws: list[dict[int, list[tuple[int, float]]]] = [
        {a: [(a, 1 + 9 * 2.0**-23)]},  # just beyond the tolerance
        {a: [(a, 1 - 17 * 2.0**-24)]},
        {a: [(a, 1.0), (a, 0.0)]},
        {a: [(a, 1.0), (n, 0.0)]},
        {a: [(a, 1.0), (-1, 0.0)]},
        {a: [(a, float("nan"))]},
        {a: []},
    ]
    if n > 1:
        flaws.append({a: [(b, 1.0)], b: [(a, 1.0)]})  # own ranks missing
        flaws.append({a: [(a, 0.5), (b, 0.5)]})  # columns
        flaws.append({a: [(a, 1 - 17 * 2.0**-24), (b, 17 * 2.0**-24)]})  # columns, just beyond
        flaws.append({a: [(a, 1.0), (b, 0.5)], b: [(b, 0.5)]})  # rows
        flaws.append({a: [(a, 2.0), (b, -1.0)], b: [(b, 2.0), (a, -1.0)]})
    return [rows[1:], [*rows, [(n, 1.0)]]] + [
        [flaw.get(rank, row) for rank, row in enumerate(rows)] for flaw in flaws
    ]
