"""A check in a process of its own: one that hangs is ended, one that dies leaves a verdict, and the suite goes on.

Where a process cannot be forked safely (CUDA is in use, or the system cannot fork) the check runs on a thread: what hangs is left
behind, and only what kills the process kills the suite.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import queue
import signal
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.lab.lab import script_of_call
from bagua_ref.conformance.run.search import Outcome, Search, search
from bagua_ref.conformance.suites.checks import prepare

if TYPE_CHECKING:
    from bagua_ref.conformance.suites.checks import Check
    from bagua_ref.conformance.targets.target import Target

__all__ = ["InProcess", "OnThread", "Task", "can_fork"]


def can_fork(target: Target) -> bool:
    """Return whether checks of the target may run in forked processes."""
    uses_cuda = target.device.type == "cuda" or torch.cuda.is_initialized()
    return "fork" in multiprocessing.get_all_start_methods() and not uses_cuda


class Task:
    """A check for some dtypes, running somewhere; `poll` collects its outcomes."""

    def __init__(self, check: Check, dtypes: list[str | None], target: Target, how: Search, time_limit: float) -> None:
        self.check, self.waiting, self.target, self.how, self.time_limit = check, list(dtypes), target, how, time_limit
        self.journal = Journal()
        self._begun = time.perf_counter()

    def poll(self) -> list[tuple[str | None, Outcome]]:
        """Return the outcomes that have come since the last call; the task is done when none is waiting."""
        found = self._receive()
        for dtype, _ in found:
            self.waiting.remove(dtype)
        if not self.waiting:
            self.stop()
            return found
        if self.journal.seconds() > self.time_limit:
            self.stop()
            verdict = self._verdict(f"no answer within {self.time_limit:g} s", "hangs")
        elif (death := self._death()) is not None:
            found += self._late()
            if not self.waiting:
                return found
            verdict = self._verdict(f"the process died: {death}", "dies")
        else:
            return found
        found.append((self.waiting.pop(0), verdict))
        # What one dtype does the others most likely do too, each after the same wait.
        for dtype in self.waiting:
            found.append((dtype, Outcome(False, f"not tried: {verdict.message}, for another dtype", verdict.snippet)))
        self.waiting.clear()
        return found

    def _late(self) -> list[tuple[str | None, Outcome]]:
        found = self._receive()
        for dtype, _ in found:
            self.waiting.remove(dtype)
        return found

    def _verdict(self, message: str, comment: str) -> Outcome:
        last = self.journal.last()
        snippet = ""
        if last is not None:
            method, arguments = last
            message = f"{method}: {message}"
            if isinstance(arguments, str):
                snippet = arguments
            elif arguments is not None:
                snippet = str(script_of_call(self.target.setup, method, arguments, comment))
        return Outcome(False, message, snippet, self.journal.calls, time.perf_counter() - self._begun)

    def _receive(self) -> list[tuple[str | None, Outcome]]:
        raise NotImplementedError

    def _death(self) -> str | None:
        raise NotImplementedError

    def stop(self) -> None:
        """End it."""
        raise NotImplementedError


class InProcess(Task):
    """A task in a forked process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        prepare(self.check.suite)
        context = multiprocessing.get_context("fork")
        self._inbox, outbox = context.Pipe(duplex=False)
        self._process = context.Process(target=self._work, args=(outbox,), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the child of a process with threads uses one thread only
            self._process.start()
        outbox.close()

    def _work(self, outbox: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
        gc.freeze()  # to look through what the parent left, again and again, would copy all of its memory
        faulthandler.disable()  # how the process died is the verdict's to say
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        for dtype in self.waiting:
            outbox.send((dtype, search(self.check, dtype, self.target, self.how, self.journal)))

    def _receive(self) -> list[tuple[str | None, Outcome]]:
        found = []
        try:
            while self._inbox.poll():
                found.append(self._inbox.recv())
        except (EOFError, OSError):
            pass  # it has ended, and `_death` says how
        return found

    def _death(self) -> str | None:
        if self._process.is_alive():
            return None
        code = self._process.exitcode or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self._inbox.close()


class OnThread(Task):
    """A task on a thread of this process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._outcomes: queue.SimpleQueue[tuple[str | None, Outcome]] = queue.SimpleQueue()
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, args=(list(self.waiting),), daemon=True)
        self._thread.start()

    def _work(self, dtypes: list[str | None]) -> None:
        for dtype in dtypes:
            if not self._abandoned:
                self._outcomes.put((dtype, search(self.check, dtype, self.target, self.how, self.journal)))

    def _receive(self) -> list[tuple[str | None, Outcome]]:
        found = []
        while not self._outcomes.empty():
            found.append(self._outcomes.get())
        return found

    def _death(self) -> str | None:
        return None if self._thread.is_alive() else "its thread ended"

    def stop(self) -> None:
        """Leave the thread behind; it ends at the next dtype."""
        self._abandoned = True
