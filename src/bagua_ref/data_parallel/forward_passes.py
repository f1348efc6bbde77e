"""The training forward passes of a module, which decide whether the backward pass that reaches them is synchronized (S5)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel.distributed import _find_tensors

from bagua_ref.base.utils import inside_backward, untraced

__all__ = ["ForwardPasses", "call_after_backward", "trains"]


class Reached:
    """The forward passes that a backward pass has reached; the autograd engine keeps it until the backward pass ends or fails.

    Attributes:
        synchronized: whether one of them began outside `no_sync`.
        waiting: the parameters whose gradients arrived before one was, by name.
    """

    def __init__(self) -> None:
        self.synchronized, self.over = False, False
        self.waiting: list[tuple[str, Any]] = []

    def __call__(self) -> None:
        """Note that the backward pass has ended."""
        self.over = True


class ForwardPasses:
    """Whether the forward passes that a backward pass reaches began outside `no_sync`.

    The nodes of the graph behind each output say so when a backward pass comes to them. A backward pass that comes to none of
    them, as when outputs hide their tensors, is synchronized as by torch's DistributedDataParallel: if it is the first one after a
    forward pass outside `no_sync`.

    Args:
        synchronize: called if a backward pass turns out to be synchronized after some of its gradients have arrived, with these.
        synchronizing: whether a backward pass that follows no forward pass is synchronized.
    """

    def __init__(self, synchronize: Callable[[list[tuple[str, Any]]], object], synchronizing: bool) -> None:
        self._synchronize = weakref.WeakMethod(synchronize)
        self.synchronizing = synchronizing
        """Whether a backward pass that comes to no known node is synchronized."""
        self._awaited = False
        """Whether no backward pass has been synchronized since the last forward pass outside `no_sync`."""
        self._expected = False
        """Whether no gradient has arrived since the last forward pass."""
        self._first_run: bool | None = None
        """Whether the last forward pass, if it had gradients disabled, began outside `no_sync`; None after its first gradient."""
        self._reached: Callable[[], Reached | None] = _nothing

    @property
    def reached(self) -> Reached | None:
        """What the backward pass under way has reached so far; None: nothing, or there is no backward pass."""
        reached = self._reached()
        return None if reached is None or reached.over else reached

    def begin(self, synchronized: bool, in_backward: bool) -> None:
        """Note the beginning of a forward pass, outside `no_sync` or not, or of a backward pass that stands in for one."""
        self._expected, self._first_run = not in_backward, None
        if synchronized:
            self.synchronizing = self._awaited = True
        elif not self._awaited:
            self.synchronizing = False

    def begin_without_gradients(self, synchronized: bool) -> None:
        """Note the beginning of a forward pass with gradients disabled, outside `no_sync` or not."""
        self._first_run = synchronized

    def gradient_arrives(self) -> bool | None:
        """Note a gradient; if it belongs to a forward pass that had gradients disabled, return whether that was outside `no_sync`.

        Only the first run of a reentrant checkpoint around the module is such a forward pass: no other one comes before it.
        """
        expected, self._expected = self._expected, False
        if self.reached is not None:
            return None
        first_run, self._first_run = self._first_run, None
        return None if expected else first_run

    def end(self, output: Any, synchronized: bool) -> None:
        """Mark the graph behind the ``output`` of a forward pass."""
        mark = _Mark(self, synchronized)
        for tensor in _find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(mark)

    def backward_synchronized(self) -> None:
        """Note the end of a synchronized backward pass."""
        self._awaited = False

    def reach(self, synchronized: bool) -> None:
        """Note that the backward pass under way has come to the output of a forward pass."""
        reached = self.reached
        if reached is None:
            reached = Reached()
            torch.autograd.Variable._execution_engine.queue_callback(reached)
            self._reached = weakref.ref(reached)
        if synchronized and not reached.synchronized:
            reached.synchronized = True
            synchronize = self._synchronize()
            if reached.waiting and synchronize is not None:
                synchronize(reached.waiting)


class _Mark:
    """A hook of the nodes behind an output, which are freed with the graph."""

    def __init__(self, passes: ForwardPasses, synchronized: bool) -> None:
        self._passes, self._synchronized = weakref.ref(passes), synchronized

    def __call__(self, gradients: Any) -> None:
        if is_dynamo_compiling():  # see `GradientHook`
            self._untraced(gradients)
            return
        passes = self._passes()
        if passes is not None:
            passes.reach(self._synchronized)

    @untraced
    def _untraced(self, gradients: Any) -> None:
        self(gradients)


def trains(module: torch.nn.Module) -> bool:
    """Return whether a forward pass of ``module`` that begins now may be part of a training step."""
    # Activation checkpointing repeats forward passes; torch.export runs one with stand-ins for the parameters.
    return module.training and not inside_backward() and not torch.compiler.is_compiling()


def call_after_backward(callback: Callable[[], object]) -> None:
    """Call ``callback`` at the end of the outermost backward pass under way.

    A reentrant checkpoint runs a backward pass inside another one: a node of the outer one is still being evaluated at its end, so
    the call waits until that node is done.
    """
    torch.autograd.Variable._execution_engine.queue_callback(partial(_graph_task_ended, callback))


@untraced
def _graph_task_ended(callback: Callable[[], object]) -> None:
    node = torch._C._current_autograd_node()
    if node is None:
        callback()
    else:
        node.register_hook(lambda *_: call_after_backward(callback))


def _nothing() -> None:
    return None
