"""Comparison of two recordings: the first value that differs although its dependencies are equal;
and a report.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from bagua_ref.base.untrusted import one_line
from bagua_ref.record.causes import CAUSES, explain, other_states
from bagua_ref.record.pair import KINDS, Pair, kind_of

_MAX_ROWS = 12  # of the text's timeline

_DRAWN = ("loss", "grad", "weight")  # kinds whose norms tell how far runs are apart


@dataclass
class Difference:
    """The first value that differs although all of its dependencies are equal.

    Attributes:
        step: the training step.
        rank: the lowest rank where it differs.
        kind: such as "grad" or "loss"; "start" for weights and state before the first recorded
            step.
        record: name of the value in the recording.
        records: number of values of that kind, on all ranks, that differ in this step.
        cause: the name of the likely cause, from `CAUSES`.
        details: details of the cause.
        norms: norm in A and norm in B, for a loss its value; None if not recorded.
    """

    step: int
    rank: int
    kind: str
    record: str
    records: int
    cause: str
    details: str
    norms: tuple[float | None, float | None]

    def __str__(self) -> str:
        before = " before the step" if self.kind == "start" else ""
        a, b = self.norms
        norms = "" if a is None or b is None else f", norms {a:.6g} in A and {b:.6g} in B"
        return f"step {self.step}, rank {self.rank}, {self.record}{before}{norms}"


@dataclass
class DifferenceReport:
    """The result of comparing two recordings.

    Attributes:
        a: folder of the first recording.
        b: folder of the second recording.
        steps: the compared steps.
        ranks: the compared ranks.
        notes: notes on the extent of the comparison, and on differences between the processes.
        records: number of compared values.
        differing: the kinds with differing values, by step.
        distances: by step, the largest relative difference of norms of each recorded kind.
        first: the first difference, or None.
    """

    a: str
    b: str
    steps: list[int]
    ranks: list[int]
    notes: list[str]
    records: int = 0
    differing: dict[int, list[str]] = field(default_factory=dict)
    distances: dict[int, dict[str, float]] = field(default_factory=dict)
    first: Difference | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with infinities and NaN as text."""
        values = json.loads(json.dumps(asdict(self)), parse_constant=str)
        return {"equal": self.first is None, **values}

    def __str__(self) -> str:
        ranks = len(self.ranks)
        lines = [
            f"A: {self.a}",
            f"B: {self.b}",
            (
                f"Compared: {len(self.steps)} steps, {self.steps[0]} to {self.steps[-1]},"
                f" {ranks} rank{'s' * (ranks != 1)}, {self.records:,} values"
            ),
            *(f"Note: {note}" for note in self.notes),
        ]
        if self.first is None:
            return "\n".join([*map(one_line, lines), "EQUAL"])
        count, cause = self.first.records, self.first.cause
        more = f" ({count} values of this kind differ)" if count > 1 else ""
        lines += [
            f"First difference: {self.first}{more}",
            f"Likely cause: {cause} ({self.first.details or CAUSES[cause]})",
            "Timeline, with the largest relative differences of norms:",
            *self._timeline(),
        ]
        return "\n".join([*map(one_line, lines), "DIFFERENT"])

    def _timeline(self) -> list[str]:
        """Return one line per group of consecutive steps with the same differing kinds."""
        groups = [[*group] for _, group in groupby(self.steps, key=self.differing.__getitem__)]
        lines = []
        for group in groups[:_MAX_ROWS]:
            far = {
                kind: max(self.distances[step].get(kind, 0.0) for step in group) for kind in _DRAWN
            }
            shown = ", ".join(f"{kind} {value:.2g}" for kind, value in far.items() if value)
            steps = f"{group[0]}" if len(group) == 1 else f"{group[0]} to {group[-1]}"
            kinds = " ".join(self.differing[group[0]]) or "equal"
            lines.append(f"  {steps:>12}  {kinds}{f'  ({shown})' if shown else ''}")
        if len(groups) > _MAX_ROWS:
            lines.append(f"  ... and {len(groups) - _MAX_ROWS} more changes")
        return lines


def diff_records(a: str | Path, b: str | Path) -> DifferenceReport:
    """Compare two recordings of `bagua_ref.record`.

    Random states alone do not count as a difference: many runs leave unused generators unseeded.

    Args:
        a: folder of one run, with the folders of all its ranks.
        b: folder of the other run.

    Raises:
        RecordingError: a recording cannot be read, or they have other numbers of ranks or no step in
            common.
    """
    pair = Pair(Path(a), Path(b))
    report = DifferenceReport(str(a), str(b), pair.steps, pair.ranks, _notes(pair))
    random: dict[str, int] = {}  # generator -> first step in which its states differ
    for step in pair.steps:
        kinds = pair.mismatches(step)
        names = [(rank, name) for rank in pair.ranks for name in pair.at(0, rank, step)]
        report.records += sum(kind_of(name) in KINDS for _, name in names)
        report.differing[step] = list(kinds)
        report.distances[step] = {
            kind: max([m.distance() or 0.0 for m in kinds.get(kind, [])], default=0.0)
            for kind in _DRAWN
            if any(kind_of(name) == kind and name in pair.at(1, rank, step) for rank, name in names)
        }
        if report.first is None:
            for rank in pair.ranks:
                for name in other_states(pair, step, rank):
                    random.setdefault(name, step)
            if kinds:
                kind, found = next(iter(kinds.items()))
                first = found[0]
                norms = first.a and first.a.norm, first.b and first.b.norm
                cause, details = explain(pair, step, kind, found)
                report.first = Difference(
                    step, first.rank, kind, first.name, len(found), cause, details, norms
                )
    if random and (report.first is None or report.first.cause != "random state"):
        since = ", ".join(f"{name} from step {step} on" for name, step in random.items())
        report.notes.append(f"random states differ ({since})")
    return report


def draw_distances(report: DifferenceReport) -> Any:
    """Return a matplotlib Figure of the relative differences of norms of loss, gradients and
    weights by step, for kinds and steps that both runs have recorded.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for kind in _DRAWN:
        far = {step: found[kind] for step, found in report.distances.items() if kind in found}
        # equal norms lie at the bottom of a logarithmic axis
        shown = [min(max(x, 1e-9), 1.0) for x in far.values()]
        if far:
            axes.plot([*far], shown, marker=".", label=kind)
    axes.set_yscale("log")
    axes.set_ylim(5e-10, 2.0)
    axes.set_xlabel("step")
    axes.set_ylabel("relative difference of norms\n(bottom: none)")
    if report.first is not None:
        axes.axvline(report.first.step, color="black", linestyle="dashed")
        axes.set_title(f"step {report.first.step}, {report.first.record}: {report.first.cause}")
    axes.legend()
    return figure


def _notes(pair: Pair) -> list[str]:
    """Return notes on the extent of the comparison and on differences between the runs'
    environments.
    """
    notes = []
    for name, run in zip("AB", pair.runs, strict=True):
        if more := sorted(
            {step for rank in pair.ranks for step in run[rank].steps} - {*pair.steps}
        ):
            notes.append(
                f"{len(more)} steps of {name} are not compared, from step {more[0]} on: the other"
                " recording lacks them"
            )
        if not all(rank.manifest["complete"] for rank in run):
            notes.append(
                f"the recording of {name} did not end, or stopped: it is read up to its end"
            )
    a, b = (run[0].manifest["settings"] for run in pair.runs)
    return notes + [
        f"{name}: {a.get(name)} in A, {b.get(name)} in B"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
