"""Findings of simulated runs in words: errors of one run, and differences between two."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from bagua_ref.base.ranks import USE_JOIN, format_ranks
from bagua_ref.errors import RankCall
from bagua_ref.simulation.call_sites import (
    different_counts,
    joined_calls,
    meetings,
    shifted,
)
from bagua_ref.simulation.observation import Observation, Step
from bagua_ref.simulation.schedules import Fault, Schedule
from bagua_ref.simulation.tasks import place

NO_VERDICT = frozenset({"unsupported", "not_repeatable", "nothing", "unyielding"})
"""Kinds of findings that are no verdict on the program."""

_SENTENCES = 8
"""Maximal number of ranks with different activities that are listed, before "n more"."""

_DEPEND = "results depend on the schedule"


@dataclass
class Finding:
    """An error of a program.

    Attributes:
        kind: ``"deadlock"``, ``"ended"``, ``"mismatch"``, ``"exception"``,
            ``"invariant"``, ``"replicas"``, ``"schedule"``, ``"early_use"``, ``"hash_seed"``,
            ``"fault"``, ``"crash"``, or one of `NO_VERDICT`.
        message: the error in words, with ranks, files and lines.
        rank: one of the ranks concerned; None if there is none.
        file: file of that rank's line.
        line: line of the user's code; 0: unknown.
        step: the number of the optimizer step, from 0, or None.
        schedule: schedule in which it occurs.
        fault: fault with which it occurs, or None.
        change: the part of the message that says what differs between two runs, if it is one.
    """

    kind: str
    message: str
    rank: int | None = None
    file: str = ""
    line: int = 0
    step: int | None = None
    schedule: Schedule = field(default_factory=Schedule)
    fault: Fault | None = None
    change: str = ""


def own_error(seen: Observation) -> Finding | None:
    """Return the error that a single run shows without comparison."""
    calls = seen.calls
    if not seen.kind:
        finding = (
            _other_modules(seen.log)
            or _different_replicas(seen.steps)
            or _different_counts(seen.steps)
        )
    elif not calls:
        finding = Finding(seen.kind, seen.message)
    else:
        call = minority(calls)
        text = seen.message
        if seen.kind == "deadlock":
            text = f"deadlock: {'; '.join(waits(calls))}"
        elif seen.kind == "ended":
            over = [
                rank for rank in range(len(seen.log)) if rank not in {call.rank for call in calls}
            ]
            text = (
                f"a rank has ended while others communicate: {'; '.join(waits(calls))};"
                f" {format_ranks(over)}"
            )
            text += f" {'has' if len(over) == 1 else 'have'} ended" + "".join(
                after(seen.log[rank][-1:]) for rank in over[:1]
            )
            text += f"; {USE_JOIN}" * seen.message.endswith(USE_JOIN)
        elif seen.kind == "exception":
            text = f"exception on rank {call.rank} at {place(call.file, call.line)}: {seen.message}"
        elif seen.kind == "mismatch" and len(calls) > 1:
            if len({call.operation for call in calls}) > 1:
                text = mismatch(calls)
            else:
                text += f"; {'; '.join(_by_ranks(calls, 'call', _called))}"
        finding = Finding(seen.kind, text, call.rank, call.file, call.line)
    if finding is None:
        return None
    finding.schedule = seen.order.schedule
    if finding.kind == "replicas" or seen.kind in ("deadlock", "ended", "mismatch"):
        name_shift(finding, seen.log, calls, is_joined=_is_joined(seen.steps))
    return finding


def notes(seen: Observation) -> list[str]:
    """Return hints about one run: calls from different lines that met, and steps on unreduced
    gradients.
    """
    found = [] if _is_joined(seen.steps) else meetings(seen.log)
    return found if seen.kind else found + _unreduced(seen.steps, seen.largest)


def _unreduced(steps: Sequence[Sequence[Step]], largest: Sequence[int]) -> list[str]:
    """Return the first step after which a parameter that was equal on two ranks differs, as did its
    gradients: these were not reduced, or only others were.

    Training that averages weights from time to time communicates them later, or makes them equal
    again.
    """
    first = steps[0]
    for rank, own in enumerate(steps[1:], 1):
        pairs = list(zip(first, own, strict=False))
        later = [max(largest[0], largest[rank])] + [
            max(one.largest, two.largest) for one, two in reversed(pairs)
        ]
        before = (pairs[0][0].before, pairs[0][1].before) if pairs else ({}, {})
        for number, (one, two) in enumerate(pairs):
            equal = {name for name, value in before[0].items() if before[1].get(name) == value}
            reduced = [
                name
                for name, value in one.gradients.items()
                if two.gradients.get(name) == value
                and one.elements[name] <= min(one.largest, two.largest)
            ]
            apart = [
                name
                for name in one.gradients
                if name in equal & two.gradients.keys()
                and name not in one.replicas
                and name not in reduced
                and one.parameters[name] != two.parameters[name]
                # beside reduced ones it must not come with them later, as weights do
                and sum(one.elements[other] for other in (name, *reduced))
                > max(later[: len(pairs) - number + 1])
                and all(a.parameters.get(name) != b.parameters.get(name) for a, b in pairs[number:])
            ]
            before = one.parameters, two.parameters
            if apart:
                others = f" and {len(apart) - 1} more" * (len(apart) > 1)
                text = (
                    f"optimizer step {number} uses gradients that no collective has reduced: ranks"
                    f" 0 and {rank} have the same parameter {apart[0]!r}{others} before it, and"
                    " different ones after it"
                )
                return [f"{text}, at {place(two.file, two.line)}: is every backward in no_sync()?"]
    return []


def name_shift(
    finding: Finding,
    log: Sequence[Sequence[RankCall]],
    waiting: Sequence[RankCall],
    *,
    is_joined: bool = False,
) -> None:
    """Prepend to an error's message the collective from which on the ranks' lines differ."""
    shift = None if is_joined else shifted(log)
    counts = different_counts(log, waiting)
    if shift is not None:
        text, call = shift
        finding.message = (
            f"{text}: from there on, the ranks are not at the same lines; {finding.message}"
        )
        finding.rank, finding.file, finding.line = call.rank, call.file, call.line
    elif counts:
        finding.message += f"; {counts}"


def _other_modules(log: Sequence[Sequence[RankCall]]) -> Finding | None:
    """Return the first collective in which FSDP2 mixes the parameters of several modules."""
    for row in joined_calls(log):
        first, *others = row
        for other in others:
            if first.module and other.module and first.module != other.module:
                text = (
                    "FSDP2 mixes the parameters of different modules: rank"
                    f" {first.rank}'s {first.operation} is for module {first.module!r}, but rank"
                    f" {other.rank}'s is for {other.module!r}"
                )
                return _at("mismatch", text, other.rank, other)
    return None


def _at(kind: str, text: str, rank: int, at: Step | RankCall, step: int | None = None) -> Finding:
    """Return a finding for a rank, with the line of a step or call at the end of the text."""
    return Finding(kind, f"{text} at {place(at.file, at.line)}", rank, at.file, at.line, step)


def minority(calls: Sequence[RankCall]) -> RankCall:
    """Return the call made by the fewest ranks; in a tie, the last one."""
    lines = Counter((call.file, call.line) for call in calls)
    return min(reversed(calls), key=lambda call: lines[call.file, call.line])


def after(last: Sequence[RankCall]) -> str:
    """Describe the last call of a rank that has ended, if there is one."""
    return "".join(f" after {_called(call)}" for call in last) or " without any communication"


def waits(calls: Sequence[RankCall]) -> list[str]:
    """Describe who waits for whom, in which call, since which line; ranks with equal waits are
    merged.
    """
    return _by_ranks(calls, "wait", _waited)


def mismatch(calls: Sequence[RankCall]) -> str:
    """Describe calls of one group that met but do not match."""
    each = ", but ".join(_by_ranks(calls, "call", _called))
    return f"calls do not match: {each} in group {calls[0].group!r}"


def _by_ranks(
    calls: Sequence[RankCall], verb: str, describe: Callable[[RankCall], str]
) -> list[str]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        ranks[describe(call)].append(call.rank)
    found = [
        f"{format_ranks(sorted(own))} {verb}{'s' * (len(own) == 1)} {text}"
        for text, own in ranks.items()
    ]
    more = len(found) - _SENTENCES
    return [*found[:_SENTENCES], f"{more} more {verb}"] if more > 0 else found


def _called(call: RankCall) -> str:
    return f"{call.operation} at {place(call.file, call.line)}"


def _waited(call: RankCall) -> str:
    thread = f"in thread {call.thread!r} " if call.thread else ""
    whom = f" for {format_ranks(sorted(call.waits_for))}" if call.waits_for else ""
    return f"{thread}in {call.operation}{whom} since {place(call.file, call.line)}"


def _different_replicas(steps: Sequence[Sequence[Step]]) -> Finding | None:
    """Return the first optimizer step after which replicas of a parameter differ."""
    for number, row in enumerate(zip_longest(*steps)):
        for rank, step in enumerate(row):
            for name in () if step is None else step.parameters:
                group = step.replicas.get(name) or step.reduced
                other = next(
                    (
                        other
                        for other in group
                        if row[other] is not None and name in row[other].parameters
                    ),
                    rank,
                )
                same_gradients = step.gradients and step.gradients == row[other].gradients
                if row[other].parameters[name] == step.parameters[name] or not (
                    name in step.replicas or same_gradients
                ):
                    continue
                text = (
                    f"replicas differ: rank {rank}'s parameter {name!r} is not rank {other}'s after"
                    f" optimizer step {number}"
                )
                finding = _at("replicas", text, rank, step, number)
                if name not in step.replicas:
                    finding.message += (
                        ", though their gradients are equal: did they start with different values?"
                    )
                return finding
    return None


def _is_joined(steps: Sequence[Sequence[Step]]) -> bool:
    """Return whether torch's Join is in use, in which ranks without batches shadow the others'
    collectives at other lines.
    """
    return any(step.joined for own in steps for step in own)


def _different_counts(steps: Sequence[Sequence[Step]]) -> Finding | None:
    """Return the first optimizer step taken by only some of a module's replicas."""
    everything = [step for own in steps for step in own]
    groups = {ranks: None for step in everything for ranks in step.replicas.values()}
    for group in () if _is_joined(steps) else groups:
        own = {
            rank: [step for step in steps[rank] if group in step.replicas.values()]
            for rank in group
        }
        fewest, most = (pick(group, key=lambda rank: len(own[rank])) for pick in (min, max))
        count = len(own[fewest])
        if count < len(own[most]):
            text = (
                f"replicas differ: rank {fewest} makes {count} optimizer steps, but rank {most}"
                f" makes {len(own[most])}"
            )
            return _at("replicas", text, fewest, own[most][count], count)
    return None


