"""Isolation of checks: one that hangs is killed, one that crashes gets a verdict, and the run continues with the next.

Checks run in forked processes, one after another in the same process until one fails: what follows it gets a new process. Where
forking is unsafe (CUDA is in use, or the system cannot fork), each check runs on a thread. A thread that hangs is abandoned, and a
crash ends the run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import queue
import signal
import threading
import time
import warnings
from collections.abc import Collection
from typing import Any

import torch

from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.lab.lab import script_of_call
from bagua_ref.conformance.run.search import Outcome, Search, search
from bagua_ref.conformance.suites.checks import Check, prepare
from bagua_ref.conformance.targets.target import Target

__all__ = ["CheckTask", "InProcess", "OnThread", "Worker", "can_fork"]


def can_fork(target: Target) -> bool:
    """Return whether checks of the target may run in forked processes."""
    uses_cuda = target.device.type == "cuda" or torch.cuda.is_initialized()
    return "fork" in multiprocessing.get_all_start_methods() and not uses_cuda


class CheckTask:
    """A running check for some dtypes; `poll` collects its outcomes."""

    def __init__(
        self, check: Check, dtypes: list[str | None], target: Target, how: Search, time_limit: float, journal: Journal | None = None
    ) -> None:
        self.check, self.waiting, self.target, self.how, self.time_limit = check, list(dtypes), target, how, time_limit
        self.journal = Journal() if journal is None else journal
        self.passed = True
        """Whether all outcomes so far have passed."""
        self._begun = time.perf_counter()

    def poll(self) -> list[tuple[str | None, Outcome]]:
        """Return the outcomes since the last call; the task is done when no dtype is waiting."""
        found = self._collect()
        if not self.waiting:
            return found
        if self.journal.seconds() > self.time_limit:
            self.stop()
            verdict = self._verdict(f"no answer within {self.time_limit:g} s", "does not return")
        elif (death := self._death()) is not None:
            found += self._collect()
            if not self.waiting:
                return found
            verdict = self._verdict(f"the process died: {death}", "ends the process")
        else:
            return found
        self.passed = False
        found.append((self.waiting.pop(0), verdict))
        # Other dtypes most likely do the same, each after the same wait.
        for dtype in self.waiting:
            found.append((dtype, Outcome(False, f"not tried: {verdict.message}, for another dtype", verdict.snippet)))
        self.waiting.clear()
        return found

    def _collect(self) -> list[tuple[str | None, Outcome]]:
        found = self._receive()
        for dtype, outcome in found:
            self.waiting.remove(dtype)
            self.passed &= outcome.passed
        return found

    def _verdict(self, message: str, comment: str) -> Outcome:
        last = self.journal.last()
        snippet = ""
        if last is not None:
            method, arguments = last
            message = f"{method}: {message}"
            if isinstance(arguments, str):
                snippet = _commented(arguments, comment)
            elif arguments is not None:
                snippet = str(script_of_call(self.target.setup, method, arguments, comment))
        return Outcome(False, message, snippet, self.journal.calls, time.perf_counter() - self._begun)

    def _receive(self) -> list[tuple[str | None, Outcome]]:
        raise NotImplementedError

    def _death(self) -> str | None:
        raise NotImplementedError

    def stop(self) -> None:
        """Stop the task."""
        raise NotImplementedError


def _commented(script: str, comment: str) -> str:
    """Return a script with a comment on its last statement, or above it if it has several lines."""
    lines = script.rstrip().splitlines()
    if not lines[-1].startswith(" "):
        lines[-1] += f"  # {comment}"
    else:
        inside = (" ", "else", "except", "finally")
        first = next(place for place in reversed(range(len(lines))) if lines[place] and not lines[place].startswith(inside))
        lines.insert(first, f"# {comment}:")
    return "\n".join([*lines, ""])


class Worker:
    """A forked process that runs checks, one after another.

    Args:
        checks: checks that it may be given.
        target: the implementation under test.
        how: settings of the search.
    """

    def __init__(self, checks: Collection[Check], target: Target, how: Search) -> None:
        for suite in {check.suite for check in checks}:
            prepare(suite)
        self.journal = Journal()
        context = multiprocessing.get_context("fork")
        self.pipe, other_end = context.Pipe()
        self.process = context.Process(
            target=self._work, args=(other_end, {check.id: check for check in checks}, target, how), daemon=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the child of a process with threads uses one thread only
            self.process.start()
        other_end.close()

    def _work(self, pipe: Any, checks: dict[str, Check], target: Target, how: Search) -> None:
        self.pipe.close()  # so that the parent's end is the last one, and its death ends this process
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
        gc.freeze()  # collecting what the parent left would copy all of its memory, again and again
        faulthandler.disable()  # the verdict reports how the process died
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        with contextlib.suppress(EOFError):
            while True:
                name, dtypes = pipe.recv()
                for dtype in dtypes:
                    pipe.send((dtype, search(checks[name], dtype, target, how, self.journal)))

    def stop(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class InProcess(CheckTask):
    """A task in a forked process.

    Args:
        worker: the process; None: a new one.
    """

    def __init__(
        self, check: Check, dtypes: list[str | None], target: Target, how: Search, time_limit: float, worker: Worker | None = None
    ) -> None:
        self.worker = Worker([check], target, how) if worker is None else worker
        self.worker.journal.clear()
        super().__init__(check, dtypes, target, how, time_limit, self.worker.journal)
        with contextlib.suppress(OSError):  # the process is gone, and `_death` says how
            self.worker.pipe.send((check.id, dtypes))

    def _receive(self) -> list[tuple[str | None, Outcome]]:
        found = []
        with contextlib.suppress(EOFError, OSError):  # the process has ended, and `_death` says how
            while self.worker.pipe.poll():
                found.append(self.worker.pipe.recv())
        return found

    def _death(self) -> str | None:
        if self.worker.process.is_alive():
            return None
        code = self.worker.process.exitcode or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """Kill the process."""
        self.worker.stop()


class OnThread(CheckTask):
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
        """Abandon the thread; it ends before the next dtype."""
        self._abandoned = True
