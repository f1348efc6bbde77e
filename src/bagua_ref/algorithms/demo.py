"""DeMo: the largest components of each rank's momentum are exchanged, and leave the momentum
(S15.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bagua_ref.algorithms.base import TrainingContext
from bagua_ref.algorithms.compressed_gradients import CompressedGradients, CompressedGradientsImpl
from bagua_ref.algorithms.registry import (
    check_number,
    check_one_of,
    check_sparse_options,
    check_whole,
    implements,
)
from bagua_ref.buckets.bucket import BaguaBucket

__all__ = ["DemoAlgorithm", "DemoAlgorithmImpl"]


@dataclass(frozen=True, eq=False)
class DemoAlgorithm(CompressedGradients):
    """DeMo: each rank adds gradients to a local momentum; the largest momentum components are
    exchanged and then removed from it (S15.6).

    ``p = decay*M + gradient``; Y is the discrete cosine transform of each chunk of p, a block of at
    most ``chunk`` rows and ``chunk`` columns of a gradient; the ``top_k`` elements of largest
    ``|Y|`` of each chunk are sent. The gradient becomes the inverse transform of their mean over
    ranks, or its sign, and M what the rank has not sent of p. Train with ``SGD(lr,
    weight_decay=...)`` without momentum: M is the momentum.

    Of each chunk, a rank sends 12 bits and a value of 4 bytes per element to n - 1 others; with
    "Stat2", 14 bits.

    Args:
        top_k: number of elements to send of each chunk.
        chunk: maximum side of a chunk, from 1 to 64; the side is the largest divisor of the
            gradient's rows or columns up to this.
        decay: decay of the momentum, from 0 to 1.
        transform: "dct", or None: components are the elements of p themselves.
        sign: apply the sign of each element of the result, -1, 0 or 1.
        mean: "all": divide by the number of ranks; "contributors": each component by the number of
            ranks whose value there is not 0.
        compression: compression of the values: None, "Stat2", or the name of a codec, one of
            `bagua_ref.list_codecs`.
        warmup_steps: number of first steps, on exactly averaged gradients, bit for bit as with
            `GradientAllReduceAlgorithm`.

    Raises:
        ValueError: an argument is out of range; when wrapping: there is a warm-up, but no optimizer
            was passed.
        TypeError: an argument has the wrong type; when wrapping: a parameter is float64.

    >>> DemoAlgorithm(top_k=8, sign=False).decay
    0.999

    Source: Peng et al., "DeMo: Decoupled Momentum Optimization", 2024 (arXiv:2411.19870).
    """

    top_k: int = 32
    chunk: int = 64
    decay: float = 0.999
    transform: Literal["dct"] | None = "dct"
    sign: bool = True
    mean: Literal["all", "contributors"] = "all"
    compression: str | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("top_k", self.top_k, 1)
        check_sparse_options(self.top_k, self.chunk, self.mean, self.compression)
        check_number("decay", self.decay, 0, 1)
        check_one_of("transform", self.transform, ("dct", None))
        check_whole("warmup_steps", self.warmup_steps, 0)


@implements(DemoAlgorithm)
class DemoAlgorithmImpl(CompressedGradientsImpl):
    """Implementation of `DemoAlgorithm` for one module; ``memories`` are the momenta M, by
    parameter name.
    """

    name = "demo"

    def init_operations(self, bagua_ddp: TrainingContext, bucket: BaguaBucket) -> None:
        """Append the chunked sparse exchange (S15)."""
        options = self.options
        bucket.append_chunked_sparse_op(
            options.compression,
            self.process_group,
            k=options.top_k,
            chunk=options.chunk,
            decay=options.decay,
            mean=options.mean,
            error=self.memory_of(bucket),
            cosine=options.transform == "dct",
            sign=options.sign,
            compresses=lambda: self.compressing,
        )
