"""Hooks of a module in training: on its parameters' gradients, and on the graphs behind its outputs
(S2.1, S5).
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.stateless import _functional_call
from torch.utils.hooks import RemovableHandle

from bagua_ref.base.utils import NotCopied, inside_backward, untraced
from bagua_ref.data_parallel.backward import State


class GradientHook(NotCopied):
    """Hook of a parameter that marks each gradient ready; ``training`` is the training of the
    parameter's module.

    It runs for every gradient, so it must be fast.

    Args:
        wrapped: the training, a `bagua_ref.data_parallel.training.ModuleTraining`; held weakly, as
            the garbage collector cannot see through the C++ part of a parameter.
        name: the parameter's name.
    """

    __slots__ = ("_kind", "name", "training")

    def __init__(self, wrapped: Any, name: str) -> None:
        self.training, self.name = weakref.ref(wrapped), name

    def __call__(self, parameter: Any) -> None:
        """Mark the gradient of ``parameter``, or of its shard, as ready."""
        if is_dynamo_compiling():  # asking takes a tenth of the time that an untraced call takes
            self._untraced(parameter)
            return
        wrapped = self.training()
        if wrapped is not None and (
            wrapped.machine.state is _BACKWARD or wrapped.first_gradient(self.name, parameter)
        ):
            wrapped._backward_hook(
                self.name,
                wrapped.shards.get(self.name, parameter) if wrapped.shards else parameter,
            )

    @untraced
    def _untraced(self, parameter: Any) -> None:
        self(parameter)

    def add_last(self, parameter: torch.nn.Parameter) -> RemovableHandle:
        """Register this hook to run after all other post-accumulate-grad hooks of ``parameter``,
        including later ones.
        """
        hooks = before = parameter._post_accumulate_grad_hooks
        if not isinstance(before, _Hooks):
            hooks = _Hooks()
            if before is not None:
                # Handles of hooks that the user registered before remove them from that dictionary.
                hooks[-1] = _Earlier(before)
        # even if it is set already: torch does not call what is in it after a swap
        parameter._post_accumulate_grad_hooks = hooks
        # torch.utils.swap_tensors gives a parameter the attributes and hooks of another tensor, so
        # that an attribute that is missing tells of it.
        parameter._bagua_hook = self  # type: ignore[attr-defined]
        self._kind = _kind_of(parameter)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self)
        return handle

    def add_again(self, parameter: torch.nn.Parameter) -> None:
        """Register this hook again after `torch.utils.swap_tensors` removed it from ``parameter``.

        Raises:
            RuntimeError: the parameter's dtype, device or shape has changed, so that it does not
                fit its bucket.
        """
        kind = _kind_of(parameter)
        if kind != self._kind or type(parameter.data) is not torch.Tensor:
            raise RuntimeError(
                f"parameter {self.name!r} was swapped for another one, as by"
                " torch.__future__.set_swap_module_params_on_conversion(True): {} {} {} when the"
                " module was wrapped, {} {} {} now. Call with_bagua() again on every rank".format(
                    *self._kind, *kind
                )
            )
        # The dictionary is still there; setting it makes torch call what is in it.
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        parameter._bagua_hook = self  # type: ignore[attr-defined]


def trains(module: torch.nn.Module) -> bool:
    """Return whether a forward pass of ``module`` that begins now can be part of a training
    step.
    """
    # Activation checkpointing repeats forward passes; torch.export runs one with stand-ins for the
    # parameters.
    return module.training and not inside_backward() and not torch.compiler.is_compiling()


def queue_callback(callback: Callable[[], object]) -> None:
    """Queue ``callback`` for the end of the current autograd task; it is dropped if the task
    fails.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[arg-type]


def call_after_backward(callback: Callable[[], object]) -> None:
    """Queue ``callback`` for the end of the outermost current backward pass.

    A reentrant checkpoint runs a backward pass inside another one: a node of the outer one is still
    being evaluated at its end, so the call waits until that node is done.
    """
    queue_callback(partial(_graph_task_ended, callback))


def are_for_a_call(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether ``tensors``, a module's parameters in the current forward pass, are
    replacements for this call only.
    """
    if not all(isinstance(tensor, torch.nn.Parameter) for tensor in tensors):
        return True  # modules take nothing but parameters for good
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back
    return frame is not None


@untraced
def _graph_task_ended(callback: Callable[[], object]) -> None:
    node = torch._C._current_autograd_node()
    if node is None:
        callback()
    else:
        node.register_hook(lambda *_: call_after_backward(callback))


_BACKWARD = State.BACKWARD
_kind_of = attrgetter("dtype", "device", "shape")


class _Hooks(NotCopied, OrderedDict):  # type: ignore[type-arg]
    """Dictionary of a parameter's post-accumulate-grad hooks, in which `GradientHook` is always
    last.
    """

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        if not isinstance(hook, GradientHook):
            # torch goes through the dictionary that an OrderedDict is, whose order move_to_end does
            # not change.
            for own in [known for known, other in self.items() if isinstance(other, GradientHook)]:
                super().__setitem__(own, self.pop(own))


class _Earlier(NotCopied):
    """Single hook that runs all hooks registered before."""

    def __init__(self, hooks: dict[int, Any]) -> None:
        self._hooks = hooks

    def __call__(self, parameter: Any) -> None:
        for hook in list(self._hooks.values()):
            hook(parameter)
