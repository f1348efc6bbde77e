"""Decentralized averaging on a ring that sends compressed changes of weights (S3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import Codec
from bagua_ref.comm_ops.base import CommOp
from bagua_ref.communicators.base import Communicator

__all__ = ["LowPrecisionDecentralized", "trade_with_neighbours"]


def trade_with_neighbours(mine: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Send ``mine`` to both neighbours on the ring; return the tensors of the left and the right one (S3.5).

    The left neighbour is rank r-1, the right one r+1, modulo n. A single rank is its own neighbour; of two ranks, each is the
    other's neighbour on both sides.
    """
    rank, n = comm.rank(), comm.nranks()
    left, right = (rank - 1) % n, (rank + 1) % n
    from_left, from_right = torch.empty_like(mine), torch.empty_like(mine)
    # With two ranks, both messages come from one peer: the first is what it sends to its left, so it is my right one.
    comm.exchange([(mine, left), (mine, right)], [(from_right, right), (from_left, left)])
    return from_left, from_right


class LowPrecisionDecentralized(CommOp):
    """Averages weights with both ring neighbours and sends the changes compressed (S3.5).

    x += 1/3 L + 1/3 R - 5/3 W -> q = compress(x) -> send q both ways -> L += dq(q_left), R += dq(q_right), x <- dq(q) + W, W <- x

    W holds this rank's weights at the end of the last step, L and R those of its neighbours. As x is W plus the updates of
    training since then, the first line gives the mean of W, L and R, plus these updates, minus W. A neighbour adds the same
    decompressed change to its replica as this rank adds to W, so W stays bit-identical to the right neighbour's L and to the
    left neighbour's R.

    Each rank sends two payloads of m elements, for any number of ranks. Memory: three replicas, and three payloads as scratch.

    Args:
        comm: the communicator of the ring, with any number of ranks.
        kernels: the kernel backend.
        codec: compresses the changes.
        weight: W, of x's size, separate from all other tensors.
        left_peer_weight: L, likewise.
        right_peer_weight: R, likewise.

    Source: decentralized low precision in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499); difference compression in Tang et
    al., "Communication Compression for Decentralized Training", NeurIPS 2018 (arXiv:1803.06443).
    """

    def __init__(
        self,
        comm: Communicator,
        kernels: KernelBackend,
        codec: Codec,
        weight: Tensor,
        left_peer_weight: Tensor,
        right_peer_weight: Tensor,
    ) -> None:
        super().__init__(comm, kernels)
        self.codec = codec
        self.weight, self.left_peer_weight, self.right_peer_weight = weight, left_peer_weight, right_peer_weight

    def __call__(self, x: Tensor) -> None:
        """Take one step on ``x`` in place."""
        kernels, codec, W, L, R = self.kernels, self.codec, self.weight, self.left_peer_weight, self.right_peer_weight
        kernels.combine_ring_(x, L, R, W)
        q = codec.compress(x, 1)
        q_left, q_right = trade_with_neighbours(q, self.comm)
        for replica, change in ((L, q_left), (R, q_right)):
            codec.decompress(change, 1, out=x)  # x can be scratch until it gets its own change
            kernels.add_(replica, x)
        codec.decompress(q, 1, out=x)
        kernels.add_(x, W)
        W.copy_(x)
