"""A picture of graphs for decentralized averaging: the ranks on a circle in each round, with arrows from senders to receivers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bagua_ref.formulas.graphs import Graph

__all__ = ["draw_graphs"]

_INK, _ARROW, _RANK = "#1c1e21", "#0072b2", "#e8f1fa"
_PANELS, _COLUMNS = 12, 4
_NUMBERED = 36
"""Up to so many ranks have their numbers inside their circles; of more, some have it beside them."""


def draw_graphs(graphs: Sequence[Graph], title: str) -> Any:
    """Return a matplotlib Figure with a panel for each of the first rounds."""
    from matplotlib.figure import Figure

    shown = graphs[:_PANELS]
    columns = min(len(shown), _COLUMNS)
    rows = -(-len(shown) // columns)
    side = {1: 5.0, 2: 4.4}.get(columns, 3.6)
    figure = Figure(figsize=(max(columns * side, 6.4), rows * (side + 0.2) + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=11, color=_INK)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for place, (graph, axes) in enumerate(zip(shown, panels, strict=False)):
        _draw_round(axes, graph, side)
        if len(graphs) > 1:
            axes.set_title(f"round {place}", fontsize=10, color=_INK)
    for axes in panels:
        axes.set_axis_off()
    if len(graphs) > len(shown):
        figure.supxlabel(f"the first {len(shown)} of {len(graphs)} rounds", fontsize=9, color=_INK)
    return figure


def _draw_round(axes: Any, graph: Graph, side: float) -> None:
    n = len(graph)
    angles = [math.pi / 2 - 2 * math.pi * rank / n for rank in range(n)]  # clockwise from the top
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    size = 15.0 if n <= _NUMBERED else max(1.0, 60 * side / n)  # of a rank, in points
    sources = [{source for source, _ in row} for row in graph]
    thin = 1.0 if n <= _NUMBERED else 0.5
    largest = max((weight for rank, row in enumerate(graph) for source, weight in row if source != rank), default=0) or 1.0
    for receiver, row in enumerate(graph):
        for source, weight in row:
            both = receiver in sources[source]
            if source != receiver and not (both and source > receiver):
                style = "<|-|>" if both else "-|>"
                _draw_arrow(axes, places[source], places[receiver], style, thin * (0.3 + 0.9 * weight / largest), size)
    axes.plot(*zip(*places, strict=True), linestyle="", marker="o", markersize=size, color=_RANK, markeredgecolor=_INK, zorder=3)
    for rank in range(0, n, 1 if n <= _NUMBERED else -(-n // 32)):
        x, y = places[rank] if n <= _NUMBERED else (1.12 * places[rank][0], 1.12 * places[rank][1])
        axes.text(x, y, str(rank), ha="center", va="center", fontsize=7.5, color=_INK, zorder=4)
    limit = 1.15 if n <= _NUMBERED else 1.25
    axes.set_xlim(-limit, limit)
    axes.set_ylim(-limit, limit)
    axes.set_aspect("equal")


def _draw_arrow(
    axes: Any, source: tuple[float, float], receiver: tuple[float, float], style: str, width: float, size: float
) -> None:
    """Draw an arrow that bends towards the middle of the circle, so that it is not hidden between neighbours."""
    dx, dy = receiver[0] - source[0], receiver[1] - source[1]
    middle = (source[0] + receiver[0], source[1] + receiver[1])
    inwards = 1 if middle[1] * dx - middle[0] * dy > 0 else -1
    axes.annotate(
        "",
        receiver,
        source,
        arrowprops={
            "arrowstyle": style,
            "connectionstyle": f"arc3,rad={inwards * 0.35 * (1 - math.hypot(dx, dy) / 2):.3f}",
            "mutation_scale": min(9.0, 2.5 + size),
            "linewidth": width,
            "color": _ARROW,
            "shrinkA": size / 2 + 0.5,
            "shrinkB": size / 2 + 0.5,
        },
    )
