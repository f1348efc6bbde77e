"""Sum or mean over all ranks with compressed chunks on the wire (S3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import Codec
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.communicators.pipelining import Overlap

__all__ = ["CentralizedLowPrecision"]


class CentralizedLowPrecision(CommOp):
    """Sum or mean over all ranks with compressed chunks on the wire (S3.2).

    compress n chunks -> all-to-all -> decompress -> reduce my chunk -> compress it -> all-gather -> decompress

    Every rank ends with identical bytes. Each rank sends 2 (n-1) times the codec's bytes for a chunk of m/n elements; for
    MinMaxUInt8 that is about a quarter of a float32 all-reduce. Scratch is one payload of n chunks and a copy of it.

    Args:
        comm: the communicator of the ranks that take part.
        kernels: the kernel backend.
        codec: compresses the chunks.
        average: the mean instead of the sum.

    Source: ByteGrad in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    def __init__(self, comm: Communicator, kernels: KernelBackend, codec: Codec, average: bool) -> None:
        super().__init__(comm, kernels)
        self.codec, self.average = codec, average

    def __call__(self, x: Tensor) -> None:
        """Reduce ``x``, whose size is a multiple of n, in place."""
        n, rank, codec = self.comm.nranks(), self.comm.rank(), self.codec
        size = n * codec.payload_bytes(x.numel() // n, x.dtype)
        sent, payload = (torch.empty(size, dtype=torch.uint8, device=x.device) for _ in range(2))
        compress, decompress = codec.compress_in_steps(x, n, out=sent), codec.decompress_in_steps(payload, n, out=x)
        self.comm.alltoall(sent, payload, Overlap(compress, decompress))
        del sent  # as memory is scarce, and an all-gather may need a copy of a chunk
        self.kernels.reduce_chunks_(x, n, target_chunk=rank, average=self.average)
        compress = codec.compress_in_steps(x, n, target_chunk=rank, out=payload)
        self.comm.allgather_inplace(payload, Overlap(compress, codec.decompress_in_steps(payload, n, out=x)))
