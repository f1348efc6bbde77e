"""ByteGrad: gradient averaging with compressed chunks on the wire, one byte per element by default
(S5.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

from torch import Tensor

from bagua_ref.algorithms.base import Algorithm, AlgorithmImpl, TrainingContext
from bagua_ref.algorithms.registry import implements
from bagua_ref.algorithms.state import ErrorMemories, communicator_of
from bagua_ref.algorithms.traits import Traits, WithoutBatch
from bagua_ref.buckets.bucket import BaguaBucket, check_compression
from bagua_ref.comm_ops import ErrorMemory
from bagua_ref.types import Group

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]


@dataclass(frozen=True, eq=False)
class ByteGradAlgorithm(Algorithm):
    """Gradient sum or mean over all ranks in compressed chunks (S5.2, S3.2).

    By default an element is one byte, a level between its chunk's minimum and maximum (S4).

    Args:
        hierarchical: full precision inside nodes, compressed between their leaders (S3.3).
        average: compute the mean instead of the sum.
        compression: the name of a codec, one of `bagua_ref.list_codecs` (S4, S12).
        error_feedback: keep compression errors, in float32, and add them to the next round's
            gradients (S11.1).

    Raises:
        ValueError: there is no such codec.
        TypeError: error_feedback is not a bool.

    >>> ByteGradAlgorithm(compression="OneBit", error_feedback=True).error_feedback
    True

    Source: ByteGrad in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    hierarchical: bool = True
    average: bool = True
    _: KW_ONLY
    compression: str = "MinMaxUInt8"
    error_feedback: bool = False

    takes_shards = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_compression(self.compression)


@implements(ByteGradAlgorithm)
class ByteGradAlgorithmImpl(AlgorithmImpl):
    """Implementation of `ByteGradAlgorithm` for one module; ``error_memories`` hold this rank's
    compression errors.
    """

    name = "bytegrad"
    # all ranks step with the same gradients
    phases: tuple[Traits, ...] = (
        Traits(same_replicas=True, alike_rounds=True, without_batch=WithoutBatch.ZEROS),
    )

    def __init__(
        self,
        process_group: Group,
        hierarchical: bool = True,
        average: bool = True,
        *,
        compression: str = "MinMaxUInt8",
        error_feedback: bool = False,
    ) -> None:
        options = ByteGradAlgorithm(
            hierarchical, average, compression=compression, error_feedback=error_feedback
        )
        super().__init__(process_group, options)
        self.average = average
        self.error_memories = ErrorMemories()
        if error_feedback:
            self.stores, self.rank_state = (
                {"memories": self.error_memories},
                frozenset({"memories"}),
            )
        # a round changes error memory, too
        alike = not error_feedback
        self.phases = (replace(self.phases[0], averages=self.average, alike_rounds=alike),)

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        """Pad each bucket to a multiple of the number of ranks, or of node leaders if hierarchical
        (S5.2).
        """
        group = self.process_group
        alignment = math.lcm(
            len(group.ranks), communicator_of(group, self.options.hierarchical).nranks()
        )
        return [
            BaguaBucket(bucket, str(place), flatten=do_flatten, alignment=alignment)
            for place, bucket in enumerate(tensors)
        ]

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append the compressed mean: S3.2, S11.1 with error memory, or its hierarchical form S3.3
        between leaders.
        """
        bucket.append_centralized_synchronous_op(
            hierarchical=self.options.hierarchical,
            average=self.average,
            scattergather=True,
            compression=self.options.compression,
            group=self.process_group,
            error_memory=self.memory_of(bucket),
        )

    def memory_of(self, bucket: BaguaBucket) -> ErrorMemory | None:
        """Return the error memory of a bucket; None without error feedback."""
        return (
            self.error_memories.of_bucket(bucket, self.process_group, self.options.hierarchical)
            if self.options.error_feedback
            else None
        )
