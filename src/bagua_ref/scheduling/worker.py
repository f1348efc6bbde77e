"""Background thread that runs jobs in order; waiting for it; and the jobs of an engine (S2.4,
S2.5).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from bagua_ref.base.runtime import Thread, World
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError
from bagua_ref.observe.meter import Meter, use_meter


class Errors:
    """Errors shared by all jobs of an engine.

    Attributes:
        fatal: error after which no further job runs.
        bucket_failed: whether a bucket of this round has failed.
    """

    fatal: BaseException | None = None
    bucket_failed = False


class Job(Protocol):
    """A job of the worker; it stores its error instead of raising it. ``awaited`` completes the
    message "timed out waiting for other ranks to ...".
    """

    def __call__(self) -> None: ...  # noqa: D102
    def awaited(self, step: int) -> str: ...  # noqa: D102


class BucketRun:
    """One execution of a bucket's operations.

    Args:
        bucket: the bucket.
        flat: the values of the bucket's tensors; None: loaded when the job runs.
        ready: a CUDA event that marks the availability of the values.
        label: name of this execution in a profile, from its creation to the end of its operations.
        errors: errors of the engine.

    Attributes:
        done: a CUDA event that marks the end; None on a CPU.
        error: the error of an operation, or None.
    """

    def __init__(
        self, bucket: BaguaBucket, flat: Tensor | None, ready: Any, label: str, errors: Errors
    ) -> None:
        self.bucket, self.flat, self._ready, self._label, self.errors = (
            bucket,
            flat,
            ready,
            label,
            errors,
        )
        self._ended = (
            _profiled_until(label) if torch.autograd.profiler._is_profiler_enabled else None
        )
        self.done: Any = None
        self.error: BaseException | None = None

    def __call__(self) -> None:
        """Run the operations unless a fatal error has occurred; store any error."""
        if self.errors.fatal is None:
            try:
                self.run()
            except Exception as error:
                # an identical cause would double the traceback
                if isinstance(error, CommunicationError):
                    self.error = type(error)(f"{self.describe()}: {error}")
                else:
                    self.error = CommunicationError(
                        f"{self.describe()}: {type(error).__name__}: {error}"
                    )
                    self.error.__cause__ = error
                self.errors.bucket_failed = True
        if self._ended is not None:
            self._ended.set_result(None)

    def run(self) -> None:
        """Run the operations."""
        self.done = self.bucket.execute(self.flat, self._ready, self._label)

    def describe(self) -> str:
        """Describe the bucket and its running operation."""
        return f"bucket {self.bucket.name!r}, operation {self.bucket.running!r}"

    def awaited(self, step: int) -> str:
        """Return the pending action of other ranks in ``step``, for timeout messages."""
        return (
            f"reach bucket {self.bucket.name!r} of step {step}, operation {self.bucket.running!r}"
        )


def _profiled_until(label: str) -> torch.futures.Future[None]:
    """Return a future; the profiler range ``label`` lasts until its result is set."""
    ended: torch.futures.Future[None] = torch.futures.Future()
    profiled = record_function(label)
    profiled.__enter__()
    profiled._call_end_callbacks_on_future(ended)
    return ended


class RoundCall:
    """A function call between buckets; any error is fatal.

    Args:
        function: the start or end of a round, or a function to run between rounds.
        errors: errors of the engine.
        ends: whether the function is the end of a round, which is skipped if a bucket has failed,
            as its error says more.
    """

    def __init__(self, function: Callable[[], object], errors: Errors, ends: bool = False) -> None:
        self._function, self._errors, self._ends = function, errors, ends

    def __call__(self) -> None:
        """Call the function unless a fatal error has occurred; store any error."""
        errors = self._errors
        skipped, errors.bucket_failed = self._ends and errors.bucket_failed, False
        if errors.fatal is None and not skipped:
            try:
                self._function()
            except Exception as error:
                errors.fatal = error

    def awaited(self, step: int) -> str:
        """Return the pending action of other ranks in ``step``, for timeout messages."""
        return f"reach the end of step {step}" if self._ends else f"start step {step}"


class Worker:
    """Runs jobs one after the other on its own thread, which starts with the first job and ends
    with the worker.

    Only one thread at a time may submit jobs and wait.

    Args:
        world: the source of the thread.
        name: the thread's name.
        timeout: seconds without progress after which `wait` raises.
        meter: counters that the jobs update.
    """

    def __init__(self, world: World, name: str, timeout: float, meter: Meter) -> None:
        self._world, self._name, self.timeout, self._meter = world, name, timeout, meter
        self._queue = world.queue()
        self._idle = world.event()
        self._jobs_so_far = _Count()
        self._interrupted = ""
        """Reason why waiting is pointless; empty if there is none."""
        self._jobs: list[Job] = []
        self._thread: Thread | None = None
        self.close = weakref.finalize(self, self._queue.put, None, False)
        """Ends the thread after all submitted jobs; also called when the worker is
        garbage-collected.
        """
        self.close.atexit = False

    def submit(self, job: Job, may_run_here: bool = False) -> None:
        """Run ``job()`` after all earlier jobs; if these have finished and it ``may_run_here``,
        immediately on this thread.
        """
        if may_run_here and self._jobs_so_far.finished == self._jobs_so_far.submitted:
            job()  # waking the worker, which takes Python's lock during backward, would take longer
            return
        if self._thread is None:
            self._thread = self._start()
        self._jobs_so_far.submitted += 1
        self._jobs.append(job)
        self._queue.put(job)

    def _start(self) -> Thread:
        queue, idle, jobs, now = self._queue, self._idle, self._jobs_so_far, self._world.now

        def loop() -> None:  # must not refer to the worker, or it would never be collected
            while (run := queue.get()) is not None:
                run()
                del run  # a job holds its bucket
                jobs.last_end = now()
                jobs.finished += 1
                # else the waiting thread would wake up for nothing
                if jobs.finished == jobs.submitted:
                    idle.set()

        with use_meter(self._meter):  # the thread inherits it
            return self._world.spawn(loop, self._name)

    def wait(self) -> list[Job]:
        """Wait until all jobs submitted since the last call have finished; return them.

        Raises:
            CommunicationTimeoutError: no job finished within the timeout; names the running job and
                the missing ranks.
            CommunicationError: deadlock: all ranks wait for each other.
        """
        count, now = self._jobs_so_far, self._world.now
        begin = now()
        with self._world.waiting_for_own_thread(self._interrupt, self.timeout):
            while (before := count.finished) < count.submitted:
                self._idle.clear()
                if self._interrupted:
                    raise CommunicationError(self._interrupted)
                left = max(0.0, max(begin, count.last_end) + self.timeout - now())
                if (
                    count.finished == before
                    and not self._idle.wait(left)
                    and count.finished == before
                ):
                    awaited = self._jobs[before - count.submitted].awaited(self._meter.step)
                    peers, missing = self._world.peers, ""
                    if peers is not None:
                        missing = peers.missing_in_background(f"did not {awaited}", self.timeout)
                    if self._interrupted or count.finished > before:  # in the meantime
                        continue
                    raise CommunicationTimeoutError(
                        f"timed out after {self.timeout:g} s"
                        + (f": {missing}" if missing else f" waiting for other ranks to {awaited}")
                    )
        jobs, self._jobs = self._jobs, []
        return jobs

    def _interrupt(self, reason: str) -> None:
        self._interrupted = reason
        self._idle.set()

    def join(self) -> None:
        """Wait for the thread to end after `close`, at most the timeout."""
        if self._thread is not None and not self._interrupted:
            self._thread.join(self.timeout)


class _Count:
    """Counts of submitted and finished jobs."""

    submitted = 0
    """Number of submitted jobs; only the submitting thread writes it."""
    finished = 0
    """Number of finished jobs; only the worker's thread writes this one and the next."""
    last_end = -math.inf
    """The time at which the last job finished."""
