"""Verdicts on programs of `torch.distributed`: runs under many schedules, and the first error in words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bagua_ref.simulation.faults import Fault, faults
from bagua_ref.simulation.findings import Finding, after_fault, depends_on_hash_seed, first_difference, own_error, used_early
from bagua_ref.simulation.observation import Observation, Order
from bagua_ref.simulation.programs import Program
from bagua_ref.simulation.schedules import Schedule, Schedules, SeededSchedule
from bagua_ref.simulation.timing import Timeline
from bagua_ref.simulation.workers import Workers

__all__ = ["Exploration", "Judgement", "judge"]

_SHRINKING = 100
"""The most runs to look for a simpler schedule."""


@dataclass(frozen=True)
class Exploration:
    """What to run.

    Attributes:
        nodes: the number of ranks on each node.
        seeds: the number of schedules that are drawn at random.
        deviations: instead, all schedules with at most so many deviations; None: ``seeds`` counts.
        limit: seconds after which the search ends.
        schedule: the only schedule to run; None: many.
        faults: kinds of faults to try at every communication of every rank.
        fault: the only fault to try.
        compares_stdout: whether what ranks print must be the same in all schedules.
        hash_seeds: values of PYTHONHASHSEED to compare. Two strings of a set have the same order under all of four with
            probability 1/8.
        processes: the most at a time.
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
    processes: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Judgement:
    """The verdict on a program.

    Attributes:
        finding: the first error; None: there was none in the runs made.
        hints: what is odd, but no error.
        runs: the number of runs made, not counting those that looked for a simpler schedule.
        planned: the number of runs that the search would have made; None: unknown.
        is_complete: whether the search came to its end.
        timeline: with a link, the times of a run in the default schedule without an error.
    """

    finding: Finding | None = None
    hints: list[str] = field(default_factory=list)
    runs: int = 0
    planned: int | None = None
    is_complete: bool = False
    timeline: Timeline | None = None

    @property
    def verdict(self) -> str:
        """``"agree"``, ``"found"`` or ``"undecided"``."""
        if self.finding is not None:
            return "undecided" if self.finding.kind == "unsupported" else "found"
        return "agree" if self.is_complete else "undecided"


def judge(program: Program, search: Exploration, progress: Callable[[Judgement], None] = lambda report: None) -> Judgement:
    """Run a program under many schedules, and return the verdict.

    First comes the default schedule, whose output is shown, then the comparisons with it: asynchronous operations that act at
    once, other schedules, other values of PYTHONHASHSEED, and faults.

    Args:
        program: to run on every rank.
        search: what to run.
        progress: called after each run.
    """
    report = Judgement()
    with Workers(program, search.nodes, search.processes) as workers:
        _Judge(program, search, workers, report, progress).run()
    return report


