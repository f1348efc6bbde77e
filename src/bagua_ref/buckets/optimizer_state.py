"""Gradients' strides, and optimizer state: its strides, checks, and loading that changes no dtype
and replaces no user's tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bagua_ref.base.memory import Layout

__all__ = [
    "align",
    "align_state",
    "check_optimizer_state",
    "ensure_grad",
    "take_over",
    "with_aligned_grad",
]

_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_STATE = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "QAdamOptimizer": _ADAM,
    "Adagrad": {"step", "sum"},
    "SGD": set[str](),
}
"""State that optimizers keep for each parameter that has been stepped; their kernels read as many
elements as it has.
"""
_LIKE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}


def ensure_grad(tensor: Tensor) -> Tensor:
    """Set the gradient of ``tensor`` to zeros, in its strides if it is dense, unless it has one;
    return the gradient.
    """
    if tensor.grad is None:
        tensor.grad = Layout.of(tensor).zeros(tensor.dtype, tensor.device)
    return tensor.grad


def align(tensor: Tensor, parameter: Tensor) -> None:
    """Give ``tensor`` the strides that ``parameter``, of the same shape, has in flat storage
    (S2.3); values and identity stay.

    Gradients and optimizer state need them: torch's fused optimizers go through all of them in the
    order of memory.
    """
    if parameter.is_contiguous() and tensor.is_contiguous():
        return  # most are
    layout = Layout.of(parameter)
    if not layout.describes(tensor):
        tensor.data = layout.copy_of(tensor)


def with_aligned_grad(parameter: Tensor) -> Tensor:
    """Return ``parameter`` with a gradient, of zeros if it had none, in the strides that `align`
    gives.
    """
    gradient = ensure_grad(parameter)
    if gradient.layout is torch.strided:
        align(gradient, parameter)
    return parameter


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the state of each parameter its strides in flat storage (S2.3), as torch's fused
    optimizers need it.
    """
    for parameter in (
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if type(p.data) is torch.Tensor
    ):
        state = optimizer.state.get(parameter)
        for value in state.values() if isinstance(state, dict) else ():
            if (
                type(value) is torch.Tensor
                and value.layout is torch.strided
                and value.shape == parameter.shape
            ):
                align(value, parameter)


def check_optimizer_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Raise ValueError unless `take_over` can load ``state``; of torch's Adam, AdamW, Adagrad and
    SGD, also the shapes are checked.

    torch checks neither: the kernels of ``fused=True`` read beyond the end of momenta that are too
    short.
    """
    kind = type(optimizer)
    if (
        kind.load_state_dict is not torch.optim.Optimizer.load_state_dict
        or optimizer._optimizer_load_state_dict_pre_hooks
    ):
        return  # only they know the form
    if (
        not isinstance(state, dict)
        or not isinstance(state.get("state"), dict)
        or type(state.get("param_groups")) is not list
    ):
        raise ValueError(
            f"it is not a state_dict() of {kind.__name__}: it lacks 'state' or 'param_groups'"
        )
    groups = state["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise ValueError("a parameter group has no list of parameters")
    if [len(group["params"]) for group in groups] != sizes:
        raise ValueError(
            f"its groups have {[len(g['params']) for g in groups]} parameters, this"
            f" {kind.__name__}'s {sizes}"
        )
    numbers = [number for group in groups for number in group["params"]]
    if not all(type(number) is int for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError("the parameters of its groups are not numbered")
    for place, (mine, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for name, value in group.items():
            if not isinstance(name, str):
                raise ValueError(
                    f"group {place} has the option {name!r}, whose name must be a string"
                )
            known = [
                options[name]
                for options in (mine, optimizer.defaults)
                if name in options and name != "params"
            ]
            if known and not any(_fits(option, value) for option in known):
                raise ValueError(
                    f"option {name!r} of group {place} is {_shown(value)}, but {_shown(known[0])}"
                    " in this optimizer"
                )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = next((_STATE[of] for of in _kinds(optimizer) if of in _STATE), None)
    for number, parameter in zip(numbers, parameters, strict=True):
        entry = state["state"].get(number, {})
        if not isinstance(entry, dict):
            raise ValueError(f"the state of parameter {number} is {_shown(entry)}, not a dict")
        if kept is not None and entry:
            _check_entry(number, parameter, entry, kept)


def _kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of those of its classes that are torch's or ours."""
    return [
        kind.__name__
        for kind in type(optimizer).__mro__
        if kind.__module__.startswith(("torch.optim.", "bagua_ref."))
    ]


