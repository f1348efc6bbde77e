"""The verdict on the dumps of a job: where its ranks part, who waits for whom, and why."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bagua_ref.base.ranks import USE_JOIN, format_ranks
from bagua_ref.errors import RankCall
from bagua_ref.explain.dumps import LONG, Operation, RankDump, Ranks, Track, read_dumps
from bagua_ref.simulation.call_sites import different_counts, meetings
from bagua_ref.simulation.findings import Finding, after, minority, mismatch, name_shift, waits
from bagua_ref.simulation.tasks import place

__all__ = ["Explanation", "explain"]

_SHOWN = 64
"""Ranks whose lines are compared; of more, some of each different history."""

_ROOTED = ("broadcast", "reduce of", "gather", "scatter")
"""Collectives that end on some ranks before others have come."""

_GUESSES = {
    r"sleep": "sleeps",
    r"_get_data|_next_data|_next_index|dataloader": "waits for its data loader",
    r"save|checkpoint|serialization": "writes a checkpoint for longer than the timeout",
    r"synchronize|\.item\(|\.cpu\(": "waits for its GPU",
}
"""Functions and lines of a rank that does not communicate -> what it looks like."""


@dataclass
class Explanation:
    """What `explain` has found.

    Attributes:
        finding: the error; None if the dumps show none.
        notes: what is odd, but no error.
        cause: a guess at the cause; empty without one.
        certainty: of the cause: "certain", "likely" or "possible".
        waits: who waits for whom.
        dumps: what was read, by rank.
        world_size: the number of ranks of the job, as far as it is known.
        operations: those to which the tracks refer.
        groups: the tracks of each group, by rank; a group is its name and its ranks.
    """

    finding: Finding | None = None
    notes: list[str] = field(default_factory=list)
    cause: str = ""
    certainty: str = ""
    waits: list[RankCall] = field(default_factory=list)
    dumps: dict[int, RankDump] = field(default_factory=dict)
    world_size: int = 0
    operations: list[Operation] = field(default_factory=list)
    groups: dict[tuple[str, Ranks], dict[int, Track]] = field(default_factory=dict)

    def call(self, rank: int, group: str, number: int, whom: Sequence[int] = ()) -> RankCall:
        """Return a call of an operation."""
        text, _, file, line, _, _ = self.operations[number]
        return RankCall(rank, "", text, group, file, line, tuple(whom))


def explain(folder: str | Path) -> Explanation:
    """Explain a job that hangs from the dumps in a folder.

    Raises:
        DumpError: a dump cannot be read, or does not belong to the others.
    """
    dumps = read_dumps(folder)
    known: dict[str, set[Ranks]] = defaultdict(set)
    for dump in dumps.values():
        for name, ranks in dump.groups.items():
            known[name].add(ranks)
    named = [max(ranks) for groups in known.values() for ranks in groups]
    sizes = [dump.world_size - 1 for dump in dumps.values()]
    found = Explanation(dumps=dumps, world_size=max([*dumps, *named, *sizes]) + 1)
    everyone = range(found.world_size)
    numbers: dict[Operation, int] = {}
    for rank, dump in dumps.items():
        ids = [numbers.setdefault(operation, len(numbers)) for operation in dump.operations]
        for name, track in dump.tracks.items():
            groups = [*known[name], everyone] if name == "0" else known[name]
            members = next((ranks for ranks in groups if rank in ranks), ())
            own = found.groups.setdefault((name, members), {})
            own[rank] = track._replace(operations=np.array(ids)[track.operations])
    found.operations = list(numbers)
    for (name, members), tracks in found.groups.items():
        _find_waits(found, name, members or tuple(tracks), tracks)
    _find_waits_of_threads(found)
    found.waits.sort(key=lambda call: (call.rank, call.thread))
    if all(dump.has_ended for dump in dumps.values()) and len(dumps) == found.world_size:
        found.notes += [f"{text}, and went on later" for text in waits(found.waits)]
        found.waits.clear()
    log = _log(found)
    finding = (
        _exception(dumps) or _other_groups(dumps, known) or _mismatch(found) or _waiting(found)
    )
    if finding is None:
        found.notes += meetings(log)
    else:
        name_shift(finding, log, found.waits)
        found.finding = finding
        found.cause, found.certainty = _cause(found, finding, log)
    if gone := [rank for rank in everyone if rank not in dumps]:
        found.notes.append(f"no dump of {format_ranks(gone)}")
    return found


def _find_waits(
    found: Explanation, group: str, members: Sequence[int], tracks: Mapping[int, Track]
) -> None:
    """Find who waits in a group's collectives: for too long, and for ranks that had not come when
    their own dumps were written, which may be at another time.
    """
    dumps = found.dumps
    last = {rank: int(track.numbers[-1]) for rank, track in tracks.items()}
    for rank in members:
        if rank in dumps and dumps[rank].version and dumps[rank].is_complete:
            last.setdefault(rank, 0)
    low, is_stuck = min(last.values()), False
    late, waiting = set[int](), list[tuple[RankCall, int, bool]]()
    for rank, track in tracks.items():
        pending, ahead = np.flatnonzero(track.pending), np.flatnonzero(track.numbers > low)
        chosen = [*np.intersect1d(pending, ahead), *ahead, *pending][:1]
        if not chosen or (dumps[rank].reason == "exit" and not ahead.size):
            continue  # gloo retires operations late
        index = chosen[0]
        call, is_pending = found.call(rank, group, track.operations[index]), track.pending[index]
        if not is_pending and call.operation.startswith(_ROOTED):
            continue  # others that have ended without all ranks have failed
        created, number = track.created[index] / 1e9, int(track.numbers[index])
        own = dumps[rank].time - created
        limit = min(dumps[rank].limit, track.timeouts[index] / 2000 or LONG)
        if dumps[rank].error is not None:
            limit = 0.0
        for other, its in last.items():
            waited = own if dumps[other].reason == "exit" else dumps[other].time - created
            if its < number and waited >= limit:
                late.add(other)
        is_stuck |= not ahead.size and own >= limit
        waiting.append((call, number, is_pending))
    short = []
    for call, number, is_pending in waiting:
        whom = [other for other in late if last[other] < number]
        if whom or is_stuck:
            whom = whom or [other for other in members if other not in dumps]
            where = call.file, call.line
            stacks = (stack for stack in dumps[call.rank].stacks if stack[1:3] == where)
            thread = next((stack.thread for stack in stacks), "")
            found.waits.append(call._replace(thread=thread, waits_for=tuple(sorted(whom))))
        elif is_pending:
            short.append(call)
    found.notes += [f"{text}, but not for long" for text in waits(short)]


def _find_waits_of_threads(found: Explanation) -> None:
    """Find who waits in what no recorder has, such as messages, from stacks."""
    calls = {
        (rank, stack.call["group"], _name(stack.call))
        for rank, dump in found.dumps.items()
        for stack in dump.stacks
        if stack.call
    }
    for rank, dump in found.dumps.items():
        for stack in dump.stacks:
            call = stack.call
            if not call or stack.seconds < dump.limit:
                continue
            whom = call.get("peers")
            if whom is None:
                if call["group"] in dump.tracks:
                    continue
                members = call.get("members") or range(found.world_size)
                key = call["group"], _name(call)
                whom = [other for other in members if (other, *key) not in calls]
            found.waits.append(
                RankCall(
                    rank,
                    stack.thread,
                    call["operation"],
                    call["group"],
                    stack.file,
                    stack.line,
                    tuple(whom),
                )
            )


def _name(call: Mapping[str, str]) -> str:
    return call["operation"].partition(" of ")[0]


def _exception(dumps: Mapping[int, RankDump]) -> Finding | None:
    """Return the first exception of a rank that communication did not raise."""
    for dump in sorted(dumps.values(), key=lambda dump: dump.time):
        error = dump.error
        if error is not None and not error["communication"]:
            file, line = error["file"], error["line"]
            text = f"exception on rank {dump.rank} at {place(file, line)}: {error['type']}: "
            return Finding("exception", text + error["message"], dump.rank, file, line)
    return None


def _other_groups(dumps: Mapping[int, RankDump], known: Mapping[str, set[Ranks]]) -> Finding | None:
    """Return a rank's group that has other ranks for others of them."""
    making = [
        (stack.file, stack.line)
        for dump in dumps.values()
        for stack in dump.stacks
        if stack.call.get("operation", "").startswith("new_group")
    ]
    for name, groups in known.items():
        owners: dict[int, Ranks] = {}
        for group in sorted(groups, key=tuple):
            for rank in group:
                other = owners.setdefault(rank, group)
                if other != group:
                    text = (
                        f"groups do not match: {name!r} has {format_ranks(other)} on some ranks,"
                        f" but {format_ranks(group)} on others"
                    )
                    return Finding("groups", text, rank, *(making or [("", 0)])[-1])
    return None


