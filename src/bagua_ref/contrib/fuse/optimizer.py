"""The public functions that fuse an element-wise optimizer, to step a few flat parameters instead of many small ones (S6)."""

from __future__ import annotations

import logging
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.contrib.fuse.fuser import Fuser
from bagua_ref.contrib.fuse.verify import check_elementwise, has_fused_kernel
from bagua_ref.not_provided import explain_missing
from bagua_ref.utils import NotCopied

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fuse_optimizer", "fuse_step", "is_fused_optimizer"]

_logger = logging.getLogger(__name__)


def fuse_optimizer(
    optimizer: torch.optim.Optimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    *,
    verify: bool = True,
    allow_inexact: bool = False,
) -> torch.optim.Optimizer:
    """Add a method ``fuse_step`` to ``optimizer``, which updates parameters that are adjacent in memory as one (S6); return it.

    ``optimizer.step()`` is unchanged, and the two may be mixed. Results are those of ``step()``, bit for bit. Learning rate
    schedulers, hooks, ``state_dict`` and ``load_state_dict`` work as before; a deep copy or pickle is an ordinary optimizer.

    Fuse after moving the model to its device: ``.to()`` moves parameters out of the common storage. Weights are moved here, and
    those of later groups in ``add_param_group``, so views and ``.data`` taken afterwards stay valid; steps never move weights.
    Large parameters stay where they are, as moving each new gradient would take longer than is gained; on a CPU they are stepped in
    blocks that fit the cache. If torch's ``fused=True`` is available for the parameters, a log entry at INFO says so.

    Args:
        optimizer: an optimizer that updates each element independently. torch's own are known; other classes are tried on small
            clones.
        do_flatten: move the small weights of each group, and their gradients if kept between steps, into one storage; False: update
            only parameters as one that are already adjacent. Memory of a Bagua bucket is never moved.
        check_flatten: warn when weights have left the storage to which ``do_flatten`` moved them.
        verify: False: do not try classes that are not torch's, at your own risk. True: try them now, and again when groups or
            options have changed. A trial that takes more than a minute, or much state, ends in a ValueError.
        allow_inexact: also fuse 16-bit parameters on a CPU and groups with ``fused=True``, for which the last bit of an element
            depends on its place in memory. Otherwise they are stepped one by one.

    Raises:
        TypeError: optimizer is not a torch optimizer.
        RuntimeError: it is already fused.
        ValueError: its elements affect each other, it depends on shapes, or it cannot be tried or not in time; the message says
            which.

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
    fuser = Fuser(do_flatten, check_flatten, allow_inexact, partial(check_elementwise, allow_inexact=allow_inexact, verify=verify))
    fuser.check(optimizer)
    fuser.flatten(optimizer, optimizer.param_groups)
    if has_fused_kernel(optimizer):
        _logger.info(
            "%s has fused=True for these parameters, which is faster than fuse_step() unless most of them are small; "
            "last bits differ from those of its for-loop",
            type(optimizer).__name__,
        )
    optimizer._bagua_fused_optimizer = fuser  # type: ignore[attr-defined]
    optimizer._bagua_fused_count = 0  # type: ignore[attr-defined]
    optimizer.fuse_step = _Method(optimizer, fuse_step)  # type: ignore[attr-defined]
    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
    return optimizer


def fuse_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Take a step as ``optimizer.step(closure)`` does, updating parameters that are adjacent in memory as one (S6).

    It does not move weights: `fuse_optimizer` and ``add_param_group`` do. If no parameters are adjacent, this is ``step()``.

    Args:
        optimizer: a fused optimizer.
        closure: computes loss and gradients; called first.

    Returns:
        The result of ``closure``, None without one.

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
    """Add a group as the optimizer's class does; if ``optimizer`` is fused with ``do_flatten``, move its weights into one storage.

    It is a bound method; a copy of the optimizer gets it bound to the copy, where it only does what the class does.
    """
    type(optimizer).add_param_group(optimizer, param_group)
    fuser = getattr(optimizer, "_bagua_fused_optimizer", None)
    if fuser is not None:
        fuser.flatten(optimizer, optimizer.param_groups[-1:])


class _Method(NotCopied):
    """A method of one optimizer, which copies of the optimizer do not get."""

    def __init__(self, optimizer: torch.optim.Optimizer, function: Callable[..., Any]) -> None:
        self._optimizer, self._function = optimizer, function
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._optimizer, *args, **kwargs)


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("contrib.fuse.optimizer")
