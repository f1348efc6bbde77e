"""Plain data parallelism: gradients are all-reduced during the backward pass (S5.1)."""

from __future__ import annotations

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl, TrainingContext
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.types import Group

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """`GradientAllReduceAlgorithm` at work on one module."""

    def __init__(self, process_group: Group, hierarchical: bool = False, average: bool = True) -> None:
        super().__init__(process_group)
        self.hierarchical, self.average = hierarchical, average

    @property
    def replicas_are_equal(self) -> bool:
        """True: all ranks step with the same gradients."""
        return True

    @property
    def rounds_are_alike(self) -> bool:
        """True: every round all-reduces all buckets."""
        return True

    def check_join(self, divide_by_initial_world_size: bool) -> bool:
        """Return True: ranks without batches contribute zero gradients."""
        return True

    def init_operations(self, _: TrainingContext, bucket: BaguaBucket) -> None:
        """Append S3.1."""
        bucket.append_centralized_synchronous_op(hierarchical=self.hierarchical, average=self.average, group=self.process_group)


class GradientAllReduceAlgorithm(Algorithm):
    """Gradients are summed or averaged over all ranks in full precision (S5.1, S3.1).

    Args:
        hierarchical: reduce inside nodes, all-reduce between their leaders, broadcast (S3.3).
        average: the mean instead of the sum.

    Source: Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    takes_shards = True

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average

    def reify(self, process_group: Group) -> GradientAllReduceAlgorithmImpl:
        """Return the implementation for one module."""
        return GradientAllReduceAlgorithmImpl(process_group, self.hierarchical, self.average)
