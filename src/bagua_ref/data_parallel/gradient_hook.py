"""The hook of a parameter in training, which marks each gradient ready (S2.1)."""

from __future__ import annotations

import weakref
from typing import Any

from torch.compiler import is_dynamo_compiling

from bagua_ref.utils import NotCopied, untraced

__all__ = ["GradientHook"]


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
