"""Comparison of two records: the first record that differs although all that it depends on is
equal; and its report.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bagua_ref.base.untrusted import one_line
from bagua_ref.conformance.expected.tolerances import EXACT, places, where_equal
from bagua_ref.conformance.trace.causes import CAUSES, explain
from bagua_ref.conformance.trace.pair import Mismatch, Pair, kind_of
from bagua_ref.conformance.trace.recording import WINDOW
from bagua_ref.conformance.trace.report import finite

__all__ = ["Difference", "DifferenceReport", "diff_records", "draw_distances"]

_ROWS = 12
"""The most lines of the text's timeline."""

_WORDS = {
    "rng": "random state",
    "mode": "train or eval mode",
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
    "start": "weights or state before the step",
}
_COLORS = {"loss": "#b4451f", "grad": "#2f6f9f", "weight": "#3c7a4e"}
_DRAWN = ("batch", "input", "buffer", "module", "output", "loss")
"""What may depend on random numbers of its step; that of generators that nothing uses tells
nothing.
"""


@dataclass
class Difference:
    """The first record that differs though all that it depends on is equal.

    Attributes:
        step: the training step.
        rank: the lowest rank where it differs.
        kind: such as "grad" or "loss"; "start" for weights and state before the first recorded
            step.
        record: its name.
        module: the module, of a parameter, buffer or output.
        parameter: the parameter's or buffer's name in it.
        records: number of records of that kind, on all ranks, that differ in this step.
        cause: the name of the likely cause, from `CAUSES`.
        details: about the cause.
        index: of the first element that differs, if values are kept.
        values: that of A and that of B: the element, if values are kept; of a loss the loss.
        ulps: distance of the elements in units in the last place.
    """

    step: int
    rank: int
    kind: str
    record: str
    module: str
    parameter: str
    records: int
    cause: str
    details: str
    index: list[int] | None = None
    values: tuple[Any, Any] | None = None
    ulps: int | None = None

    def __str__(self) -> str:
        name = self.record.partition(":")[2]
        values = "" if self.values is None else f": {self.values[0]} in A, {self.values[1]} in B"
        ulps = "" if self.ulps is None else f", {self.ulps:,} ulps away"
        what = (
            _WORDS[kind_of(self.record)]
            + (" before the step" if self.kind == "start" else "")
            + (f" {name!r}" if name else "")
        )
        return (
            f"step {self.step}, rank {self.rank},"
            f" {what}{self.index if self.index is not None else ''}{values}{ulps}"
        )


