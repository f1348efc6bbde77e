"""Decentralized averaging of weights: with all ranks, along a graph (S3.4, S13), or compressed on a
ring (S3.5).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import Codec
from bagua_ref.comm_ops.base import CommOp, reduce_to_leader
from bagua_ref.communicators.base import Communicator
from bagua_ref.formulas.graphs import (
    MODES,
    Graph,
    GraphFunction,
    PeerSelection,
    check_mode,
    checked_graph,
)
from bagua_ref.observe.meter import profiled
from bagua_ref.types import ReduceOp


def _with_receivers(graph: Graph) -> tuple[Graph, list[list[int]]]:
    """Return a graph, and the receivers of each rank apart from itself."""
    receivers: list[list[int]] = [[] for _ in graph]
    for rank, row in enumerate(graph):
        for source, _ in row:
            if source != rank:
                receivers[source].append(rank)
    return graph, receivers


@lru_cache(maxsize=16)
def _named(function: Callable[[int, int], Graph], t: int, n: int) -> tuple[Graph, list[list[int]]]:
    """Return the graph and receivers of a named mode; the cache is shared by the buckets and
    simulated ranks of a process.
    """
    return _with_receivers(function(t, n))


class Decentralized(CommOp):
    """``peer_weight <- mean over ranks of x``, or of some ranks, or their weighted sum; x is
    unchanged (S3.4, S13).

    x changes only at `copy_back_peer_weight`, so that a forward and backward can use it meanwhile.
    Step t is the number of earlier executions. A mode that is not "all" is a graph: rank r averages
    its own x and those that it receives from the other sources of row r of the graph of step t;
    messages in both directions travel at once (`bagua_ref.graphs`).

    - "shift_one", "one_peer_exponential", "hypercube": ``(x + received) / 2``;
    - "ring": ``((x + left) + right) / 3``; on two ranks ``(x + left) / 2``;
    - "exponential": ``(((+0 + x) + received 0) + received 1 + ...) / number of sources``, as S3.7;
    - a function ``(t, n) -> graph``: ``((+0 + w*x) + w*x) + ...`` in the order of the row, each
      product rounded.

    All in float32 (float64 for float64), rounded once. A single rank keeps x in every mode.

    Hierarchical: the leader of each node computes the node's mean, the leaders operate, and
    copy-back broadcasts inside the node. For "all", leaders use node sums divided by n/L, so that
    ranks on uneven nodes have equal weight (S3.3); for graphs, they use plain node means.

    Each rank sends 2 (n-1)/n of x for "all", and x once for each rank that it is a source of.
    Memory: ``peer_weight``, and while it runs one copy of x for each source but the first; for
    16-bit dtypes with more than two sources, also two in float32.

    Args:
        comm: the communicator of all ranks; hierarchical: of the leaders.
        kernels: the kernel backend.
        peer_weight: a tensor of x's size, separate from x, that receives the result.
        peer_selection_mode: a name in `bagua_ref.graphs.MODES`, or a function ``(t, n) -> graph``,
            the same on all ranks.
        intra: hierarchical: the communicator of this node's ranks, of which rank 0 is the leader;
            else None.
        num_ranks: the number of all ranks.
        everyone: the communicator of all ranks, in which they compare the graphs of a function.

    Attributes:
        step: number of executions so far.
        graph: the graph of the last execution; empty for "all".

    Raises:
        ValueError: an unknown mode; "shift_one" with an odd number of ranks, "hypercube" with one
            that is not a power of two; a function whose graph, of step 0 or later that of the
            execution, is not doubly stochastic or differs between ranks. Raised on every rank.

    Source: decentralized full precision in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499); Lian
    et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017
    (arXiv:1705.09056); graphs: Ying et al., NeurIPS 2021 (arXiv:2110.13363).
    """

    def __init__(
        self,
        comm: Communicator,
        kernels: KernelBackend,
        peer_weight: Tensor,
        peer_selection_mode: PeerSelection,
        intra: Communicator | None,
        num_ranks: int,
        everyone: Communicator,
    ) -> None:
        super().__init__(comm, kernels)
        self.peer_weight, self.peer_selection_mode = peer_weight, peer_selection_mode
        self.intra, self.num_ranks, self._everyone = intra, num_ranks, everyone
        self.step = 0
        check_mode(peer_selection_mode)
        self._check_size()
        # fails now rather than during training if a function cannot be used
        self.graph = self._graph(0)

    def __repr__(self) -> str:
        return f"Decentralized({self.peer_selection_mode!r}, {self.comm!r})"

    def __call__(self, x: Tensor) -> None:
        """Average ``x`` into ``peer_weight``; hierarchical: on leaders only, until copy-back."""
        self.graph = self._graph(self.step)
        self.step += 1
        mine = x if self.intra is None else self._node_mean(x, self.intra)
        if self.intra is not None and self.intra.rank() != 0:
            return
        if self.peer_selection_mode == "all":
            self.peer_weight.copy_(mine)
            self.comm.allreduce_inplace(self.peer_weight, ReduceOp.AVG)
        else:
            self._average(mine, self.graph)

    def copy_back_peer_weight(self, bucket: Any) -> None:
        """Copy the averaged weights into the bucket's tensors; hierarchical: collective over the
        node.

        Call it only between the end of an execution (``wait_pending_comm_ops()``) and the beginning
        of the next.

        Args:
            bucket: the bucket to which this operation was appended.
        """
        if not hasattr(bucket, "copy_from_flat"):
            raise TypeError(
                f"bucket={bucket!r} must be the BaguaBucket to which this operation was appended"
            )
        if self.intra is not None:
            self.intra.broadcast(self.peer_weight, 0)
        with profiled("bagua_ref::update"):
            bucket.copy_from_flat(self.peer_weight)

    def _average(self, mine: Tensor, graph: Graph) -> None:
        """Set ``peer_weight`` to the average of ``mine`` and the received weights, as in this
        rank's row of the graph.
        """
        if len(graph) == 1:
            self.peer_weight.copy_(mine)
            return
        rank = self.comm.rank()
        sources = [source for source, _ in graph[rank]]
        others = [source for source in sources if source != rank]
        sends = [(mine, receiver) for receiver in self._receivers[rank]]
        weighted = callable(self.peer_selection_mode)
        from_zero = weighted or self.peer_selection_mode == "exponential"
        if len(sources) == 2 and not from_zero:  # needs no scratch memory
            self.comm.exchange(sends, [(self.peer_weight, source) for source in others])
            self.kernels.average_(self.peer_weight, mine)
            return
        received = mine.new_empty(len(others), mine.numel())
        self.comm.exchange(sends, list(zip(received, others, strict=True)))
        part_of = {rank: mine, **dict(zip(others, received, strict=True))}
        wide = torch.float64 if mine.dtype is torch.float64 else torch.float32
        total = self.peer_weight if mine.dtype is wide else torch.empty_like(mine, dtype=wide)
        total.fill_(0.0 if from_zero else -0.0)  # -0 + x is x, whatever x is
        for source, weight in graph[rank]:
            self.kernels.add_scaled_(total, part_of[source].to(wide), weight if weighted else 1.0)
        if not weighted:
            self.kernels.divide_(total, len(sources))
        self.peer_weight.copy_(total)

    def _node_mean(self, x: Tensor, intra: Communicator) -> Tensor:
        all_ranks = self.peer_selection_mode == "all"
        mean = x.clone()
        divisor = self.num_ranks / self.comm.nranks() if all_ranks else intra.nranks()
        reduce_to_leader(mean, intra, self.kernels, divisor, in_rank_order=not all_ranks)
        return mean

    def _graph(self, t: int) -> Graph:
        """Return the graph of step t; empty in mode "all", which is an all-reduce."""
        mode, n = self.peer_selection_mode, self.comm.nranks()
        if mode == "all":
            return []
        found = (
            _named(MODES[mode].graph, t, n)
            if isinstance(mode, str)
            else _with_receivers(self._agreed(mode, t, n))
        )
        graph, self._receivers = found
        return graph

    def _agreed(self, function: GraphFunction, t: int, n: int) -> Graph:
        """Call the user's graph function; return its graph after checking that all ranks got the
        same. Collective over all ranks.

        The function may fail on some ranks only, or differ between ranks. Then no rank may
        continue: it would wait forever, or average unrelated weights.
        """
        graph, error = None, None
        try:
            graph = checked_graph(function(t, n), n)
        except Exception as raised:
            error = raised
        checksum = zlib.crc32(repr(graph).encode())
        notes = self._everyone.exchange_ints([int(error is None), checksum])()
        differing = [rank for rank, note in enumerate(notes) if note != notes[0]]
        if differing:
            outcomes = [
                f"a graph of checksum {checksum}" if good else "no valid graph"
                for good, checksum in notes
            ]
            raise ValueError(
                f"peer_selection_mode must give the same graph on every rank; at step t={t} it gave"
                f" {outcomes[0]} on rank 0 and {outcomes[differing[0]]} on rank {differing[0]}"
            ) from error
        if graph is None:
            assert error is not None
            raise error
        return graph

    def _check_size(self) -> None:
        """Raise ValueError on all ranks if the mode does not support this number of ranks."""
        n = self.comm.nranks()
        mode = (
            MODES.get(self.peer_selection_mode)
            if isinstance(self.peer_selection_mode, str)
            else None
        )
        if mode is None or mode.takes(n):
            return
        what = "ranks" if self.intra is None else f"leaders of {self.num_ranks} ranks"
        if self.intra is not None and mode.takes(self.num_ranks):
            what += "; hierarchical=False pairs ranks instead"
        raise ValueError(
            f"peer_selection_mode={self.peer_selection_mode!r} pairs ranks, so it needs"
            f" {mode.sizes} of them; this group has {n} ({what}). Use another peer_selection_mode"
            " or a group of another size."
        )


def trade_with_neighbours(mine: Tensor, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Exchange tensors with both ring neighbours: send ``mine``, return the left and the right
    neighbour's (S3.5).

    The left neighbour is rank r-1, the right one r+1, modulo n. A single rank is its own neighbour;
    of two ranks, each is the other's neighbour on both sides.
    """
    rank, n = comm.rank(), comm.nranks()
    left, right = (rank - 1) % n, (rank + 1) % n
    from_left, from_right = torch.empty_like(mine), torch.empty_like(mine)
    # With two ranks, both messages come from one peer: the first is what it sends to its left, so
    # it is my right one.
    comm.exchange([(mine, left), (mine, right)], [(from_right, right), (from_left, left)])
    return from_left, from_right


