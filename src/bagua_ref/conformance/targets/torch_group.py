"""A torch.distributed process group as a target's communicator, with ranks as threads of one
process (S3.9).

``bagua-ref verify --communicator bagua_ref.conformance.targets.torch_group:gloo --suite
collectives`` checks torch's own gloo. For another group, write a factory like `gloo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bagua_ref.base.memory import bytes_of
from bagua_ref.communicators.base import Communicator
from bagua_ref.conformance.targets.world import RankWorld
from bagua_ref.types import ReduceOp

__all__ = ["TorchGroup", "gloo"]

_TIMEOUT = timedelta(seconds=10)


class TorchGroup(Communicator):
    """The collectives of S3.9 on a ``ProcessGroup``, called as torch.distributed calls them.

    Data is moved as bytes, so every dtype works; reductions are the group's own, except for a mean,
    which is its sum divided. Invalid arguments are rejected before the group is called.

    Args:
        group: a ``torch.distributed.ProcessGroup`` or an object with its methods.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size(), type(group).__name__)
        self._group = group

    def abort(self, reason: str = "") -> None:
        """Abort the group."""
        self._group = None

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._group.barrier().wait()

    def _exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]
    ) -> None:
        works = [self._group.recv([bytes_of(tensor)], peer, 0) for tensor, peer in recvs]
        works += [self._group.send([bytes_of(tensor)], peer, 0) for tensor, peer in sends]
        for work in works:
            work.wait()

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self._group.broadcast(bytes_of(tensor), src).wait()

    def _gather(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int) -> None:
        options = dist.GatherOptions()
        options.rootRank = dst
        outputs = [self._chunks(bytes_of(recv_tensor))] if self._rank == dst else []
        self._group.gather(outputs, [bytes_of(send_tensor)], options).wait()

    def _scatter(self, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = src
        inputs = [self._chunks(bytes_of(send_tensor))] if self._rank == src else []
        self._group.scatter([bytes_of(recv_tensor)], inputs, options).wait()

    def _allgather(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        self._group.allgather([self._chunks(bytes_of(recv_tensor))], [bytes_of(send_tensor)]).wait()

    def _alltoall(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        self._group.alltoall_base(bytes_of(recv_tensor), bytes_of(send_tensor), [], []).wait()

    def _allreduce_inplace(self, tensor: Tensor, op: ReduceOp) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _native(op)
        self._group.allreduce([tensor], options).wait()
        self._divide(tensor, op)

    def _reduce_inplace(self, tensor: Tensor, dst: int, op: ReduceOp) -> None:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = _native(op), dst
        self._group.reduce([tensor], options).wait()
        if self._rank == dst:
            self._divide(tensor, op)

    def _reduce_scatter(self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _native(op)
        self._group.reduce_scatter(
            [recv_tensor], [self._chunks(send_tensor.view(-1))], options
        ).wait()
        self._divide(recv_tensor, op)

    def _divide(self, tensor: Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.AVG:
            tensor.div_(self._nranks)

    def _chunks(self, flat: Tensor) -> list[Tensor]:
        count = flat.numel() // self._nranks
        return [flat[rank * count : (rank + 1) * count] for rank in range(self._nranks)]


def gloo(world: RankWorld) -> TorchGroup:
    """Return torch's gloo between the ranks of ``world``: a factory for ``--communicator``, and an
    example of one.
    """
    return TorchGroup(
        dist.ProcessGroupGloo(world.store, world.rank, world.world_size, timeout=_TIMEOUT)
    )


gloo.real_threads = True  # type: ignore[attr-defined]


def _native(op: ReduceOp) -> Any:
    return dist.ReduceOp.SUM if op is ReduceOp.AVG else getattr(dist.ReduceOp, op.name)
