"""The public functions that fuse an element-wise optimizer, and the tables of known classes (S6)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.algorithms.q_adam_optimizer import QAdamOptimizer
from bagua_ref.base.not_provided import explain_missing
from bagua_ref.contrib.fuse.fuser import Fuser

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]

ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Classes of torch.optim in which each element's update depends only on that element, its gradient
and its state.
"""

THIRD_PARTY = (
    "lion_pytorch.lion_pytorch.Lion",  # lion-pytorch 0.2.5
    # timm 1.0.31; groups with ``caution`` or ``clipping_threshold`` are stepped unfused
    "timm.optim.adabelief.AdaBelief",
    "timm.optim.adamw.AdamWLegacy",
    "timm.optim.lion.Lion",
    "timm.optim.nadamw.NAdamW",
    "timm.optim.rmsprop_tf.RMSpropTF",
    "timm.optim.sgdw.SGDW",
)
"""Other classes whose code was read, in these versions, and is element-wise."""

NOT_ELEMENTWISE = {
    "Adafactor": (
        "it keeps one second moment per row and column, and scales by the root mean square of the"
        " whole parameter"
    ),
    "LBFGS": "its direction and step length come from all parameters together",
    "Muon": "it makes each weight's update orthogonal, which needs its shape as a matrix",
    "SparseAdam": "it takes sparse gradients, whose indices are those of one parameter",
}
"""Classes of torch.optim that cannot be fused, and the reasons."""


