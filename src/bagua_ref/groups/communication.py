"""The collectives of `bagua.torch_api.communication` as functions (S3.9); the process groups are in
`process_group`.

``comm=None`` means the default group's global communicator. On a rank outside ``comm``, functions
return at once and change nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

from bagua_ref.base.memory import by_dtype_and_device
from bagua_ref.base.not_provided import explain_missing
from bagua_ref.base.runtime import current_world
from bagua_ref.communicators.base import Communicator, NonMember
from bagua_ref.errors import NotInitializedError
from bagua_ref.groups.process_group import (
    BaguaProcessGroup,
    MaybeCommunicator,
    _get_default_group,
    _rank_not_in_comm,
    _rank_not_in_group,  # noqa: F401  of the original's module, too
    destroy_process_group,
    from_torch_group,
    get_communicator,
    init_process_group,
    is_initialized,
    new_group,
)
from bagua_ref.types import ReduceOp

__all__ = [
    "BaguaProcessGroup",
    "BaguaProcessGroupPatch",
    "ReduceOp",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "destroy_process_group",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_communicator",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]

# tensors are copied together up to this size and then sent: few messages, little memory
_COALESCED_BYTES = 32 * 1024**2


def _on(comm: MaybeCommunicator | None) -> Any:
    if comm is None:
        return _get_default_group().get_global_communicator()
    if not isinstance(comm, (Communicator, NonMember)):
        raise TypeError(
            f"comm={comm!r} must be a communicator, such as group.get_global_communicator()"
        )
    return comm


def get_backend(model_name: str) -> Any:
    """Return a wrapped module's communication engine, which has ``wait_pending_comm_ops()``.

    For kernel backends, see `bagua_ref.get_backend`.

    Args:
        model_name: the module's ``bagua_module_name``.

    Raises:
        ValueError: no wrapped module has this name.

    >>> bagua_ref.init_process_group()
    >>> model = torch.nn.Linear(2, 1)
    >>> model.bagua_module_name = "scorer"
    >>> model = model.with_bagua([], bagua_ref.algorithms.GradientAllReduceAlgorithm())
    >>> bagua_ref.communication.get_backend("scorer").wait_pending_comm_ops()
    >>> bagua_ref.destroy_process_group()
    """
    engines = current_world().engines
    if model_name not in engines:
        raise ValueError(
            f"model_name={model_name!r} must be the bagua_module_name of a wrapped module; known"
            f" are {sorted(engines)}"
        )
    return engines[model_name]


def send(tensor: Tensor, dst: int, comm: MaybeCommunicator | None = None) -> None:
    """Send ``tensor`` to rank ``dst``, which calls `recv` (S3.9)."""
    _on(comm).send(tensor, dst)


def recv(tensor: Tensor, src: int, comm: MaybeCommunicator | None = None) -> None:
    """Receive ``tensor`` from rank ``src`` (S3.9)."""
    _on(comm).recv(tensor, src)


def broadcast(tensor: Tensor, src: int = 0, comm: MaybeCommunicator | None = None) -> None:
    """Copy rank ``src``'s ``tensor`` into every rank's (S3.9)."""
    _on(comm).broadcast(tensor, src)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Sequence[Tensor], src: int = 0, comm: MaybeCommunicator | None = None
) -> None:
    """As `broadcast` for each tensor, in fewer messages; any mix of shapes, strides, dtypes and
    devices (S3.9).
    """
    communicator = _on(comm)
    for flat, members in _coalesced(tensors):
        communicator.broadcast(flat, src)
        if communicator.rank() != src:
            _scatter_flat(flat, members)


def broadcast_object(obj: Any, src: int = 0, comm: MaybeCommunicator | None = None) -> Any:
    """Return rank ``src``'s ``obj`` on every rank (S3.9). It is pickled, so use this only among
    ranks that trust each other.
    """
    return _on(comm).broadcast_object(obj, src)


def reduce(
    send_tensor: Tensor,
    recv_tensor: Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: MaybeCommunicator | None = None,
) -> None:
    """Combine ``send_tensor`` over ranks into ``recv_tensor`` of rank ``dst`` (S3.9)."""
    _on(comm).reduce(send_tensor, recv_tensor, dst, op)


def reduce_inplace(
    tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: MaybeCommunicator | None = None
) -> None:
    """Combine ``tensor`` over ranks into that of rank ``dst``; on other ranks, it is unchanged
    (S3.9).
    """
    _on(comm).reduce_inplace(tensor, dst, op)


def allreduce(
    send_tensor: Tensor,
    recv_tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: MaybeCommunicator | None = None,
) -> None:
    """Combine ``send_tensor`` over ranks into every ``recv_tensor`` (S3.9)."""
    _on(comm).allreduce(send_tensor, recv_tensor, op)


def allreduce_inplace(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: MaybeCommunicator | None = None
) -> None:
    """Combine ``tensor`` over ranks in place, on every rank (S3.9)."""
    _on(comm).allreduce_inplace(tensor, op)


@torch.no_grad()
def allreduce_coalesced_inplace(
    tensors: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, comm: MaybeCommunicator | None = None
) -> None:
    """As `allreduce_inplace` for each tensor, in fewer messages; any mix of shapes, strides, dtypes
    and devices (S3.9).
    """
    communicator = _on(comm)
    if _rank_not_in_comm(communicator):
        return
    for tensor in tensors:  # check all of them before the first is sent
        communicator._check_reduction(op, tensor.new_empty(0), tensor.new_empty(0))
    for flat, members in _coalesced(tensors):
        communicator.allreduce_inplace(flat, op)
        _scatter_flat(flat, members)


def allgather(
    send_tensor: Tensor, recv_tensor: Tensor, comm: MaybeCommunicator | None = None
) -> None:
    """Collect every ``send_tensor``, in rank order, in every ``recv_tensor``, which is n times as
    large (S3.9).
    """
    _on(comm).allgather(send_tensor, recv_tensor)


def allgather_inplace(tensor: Tensor, comm: MaybeCommunicator | None = None) -> None:
    """As `allgather`; this rank sends its own chunk of the tensor (S3.9)."""
    _on(comm).allgather_inplace(tensor)


def gather(
    send_tensor: Tensor, recv_tensor: Tensor, dst: int, comm: MaybeCommunicator | None = None
) -> None:
    """Collect every ``send_tensor``, in rank order, in ``recv_tensor`` of rank ``dst``, which is n
    times as large (S3.9).
    """
    _on(comm).gather(send_tensor, recv_tensor, dst)


def gather_inplace(
    tensor: Tensor, count: int, dst: int, comm: MaybeCommunicator | None = None
) -> None:
    """As `gather`; rank ``dst``'s tensor has n * count elements, its own in place; the others send
    count elements (S3.9).
    """
    _on(comm).gather_inplace(tensor, count, dst)


def scatter(
    send_tensor: Tensor, recv_tensor: Tensor, src: int, comm: MaybeCommunicator | None = None
) -> None:
    """Send each rank its chunk of rank ``src``'s ``send_tensor``, which is n times as large as
    ``recv_tensor`` (S3.9).
    """
    _on(comm).scatter(send_tensor, recv_tensor, src)


def scatter_inplace(
    tensor: Tensor, count: int, src: int, comm: MaybeCommunicator | None = None
) -> None:
    """As `scatter`; rank ``src``'s tensor has n * count elements and is unchanged; the others
    receive count elements (S3.9).
    """
    _on(comm).scatter_inplace(tensor, count, src)


def reduce_scatter(
    send_tensor: Tensor,
    recv_tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: MaybeCommunicator | None = None,
) -> None:
    """Combine ``send_tensor``, n times as large as ``recv_tensor``, over ranks; rank r receives
    chunk r (S3.9).
    """
    _on(comm).reduce_scatter(send_tensor, recv_tensor, op)


def reduce_scatter_inplace(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, comm: MaybeCommunicator | None = None
) -> None:
    """As `reduce_scatter` into this rank's own chunk; the other chunks are unchanged (S3.9)."""
    _on(comm).reduce_scatter_inplace(tensor, op)


