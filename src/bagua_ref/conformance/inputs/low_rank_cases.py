"""Parameters, gradients and options of trainings with compressed gradients (S10, S11.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.inputs.strategies import Draw, bulk, seeds
from bagua_ref.conformance.inputs.training_cases import grid_weights

__all__ = [
    "BOUNDARY",
    "EVERY_MATRIX",
    "matrices",
    "of_rank",
    "powersgd_options",
    "powersgd_weights",
    "ratios",
    "usual",
]

EVERY_MATRIX = 0.01
"""A rate at which every matrix is compressed."""

BOUNDARY = [
    (4, 4),
    (4, 5),
    (5, 4),
    (3, 6),
    (6, 3),
    (3, 7),
    (2, 3, 4),
    (4, 3, 2),
    (2, 12),
    (12, 2),
    (6, 4),
    (8, 8),
    (24,),
    (1, 30),
    (0, 3),
]
"""Shapes of which some are just compressed at usual rates, and some just not."""

matrices = st.sampled_from([(5, 9), (9, 5), (6, 2), (3, 2, 3), (8, 7), (4, 3, 2, 2), (12, 6)])
_others = st.sampled_from([(), (7,), (0,), (0, 3), (1,)])

usual = st.sampled_from(["tame", "tame", "tame", "ties", "zeros"])
"""Kinds of gradients whose matrices are seldom close to a lower rank."""

ratios = st.sampled_from([0.01, 0.1, 0.3, 0.5, 1.0])
"""Of topk."""


def powersgd_options(draw: Draw, **given: Any) -> dict[str, Any]:
    """Draw options of powersgd without a warm-up that compress every matrix."""
    drawn = {
        "matrix_approximation_rank": draw(st.integers(1, 4)),
        "warmup_steps": 0,
        "min_compression_rate": EVERY_MATRIX,
        "memory": draw(st.sampled_from(["local", "local", "averaged", None])),
        "warm_start": draw(st.sampled_from([True, True, False])),
        "seed": draw(st.sampled_from([0, 1, 7919, 2**32 - 1])),
    }
    return {**drawn, **given}


def powersgd_weights(draw: Draw, dtype: torch.dtype, most: int = 2) -> list[Tensor]:
    """Up to ``most`` matrices, among other parameters."""
    forms = [draw(matrices) for _ in range(draw(st.integers(1, most)))] + [draw(_others) for _ in range(draw(st.integers(0, 2)))]
    order = np.random.default_rng(draw(seeds)).permutation(len(forms))
    return grid_weights(draw, [dtype] * len(forms), [forms[place] for place in order])


def of_rank(draw: Draw, like: Tensor, ranks: int, rank: int) -> list[Tensor]:
    """Return a gradient for each rank, whose mean has at most this rank as a matrix, though each one's is full."""
    shape, seed = (like.shape[0], like.numel() // like.shape[0]), draw(seeds)
    parts = [bulk(torch.float64, "tame", seed + place, size * rank) for place, size in enumerate(shape)]
    mean = parts[0].view(-1, rank) @ parts[1].view(rank, -1)
    noise = [bulk(torch.float64, "tame", seed + 2 + r, like.numel()).view(shape) for r in range(ranks)]
    centre = torch.stack(noise).mean(0)
    return [(mean + x - centre).to(like.dtype).view(like.shape) for x in noise]
