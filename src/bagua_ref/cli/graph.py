"""``bagua-ref graph``: the graphs of decentralized training, and their speed of consensus."""

from __future__ import annotations

import math
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from bagua_ref.cli.command import (
    CommandError,
    Outcome,
    check_choice,
    foreign_code,
    load_object,
    write_picture,
)
from bagua_ref.formulas.graphs import MODES, Graph, checked_graph
from bagua_ref.formulas.mixing import Mixing, mixing

__all__ = ["draw_graphs", "run", "verdict"]

_MAX_DRAWN = 64  # ranks whose numbers fit in their circles
_PANELS, _COLUMNS = 12, 4


def run(arguments: Namespace) -> Outcome:
    """Print the graphs of a mode or a function, and their mixing properties."""
    mode, n = arguments.mode, arguments.ranks
    if arguments.png is not None and n > _MAX_DRAWN:
        raise CommandError(f"argument --png: pictures have up to {_MAX_DRAWN} ranks, not {n}")
    if ":" in mode:
        graphs = _of_function(mode, n, arguments.period or 1)
    else:
        check_choice("MODE", [mode], [*MODES, "pkg.mod:function"])
        if arguments.period is not None:
            raise CommandError("argument --period: it is for functions only; modes have their own")
        if not MODES[mode].takes(n):
            raise CommandError(
                f"argument --ranks: {mode} needs {MODES[mode].sizes} of ranks, not {n}"
            )
        graphs = MODES[mode].graphs(n)
    found = mixing(graphs, arguments.tolerance)
    summary = verdict(found, arguments.tolerance)
    title = f"{mode}, {n} ranks: {summary}, spectral gap {found.spectral_gap:.3g}"
    title += f" per period of {found.period} rounds" if found.period > 1 else ""
    picture = write_picture(lambda: draw_graphs(graphs, title), arguments.png)
    result = {
        "mode": mode,
        "ranks": n,
        "period": found.period,
        "graphs": graphs,
        "contraction": found.contraction,
        "spectral_gap": found.spectral_gap,
        "spectral_gap_per_round": found.gap_per_round,
        "tolerance": arguments.tolerance,
        "rounds_to_consensus": found.rounds,
        "exact": found.exact,
        "picture": None if arguments.png is None else str(arguments.png),
    }
    return Outcome(_text(mode, graphs, found, summary) + picture, result)


def verdict(found: Mixing, tolerance: float) -> str:
    """Describe in words after how many rounds the ranks reach consensus."""
    if found.rounds is None:
        return "never"
    rounds = f"{found.rounds} round{'s' * (found.rounds != 1)}"
    return f"exact after {rounds}" if found.exact else f"{rounds} to within {tolerance:g}"


def _of_function(path: str, n: int, period: int) -> list[Graph]:
    function = load_object(path)
    graphs = []
    for t in range(period):
        with foreign_code(f"{path}(t={t}, n={n})"):
            graphs.append(checked_graph(function(t, n), n))
    return graphs


def _text(mode: str, graphs: list[Graph], found: Mixing, summary: str) -> str:
    n, period = len(graphs[0]), len(graphs)
    same = "the same graph in every round" if period == 1 else f"a period of {period} rounds"
    lines = [f"{mode} on {n} rank{'s' * (n != 1)}, {same}"]
    for t, graph in enumerate(graphs):
        when = "" if period == 1 else f" (t = {t}, {t + period}, {t + 2 * period}, ...)"
        sends = ", ".join(_sends(graph)) or "nobody sends"
        lines += [
            f"\nround {t}{when}",
            textwrap.indent(textwrap.fill(sends, 78, break_on_hyphens=False), "  "),
        ]
    of = "of the matrix of a round"
    if period > 1:
        of = f"of {period} rounds; {found.gap_per_round:.6g} per round (geometric mean)"
    return "\n".join(
        [
            *lines,
            f"\nconsensus     {summary}",
            f"spectral gap  {found.spectral_gap:.6g} {of}",
            f"\nNext: bagua-ref advise --algorithm \"decentralized:peer_selection_mode='{mode}'\" ...",
        ]
    )


def _sends(graph: Graph) -> list[str]:
    """Describe senders and receivers in words; an exchange between two ranks appears once."""
    receivers: list[list[int]] = [[] for _ in graph]
    for receiver, row in enumerate(graph):
        for source, _ in row:
            if source != receiver:
                receivers[source].append(receiver)
    if len(graph) > 8 and all(len(peers) == len(graph) - 1 for peers in receivers):
        return ["every rank -> every other rank"]
    words = []
    for source, peers in enumerate(receivers):
        if len(peers) == 1 and receivers[peers[0]] == [source]:
            words += [f"{source} <-> {peers[0]}"] if source < peers[0] else []
        elif peers:
            words.append(f"{source} -> {' '.join(map(str, peers))}")
    return words


def draw_graphs(graphs: Sequence[Graph], title: str) -> Any:
    """Return a matplotlib Figure with one panel for each of the first rounds."""
    from matplotlib.figure import Figure

    shown = graphs[:_PANELS]
    columns = min(len(shown), _COLUMNS)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(max(3.6 * columns, 6.4), 3.8 * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for t, (graph, axes) in enumerate(zip(shown, panels, strict=False)):
        _draw_round(axes, graph)
        axes.set_title(f"round {t}" if len(graphs) > 1 else "", fontsize=10)
    for axes in panels:
        axes.set_axis_off()
    if len(graphs) > len(shown):
        figure.supxlabel(f"the first {len(shown)} of {len(graphs)} rounds", fontsize=9)
    return figure


def _draw_round(axes: Any, graph: Graph) -> None:
    """Draw ranks on a circle, clockwise from the top, with arrows from senders to receivers."""
    n = len(graph)
    angles = [math.pi / 2 - 2 * math.pi * rank / n for rank in range(n)]
    points = [(math.cos(angle), math.sin(angle)) for angle in angles]
    size = min(15.0, 480 / n)  # of a rank, in points
    sources = [{source for source, _ in row} for row in graph]
    for receiver, row in enumerate(sources):
        for source in row - {receiver}:
            both = receiver in sources[source]
            if both and source > receiver:
                continue
            style: dict[str, Any] = {"arrowstyle": "<|-|>" if both else "-|>", "color": "#0072b2"}
            style |= {"shrinkA": size / 2, "shrinkB": size / 2, "connectionstyle": "arc3,rad=0.15"}
            axes.annotate("", points[receiver], points[source], arrowprops=style)
    axes.plot(*zip(*points, strict=True), "o", markersize=size, color="#e8f1fa", mec="#1c1e21")
    for rank, point in enumerate(points):
        axes.text(*point, str(rank), ha="center", va="center", fontsize=size / 2)
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
