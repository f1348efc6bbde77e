"""The demo's curves, drawn with matplotlib for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from bagua_ref.cli.recipes import ALONE
from bagua_ref.cli.results import TrainingOutcome

__all__ = ["draw_curves", "trailing_mean"]

# Okabe and Ito's palette, slightly darker or lighter for contrast; dashes help where curves overlap.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07800", "#56b4e9")
_COLORS_ON_DARK = ("#4fa9e8", "#ff8a3d", "#2fcf9f", "#e79ac8", "#f0c030", "#a9dcff")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 3)))


def draw_curves(outcomes: Sequence[TrainingOutcome], kind: str, window: int, *, dark: bool) -> Any:
    """Return a matplotlib Figure with a transparent background.

    Args:
        outcomes: the outcomes, one for each curve.
        kind: "loss" or "traffic" by step, or "loss by traffic".
        window: the number of steps over which losses are averaged, up to each step.
        dark: whether the page is dark.
    """
    from matplotlib.figure import Figure

    ink, grid, colors = ("#e6e7ea", "#3a3f48", _COLORS_ON_DARK) if dark else ("#1c1e21", "#d5d8dd", _COLORS)
    figure = Figure(figsize=(5.4, 4.0), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot(facecolor="none")
    together = [outcome for outcome in outcomes if outcome.algorithm != ALONE]
    for outcome in outcomes:
        losses = trailing_mean(outcome.losses, window)
        steps = range(1, len(losses) + 1)
        megabytes = [count / 1e6 for count in outcome.bytes_sent]
        if outcome.algorithm == ALONE:
            if kind == "loss":
                axes.plot(steps, losses, color=ink, alpha=0.3, linewidth=6, label=ALONE)
            continue
        place = together.index(outcome)
        x, y = {"loss": (steps, losses), "traffic": (steps, megabytes), "loss by traffic": (megabytes, losses)}[kind]
        axes.plot(
            x, y, color=colors[place % len(colors)], linestyle=_DASHES[place % len(_DASHES)], linewidth=1.8, label=outcome.algorithm
        )
    axes.set_xlabel("MB sent by each rank" if kind == "loss by traffic" else "step", color=ink)
    axes.set_ylabel("MB sent by each rank" if kind == "traffic" else "training loss", color=ink)
    if kind != "traffic":
        axes.set_yscale("log")
    axes.grid(color=grid, linewidth=0.6)
    axes.tick_params(which="both", colors=ink)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(ink)
    axes.legend(frameon=False, labelcolor=ink)
    return figure


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Return, for each value, the mean of the last ``window`` values (fewer at the beginning).

    >>> trailing_mean([4.0, 2.0, 0.0], 2)
    [4.0, 3.0, 1.0]
    """
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]
