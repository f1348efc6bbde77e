"""ByteGrad: gradient averaging with one byte per element on the wire (S5.2)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl
from bagua_ref.bucket import BaguaBucket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bagua_ref.algorithms.base import TrainingContext
    from bagua_ref.types import Group

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """`ByteGradAlgorithm` at work on one module."""

    def __init__(self, process_group: Group, hierarchical: bool = True, average: bool = True) -> None:
        super().__init__(process_group)
        self.hierarchical, self.average = hierarchical, average

    @property
    def replicas_are_equal(self) -> bool:
        """True: all ranks step with the same gradients."""
        return True

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """Pad each bucket so that it divides by the number of ranks, and of leaders if hierarchical (S5.2)."""
        alignment = len(self.process_group.ranks)
        if self.hierarchical:
            alignment = math.lcm(alignment, self.process_group.get_inter_node_communicator().nranks())
        return [BaguaBucket(bucket, str(place), flatten=do_flatten, alignment=alignment) for place, bucket in enumerate(tensors)]

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append S3.2, or S3.3 with it between leaders."""
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=self.average,
            scattergather=True,
            compression="MinMaxUInt8",
            group=self.process_group,
        )


class ByteGradAlgorithm(Algorithm):
    """Gradients are summed or averaged over all ranks as 8-bit levels between each chunk's minimum and maximum (S5.2, S3.2).

    Args:
        hierarchical: full precision inside nodes, compressed between their leaders (S3.3).
        average: the mean instead of the sum.

    Source: ByteGrad in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average

    def reify(self, process_group: Group) -> ByteGradAlgorithmImpl:
        """Return the implementation for one module."""
        return ByteGradAlgorithmImpl(process_group, self.hierarchical, self.average)
