"""One background thread that runs jobs in order, and the wait for them (S2.4, S2.5)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from bagua_ref.errors import CommunicationTimeoutError

if TYPE_CHECKING:
    from bagua_ref.runtime import Thread, World

__all__ = ["Job", "Worker"]


class Job(Protocol):
    """Something to run; it keeps its own error instead of raising, and says what it is at."""

    def __call__(self) -> None: ...  # noqa: D102
    def describe(self) -> str: ...  # noqa: D102


AnyJob = TypeVar("AnyJob", bound=Job)


class Worker(Generic[AnyJob]):
    """Runs jobs one after the other on a thread of its own, started with the first job and ended with the worker.

    Jobs and waits come from one thread at a time.

    Args:
        world: starts the thread.
        name: of the thread.
        timeout: seconds without progress after which `wait` gives up.
    """

    def __init__(self, world: World, name: str, timeout: float) -> None:
        self._world, self._name, self.timeout = world, name, timeout
        self._queue = world.queue()
        self._progress = world.event()
        self._finished = _Counter()
        self._submitted = 0
        self._jobs: list[AnyJob] = []
        self._thread: Thread | None = None
        self.close = weakref.finalize(self, self._queue.put, None)
        """End the thread once the jobs submitted are finished; called when the worker is collected, too."""
        self.close.atexit = False

    def submit(self, job: AnyJob) -> None:
        """Run ``job()`` after all earlier jobs."""
        if self._thread is None:
            queue, progress, finished = self._queue, self._progress, self._finished

            def loop() -> None:  # must not refer to the worker, or it would never be collected
                while (run := queue.get()) is not None:
                    run()
                    del run  # a job holds its bucket
                    finished.count += 1
                    progress.set()

            self._thread = self._world.spawn(loop, self._name)
        self._submitted += 1
        self._jobs.append(job)
        self._queue.put(job)

    def wait(self) -> list[AnyJob]:
        """Return the jobs submitted since the last wait, once all are finished.

        Raises:
            CommunicationTimeoutError: none finished within the timeout; names the job under way.
        """
        while (before := self._finished.count) < self._submitted:
            self._progress.clear()
            if self._finished.count == before and not self._progress.wait(self.timeout) and self._finished.count == before:
                running = self._jobs[before - self._submitted]
                raise CommunicationTimeoutError(f"no progress for {self.timeout:g} s: {running.describe()}")
        jobs, self._jobs = self._jobs, []
        return jobs

    def join(self) -> None:
        """Wait for the thread to end after `close`, at most the timeout."""
        if self._thread is not None:
            self._thread.join(self.timeout)


class _Counter:
    """How many jobs the thread has finished; only the thread writes it."""

    count = 0
