"""Judgement of programs of `torch.distributed`: runs under many schedules in other processes, and
the first error in words.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from bagua_ref.simulation.findings import (
    NO_VERDICT,
    Finding,
    after_fault,
    depends_on_hash_seed,
    first_difference,
    not_repeatable,
    notes,
    nothing_communicates,
    own_error,
    used_early,
)
from bagua_ref.simulation.observation import Observation, Order, observe
from bagua_ref.simulation.programs import Program
from bagua_ref.simulation.schedules import Fault, Schedule, Schedules, SeededSchedule
from bagua_ref.simulation.timing import Timeline

_SHRINKING = 100
"""Maximal number of runs in the search for a simpler schedule."""

_EXTRA = 5.0
"""Minimal seconds of that search, even beyond the time limit."""


@dataclass(frozen=True)
class Exploration:
    """Settings of the search: the runs to make.

    Attributes:
        nodes: the number of ranks on each node.
        seeds: the number of random schedules.
        deviations: maximal number of deviations; all schedules up to it replace random ones. None:
            ``seeds`` counts.
        limit: seconds for the first run, which imports everything, and for all the others.
        schedule: the only schedule to run; None: many.
        faults: kinds of faults to try at every communication of every rank.
        fault: the only fault to try.
        compares_stdout: whether the ranks' output must be the same in all schedules.
        hash_seeds: values of PYTHONHASHSEED to compare. Two strings of a set have the same order
            under all of four with probability 1/8.
        processes: maximal number of processes at a time.
    """

    nodes: tuple[int, ...]
    seeds: int = 100
    deviations: int | None = None
    limit: float = 60.0
    schedule: Schedule | None = None
    faults: tuple[str, ...] = ()
    fault: Fault | None = None
    compares_stdout: bool = False
    hash_seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


@dataclass
class Judgement:
    """The verdict on a program.

    Attributes:
        finding: the first error; None if no run had an error.
        hints: observations that are odd, but not errors.
        runs: the number of completed runs.
        planned: the number of runs of a complete search; None: unknown.
        is_complete: whether the search was completed.
        timeline: with a link, the times of a run in the default schedule without an error.
        values: the result of each rank of a function in that run.
    """

    finding: Finding | None = None
    hints: list[str] = field(default_factory=list)
    runs: int = 0
    planned: int | None = None
    is_complete: bool = False
    timeline: Timeline | None = None
    values: list[Any] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The verdict: ``"agree"``, ``"found"`` or ``"undecided"``."""
        if self.finding is not None:
            return "undecided" if self.finding.kind in NO_VERDICT else "found"
        return "agree" if self.is_complete else "undecided"


def judge(
    program: Program,
    search: Exploration,
    progress: Callable[[Judgement], None] = lambda report: None,
) -> Judgement:
    """Run a program under many schedules, and return the verdict.

    First comes the default schedule, whose output is shown, and the same once more in another
    process: if the two differ, later runs are judged one by one. Then come the comparisons with the
    first: asynchronous operations that act at once, other schedules, other values of
    PYTHONHASHSEED, and faults.

    Args:
        program: program to run on every rank.
        search: settings of the search.
        progress: called after each run.
    """
    _warm_up(program)
    report = Judgement()
    with (
        Workers(
            program, search.nodes, search.processes, time.monotonic() + search.limit
        ) as workers,
        suppress(TimeoutError),
    ):
        report.finding = _Judge(program, search, workers, report, progress).find()
        report.is_complete = True
    return report


def _warm_up(program: Program) -> None:
    """Import slow modules before processes are forked: those of `init_process_group`, and those of
    FSDP2 and device meshes if needed.
    """
    importlib.import_module("torch._dynamo")
    source = Path(program.name).read_text(errors="replace") if program.is_script else "fsdp"
    if any(word in source for word in ("fsdp", "DTensor", "DeviceMesh", "device_mesh")):
        importlib.import_module("torch.distributed.tensor")


def _is_equal(one: Observation, other: Observation) -> bool:
    """Return whether two runs in the same schedule send the same data and end in the same way."""
    if own_error(one) or own_error(other):
        return one.message == other.message and one.sent == other.sent
    return not_repeatable(one, other) is None


_COMPARED = ("schedule", "early_use", "hash_seed", "not_repeatable")
"""Findings that compare two runs."""