def alltoall(
    send_tensor: Tensor, recv_tensor: Tensor, comm: MaybeCommunicator | None = None
) -> None:
    """Exchange chunks between all ranks: chunk d of n goes to rank d, chunk s of ``recv_tensor``
    comes from rank s (S3.9).
    """
    _on(comm).alltoall(send_tensor, recv_tensor)


def alltoall_inplace(tensor: Tensor, comm: MaybeCommunicator | None = None) -> None:
    """As `alltoall` on one tensor (S3.9)."""
    _on(comm).alltoall_inplace(tensor)


def alltoall_v(
    send_tensor: Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: MaybeCommunicator | None = None,
) -> None:
    """As MPI_Alltoallv: a count and a displacement in elements for each peer, for sending and for
    receiving (S3.9).
    """
    _on(comm).alltoall_v(
        send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs
    )


def alltoall_v_inplace(
    tensor: Tensor,
    counts: Sequence[int],
    displs: Sequence[int],
    comm: MaybeCommunicator | None = None,
) -> None:
    """As `alltoall_v` on one tensor, with the same counts and displacements in both directions
    (S3.9).
    """
    _on(comm).alltoall_v_inplace(tensor, counts, displs)


def barrier(comm: MaybeCommunicator | None = None) -> None:
    """Wait until every rank has called this function (S3.9)."""
    _on(comm).barrier()


