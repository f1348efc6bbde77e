"""The verdict on the dumps of a job: the divergence of its ranks, who waits for whom, and the
cause.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagua_ref.base.ranks import USE_JOIN, format_ranks
from bagua_ref.errors import RankCall
from bagua_ref.explain.dumps import LONG, Operation, RankDump, Ranks, read_dumps
from bagua_ref.simulation.call_sites import different_counts, meetings
from bagua_ref.simulation.findings import Finding, after, minority, mismatch, name_shift, waits
from bagua_ref.simulation.tasks import place

__all__ = ["Explanation", "explain"]

_COMPARED = 32
"""Number of ranks whose lines are compared, half of them with the rarest sequences of calls."""

_ROOTED = ("broadcast", "reduce of", "gather", "scatter")
"""Collectives in which some ranks may finish before others have started."""

_GUESSES = {
    r"sleep": "sleeps",
    r"_get_data|_next_data|_next_index|dataloader": "waits for its data loader",
    r"save|checkpoint|serialization": "writes a checkpoint for longer than the timeout",
    r"synchronize|\.item\(|\.cpu\(": "waits for its GPU",
}
"""Pattern of functions and lines of a rank that does not communicate -> likely activity."""


@dataclass
class Explanation:
    """The result of `explain`.

    Attributes:
        dumps: the dumps by rank.
        world_size: the number of ranks of the job, as far as known.
        operations: the operations, to which calls refer by index.
        tracks: the collectives of each group and rank, by number, as rows of
            `bagua_ref.explain.dumps.CALL`; a group is its name and its members.
        finding: the error; None if the dumps show none.
        notes: observations that are odd, but not errors.
        cause: likely cause; empty if unknown.
        certainty: certainty of the cause: "certain", "likely" or "possible".
        waits: the waiting calls, with the ranks that they wait for.
    """

    dumps: dict[int, RankDump]
    world_size: int
    operations: list[Operation]
    tracks: dict[tuple[str, Ranks], dict[int, NDArray[Any]]]
    finding: Finding | None = None
    notes: list[str] = field(default_factory=list)
    cause: str = ""
    certainty: str = ""
    waits: list[RankCall] = field(default_factory=list)

    def call(self, row: Any) -> RankCall:
        """Return a row of a track as a `RankCall`."""
        group, text, _, file, line = self.operations[row["operation"]]
        return RankCall(int(row["rank"]), "", text, group, file, line)


def explain(folder: str | Path) -> Explanation:
    """Explain a job that hangs from the dumps in a folder.

    Raises:
        DumpError: a dump cannot be read, or does not belong to the others.
    """
    dumps = read_dumps(folder)
    named = [max(ranks) for dump in dumps.values() for ranks in dump.groups.values()]
    size = 1 + max([*dumps, *named, *(dump.world_size - 1 for dump in dumps.values())])
    found = _joined(dumps, size)
    for (_, members), tracks in found.tracks.items():
        _find_waits(found, members or tuple(tracks), tracks)
    _find_waits_of_threads(found)
    found.waits.sort(key=lambda call: (call.rank, call.thread))
    if all(dump.has_ended for dump in dumps.values()) and len(dumps) == size:
        found.notes += [f"{text}, and went on later" for text in waits(found.waits)]
        found.waits.clear()
    log = _log(found)
    checks = _exception, _other_groups, _mismatch, _mismatch_of_threads, _crash, _waiting
    found.finding = next(filter(None, (check(found) for check in checks)), None)
    if found.finding is None:
        found.notes += meetings(log)
    else:
        name_shift(found.finding, log, found.waits)
        found.cause, found.certainty = _cause(found, found.finding, log)
    if gone := [rank for rank in range(size) if rank not in dumps]:
        found.notes.append(f"no dump of {format_ranks(gone)}")
    return found


def _joined(dumps: dict[int, RankDump], size: int) -> Explanation:
    """Merge the calls of all ranks, with common indices of operations."""
    indices, everyone = dict[Operation, int](), tuple(range(size))
    tracks: dict[tuple[str, Ranks], dict[int, NDArray[Any]]] = defaultdict(dict)
    for rank, dump in dumps.items():
        if not dump.calls.size:
            continue
        groups = np.array([one.group for one in dump.operations])[dump.calls["operation"]]
        order = np.lexsort((dump.calls["number"], groups))
        dump.calls, groups = dump.calls[order], groups[order]
        for rows in np.split(dump.calls, np.flatnonzero(groups[1:] != groups[:-1]) + 1):
            name = dump.operations[rows["operation"][0]].group
            members = dump.groups.get(name) or (everyone if name == "0" else ())
            tracks[name, members][rank] = rows
        shared = [indices.setdefault(one, len(indices)) for one in dump.operations]
        dump.calls["operation"] = np.array(shared)[dump.calls["operation"]]
    return Explanation(dumps, size, list(indices), tracks)


def _find_waits(found: Explanation, members: Ranks, tracks: Mapping[int, NDArray[Any]]) -> None:
    """Find the waits in a group's collectives: those beyond the time limit, and those for ranks
    missing in their own dumps, which may be of another time.
    """
    dumps = found.dumps
    last = {rank: int(track["number"][-1]) for rank, track in tracks.items()}
    for rank in members:
        if rank in dumps and dumps[rank].version and dumps[rank].is_complete:
            last.setdefault(rank, 0)
    behind, low = sorted(last, key=last.__getitem__), min(last.values())
    late, waiting, is_stuck = set[int](), list[Any](), False
    for rank, track in tracks.items():
        dump = dumps[rank]
        # calls that other ranks have not joined say most, above all pending ones
        telling = 2 * (track["number"] > low) + track["pending"]
        row, most = track[telling.argmax()], telling.max()
        if most == 0 or (most == 1 and dump.reason == "exit"):
            continue  # gloo retires operations late
        if most == 2 and found.call(row).operation.startswith(_ROOTED):
            continue  # others that have ended without all ranks have failed
        created = row["created"] / 1e9
        limit = min(dump.limit, row["timeout"] / 2000 or LONG) if dump.error is None else 0.0
        is_stuck |= bool(most == 1 and dump.time - created >= limit)
        for other in behind:
            if last[other] >= row["number"]:
                break
            # a rank that has ended will not join
            seen = dump.time if dumps[other].reason == "exit" else dumps[other].time
            if seen - created >= limit:
                late.add(other)
        waiting.append(row)
    short = []
    for row in waiting:
        call = found.call(row)
        whom = [rank for rank in late if last[rank] < row["number"]]
        if whom or is_stuck:
            whom = whom or [rank for rank in members if rank not in last]
            threads = (one.call for one in dumps[call.rank].stacks)
            thread = next((one.thread for one in threads if one[4:6] == call[4:6]), "")
            found.waits.append(call._replace(thread=thread, waits_for=tuple(sorted(whom))))
        elif row["pending"]:
            short.append(call)
    found.notes += [f"{text}, but not for long" for text in waits(short)]


def _find_waits_of_threads(found: Explanation) -> None:
    """Find waits that no flight recorder covers, such as messages, from stacks."""
    stacks = [stack for dump in found.dumps.values() for stack in dump.stacks]
    calls = {(one.call.rank, one.call.group, _name(one.call)) for one in stacks}
    for call, seconds, _, facts in stacks:
        dump = found.dumps[call.rank]
        if not call.operation or seconds < dump.limit:
            continue
        whom = facts.get("peers")
        if whom is None:
            if any(one.group == call.group for one in dump.operations):
                continue  # the recorder knows more
            same = call.group, _name(call)
            members = facts.get("members") or range(found.world_size)
            whom = [rank for rank in members if (rank, *same) not in calls]
        found.waits.append(call._replace(waits_for=tuple(whom)))


def _name(call: RankCall) -> str:
    return call.operation.partition(" of ")[0]


def _at(kind: str, text: str, call: RankCall) -> Finding:
    return Finding(kind, text, call.rank, call.file, call.line)


def _main_call(dump: RankDump) -> RankCall:
    """Return the call of the main thread, without an operation and a line if there is no stack."""
    return dump.stacks[0].call if dump.stacks else RankCall(dump.rank, "", "", "", "", 0)


def _exception(found: Explanation) -> Finding | None:
    """Return the first exception of a rank that was not raised by communication."""
    return _first_error(found, False)


def _crash(found: Explanation) -> Finding | None:
    """Return the first rank whose process ended in native code, which communication may have
    caused.
    """
    return _first_error(found, None)


def _first_error(found: Explanation, communication: bool | None) -> Finding | None:
    for dump in sorted(found.dumps.values(), key=lambda dump: dump.time):
        error = dump.error
        if error is not None and error["communication"] is communication:
            call = _main_call(dump)  # the main thread has raised it
            text = f"exception on rank {dump.rank} at {place(call.file, call.line)}: "
            return _at("exception", f"{text}{error['type']}: {error['message']}", call)
    return None


def _other_groups(found: Explanation) -> Finding | None:
    """Return a finding if ranks disagree on the members of a group."""
    stacks = [stack for dump in found.dumps.values() for stack in dump.stacks]
    making = [one.call for one in stacks if one.call.operation.startswith("new_group")]
    owners: dict[tuple[str, int], Ranks] = {}
    for name, ranks in {group for dump in found.dumps.values() for group in dump.groups.items()}:
        for rank in ranks:
            other = owners.setdefault((name, rank), ranks)
            if other != ranks:
                text = (
                    f"groups do not match: {name!r} has {format_ranks(other)} on some ranks,"
                    f" but {format_ranks(ranks)} on others"
                )
                file, line = [("", 0), *(call[4:6] for call in making)][-1]
                return Finding("groups", text, rank, file, line)
    return None


def _mismatch(found: Explanation) -> Finding | None:
    """Return the first collective whose calls do not match."""
    kinds, parted = dict[str, int](), list[Any]()
    agrees = np.array([kinds.setdefault(one.agrees, len(kinds)) for one in found.operations])
    for tracks in found.tracks.values():
        number = np.concatenate([track["number"] for track in tracks.values()])
        kind = agrees[np.concatenate([track["operation"] for track in tracks.values()])]
        order = number.argsort(kind="stable")
        number, kind = number[order], kind[order]
        starts = np.flatnonzero(np.diff(number, prepend=-1))
        differ = np.minimum.reduceat(kind, starts) != np.maximum.reduceat(kind, starts)
        if differ.any():
            first = number[starts[differ][0]]
            met = (track[track["number"] == first] for track in tracks.values())
            parted.append([row for rows in met for row in rows])
    if not parted:
        return None
    rows = min(parted, key=lambda rows: rows[0]["created"])
    calls = [found.call(row) for row in rows]
    text = f"{mismatch(calls)}, as its collective {rows[0]['number']}"
    return _at("mismatch", text, minority(calls))


def _mismatch_of_threads(found: Explanation) -> Finding | None:
    """Return the first pair of ranks whose sizes or roots differ in the same collective, from
    stacks.
    """
    last = {
        (rank, group): track["number"][-1]
        for (group, _), tracks in found.tracks.items()
        for rank, track in tracks.items()
    }
    met: dict[Any, list[tuple[RankCall, Mapping[str, Any]]]] = defaultdict(list)
    for dump in found.dumps.values():
        for call, _, _, facts in dump.stacks:
            met[call.group, last.get((call.rank, call.group))].append((call, facts))
    for calls in met.values():
        received = {
            (int(sender), call.rank): (count, call)
            for call, sizes in calls
            for sender, count in sizes.get("received", {}).items()
        }
        for call, sizes in calls:
            for receiver, sent in sizes.get("sent", {}).items():
                count, its = received.get((call.rank, int(receiver)), (sent, call))
                if count != sent:
                    text = (
                        f"sizes do not match: rank {call.rank} sends {sent} elements to rank"
                        f" {its.rank} in {call.operation} at {place(call.file, call.line)}, but"
                        f" rank {its.rank} receives {count} in {its.operation} at"
                        f" {place(its.file, its.line)}"
                    )
                    return _at("mismatch", text, call)
        roots = [*{of["root"]: call for call, of in calls if of.get("root") is not None}.values()]
        if len(roots) > 1:
            return _at("mismatch", mismatch(roots), minority(roots))
    return None


def _waiting(found: Explanation) -> Finding | None:
    """Return a finding on who waits for whom: a cycle, absent ranks, or nobody."""
    absent = _absent(found)
    sentences = [_whereabouts(found, rank) for rank in absent[:3]]
    if len(absent) > 3:
        sentences.append(f"{len(absent) - 3} more do not come")
    if not found.waits:
        for dump in sorted(found.dumps.values(), key=lambda dump: dump.time):
            if dump.error is None:
                continue
            call = _main_call(dump)
            at = f" in {call.operation or 'a call'} at {place(call.file, call.line)}"
            text = f"rank {dump.rank} fails{at if call.file else ''}: {dump.error['message']}"
            return _at("failed", "; ".join([text, *sentences]), call)
        return None
    graph: dict[int, set[int]] = defaultdict(set)
    for call in found.waits:
        graph[call.rank] |= set(call.waits_for)
    circle = set(graph)
    while free := {rank for rank in circle if not graph[rank] & circle}:
        circle -= free
    calls = [call for call in found.waits if call.rank in circle] or found.waits
    if circle:
        return _at("deadlock", f"deadlock: {'; '.join(waits(calls))}", minority(calls))
    if not absent:
        sentences = ["all ranks have come: the network, a device or the backend is stuck"]
    text = "; ".join([*waits(calls), *sentences])
    return _at("absent" if absent else "stuck", text, minority(calls))


def _absent(found: Explanation) -> list[int]:
    """Return the awaited ranks that are not waiting themselves; without waits, those that have
    ended or have no dump.
    """
    if not found.waits:
        ranks, dumps = range(found.world_size), found.dumps
        return [rank for rank in ranks if rank not in dumps or dumps[rank].reason == "exit"]
    awaited = {rank for call in found.waits for rank in call.waits_for}
    return sorted(awaited - {call.rank for call in found.waits})


def _whereabouts(found: Explanation, rank: int) -> str:
    """Describe the activity of an awaited rank."""
    dump = found.dumps.get(rank)
    if dump is None:
        return f"rank {rank} has no dump: it has died, or could not write one"
    main = [stack.call for stack in dump.stacks[:1] if stack.call.file]
    at = "".join(f"; it is at {place(call.file, call.line)}" for call in main)
    if not dump.version and not dump.world_size:
        return f"rank {rank} has no dump of a flight recorder{at}"
    newest = dump.calls[dump.calls["created"].argsort()][-1:]
    last = after([found.call(row) for row in newest]) if dump.version else ""
    if dump.reason == "exit":
        return f"rank {rank} has ended{last}"
    text = f"rank {rank} makes no call{last}"
    if newest.size and found.waits:
        others = found.dumps[found.waits[0].rank].calls["created"]
        early = (others.max(initial=0) - newest["created"][0]) / 1e9
        if early >= 1:
            text += f", {early:.2g} s" if early < 120 else f", {early / 60:.0f} min"
            text += " before the others' last"
    return text + at


def _log(found: Explanation) -> list[list[RankCall]]:
    """Return each rank's calls that are in all recorders; of many ranks, only those with the rarest
    and the most frequent sequences of operations.
    """
    sequence = {rank: dump.calls["operation"].tobytes() for rank, dump in found.dumps.items()}
    count = Counter(sequence.values())
    ranks = sorted(sequence, key=lambda rank: count[sequence[rank]])
    shown = {*ranks[: _COMPARED // 2], *ranks[-_COMPARED // 2 :]}
    log: list[list[tuple[int, RankCall]]] = [[] for _ in range(found.world_size)]
    for group, tracks in enumerate(found.tracks.values()):
        start = max(track["number"][0] for track in tracks.values())
        for rank in shown & tracks.keys():
            for row in tracks[rank][tracks[rank]["number"] >= start]:
                # groups of other ranks may have the same name
                log[rank].append((row["created"], found.call(row)._replace(group=str(group))))
    return [[call for _, call in sorted(calls, key=itemgetter(0))] for calls in log]


def _cause(found: Explanation, finding: Finding, log: list[list[RankCall]]) -> tuple[str, str]:
    """Return a likely cause of the finding, and its certainty."""
    kind, calls = finding.kind, found.waits
    if kind == "groups":
        return "groups are created in another order on some ranks", "certain"
    if kind == "exception" and "Fatal Python error" in finding.message:
        guess = "native code ended the process; gloo does so if sizes differ between ranks"
        return f"{guess}: see the last lines of rank {finding.rank}'s output", "possible"
    if kind == "exception":
        return f"rank {finding.rank} fails by itself, and the others wait for it", "certain"
    if kind == "mismatch":
        if "(src=" in finding.message or "(dst=" in finding.message:
            return "a root that depends on the rank", "likely"
        if len({*re.findall(r" at (\S+:\d+)", finding.message)}) > 1:
            return "a branch that depends on the rank", "likely"
        return "sizes that depend on the rank, such as those of uneven batches", "likely"
    if kind == "deadlock":
        if any("(dst=" in call.operation or "(src=" in call.operation for call in calls):
            return "messages are sent and received in an order that closes a circle", "likely"
        return "ranks use their groups in different orders", "likely"
    for rank in _absent(found)[:1]:
        if rank not in found.dumps:
            return f"rank {rank} has died: look for its own error, or for out of memory", "possible"
        dump = found.dumps[rank]
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
