"""Background thread that runs jobs in order, and waiting for them (S2.4, S2.5)."""

from __future__ import annotations

import math
import weakref
from typing import Generic, Protocol, TypeVar

from bagua_ref.base.runtime import Thread, World
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

__all__ = ["Job", "Worker"]


class Job(Protocol):
    """Something to run; it stores its error instead of raising it, and describes what it does."""

    def __call__(self) -> None: ...  # noqa: D102
    def describe(self) -> str: ...  # noqa: D102


AnyJob = TypeVar("AnyJob", bound=Job)


class Worker(Generic[AnyJob]):
    """Runs jobs one after the other on its own thread, which starts with the first job and ends with the worker.

    Only one thread at a time may submit jobs and wait.

    Args:
        world: starts the thread.
        name: the thread's name.
        timeout: seconds without progress after which `wait` raises.
    """

    def __init__(self, world: World, name: str, timeout: float) -> None:
        self._world, self._name, self.timeout = world, name, timeout
        self._queue = world.queue()
        self._idle = world.event()
        self._jobs_so_far = _Count()
        self._interrupted = ""
        """Why waiting is no use."""
        self._jobs: list[AnyJob] = []
        self._thread: Thread | None = None
        self.close = weakref.finalize(self, self._queue.put, None)
        """End the thread when all submitted jobs have finished; also called when the worker is garbage-collected."""
        self.close.atexit = False

    @property
    def idle(self) -> bool:
        """Whether all submitted jobs have finished."""
        return self._jobs_so_far.finished == self._jobs_so_far.submitted

    def submit(self, job: AnyJob) -> None:
        """Run ``job()`` after all earlier jobs."""
        if self._thread is None:
            queue, idle, jobs, now = self._queue, self._idle, self._jobs_so_far, self._world.now

            def loop() -> None:  # must not refer to the worker, or it would never be collected
                while (run := queue.get()) is not None:
                    run()
                    del run  # a job holds its bucket
                    jobs.last_end = now()
                    jobs.finished += 1
                    if jobs.finished == jobs.submitted:  # else the waiting thread would wake only to wait on
                        idle.set()

            self._thread = self._world.spawn(loop, self._name)
        self._jobs_so_far.submitted += 1
        self._jobs.append(job)
        self._queue.put(job)

    def wait(self) -> list[AnyJob]:
        """Wait until all jobs submitted since the last call have finished; return them.

        Raises:
            CommunicationTimeoutError: none finished within the timeout; names the running job.
            CommunicationError: the ranks wait for each other and none can go on.
        """
        with self._world.waiting_for_own_thread(self._interrupt):
            self._wait()
        jobs, self._jobs = self._jobs, []
        return jobs

    def _interrupt(self, reason: str) -> None:
        self._interrupted = reason
        self._idle.set()

    def _wait(self) -> None:
        jobs, now = self._jobs_so_far, self._world.now
        begin = now()
        while (before := jobs.finished) < jobs.submitted:
            self._idle.clear()
            if self._interrupted:
                raise CommunicationError(self._interrupted)
            left = max(0.0, max(begin, jobs.last_end) + self.timeout - now())
            if jobs.finished == before and not self._idle.wait(left) and jobs.finished == before:
                running = self._jobs[before - jobs.submitted]
                raise CommunicationTimeoutError(f"no progress for {self.timeout:g} s: {running.describe()}")

    def join(self) -> None:
        """Wait for the thread to end after `close`, at most the timeout."""
        if self._thread is not None and not self._interrupted:
            self._thread.join(self.timeout)


class _Count:
    """How many jobs there have been."""

    submitted = 0
    """Only the submitting thread writes it."""
    finished = 0
    """Only the worker's thread writes this one and the next."""
    last_end = -math.inf
    """The time at which the last one finished."""
