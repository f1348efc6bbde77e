"""PowerSGD: gradient averaging by low-rank approximations, with error memory (S10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.algorithms.compressed_gradients import CompressedGradients, CompressedGradientsImpl
from bagua_ref.algorithms.registry import (
    check_number,
    check_one_of,
    check_whole,
    implements,
)
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.storage import registration
from bagua_ref.comm_ops import LowRank
from bagua_ref.comm_ops.low_rank import Matrix
from bagua_ref.formulas.low_rank import matrix_shape
from bagua_ref.types import Group

__all__ = ["PowerSGDAlgorithm", "PowerSGDAlgorithmImpl"]

_MEMORIES = ("local", "averaged", None)


@dataclass(frozen=True, eq=False)
class PowerSGDAlgorithm(CompressedGradients):
    """PowerSGD: gradients are averaged as products of two thin matrices, and approximation errors
    are added to the next gradients (S10).

    For a gradient of two or more dimensions as a matrix M of n rows, n its first dimension, and m
    columns, with e added: ``P = orthonormalized sum over ranks of M Q``, ``Q = mean over ranks of
    M^T P``, and the averaged gradient is ``P Q^T``. The first round's P is made with random columns
    in place of Q, later ones with the last round's Q, orthonormalized.

    With ``r = min(n, m, matrix_approximation_rank)``, a gradient is compressed if ``(n + m) * r *
    min_compression_rate < n * m``. All others are averaged exactly. Each rank sends ``8 (n + m) r
    (N-1)/N`` bytes per step for a compressed gradient on N ranks, in place of ``8 n m (N-1)/N``.

    Args:
        matrix_approximation_rank: maximum of r.
        warmup_steps: number of first steps, on exactly averaged gradients, bit for bit as with
            `GradientAllReduceAlgorithm`.
        min_compression_rate: minimum factor by which compression must shrink a gradient; above 0.
        memory: "local": each rank keeps ``M - P Q_r^T``, the part of its own gradient that the sum
            lacks; "averaged": ``M - P Q^T``, as in torch's hook and the paper's code; None: no
            error feedback.
        warm_start: start from the last round's Q; False: from new random columns in every round.
        seed: seed of the random columns, equal on all ranks.

    Raises:
        ValueError: an argument is out of range; when wrapping: there is a warm-up, but no optimizer
            was passed.
        TypeError: an argument has the wrong type.

    >>> PowerSGDAlgorithm(matrix_approximation_rank=4, warmup_steps=100).memory
    'local'

    Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019 (arXiv:1905.13727).
    """

    matrix_approximation_rank: int = 1
    warmup_steps: int = 1000
    min_compression_rate: float = 2.0
    memory: Literal["local", "averaged"] | None = "local"
    warm_start: bool = True
    seed: int = 0

    takes_float64 = True

    @property
    def has_memory(self) -> bool:  # type: ignore[override]
        """Whether approximation errors are stored for the next round."""
        return self.memory is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("matrix_approximation_rank", self.matrix_approximation_rank, 1)
        check_whole("warmup_steps", self.warmup_steps, 0)
        check_number("min_compression_rate", self.min_compression_rate, 0, inf, excluded=True)
        check_one_of("memory", self.memory, _MEMORIES)
        check_whole("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise ValueError(f"seed={self.seed} must be below 2**32")


@implements(PowerSGDAlgorithm)
class PowerSGDAlgorithmImpl(CompressedGradientsImpl):
    """Implementation of `PowerSGDAlgorithm` for one module; ``memories`` are the errors e and
    ``factors`` the matrices Q, by parameter name.
    """

    name = "powersgd"

    def __init__(self, process_group: Group, **options: Any) -> None:
        super().__init__(process_group, **options)
        self._places: dict[str, int] = {}
        """i of each parameter: its index in the order in which parameters enter buckets."""

    def init_tensors(self, bagua_ddp: TrainingContext) -> list[Tensor]:
        """Return the gradients, last layer first."""
        tensors = super().init_tensors(bagua_ddp)
        self.enter([registration(tensor).name for tensor in tensors])
        return tensors

    def enter(self, names: Sequence[str]) -> None:
        """Number parameters in the order in which they enter buckets."""
        for name in names:
            self._places.setdefault(name, len(self._places))

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append the low-rank mean (S10)."""
        options, matrices, start = self.options, [], 0
        wide = torch.promote_types(bucket.dtype, torch.float32)
        for proxy, layout in zip(bucket.tensors, bucket.layouts, strict=True):
            shape = matrix_shape(
                layout.shape, options.matrix_approximation_rank, options.min_compression_rate
            )
            if shape is not None:
                name, (n, m, r) = registration(proxy).name, shape
                like = torch.empty((), dtype=wide, device=bucket.device)
                self.factors.expect(name, like.expand(m, r))
                if options.has_memory:
                    self.memories.expect(name, like.expand(n, m))
                matrices.append(Matrix(name, start, n, m, r, self._places[name], layout))
            start += layout.shape.numel()
        op = LowRank(
            self.process_group.get_global_communicator(),
            bucket.kernels,
            matrices,
            self.factors,
            self.memories,
            memory=options.memory,
            seed=options.seed,
            warm_start=options.warm_start,
            round_number=self.round_number,
        )
        bucket.append_op(op, self.process_group)