def _check_entry(
    number: int, parameter: torch.Tensor, entry: dict[str, Any], kept: set[str]
) -> None:
    if missing := sorted(kept - entry.keys()):
        raise ValueError(f"the state of parameter {number} lacks {', '.join(missing)}")
    for name, value in entry.items():
        if name == "step" and not (_is_number(value) and math.isfinite(value) and value >= 0):
            raise ValueError(f"the step of parameter {number} is {_shown(value)}")
        if name in _LIKE_PARAMETER and value is not None:
            alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if not alike or not (value.is_floating_point() or value.dtype == parameter.dtype):
                raise ValueError(
                    f"{name} of parameter {number} is {_shown(value)}, and the parameter has"
                    f" {tuple(parameter.shape)} {parameter.dtype}"
                )


def _fits(mine: Any, theirs: Any) -> bool:
    """Return whether ``theirs`` is a valid value of an option that has the value ``mine``."""
    if mine is None:
        return theirs is None or type(theirs) in (bool, int, float, str)
    if type(mine) is bool:
        return theirs is None or type(theirs) is bool
    if _is_number(mine):
        return _is_number(theirs)
    if isinstance(mine, (list, tuple)):
        return (
            isinstance(theirs, (list, tuple))
            and len(mine) == len(theirs)
            and all(map(_fits, mine, theirs))
        )
    return type(mine) is type(theirs)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex()
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def _shown(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)} {value.dtype}"
    return (
        repr(value)
        if value is None or type(value) is bool or _is_number(value)
        else f"a {type(value).__name__}"
    )


def take_over(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """Load ``state`` and ``defaults``, which later parameter groups inherit, into ``optimizer``.

    Unlike ``load_state_dict`` alone, this keeps the dtype of the state, and writes into tensors
    that a user may hold, such as a learning rate, instead of replacing them.
    """
    options = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state["state"]:
                optimizer.state[parameter] = _uncast(
                    optimizer.state[parameter], state["state"][number]
                )
    for before, group in zip(options, optimizer.param_groups, strict=True):
        group.update(
            {
                name: _in_place(before.get(name), value)
                for name, value in group.items()
                if name != "params"
            }
        )
    optimizer.defaults.update(
        {name: _in_place(optimizer.defaults.get(name), value) for name, value in defaults.items()}
    )


def _uncast(loaded: Any, sent: Any) -> Any:
    """Return ``sent``, on the device of ``loaded``."""
    if isinstance(sent, torch.Tensor):
        return sent.to(loaded.device)
    if type(sent) is dict:
        return {name: _uncast(loaded[name], value) for name, value in sent.items()}
    if type(sent) in (list, tuple):
        return type(sent)(map(_uncast, loaded, sent))
    return sent if isinstance(sent, (str, bytes)) else loaded


def _in_place(mine: Any, theirs: Any) -> Any:
    """Return ``theirs``, copied into the tensors of ``mine`` where they fit."""
    if isinstance(theirs, torch.Tensor) and isinstance(mine, torch.Tensor):
        if (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
            mine.data.copy_(theirs)
            return mine
    elif type(theirs) in (list, tuple) and type(mine) is type(theirs) and len(mine) == len(theirs):
        return type(theirs)(map(_in_place, mine, theirs))
    return theirs