def _mismatch(found: Explanation) -> Finding | None:
    """Return the first calls that met, but do not match."""
    kinds: dict[str, int] = {}
    ids = [kinds.setdefault(operation.agrees, len(kinds)) for operation in found.operations]
    table, parted = np.array([*ids, -1]), list[tuple[int, int, list[RankCall]]]()
    for (name, _), tracks in found.groups.items():
        end = max(int(track.numbers[-1]) for track in tracks.values())
        width = min(end, max(len(track.numbers) for track in tracks.values()))
        rows = np.full((len(tracks), width), -1)
        for row, track in zip(rows, tracks.values(), strict=True):
            recent = track.numbers > end - width
            row[track.numbers[recent] - (end - width + 1)] = track.operations[recent]
        agrees = table[rows]
        least = np.where(agrees < 0, len(kinds), agrees).min(0)
        differ = np.flatnonzero((agrees.max(0) != least) & (least < len(kinds)))
        if differ.size:
            column = rows[:, differ[0]]
            number = end - width + 1 + int(differ[0])
            calls = [
                found.call(rank, name, operation)
                for rank, operation in zip(tracks, column, strict=True)
                if operation >= 0
            ]
            track = tracks[calls[0].rank]
            parted.append((int(track.created[track.numbers == number][0]), number, calls))
    if parted:
        _, number, calls = min(parted, key=lambda one: one[0])
        odd, text = minority(calls), f"{mismatch(calls)}, as its collective {number}"
        return Finding("mismatch", text, odd.rank, odd.file, odd.line)
    return _mismatch_of_threads(found)


