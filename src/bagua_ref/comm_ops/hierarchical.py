"""A hierarchical form of other operations: reduce inside each node, operate between leaders, broadcast (S3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.communicators.base import Communicator
from bagua_ref.types import ReduceOp

__all__ = ["Hierarchical", "reduce_to_leader"]


class Hierarchical(CommOp):
    """``leaders_op`` between node leaders, on node sums or on node sums divided by n/L (S3.3).

    reduce to the leader -> leaders_op between the L leaders -> broadcast inside the node

    With ``divisor`` = n/L, the mean over leaders is the mean over all ranks, even if nodes are uneven.

    Args:
        intra: the communicator of this node's ranks; rank 0 is the leader.
        kernels: the kernel backend.
        leaders_op: the operation between leaders; None on other ranks.
        divisor: n/L for a mean, None for a sum.
        in_rank_order: sum the node's inputs in rank order at the leader (S3.7), as needed before quantisation; otherwise, the
            transport may choose the order for float32 and float64.

    Source: hierarchical communication in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    def __init__(
        self, intra: Communicator, kernels: KernelBackend, leaders_op: CommOp | None, divisor: float | None, in_rank_order: bool
    ) -> None:
        super().__init__(intra, kernels)
        self.leaders_op, self.divisor, self.in_rank_order = leaders_op, divisor, in_rank_order

    def __repr__(self) -> str:
        return f"Hierarchical({self.leaders_op!r} on {self.comm!r})"

    def __call__(self, x: Tensor) -> None:
        """Run on ``x`` in place; every rank of a node ends with identical bits."""
        reduce_to_leader(x, self.comm, self.kernels, self.divisor, self.in_rank_order)
        if self.leaders_op is not None:
            self.leaders_op(x)
        self.comm.broadcast(x, 0)


def reduce_to_leader(x: Tensor, intra: Communicator, kernels: KernelBackend, divisor: float | None, in_rank_order: bool) -> None:
    """Rank 0's ``x <- (sum over intra, in float32) / float32(divisor)``, rounded once; x of other ranks is unchanged (S3.3)."""
    if not in_rank_order and x.dtype in (torch.float32, torch.float64):
        intra.reduce_inplace(x, 0, ReduceOp.SUM)
        if divisor is not None and intra.rank() == 0:
            kernels.divide_(x, divisor)
        return
    inputs = torch.empty(intra.nranks() * x.numel() if intra.rank() == 0 else 0, dtype=x.dtype, device=x.device)
    intra.gather(x, inputs, 0)
    if intra.rank() == 0:
        # 16-bit inputs are summed and divided in float32, so that only the copy into x rounds.
        wide = inputs if x.dtype == torch.float64 else inputs.float()
        kernels.reduce_chunks_(wide, intra.nranks(), target_chunk=0, average=False)
        total = wide[: x.numel()]
        if divisor is not None:
            kernels.divide_(total, divisor)
        x.copy_(total)