def first_difference(
    first: Observation, seen: Observation, compares_stdout: bool
) -> Finding | None:
    """Return the first difference of the second run from the first, up to an error of either."""
    if first.kind:
        return None
    results = [("returns", first.returned, seen.returned)]
    if compares_stdout:
        results.append(("prints", first.stdout, seen.stdout))
    found = [
        *filter(None, map(_different_step, range(len(seen.steps)), first.steps, seen.steps)),
        *(
            Finding("schedule", f"{_DEPEND}: rank {rank} {what} something else", rank)
            for what, before, after in results
            for rank in range(len(after))
            if before[rank] != after[rank]
        ),
    ]
    finding = min(found, key=lambda finding: (finding.step is None, finding.step), default=None)
    if finding is not None:
        finding.schedule = seen.order.schedule
    return finding


def _different_step(rank: int, expected: Sequence[Step], own: Sequence[Step]) -> Finding | None:
    for number, (before, after) in enumerate(zip(expected, own, strict=False)):
        names = [
            name
            for name in before.parameters
            if after.parameters.get(name) != before.parameters[name]
        ]
        if names:
            text = (
                f"{_DEPEND}: rank {rank}'s parameter {names[0]!r} differs first after optimizer"
                f" step {number}"
            )
            return _at("schedule", text, rank, after, number)
    if len(expected) == len(own):
        return None
    text = f"{_DEPEND}: rank {rank} makes {len(own)} optimizer steps instead of {len(expected)}"
    return _at(
        "schedule", text, rank, max(expected, own, key=len)[-1], min(len(own), len(expected))
    )