def _mismatch_of_threads(found: Explanation) -> Finding | None:
    """Return the first pair of ranks that send and receive other sizes, or calls of other roots."""
    roots: dict[str, dict[int, RankCall]] = defaultdict(dict)
    for rank, dump in found.dumps.items():
        for stack in dump.stacks:
            call, where = stack.call, place(stack.file, stack.line)
            for other, sent in call.get("sent", {}).items():
                peer = found.dumps.get(int(other))
                for its in peer.stacks if peer else ():
                    received = its.call.get("received", {}).get(str(rank), sent)
                    if received != sent and its.call["group"] == call["group"]:
                        text = (
                            f"sizes do not match: rank {rank} sends {sent} elements to rank {other}"
                            f" in {call['operation']} at {where}, but rank {other} receives"
                            f" {received} in {its.call['operation']} at {place(its.file, its.line)}"
                        )
                        return Finding("mismatch", text, rank, stack.file, stack.line)
            if call.get("root") is not None:
                roots[call["group"]][call["root"]] = RankCall(
                    rank, "", call["operation"], call["group"], stack.file, stack.line
                )
    for calls in roots.values():
        if len(calls) > 1:
            odd = minority([*calls.values()])
            text = mismatch([*calls.values()])
            return Finding("mismatch", text, odd.rank, odd.file, odd.line)
    return None


def _waiting(found: Explanation) -> Finding | None:
    """Return who waits for whom: in a circle, for ranks that do not come, or for nobody."""
    if not found.waits:
        for rank, dump in found.dumps.items():
            if dump.error is not None:
                return Finding("failed", f"rank {rank} reports: {dump.error['message']}", rank)
        return None
    graph: dict[int, set[int]] = defaultdict(set)
    for call in found.waits:
        graph[call.rank] |= set(call.waits_for)
    circle = set(graph)
    while free := {rank for rank in circle if not graph[rank] & circle}:
        circle -= free
    calls = [call for call in found.waits if call.rank in circle] or found.waits
    odd = minority(calls)
    if circle:
        text = f"deadlock: {'; '.join(waits(calls))}"
        return Finding("deadlock", text, odd.rank, odd.file, odd.line)
    roots = _roots(found)
    sentences = [_whereabouts(found, rank) for rank in roots[:3]]
    if len(roots) > 3:
        sentences.append(f"{len(roots) - 3} more do not come")
    if not roots:
        sentences = ["all ranks have come: the network, a device or the backend is stuck"]
    text = "; ".join([*waits(calls), *sentences])
    return Finding("absent" if roots else "stuck", text, odd.rank, odd.file, odd.line)


