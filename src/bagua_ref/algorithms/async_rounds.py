"""The rounds of asynchronous model averaging, on a thread of their own (S3.6, S5.6)."""

from __future__ import annotations

from enum import Enum

from bagua_ref.base.runtime import Thread, World
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.comm_ops import AsynchronousModelAverage
from bagua_ref.errors import CommunicationError
from bagua_ref.observe.flight_recorder import explain
from bagua_ref.observe.meter import Meter, use_meter
from bagua_ref.types import Group

__all__ = ["TRANSITIONS", "Rounds", "State"]


class State(Enum):
    """State of averaging on this rank; `TRANSITIONS` lists the allowed changes, which only `Rounds` makes."""

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


class Rounds:
    """The averaging thread of one rank, and its state.

    Args:
        world: starts the thread.
        name: of the thread.
        buckets: of weights, each with one asynchronous operation.
        group: used by this thread only; closed when training ends, so that a waiting thread ends, too.
        interval: seconds between the end of a round and the next.
        meter: counts for the training.
    """

    def __init__(self, world: World, name: str, buckets: list[BaguaBucket], group: Group, interval: float, meter: Meter) -> None:
        self._world, self._name, self._buckets, self._group, self._interval = world, name, buckets, group, interval
        self._meter = meter
        self.ops: list[AsynchronousModelAverage] = [bucket._async_op for bucket in buckets]
        self.state = State.IDLE
        self.error: BaseException | None = None
        self.completed = 0
        self._wake = world.event()
        self._thread: Thread | None = None
        self._forgotten = False

    def _go(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def start(self) -> None:
        """Start averaging, unless it is running or was aborted."""
        if self.state is State.IDLE:
            self._go(State.RUNNING)
            self._spawn()

    def stop(self) -> None:
        """Wait until all ranks have called this; averaging continues until then. A second call does nothing.

        Raises:
            CommunicationError: a round failed.
        """
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

    def resume(self) -> None:
        """Let the next forward pass start averaging again after `stop`."""
        if self.state is State.ABORTED:
            for op in self.ops:
                op.reset()
            self._go(State.IDLE)

    def restore(self, aborted: bool) -> None:
        """Take over whether averaging was aborted, which all ranks have saved alike, without communication."""
        if not aborted:
            self.resume()
        elif self.state is State.IDLE:
            self._go(State.ABORTED)

    def raise_failure(self) -> None:
        """Raise the error that ended the thread, if any, once; averaging is then aborted."""
        if self.state is State.FAILED:
            error, self.error = self.error, None
            self._go(State.ABORTED)
            raise CommunicationError(
                f"asynchronous averaging stopped in round {self.completed}: {type(error).__name__}: {error}. Every rank must call "
                "abort() before it ends"
            ) from error

    def forget(self) -> None:
        """End the thread without waiting for the other ranks; training has ended on this rank."""
        self._forgotten = True
        self._wake.set()
        self._group.close()

    def _spawn(self) -> None:
        self._wake.clear()
        with use_meter(self._meter):
            self._thread = self._world.spawn(self._run, self._name)

    def _run(self) -> None:
        try:
            while not self._forgotten:
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
