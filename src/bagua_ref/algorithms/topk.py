"""Top-k: each rank sends its largest gradient elements, and keeps the others for later rounds
(S11.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_ref.algorithms.base import Algorithm, TrainingContext
from bagua_ref.algorithms.compressed_gradients import CompressedGradientsImpl
from bagua_ref.algorithms.registry import (
    check_bool,
    check_compressible,
    check_number,
    check_optimizers,
    check_whole,
    implements,
)
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.buckets.storage import registration
from bagua_ref.comm_ops import TopK
from bagua_ref.types import Group

__all__ = ["TopKAlgorithm", "TopKAlgorithmImpl"]


@dataclass(frozen=True, eq=False)
class TopKAlgorithm(Algorithm):
    """Each rank sends its k largest gradient elements of each bucket, and adds the others to its
    next gradients (S11.2).

    ``p = gradient + e``; the k elements of largest ``|p|`` are sent, and the averaged gradient is
    their sum over ranks divided by the number of ranks, 0 where no rank has sent. e is what was not
    sent. Of m elements, ``k = max(1, ceil(ratio * m))``.

    Each rank sends ``8 k (n-1)`` bytes per bucket and step on n ranks, in place of ``8 m (n-1)/n``.

    Args:
        ratio: the part of each bucket that is sent, above 0 and at most 1.
        error_feedback: False: what is not sent is lost.
        warmup_steps: steps on exactly averaged gradients first, as `GradientAllReduceAlgorithm`
            takes them, bit for bit.

    Raises:
        ValueError: an argument is out of range; on wrapping: there is a warm-up, and no optimizer
            was passed.
        TypeError: an argument is of another type; on wrapping: float64 parameters.

    >>> TopKAlgorithm(ratio=0.05)
    TopKAlgorithm(ratio=0.05, error_feedback=True, warmup_steps=0)

    Source: Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017
    (arXiv:1704.05021).
    """

    ratio: float = 0.01
    error_feedback: bool = True
    warmup_steps: int = 0

    takes_shards = True

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio, 0, 1, excluded=True)
        check_bool("error_feedback", self.error_feedback)
        check_whole("warmup_steps", self.warmup_steps, 0)

    def check(
        self,
        parameters: list[tuple[str, torch.nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Raise TypeError for float64 parameters, ValueError for a warm-up without an optimizer."""
        check_compressible(parameters, "topk")
        if self.warmup_steps:
            check_optimizers("topk with warmup_steps > 0", optimizers)


@implements(TopKAlgorithm)
class TopKAlgorithmImpl(CompressedGradientsImpl):
    """`TopKAlgorithm` at work on one module; ``memories`` are e, by the names of parameters."""

    name = "topk"

    def __init__(self, process_group: Group, **options: Any) -> None:
        made = TopKAlgorithm(**options)
        super().__init__(process_group, made, has_memory=made.error_feedback)

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append S11.2."""
        names = [registration(proxy).name for proxy in bucket.tensors]
        if self.has_memory:
            for name, layout in zip(names, bucket.layouts, strict=True):
                self.memories.expect(
                    name, torch.empty((), device=bucket.device).expand(layout.shape), layout
                )
        op = TopK(
            self.process_group.get_global_communicator(),
            bucket.kernels,
            sum(layout.shape.numel() for layout in bucket.layouts),
            self.options.ratio,
            (lambda: self.memories.flat(names)) if self.has_memory else None,
            lambda: self.compressing,
            bucket.dtype,
        )
        bucket.append_op(op, self.process_group)