@dataclass
class _Judge:
    """The search for a program's first error.

    Attributes:
        program: program to run.
        search: settings of the search.
        workers: worker processes.
        report: report to fill in.
        progress: called after each run.
        unstable: reason why runs cannot be compared with each other.
        memory: uninitialised memory that is sent, if no result depends on it.
    """

    program: Program
    search: Exploration
    workers: Workers
    report: Judgement
    progress: Callable[[Judgement], None]
    unstable: Finding | None = None
    memory: Finding | None = None

    def find(self) -> Finding | None:
        """Return the first error; raise TimeoutError at the time limit."""
        fault = self.search.fault
        self.first = first = self._one(
            Order(self.search.schedule or Schedule(), shows=True, fault=fault)
        )
        # It has imported what the program needs, which later runs need not wait for.
        self.workers.end = time.monotonic() + self.search.limit
        self.report.hints = first.hints + notes(first)
        self.report.values = [pickle.loads(value) for _, value in sorted(first.values.items())]  # noqa: S301 # of our own fork
        if fault is not None:
            return after_fault(self._one(Order()), first)
        alone = self.program.function is not None or self.search.schedule is not None
        seeds = () if alone or not first.uses_hashes else self.search.hash_seeds
        self.hash_seed_orders = [Order(hash_seed=seed) for seed in seeds]
        self.faulty_orders = [
            Order(fault=Fault(kind, rank, number))
            for kind in self.search.faults
            for rank, calls in enumerate(first.log)
            for number in range(1 if kind == "slow" else len(calls))
        ]
        if error := own_error(first) or nothing_communicates(first):
            self.report.hints = [hint for hint in self.report.hints if hint not in error.message]
            return error
        filled = replace(first.order, shows=False, again=True, fills=True)
        self.unstable = not_repeatable(first, again := self._one(filled))
        if self.unstable is not None:
            # What is not initialised is the same in two runs that fill it; what is random is not.
            is_memory = _is_equal(again, self._one(filled))
            if again.kind or not is_memory:
                # not in the process whose free memory has been filled
                plain = self._one(replace(first.order, shows=False))
                error = own_error(plain)
                if error is not None and (not is_memory or plain.message == again.message):
                    return error
                if not is_memory:
                    self.unstable = not_repeatable(first, plain) or self.unstable
            if is_memory and (again.kind or first_difference(first, again, False)):
                self._times()  # and no more runs, which may do anything
                return self.unstable
            if is_memory:
                self.memory, self.unstable = self.unstable, None
        phases = [self._times, self._schedules]
        if self.unstable is None:
            phases = [
                self._times,
                self._early_use,
                self._schedules,
                self._hash_seeds,
                self._faults,
            ]
        finding = next(filter(None, (phase() for phase in phases)), self.unstable)
        if self.memory is not None and finding is not None and finding.kind in _COMPARED:
            return self.memory
        if self.memory is not None:
            self.report.hints.append(
                "memory that is not initialised is sent:"
                f" {self.memory.change}, and no result changes"
            )
        return finding

    def _times(self) -> None:
        """Store the times of the first run; if compute is to be measured, those of an additional
        run used for nothing else.
        """
        seen = self.first
        if self.program.link is not None and self.program.compute is None and not seen.kind:
            seen = self._one(Order(seen.order.schedule, measures=True))
            if seen.kind:
                self.report.hints.append(
                    f"no times: in the run that measures compute, {seen.message}"
                )
        self.report.timeline = seen.timeline

    def _early_use(self) -> Finding | None:
        def differs(lines: Sequence[tuple[str, int]]) -> bool:
            seen = self._one(Order(self.first.order.schedule, prompt=lines))
            sends_otherwise = self.first.log == seen.log and self.first.sent != seen.sent
            return self._differs(seen) is not None or (self.memory is None and sends_otherwise)

        lines = sorted({(call.file, call.line) for calls in self.first.log for call in calls})
        if not differs(lines):
            return None
        return used_early(self.first, next((line for line in lines if differs([line])), None))

    def _schedules(self) -> Finding | None:
        if self.search.schedule is not None:
            return None if self.unstable else self._compared(self._one(Order()), self.first)
        if self.search.deviations is None:
            self._plan(self.search.seeds)
            runs = self._carry_out(Order(SeededSchedule(seed)) for seed in range(self.search.seeds))
            return next(filter(None, map(self._examined, runs)), None)
        schedules = Schedules(self.search.deviations, 10**9)
        for seen in self._carry_out(
            Order(taken) if (taken := schedules.take()) else None for _ in repeat(None)
        ):
            if not seen.kind:
                schedules.add_variants(seen.order.schedule)
            finding = self._examined(seen)
            if finding is not None:
                return finding
        return None

    def _plan(self, runs: int) -> None:
        """Update the number of planned runs: ``runs`` more, and those of the last two phases."""
        self.report.planned = (
            self.report.runs + runs + len(self.hash_seed_orders) + len(self.faulty_orders)
        )

    def _hash_seeds(self) -> Finding | None:
        self._plan(0)
        for seen in self._carry_out(iter(self.hash_seed_orders)):
            finding = (
                depends_on_hash_seed(self.first, seen)
                if self.memory is None
                else self._differs(seen)
            )
            if finding is not None:
                self.report.planned = self.report.runs + 1
                return not_repeatable(seen, self._one(seen.order)) or finding
        return None

    def _faults(self) -> Finding | None:
        runs = self._carry_out(iter(self.faulty_orders))
        return next(filter(None, (after_fault(self.first, seen) for seen in runs)), None)

    def _one(self, order: Order) -> Observation:
        [seen] = self._carry_out(iter([order]))
        return seen

    def _carry_out(self, orders: Iterator[Order | None]) -> Iterator[Observation]:
        """Run orders on the workers, several at a time, and count the runs."""
        for seen in self.workers.carry_out(orders):
            self.report.runs += 1
            self.progress(self.report)
            yield seen

    def _differs(self, seen: Observation) -> Finding | None:
        if self.unstable is not None:
            return own_error(seen)
        return own_error(seen) or self._compared(self.first, seen)

    def _compared(self, first: Observation, seen: Observation) -> Finding | None:
        return first_difference(first, seen, self.search.compares_stdout)

    def _examined(self, seen: Observation) -> Finding | None:
        """Return a run's error, with its schedule reduced to as few deviations as possible."""
        finding = self._differs(seen)
        if finding is None:
            return None
        self.workers.end = max(self.workers.end, time.monotonic() + _EXTRA)
        last, places = self.report.runs + _SHRINKING, seen.order.schedule.places()
        size = len(places) // 2
        with suppress(TimeoutError):
            while size and self.report.runs < last:
                parts = [places[start : start + size] for start in range(0, len(places), size)]
                for fewer in parts + [
                    [place for place in places if place not in part] for part in parts
                ]:
                    other = self._differs(self._one(Order(seen.order.schedule.only(fewer))))
                    if other is not None and other.kind == finding.kind:
                        finding, places, size = other, fewer, len(fewer)
                        break
                size //= 2
        return finding


