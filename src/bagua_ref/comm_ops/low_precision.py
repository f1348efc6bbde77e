"""Sum or mean over all ranks with one byte per element on the wire (S3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua_ref.comm_ops.base import CommOp

if TYPE_CHECKING:
    from torch import Tensor

    from bagua_ref.backends.base import KernelBackend
    from bagua_ref.communicators.base import Communicator

__all__ = ["CentralizedLowPrecision"]


class CentralizedLowPrecision(CommOp):
    """Sum or mean over all ranks with one byte per element on the wire (S3.2).

    compress n chunks -> all-to-all -> decompress -> reduce my chunk -> compress it -> all-gather -> decompress

    Every rank ends with identical bytes. Each rank sends 2 (n-1)/n (m + 32 n) bytes for m elements, a quarter of a float32
    all-reduce; scratch is one payload of about m bytes and a copy of it.

    Source: ByteGrad in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    def __init__(self, comm: Communicator, kernels: KernelBackend, average: bool) -> None:
        super().__init__(comm, kernels)
        self.average = average

    def __call__(self, x: Tensor) -> None:
        """Reduce ``x``, whose size is a multiple of n, in place."""
        n, rank = self.comm.nranks(), self.comm.rank()
        payload = self.kernels.compress_minmax_uint8(x, n)
        self.comm.alltoall_inplace(payload)
        self.kernels.decompress_minmax_uint8(payload, n, out=x)
        self.kernels.reduce_chunks_(x, n, target_chunk=rank, average=self.average)
        self.kernels.compress_minmax_uint8(x, n, target_chunk=rank, out=payload)
        self.comm.allgather_inplace(payload)
        self.kernels.decompress_minmax_uint8(payload, n, out=x)