def used_early(first: Observation, line: tuple[str, int] | None) -> Finding:
    """Return the finding that a tensor of an unfinished operation, started at the line, was
    used.
    """
    calls = [
        call
        for calls in first.log
        for call in calls
        if line is None or (call.file, call.line) == line
    ]
    call = calls[0]
    where = (
        f"{call.operation} of rank {call.rank}, started at {place(call.file, call.line)}"
        if line
        else "several operations"
    )
    text = (
        f"results depend on when asynchronous operations act: a tensor of {where}, is used before"
        " wait()"
    )
    return Finding(
        "early_use", text, call.rank, call.file, call.line, schedule=first.order.schedule
    )


def _changed(first: Observation, seen: Observation) -> tuple[int, RankCall] | None:
    """Return index and call of the first communication that sends different data in the second
    run.
    """
    pairs: Any = zip if seen.kind else zip_longest  # a run that fails has fewer
    changed = [
        (number, rank)
        for rank, sent in enumerate(zip(first.sent, seen.sent, strict=True))
        for number, (before, after) in enumerate(pairs(*sent))
        if before != after
    ]
    number, rank = min(changed, default=(0, None))
    if rank is None:
        return None
    return number, (first.log[rank][number:] or seen.log[rank][number:])[0]


def not_repeatable(first: Observation, again: Observation) -> Finding | None:
    """Return the first value that differs between two runs in the same schedule, which rules out
    claims about races. The second run may have filled uninitialised memory.
    """
    advice = (
        ". Nothing that depends on the schedule can be told from that: seed every generator"
        " (Python's, NumPy's, torch's), and use no values of the system, of memory that is not"
        " initialised, or of time"
    )
    head, change = "the program does not repeat itself: ", "in two runs with the same schedule, "
    if again.order.fills:
        head, change = "memory that is not initialised is used: ", "with other bytes there, "
        advice = (
            ". Nothing that depends on the schedule can be told from that: write before you read"
        )
    changed = _changed(first, again)
    finding = own_error(again) or first_difference(first, again, False)
    if changed is not None:
        _, call = changed
        text = f"rank {call.rank} sends other values in {call.operation}"
        finding = _at("", text, call.rank, call)
    elif finding is not None and not again.kind:
        finding.message = finding.message.partition(": ")[2]
    if finding is None:
        return None
    finding.kind = "not_repeatable"
    finding.change = f"{change}{finding.message}"
    finding.message = f"{head}{finding.change}{advice}"
    return finding


