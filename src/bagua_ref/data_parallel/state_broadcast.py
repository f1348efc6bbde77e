"""All ranks start from the first one's parameters, buffers and optimizer state (S5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bagua_ref.types import ReduceOp
from bagua_ref.utils import apply_flattened_call_all

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from bagua_ref.communicators.base import Communicator

__all__ = ["broadcast_state"]


def broadcast_state(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], comm: Communicator, ignored: Collection[str]
) -> None:
    """Give every rank the first one's parameters, buffers, optimizer state and options (S5).

    Args:
        module: with the same names, shapes and dtypes on all ranks.
        optimizers: with the same groups on all ranks.
        comm: the ranks that train together.
        ignored: names of parameters and buffers that stay as they are.

    Raises:
        ValueError: module or optimizers differ between ranks; raised on every rank.
    """
    if comm.nranks() == 1:
        return
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors = {name: tensor for name, tensor in named.items() if name not in ignored}
    _check_alike(tensors, optimizers, comm)
    apply_flattened_call_all([t.detach() for t in tensors.values()], lambda flat: comm.broadcast(flat, 0))
    for optimizer in optimizers:
        state = comm.broadcast_object(optimizer.state_dict() if comm.rank() == 0 else None, 0)
        if comm.rank() != 0:
            optimizer.load_state_dict(state)


def _check_alike(tensors: dict[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], comm: Communicator) -> None:
    mine = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    mine += [f"optimizer {type(o).__name__} of {[len(group['params']) for group in o.param_groups]} parameters" for o in optimizers]
    first = comm.broadcast_object(mine, 0)
    alike = torch.tensor([mine == first], dtype=torch.int32)
    comm.allreduce_inplace(alike, ReduceOp.MIN)
    if not alike.item():
        differing = [f"{a!r} here, {b!r} there" for a, b in zip(mine, first, strict=False) if a != b][:3]
        if len(mine) != len(first):
            differing.append(f"{len(mine)} entries here, {len(first)} there")
        raise ValueError(
            "module or optimizers differ between ranks, so they cannot train together; compared with the group's first rank: "
            + ("; ".join(differing) or "this rank is the same, another one differs")
        )
