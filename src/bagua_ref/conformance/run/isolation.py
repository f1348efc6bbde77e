"""Isolation of checks: one that hangs is killed, one that crashes gets a verdict, and the run
continues with the next.

Checks run in forked processes, one after another in the same process until one fails: what follows
it gets a new process. Where forking is unsafe (CUDA is in use, or the system cannot fork), each
check runs on a thread. A thread that hangs is abandoned, and a crash ends the run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from bagua_ref.conformance.checks.registry import Check, prepare
from bagua_ref.conformance.lab.journal import Journal, ProcessDied, end_with
from bagua_ref.conformance.lab.lab import script_of_call
from bagua_ref.conformance.lab.violation import Script
from bagua_ref.conformance.run.search import Outcome, Search, search
from bagua_ref.conformance.targets.process_link import exit_text
from bagua_ref.conformance.targets.target import Target

__all__ = ["CheckTask", "Isolation", "can_fork", "wait_for"]


def can_fork(target: Target) -> bool:
    """Return whether checks of the target may run in forked processes."""
    uses_cuda = target.device.type == "cuda" or torch.cuda.is_initialized()
    return "fork" in multiprocessing.get_all_start_methods() and not uses_cuda


def wait_for(tasks: Collection[CheckTask]) -> None:
    """Wait until the process of a task has sent an outcome or died, briefly, as time limits end and
    threads send nothing.
    """
    pipes = [task.place.pipe for task in tasks if isinstance(task.place, _CheckProcess)]
    if len(pipes) == len(tasks):  # also without tasks
        multiprocessing.connection.wait(pipes, 0.05 if pipes else 0)
    else:
        time.sleep(0.005)


class CheckTask:
    """A running check for some dtypes; `poll` collects its outcomes.

    If its process dies, the check is tried once more in another, where a crash is a violation like
    others and its input is made smaller.

    Args:
        place: where it runs.
        check: the check.
        dtypes: names of dtypes, or None.
        target: the implementation under test.
        time_limit: time limit of a single call in seconds.
        another: makes another process; None: the check is not tried again.
    """

    def __init__(
        self,
        place: _CheckProcess | _CheckThread,
        check: Check,
        dtypes: list[str | None],
        target: Target,
        time_limit: float,
        another: Callable[[], _CheckProcess] | None = None,
    ) -> None:
        self.place, self.check, self.waiting, self._target, self._time_limit = (
            place,
            check,
            list(dtypes),
            target,
            time_limit,
        )
        self._another = another
        self._died: Outcome | None = None
        """The verdict on the first process, which has died."""
        self.passed = True
        """Whether all outcomes so far have passed."""
        self._begun = time.perf_counter()
        place.begin(check, dtypes)

    def poll(self) -> list[tuple[str | None, Outcome]]:
        """Return the outcomes since the last call; the task is done when no dtype is waiting."""
        found = self._collect()
        if self.waiting and self.place.journal.seconds() > self._time_limit:
            self.place.stop()
            found += self._fail(
                self._last(f"no answer within {self._time_limit:g} s", "does not return")
            )
        elif self.waiting and (death := self.place.death()) is not None:
            found += self._collect()
            died = self._last(f"the process died: {death}", "ends the process")
            if self._another is None or not self.waiting:
                return found + self._fail(died)
            self.place.stop()
            self.place, self._another, self._died = self._another(), None, died
            self.place.begin(self.check, self.waiting[:1], rehearse=True)
        return found

    def _collect(self) -> list[tuple[str | None, Outcome]]:
        found = self.place.receive()
        if found and self._died is not None:
            return self._fail(_again(self._died, found[0][1]))
        for dtype, outcome in found:
            self.waiting.remove(dtype)
            self.passed &= outcome.passed
        return found

    def _last(self, message: str, comment: str) -> Outcome:
        """Return a verdict on the last call."""
        last, journal, snippet = self.place.journal.last(), self.place.journal, ""
        if last is not None:
            method, arguments = last
            message = f"{method}: {message}"
            if isinstance(arguments, Script):
                snippet = _commented(str(arguments), comment)
            elif arguments is not None:
                snippet = str(script_of_call(self._target.setup, method, arguments, comment))
        return Outcome(False, message, snippet, journal.calls, time.perf_counter() - self._begun)

    def _fail(self, verdict: Outcome) -> list[tuple[str | None, Outcome]]:
        """Return a verdict, and one for each other dtype, which would most likely wait as long for
        the same.
        """
        others = Outcome(False, f"not tried: {verdict.message}, for another dtype", verdict.snippet)
        found = [(dtype, others if place else verdict) for place, dtype in enumerate(self.waiting)]
        self.passed &= not found
        self.waiting.clear()
        return found


def _again(died: Outcome, outcome: Outcome) -> Outcome:
    """Return the verdict on a check whose process died, and which was then tried again."""
    if outcome.passed:
        return replace(died, message=f"{died.message}, but not when all inputs were tried again")
    raised, crashed = f"raised {ProcessDied.__name__}: ", "crashed: "
    if raised not in outcome.message:
        return replace(outcome, message=f"{outcome.message}; and for another input, {died.message}")
    return replace(
        outcome,
        message=outcome.message.replace(raised, crashed),
        snippet=outcome.snippet.replace(raised, crashed),
    )


def _commented(script: str, comment: str) -> str:
    """Return a script with a comment on its last statement, or above it if it has several lines."""
    lines = script.rstrip().splitlines()
    if not lines[-1].startswith(" "):
        lines[-1] += f"  # {comment}"
    else:
        inside = (" ", "else", "except", "finally")
        first = next(
            place
            for place in reversed(range(len(lines)))
            if lines[place] and not lines[place].startswith(inside)
        )
        lines.insert(first, f"# {comment}:")
    return "\n".join([*lines, ""])


class _CheckProcess:
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
        work = (os.getpid(), other_end, {check.id: check for check in checks}, target, how)
        self._process = context.Process(target=self._work, args=work, daemon=True)
        with warnings.catch_warnings():
            # the child of a process with threads uses one thread only
            warnings.simplefilter("ignore")
            self._process.start()
        other_end.close()

    def _work(
        self, parent: int, pipe: Any, checks: dict[str, Check], target: Target, how: Search
    ) -> None:
        os.setpgrp()  # which this process's end does not end, so:
        end_with(parent)
        # so that the parent's end is the last one, and its death ends this process
        self.pipe.close()
        # the parent gets it too, and ends this process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # collecting what the parent left would copy all of its memory, again and again
        faulthandler.disable()  # the verdict reports how the process died
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                name, dtypes, self.journal.rehearses = pipe.recv()
                for dtype in dtypes:
                    pipe.send((dtype, search(checks[name], dtype, target, how, self.journal)))

    def begin(self, check: Check, dtypes: list[str | None], rehearse: bool = False) -> None:
        """Let the process run a check for some dtypes, if asked for with each input in a process of
        its own first.
        """
        self.journal.clear()
        with contextlib.suppress(OSError):  # the process is gone, and `death` says how
            self.pipe.send((check.id, dtypes, rehearse))

    def receive(self) -> list[tuple[str | None, Outcome]]:
        """Return the outcomes since the last call, by dtype."""
        found = []
        with contextlib.suppress(EOFError, OSError):  # the process has ended, and `death` says how
            while self.pipe.poll():
                found.append(self.pipe.recv())
        return found

    def death(self) -> str | None:
        """Return the signal or exit code with which the process died; None if it lives."""
        if self._process.is_alive():
            return None
        return exit_text(self._process.exitcode or 0)

    def stop(self) -> None:
        """Kill the process, and what it has started."""
        if self.pipe.closed:  # it has been stopped
            return
        if self._process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # also if it has no group yet
        self._process.join()
        self.pipe.close()


class _CheckThread:
    """A thread of this process that runs one check."""

    def __init__(self, target: Target, how: Search) -> None:
        self.journal = Journal()
        self._target, self._how, self._abandoned = target, how, False
        self._outcomes: queue.SimpleQueue[tuple[str | None, Outcome]] = queue.SimpleQueue()

    def begin(self, check: Check, dtypes: list[str | None], rehearse: bool = False) -> None:
        """Start the thread; there is no process to rehearse in."""
        self._thread = threading.Thread(target=self._work, args=(check, dtypes), daemon=True)
        self._thread.start()

    def _work(self, check: Check, dtypes: list[str | None]) -> None:
        for dtype in dtypes:
            if not self._abandoned:
                self._outcomes.put(
                    (dtype, search(check, dtype, self._target, self._how, self.journal))
                )

    def receive(self) -> list[tuple[str | None, Outcome]]:
        """Return the outcomes since the last call, by dtype."""
        return [self._outcomes.get() for _ in range(self._outcomes.qsize())]

    def death(self) -> str | None:
        """Return that the thread has ended; None if it has not."""
        return None if self._thread.is_alive() else "its thread ended"

    def stop(self) -> None:
        """Abandon the thread; it ends before the next dtype."""
        self._abandoned = True


class Isolation:
    """The processes or threads in which checks of a target run; a process is kept for the next
    check if all have passed.

    Args:
        checks: checks that may be started.
        target: the implementation under test.
        how: settings of the search.
        time_limit: time limit of a single call in seconds.
        fork: whether to use processes.
    """

    def __init__(
        self, checks: Collection[Check], target: Target, how: Search, time_limit: float, fork: bool
    ) -> None:
        self._checks, self._target, self._how, self._time_limit, self._fork = (
            checks,
            target,
            how,
            time_limit,
            fork,
        )
        self._idle: list[_CheckProcess] = []

    def start(self, check: Check, dtypes: list[str | None]) -> CheckTask:
        """Start a check for some dtypes."""
        if not self._fork:
            return CheckTask(
                _CheckThread(self._target, self._how), check, dtypes, self._target, self._time_limit
            )
        another = functools.partial(_CheckProcess, self._checks, self._target, self._how)
        place = self._idle.pop() if self._idle else another()
        return CheckTask(
            place,
            check,
            dtypes,
            self._target,
            self._time_limit,
            another if self._how.shrink else None,
        )

    def end(self, task: CheckTask, keep: bool = True) -> None:
        """Stop a task, but keep its process if it has passed."""
        if keep and task.passed and not task.waiting and isinstance(task.place, _CheckProcess):
            self._idle.append(task.place)
        else:
            task.place.stop()

    def stop(self) -> None:
        """Stop all idle processes."""
        while self._idle:
            self._idle.pop().stop()