def nothing_communicates(first: Observation) -> Finding | None:
    """Return the finding that there is nothing to judge, if no rank of a run has communicated."""
    if first.kind or any(first.log):
        return None
    lines = [text.strip().splitlines()[-1] for text in first.stdout if text.strip()]
    last = f"; the last that a rank prints is {lines[0]!r}" if lines else ""
    return Finding(
        "nothing",
        "no rank communicates: the program ends without a collective, a message or a process group"
        f"{last}",
    )


def depends_on_hash_seed(first: Observation, seen: Observation) -> Finding | None:
    """Return the first communication that differs in an interpreter with another PYTHONHASHSEED."""
    if seen.kind:
        return own_error(seen)
    changed = _changed(first, seen)
    if changed is None:
        return None
    number, call = changed
    text = (
        f"communication {number} of rank {call.rank}, {call.operation} at"
        f" {place(call.file, call.line)}, sends something else under another PYTHONHASHSEED: each"
        " rank iterates over a set, or uses hash(), in an order of its own"
    )
    return Finding("hash_seed", text, call.rank, call.file, call.line)


def after_fault(first: Observation, seen: Observation) -> Finding | None:
    """Return the failure of a run with a fault, if any: survivors must raise, or continue with
    equal and finite replicas.
    """
    fault, finding = seen.order.fault, own_error(seen)
    assert fault is not None
    survivors = [
        step if rank != fault.rank or fault.kind == "slow" else []
        for rank, step in enumerate(seen.steps)
    ]
    if finding is None or finding.kind == "replicas":
        finding = _different_replicas(survivors)
    if finding is None and fault.kind == "slow":
        failed = (
            Finding("fault", f"rank {rank} raises {text}", rank)
            for rank, text in enumerate(seen.exceptions)
            if text
        )
        finding = next(failed, None) or first_difference(first, seen, False)
    if finding is None and all(step.is_finite for steps in first.steps for step in steps):
        text = (
            "trains on the values of a failed collective: parameters are NaN after optimizer step"
        )
        nan = (
            _at("fault", f"rank {rank} {text} {number}", rank, step, number)
            for rank, steps in enumerate(survivors)
            for number, step in enumerate(steps)
            if not step.is_finite
        )
        finding = next(nan, None)
    if finding is None:
        return None
    calls = first.log[fault.rank]
    call = calls[fault.number] if fault.number < len(calls) else None
    where = f" at its communication {fault.number}" + (
        f", {call.operation} at {place(call.file, call.line)}" if call else ""
    )
    what = {"kill": "is killed", "stop": "stops for longer than the timeout", "slow": "is slow"}[
        fault.kind
    ]
    finding.message = f"rank {fault.rank} {what}{where}; then {finding.message}"
    finding.kind, finding.fault = "fault", fault
    return finding