class LowPrecisionDecentralized(CommOp):
    """Weight averaging with both ring neighbours, by compressed changes of the weights (S3.5).

    x += 1/3 L + 1/3 R - 5/3 W -> q = compress(x) -> send q both ways -> L += dq(q_left), R +=
    dq(q_right), x <- dq(q) + W, W <- x

    W holds this rank's weights at the end of the last step, L and R those of its neighbours. As x
    is W plus the updates of training since then, the first line gives the mean of W, L and R, plus
    these updates, minus W. A neighbour adds the same decompressed change to its replica as this
    rank adds to W, so W stays bit-identical to the right neighbour's L and to the left neighbour's
    R.

    Each rank sends two payloads of m elements, for any number of ranks. Memory: three replicas, and
    three payloads as scratch.

    Args:
        comm: the communicator of the ring, with any number of ranks.
        kernels: the kernel backend.
        codec: codec of the changes.
        weight: W, of x's size, separate from all other tensors.
        left_peer_weight: L, likewise.
        right_peer_weight: R, likewise.

    Source: decentralized low precision in Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499);
    difference compression in Tang et al., "Communication Compression for Decentralized Training",
    NeurIPS 2018 (arXiv:1803.06443).
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
        self.weight, self.left_peer_weight, self.right_peer_weight = (
            weight,
            left_peer_weight,
            right_peer_weight,
        )

    def __call__(self, x: Tensor) -> None:
        """Average ``x`` in place."""
        kernels, codec, W, L, R = (
            self.kernels,
            self.codec,
            self.weight,
            self.left_peer_weight,
            self.right_peer_weight,
        )
        kernels.combine_ring_(x, L, R, W)
        q = codec.compress(x, 1)
        q_left, q_right = trade_with_neighbours(q, self.comm)
        for replica, change in ((L, q_left), (R, q_right)):
            codec.decompress(change, 1, out=x)  # x can be scratch until it gets its own change
            kernels.add_(replica, x)
        codec.decompress(q, 1, out=x)
        kernels.add_(x, W)
        W.copy_(x)