def _coalesced(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield flat copies of tensors of one dtype and device, with the tensors to copy back to; all
    ranks split them in the same way.
    """
    for alike in by_dtype_and_device(tensor for tensor in tensors if tensor.numel()):
        batches: list[list[Tensor]] = [[]]
        filled = 0
        for tensor in alike:
            filled += tensor.nbytes
            if batches[-1] and filled > _COALESCED_BYTES:
                batches.append([])
                filled = tensor.nbytes
            batches[-1].append(tensor)
        for batch in batches:
            if len(batch) == 1 and batch[0].is_contiguous():
                yield batch[0], []
            else:
                yield flatten(batch), batch


def _scatter_flat(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    if tensors:
        pairs = zip(tensors, unflatten(flat, tensors), strict=True)
        once = [_without_repeats(*pair) if 0 in pair[0].stride() else pair for pair in pairs]
        torch._foreach_copy_([tensor for tensor, _ in once], [values for _, values in once])


def _without_repeats(tensor: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of an expanded tensor and of ``values`` in which each memory location occurs
    once.

    Raises:
        ValueError: ``values`` differ along a dimension along which ``tensor`` is expanded.
    """
    place, part = tensor, values
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            place, part = place.narrow(dimension, 0, 1), part.narrow(dimension, 0, 1)
    if not part.expand_as(values).contiguous().view(torch.uint8).equal(values.view(torch.uint8)):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is expanded, so"
            " it has no memory for the result, whose elements differ along the expanded"
            " dimensions; pass tensor.clone(), or use expand() on all ranks"
        )
    return place, part


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("communication")


# torch's groups accept no new attributes.
_patched: weakref.WeakKeyDictionary[Any, BaguaProcessGroup] = weakref.WeakKeyDictionary()


class BaguaProcessGroupPatch:
    """The methods that importing bagua_ref adds to torch's ProcessGroup; they use the Bagua group
    of the same ranks.
    """

    def bagua_patch(self, stream: Any = None) -> Any:
        """Make the Bagua group of these ranks, once, and return the torch group. All members call
        this in the same order.
        """
        known = _patched.get(self)
        if known is None or known._closed:
            _patched[self] = from_torch_group(self, stream)
        return self

    @property
    def bagua_pg(self) -> BaguaProcessGroup:
        """The group that `bagua_patch` made."""
        group = _patched.get(self)
        if group is None:
            raise NotInitializedError(
                "this torch process group has no Bagua group yet; call its bagua_patch() first"
            )
        return group

    def bagua_get_global_communicator(self) -> Any:
        """As `BaguaProcessGroup.get_global_communicator`."""
        return self.bagua_pg.get_global_communicator()

    def bagua_get_inter_node_communicator(self) -> Any:
        """As `BaguaProcessGroup.get_inter_node_communicator`."""
        return self.bagua_pg.get_inter_node_communicator()

    def bagua_get_intra_node_communicator(self) -> Any:
        """As `BaguaProcessGroup.get_intra_node_communicator`."""
        return self.bagua_pg.get_intra_node_communicator()
