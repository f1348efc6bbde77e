"""Broadcast of the first rank's parameters, buffers and optimizer state at the start of training (S5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from bagua_ref.communication import broadcast_coalesced
from bagua_ref.types import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from bagua_ref.communicators.base import Communicator

__all__ = ["broadcast_state", "take_over"]


def broadcast_state(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    comm: Communicator,
    ignored: Collection[str],
    settings: Sequence[str] = (),
) -> None:
    """Give every rank the first one's parameters, buffers, optimizer state and options (S5).

    Args:
        module: with the same names, shapes and dtypes on all ranks.
        optimizers: with the same groups on all ranks.
        comm: the ranks that train together.
        ignored: names of parameters and buffers that stay as they are.
        settings: texts that describe what else must be equal on all ranks.

    Raises:
        ValueError: module, optimizers or settings differ between ranks; raised on every rank.
    """
    if comm.nranks() == 1:
        return
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors = {name: tensor for name, tensor in named.items() if name not in ignored}
    _check_alike(tensors, optimizers, comm, settings)
    broadcast_coalesced([tensor.detach() for tensor in tensors.values()], 0, comm)
    for optimizer in optimizers:
        mine = comm.rank() == 0
        found = comm.broadcast_object(_on_cpu((optimizer.state_dict(), optimizer.defaults)) if mine else None, 0)
        if not mine:
            take_over(optimizer, *found)


def take_over(optimizer: torch.optim.Optimizer, state: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Load ``state`` and ``defaults``, which later parameter groups inherit, into ``optimizer``.

    Unlike ``load_state_dict`` alone, this keeps the dtype of the state, and writes into tensors that a user may hold, such as a
    learning rate, instead of replacing them.
    """
    options = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state["state"]:
                optimizer.state[parameter] = _uncast(optimizer.state[parameter], state["state"][number])
    for before, group in zip(options, optimizer.param_groups, strict=True):
        group.update({name: _in_place(before.get(name), value) for name, value in group.items() if name != "params"})
    optimizer.defaults.update({name: _in_place(optimizer.defaults.get(name), value) for name, value in defaults.items()})


def _uncast(loaded: Any, sent: Any) -> Any:
    """Return what was ``sent``, on the device to which it was ``loaded``."""
    if isinstance(sent, torch.Tensor):
        return sent.to(loaded.device)
    if type(sent) is dict:
        return {name: _uncast(loaded[name], value) for name, value in sent.items()}
    if type(sent) in (list, tuple):
        return type(sent)(map(_uncast, loaded, sent))
    return sent if isinstance(sent, (str, bytes)) else loaded


def _in_place(mine: Any, theirs: Any) -> Any:
    """Return ``theirs``, in my own tensors where they can take it."""
    if isinstance(theirs, torch.Tensor) and isinstance(mine, torch.Tensor):
        if (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
            mine.data.copy_(theirs)
            return mine
    elif type(theirs) in (list, tuple) and type(mine) is type(theirs) and len(mine) == len(theirs):
        return type(theirs)(map(_in_place, mine, theirs))
    return theirs


def _on_cpu(value: Any) -> Any:
    """Return ``value`` with its tensors in the host's memory: the receivers may not have the sender's devices."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


def _check_alike(
    tensors: dict[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], comm: Communicator, settings: Sequence[str]
) -> None:
    mine = [f"{name} {tuple(t.shape)} {t.dtype}{'' if t.requires_grad else ', frozen'}" for name, t in tensors.items()]
    mine += [f"optimizer {type(o).__name__} of {[len(group['params']) for group in o.param_groups]} parameters" for o in optimizers]
    mine += settings
    first = comm.broadcast_object(mine, 0)
    alike = torch.tensor([mine == first], dtype=torch.int32)
    comm.allreduce_inplace(alike, ReduceOp.MIN)
    if not alike.item():
        differing = [f"{a!r} here, {b!r} there" for a, b in zip(mine, first, strict=False) if a != b][:3]
        if len(mine) != len(first):
            differing.append(f"{len(mine)} entries here, {len(first)} there")
        raise ValueError(
            "module, optimizers or settings differ between ranks, so they cannot train together; compared with the group's first "
            "rank: " + ("; ".join(differing) or "this rank is the same, another one differs")
        )
