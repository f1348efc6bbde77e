"""The hook of a parameter in training, which marks each gradient ready after the user's own hooks (S2.1)."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from bagua_ref.base.utils import NotCopied, untraced

__all__ = ["GradientHook", "add_last", "trainings_of"]


class GradientHook(NotCopied):
    """The hook of a parameter, which marks each gradient ready; ``training`` is the training that the parameter belongs to.

    It runs for every gradient, so it must be fast.

    Args:
        wrapped: the training, a `bagua_ref.data_parallel.wrapped_module.WrappedModule`; held weakly, as the garbage collector
            cannot see through the C++ part of a parameter.
        name: the parameter's name.
    """

    __slots__ = ("_name", "training")

    def __init__(self, wrapped: Any, name: str) -> None:
        self.training, self._name = weakref.ref(wrapped), name

    def __call__(self, parameter: Any) -> None:
        """Mark the gradient of ``parameter``, which may be the part of a sharded one."""
        if is_dynamo_compiling():  # asking takes a tenth of the time that an untraced call takes
            self._untraced(parameter)
            return
        wrapped = self.training()
        if wrapped is not None and (wrapped._in_backward or wrapped._begin_backward(self._name, parameter)):
            wrapped._backward_hook(self._name, wrapped.shards.get(self._name, parameter) if wrapped.shards else parameter)

    @untraced
    def _untraced(self, parameter: Any) -> None:
        self(parameter)


def add_last(parameter: torch.nn.Parameter, hook: GradientHook) -> RemovableHandle:
    """Register ``hook`` so that it runs after all other post-accumulate-grad hooks of ``parameter``, also after later ones."""
    before = parameter._post_accumulate_grad_hooks
    if not isinstance(before, _Hooks):
        hooks = _Hooks()
        if before is not None:
            # Handles of hooks that the user registered before remove them from that dictionary.
            hooks[-1] = _Earlier(before)
        parameter._post_accumulate_grad_hooks = hooks
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    return handle


def trainings_of(parameter: torch.nn.Parameter) -> list[Any]:
    """Return each `bagua_ref.data_parallel.wrapped_module.WrappedModule` that ``parameter`` takes part in."""
    hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    found = (hook.training() for hook in hooks if isinstance(hook, GradientHook))
    return [training for training in found if training is not None]


class _Hooks(NotCopied, OrderedDict):  # type: ignore[type-arg]
    """The post-accumulate-grad hooks of a parameter in the order in which torch runs them: each `GradientHook` after the others."""

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        if not isinstance(hook, GradientHook):
            # torch goes through the dictionary that an OrderedDict is, whose order move_to_end does not change.
            for own in [known for known, other in self.items() if isinstance(other, GradientHook)]:
                super().__setitem__(own, self.pop(own))


class _Earlier(NotCopied):
    """The hooks that a parameter had before, as one hook."""

    def __init__(self, hooks: dict[int, Any]) -> None:
        self._hooks = hooks

    def __call__(self, parameter: Any) -> None:
        for hook in list(self._hooks.values()):
            hook(parameter)