def fuse_optimizer(
    optimizer: torch.optim.Optimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    *,
    elementwise: bool = False,
    allow_inexact: bool = False,
    replace_step: bool = False,
) -> torch.optim.Optimizer:
    """Add the method ``fuse_step`` to ``optimizer``, which updates small adjacent parameters as one
    (S6); return the optimizer.

    ``optimizer.step()`` is unchanged by default, and both methods can be mixed: results are equal
    bit for bit. Schedulers, hooks, ``state_dict`` and ``load_state_dict`` work as before; a deep
    copy or pickle is an ordinary optimizer. Fuse after moving the model to its device: ``.to()``
    moves parameters apart. Small weights move here and in ``add_param_group``, never in a step.

    Args:
        optimizer: torch's SGD, Adam, AdamW and others that update each element independently,
            `QAdamOptimizer`, or one of the third-party classes that the guide lists.
        do_flatten: move the small weights of each group into adjacent memory, and also gradients
            that are kept between steps; False: only fuse parameters that are already adjacent.
            Weights that are a part of a larger storage, such as a Bagua bucket, are never moved.
        check_flatten: warn about weights that were moved out of the memory in which ``do_flatten``
            put them.
        elementwise: True: fuse an unknown class, for which you guarantee that the update of each
            element depends only on that element, its gradient, its state and the group's options,
            and not on a parameter's identity, name, shape or attributes. This is not checked.
        allow_inexact: also fuse 16-bit parameters on a CPU and groups with ``fused=True``, for
            which the last bit of an element depends on its place in memory. Otherwise they are
            stepped one by one.
        replace_step: let ``optimizer.step()`` do the same as ``fuse_step``, for trainers and
            `torch.amp.GradScaler`, which call it.

    Raises:
        TypeError: optimizer is not a torch optimizer.
        RuntimeError: the optimizer is already fused.
        ValueError: the optimizer's class is known not to be element-wise, is unknown, or wraps
            another optimizer; the message says which.

    >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(20)])
    >>> optimizer = bagua_ref.contrib.fuse_optimizer(torch.optim.Adam(model.parameters()))
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> optimizer.fuse_step()
    >>> optimizer._bagua_fused_count
    1

    Source: ``bagua/torch_api/contrib/fuse/optimizer.py`` of Bagua 0.9.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if is_fused_optimizer(optimizer):
        raise RuntimeError(
            f"this {type(optimizer).__name__} is already fused; call fuse_optimizer only once"
        )
    if reason := _reason_to_refuse(optimizer, elementwise):
        raise ValueError(f"optimizer={type(optimizer).__name__} {reason}")
    groups = optimizer.param_groups
    if all(len(group["params"]) < 2 for group in groups):
        warnings.warn(
            f"nothing to fuse: {len(groups)} groups of one tensor. Only parameters of one group"
            " are updated as one; put those with equal options into the same group",
            stacklevel=2,
        )
    fuser = Fuser(do_flatten, check_flatten, allow_inexact)
    fuser.flatten(groups)
    optimizer._bagua_fused_optimizer = fuser  # type: ignore[attr-defined]
    optimizer._bagua_fused_count = 0  # type: ignore[attr-defined]
    optimizer.fuse_step = MethodType(fuse_step, optimizer)  # type: ignore[attr-defined]
    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
    if hasattr(optimizer.step, "takes_fused_steps"):  # a copy's
        del optimizer.step
    if replace_step:
        fuser.replaced = optimizer.step  # that of its class, or a scheduler's around it
        optimizer.step = MethodType(_fused(fuser.replaced), optimizer)  # type: ignore[method-assign]
    return optimizer


def _reason_to_refuse(optimizer: torch.optim.Optimizer, elementwise: bool) -> str:
    cls = type(optimizer)
    if cls is QAdamOptimizer or f"{cls.__module__}.{cls.__qualname__}" in THIRD_PARTY:
        return ""
    if getattr(torch.optim, cls.__name__, None) is cls:
        if cls.__name__ in ELEMENTWISE:
            return ""
        if cls.__name__ in NOT_ELEMENTWISE:
            return f"cannot be fused: {NOT_ELEMENTWISE[cls.__name__]}"
    # such as ZeroRedundancyOptimizer, and accelerate's AcceleratedOptimizer
    for name, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer):
            return (
                f"wraps the {type(inner).__name__} in its attribute {name!r}, which takes the steps;"
                f" fuse that one: fuse_optimizer(optimizer.{name}, replace_step=True)"
            )
    if elementwise:
        return ""
    return (
        "is not a class that is known to update each element independently. If you know that its"
        " update of an element depends on that element, its gradient, its state and the group's"
        " options only, not on other elements, nor on a parameter's identity, name, shape or"
        " attributes, pass elementwise=True"
    )


def fuse_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Take a step like ``optimizer.step(closure)``, with small parameters that are adjacent in
    memory updated as one (S6).

    ``closure`` computes loss and gradients; it is called first, and its result is returned.

    Raises:
        TypeError: closure is not callable.
        ValueError: the optimizer is not fused.
    """
    fuser = getattr(optimizer, "_bagua_fused_optimizer", None)
    if fuser is None:
        raise ValueError(
            f"optimizer={type(optimizer).__name__} is not fused; call fuse_optimizer(optimizer)"
            " first"
        )
    if closure is not None and not callable(closure):
        raise TypeError(f"closure={closure!r} must be callable, or None")
    # A scheduler may have wrapped the step that replaced the optimizer's own.
    return fuser.step(optimizer, closure) if fuser.replaced is None else optimizer.step(closure)


def _fused(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that takes fused steps, with the attributes of the replaced method, which
    schedulers look for.
    """

    @wraps(replaced)
    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        fuser = getattr(optimizer, "_bagua_fused_optimizer", None)  # a copy has none
        take = type(optimizer).step if fuser is None else fuser.step
        return take(optimizer, closure)

    step.takes_fused_steps = True  # type: ignore[attr-defined]
    return step


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `fuse_optimizer` was applied to ``optimizer``.

    >>> is_fused_optimizer(torch.optim.SGD([torch.zeros(1)]))
    False
    """
    return getattr(optimizer, "_bagua_fused_optimizer", None) is not None


def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    """Add a group as the optimizer's class does; flatten its weights if ``optimizer``, which may be
    a copy, is fused.
    """
    type(optimizer).add_param_group(optimizer, param_group)
    fuser = getattr(optimizer, "_bagua_fused_optimizer", None)
    if fuser is not None:
        fuser.flatten(optimizer.param_groups[-1:])


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("contrib.fuse.optimizer")
