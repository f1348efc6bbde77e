"""The thread of asynchronous averaging on a rank, and the hooks by which training holds the weight
lock (S3.6, S5.6).
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from bagua_ref.base.runtime import Thread, World
from bagua_ref.base.utils import OwnHook, inside_backward, tensors_with_graph, untraced
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.comm_ops import AsynchronousModelAverage
from bagua_ref.errors import CommunicationError
from bagua_ref.observe.flight_recorder import explain
from bagua_ref.observe.meter import Meter, use_meter
from bagua_ref.types import Group

_logger = logging.getLogger(__name__)


class State(Enum):
    """State of averaging on this rank; `TRANSITIONS` lists the allowed changes, which only
    `AveragingThread` makes.
    """

    IDLE = "not started; the next forward pass that is due starts the rounds"
    RUNNING = "a background thread averages every sync_interval_ms"
    STOPPING = "abort was called; the thread goes on until all ranks have called it"
    ABORTED = "all ranks have stopped; resume leads back to IDLE"
    FAILED = "a round raised an error, which the training thread will raise next"


TRANSITIONS = {
    State.IDLE: {State.RUNNING, State.STOPPING, State.ABORTED},
    State.RUNNING: {State.STOPPING, State.FAILED},
    State.STOPPING: {State.ABORTED, State.FAILED},
    State.ABORTED: {State.IDLE},
    State.FAILED: {State.ABORTED},
}


class AveragingThread:
    """The averaging thread of one rank, and its state machine.

    Args:
        world: starts the thread.
        meter: counters of the training.
        name: name of the module.
        buckets: buckets of weights, each with one asynchronous operation.
        group: group used by this thread only; it is closed when training ends, which also ends a
            waiting thread.
        interval: seconds between the end of a round and the next.

    Attributes:
        release: reference to the function that releases training's weight locks; called before
            waiting for the thread.
    """

    def __init__(
        self,
        world: World,
        meter: Meter,
        name: str,
        buckets: list[BaguaBucket],
        group: Group,
        interval: float,
    ) -> None:
        self._world, self._meter = world, meter
        self._name = f"bagua_ref averaging {name}"
        self._buckets, self._group, self._interval = buckets, group, interval
        self.ops: list[AsynchronousModelAverage] = [bucket._async_op for bucket in buckets]
        self.state = State.IDLE
        self.error: BaseException | None = None
        self.completed = 0
        self._wake = self._world.event()
        self._thread: Thread | None = None
        self._forgotten = False
        self.release: Callable[[], Callable[[], None] | None] = lambda: None

    def _go(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def start(self) -> None:
        """Start averaging, unless it is running or was aborted."""
        if self.state is State.IDLE:
            self._go(State.RUNNING)
            self._spawn()

    def stop(self) -> None:
        """Stop averaging on all ranks: continue until every rank has called this. A second call
        does nothing.

        Raises:
            CommunicationError: a round failed.
        """
        self._release()
        if self.state in (State.IDLE, State.RUNNING):
            idle = self.state is State.IDLE
            for op in self.ops:
                op.abort()
            self._go(State.STOPPING)
            self._wake.set()
            if idle:  # other ranks may already be averaging: take part until they stop, too
                self._spawn()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failure()

    def suspend(self) -> Callable[[], None]:
        """Stop averaging unless it was already aborted; return a function that resumes it."""
        if self.state is State.ABORTED:
            return lambda: None
        self.stop()
        return self.resume

    def check_idle(self) -> None:
        """Raise RuntimeError if averaging is running."""
        if self.state not in (State.IDLE, State.ABORTED):
            raise RuntimeError(
                "averaging is under way, so no state can be loaded; call abort(model) on every rank"
                " before loading"
            )

    def resume(self) -> None:
        """Allow averaging again after `stop`, from the next forward pass."""
        if self.state is State.ABORTED:
            for op in self.ops:
                op.reset()
            self._go(State.IDLE)

    def restore(self, aborted: bool) -> None:
        """Restore a saved aborted flag, which is equal on all ranks; does not communicate."""
        if not aborted:
            self.resume()
        elif self.state is State.IDLE:
            self._go(State.ABORTED)

    def raise_failure(self) -> None:
        """Raise the error that ended the thread, if any, once; the state is then ABORTED."""
        if self.state is State.FAILED:
            error, self.error = self.error, None
            self._go(State.ABORTED)
            raise CommunicationError(
                f"asynchronous averaging stopped in round {self.completed}: {type(error).__name__}:"
                f" {error}. Every rank must call model.bagua_algorithm.abort(model), or end by"
                " destroy_process_group()"
            ) from error

    def forget(self) -> None:
        """End without waiting, because the training is over; rounds in progress end when the other
        ranks stop, too.
        """
        self._forgotten = True
        if self.state is State.RUNNING:
            for op in self.ops:
                op.abort()
            self._go(State.STOPPING)
            self._wake.set()
        else:
            self._group.close()

    def end(self) -> None:
        """Stop averaging because this rank is shutting down: wait until the other ranks stop or
        shut down, too; log the error of a round that fails meanwhile.
        """
        self._release()
        if self.state in (State.RUNNING, State.FAILED) or self._forgotten:
            try:
                self.stop()
            except CommunicationError as error:
                # this rank's training is over, and its connections are yet to be closed
                _logger.warning("%s", error)

    def _release(self) -> None:
        if (release := self.release()) is not None:
            release()

    def _spawn(self) -> None:
        self._wake.clear()
        with use_meter(self._meter):
            self._thread = self._world.spawn(self._run, self._name)

    def _run(self) -> None:
        try:
            while True:
                for bucket in self._buckets:
                    bucket.execute(label=f"bagua_ref::async/bucket{bucket.name}")
                    if bucket._async_op.get_status() == "stopped":
                        self._go(State.ABORTED)
                        return
                self.completed += 1
                if self.state is not State.STOPPING:
                    self._wake.wait(self._interval)
        except Exception as error:
            if not self._forgotten:
                explain(error)
                self.error = error
                self._go(State.FAILED)
        finally:
            if self._forgotten:
                self._group.close()


class WeightLockHooks:
    """Hooks that lock the weights from each training forward pass to the end of its backward pass,
    and during ``optimizer.step`` (S5.6).

    A lock is always released: when a forward pass or step raises, when the graph of the output is
    freed, when the backward pass completes or fails, and at the latest at the next forward pass,
    ``eval()``, step or abort.

    Args:
        module: the module whose training forward passes acquire the locks.
        optimizers: optimizers whose steps acquire the locks.
        ops: operations that own the locks.
        meter: counter of the time that training waits for the weights.
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
        """Weight locks to release. Finalizers may run anywhere, so they only append to this
        list.
        """
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
        """Release the weight lock of a forward pass."""
        if self._forward is not None:
            self._forward.release()
            self._forward = None

    def drop(self) -> None:
        """Release all weight locks."""
        self.drop_forward()
        self._after_step()

    def collect(self) -> None:
        """Release weight locks that finalizers or ``eval()`` have dropped; called by a round that
        waits for the weights.
        """
        while self._dropped:
            self._dropped.pop().release()
        module, forward = self._module(), self._forward
        if forward is not None and (module is None or not module.training):
            forward.release()

    def remove(self) -> None:
        """Remove the hooks and release all weight locks."""
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
        tensors = tensors_with_graph(output)
        raised = output is None and sys.exc_info()[0] is not None
        if raised or not (tensors or torch.is_grad_enabled()):
            self.drop_forward()
            return
        for tensor in tensors:
            tensor.register_hook(_Release(self._forward, self._dropped).begin)

    def _held_for_backward(self) -> bool:
        """Return whether gradients are disabled now and an earlier forward pass still holds the
        weights for its backward pass.
        """
        return (
            not torch.is_grad_enabled()
            and self._forward is not None
            and self._forward.awaits_backward
        )

    def _before_step(self, *_: Any) -> None:
        self.drop_forward()
        self._step = _Hold(self._ops, self._meter)

    def _after_step(self, *_: Any) -> None:
        if self._step is not None:
            self._step.release()
            self._step = None


