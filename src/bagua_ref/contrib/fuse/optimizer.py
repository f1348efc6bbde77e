"""The public functions that fuse an element-wise optimizer, to step a few flat parameters instead of many small ones (S6)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.base.not_provided import explain_missing
from bagua_ref.contrib.fuse.fuser import Fuser
from bagua_ref.contrib.fuse.verify import check_elementwise

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]

_logger = logging.getLogger(__name__)


def fuse_optimizer(
    optimizer: torch.optim.Optimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    *,
    verify: bool = True,
    allow_inexact: bool = False,
    replace_step: bool = False,
) -> torch.optim.Optimizer:
    """Add a method ``fuse_step`` to ``optimizer``, which updates small adjacent parameters as one (S6); return it.

    ``optimizer.step()`` is unchanged by default, and the two may be mixed: results are equal bit for bit. Schedulers, hooks,
    ``state_dict`` and ``load_state_dict`` work as before; a deep copy or pickle is an ordinary optimizer. Fuse after moving the
    model to its device: ``.to()`` moves parameters apart. Small weights move here and in ``add_param_group``, never in a step.

    Args:
        optimizer: an optimizer that updates each element independently. torch's own are known; other classes are tried on small
            clones.
        do_flatten: move the small weights of each group beside each other, and gradients that are kept between steps; False:
            update only parameters as one that are already adjacent. Memory of a Bagua bucket is never moved.
        check_flatten: warn when weights have left the place to which ``do_flatten`` moved them.
        verify: False: do not try classes that are not torch's, at your own risk. True: try them now, and again when groups or
            options have changed.
        allow_inexact: also fuse 16-bit parameters on a CPU and groups with ``fused=True``, for which the last bit of an element
            depends on its place in memory. Otherwise they are stepped one by one.
        replace_step: let ``optimizer.step()`` do the same as ``fuse_step``, for trainers and `torch.amp.GradScaler`, which call it.

    Raises:
        TypeError: optimizer is not a torch optimizer.
        RuntimeError: it is already fused.
        ValueError: its elements affect each other, it depends on shapes, or it cannot be tried; the message says which.

    >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(20)])
    >>> optimizer = bagua_ref.contrib.fuse_optimizer(torch.optim.Adam(model.parameters()))
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> optimizer.fuse_step()
    >>> optimizer._bagua_fused_count
    1

    Source: ``bagua/torch_api/contrib/fuse/optimizer.py`` of Bagua 0.9.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if is_fused_optimizer(optimizer):
        raise RuntimeError(f"this {type(optimizer).__name__} is already fused; call fuse_optimizer only once")
    check = partial(check_elementwise, allow_inexact=allow_inexact, verify=verify)
    fuser = Fuser(do_flatten, check_flatten, allow_inexact, check)
    fuser.check(optimizer)
    fuser.flatten(optimizer.param_groups)
    if any(group["params"] and "fused" in group and not group["fused"] for group in optimizer.param_groups):
        _logger.info("%s has fused=True, which is faster unless most parameters are small", type(optimizer).__name__)
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


def fuse_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Take a step as ``optimizer.step(closure)`` does, updating small parameters that are adjacent in memory as one (S6).

    ``closure`` computes loss and gradients; it is called first, and its result is returned.

    Raises:
        TypeError: closure is not callable.
        ValueError: the optimizer is not fused.
    """
    fuser = getattr(optimizer, "_bagua_fused_optimizer", None)
    if fuser is None:
        raise ValueError(f"optimizer={type(optimizer).__name__} is not fused; call fuse_optimizer(optimizer) first")
    if closure is not None and not callable(closure):
        raise TypeError(f"closure={closure!r} must be callable, or None")
    # A scheduler may have wrapped the step that replaced the optimizer's own.
    return fuser.step(optimizer, closure) if fuser.replaced is None else optimizer.step(closure)


def _fused(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that takes fused steps and has the attributes of the one that it replaces, which schedulers look for."""

    @wraps(replaced)
    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        fuser = getattr(optimizer, "_bagua_fused_optimizer", None)  # a copy has none
        return type(optimizer).step(optimizer, closure) if fuser is None else fuser.step(optimizer, closure)

    step.takes_fused_steps = True  # type: ignore[attr-defined]
    return step


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` has been through `fuse_optimizer`.

    >>> is_fused_optimizer(torch.optim.SGD([torch.zeros(1)]))
    False
    """
    return getattr(optimizer, "_bagua_fused_optimizer", None) is not None


def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    """Add a group as the optimizer's class does; if ``optimizer``, maybe a copy, is fused, flatten its weights."""
    type(optimizer).add_param_group(optimizer, param_group)
    fuser = getattr(optimizer, "_bagua_fused_optimizer", None)
    if fuser is not None:
        fuser.flatten(optimizer.param_groups[-1:])


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("contrib.fuse.optimizer")
