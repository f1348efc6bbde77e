"""Weights and gradients of the trainings that are checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.inputs.strategies import Draw, bulk, seeds

__all__ = [
    "ONE_BUCKET",
    "ByRank",
    "any_gradients",
    "array",
    "copies",
    "exact_gradients",
    "grid_weights",
    "lists",
    "on_a_grid",
    "shapes",
    "tensor",
]

ONE_BUCKET = 2**20
"""A bucket size so large that every training here has one bucket per dtype."""

_kinds = st.sampled_from(["tame", "tame", "ties", "near", "grid", "halfway", "narrow", "constant", "zeros"])
ByRank = list[list[dict[int, Tensor]]]
"""Gradients by rank and step, each by the parameter's place."""

shapes = st.sampled_from([(1,), (3,), (3, 2), (17,), (2, 1, 5), (), (0,)])


def on_a_grid(seed: int, like: Tensor, limit: int, multiple: int = 1) -> Tensor:
    """Return multiples of ``multiple``/4 up to ``limit * multiple`` like ``like``; sums of a few are exact in any order."""
    drawn = np.random.default_rng([seed, 4]).integers(-limit, limit, like.numel(), endpoint=True)
    return (torch.from_numpy(drawn) * multiple / 4).to(like.dtype).view(like.shape)


def copies(weights: list[Tensor], ranks: int) -> list[list[Tensor]]:
    """Return the same weights for each rank."""
    return [[w.clone() for w in weights] for _ in range(ranks)]


def lists(tensors: list[Tensor]) -> list[list[float]]:
    """Return each tensor's elements as numbers."""
    return [x.reshape(-1).tolist() for x in tensors]


def tensor(numbers: list[float], like: Tensor) -> Tensor:
    """Return the numbers as a tensor like ``like``."""
    return torch.tensor(numbers, dtype=torch.float64).to(like.dtype).view(like.shape)


def array(x: Tensor) -> npt.NDArray[Any]:
    """Return the numbers flat, as float32 (float64 for float64)."""
    return x.reshape(-1).double().numpy() if x.dtype is torch.float64 else x.reshape(-1).float().numpy()


def any_gradients(draw: Draw, like: list[Tensor], ranks: int, steps: int, kinds: st.SearchStrategy[str] = _kinds) -> ByRank:
    """Gradients of a kind for each parameter, by rank and step."""
    drawn, seed = [draw(kinds) for _ in like], draw(seeds)

    def gradient(place: int, w: Tensor, number: int) -> Tensor:
        return bulk(w.dtype, drawn[place], seed + 997 * number + place, w.numel(), finite=True).view(w.shape)

    return [
        [{place: gradient(place, w, rank * steps + step) for place, w in reversed([*enumerate(like)])} for step in range(steps)]
        for rank in range(ranks)
    ]


def exact_gradients(draw: Draw, like: list[Tensor], ranks: int, steps: int) -> ByRank:
    """Gradients whose sum and mean over ranks are exact in any order of operations."""
    seed = draw(seeds)
    return [
        [
            {place: on_a_grid(seed + 997 * (rank * steps + step) + place, w, 4, ranks) for place, w in reversed([*enumerate(like)])}
            for step in range(steps)
        ]
        for rank in range(ranks)
    ]


def grid_weights(draw: Draw, dtypes: list[torch.dtype], forms: Sequence[tuple[int, ...]] | None = None) -> list[Tensor]:
    """Weights that are multiples of 1/4 up to 8, of drawn shapes unless they are given."""
    forms = [draw(shapes) for _ in dtypes] if forms is None else forms
    seed = draw(seeds)
    like = [torch.empty(form, dtype=dtype) for dtype, form in zip(dtypes, forms, strict=True)]
    return [on_a_grid(seed + place, w, 32) for place, w in enumerate(like)]
