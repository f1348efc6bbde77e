"""Schedules, fragments and outer optimizers of local updates (S9)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.inputs.strategies import Draw, seeds
from bagua_ref.conformance.inputs.training_cases import ByRank, grid_weights

__all__ = [
    "PLAIN",
    "Schedule",
    "given_fragments",
    "momenta",
    "multi_rank_worlds",
    "outer_optimizer",
    "outer_optimizers",
    "schedules",
    "sized_worlds",
    "some_weights",
    "tame",
    "used_parts",
]

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
"""Those whose products are exact, so that a fused multiply-add gives the same result."""

momenta = st.sampled_from([0.0, 0.5])
"""Of inner optimizers."""

tame = st.sampled_from(["tame", "tame", "ties", "near", "zeros"])
"""Kinds of gradients that leave weights far from the largest number."""

multi_rank_worlds = st.sampled_from([(2,), (1, 1), (2, 1), (3,), (2, 2)])


class Schedule(NamedTuple):
    """Options of diloco that say when which fragments are sent and applied."""

    period: int
    fragments: int | list[list[int]]
    delay: int
    warmup_steps: int


def sized_worlds(dtype: torch.dtype) -> st.SearchStrategy[tuple[int, ...]]:
    """Worlds; for 16 bits of at most 2 ranks, whose sums are the same in any order."""
    most = 2 if dtype.itemsize == 2 else 4
    return st.sampled_from([nodes for nodes in ((2,), (1, 1), (1,), (2, 1), (3,), (1, 2, 1)) if sum(nodes) <= most])


def some_weights(draw: Draw, dtype: torch.dtype, most: int = 4) -> list[Tensor]:
    """Up to ``most`` parameters."""
    return grid_weights(draw, [dtype] * draw(st.integers(1, most)))


@st.composite
def given_fragments(draw: st.DrawFn, parameters: int, fewest: int = 1, most: int = 4) -> list[list[int]]:
    """Lists of places in which each of the parameters stands once, in any order."""
    count, generator = draw(st.integers(fewest, min(most, parameters))), np.random.default_rng(draw(seeds))
    order = generator.permutation(parameters).tolist()
    cuts = sorted(generator.choice(parameters - 1, count - 1, replace=False) + 1) if count > 1 else []
    return [order[a:b] for a, b in itertools.pairwise([0, *cuts, parameters])]


@st.composite
def schedules(
    draw: st.DrawFn,
    parameters: int,
    *,
    gaps: st.SearchStrategy[int] | None = None,
    smallest_gap: int = 1,
    fewest: int = 1,
    most: int = 4,
    warmup: int = 0,
) -> Schedule:
    """Schedules for so many parameters, with up to ``warmup`` steps of warm-up."""
    count: int = draw(st.integers(min(fewest, parameters), min(most, parameters)))
    fragments: int | list[list[int]] = count
    if draw(st.booleans()):
        fragments = draw(given_fragments(parameters, count, count))
    gap = draw(st.integers(smallest_gap, 3) if gaps is None else gaps)
    return Schedule(gap * count, fragments, draw(st.integers(0, gap - 1)), draw(st.integers(0, warmup)))


def outer_optimizer(settings: dict[str, Any] | None) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """Return what makes the outer optimizer of a fragment (S9.2)."""
    options = dict(settings or {"class": "SGD", "lr": 0.7, "momentum": 0.9, "nesterov": True})
    name = options.pop("class")
    return lambda tensors: getattr(torch.optim, name)(tensors, **options)


def used_parts(draw: Draw, gradients: ByRank) -> ByRank:
    """Leave out some parameters of each rank's steps, and some always."""
    found = []
    for rank in gradients:
        places = st.sets(st.sampled_from(sorted(rank[0])), max_size=len(rank[0]) - 1)
        never = draw(places)
        found.append(
            [
                {place: g for place, g in given.items() if place not in never | draw(places)} or dict([min(given.items())])
                for given in rank
            ]
        )
    return found
