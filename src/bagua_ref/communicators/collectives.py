"""Reference collectives: plain functions of all ranks' tensors, in rank order, which define the
results of every communicator (S3.9).

They do not depend on threads, groups or transports. Tensors come in rank order; results are written
into the receivers' tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bagua_ref.types import ReduceOp

_COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def combine(tensors: Sequence[Tensor], op: ReduceOp, out: Tensor | None = None) -> Tensor:
    """Return the reduction ((tensor 0 op tensor 1) op tensor 2) ... in the tensors' dtype (S3.9).

    16-bit floats are combined in float32 and rounded once. AVG is SUM divided by the number of
    tensors. Integers wrap around.

    Args:
        tensors: one tensor per rank, equal in shape and dtype; unchanged, except for ``out``.
        op: AVG for floats only, bitwise operations for integers only.
        out: the tensor to write the result to, which is returned; may be tensor 0 or 1. None: a new
            tensor.

    >>> combine([torch.tensor([1.0]), torch.tensor([2.0])], ReduceOp.AVG)
    tensor([1.5000])
    """
    first, *others = tensors
    wide = _WIDER.get(first.dtype, first.dtype)
    total = out if out is not None and wide is first.dtype else torch.empty_like(first, dtype=wide)
    if others:
        _COMBINE[op](first.to(wide), others.pop(0).to(wide), out=total)
    else:
        total.copy_(first)
    for tensor in others:
        _COMBINE[op](total, tensor.to(wide), out=total)
    if op is ReduceOp.AVG:
        divide_(total, len(tensors))
    return total.to(first.dtype) if out is None else out.copy_(total)


def divide_(total: Tensor, nranks: int) -> Tensor:
    """Divide floats by the number of ranks, in place."""
    if nranks & (nranks - 1) == 0:
        # the same bits as a division by a power of two, in half the time
        return total.mul_(1 / nranks)
    # A divisor on the tensor's device: torch multiplies a CUDA tensor by the rounded reciprocal of
    # a Python number.
    return total.div_(torch.tensor(nranks, dtype=total.dtype, device=total.device))


def describe(tensor: Tensor) -> str:
    """Return a tensor's size and dtype as text, for messages.

    >>> describe(torch.zeros(3))
    '3 float32 elements'
    """
    return (
        f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        f" element{'s' * (tensor.numel() != 1)}"
    )


def broadcast(tensors: Sequence[Tensor], src: int) -> None:
    """Copy the tensor of rank ``src`` into every rank's tensor."""
    for rank, tensor in enumerate(tensors):
        if rank != src:
            _fill(tensor, tensors[src])


def reduce_inplace(tensors: Sequence[Tensor], dst: int, op: ReduceOp) -> None:
    """Reduce all tensors into the tensor of rank ``dst``."""
    _fill(tensors[dst], combine(tensors, op))


def allreduce_inplace(tensors: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce all tensors into each of them."""
    total = combine(tensors, op)
    for tensor in tensors:
        _fill(tensor, total)


def allgather(sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> None:
    """Concatenate the tensors of all ranks, in rank order, into every rank's receiver, which is n
    times as large.
    """
    everything = _concatenate(sends)
    for recv in recvs:
        _fill(recv, everything)


def scatter(send: Tensor, recvs: Sequence[Tensor]) -> None:
    """Copy chunk r of ``send``, which is n times as large, into rank r's receiver."""
    chunks = send.reshape(len(recvs), -1) if send.numel() else [send] * len(recvs)
    for recv, chunk in zip(recvs, chunks, strict=True):
        _fill(recv, chunk)


def reduce_scatter(sends: Sequence[Tensor], recvs: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce all tensors, and copy chunk r of the result into rank r's receiver."""
    scatter(combine(sends, op), recvs)


def alltoall(sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> None:
    """Copy chunk r of rank s's tensor into chunk s of rank r's receiver."""
    n = len(sends)
    if sends[0].numel() == 0:
        return
    # Rank r receives a column of one stacked tensor: n copies instead of n * n copies of chunks.
    chunks = _concatenate(sends).view(n, n, -1)
    for rank, recv in enumerate(recvs):
        _fill(recv, chunks[:, rank])


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _fill(tensor: Tensor, values: Tensor) -> None:
    tensor.copy_(
        values.reshape(tensor.shape)
        if values.is_contiguous()
        else values.contiguous().view(tensor.shape)
    )
