"""Plain data parallelism: gradients are all-reduced during the backward pass (S5.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl, TrainingContext
from bagua_ref.algorithms.registry import implements
from bagua_ref.algorithms.traits import Traits, WithoutBatch
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.types import Group

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]


@dataclass(frozen=True, eq=False)
class GradientAllReduceAlgorithm(Algorithm):
    """Gradient sum or mean over all ranks in full precision (S5.1, S3.1).

    Args:
        hierarchical: reduce inside nodes, all-reduce between their leaders, broadcast (S3.3).
        average: compute the mean instead of the sum.

    Source: Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    hierarchical: bool = False
    average: bool = True

    takes_shards = True


@implements(GradientAllReduceAlgorithm)
class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """Implementation of `GradientAllReduceAlgorithm` for one module."""

    name = "gradient_allreduce"
    # all ranks step with the same gradients, and every round all-reduces all buckets
    phases = (Traits(same_replicas=True, alike_rounds=True, without_batch=WithoutBatch.ZEROS),)

    def __init__(
        self, process_group: Group, hierarchical: bool = False, average: bool = True
    ) -> None:
        super().__init__(process_group, GradientAllReduceAlgorithm(hierarchical, average))
        self.hierarchical, self.average = hierarchical, average
        self.phases = (replace(self.phases[0], averages=average),)

    def init_operations(self, _: TrainingContext, bucket: BaguaBucket) -> None:
        """Append the all-reduce (S3.1)."""
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical, average=self.average, group=self.process_group
        )