class Workers:
    """Worker processes that observe runs of one program; each run has an empty working folder.

    Args:
        program: program to run.
        nodes: the number of ranks on each node.
        count: maximal number of concurrent runs.
        end: deadline, by `time.monotonic`.
    """

    def __init__(self, program: Program, nodes: Sequence[int], count: int, end: float) -> None:
        self.end = end
        self._program, self._nodes, self._count = program, tuple(nodes), count
        self._processes: list[Any] = []
        self._idle: dict[tuple[int | None, bool], list[tuple[Any, Connection]]] = defaultdict(list)
        self._folder = tempfile.TemporaryDirectory(
            prefix="bagua-ref-sim-", ignore_cleanup_errors=True
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def carry_out(self, orders: Iterator[Order | None]) -> Iterator[Observation]:
        """Run orders, several at a time; yield their records in order of completion.

        Args:
            orders: the orders; None means that the next one depends on running ones.

        Raises:
            TimeoutError: the deadline has passed.
        """
        running: dict[Any, tuple[Any, Connection, Order]] = {}
        while True:
            while len(running) < self._count and (order := next(orders, None)) is not None:
                idle = self._idle[order.hash_seed, order.again]
                process, connection = idle.pop() if idle else self._new_worker(order.hash_seed)
                connection.send(order)
                running[connection] = process, connection, order
            if not running:
                return
            ended = wait(list(running), max(0.0, self.end - time.monotonic()))
            if not ended:
                raise TimeoutError
            for process, connection, order in map(running.pop, ended):
                try:
                    seen = connection.recv()
                    self._idle[order.hash_seed, order.again].append((process, connection))
                except (EOFError, ConnectionResetError):
                    process.join()
                    code = process.exitcode
                    how = (
                        f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    )
                    seen = Observation(
                        order, kind="crash", message=f"the process of the run ended with {how}"
                    )
                yield seen

    def _new_worker(self, hash_seed: int | None) -> tuple[Any, Connection]:
        """Return a worker: a fork of this process, or a new interpreter with a hash seed."""
        ours, theirs = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context("fork" if hash_seed is None else "spawn")
        process = context.Process(
            target=_serve, args=(theirs, self._folder.name, self._program, self._nodes)
        )
        with mock.patch.dict(
            os.environ, {} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}
        ):
            process.start()
        theirs.close()
        self._processes.append(process)
        return process, ours


def _serve(connection: Connection, folder: str, program: Program, nodes: Sequence[int]) -> None:
    """Main loop of a worker: run orders until the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    # a worker with a hash seed was spawned; the program's own processes start as they usually do
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    parent: Any = multiprocessing.parent_process()
    program = program.absolute()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while connection in wait([connection, parent.sentinel]):
            order: Order = connection.recv()
            with tempfile.TemporaryDirectory(dir=folder) as own:
                os.chdir(program.folder or own)
                if compiler := sys.modules.get("torch._dynamo"):
                    compiler.reset()  # what earlier runs have compiled
                seen = observe(program, nodes, order)
                os.chdir("/")
            connection.send(seen)
