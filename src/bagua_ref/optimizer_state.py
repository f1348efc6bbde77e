"""Loading of optimizer state without changing its dtypes or replacing tensors that a user may hold, and its strides."""

from __future__ import annotations

from typing import Any

import torch

from bagua_ref.tensor import align

__all__ = ["align_state", "take_over"]


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the state of each parameter its strides in flat storage (S2.3), as torch's fused optimizers need it."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if type(p.data) is torch.Tensor):
        state = optimizer.state.get(parameter)
        for value in state.values() if isinstance(state, dict) else ():
            if type(value) is torch.Tensor and value.layout is torch.strided and value.shape == parameter.shape:
                align(value, parameter)


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
