"""Collective operations on the flat tensor of a bucket: the base class, hierarchical operations
(S3.3), and Python functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.communicators.base import Communicator
from bagua_ref.types import ReduceOp


class CommOp(ABC):
    """Base of the operations of S3: ``kernels`` compute, ``comm`` moves data. It does not depend on
    buckets.

    Args:
        comm: communicator of the participating ranks, all of which run the operation.
        kernels: the kernel backend.
    """

    def __init__(self, comm: Communicator, kernels: KernelBackend) -> None:
        self.comm, self.kernels = comm, kernels

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.comm.nranks()} ranks)"

    def work(self) -> tuple[str, int]:
        """Return the computation of the next execution, apart from its codec, as a name and a
        number of elements, for predictions of time (S14.3).
        """
        return "", 0

    @abstractmethod
    def __call__(self, x: Tensor) -> None:
        """Run on ``x``, the flat contiguous tensor of a bucket, padding included."""


class PythonOp:
    """The operation ``function(bucket_name)``, called on the background worker; it may read and
    write the bucket's tensors (S3.8).
    """

    def __init__(self, function: Callable[[str], object], bucket_name: str) -> None:
        self.function, self.bucket_name = function, bucket_name

    def __repr__(self) -> str:
        return f"PythonOp({getattr(self.function, '__qualname__', self.function)})"

    def __call__(self, x: Tensor) -> None:
        """Call the function, which accesses the bucket itself instead of its flat tensor ``x``."""
        self.function(self.bucket_name)


class Hierarchical(CommOp):
    """Hierarchical operation: ``leaders_op`` between node leaders, on node sums or on node sums
    divided by n/L (S3.3).

    reduce to the leader -> leaders_op between the L leaders -> broadcast inside the node

    With ``divisor`` = n/L, the mean over leaders is the mean over all ranks, even if nodes are
    uneven.

    Args:
        intra: the communicator of this node's ranks; rank 0 is the leader.
        kernels: the kernel backend.
        leaders_op: the operation between leaders; None on other ranks.
        divisor: n/L for a mean, None for a sum.
        in_rank_order: sum the node's inputs in rank order at the leader (S3.7), as needed before
            quantisation; otherwise, the transport may choose the order for float32 and float64.

    Source: hierarchical communication in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    def __init__(
        self,
        intra: Communicator,
        kernels: KernelBackend,
        leaders_op: CommOp | None,
        divisor: float | None,
        in_rank_order: bool,
    ) -> None:
        super().__init__(intra, kernels)
        self.leaders_op, self.divisor, self.in_rank_order = leaders_op, divisor, in_rank_order

    def __repr__(self) -> str:
        return f"Hierarchical({self.leaders_op!r}, {self.comm.nranks()} ranks)"

    def __call__(self, x: Tensor) -> None:
        """Run on ``x`` in place; all ranks of a node end with identical bits."""
        reduce_to_leader(x, self.comm, self.kernels, self.divisor, self.in_rank_order)
        if self.leaders_op is not None:
            self.leaders_op(x)
        self.comm.broadcast(x, 0)


def reduce_to_leader(
    x: Tensor,
    intra: Communicator,
    kernels: KernelBackend,
    divisor: float | None,
    in_rank_order: bool,
) -> None:
    """Sum x over the ranks of a node into the leader's tensor (S3.3).

    Rank 0's ``x <- (sum over intra, in float32) / float32(divisor)``, rounded once; x of other
    ranks is unchanged.
    """
    if not in_rank_order and x.dtype in (torch.float32, torch.float64):
        intra.reduce_inplace(x, 0, ReduceOp.SUM)
        if divisor is not None and intra.rank() == 0:
            kernels.divide_(x, divisor)
        return
    inputs = torch.empty(
        intra.nranks() * x.numel() if intra.rank() == 0 else 0, dtype=x.dtype, device=x.device
    )
    intra.gather(x, inputs, 0)
    if intra.rank() == 0:
        # 16-bit inputs are summed and divided in float32, so that only the copy into x rounds.
        wide = inputs if x.dtype == torch.float64 else inputs.float()
        kernels.reduce_chunks_(wide, intra.nranks(), target_chunk=0, average=False)
        total = wide[: x.numel()]
        if divisor is not None:
            kernels.divide_(total, divisor)
        x.copy_(total)