class _Judge:
    def __init__(
        self, program: Program, search: Exploration, workers: Workers, report: Judgement, progress: Callable[[Judgement], None]
    ) -> None:
        self._program, self._search, self._workers, self._report, self._progress = program, search, workers, report, progress
        self._end = time.monotonic() + search.limit

    def run(self) -> None:
        """Fill the report."""
        first = self._one(Order(self._search.schedule or Schedule(), shows=True, fault=self._search.fault))
        if first is None:
            return
        self._report.hints = first.hints
        self._first = first
        if self._search.fault is not None:
            self._report.finding = after_fault(self._search.fault, self._baseline(), first)
        else:
            self._report.finding = own_error(first)
        if self._report.finding is None and self._search.fault is None:
            for phase in (self._times, self._early_use, self._schedules, self._hash_seeds, self._faults):
                if not phase() or self._report.finding is not None:
                    return
        self._report.is_complete = True

    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _one(self, order: Order, workers: Workers | None = None) -> Observation | None:
        seen = (workers or self._workers).run(order, self._left())
        if seen is not None:
            self._report.runs += 1
            self._progress(self._report)
        return seen

    def _baseline(self) -> Observation | None:
        return self._one(Order())

    # The phases; each returns whether it came to its end.

    def _times(self) -> bool:
        """Take the times of the first run, or of another whose compute is measured, which nothing else is compared with."""
        seen: Observation | None = self._first
        if self._program.link is not None and self._program.compute is None:
            seen = self._one(Order(self._first.schedule, measures=True))
            if seen is not None and seen.kind:
                self._report.hints.append(f"no times: in the run that measures compute, {seen.message}")
        self._report.timeline = None if seen is None else seen.timeline
        return seen is not None

    def _early_use(self) -> bool:
        lines = {(call.file, call.line) for calls in self._first.log for call in calls}
        seen = self._one(Order(self._first.schedule, prompt=lines))
        if seen is None:
            return False
        if self._differs(seen) is not None:
            found = _differing_line(lines, lambda some: self._one(Order(self._first.schedule, prompt=some)), self._differs)
            self._report.finding = used_early(self._first, found)
        return True

    def _schedules(self) -> bool:
        if self._search.schedule is not None:
            reference = self._baseline() if str(self._search.schedule) != "default" else self._first
            self._report.finding = None if reference is None else self._compared(reference, self._first)
            return reference is not None
        if self._search.deviations is None:
            self._report.planned = self._report.runs + self._search.seeds
            seeded = (Order(SeededSchedule(seed)) for seed in range(self._search.seeds))
            return self._search_in(lambda: next(seeded, None), self._examined)
        schedules = Schedules(self._search.deviations, 10**9)

        def take() -> Order | None:
            schedule = schedules.take()
            return None if schedule is None else Order(schedule)

        def examine(order: Order, seen: Observation) -> Finding | None:
            if not seen.kind:
                schedules.add_variants(seen.schedule)
            return self._examined(order, seen)

        return self._search_in(take, examine)

    def _hash_seeds(self) -> bool:
        if self._program.function is not None or self._search.schedule is not None:
            return True
        for seed in self._search.hash_seeds:
            with Workers(self._program, self._search.nodes, 1, hash_seed=seed) as workers:
                seen = self._one(Order(), workers)
            if seen is None:
                return False
            finding = depends_on_hash_seed(self._first, seen)
            if finding is not None:
                with Workers(self._program, self._search.nodes, 1, hash_seed=seed) as workers:
                    again = self._one(Order(), workers)
                if again is not None and again.sent != seen.sent:
                    finding.kind = "not_repeatable"
                    finding.message = f"the program does not do the same twice in the same schedule: {finding.message}"
                self._report.finding = finding
                break
        return True

    def _faults(self) -> bool:
        struck = list(faults(self._search.faults, [len(calls) for calls in self._first.log]))
        self._report.planned = self._report.runs + len(struck)
        orders = (Order(fault=fault) for fault in struck)

        def examine(order: Order, seen: Observation) -> Finding | None:
            assert order.fault is not None
            return after_fault(order.fault, self._first, seen)

        return self._search_in(lambda: next(orders, None), examine)

    def _search_in(self, take: Callable[[], Order | None], examine: Callable[[Order, Observation], Finding | None]) -> bool:
        """Carry out orders, several at a time, until there are no more or one has a finding; return False if time is up first."""
        while self._report.finding is None:
            while self._workers.is_free() and (order := take()) is not None:
                self._workers.start(order)
            if not self._workers.running:
                break
            found = self._workers.results(self._left())
            if not found:
                return False
            for order, seen in found:
                self._report.runs += 1
                self._progress(self._report)
                self._report.finding = self._report.finding or examine(order, seen)
        return True

    def _examined(self, order: Order, seen: Observation) -> Finding | None:
        finding = self._differs(seen)
        return finding and self._shrunk(finding, seen)

    def _differs(self, seen: Observation) -> Finding | None:
        return own_error(seen) or self._compared(self._first, seen)

    def _compared(self, first: Observation, seen: Observation) -> Finding | None:
        return first_difference(first, seen, self._search.compares_stdout)

    def _shrunk(self, finding: Finding, seen: Observation) -> Finding:
        """Return a finding of the same kind in a schedule with as few deviations as possible."""
        best, kept, runs = finding, seen.schedule, 0
        best.schedule = kept
        with Workers(self._program, self._search.nodes, 1) as workers:
            parts = 1
            while kept.deviations() and runs < _SHRINKING:
                places = kept.places()
                size = -(-len(places) // parts)
                pieces = [places[at : at + size] for at in range(0, len(places), size)]
                candidates = [piece for piece in pieces if len(piece) < len(places)]
                candidates += [[place for place in places if place not in piece] for piece in pieces if 1 < parts != 2]
                for candidate in candidates:
                    schedule = kept.only(candidate)
                    tried = workers.run(Order(schedule), max(self._left(), 5.0))
                    runs += 1
                    other = None if tried is None else self._differs(tried)
                    if tried is None or runs >= _SHRINKING:
                        return best
                    if other is not None and other.kind == finding.kind and tried.message.find("has been run") == -1:
                        best, kept, parts = other, schedule, 1
                        best.schedule = schedule
                        break
                else:
                    if size == 1:
                        break
                    parts = min(2 * parts, len(places))
        return best


def _differing_line(
    lines: Iterable[tuple[str, int]],
    run: Callable[[set[tuple[str, int]]], Observation | None],
    differs: Callable[[Observation], Finding | None],
) -> tuple[str, int] | None:
    """Return the line whose operations, if they act at once, change the result; None if no single one does."""
    for line in sorted(lines):
        seen = run({line})
        if seen is None or differs(seen) is not None:
            return line if seen is not None else None
    return None
