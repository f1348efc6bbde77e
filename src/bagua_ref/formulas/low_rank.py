"""Low-rank approximation: the shapes of compressed gradients, orthonormal columns, and random
initial columns (S10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["THRESHOLD", "matrix_shape", "orthonormalize", "random_columns", "starting_columns"]

THRESHOLD = 1e-6
"""Fraction of a column's norm; a column becomes 0 if projections leave no more than it."""


def matrix_shape(
    shape: Sequence[int], matrix_approximation_rank: int, min_compression_rate: float
) -> tuple[int, int, int] | None:
    """Return n, m and r of a gradient viewed as a matrix, None if it is not compressed (S10.1).

    n is the first dimension, m the product of the others, and ``r = min(n, m,
    matrix_approximation_rank)``. A gradient of two or more dimensions is compressed if ``(n + m) *
    r * min_compression_rate < n * m``.

    >>> matrix_shape((64, 3, 5, 5), 4, 2.0)
    (64, 75, 4)
    >>> matrix_shape((64,), 4, 2.0) is None
    True
    """
    if len(shape) < 2:
        return None
    n, m = shape[0], math.prod(shape[1:])
    r = min(n, m, matrix_approximation_rank)
    return (n, m, r) if (n + m) * r * min_compression_rate < n * m else None


def orthonormalize(matrices: Sequence[Tensor]) -> None:
    """Make the columns of each matrix orthonormal, in place, by modified Gram-Schmidt in float64,
    rounded once at the end (S10.3).

    In order, each column is divided by its norm, and its projection is subtracted from every later
    one. A column whose norm is not above 1e-6 of its norm before projections becomes 0.

    Args:
        matrices: float32 or float64, each with at least one row; those of one shape are computed
            together.

    >>> x = torch.tensor([[3.0, 6.0], [4.0, 8.0]])
    >>> orthonormalize([x]); x
    tensor([[0.6000, 0.0000],
            [0.8000, 0.0000]])
    """
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for alike in by_shape.values():
        # each column is contiguous now
        columns = torch.stack([matrix.mT for matrix in alike]).double()
        _orthonormalize(columns)
        torch._foreach_copy_(alike, list(columns.mT))


def _orthonormalize(columns: Tensor) -> None:
    """Make the rows of each matrix in a batch orthonormal."""
    largest = columns.abs().amax(dim=-1, keepdim=True)
    # squares of large float64 values would overflow
    columns /= torch.where(largest > 0, largest, 1)
    before = torch.linalg.vector_norm(columns, dim=-1, keepdim=True)
    for place in range(columns.shape[1]):
        column, later = columns[:, place : place + 1], columns[:, place + 1 :]
        norm = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        column.copy_(torch.where(norm > THRESHOLD * before[:, place : place + 1], column / norm, 0))
        if later.shape[1]:
            later -= (later @ column.mT) @ column


def random_columns(m: int, r: int, seed: int, round_number: int, place: int) -> Tensor:
    """Return N, m x r standard normal float32 numbers, identical on all ranks (S10.2).

    Args:
        m: rows.
        r: columns.
        seed: seed of the algorithm.
        round_number: k, the number of earlier rounds since the warm-up.
        place: i, the parameter's index in the order in which parameters enter buckets.
    """
    generator = torch.Generator().manual_seed(seed + 1000003 * round_number + 7919 * place)
    return torch.randn(m, r, generator=generator, dtype=torch.float32)


def starting_columns(
    factors: Sequence[Tensor], seed: int, round_number: int, places: Sequence[int]
) -> list[Tensor]:
    """Return the orthonormal Q of each matrix at the start of a round, computed from the last
    round's factors (S10.2).

    Each column is contiguous, which makes products much faster.

    Columns that become 0 are replaced by those of N, and the matrix is orthonormalized again: else
    they would stay 0.

    Args:
        factors: m x r matrices, 0 where there was no last round; unchanged.
        seed: as in `random_columns`, like ``round_number``.
        round_number: k.
        places: i of each matrix.
    """
    started = [factor.T.clone(memory_format=torch.contiguous_format).T for factor in factors]
    orthonormalize(started)
    lacking = []
    for columns, place in zip(started, places, strict=True):
        empty = (columns == 0).all(dim=0)
        if empty.any():
            m, r = columns.shape
            fresh = random_columns(m, r, seed, round_number, place)
            columns[:, empty] = fresh.to(columns)[:, empty]
            lacking.append(columns)
    orthonormalize(lacking)
    return started
