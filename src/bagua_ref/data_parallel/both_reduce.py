"""Refusal of torch's DistributedDataParallel over the ranks over which a training reduces already."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua_ref.types import Group

__all__ = ["refuse_both", "refuse_inside"]


def refuse_both(group: Group) -> None:
    """Refuse a torch DistributedDataParallel whose forward pass is under way if its group shares ranks with ``group``.

    Raises:
        RuntimeError: they share more than this rank; says which of the two to drop.
    """
    around = DistributedDataParallel._get_active_ddp_module()
    if around is not None:
        _refuse(around, group, "around")


def refuse_inside(module: torch.nn.Module, group: Group) -> None:
    """Refuse torch's DistributedDataParallel in ``module``, and as ``module``; errors as `refuse_both`."""
    for inside in module.modules():
        if isinstance(inside, DistributedDataParallel):
            _refuse(inside, group, "inside")


def _refuse(ddp: DistributedDataParallel, group: Group, where: str) -> None:
    shared = sorted({*group.ranks} & {*dist.get_process_group_ranks(ddp.process_group)})
    if len(shared) > 1:
        raise RuntimeError(
            f"torch's DistributedDataParallel {where} this module and bagua_ref both reduce over ranks {shared}, so that all "
            "gradients would travel twice: drop DistributedDataParallel and train the plain module, or drop with_bagua() or "
            "train() to have DistributedDataParallel reduce alone. Both work only over groups that share no more than one rank"
        )
