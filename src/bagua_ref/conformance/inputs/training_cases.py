"""Weights and gradients of the trainings that are checked."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

__all__ = ["ONE_BUCKET", "copies", "lists", "on_a_grid", "shapes", "tensor"]

ONE_BUCKET = 2**20
"""A bucket size so large that every training here has one bucket per dtype."""

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
