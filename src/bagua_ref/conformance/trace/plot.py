"""A heat map of a trace's errors over steps and ranks."""

from __future__ import annotations

import math
from typing import Any

from bagua_ref.conformance.trace.report import TraceReport

__all__ = ["draw_errors"]

_COLUMNS = 240
"""More steps than this share columns; a column shows its largest error."""

_WITHIN, _UNCHECKED, _INK = "#dbe9e4", "#f4f4f5", "#1c1e21"


def draw_errors(report: TraceReport) -> Any:
    """Return a matplotlib Figure with a row per rank and a column per step, coloured by the largest relative error."""
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    ranks = sum(report.nodes)
    last = max([execution.step for execution in report.executions] + [step for step, _, _ in report.not_checked])
    width = math.ceil((last + 1) / _COLUMNS)
    columns = math.ceil((last + 1) / width)
    errors = np.full((ranks, columns), np.nan)  # of diverging executions
    checked = np.zeros((ranks, columns), dtype=bool)
    for execution in report.executions:
        column = execution.step // width
        for rank, (wrong, error) in enumerate(zip(execution.wrong, execution.errors, strict=True)):
            checked[rank, column] = True
            if wrong:
                errors[rank, column] = np.nanmax([errors[rank, column], error])
    finite = errors[np.isfinite(errors) & (errors > 0)]
    low, high = (finite.min(), finite.max()) if finite.size else (1e-7, 1.0)
    low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** max(math.ceil(math.log10(high)), math.floor(math.log10(low)) + 1)

    figure = Figure(figsize=(9.0, 2.6 + 0.32 * min(ranks, 24)), layout="constrained")
    axes = figure.add_subplot(facecolor=_UNCHECKED)
    extent = (-0.5, columns * width - 0.5, ranks - 0.5, -0.5)
    common: dict[str, Any] = {"extent": extent, "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(np.where(checked, 0.0, np.nan), cmap=ListedColormap([_WITHIN]), **common)
    norm, colors = LogNorm(low, high), _colors()
    drawn = np.clip(errors, low, 10 * high)  # imshow would leave infinite errors out; they get the colour beyond the scale
    axes.imshow(drawn, cmap=colors, norm=norm, **common)
    if finite.size or np.isinf(errors).any():
        extend = "max" if np.isinf(errors).any() else "neither"
        bar = figure.colorbar(ScalarMappable(norm, colors), ax=axes, extend=extend, pad=0.015, aspect=14)
        bar.set_label("largest error /\nlargest value (no unit)", color=_INK)
    if report.first is not None:
        axes.plot(report.first.step, report.first.rank, marker="s", markersize=11, fillstyle="none", color=_INK, linestyle="none")
    axes.set_xlabel("step" if width == 1 else f"step ({width} to a column)", color=_INK)
    axes.set_ylabel("rank", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_title(_title(report), loc="left", fontsize=10, color=_INK)
    patches = [Patch(facecolor=_WITHIN, edgecolor="#9aa5a0", label="checked, within tolerance")]
    patches.append(Patch(facecolor=_UNCHECKED, edgecolor="#9aa5a0", label="not recorded or not checked"))
    if np.isinf(errors).any():
        patches.append(Patch(facecolor="black", label="one finite, one not"))
    if report.first is not None:
        from matplotlib.lines import Line2D

        patches.append(
            Line2D([], [], marker="s", markersize=9, fillstyle="none", color=_INK, linestyle="none", label="first divergence")  # type: ignore[arg-type]
        )
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _colors() -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    # Without the light end of the map, which would look like the colour of values within tolerance.
    part = colormaps["inferno_r"]([0.18 + 0.62 * place / 255 for place in range(256)])
    return LinearSegmentedColormap.from_list("errors", part).with_extremes(over="black")


def _title(report: TraceReport) -> str:
    if report.first is None:
        return f"Replayed as {report.algorithm}: no divergence in {report.values:,} values"
    first = report.first
    return (
        f"Replayed as {report.algorithm}: {report.diverging:,} of {report.values:,} values diverge\n"
        f"first at step {first.step}, rank {first.rank}, bucket {first.bucket!r}, tensor {first.tensor!r}{first.index}"
    )
