"""Broadcast of the first rank's parameters, buffers and optimizer state at the start of training (S5)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from bagua_ref.communication import broadcast_coalesced
from bagua_ref.communicators.scheduler import format_ranks
from bagua_ref.types import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from bagua_ref.communicators.base import Communicator

__all__ = ["broadcast_state", "take_over"]

_SHOWN = 3  # differences in a message
_ABSENT, _ORDER = "none", "order"


def broadcast_state(
    module: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    comm: Communicator,
    ignored: Collection[str],
    settings: Mapping[str, str],
    ranks: Sequence[int],
) -> None:
    """Give every rank the first one's parameters, buffers, optimizer state and options (S5).

    Args:
        module: with the same names, shapes and dtypes on all ranks.
        optimizers: with the same groups on all ranks.
        comm: the ranks that train together.
        ignored: names of parameters and buffers that stay as they are.
        settings: what else must be equal on all ranks, by name.
        ranks: the global ranks of ``comm``, for messages.

    Raises:
        ValueError: module, optimizers or settings differ between ranks; raised on every rank, and says who differs in what.
    """
    if comm.nranks() == 1:
        return
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors = {name: tensor for name, tensor in named.items() if name not in ignored}
    _check_alike({**_described(tensors, optimizers), **settings}, comm, ranks)
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


def _described(tensors: dict[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Return what must be equal on all ranks, by name."""
    texts = {}
    for name, tensor in tensors.items():
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        frozen = ", frozen" if is_parameter and not tensor.requires_grad else ""
        texts[f"{'parameter' if is_parameter else 'buffer'} {name!r}"] = f"{tuple(tensor.shape)} {tensor.dtype}{frozen}"
    for place, optimizer in enumerate(optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        texts[f"optimizer {place}"] = f"{type(optimizer).__name__} of {sizes} parameters"
    return texts


def _check_alike(mine: dict[str, str], comm: Communicator, ranks: Sequence[int]) -> None:
    """Raise ValueError on every rank unless all have the same texts under the same names, in the same order."""
    digest = torch.tensor(list(hashlib.sha256(repr(list(mine.items())).encode()).digest()), dtype=torch.int32)
    extremes = torch.stack([digest, -digest])
    comm.allreduce_inplace(extremes, ReduceOp.MIN)
    if extremes[0].equal(-extremes[1]):
        return
    first: dict[str, str] = comm.broadcast_object(mine, 0)
    found = [comm.broadcast_object(_differences(mine, first) if r == comm.rank() else None, r) for r in range(comm.nranks())]
    usual = {**first, _ORDER: "that of the group's first rank"}
    place_of = {name: place for place, name in enumerate(usual)}
    names = sorted({name for theirs in found for name in theirs}, key=lambda name: (place_of.get(name, len(usual)), name))
    sentences = []
    for name in names[:_SHOWN]:
        ranks_with: dict[str, list[int]] = {}
        for rank, theirs in zip(ranks, found, strict=True):
            ranks_with.setdefault(theirs.get(name, usual.get(name, _ABSENT)), []).append(rank)
        sentences.append(f"{name}: {', '.join(f'{text} on {format_ranks(sorted(on))}' for text, on in ranks_with.items())}")
    raise ValueError(
        "module, optimizers or settings differ between ranks, so they cannot train together. "
        f"{'; '.join(sentences)}{'; and more' if len(names) > _SHOWN else ''}"
    )


def _differences(mine: dict[str, str], first: dict[str, str]) -> dict[str, str]:
    """Return my texts that differ from the first rank's, but few: in the first rank's order, then by name.

    All ranks' first few, merged in this order, begin with the first few of all.
    """
    names = [name for name in first if mine.get(name) != first[name]] + sorted(mine.keys() - first.keys())
    if names:
        return {name: mine.get(name, _ABSENT) for name in names[: _SHOWN + 1]}
    swapped = [f"{name} before {other}" for name, other in zip(mine, first, strict=True) if name != other]
    return {_ORDER: swapped[0]} if swapped else {}
