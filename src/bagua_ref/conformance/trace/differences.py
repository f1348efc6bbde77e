"""Comparison of two records: the first record that differs although all that it depends on is equal."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from bagua_ref.conformance.expected.tolerances import EXACT, places, where_equal
from bagua_ref.conformance.trace.causes import explain
from bagua_ref.conformance.trace.difference_report import Difference, DifferenceReport
from bagua_ref.conformance.trace.pair import Mismatch, Pair, kind_of

__all__ = ["diff_records"]

_DRAWN = ("batch", "input", "buffer", "module", "output", "loss")
"""What may depend on random numbers of its step; that of generators that nothing uses tells nothing."""


def diff_records(a: str | Path, b: str | Path) -> DifferenceReport:
    """Compare two records of `bagua_ref.record`.

    Random states alone are no difference: many trainings leave a generator unseeded that they do not use. Records with other
    numbers of ranks are compared in what must be equal on all: rank 0's gradients after communication, options, state and weights.

    Args:
        a: folder with the folders of all ranks of one training.
        b: of the other one.

    Raises:
        TraceError: a record cannot be read, or they have no step in common.
    """
    pair = Pair(Path(a), Path(b))
    report = DifferenceReport(str(a), str(b), pair.steps, pair.ranks, _notes(pair), _command(pair))
    other_random: dict[tuple[int, str], int] = {}  # since which step
    for step in pair.steps:
        kinds = dict(pair.mismatches(step))
        report.records += sum(kind_of(name) in pair.kinds for rank in pair.ranks for name in pair.at(0, rank, step))
        report.differing[step] = list(kinds)
        report.distances[step] = {kind: _distance(kinds.get(kind, [])) for kind in ("loss", "grad", "weight")}
        random = kinds.pop("rng", [])
        for mismatch in random:
            other_random.setdefault((mismatch.rank, mismatch.name), step)
        if kinds and report.first is None:
            kind, found = next(iter(kinds.items()))
            drawn = [m for m in random if other_random[m.rank, m.name] == step] if kind in _DRAWN else []
            report.first = _describe(pair, step, "rng" if drawn else kind, drawn or found)
            if drawn:
                report.first.details += f"; its first effect is {found[0].name}"
    last = pair.steps[-1] if report.first is None else report.first.step
    listed = dict.fromkeys(f"{name[4:]} from step {since} on" for (_, name), since in other_random.items() if since <= last)
    if listed and (report.first is None or report.first.cause != "random state"):
        report.notes.append(f"random states differ ({', '.join(listed)}); this is not where the runs part")
    report.not_finite = {name: where for run, name in enumerate("AB") if (where := _not_finite(pair, run))}
    return report


def _notes(pair: Pair) -> list[str]:
    """Return notes on the extent of the comparison and on differences between the processes."""
    notes = []
    if len(pair.runs[0]) != len(pair.runs[1]):
        notes.append(
            f"A has {len(pair.runs[0])} ranks and B {len(pair.runs[1])}: only rank 0's gradients after communication, options, "
            "state and weights are compared, no shards"
        )
    for name, run in zip("AB", pair.runs, strict=True):
        if more := sorted(set().union(*(set(run[rank].steps) for rank in pair.ranks)) - set(pair.steps)):
            notes.append(f"{len(more)} steps of {name} are not compared, from step {more[0]} on: the other record lacks them")
        if not all(rank.manifest.get("complete") for rank in run):
            notes.append(f"the recording of {name} did not end, or stopped: it is read up to its end")
    first = [{**(run[0].manifest.get("settings") or {}), **(run[0].manifest.get("versions") or {})} for run in pair.runs]
    for name in sorted(first[0].keys() | first[1].keys()):
        if first[0].get(name) != first[1].get(name):
            notes.append(f"{name}: {first[0].get(name)} in A, {first[1].get(name)} in B")
    return notes


def _command(pair: Pair) -> tuple[list[str], list[str]]:
    commands = [run[0].manifest.get("command") for run in pair.runs]
    a, b = ([str(part) for part in command] if isinstance(command, list) else [] for command in commands)
    return a, b


def _distance(found: list[Mismatch]) -> float:
    """Return the largest relative difference of norms."""
    largest = 0.0
    for m in found:
        if m.a is not None and m.b is not None and m.a.norm is not None and m.b.norm is not None:
            if not math.isfinite(m.a.norm + m.b.norm):
                return math.inf
            largest = max(largest, abs(m.a.norm - m.b.norm) / (max(abs(m.a.norm), abs(m.b.norm)) or 1.0))
    return largest


def _describe(pair: Pair, step: int, kind: str, found: list[Mismatch]) -> Difference:
    first = found[0]
    cause, text = explain(pair, step, kind, found)
    module, _, parameter = first.name.partition(":")[2].rpartition(".")
    difference = Difference(step, first.rank, kind, first.name, module, parameter, len(found), cause, text)
    values = pair.values(step, first) if kind != "start" else None
    if values is not None and first.a is not None:
        x, y = values
        place = int(where_equal(x, y, EXACT).int().argmin())
        difference.index = _index(place, first.a.about)
        difference.values = x[place].item(), y[place].item()
        if x.is_floating_point() and not (x[place].isnan() or y[place].isnan()):
            difference.ulps = abs(int(places(x[place : place + 1]) - places(y[place : place + 1])))
    elif kind == "loss" and first.a is not None and first.b is not None:
        difference.values = first.a.norm, first.b.norm
    return difference


def _index(place: int, about: str) -> list[int]:
    """Return the indices of an element of the tensor, or shard, that is described."""
    shape = json.loads(about[about.rindex("[") : about.rindex("]") + 1])
    return [int(at) for at in np.unravel_index(place, shape)]


def _not_finite(pair: Pair, run: int) -> str:
    """Return where a run has its first value that is not finite, or ""."""
    for step in pair.steps:
        bad = [
            (pair.kinds.index(kind_of(name)), rank, place, name)
            for rank in pair.ranks
            for place, (name, entry) in enumerate(pair.at(run, rank, step).items())
            if entry.norm is not None and not math.isfinite(entry.norm) and kind_of(name) in pair.kinds
        ]
        if bad:
            _, rank, _, name = min(bad)
            return f"step {step}, rank {rank}, {name}"
    return ""
