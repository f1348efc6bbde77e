"""Verdicts on programs of `torch.distributed`: runs under many schedules, and the first error in words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from bagua_ref.communicators.scheduler import format_ranks
from bagua_ref.errors import RankCall
from bagua_ref.simulation.faults import Fault, faults
from bagua_ref.simulation.observation import Observation, Order, Step
from bagua_ref.simulation.programs import Program
from bagua_ref.simulation.schedules import Schedule, Schedules, SeededSchedule
from bagua_ref.simulation.workers import Workers

__all__ = ["Exploration", "Finding", "Report", "judge"]

_SHRINKING = 100
"""The most runs to look for a simpler schedule."""


@dataclass
class Finding:
    """An error of a program.

    Attributes:
        kind: ``"deadlock"``, ``"ended"``, ``"mismatch"``, ``"not_in_group"``, ``"exception"``, ``"invariant"``, ``"replicas"``,
            ``"schedule"``, ``"early_use"``, ``"hash_seed"``, ``"not_repeatable"``, ``"fault"``, ``"crash"``, ``"unyielding"``,
            or ``"unsupported"``, which says nothing about the program.
        message: the error in words, with ranks, files and lines.
        rank: one of the ranks concerned; None if there is none.
        file: of that rank's line.
        line: of the user's code; 0: unknown.
        step: the number of the optimizer step, from 0, or None.
        schedule: in which it occurs.
        fault: with which it occurs, or None.
    """

    kind: str
    message: str
    rank: int | None = None
    file: str = ""
    line: int = 0
    step: int | None = None
    schedule: Schedule = field(default_factory=Schedule)
    fault: Fault | None = None


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
        workers: the most processes at a time.
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
    workers: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Report:
    """The verdict on a program.

    Attributes:
        finding: the first error; None: there was none in the runs made.
        hints: what is odd, but no error.
        runs: the number of runs made, not counting those that looked for a simpler schedule.
        planned: the number of runs that the search would have made; None: unknown.
        is_complete: whether the search came to its end.
    """

    finding: Finding | None = None
    hints: list[str] = field(default_factory=list)
    runs: int = 0
    planned: int | None = None
    is_complete: bool = False

    @property
    def verdict(self) -> str:
        """``"agree"``, ``"found"`` or ``"undecided"``."""
        if self.finding is not None:
            return "undecided" if self.finding.kind == "unsupported" else "found"
        return "agree" if self.is_complete else "undecided"


def judge(program: Program, search: Exploration, progress: Callable[[Report], None] = lambda report: None) -> Report:
    """Run a program under many schedules, and return the verdict.

    First comes the default schedule, whose output is shown, then the comparisons with it: asynchronous operations that act at
    once, other schedules, other values of PYTHONHASHSEED, and faults.

    Args:
        program: to run on every rank.
        search: what to run.
        progress: called after each run.
    """
    report = Report()
    with Workers(program, search.nodes, search.workers) as workers:
        _Judge(program, search, workers, report, progress).run()
    return report


class _Judge:
    def __init__(
        self, program: Program, search: Exploration, workers: Workers, report: Report, progress: Callable[[Report], None]
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
            self._report.finding = _after_fault(self._search.fault, self._baseline(), first)
        else:
            self._report.finding = _own_error(first)
        if self._report.finding is None and self._search.fault is None:
            for phase in (self._early_use, self._schedules, self._hash_seeds, self._faults):
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

    def _early_use(self) -> bool:
        lines = {(call.file, call.line) for calls in self._first.log for call in calls}
        seen = self._one(Order(self._first.schedule, prompt=lines))
        if seen is None:
            return False
        if self._differs(seen) is not None:
            found = _differing_line(lines, lambda some: self._one(Order(self._first.schedule, prompt=some)), self._differs)
            self._report.finding = _used_early(self._first, found)
        return True

    def _schedules(self) -> bool:
        if self._search.schedule is not None:
            reference = self._baseline() if self._search.schedule.deviations() else self._first
            self._report.finding = None if reference is None else self._compared(reference, self._first)
            return reference is not None
        source = _Seeds(self._search.seeds) if self._search.deviations is None else Schedules(self._search.deviations, 10**9)
        self._report.planned = self._report.runs + self._search.seeds if self._search.deviations is None else None
        for seen in self._many(source):
            finding = self._differs(seen)
            if finding is not None:
                self._report.finding = self._shrunk(finding, seen)
                return True
        return source.complete

    def _hash_seeds(self) -> bool:
        if self._program.function is not None or self._search.schedule is not None:
            return True
        for seed in self._search.hash_seeds:
            with Workers(self._program, self._search.nodes, 1, hash_seed=seed) as workers:
                seen = self._one(Order(), workers)
            if seen is None:
                return False
            finding = _depends_on_hash_seed(self._first, seen)
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
        orders = [Order(fault=fault) for fault in faults(self._search.faults, [len(calls) for calls in self._first.log])]
        self._report.planned = self._report.runs + len(orders)
        waiting = list(reversed(orders))
        while waiting or self._workers.running:
            while waiting and self._workers.is_free():
                self._workers.start(waiting.pop())
            found = self._workers.results(self._left())
            if not found:
                return False
            for order, seen in found:
                self._report.runs += 1
                self._progress(self._report)
                assert order.fault is not None
                self._report.finding = self._report.finding or _after_fault(order.fault, self._first, seen)
            if self._report.finding is not None:
                return True
        return True

    def _many(self, source: _Seeds | Schedules) -> Iterator[Observation]:
        """Yield what was seen in each run of a search, until the time limit."""
        while True:
            while self._workers.is_free() and (schedule := source.take()) is not None:
                self._workers.start(Order(schedule))
            if not self._workers.running:
                return
            found = self._workers.results(self._left())
            if not found:
                return
            for _, seen in found:
                self._report.runs += 1
                self._progress(self._report)
                if not seen.kind:
                    source.add_variants(seen.schedule)
                yield seen

    def _differs(self, seen: Observation) -> Finding | None:
        return _own_error(seen) or self._compared(self._first, seen)

    def _compared(self, first: Observation, seen: Observation) -> Finding | None:
        return _first_difference(first, seen, self._search.compares_stdout)

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


class _Seeds:
    """Schedules of the seeds 0, 1, ..., with the interface of `Schedules`."""

    def __init__(self, count: int) -> None:
        self._waiting = [SeededSchedule(seed) for seed in reversed(range(count))]
        self.complete = not count

    def take(self) -> Schedule | None:
        """Return the next schedule to run; None if there is none."""
        self.complete = len(self._waiting) <= 1
        return self._waiting.pop() if self._waiting else None

    def add_variants(self, schedule: Schedule) -> None:
        """Do nothing: a seed has no variants."""


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


# The words.


def _own_error(seen: Observation) -> Finding | None:
    """Return the error that one run shows by itself."""
    if not seen.kind:
        return _different_replicas(seen.steps)
    call = _primary(seen.calls)
    if seen.kind in ("deadlock", "ended"):
        head = "deadlock: " if seen.kind == "deadlock" else "a rank has ended while others communicate: "
        text = head + "; ".join(_waits(call) for call in seen.calls)
        if seen.kind == "ended":
            waiting = {call.rank for call in seen.calls}
            over = [rank for rank in range(len(seen.log)) if rank not in waiting]
            text += f"; {format_ranks(over)} {'has' if len(over) == 1 else 'have'} ended" + "".join(
                _last(seen, rank) for rank in over[:1]
            )
    elif seen.kind == "exception":
        text = f"exception on rank {call.rank} at {place(call.file, call.line)}: {seen.message}" if call else seen.message
    elif seen.kind == "mismatch" and len(seen.calls) > 1:
        text = (
            "calls do not match: "
            + ", but ".join(f"rank {call.rank} calls {call.operation} at {place(call.file, call.line)}" for call in seen.calls)
            + f" in group {seen.calls[0].group!r}"
        )
    else:
        text = seen.message + (f" (rank {call.rank} at {place(call.file, call.line)})" if call and call.line else "")
    if call is None:
        return Finding(seen.kind, text, schedule=seen.schedule)
    return Finding(seen.kind, text, call.rank, call.file, call.line, schedule=seen.schedule)


def _last(seen: Observation, rank: int) -> str:
    calls = seen.log[rank]
    if not calls:
        return " without any communication"
    return f" after {calls[-1].operation} at {place(calls[-1].file, calls[-1].line)}"


def _primary(calls: Sequence[RankCall]) -> RankCall | None:
    """Return the call of the ranks that are in the minority; of equally many, the last."""
    lines = [(call.file, call.line) for call in calls]
    return min(reversed(calls), key=lambda call: lines.count((call.file, call.line))) if calls else None


def _waits(call: RankCall) -> str:
    thread = f" in thread {call.thread!r}" if call.thread else ""
    whom = f" for {format_ranks(sorted(call.waits_for))}" if call.waits_for else ""
    return f"rank {call.rank} waits{thread} in {call.operation}{whom} since {place(call.file, call.line)}"


def place(file: str, line: int) -> str:
    """Return a line of a file as text, with a path as short as possible."""
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}" if file else "an unknown line"


def _different_replicas(steps: Sequence[Sequence[Step]]) -> Finding | None:
    """Return the first optimizer step after which replicas of a parameter differ."""
    for number, row in enumerate(zip_longest(*steps)):
        for rank, step in enumerate(row):
            if step is None:
                continue
            for name in step.parameters:
                other = min(step.replicas.get(name) or step.reduced or (rank,))
                reference = row[other] if other < len(row) else None
                if reference is None or name not in reference.parameters or reference.parameters[name] == step.parameters[name]:
                    continue
                if name in step.replicas or (step.gradients and step.gradients == reference.gradients):
                    text = f"replicas differ: rank {rank}'s parameter {name!r} is not rank {other}'s after optimizer step {number}"
                    why = (
                        "" if name in step.replicas else ", though their gradients are equal: did they start with different values?"
                    )
                    text += f" at {place(step.file, step.line)}{why}"
                    return Finding("replicas", text, rank, step.file, step.line, number)
    everything = [step for own in steps for step in own]
    for group in (
        {} if any(step.joined for step in everything) else {ranks: None for step in everything for ranks in step.replicas.values()}
    ):
        own = {rank: [step for step in steps[rank] if group in step.replicas.values()] for rank in group}
        fewest, most = (pick(group, key=lambda rank: len(own[rank])) for pick in (min, max))
        if len(own[fewest]) < len(own[most]):
            extra = own[most][len(own[fewest])]
            text = (
                f"replicas differ: rank {fewest} makes {len(own[fewest])} optimizer steps, but rank {most} makes {len(own[most])}"
            )
            text += f" at {place(extra.file, extra.line)}"
            return Finding("replicas", text, fewest, extra.file, extra.line, len(own[fewest]))
    return None


def _first_difference(first: Observation, seen: Observation, compares_stdout: bool) -> Finding | None:
    """Return what the second run computed differently from the first, as far as both are without an error."""
    if first.kind:
        return None
    found: list[tuple[int, Finding]] = []
    for rank, (expected, own) in enumerate(zip(first.steps, seen.steps, strict=True)):
        for number, (before, after) in enumerate(zip(expected, own, strict=False)):
            names = [name for name in before.parameters if after.parameters.get(name) != before.parameters[name]]
            if names:
                text = f"results depend on the schedule: rank {rank}'s parameter {names[0]!r} differs first after optimizer step {number}"
                text += f" at {place(after.file, after.line)}"
                found.append((number, Finding("schedule", text, rank, after.file, after.line, number, seen.schedule)))
                break
        else:
            if len(expected) != len(own):
                last = max(expected, own, key=len)[-1]
                text = f"results depend on the schedule: rank {rank} makes {len(own)} optimizer steps instead of {len(expected)}"
                text += f" at {place(last.file, last.line)}"
                finding = Finding("schedule", text, rank, last.file, last.line, len(own), seen.schedule)
                found.append((min(len(own), len(expected)), finding))
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    for what, before_all, after_all in (("returns", first.returned, seen.returned), ("prints", first.stdout, seen.stdout)):
        for rank, (before_one, after_one) in enumerate(zip(before_all, after_all, strict=True)):
            if before_one != after_one and (what == "returns" or compares_stdout):
                return Finding(
                    "schedule", f"results depend on the schedule: rank {rank} {what} something else", rank, schedule=seen.schedule
                )
    return None


def _used_early(first: Observation, line: tuple[str, int] | None) -> Finding:
    calls = [call for calls in first.log for call in calls if line is None or (call.file, call.line) == line]
    call = calls[0]
    where = f"{call.operation} of rank {call.rank}, started at {place(call.file, call.line)}" if line else "several operations"
    text = f"results depend on when asynchronous operations act: a tensor of {where}, is used before wait()"
    return Finding("early_use", text, call.rank, call.file, call.line, schedule=first.schedule)


def _depends_on_hash_seed(first: Observation, seen: Observation) -> Finding | None:
    if seen.kind:
        return _own_error(seen)
    for rank, (expected, own) in enumerate(zip(first.sent, seen.sent, strict=True)):
        for number in range(max(len(expected), len(own))):
            if expected[number : number + 1] != own[number : number + 1]:
                call = (first.log[rank] if number < len(expected) else seen.log[rank])[number]
                text = f"communication {number} of rank {rank}, {call.operation} at {place(call.file, call.line)}, sends something else "
                text += "under another PYTHONHASHSEED: ranks iterate over a set, or use hash(), in an order of their own"
                return Finding("hash_seed", text, rank, call.file, call.line)
    return None


def _after_fault(fault: Fault, first: Observation | None, seen: Observation) -> Finding | None:
    """Return how a run with a fault went wrong: survivors must raise, or go on with equal and finite replicas."""
    finding = _own_error(seen)
    survivors = [step if rank != fault.rank or fault.kind == "slow" else [] for rank, step in enumerate(seen.steps)]
    if finding is None or finding.kind == "replicas":
        finding = _different_replicas(survivors)
    if finding is None and fault.kind == "slow" and first is not None:
        finding = _first_difference(first, seen, False)
        failed = next((rank for rank, text in enumerate(seen.exceptions) if text), None)
        if failed is not None:
            finding = Finding("fault", f"rank {failed} raises {seen.exceptions[failed]}", failed)
    if finding is None and first is not None and all(step.is_finite for steps in first.steps for step in steps):
        for rank, steps in enumerate(survivors):
            for number, step in enumerate(steps):
                if not step.is_finite and finding is None:
                    text = f"rank {rank} trains on the values of a failed collective: its parameters are NaN after optimizer step {number}"
                    finding = Finding("fault", f"{text} at {place(step.file, step.line)}", rank, step.file, step.line, number)
    if finding is None:
        return None
    calls = first.log[fault.rank] if first is not None else seen.log[fault.rank]
    call = calls[fault.number] if fault.number < len(calls) else None
    where = f" at its communication {fault.number}" + (f", {call.operation} at {place(call.file, call.line)}" if call else "")
    what = {"kill": "is killed", "stop": "stops for longer than the timeout", "slow": "is slow"}[fault.kind]
    finding.message = f"rank {fault.rank} {what}{where}; then {finding.message}"
    finding.kind, finding.fault = "fault", fault
    return finding
