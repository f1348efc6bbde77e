"""Any element-wise optimizer, stepped with a few flat parameters instead of many small ones (S6)."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.contrib.fuse.fuser import Fuser
from bagua_ref.contrib.fuse.verify import check_elementwise
from bagua_ref.not_provided import explain_missing
from bagua_ref.utils import NotCopied

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]


def fuse_optimizer(
    optimizer: torch.optim.Optimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    *,
    verify: bool = True,
    allow_inexact: bool = False,
) -> torch.optim.Optimizer:
    """Give ``optimizer`` a method ``fuse_step``, which updates parameters that lie beside each other as one (S6); return it.

    ``optimizer.step()`` stays what it was, and the two may be mixed. Results are those of ``step()``, bit for bit. Learning rate
    schedulers, hooks, ``state_dict`` and ``load_state_dict`` work as before; a deep copy or pickle is an ordinary optimizer.

    Fuse after the model is where it stays: ``.to()`` moves parameters out of the common storage. Weights move here, and those of a
    later group in ``add_param_group``, so that a view or ``.data`` taken after that stays one; steps never move them.

    Args:
        optimizer: any that updates each element by itself; torch's own are known, every other class is tried on small clones.
        do_flatten: move the weights of each group beside each other, and gradients that are kept from step to step; False: only
            what lies beside each other already is updated as one. What a Bagua bucket holds is never moved.
        check_flatten: warn when weights have left the place to which ``do_flatten`` has moved them; of no effect without it.
        verify: False: fuse a class that torch does not come with untried, at your own risk. True: it is tried now, and again once
            there are other groups or options.
        allow_inexact: also fuse 16-bit parameters on a CPU and groups with ``fused=True``: there an element's last bit depends on
            its place in memory. Otherwise they are stepped one by one.

    Raises:
        TypeError: no torch optimizer.
        RuntimeError: it is fused already.
        ValueError: elements of its parameters affect each other, or shapes matter to it, or it cannot be tried; says which.

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
        raise RuntimeError(f"this {type(optimizer).__name__} is fused already; call fuse_optimizer once")
    fuser = Fuser(do_flatten, check_flatten, allow_inexact, partial(check_elementwise, allow_inexact=allow_inexact, verify=verify))
    fuser.check(optimizer)
    fuser.flatten(optimizer, optimizer.param_groups)
    optimizer._bagua_fused_optimizer = fuser  # type: ignore[attr-defined]
    optimizer._bagua_fused_count = 0  # type: ignore[attr-defined]
    optimizer.fuse_step = _Method(optimizer, fuse_step)  # type: ignore[attr-defined]
    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
    return optimizer


def fuse_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Take a step as ``optimizer.step(closure)`` does, updating parameters that lie beside each other as one (S6).

    The weights stay where they are: `fuse_optimizer` and ``add_param_group`` have moved them. Where nothing lies beside each other,
    this is ``step()``.

    Args:
        optimizer: a fused one.
        closure: computes the loss and the gradients anew; runs first.

    Returns:
        What ``closure`` returns, None without one.

    Raises:
        TypeError: closure is not callable.
        ValueError: the optimizer is not fused.
    """
    fuser = getattr(optimizer, "_bagua_fused_optimizer", None)
    if fuser is None:
        raise ValueError(f"optimizer={type(optimizer).__name__} is not fused; call fuse_optimizer(optimizer) first")
    if closure is not None and not callable(closure):
        raise TypeError(f"closure={closure!r} must be callable, or None")
    return fuser.step(optimizer, closure)


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` has been through `fuse_optimizer`.

    >>> is_fused_optimizer(torch.optim.SGD([torch.zeros(1)]))
    False
    """
    return getattr(optimizer, "_bagua_fused_optimizer", None) is not None


def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    """Add a group as the optimizer's class does; if ``optimizer`` is fused with ``do_flatten``, move its weights beside each other.

    A bound method, which a copy of the optimizer gets bound to itself: there it only does what the class does.
    """
    type(optimizer).add_param_group(optimizer, param_group)
    fuser = getattr(optimizer, "_bagua_fused_optimizer", None)
    if fuser is not None:
        fuser.flatten(optimizer, optimizer.param_groups[-1:])


class _Method(NotCopied):
    """A method of one optimizer, which its copies do not get."""

    def __init__(self, optimizer: torch.optim.Optimizer, function: Callable[..., Any]) -> None:
        self._optimizer, self._function = optimizer, function
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._optimizer, *args, **kwargs)


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("contrib.fuse.optimizer")
