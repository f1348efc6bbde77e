"""Handles of simulated operations that do not block, and their futures.

The outputs of an operation become visible on its rank as late as torch allows: when its work is
waited for, found to be completed, or synchronized, or its future is used. Until then they hold NaN,
so that a program that reads them too early computes NaN.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bagua_ref.errors import SimulationError
from bagua_ref.simulation.group import Call
from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.tasks import call_site, is_user_code


class SimulatedWork(dist.Work):
    """The handle of a rank's operation, or of several coalesced ones.

    Args:
        call: the rank's call of the operation.
        result: the value of the future.
        parts: the handles of coalesced operations.
    """

    def __init__(
        self, call: Call, result: list[Tensor], parts: Sequence[SimulatedWork] = ()
    ) -> None:
        super().__init__()
        self.call, self._result, self._parts = call, result, parts
        self._outputs: Sequence[Tensor] = ()
        self._values: Sequence[Tensor] = ()
        """The results of the operation, written to its outputs on delivery."""
        self._inputs: Sequence[Tensor] = ()
        self._readable: Sequence[Tensor] = ()
        """The inputs that are parts of outputs and may be read."""
        self._delivered = False
        self._future: SimulatedFuture | None = None
        works_of_backward.note(self)

    def delay(
        self, sends: list[Tensor], outputs: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Defer the results until they are waited for; return the tensors that the operation reads
        and writes.

        Until then the outputs hold NaN, or a pattern if they are integers. Inputs that share memory
        with an output are replaced by copies.
        """
        if is_prompt():
            return [send.clone() for send in sends], outputs
        self._inputs, self._outputs = sends, outputs
        self._values = [torch.empty_like(output) for output in outputs]
        memory = {output.untyped_storage().data_ptr() for output in outputs}
        shared = [send for send in sends if send.untyped_storage().data_ptr() in memory]
        copies = {id(send): send.clone() for send in shared}
        for output in outputs:
            _spoil(output)
        if list(map(Tensor.numel, shared)) != list(map(Tensor.numel, outputs)):
            self._readable = shared
            for send in shared:
                send.copy_(copies[id(send)])
        rank_world().works.add(self)
        return [copies.get(id(send), send) for send in sends], list(self._values)

    def is_touched_by(self, tensor: Tensor, is_written: bool) -> bool:
        """Return whether reading or writing a tensor now is an error, because it overlaps this
        operation's memory.
        """
        if not is_written and any(overlap(tensor, own) for own in self._readable):
            return False
        tensors = [*self._outputs, *self._inputs] if is_written else self._outputs
        return any(overlap(tensor, own) for own in tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is complete, at most ``timeout`` of virtual time, and deliver
        its results.
        """
        limit = seconds_of(timeout) or None
        for part in self._parts:
            part.wait(timeout)
        if not self._delivered:
            try:
                self.call.wait(limit)
            except (SimulationError, TypeError, ValueError) as error:
                if not isinstance(error, SimulationError):
                    error = SimulationError(str(error), "mismatch", self.call.concerned)
                self.call.group.scheduler.end(error)
            self._deliver()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation is complete, and deliver its results if so."""
        self.call.group.scheduler.poll()
        completed = self.call.done and all(part.is_completed() for part in self._parts)
        if completed and self.call.error is None:
            self._deliver()
        return completed

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error."""
        return self.is_completed() and self.call.error is None

    def exception(self) -> Exception | None:
        """Return the operation's error, or None."""
        return self.call.error

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return the sender of a message as a rank of the group."""
        return -1 if self.call.source is None else self.call.source

    _source_rank = source_rank

    def get_future(self) -> SimulatedFuture:
        """Return the future of the results. It completes when waited for: by `wait`, by `then`, or
        at the end of the current backward pass. C++ code gets a completed one.
        """
        if self._future is None:
            self._future = SimulatedFuture(self)
            if self._delivered or not (self.is_awaited() or _is_kept_by_user()):
                self.wait()
                self._set_future()
        return self._future

    def is_awaited(self) -> bool:
        """Return whether the end of a current backward pass will wait for this work."""
        return works_of_backward.will_wait(self)

    def _deliver(self) -> None:
        if self._delivered:
            return
        self._delivered = self.call.awaited = True
        rank_world().works.discard(self)
        if self._outputs:
            torch._foreach_copy_(list(self._outputs), list(self._values))
        self._outputs = self._values = self._inputs = ()
        self._set_future()

    def _set_future(self) -> None:
        if self._future is not None and not self._future.has_value():
            self._future.set_result(self._result)


class SimulatedFuture(torch.futures.Future[Any]):
    """A future that yields to other simulated ranks while it is waited for.

    Args:
        source: the work or future whose completion completes this one.
    """

    def __init__(self, source: SimulatedWork | SimulatedFuture) -> None:
        super().__init__()
        self._source = source

    def wait(self) -> Any:
        """Wait for the value, and return it."""
        if not self.has_value():
            self._source.wait()
        return super().wait()

    def done(self) -> bool:
        """Return whether the value is available, or its operation is complete."""
        return self.has_value() or self._source.is_completed()

    is_completed = done

    def has_value(self) -> bool:
        """Return whether the value has been set."""
        return super().done()

    def is_awaited(self) -> bool:
        """Return whether the end of a current backward pass will wait for this future."""
        return self._source.is_awaited()

    def then(self, callback: Callable[[Any], Any]) -> SimulatedFuture:
        """Return the future of ``callback(self)``, which is called when this one is complete."""
        following = SimulatedFuture(self)

        def run(future: Any) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(run)
        return following

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call ``callback(self)`` when this future is complete: immediately, unless a backward pass
        will wait for it.
        """
        super().add_done_callback(callback)
        if not self.is_awaited():
            self.wait()


_REDUCER = os.path.join("torch", "nn", "parallel", "distributed.py")


def _is_kept_by_user() -> bool:
    """Return whether user code asks for a future that is certainly not for a hook, whose result a
    reducer takes in C++.
    """
    frame: FrameType | None = sys._getframe(2)
    is_user = frame is not None and is_user_code(frame.f_code.co_filename)
    while frame is not None and not frame.f_code.co_filename.endswith(_REDUCER):
        frame = frame.f_back
    return is_user and frame is None and threading.get_ident() not in works_of_backward.at_end


def wait_first(original: Callable[..., Any], futures: Sequence[Any]) -> Any:
    """Wait for the futures of simulated works, then call a torch function that waits for futures in
    C++.
    """
    for future in futures:
        if isinstance(future, SimulatedFuture) and not future.is_awaited():
            future.wait()
    return original(futures)


class _WorksOfBackward:
    """Works started in each current backward pass; a callback of autograd's engine waits for them
    at its end.

    A data-parallel reducer takes futures in C++ and waits for them in a callback of its own,
    without yielding to other ranks. The first operation of a backward pass queues a callback that
    runs before the reducer's.
    """

    def __init__(self) -> None:
        self._works: dict[Any, list[SimulatedWork]] = {}
        self.at_end: set[Any] = set()
        """The threads in a callback of autograd's engine in which the reducer starts operations and
        waits for them.
        """

    def clear(self) -> None:
        """Forget the backward passes of a run that has ended."""
        self._works.clear()

    def run_at_end(self, callback: Callable[[Any], None], reducer: Any) -> None:
        """Call a reducer's callback, during which futures are returned completed."""
        thread = threading.get_ident()
        self.at_end.add(thread)
        try:
            callback(reducer)
        finally:
            self.at_end.discard(thread)

    def note(self, work: SimulatedWork) -> None:
        """Add a work to the current backward pass, if called from one of its nodes; the first work
        queues the callback.
        """
        in_backward = (
            torch._C._current_graph_task_id() != -1
            and torch._C._current_autograd_node() is not None
        )
        if in_backward and threading.get_ident() not in self.at_end:
            key = (work.call.group.scheduler.calling(), torch._C._current_graph_task_id())
            if key not in self._works:
                self._works[key] = []
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._wait(key))
            self._works[key].append(work)

    def will_wait(self, work: SimulatedWork) -> bool:
        """Return whether the end of a current backward pass will wait for ``work``."""
        return any(work in works for works in self._works.values())

    def _wait(self, key: Any) -> None:
        for work in self._works.pop(key):
            work.wait()


