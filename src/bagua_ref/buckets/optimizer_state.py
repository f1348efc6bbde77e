"""Strides of gradients and optimizer state, and checks and loading of optimizer state, which change
no dtype and replace no user's tensor.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bagua_ref.base.memory import Layout
from bagua_ref.base.untrusted import check_form

_KNOWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)
_LIKE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}


def ensure_grad(tensor: Tensor) -> Tensor:
    """Return the gradient of ``tensor``; create one of zeros, in the tensor's strides if it is
    dense, if there is none.
    """
    if tensor.grad is None:
        tensor.grad = Layout.of(tensor).zeros(tensor.dtype, tensor.device)
    return tensor.grad


def align(tensor: Tensor, parameter: Tensor) -> None:
    """Convert ``tensor`` to the strides that ``parameter``, of the same shape, has in flat storage
    (S2.3); values and identity do not change.

    Gradients and optimizer state need them: torch's fused optimizers go through all of them in the
    order of memory.
    """
    if parameter.is_contiguous() and tensor.is_contiguous():
        return  # most are
    layout = Layout.of(parameter)
    if not layout.describes(tensor):
        tensor.data = layout.copy_of(tensor)


def with_aligned_grad(parameter: Tensor) -> Tensor:
    """Return ``parameter`` after making sure that it has a gradient, with the strides of
    `align`.
    """
    gradient = ensure_grad(parameter)
    if gradient.layout is torch.strided:
        align(gradient, parameter)
    return parameter


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Convert optimizer state to the strides of its parameters in flat storage (S2.3), as torch's
    fused optimizers require.
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
    """Raise ValueError unless ``state`` has the parameter groups of ``optimizer`` and, for torch's
    Adam, AdamW, Adagrad and SGD, momenta of the parameters' shapes.

    torch does not check shapes: the kernels of ``fused=True`` read beyond the end of momenta that
    are too short.
    """
    kind = type(optimizer)
    if (
        kind.load_state_dict is not torch.optim.Optimizer.load_state_dict
        or optimizer._optimizer_load_state_dict_pre_hooks
    ):
        return  # only they know the form
    check_form(state, {"state": dict, "param_groups": [{"params": [int]}]}, "it")
    here, saved = (
        [group["params"] for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if [*map(len, here)] != [*map(len, saved)]:
        raise ValueError(
            f"its groups have {[*map(len, saved)]} parameters, this {kind.__name__}'s"
            f" {[*map(len, here)]}"
        )
    if not isinstance(optimizer, _KNOWN):
        return
    for number, parameter in zip(chain(*saved), chain(*here), strict=True):
        entry = state["state"].get(number, {})
        for name in _LIKE_PARAMETER & entry.keys():
            value = entry[name]
            fits = isinstance(value, Tensor) and value.shape == parameter.shape
            fits = fits and (value.is_floating_point() or value.dtype is parameter.dtype)
            if value is not None and not fits:
                shown = (
                    f"a tensor of {tuple(value.shape)} {value.dtype}"
                    if isinstance(value, Tensor)
                    else f"a {type(value).__name__}"
                )
                raise ValueError(
                    f"{name} of parameter {number} is {shown}, and the parameter has"
                    f" {tuple(parameter.shape)} {parameter.dtype}"
                )


def take_over(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """Load ``state`` and ``defaults``, the options of later parameter groups, into ``optimizer``.

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
                optimizer.state[parameter] = tree_map(
                    _uncast, optimizer.state[parameter], state["state"][number]
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
    """Return a tensor ``sent`` in its own dtype, on the device of ``loaded``."""
    if isinstance(sent, torch.Tensor):
        return sent.to(loaded.device)
    return sent if isinstance(sent, (str, bytes)) else loaded


def _in_place(mine: Any, theirs: Any) -> Any:
    """Return ``theirs``, copied in place into the tensors of ``mine`` where shape and dtype
    match.
    """
    if isinstance(theirs, torch.Tensor) and isinstance(mine, torch.Tensor):
        if (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
            mine.data.copy_(theirs)
            return mine
    elif type(theirs) in (list, tuple) and type(mine) is type(theirs) and len(mine) == len(theirs):
        return type(theirs)(map(_in_place, mine, theirs))
    return theirs
