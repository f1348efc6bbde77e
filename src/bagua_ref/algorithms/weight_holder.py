"""Training's side of the weight lock: acquired at each forward pass, released however the step ends (S5.6)."""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from bagua_ref.base.utils import OwnHook, inside_backward, untraced
from bagua_ref.comm_ops import AsynchronousModelAverage
from bagua_ref.observe.meter import Meter

__all__ = ["WeightHolder"]


class WeightHolder:
    """Holds the weights from each training forward pass to the end of its backward pass, and during ``optimizer.step`` (S5.6).

    The hold always ends: when a forward pass or step raises, when the graph of the output is freed, when the backward pass
    completes or fails, and at the latest at the next forward pass, ``eval()``, step or abort.

    Args:
        module: acquires the locks in its training forward passes.
        optimizers: acquire them in their steps.
        ops: operations that own the locks.
        meter: counts the time that training waits for the weights.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        ops: Sequence[AsynchronousModelAverage],
        meter: Meter,
    ) -> None:
        self._module, self._ops, self._meter = weakref.ref(module), ops, meter
        self._forward: _Hold | None = None
        self._step: _Hold | None = None
        self._dropped: list[_Hold] = []
        """Holds to release: finalizers may run anywhere, so they only add to this list."""
        for op in ops:
            op.lock.on_wait = OwnHook(self.collect)
        self._handles: list[Any] = [
            module.register_forward_pre_hook(OwnHook(self._before_forward)),
            module.register_forward_hook(OwnHook(self._after_forward), always_call=True),
        ]
        self._unguard: list[Callable[[], None]] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(OwnHook(self._before_step)))
            self._handles.append(optimizer.register_step_post_hook(OwnHook(self._after_step)))
            self._unguard.append(_call_on_exception(optimizer, OwnHook(self._after_step)))

    def drop_forward(self) -> None:
        """Release what a forward pass acquired."""
        if self._forward is not None:
            self._forward.release()
            self._forward = None

    def drop(self) -> None:
        """Give back everything."""
        self.drop_forward()
        self._after_step()

    def collect(self) -> None:
        """Give back what finalizers and ``eval()`` have let go; a round that waits calls this."""
        while self._dropped:
            self._dropped.pop().release()
        module, forward = self._module(), self._forward
        if forward is not None and (module is None or not module.training):
            forward.release()

    def close(self) -> None:
        """Take the hooks off and give everything back."""
        for handle in self._handles:
            handle.remove()
        for unguard in self._unguard:
            unguard()
        self.drop()

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if inside_backward():  # a checkpoint computes this forward anew
            return
        self.collect()
        if self._held_for_backward():
            return
        self.drop_forward()
        if module.training:
            self._forward = _Hold(self._ops, self._meter)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._forward is None or inside_backward() or self._held_for_backward():
            return
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        raised = output is None and sys.exc_info()[0] is not None
        if raised or not (tensors or torch.is_grad_enabled()):
            self.drop_forward()
            return
        for tensor in tensors:
            tensor.register_hook(_WhenBackwardBegins(self._forward, self._dropped))

    def _held_for_backward(self) -> bool:
        """Return whether an earlier forward pass than this one, which has no gradients, still holds the weights."""
        return not torch.is_grad_enabled() and self._forward is not None and self._forward.awaits_backward

    def _before_step(self, *_: Any) -> None:
        self.drop_forward()
        self._step = _Hold(self._ops, self._meter)

    def _after_step(self, *_: Any) -> None:
        if self._step is not None:
            self._step.release()
            self._step = None


class _Hold:
    """The weights in the hands of training; given back exactly once."""

    def __init__(self, ops: Sequence[AsynchronousModelAverage], meter: Meter) -> None:
        self._ops, self._once = ops, threading.Lock()
        self._has_gradients = torch.is_grad_enabled()
        with meter.waiting():
            for op in ops:
                op.lock_weight()

    @property
    def awaits_backward(self) -> bool:
        """Whether it was acquired for a backward pass, too, and has not been given back."""
        return self._has_gradients and not self._once.locked()

    def release(self) -> None:
        """Give the weights back; later calls do nothing."""
        if self._once.acquire(blocking=False):
            for op in self._ops:
                op.unlock_weight()


class _LetGo:
    """Lets a hold go when this object is freed."""

    def __init__(self, hold: _Hold, dropped: list[_Hold]) -> None:
        self._hold, self._dropped = hold, dropped

    def __del__(self) -> None:
        self._dropped.append(self._hold)


class _WhenBackwardBegins(_LetGo):
    """A hook on an output, freed with its graph. It ties the hold to the end of the backward that it sees begin."""

    @untraced
    def __call__(self, grad: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(_WhenBackwardEnds(self._hold, self._dropped))


class _WhenBackwardEnds(_LetGo):
    """Called by the autograd engine when the backward has ended; freed, uncalled, when it failed."""

    @untraced
    def __call__(self) -> None:
        self._hold.release()


def _call_on_exception(optimizer: torch.optim.Optimizer, function: Callable[[], None]) -> Callable[[], None]:
    """Make ``optimizer.step`` call ``function`` when it raises, as its post hooks are not; return what undoes this."""
    before = optimizer.__dict__.get("step")
    step = optimizer.step

    @functools.wraps(step)
    def guarded(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException:
            function()
            raise

    method = types.MethodType(guarded, optimizer)  # LR schedulers look for __func__
    optimizer.step = method  # type: ignore[method-assign]

    def undo() -> None:
        if optimizer.__dict__.get("step") is method:
            if before is None:
                del optimizer.__dict__["step"]
            else:
                optimizer.step = before  # type: ignore[method-assign]

    return undo
