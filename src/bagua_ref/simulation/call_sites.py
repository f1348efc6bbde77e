"""Call sites: the lines of the user's code whose calls met in each collective of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from bagua_ref.base.ranks import format_ranks
from bagua_ref.errors import RankCall
from bagua_ref.simulation.tasks import place

_MESSAGES = ("send(", "recv(")
_ROOTED = ("broadcast(", "reduce(", "gather(", "scatter(")
"""Collectives whose root often has a branch of its own."""


def site(call: RankCall) -> str:
    """Return the line of a call as text, with the module for which FSDP2 made it."""
    return place(call.file, call.line) + (f" for module {call.module!r}" if call.module else "")


def joined_calls(log: Sequence[Sequence[RankCall]]) -> Iterator[list[RankCall]]:
    """Yield the calls of each collective, grouped by process group, in order."""
    groups: dict[str, list[list[RankCall]]] = defaultdict(lambda: [[] for _ in log])
    for rank, calls in enumerate(log):
        for call in calls:
            if not call.operation.startswith(_MESSAGES):
                groups[call.group][rank].append(call)
    for calls_by_rank in groups.values():
        for row in zip_longest(*calls_by_rank):
            yield [call for call in row if call is not None]


def _odd_one(row: Sequence[RankCall]) -> RankCall | None:
    """Return a call whose line differs from that of most other ranks, unless it is the root's."""
    sites = Counter(map(site, row))
    if len(sites) < 2:
        return None
    odd = min(reversed(row), key=lambda call: sites[site(call)])
    is_root = len(sites) == 2 and sites[site(odd)] == 1 and odd.operation.startswith(_ROOTED)
    return None if is_root else odd


def _text(row: Sequence[RankCall], odd: RankCall) -> str:
    other = next(call for call in row if site(call) != site(odd))
    first, second = sorted((odd, other), key=lambda call: call.rank)
    return (
        f"rank {first.rank}'s {first.operation} at {site(first)} met rank {second.rank}'s"
        f" {second.operation.partition(' of ')[0]} at {site(second)}"
    )


def meetings(log: Sequence[Sequence[RankCall]]) -> list[str]:
    """Describe each pair of different lines whose calls met, at their first meeting."""
    found: dict[frozenset[str], str] = {}
    for row in joined_calls(log):
        odd = _odd_one(row)
        if odd is not None:
            found.setdefault(frozenset(map(site, row)), _text(row, odd))
    return list(found.values())


def shifted(log: Sequence[Sequence[RankCall]]) -> tuple[str, RankCall] | None:
    """Return the collective of a group from which on the ranks' lines differ up to their last
    common one: one rank made a call too many, or one too few.

    Lines that differ once and agree later are two branches that are intended to meet.
    """
    groups: dict[str, list[list[RankCall]]] = defaultdict(list)
    for row in joined_calls(log):
        groups[row[0].group].append(row)
    for rows in groups.values():
        most = max(map(len, rows))
        found = None
        for row in (row for row in rows if len(row) == most):
            odd = _odd_one(row)
            found = None if odd is None else found or (_text(row, odd), odd)
        if found is not None:
            return found
    return None


def different_counts(log: Sequence[Sequence[RankCall]], waiting: Sequence[RankCall]) -> str:
    """Describe the number of calls that each rank has made at a line where some ranks wait; ""
    unless all ranks came to it, some more often.
    """
    for call in {(call.file, call.line): call for call in waiting}.values():
        counts = [sum((c.file, c.line) == (call.file, call.line) for c in calls) for calls in log]
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, count in enumerate(counts):
            ranks[count].append(rank)
        if call.line and 0 not in ranks and len(ranks) > 1:
            made = [f"{format_ranks(ranks[count])} {count}" for count in sorted(ranks)]
            return f"calls at {place(call.file, call.line)}: {', '.join(made)}"
    return ""