works_of_backward = _WorksOfBackward()


_prompt: Container[tuple[str, int]] = ()


@contextmanager
def promptly(lines: Container[tuple[str, int]]) -> Iterator[None]:
    """Make operations started at these lines of user code read their inputs at once, and write when
    they are complete.

    This changes the results of a program only if it uses tensors of an operation in progress.
    """
    global _prompt
    _prompt = lines
    try:
        yield
    finally:
        _prompt = ()


def is_prompt() -> bool:
    """Return whether `promptly` applies to the calling line."""
    return bool(_prompt) and call_site(sys._getframe(1)) in _prompt


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """Return a timeout in seconds."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors share memory, compared element by element."""
    storage = first.untyped_storage()
    if storage.data_ptr() != second.untyped_storage().data_ptr() or not storage.nbytes():
        return False
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return np.shares_memory(_elements(first, memory), _elements(second, memory))


def _elements(tensor: Tensor, memory: Any) -> Any:
    """Return an array of a tensor's elements, of any dtype, over the memory of its storage."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return np.ndarray(
        tuple(tensor.shape), f"V{size}", memory, int(tensor.storage_offset()) * size, strides
    )


def _spoil(tensor: Tensor) -> None:
    """Overwrite a tensor with NaN, or with a pattern for integers; bools are unchanged."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3 * 2 + 1)
