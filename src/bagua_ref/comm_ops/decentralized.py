"""Decentralized averaging of weights with all ranks or with one changing peer, into a separate tensor (S3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from bagua_ref.comm_ops.base import CommOp
from bagua_ref.comm_ops.hierarchical import reduce_to_leader
from bagua_ref.types import ReduceOp

if TYPE_CHECKING:
    from torch import Tensor

    from bagua_ref.backends.base import KernelBackend
    from bagua_ref.communicators.base import Communicator

__all__ = ["PEER_SELECTION_MODES", "Decentralized", "shift_one_peer"]

PEER_SELECTION_MODES = ("all", "shift_one")


def shift_one_peer(rank: int, nranks: int, step: int) -> int:
    """Return the rank with which ``rank`` averages at ``step``: one of the other half, the next one at each step (S3.4).

    With h = nranks/2, it is ``(step + rank) mod h + h`` for the first half and ``(rank - h - step) mod h`` for the second. This is
    an involution, and in h steps each rank meets every rank of the other half.

    Args:
        rank: from 0 to nranks - 1.
        nranks: the number of ranks, even.
        step: the number of earlier averages.

    Raises:
        ValueError: nranks is odd or less than 2, or rank is not one of them.

    >>> [shift_one_peer(rank, 4, 0) for rank in range(4)], [shift_one_peer(rank, 4, 1) for rank in range(4)]
    ([2, 3, 0, 1], [3, 2, 1, 0])
    """
    if nranks < 2 or nranks % 2:
        raise ValueError(f"nranks={nranks} must be even and at least 2, as each rank averages with one other")
    if not 0 <= rank < nranks:
        raise ValueError(f"rank={rank} must be from 0 to {nranks - 1}")
    half = nranks // 2
    return (step + rank) % half + half if rank < half else (rank - half - step) % half


class FlatTarget(Protocol):
    """The bucket that `Decentralized.copy_back_peer_weight` writes to."""

    def copy_from_flat(self, flat: Tensor) -> None:
        """Copy ``flat``, which has the bucket's size, into the bucket's tensors."""
        ...


class Decentralized(CommOp):
    """``peer_weight <- mean over ranks of x``, or ``(peer's x + x) / 2`` with one peer; x is unchanged (S3.4).

    x changes only at `copy_back_peer_weight`, so that a forward and backward can use it meanwhile. The k-th execution pairs
    ranks as `shift_one_peer` does for step k, counted from 0.

    Hierarchical: the leader of each node computes the node's mean, the leaders operate, and copy-back broadcasts inside the
    node. For "all", leaders use node sums divided by n/L, so that ranks on uneven nodes have equal weight (S3.3); for
    "shift_one", they use plain node means.

    Each rank sends 2 (n-1)/n of x for "all" and x once for "shift_one". It needs no memory but ``peer_weight``.

    Args:
        comm: the communicator of all ranks; hierarchical: of the leaders.
        kernels: the kernel backend.
        peer_weight: a tensor of x's size, separate from x, that receives the result.
        peer_selection_mode: "all" or "shift_one".
        intra: hierarchical: the communicator of this node's ranks, of which rank 0 is the leader; else None.
        num_ranks: the number of all ranks; None: those of ``comm``.

    Attributes:
        step: the number of executions.

    Raises:
        ValueError: an unknown mode, or "shift_one" with an odd number of ranks.

    Source: decentralized full precision in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499); Lian et al., "Can Decentralized
    Algorithms Outperform Centralized Algorithms?", NeurIPS 2017 (arXiv:1705.09056).
    """

    def __init__(
        self,
        comm: Communicator,
        kernels: KernelBackend,
        peer_weight: Tensor,
        peer_selection_mode: str = "all",
        intra: Communicator | None = None,
        num_ranks: int | None = None,
    ) -> None:
        super().__init__(comm, kernels)
        self.peer_weight, self.peer_selection_mode, self.intra = peer_weight, peer_selection_mode, intra
        self.num_ranks = comm.nranks() if num_ranks is None else num_ranks
        self.step = 0
        if peer_selection_mode not in PEER_SELECTION_MODES:
            raise ValueError(f"peer_selection_mode={peer_selection_mode!r} must be 'all' or 'shift_one'")
        n = comm.nranks()
        if peer_selection_mode == "shift_one" and n % 2:
            what = "ranks" if intra is None else f"leaders of {self.num_ranks} ranks"
            if intra is not None and self.num_ranks % 2 == 0:
                what += "; hierarchical=False pairs ranks instead"
            raise ValueError(
                f"peer_selection_mode='shift_one' pairs ranks, so it needs an even number of them; this group has {n} ({what}). "
                "Use peer_selection_mode='all' or an even group."
            )

    def __repr__(self) -> str:
        return f"Decentralized({self.peer_selection_mode!r}, {self.comm!r})"

    def __call__(self, x: Tensor) -> None:
        """Average ``x`` into ``peer_weight``; hierarchical: on leaders only, until copy-back."""
        step, self.step = self.step, self.step + 1
        mine = x if self.intra is None else self._node_mean(x, self.intra)
        if self.intra is not None and self.intra.rank() != 0:
            return
        if self.peer_selection_mode == "all":
            self.peer_weight.copy_(mine)
            self.comm.allreduce_inplace(self.peer_weight, ReduceOp.AVG)
        else:
            peer = shift_one_peer(self.comm.rank(), self.comm.nranks(), step)
            self.comm.exchange([(mine, peer)], [(self.peer_weight, peer)])
            self.kernels.average_(self.peer_weight, mine)

    def copy_back_peer_weight(self, bucket: FlatTarget) -> None:
        """Copy the result into the bucket's tensors; hierarchical: a collective inside the node.

        Call it only between the end of an execution (``wait_pending_comm_ops()``) and the beginning of the next.

        Args:
            bucket: the bucket to which this operation was appended.
        """
        if not hasattr(bucket, "copy_from_flat"):
            raise TypeError(f"bucket={bucket!r} must be the BaguaBucket to which this operation was appended")
        if self.intra is not None:
            self.intra.broadcast(self.peer_weight, 0)
        bucket.copy_from_flat(self.peer_weight)

    def _node_mean(self, x: Tensor, intra: Communicator) -> Tensor:
        all_ranks = self.peer_selection_mode == "all"
        mean = x.clone()
        divisor = self.num_ranks / self.comm.nranks() if all_ranks else intra.nranks()
        reduce_to_leader(mean, intra, self.kernels, divisor, in_rank_order=not all_ranks)
        return mean
