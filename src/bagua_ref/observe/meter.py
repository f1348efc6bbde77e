"""Measurement of communication: counters of a training, its last operations, and ranges in
torch.profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.profiler import record_function

from bagua_ref.base.runtime import World, current_world

PER_STEP = ("bytes_sent", "exposed_wait_seconds", "codec_seconds", "seconds")
"""Counters also reported as means over steps, with the suffix ``_per_step``."""


class Operation:
    """Context of an operation that the flight recorder records.

    Attributes:
        kind: class name of the operation; "agreement" for the start of the exchange of plans for a
            round, "end of round" for its end.
        bucket: name of the bucket; "" if there is none.
        bytes: the bucket's size, padding included.
        module: name of the training; "" if there is none.
        round: number of rounds that the training had begun.
        started: start time, by `World.clock`.
        ended: end time; None if the operation is in progress, or failed.
    """

    __slots__ = (
        "_meter",
        "_world",
        "bucket",
        "bytes",
        "ended",
        "kind",
        "module",
        "round",
        "started",
    )

    def __init__(
        self, kind: str, bucket: str = "", nbytes: int = 0, meter: Meter | None = None
    ) -> None:
        self.kind, self.bucket, self.bytes = kind, bucket, nbytes
        self._world, self._meter = current_world(), meter or _meter.get()
        self.module, self.round = self._meter.module, self._meter.rounds
        self.started = self._world.clock()
        self.ended: float | None = None

    def __str__(self) -> str:
        what = f"{self.kind} of bucket {self.bucket!r}" if self.bucket else self.kind
        state = "failed or under way" if self.ended is None else "ended"
        return f"{what} in round {self.round} of {self.module} ({state})"

    def __enter__(self) -> None:
        self._world.operations.append(self)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.ended = self._world.clock()
            if self.bucket:
                self._meter.last_exchange = self.ended


class Meter:
    """Communication counters of one training on this rank; threads find the current one by
    `use_meter`. Each counter is written by one thread only.

    Args:
        world: world whose clock is used.
        module: the name of the trained module.

    Attributes:
        step: number of the current step, from 1.
        steps: optimizer steps (the last optimizer's, if several; without any, synchronized backward
            passes).
        seconds: the time from the end of the first step to the end of the last.
        steps_in_agreement: ``steps`` at the last successful agreement of all ranks.
        rounds: rounds of communication that have begun.
        wait_seconds: the time that the training thread has waited for communication.
        codec_seconds: the time that codecs have computed.
        last_exchange: the time at which an operation on a bucket last ended; None if none has.
        bytes_before: bytes that the groups had sent when training began.
    """

    steps = steps_in_agreement = rounds = step = 0
    bytes_before = wait_seconds = codec_seconds = seconds = _first_step = 0.0
    last_exchange: float | None = None

    def __init__(self, world: World, module: str) -> None:
        self.world, self.module = world, module

    def count_step(self, counted: bool) -> None:
        """Count a finished step if ``counted``."""
        if counted:
            now = self.world.clock()
            self._first_step = self._first_step if self.steps else now
            self.steps, self.seconds = self.steps + 1, now - self._first_step

    @contextmanager
    def timing(self, total: str, label: str = "") -> Iterator[None]:
        """Add the duration of the context to ``total``, "wait_seconds" or "codec_seconds"; a
        profile shows it as ``label``, unless empty.
        """
        begin = self.world.clock()
        try:
            with profiled(label):
                yield
        finally:
            setattr(self, total, getattr(self, total) + self.world.clock() - begin)

    def metrics(self, bytes_sent: float, alone: bool, on_cpu: bool) -> dict[str, float | int]:
        """Return the metrics common to all algorithms.

        Args:
            bytes_sent: bytes that the groups have sent by now, not rounded.
            alone: whether there is one rank only, which agrees with itself.
            on_cpu: whether all parameters are on the CPU; otherwise the host's times say little.
        """
        found: dict[str, float | int] = {"steps": self.steps, "rounds": self.rounds}
        found["steps_in_agreement"] = self.steps if alone else self.steps_in_agreement
        found["bytes_sent"] = round(bytes_sent - self.bytes_before)
        if self.steps > 1:
            found["seconds"] = self.seconds
        if on_cpu:
            found["exposed_wait_seconds"], found["codec_seconds"] = (
                self.wait_seconds,
                self.codec_seconds,
            )
        for name in PER_STEP:
            if name in found:
                found[f"{name}_per_step"] = found[name] / max(self.steps - (name == "seconds"), 1)
        if self.last_exchange is not None:
            found["seconds_since_last_exchange"] = self.world.clock() - self.last_exchange
        return found


_meter: ContextVar[Meter] = ContextVar("bagua_ref_meter", default=Meter(current_world(), ""))  # noqa: B039
"""The meter of the thread's training; the default one, for times outside of a training, is never
read.
"""


@contextmanager
def use_meter(meter: Meter) -> Iterator[None]:
    """Make ``meter`` the current meter in this context, also for threads started in it."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


def profiled(label: str) -> AbstractContextManager[Any]:
    """Return a profiler range named ``label``, or a null context without a label or profiler."""
    return (
        record_function(label)
        if label and torch.autograd.profiler._is_profiler_enabled
        else nullcontext()
    )


def codec_phase(name: str) -> AbstractContextManager[None]:
    """Count the duration of the context as codec time; a profile shows it as ``bagua_ref::`` and
    ``name``.
    """
    return _meter.get().timing("codec_seconds", f"bagua_ref::{name}")


def steps_in(
    context: Callable[[], AbstractContextManager[object]], steps: Iterator[int]
) -> Iterator[int]:
    """Yield the values of ``steps``; each is computed in a new ``context()``, and the consumer runs
    outside of it.
    """
    while True:
        with context():
            step = next(steps, None)
        if step is None:
            return
        yield step