def _roots(found: Explanation) -> list[int]:
    """Return the ranks for which others wait, and which wait for nobody."""
    awaited = {rank for call in found.waits for rank in call.waits_for}
    return sorted(awaited - {call.rank for call in found.waits})


def _newest(found: Explanation, rank: int) -> tuple[int, list[RankCall]]:
    """Return when a rank made its last call, and the call."""
    calls = [
        (int(tracks[rank].created[-1]), found.call(rank, name, tracks[rank].operations[-1]))
        for (name, _), tracks in found.groups.items()
        if rank in tracks
    ]
    created, call = max(calls, key=lambda one: one[0], default=(0, None))
    return created, [] if call is None else [call]


def _whereabouts(found: Explanation, rank: int) -> str:
    """Describe the activity of a rank that others wait for."""
    dump = found.dumps.get(rank)
    if dump is None:
        return f"rank {rank} has no dump: it has died, or could not write one"
    created, last = _newest(found, rank)
    if dump.reason == "exit":
        return f"rank {rank} has ended{after(last)}"
    latest = max(_newest(found, call.rank)[0] for call in found.waits[:1])
    early = (latest - created) / 1e9
    text = f"rank {rank} makes no call{after(last)}"
    if last and early >= 1:
        text += f", {early:.2g} s" if early < 120 else f", {early / 60:.0f} min"
        text += " before the others' last"
    at = [stack for stack in dump.stacks if stack.file]
    return text + "".join(f"; it is at {place(stack.file, stack.line)}" for stack in at[:1])


def _log(found: Explanation) -> list[list[RankCall]]:
    """Return the calls of each rank that all recorders still have; of many ranks, those of some of
    each history.
    """
    histories: dict[int, list[tuple[int, RankCall]]] = defaultdict(list)
    shown, classes = list(found.dumps), defaultdict[object, list[int]](list)
    if len(shown) > _SHOWN:
        for rank in shown:
            arrays = (of[rank].operations for of in found.groups.values() if rank in of)
            classes[hash(b"".join(array.tobytes() for array in arrays))].append(rank)
        largest = sorted(classes.values(), key=len, reverse=True)
        shown = [*largest[0][:3], *(ranks[0] for ranks in largest[1:_SHOWN])]
    for (name, _), tracks in found.groups.items():
        start = max(int(track.numbers[0]) for track in tracks.values())
        for rank in shown:
            if rank in tracks:
                track = tracks[rank]._asdict()
                keep = track["numbers"] >= start
                for created, number in zip(
                    track["created"][keep], track["operations"][keep], strict=True
                ):
                    histories[rank].append((created, found.call(rank, name, number)))
    return [
        [call for _, call in sorted(histories[rank], key=lambda one: one[0])]
        for rank in range(found.world_size)
    ]


def _cause(found: Explanation, finding: Finding, log: list[list[RankCall]]) -> tuple[str, str]:
    """Return a likely cause of the finding, and how sure it is."""
    kind, calls = finding.kind, found.waits
    if kind == "groups":
        return "groups are created in another order on some ranks", "certain"
    if kind == "exception":
        return f"rank {finding.rank} fails by itself, and the others wait for it", "certain"
    if kind == "mismatch":
        if "(src=" in finding.message or "(dst=" in finding.message:
            return "a root that depends on the rank", "likely"
        at = set(re.findall(r" at (\S+:\d+)", finding.message))
        if len(at) > 1:
            return "a branch that depends on the rank", "likely"
        return "sizes that depend on the rank, such as those of uneven batches", "likely"
    if kind == "deadlock":
        if any("(dst=" in call.operation or "(src=" in call.operation for call in calls):
            return "messages are sent and received in an order that closes a circle", "likely"
        return "ranks use their groups in different orders", "likely"
    for rank in _roots(found):
        dump = found.dumps.get(rank)
        if dump is None:
            return f"rank {rank} has died: look for its own error, or for out of memory", "possible"
        for pattern, guess in _GUESSES.items():
            if any(re.search(pattern, stack.text, re.IGNORECASE) for stack in dump.stacks[:1]):
                return f"rank {rank} {guess}", "likely"
        if different_counts(log, calls):
            return f"uneven batches: {USE_JOIN}", "likely"
        if dump.reason == "exit":
            return f"rank {rank} returns early, or skips a call that others make", "likely"
        return (
            f"rank {rank} computes, or a branch that depends on the rank skips a call",
            "possible",
        )
    return "", ""