@dataclass
class DifferenceReport:
    """The result of comparing two records.

    Attributes:
        a: folder of the first one.
        b: folder of the second one.
        steps: the compared steps.
        ranks: the compared ranks.
        notes: about what is compared, and how the processes differed.
        commands: that started each training, as recorded.
        records: number of compared records.
        differing: by step, the kinds of which records differ.
        distances: by step and kind, the largest relative difference of norms.
        first: the first difference, or None.
        not_finite: by run, its first value that is not finite.
    """

    a: str
    b: str
    steps: list[int]
    ranks: list[int]
    notes: list[str]
    commands: list[list[str]]
    records: int = 0
    differing: dict[int, list[str]] = field(default_factory=dict)
    distances: dict[int, dict[str, float]] = field(default_factory=dict)
    first: Difference | None = None
    not_finite: dict[str, str] = field(default_factory=dict)

    def window(self) -> list[str]:
        """Return the commands that record the first step that differs with its values, and compare
        them; none if all is equal.
        """
        if self.first is None:
            return []
        step = self.first.step
        asked = f"{step}:{step + 1}"
        runs = [
            shlex.join(["env", f"{WINDOW}={asked}", *(command or ["<command>"])])
            for command in self.commands
        ]
        folders = [f"{folder.rstrip('/')}-{step}-{step + 1}" for folder in (self.a, self.b)]
        return [*runs, shlex.join(["bagua-ref", "trace", "diff", *folders])]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values, with infinities and NaN as text."""
        first = self.first
        return {
            "equal": first is None,
            "a": self.a,
            "b": self.b,
            "steps": self.steps,
            "ranks": self.ranks,
            "records": self.records,
            "first": (
                None
                if first is None
                else {**vars(first), "values": first.values and [*map(finite, first.values)]}
            ),
            "not_finite": self.not_finite,
            "notes": self.notes,
            "window": self.window(),
            "timeline": [
                {
                    "step": step,
                    "differing": self.differing[step],
                    "distances": {
                        kind: finite(value) for kind, value in self.distances[step].items()
                    },
                }
                for step in self.steps
            ],
        }

    def __str__(self) -> str:
        lines = [f"A: {self.a}", f"B: {self.b}"]
        steps = f"{len(self.steps)} steps, {self.steps[0]} to {self.steps[-1]}"
        lines.append(
            f"Compared: {steps}, {len(self.ranks)} rank{'s' * (len(self.ranks) != 1)},"
            f" {self.records:,} records"
        )
        lines += [f"Note: {note}" for note in self.notes]
        if self.first is None:
            return "\n".join([*map(one_line, lines), "EQUAL"])
        more = (
            f" ({self.first.records} records of this kind differ)" if self.first.records > 1 else ""
        )
        lines.append(f"First difference: {self.first}{more}")
        lines.append(
            f"Looks like: {self.first.cause} ({self.first.details or CAUSES[self.first.cause]})"
        )
        lines += [f"Not finite in {run}: {where}" for run, where in self.not_finite.items()]
        lines += ["Timeline, with the largest relative differences of norms:", *self._timeline()]
        return "\n".join(
            [
                *map(one_line, lines),
                "DIFFERENT (--window prints the commands that record this step with values)",
            ]
        )

    def _timeline(self) -> list[str]:
        """Return lines of consecutive steps in which the same kinds differ; the last ones are left
        out if there are many.
        """
        groups: list[list[int]] = []
        for step in self.steps:
            if not groups or self.differing[groups[-1][-1]] != self.differing[step]:
                groups.append([])
            groups[-1].append(step)
        lines = []
        for group in groups[:_ROWS]:
            kinds = self.differing[group[0]]
            far = {kind: max(self.distances[step][kind] for step in group) for kind in _COLORS}
            shown = ", ".join(f"{kind} {value:.2g}" for kind, value in far.items() if value)
            name = f"{group[0]}" if len(group) == 1 else f"{group[0]} to {group[-1]}"
            lines.append(
                f"  {name:>12}  {' '.join(kinds) or 'equal'}{f'  ({shown})' if shown else ''}"
            )
        return lines + (
            [f"  ... and {len(groups) - _ROWS} more changes"] if len(groups) > _ROWS else []
        )


def diff_records(a: str | Path, b: str | Path) -> DifferenceReport:
    """Compare two records of `bagua_ref.record`.

    Random states alone are no difference: many trainings leave a generator unseeded that they do
    not use. Records with other
    numbers of ranks are compared in what must be equal on all: rank 0's gradients after
    communication, options, state and weights.

    Args:
        a: folder with the folders of all ranks of one training.
        b: of the other one.

    Raises:
        TraceError: a record cannot be read, or they have no step in common.
    """
    pair = Pair(Path(a), Path(b))
    commands = [run[0].manifest.get("command") for run in pair.runs]
    words = [
        [str(word) for word in command] if isinstance(command, list) else [] for command in commands
    ]
    report = DifferenceReport(str(a), str(b), pair.steps, pair.ranks, _notes(pair), words)
    other_random: dict[tuple[int, str], int] = {}  # since which step
    for step in pair.steps:
        kinds = dict(pair.mismatches(step))
        report.records += sum(
            kind_of(name) in pair.kinds for rank in pair.ranks for name in pair.at(0, rank, step)
        )
        report.differing[step] = list(kinds)
        report.distances[step] = {
            kind: max([m.distance() or 0.0 for m in kinds.get(kind, [])], default=0.0)
            for kind in _COLORS
        }
        random = kinds.pop("rng", [])
        for mismatch in random:
            other_random.setdefault((mismatch.rank, mismatch.name), step)
        if kinds and report.first is None:
            kind, found = next(iter(kinds.items()))
            drawn = (
                [m for m in random if other_random[m.rank, m.name] == step]
                if kind in _DRAWN
                else []
            )
            report.first = _describe(pair, step, "rng" if drawn else kind, drawn or found)
            if drawn:
                report.first.details += f"; its first effect is {found[0].name}"
    last = pair.steps[-1] if report.first is None else report.first.step
    listed = dict.fromkeys(
        f"{name[4:]} from step {since} on"
        for (_, name), since in other_random.items()
        if since <= last
    )
    if listed and (report.first is None or report.first.cause != "random state"):
        report.notes.append(
            f"random states differ ({', '.join(listed)}); this is not where the runs part"
        )
    report.not_finite = {
        name: where for run, name in enumerate("AB") if (where := _not_finite(pair, run))
    }
    return report


def draw_distances(report: DifferenceReport) -> Any:
    """Return a matplotlib Figure of the relative differences of norms of loss, gradients and
    weights, by step.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    lowest = 1e-9  # equal norms, on a logarithmic axis
    for kind, color in _COLORS.items():
        far = [min(max(report.distances[step][kind], lowest), 1.0) for step in report.steps]
        axes.plot(report.steps, far, marker=".", color=color, label=kind)
    axes.set_yscale("log")
    axes.set_ylim(lowest / 2, 2.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step")
    axes.set_ylabel("relative difference of norms\n(bottom: none)")
    title = "equal"
    if report.first is not None:
        title = (
            f"first difference: {report.first.cause}, at step {report.first.step},"
            f" {report.first.record.rstrip(':')}"
        )
        axes.axvline(report.first.step, color="#1c1e21", linewidth=0.8, linestyle="dashed")
    axes.set_title(title, loc="left", fontsize=10)
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
            set().union(*(set(run[rank].steps) for rank in pair.ranks)) - set(pair.steps)
        ):
            notes.append(
                f"{len(more)} steps of {name} are not compared, from step {more[0]} on: the other"
                " record lacks them"
            )
        if not all(rank.manifest.get("complete") for rank in run):
            notes.append(
                f"the recording of {name} did not end, or stopped: it is read up to its end"
            )
    first = [
        {**(run[0].manifest.get("settings") or {}), **(run[0].manifest.get("versions") or {})}
        for run in pair.runs
    ]
    for name in sorted(first[0].keys() | first[1].keys()):
        if first[0].get(name) != first[1].get(name):
            notes.append(f"{name}: {first[0].get(name)} in A, {first[1].get(name)} in B")
    return notes


def _describe(pair: Pair, step: int, kind: str, found: list[Mismatch]) -> Difference:
    first = found[0]
    cause, text = explain(pair, step, kind, found)
    module, _, parameter = first.name.partition(":")[2].rpartition(".")
    difference = Difference(
        step, first.rank, kind, first.name, module, parameter, len(found), cause, text
    )
    values = pair.values(step, first) if kind != "start" else None
    if values is not None and first.a is not None:
        x, y = values
        place = int(where_equal(x, y, EXACT).int().argmin())
        # of the tensor, or the shard
        shape = json.loads(first.a.about[first.a.about.rindex("[") : first.a.about.rindex("]") + 1])
        difference.index = [int(at) for at in np.unravel_index(place, shape)]
        difference.values = x[place].item(), y[place].item()
        if x.is_floating_point() and not (x[place].isnan() or y[place].isnan()):
            difference.ulps = abs(int(places(x[place : place + 1]) - places(y[place : place + 1])))
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
