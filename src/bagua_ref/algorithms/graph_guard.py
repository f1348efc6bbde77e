"""Refusal of backward passes through graphs of weights that an algorithm has overwritten since (S5.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from bagua_ref.base.utils import NotCopied, OwnHook, untraced

__all__ = ["GraphGuard", "weights_averaged"]

weights_averaged = (
    "decentralized replaces the weights by their average at the end of a backward pass (S5.3), so that forward passes that came "
    "before have no backward pass any more. Add the losses and call backward() once, or call backward() after each forward pass "
    "before the next one; or run all these forward and backward passes inside model.no_sync(), which averages nothing"
)


class GraphGuard:
    """Notes each forward pass of a module, and refuses its backward pass once the weights were overwritten.

    Without it, torch refuses most of them, by an error that names a version of a tensor. Those that save no weights, or compute
    with them again, as checkpoints do, would mix old weights with new ones.

    Args:
        message: the error's text.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._handle: RemovableHandle | None = None
        self.overwritten = 0
        """How often the weights were overwritten."""

    def watch(self, module: torch.nn.Module) -> None:
        """Note the forward passes of ``module``, which training calls, from now on; again: do nothing."""
        self._handle = self._handle or module.register_forward_hook(OwnHook(self._after_forward))

    def close(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes this forward anew
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(_WhenBackwardBegins(self._check, self.overwritten))

    def _check(self, overwritten: int) -> None:
        if overwritten != self.overwritten:
            raise RuntimeError(self._message)


class _WhenBackwardBegins(NotCopied):
    """A hook on an output: calls ``check`` with the number of times that weights had been overwritten in its forward pass."""

    def __init__(self, check: Callable[[int], None], overwritten: int) -> None:
        self._check, self._overwritten = OwnHook(check), overwritten

    @untraced
    def __call__(self, grad: torch.Tensor) -> None:
        self._check(self._overwritten)
