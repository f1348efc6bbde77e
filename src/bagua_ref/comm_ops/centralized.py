"""Sum or mean over all ranks in full precision (S3.1)."""

from __future__ import annotations

from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.types import ReduceOp

__all__ = ["CentralizedFullPrecision", "CentralizedScatterGather"]


class CentralizedFullPrecision(CommOp):
    """``x <- sum over ranks``, or the mean, by one all-reduce (S3.1).

    Each rank sends 2 (n-1)/n of x. The transport chooses the order of the sum.

    Source: all-reduce as in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499), section 3.
    """

    def __init__(self, comm: Communicator, kernels: KernelBackend, average: bool) -> None:
        super().__init__(comm, kernels)
        self.average = average

    def __call__(self, x: Tensor) -> None:
        """All-reduce ``x`` in place."""
        self.comm.allreduce_inplace(x, ReduceOp.AVG if self.average else ReduceOp.SUM)


class CentralizedScatterGather(CommOp):
    """``x <- sum over ranks``, or the mean, summed in rank order (S3.1, S3.7).

    all-to-all of n chunks -> reduce my chunk -> all-gather

    Each rank sends 2 (n-1)/n of x, as all-reduce does, and every rank ends with identical bits.

    Source: the ScatterReduce primitive of Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    def __init__(self, comm: Communicator, kernels: KernelBackend, average: bool) -> None:
        super().__init__(comm, kernels)
        self.average = average

    def __call__(self, x: Tensor) -> None:
        """Reduce ``x``, whose size is a multiple of n, in place."""
        n, rank = self.comm.nranks(), self.comm.rank()
        self.comm.alltoall_inplace(x)
        self.kernels.reduce_chunks_(x, n, target_chunk=rank, average=self.average)
        self.comm.allgather_inplace(x)
