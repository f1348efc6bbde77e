"""All-reduce as a differentiable function, under the original's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from bagua_ref.data_parallel.distributed import to_bagua_process_group
from bagua_ref.groups.process_group import BaguaProcessGroup
from bagua_ref.types import ReduceOp

__all__ = ["ReduceOp", "all_reduce", "torch_reduce_op_to_bagua"]

_DIFFERENTIABLE = (ReduceOp.SUM, ReduceOp.AVG)


def torch_reduce_op_to_bagua(op: Any) -> ReduceOp:
    """Convert torch's reduce operator ``op`` to Bagua's; Bagua's own are returned unchanged.

    Raises:
        ValueError: Bagua has no such operator.

    >>> torch_reduce_op_to_bagua(torch.distributed.ReduceOp.MAX)
    <ReduceOp.MAX: 3>
    """
    if isinstance(op, ReduceOp):
        return op
    # both compare equal to numbers, which mean something else
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        for known in ReduceOp:
            if op == getattr(dist.ReduceOp, known.name):
                return known
    raise ValueError(
        f"op={op!r} must be one of torch.distributed.ReduceOp's"
        f" {', '.join(known.name for known in ReduceOp)}"
    )


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Tensor:
    """Return the differentiable reduction of ``tensor`` over all ranks; ``tensor`` itself is
    unchanged.

    With y = sum of x over ranks, every rank's loss depends on every rank's x: the gradient of x is
    the sum over ranks of the gradients of y (of the mean: the mean). So each rank's backward is
    collective, too.

    Args:
        tensor: a tensor of the same shape and dtype on all ranks.
        op: torch's operator or Bagua's. Only SUM and AVG let gradients through.
        group: a group of Bagua's or torch's; None is Bagua's default group.

    Raises:
        ValueError: Bagua has no such operator.
        NotImplementedError: the operator is neither SUM nor AVG, and the tensor needs a gradient.
        NotInitializedError: ``init_process_group()`` was not called.

    >>> bagua_ref.init_process_group()
    >>> all_reduce(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    >>> bagua_ref.destroy_process_group()
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor={tensor!r} must be a torch.Tensor")
    bagua_op = torch_reduce_op_to_bagua(op)
    if tensor.requires_grad and torch.is_grad_enabled() and bagua_op not in _DIFFERENTIABLE:
        raise NotImplementedError(
            f"op={bagua_op.name} has no gradient here; use SUM or AVG, or"
            f" all_reduce(tensor.detach(), op={bagua_op.name})"
        )
    return _apply(bagua_op, to_bagua_process_group(group), tensor)


def _apply(op: ReduceOp, group: BaguaProcessGroup, tensor: Tensor) -> Tensor:
    reduced: Tensor = _AllReduce.apply(op, group, tensor)  # type: ignore[no-untyped-call]
    return reduced


class _AllReduce(Function):
    """Autograd function of the all-reduce. Its backward pass is the same all-reduce, which is
    correct for SUM and AVG.
    """

    @staticmethod
    def forward(ctx: Any, op: ReduceOp, group: BaguaProcessGroup, tensor: Tensor) -> Tensor:
        """Return the all-reduced copy of ``tensor``."""
        ctx.op, ctx.group = op, group
        result = tensor.clone(memory_format=torch.contiguous_format)
        group.get_global_communicator().allreduce_inplace(result, op)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, Tensor]:
        """Return the all-reduced gradient."""
        return None, None, _apply(ctx.op, ctx.group, grad_output)
