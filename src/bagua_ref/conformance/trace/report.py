"""Results of checking a trace, as text, as JSON values and as a picture."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Divergence", "Execution", "TraceReport", "draw_errors", "finite"]


_COLUMNS = 240
"""More steps than this share columns; a column shows its largest error."""

_WITHIN, _UNCHECKED, _EDGE, _INK = "#dbe9e4", "#f4f4f5", "#9aa5a0", "#1c1e21"


@dataclass(frozen=True)
class Divergence:
    """The first difference between recorded and replayed values.

    Attributes:
        step: the training step.
        rank: the lowest rank that differs.
        bucket: its name.
        tensor: the tensor in the bucket, or the output's name if it is not x.
        index: the element's index in the tensor.
        element: its index in the flat bucket.
        expected: the replayed value.
        got: the recorded value.
        ulps: their distance in units in the last place; None if one is NaN.
        tolerance: the tolerance that was applied.
        chunks: for operations that scatter chunks, those that hold wrong elements.
    """

    step: int
    rank: int
    bucket: str
    tensor: str
    index: list[int]
    element: int
    expected: float
    got: float
    ulps: int | None
    tolerance: str
    chunks: str | None = None

    def __str__(self) -> str:
        ulps = "" if self.ulps is None else f", {self.ulps:,} ulps away"
        chunks = f"; the wrong elements are in {self.chunks}" if self.chunks else ""
        return (
            f"step {self.step}, rank {self.rank}, bucket {self.bucket!r}, tensor"
            f" {self.tensor!r}{self.index} (element {self.element} of the bucket): expected"
            f" {self.expected!r}, got {self.got!r}{ulps} (tolerance {self.tolerance}){chunks}"
        )


@dataclass
class Execution:
    """One output of one execution of a bucket's operation, compared on all ranks.

    Attributes:
        step: the training step.
        bucket: its name.
        values: number of compared values, by rank.
        wrong: number of diverging values, by rank.
        errors: by rank, the largest difference relative to the largest value, expected or recorded.
        first: the first divergence.
        kind: its likely cause, if it is a known one.
    """

    step: int
    bucket: str
    values: list[int]
    wrong: list[int]
    errors: list[float]
    first: Divergence | None = None
    kind: str | None = None


@dataclass
class TraceReport:
    """The result of checking a trace.

    Attributes:
        algorithm: the algorithm of the replay.
        options: its options.
        nodes: number of ranks on each node.
        notes: notes about the recording.
        executions: all compared executions, in order.
        not_checked: step, bucket and reason of executions that could not be replayed.
    """

    algorithm: str
    options: dict[str, Any]
    nodes: tuple[int, ...]
    notes: list[str]
    executions: list[Execution] = field(default_factory=list)
    not_checked: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether values were compared and none diverges."""
        return bool(self.executions) and self.first is None

    @property
    def first(self) -> Divergence | None:
        """The first divergence, ordered by step, bucket and rank."""
        return next(
            (execution.first for execution in self.executions if execution.first is not None), None
        )

    @property
    def values(self) -> int:
        """The number of compared values."""
        return sum(sum(execution.values) for execution in self.executions)

    @property
    def diverging(self) -> int:
        """The number of diverging values."""
        return sum(sum(execution.wrong) for execution in self.executions)

    @property
    def kinds(self) -> dict[str, int]:
        """Likely causes and numbers of diverging executions, in order of appearance; text after a
        colon is that of the first.
        """
        counts: Counter[str] = Counter()
        texts: dict[str, str] = {}
        for execution in self.executions:
            if execution.first is not None:
                name = (execution.kind or "like no known cause").partition(":")[0]
                texts.setdefault(name, execution.kind or name)
                counts[name] += 1
        return {texts[name]: count for name, count in counts.items()}

    @property
    def steps(self) -> list[int]:
        """The steps with compared values."""
        return sorted({execution.step for execution in self.executions})

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values, with infinities and NaN as text."""
        return {
            "passed": self.passed,
            "algorithm": self.algorithm,
            "options": self.options,
            "nodes": list(self.nodes),
            "values": self.values,
            "diverging": self.diverging,
            "first": (
                None if self.first is None else {k: finite(v) for k, v in vars(self.first).items()}
            ),
            "kinds": self.kinds,
            "notes": self.notes,
            "not_checked": [
                dict(zip(("step", "bucket", "reason"), entry, strict=True))
                for entry in self.not_checked
            ],
            "executions": [
                {
                    "step": e.step,
                    "bucket": e.bucket,
                    "values": e.values,
                    "diverging": e.wrong,
                    "errors": [*map(finite, e.errors)],
                }
                for e in self.executions
            ],
        }

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        counts = (
            sum(self.nodes),
            len(self.steps),
            len({execution.bucket for execution in self.executions}),
        )
        ranks, steps, buckets = (
            f"{n} {noun}{'s' * (n != 1)}"
            for n, noun in zip(counts, ("rank", "step", "bucket"), strict=True)
        )
        lines = [
            f"Replayed as {self.algorithm}({options}) on {ranks}, nodes {list(self.nodes)}",
            f"Compared: {steps}, {buckets}, {self.values:,} values",
        ]
        lines += [f"Note: {note}" for note in self.notes]
        if self.not_checked:
            step, bucket, reason = self.not_checked[0]
            lines.append(
                f"Not checked: {len(self.not_checked)} executions; the first is step {step}, bucket"
                f" {bucket!r}: {reason}"
            )
        if self.first is None:
            return "\n".join([*lines, "NO DIVERGENCE"])
        wrong = sum(execution.first is not None for execution in self.executions)
        lines.append(f"First divergence: {self.first}")
        lines += [
            f"Looks {kind} ({count} of {wrong} diverging executions)"
            for kind, count in self.kinds.items()
        ]
        share = self.diverging / self.values
        return "\n".join(
            [*lines, f"DIVERGENCE: {self.diverging:,} of {self.values:,} values ({share:.2%})"]
        )


def finite(value: Any) -> Any:
    """Return a value for JSON: infinities and NaN as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def draw_errors(report: TraceReport) -> Any:
    """Return a matplotlib Figure with a row per rank and a column per step, coloured by the largest
    relative error.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    ranks = sum(report.nodes)
    last = max(
        [execution.step for execution in report.executions]
        + [step for step, _, _ in report.not_checked]
    )
    width = math.ceil((last + 1) / _COLUMNS)
    errors = np.full((ranks, last // width + 1), np.nan)  # of diverging executions
    checked = np.full_like(errors, np.nan)
    for execution in report.executions:
        column = execution.step // width
        checked[:, column] = 0.0
        wrong = np.where(np.array(execution.wrong) > 0, execution.errors, np.nan)
        errors[:, column] = np.fmax(errors[:, column], wrong)
    finite, infinite = errors[np.isfinite(errors) & (errors > 0)], bool(np.isinf(errors).any())
    low = math.floor(math.log10(finite.min())) if finite.size else -7
    high = max(math.ceil(math.log10(finite.max())), low + 1) if finite.size else 0
    norm = LogNorm(10.0**low, 10.0**high)
    # Without the light end of the map, which would look like the colour of values within tolerance.
    part = colormaps["inferno_r"]([0.18 + 0.62 * place / 255 for place in range(256)])
    colors = LinearSegmentedColormap.from_list("errors", part).with_extremes(over="black")

    figure = Figure(figsize=(9.0, 2.6 + 0.32 * min(ranks, 24)), layout="constrained")
    axes = figure.add_subplot(facecolor=_UNCHECKED)
    common: dict[str, Any] = {
        "extent": (-0.5, errors.shape[1] * width - 0.5, ranks - 0.5, -0.5),
        "aspect": "auto",
    }
    axes.imshow(checked, cmap=ListedColormap([_WITHIN]), interpolation="nearest", **common)
    drawn = np.clip(errors, 10.0**low, 10.0 ** (high + 1))  # imshow would leave infinite errors out
    axes.imshow(drawn, cmap=colors, norm=norm, interpolation="nearest", **common)
    handles: list[Any] = [
        Patch(facecolor=_WITHIN, edgecolor=_EDGE, label="checked, within tolerance")
    ]
    handles.append(
        Patch(facecolor=_UNCHECKED, edgecolor=_EDGE, label="not recorded or not checked")
    )
    if finite.size or infinite:
        bar = figure.colorbar(
            ScalarMappable(norm, colors),
            ax=axes,
            extend="max" if infinite else "neither",
            pad=0.015,
            aspect=14,
        )
        bar.set_label("largest error /\nlargest value (no unit)", color=_INK)
    if infinite:
        handles.append(Patch(facecolor="black", label="one finite, one not"))
    title = f"Replayed as {report.algorithm}: no divergence in {report.values:,} values"
    if (first := report.first) is not None:
        mark: dict[str, Any] = {
            "marker": "s",
            "fillstyle": "none",
            "color": _INK,
            "linestyle": "none",
        }
        axes.plot(first.step, first.rank, markersize=11, **mark)
        handles.append(Line2D([], [], markersize=9, label="first divergence", **mark))
        title = (
            f"Replayed as {report.algorithm}: {report.diverging:,} of {report.values:,} values"
            f" diverge\nfirst at step {first.step}, rank {first.rank}, bucket {first.bucket!r},"
            f" tensor {first.tensor!r}{first.index}"
        )
    axes.set_xlabel("step" if width == 1 else f"step ({width} to a column)", color=_INK)
    axes.set_ylabel("rank", color=_INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure
