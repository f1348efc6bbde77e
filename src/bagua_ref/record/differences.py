"""Comparison of two recordings: the first value that differs although all that it depends on is
equal; and its report.
"""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bagua_ref.base.untrusted import one_line
from bagua_ref.record.causes import CAUSES, UNCERTAIN, explain, other_states
from bagua_ref.record.pair import Mismatch, Pair, kind_of

_MAX_ROWS = 12  # of the text's timeline

_WORDS = {
    "buffer": "buffer before the step",
    "batch": "batch",
    "input": "input of the model",
    "module": "output of module",
    "output": "output",
    "loss": "loss",
    "local": "gradient of the backward pass",
    "grad": "gradient for the optimizer",
    "option": "options of the optimizer for",
    "state": "optimizer state",
    "weight": "weight",
    "buffer_after": "buffer after the step",
}
_COLORS = {"loss": "#b4451f", "grad": "#2f6f9f", "weight": "#3c7a4e"}


@dataclass
class Difference:
    """The first value that differs though all that it depends on is equal.

    Attributes:
        step: the training step.
        rank: the lowest rank where it differs.
        kind: such as "grad" or "loss"; "start" for weights and state before the first recorded
            step.
        record: its name in the recording.
        records: number of values of that kind, on all ranks, that differ in this step.
        cause: the name of the likely cause, from `CAUSES`.
        details: about the cause.
        index: of the first element that differs, if values are kept.
        values: that of A and that of B: the element, if values are kept; of a loss the loss.
    """

    step: int
    rank: int
    kind: str
    record: str
    records: int
    cause: str
    details: str
    index: list[int] | None = None
    values: tuple[Any, Any] | None = None

    def __str__(self) -> str:
        kind, _, name = self.record.partition(":")
        before = " before the step" if self.kind == "start" else ""
        shown = f" {name!r}" if name else ""
        index = "" if self.index is None else str(self.index)
        values = "" if self.values is None else f": {self.values[0]} in A, {self.values[1]} in B"
        return f"step {self.step}, rank {self.rank}, {_WORDS[kind]}{before}{shown}{index}{values}"


@dataclass
class DifferenceReport:
    """The result of comparing two recordings.

    Attributes:
        a: folder of the first one.
        b: folder of the second one.
        steps: the compared steps.
        ranks: the compared ranks.
        notes: about what is compared, and how the processes differed.
        records: number of compared values.
        differing: by step, the kinds of which values differ.
        distances: by step, the largest relative difference of norms of each kind that is recorded.
        first: the first difference, or None.
        not_finite: by run, its first value that is not finite.
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
    not_finite: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values, with infinities and NaN as text."""
        return {"equal": self.first is None, **_plain(asdict(self))}

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
            *(f"Not finite in {run}: {where}" for run, where in self.not_finite.items()),
            "Timeline, with the largest relative differences of norms:",
            *self._timeline(),
        ]
        if self.first.index is None:
            step = self.first.step
            lines.append(f"To see elements, record with what='values', window=({step}, {step + 1})")
        return "\n".join([*map(one_line, lines), "DIFFERENT"])

    def _timeline(self) -> list[str]:
        """Return a line for each group of consecutive steps in which the same kinds differ."""
        groups: list[list[int]] = []
        for step in self.steps:
            if not groups or self.differing[groups[-1][-1]] != self.differing[step]:
                groups.append([])
            groups[-1].append(step)
        lines = []
        for group in groups[:_MAX_ROWS]:
            far = {
                kind: max(self.distances[step].get(kind, 0.0) for step in group) for kind in _COLORS
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

    Random states alone are no difference: many runs leave a generator unseeded that they do not
    use. Recordings with other numbers of ranks are compared in what must be equal on all: rank 0's
    gradients after communication, options, state and weights.

    Args:
        a: folder with the folders of all ranks of one run.
        b: of the other one.

    Raises:
        RecordingError: a recording cannot be read, or they have no step in common.
    """
    pair = Pair(Path(a), Path(b))
    report = DifferenceReport(str(a), str(b), pair.steps, pair.ranks, _notes(pair))
    random: dict[str, int] = {}  # generator -> first step in which its states differ
    for step in pair.steps:
        kinds = pair.mismatches(step)
        names = [(rank, name) for rank in pair.ranks for name in pair.at(0, rank, step)]
        report.records += sum(kind_of(name) in pair.kinds for _, name in names)
        report.differing[step] = list(kinds)
        report.distances[step] = {
            kind: max([m.distance() or 0.0 for m in kinds.get(kind, [])], default=0.0)
            for kind in _COLORS
            if kind in pair.kinds
            and any(
                kind_of(name) == kind and name in pair.at(1, rank, step) for rank, name in names
            )
        }
        if report.first is None:
            for rank in pair.ranks:
                for name in other_states(pair, step, rank):
                    random.setdefault(name, step)
            if kinds:
                report.first = _describe(pair, step, *next(iter(kinds.items())))
    if random and (report.first is None or report.first.cause != "random state"):
        since = ", ".join(f"{name} from step {step} on" for name, step in random.items())
        sure = report.first is not None and report.first.cause not in UNCERTAIN
        more = ", but this did not cause the divergence" if sure else ""
        report.notes.append(f"random states differ ({since}){more}")
    report.not_finite = {
        name: where for run, name in enumerate("AB") if (where := _not_finite(pair, run))
    }
    return report


def draw_distances(report: DifferenceReport) -> Any:
    """Return a matplotlib Figure of the relative differences of norms of loss, gradients and
    weights, by step: of those kinds and steps that both runs have recorded.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    lowest = 1e-9  # equal norms, on a logarithmic axis
    for kind, color in _COLORS.items():
        far = {step: found[kind] for step, found in report.distances.items() if kind in found}
        if far:
            shown = [min(max(value, lowest), 1.0) for value in far.values()]
            axes.plot([*far], shown, marker=".", color=color, label=kind)
    axes.set_yscale("log")
    axes.set_ylim(lowest / 2, 2.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step")
    axes.set_ylabel("relative difference of norms\n(bottom: none)")
    title = "equal"
    if report.first is not None:
        step, name = report.first.step, report.first.record.rstrip(":")
        title = f"first difference: {report.first.cause}, at step {step}, {name}"
        axes.axvline(step, color="#1c1e21", linewidth=0.8, linestyle="dashed")
    axes.set_title(title, loc="left", fontsize=10)
    if axes.lines:
        axes.legend(frameon=False)
    return figure


def _notes(pair: Pair) -> list[str]:
    """Return notes on the extent of the comparison and on differences between the processes."""
    notes = []
    if len(pair.runs[0]) != len(pair.runs[1]):
        notes.append(
            f"A has {len(pair.runs[0])} ranks and B {len(pair.runs[1])}: only rank 0's gradients"
            " after communication, options, state and weights are compared, no shards"
        )
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


def _describe(pair: Pair, step: int, kind: str, found: list[Mismatch]) -> Difference:
    first = found[0]
    cause, details = explain(pair, step, kind, found)
    difference = Difference(step, first.rank, kind, first.name, len(found), cause, details)
    values = pair.values(step, first) if kind != "start" else None
    if values is not None:
        x, y = (side.reshape(-1) for side in values)
        bits = (side.view(torch.uint8).view(len(side), -1) for side in (x, y))
        place = int(operator.ne(*bits).any(1).int().argmax())
        difference.index = [int(at) for at in np.unravel_index(place, values[0].shape)]
        difference.values = x[place].item(), y[place].item()
    elif kind == "loss" and first.a is not None and first.b is not None:
        difference.values = first.a.norm, first.b.norm
    return difference


def _not_finite(pair: Pair, run: int) -> str:
    """Return where a run has its first value that is not finite, or ""."""
    for step in pair.steps:
        bad = [
            (pair.kinds.index(kind_of(name)), rank, place, name)
            for rank in pair.ranks
            for place, (name, entry) in enumerate(pair.at(run, rank, step).items())
            if entry.norm is not None
            and not math.isfinite(entry.norm)
            and kind_of(name) in pair.kinds
        ]
        if bad:
            _, rank, _, name = min(bad)
            return f"step {step}, rank {rank}, {name}"
    return ""


def _plain(value: Any) -> Any:
    """Return JSON values, in which infinities and NaN are text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