class _Hold:
    """A weight lock that training has acquired; released exactly once."""

    def __init__(self, ops: Sequence[AsynchronousModelAverage], meter: Meter) -> None:
        self._ops, self._once = ops, threading.Lock()
        self._has_gradients = torch.is_grad_enabled()
        with meter.timing("wait_seconds"):
            for op in ops:
                op.lock_weight()

    @property
    def awaits_backward(self) -> bool:
        """Whether the lock is still held for a backward pass."""
        return self._has_gradients and not self._once.locked()

    def release(self) -> None:
        """Release the locks; later calls do nothing."""
        if self._once.acquire(blocking=False):
            for op in self._ops:
                op.unlock_weight()


class _Release:
    """Release of a weight lock when the backward pass through a graph ends, or at the next
    `collect` after the graph was freed.

    The graph holds one instance. During the backward pass, the autograd engine holds another, which
    it frees without a call if the pass fails.
    """

    def __init__(self, hold: _Hold, dropped: list[_Hold]) -> None:
        self._hold, self._dropped = hold, dropped

    @untraced
    def begin(self, gradient: torch.Tensor) -> None:
        """Queue the release for the end of the backward pass; a hook on an output of the forward
        pass.
        """
        torch.autograd.Variable._execution_engine.queue_callback(
            _Release(self._hold, self._dropped).end
        )

    @untraced
    def end(self) -> None:
        """Release the lock at the end of the backward pass."""
        self._hold.release()

    def __del__(self) -> None:
        self._dropped.append(self._hold)


def _call_on_exception(
    optimizer: torch.optim.Optimizer, function: Callable[[], None]
) -> Callable[[], None]:
    """Patch ``optimizer.step`` to call ``function`` when it raises, since torch's post hooks do not
    run then; return a function that removes the patch.
    """
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
