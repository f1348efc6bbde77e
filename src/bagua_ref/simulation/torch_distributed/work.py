"""Handles of simulated operations that do not block, and their futures.

What an operation writes on its rank becomes visible as late as torch allows: when its work is
waited for, found to be completed, synchronized, or its future is used. Until then it holds NaN, so
that a program that reads it too early computes NaN.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua_ref.errors import SimulationError
from bagua_ref.simulation.group import Call
from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.tasks import call_site, is_user_code

__all__ = [
    "SimulatedFuture",
    "SimulatedWork",
    "is_prompt",
    "promptly",
    "seconds_of",
    "wait_first",
    "works_of_backward",
]


class SimulatedWork(dist.Work):
    """The handle of one operation of a rank, or of several.

    Args:
        call: the rank's part in the operation.
        outputs: the tensors to write at delivery.
        values: what the operation writes meanwhile, in their order.
        result: the value of the future.
    """

    def __init__(
        self, call: Call, outputs: Sequence[Tensor], values: Sequence[Tensor], result: list[Tensor]
    ) -> None:
        super().__init__()
        self.call, self._outputs, self._values, self._result = call, outputs, values, result
        self._parts: Sequence[SimulatedWork] = ()
        self._inputs: Sequence[Tensor] = ()
        self._readable: Sequence[Tensor] = ()
        self._delivered = False
        self._future: SimulatedFuture | None = None
        works_of_backward.note(self)

    @classmethod
    def late(
        cls,
        make_call: Callable[[list[Tensor]], Call],
        outputs: Sequence[Tensor],
        sends: list[Tensor] | None = None,
        result: list[Tensor] | None = None,
    ) -> SimulatedWork:
        """Return the handle of an operation whose results are delivered late.

        Args:
            make_call: takes the tensors that the operation is to write.
            outputs: the caller's tensors, which hold NaN, or a pattern if they are integers, until
                delivery.
            sends: the operation's inputs; those that share memory with an output are replaced by
                copies.
            result: the value of the future; None: ``outputs``.
        """
        outputs, inputs = [output.data for output in outputs], list(sends or ())
        if is_prompt():
            if sends is not None:
                sends[:] = [send.clone() for send in sends]
            return cls(make_call(outputs), [], [], list(outputs) if result is None else result)
        values = [torch.empty_like(output) for output in outputs]
        memory = {output.untyped_storage().data_ptr() for output in outputs}
        shared = [
            (i, s) for i, s in enumerate(sends or ()) if s.untyped_storage().data_ptr() in memory
        ]
        for i, send in shared:
            sends[i] = send.clone()  # type: ignore[index]
        for output in outputs:
            _spoil(output)
        readable = []
        if (
            not sends
            or len(shared) != len(outputs)
            or any(s.numel() != o.numel() for (_, s), o in zip(shared, outputs, strict=True))
        ):
            readable = [send for _, send in shared]
            for i, send in shared:  # a part of an output that is an input, too, stays readable
                send.copy_(sends[i])  # type: ignore[index]
        work = cls(make_call(values), outputs, values, list(outputs) if result is None else result)
        work.watch(inputs, readable)
        return work

    @classmethod
    def joined(cls, parts: Sequence[SimulatedWork]) -> SimulatedWork | None:
        """Return the handle of several operations, which completes when all of them have."""
        if not parts:
            return None
        work = cls(parts[-1].call, [], [], [tensor for part in parts for tensor in part._result])
        work._parts = parts
        return work

    def watch(self, inputs: Sequence[Tensor], readable: Sequence[Tensor] = ()) -> None:
        """Note this work as under way on its rank until it is delivered or dropped.

        Args:
            inputs: what it sends.
            readable: the inputs that are parts of its outputs.
        """
        self._inputs, self._readable = list(inputs), readable
        rank_world().works.add(self)

    def is_touched_by(self, tensor: Tensor, is_written: bool) -> bool:
        """Return whether reading or writing a tensor now is an error, as this work uses its
        memory.
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
        """Return whether the operation is complete; if it is, deliver its results."""
        self.call.group.scheduler.poll()
        completed = self.call.done and all(part.is_completed() for part in self._parts)
        if completed and self.call.error is None:
            self._deliver()
        return completed

    def is_success(self) -> bool:
        """Return whether the operation is complete, without an error."""
        return self.is_completed() and self.call.error is None

    def exception(self) -> Exception | None:
        """Return the operation's error, or None."""
        return self.call.error

    def result(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank in the group from which a message came."""
        return -1 if self.call.source is None else self.call.source

    _source_rank = source_rank

    def get_future(self) -> SimulatedFuture:
        """Return the future of the results, which is complete when it is waited for: by `wait`,
        by `then`, or at the end of the backward that is under way. C++ code gets a complete one.
        """
        if self._future is None:
            self._future = SimulatedFuture(self)
            if self._delivered or not (self.is_awaited() or _is_kept_by_user()):
                self.wait()
                self._set_future()
        return self._future

    def is_awaited(self) -> bool:
        """Return whether the end of a backward that is under way will wait for this work."""
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
    """A future that lets other simulated ranks go on while it is waited for.

    Args:
        source: the work or future on whose end it depends.
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
        """Return whether the value is there, or can be now."""
        return self.has_value() or self._source.is_completed()

    is_completed = done

    def has_value(self) -> bool:
        """Return whether the value has been set."""
        return super().done()

    def is_awaited(self) -> bool:
        """Return whether the end of a backward that is under way will wait for it."""
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
        """Call ``callback(self)`` when this future is complete, which is now unless a backward is
        under way.
        """
        super().add_done_callback(callback)
        if not self.is_awaited():
            self.wait()


_REDUCER = os.path.join("torch", "nn", "parallel", "distributed.py")


def _is_kept_by_user() -> bool:
    """Return whether the user's code asks for a future, and surely not as a hook whose result a
    reducer takes in C++.
    """
    frame: FrameType | None = sys._getframe(2)
    is_user = frame is not None and is_user_code(frame.f_code.co_filename)
    while frame is not None and not frame.f_code.co_filename.endswith(_REDUCER):
        frame = frame.f_back
    return is_user and frame is None and threading.get_ident() not in works_of_backward.at_end


def wait_first(original: Callable[..., Any], futures: Sequence[Any]) -> Any:
    """Call a function of torch that waits for futures in C++, once those of works are complete."""
    for future in futures:
        if isinstance(future, SimulatedFuture) and not future.is_awaited():
            future.wait()
    return original(futures)


class _WorksOfBackward:
    """The works of each backward under way, which a callback of autograd's engine waits for at its
    end.

    A data-parallel reducer takes futures in C++ and waits for them in a callback of its own,
    without letting other ranks go on. The first operation of a backward queues a callback that
    comes before the reducer's.
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
        """Call a reducer's callback; futures that it takes are complete."""
        thread = threading.get_ident()
        self.at_end.add(thread)
        try:
            callback(reducer)
        finally:
            self.at_end.discard(thread)

    def note(self, work: SimulatedWork) -> None:
        """Queue the callback, if a backward is calling one of its nodes."""
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
        """Return whether the end of a backward that is under way will wait for ``work``."""
        return any(work in works for works in self._works.values())

    def _wait(self, key: Any) -> None:
        for work in self._works.pop(key):
            work.wait()


works_of_backward = _WorksOfBackward()


_prompt: Container[tuple[str, int]] = ()


@contextmanager
def promptly(lines: Container[tuple[str, int]]) -> Iterator[None]:
    """Let the operations that these lines of the user's code start read their inputs at once, and
    write when they are complete.

    The results of a program change by this only if it uses tensors of an operation under way.
    """
    global _prompt
    _prompt = lines
    try:
        yield
    finally:
        _prompt = ()


def is_prompt() -> bool:
    """Return whether `promptly` holds for the line that calls."""
    return bool(_prompt) and call_site(sys._getframe(1)) in _prompt


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """Return a timeout in seconds."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors share memory, element by element."""
    storage = first.untyped_storage()
    if storage.data_ptr() != second.untyped_storage().data_ptr() or not storage.nbytes():
        return False
    (start, end), (other_start, other_end) = _extent(first), _extent(second)
    if end <= other_start or other_end <= start:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    marks = torch.zeros(storage.nbytes(), dtype=torch.uint8)
    _bytes_of(first, marks).fill_(1)
    return bool(_bytes_of(second, marks).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and that after the last."""
    size: int = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + (sum((n - 1) * stride for n, stride in steps) + 1) * size


def _bytes_of(tensor: Tensor, memory: Tensor) -> Tensor:
    size = tensor.element_size()
    shape, strides = (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1)
    return memory.as_strided(shape, strides, tensor.storage_offset() * size)


def _spoil(tensor: Tensor) -> None:
    """Fill a tensor with NaN, or with a pattern if it has integers; leave bools as they are."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3 * 2 + 1)
