"""Findings of simulated runs in words: errors of one run, and differences between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from bagua_ref.communicators.call_sites import place
from bagua_ref.communicators.tasks import format_ranks
from bagua_ref.errors import RankCall
from bagua_ref.simulation.faults import Fault
from bagua_ref.simulation.observation import Observation, Step
from bagua_ref.simulation.schedules import Schedule

__all__ = ["Finding", "after_fault", "depends_on_hash_seed", "first_difference", "own_error", "used_early"]

_DEPEND = "results depend on the schedule"


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


def own_error(seen: Observation) -> Finding | None:
    """Return the error that one run shows by itself."""
    if not seen.kind:
        return _different_replicas(seen.steps) or _different_counts(seen.steps)
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
        text = seen.message
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


def _different_replicas(steps: Sequence[Sequence[Step]]) -> Finding | None:
    """Return the first optimizer step after which replicas of a parameter differ."""
    for number, row in enumerate(zip_longest(*steps)):
        for rank, step in enumerate(row):
            for name in () if step is None else step.parameters:
                group = step.replicas.get(name) or step.reduced
                other = next((other for other in group if row[other] is not None and name in row[other].parameters), rank)
                same_gradients = step.gradients and step.gradients == row[other].gradients
                if row[other].parameters[name] == step.parameters[name] or not (name in step.replicas or same_gradients):
                    continue
                text = f"replicas differ: rank {rank}'s parameter {name!r} is not rank {other}'s after optimizer step {number}"
                text += f" at {place(step.file, step.line)}"
                if name not in step.replicas:
                    text += ", though their gradients are equal: did they start with different values?"
                return Finding("replicas", text, rank, step.file, step.line, number)
    return None


def _different_counts(steps: Sequence[Sequence[Step]]) -> Finding | None:
    """Return the first optimizer step that only some of the replicas of a module make."""
    everything = [step for own in steps for step in own]
    groups = {ranks: None for step in everything for ranks in step.replicas.values()}
    for group in () if any(step.joined for step in everything) else groups:
        own = {rank: [step for step in steps[rank] if group in step.replicas.values()] for rank in group}
        fewest, most = (pick(group, key=lambda rank: len(own[rank])) for pick in (min, max))
        count = len(own[fewest])
        if count < len(own[most]):
            extra = own[most][count]
            text = f"replicas differ: rank {fewest} makes {count} optimizer steps, but rank {most} makes {len(own[most])}"
            text += f" at {place(extra.file, extra.line)}"
            return Finding("replicas", text, fewest, extra.file, extra.line, count)
    return None


def first_difference(first: Observation, seen: Observation, compares_stdout: bool) -> Finding | None:
    """Return what the second run computed differently from the first, as far as both are without an error."""
    if first.kind:
        return None
    found: list[tuple[int, Finding]] = []
    for rank, (expected, own) in enumerate(zip(first.steps, seen.steps, strict=True)):
        for number, (before, after) in enumerate(zip(expected, own, strict=False)):
            names = [name for name in before.parameters if after.parameters.get(name) != before.parameters[name]]
            if names:
                text = f"{_DEPEND}: rank {rank}'s parameter {names[0]!r} differs first after optimizer step {number}"
                text += f" at {place(after.file, after.line)}"
                found.append((number, Finding("schedule", text, rank, after.file, after.line, number, seen.schedule)))
                break
        else:
            if len(expected) != len(own):
                last = max(expected, own, key=len)[-1]
                text = f"{_DEPEND}: rank {rank} makes {len(own)} optimizer steps instead of {len(expected)}"
                text += f" at {place(last.file, last.line)}"
                finding = Finding("schedule", text, rank, last.file, last.line, len(own), seen.schedule)
                found.append((min(len(own), len(expected)), finding))
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    for what, before_all, after_all in (("returns", first.returned, seen.returned), ("prints", first.stdout, seen.stdout)):
        for rank, (before_one, after_one) in enumerate(zip(before_all, after_all, strict=True)):
            if before_one != after_one and (what == "returns" or compares_stdout):
                return Finding("schedule", f"{_DEPEND}: rank {rank} {what} something else", rank, schedule=seen.schedule)
    return None


def used_early(first: Observation, line: tuple[str, int] | None) -> Finding:
    """Return the use of a tensor of an operation under way, which the line started."""
    calls = [call for calls in first.log for call in calls if line is None or (call.file, call.line) == line]
    call = calls[0]
    where = f"{call.operation} of rank {call.rank}, started at {place(call.file, call.line)}" if line else "several operations"
    text = f"results depend on when asynchronous operations act: a tensor of {where}, is used before wait()"
    return Finding("early_use", text, call.rank, call.file, call.line, schedule=first.schedule)


def depends_on_hash_seed(first: Observation, seen: Observation) -> Finding | None:
    """Return the first communication that differs in an interpreter with another PYTHONHASHSEED."""
    if seen.kind:
        return own_error(seen)
    for rank, (expected, own) in enumerate(zip(first.sent, seen.sent, strict=True)):
        for number in range(max(len(expected), len(own))):
            if expected[number : number + 1] != own[number : number + 1]:
                call = (first.log[rank] if number < len(expected) else seen.log[rank])[number]
                text = f"communication {number} of rank {rank}, {call.operation} at {place(call.file, call.line)}, sends something "
                text += "else under another PYTHONHASHSEED: each rank iterates over a set, or uses hash(), in an order of its own"
                return Finding("hash_seed", text, rank, call.file, call.line)
    return None


def after_fault(fault: Fault, first: Observation | None, seen: Observation) -> Finding | None:
    """Return how a run with a fault went wrong: survivors must raise, or go on with equal and finite replicas."""
    finding = own_error(seen)
    survivors = [step if rank != fault.rank or fault.kind == "slow" else [] for rank, step in enumerate(seen.steps)]
    if finding is None or finding.kind == "replicas":
        finding = _different_replicas(survivors)
    if finding is None and fault.kind == "slow" and first is not None:
        finding = first_difference(first, seen, False)
        failed = next((rank for rank, text in enumerate(seen.exceptions) if text), None)
        if failed is not None:
            finding = Finding("fault", f"rank {failed} raises {seen.exceptions[failed]}", failed)
    if finding is None and first is not None and all(step.is_finite for steps in first.steps for step in steps):
        for rank, steps in enumerate(survivors):
            for number, step in enumerate(steps):
                if not step.is_finite and finding is None:
                    text = (
                        f"rank {rank} trains on the values of a failed collective: parameters are NaN after optimizer step {number}"
                    )
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
