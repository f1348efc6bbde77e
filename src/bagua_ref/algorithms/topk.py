"""Top-k: each rank sends its largest gradient elements, and adds the others to later gradients
(S11.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.algorithms.compressed_gradients import CompressedGradients, CompressedGradientsImpl
from bagua_ref.algorithms.registry import check_number, check_whole, implements
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.comm_ops import TopK

__all__ = ["TopKAlgorithm", "TopKAlgorithmImpl"]


@dataclass(frozen=True, eq=False)
class TopKAlgorithm(CompressedGradients):
    """Top-k: each rank sends the k largest gradient elements of each bucket, and adds the others to
    its next gradients (S11.2).

    ``p = gradient + e``; the k elements of largest ``|p|`` are sent, and the averaged gradient is
    their sum over ranks divided by the number of ranks, 0 where no rank has sent. e is the
    residual: the part of p that was not sent. Of m elements, ``k = max(1, ceil(ratio * m))``.

    Each rank sends ``8 k (n-1)`` bytes per bucket and step on n ranks, in place of ``8 m (n-1)/n``.

    Args:
        ratio: fraction of each bucket to send, above 0 and at most 1.
        error_feedback: add elements that were not sent to the next gradients; False: they are lost.
        warmup_steps: number of first steps, on exactly averaged gradients, bit for bit as with
            `GradientAllReduceAlgorithm`.

    Raises:
        ValueError: an argument is out of range; when wrapping: there is a warm-up, but no optimizer
            was passed.
        TypeError: an argument has the wrong type; when wrapping: a parameter is float64.

    >>> TopKAlgorithm(ratio=0.05)
    TopKAlgorithm(ratio=0.05, error_feedback=True, warmup_steps=0)

    Source: Aji & Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017
    (arXiv:1704.05021).
    """

    ratio: float = 0.01
    error_feedback: bool = True
    warmup_steps: int = 0

    @property
    def has_memory(self) -> bool:  # type: ignore[override]
        """Whether elements that are not sent are stored for the next round."""
        return self.error_feedback

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ratio", self.ratio, 0, 1, excluded=True)
        check_whole("warmup_steps", self.warmup_steps, 0)


@implements(TopKAlgorithm)
class TopKAlgorithmImpl(CompressedGradientsImpl):
    """Implementation of `TopKAlgorithm` for one module; ``memories`` are the residuals e, by
    parameter name.
    """

    name = "topk"

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append the top-k mean (S11.2)."""
        op = TopK(
            self.process_group.get_global_communicator(),
            bucket.kernels,
            bucket.filled,
            self.options.ratio,
            self.memory_of(bucket),
            lambda: self.compressing,
            bucket.dtype,
        )
        bucket.append_op(op, self.process_group)
