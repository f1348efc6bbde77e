"""``bagua-ref graph``: the graphs of decentralized training, and the speed at which ranks come to
consensus.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua_ref.cli.command import (
    Commands,
    add_command,
    add_json_options,
    foreign_code,
    load_object,
    write_json,
    write_picture,
)
from bagua_ref.formulas.graphs import MODES, Graph, checked_graph
from bagua_ref.formulas.mixing import Mixing, mixing

__all__ = ["add_parser", "draw_graphs", "verdict"]

_MOST_RANKS = 1024  # a matrix of these has 8 MB
_IN_TEXT = 32  # ranks, of which a row of the matrix fits 80 columns
_IN_PICTURE = 128  # ranks, whose arrows are drawn in seconds
_INK, _ARROW, _RANK = "#1c1e21", "#0072b2", "#e8f1fa"
_PANELS, _COLUMNS = 12, 4
_NUMBERED = 36
"""Up to so many ranks have their numbers inside their circles; of more, some have it beside
them.
"""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``graph`` to the commands of ``bagua-ref``."""
    graph = add_command(
        commands,
        "graph",
        _graph,
        examples=(
            "bagua-ref graph ring --ranks 8",
            "bagua-ref graph mycode:my_graph --ranks 8 --period 3",
        ),
        description=(
            "Print the graphs of a peer_selection_mode: in each round, who sends to whom, drawn as"
            " a matrix; and how fast averaging along them brings ranks to consensus."
        ),
    )
    graph.add_argument(
        "mode",
        metavar="MODE",
        help=f"{', '.join(MODES)}; or pkg.mod:function, a function (t, n) -> graph of your own",
    )
    graph.add_argument(
        "--ranks",
        type=int,
        required=True,
        metavar="N",
        help="number of ranks (hierarchical: of nodes)",
    )
    graph.add_argument(
        "--period",
        type=int,
        metavar="P",
        help="number of rounds after which a function's graphs repeat (default: 1)",
    )
    graph.add_argument(
        "--tolerance",
        type=float,
        default=1e-6,
        metavar="X",
        help=(
            "distance from the mean, relative to that at the start, that counts as consensus"
            " (default: %(default)s)"
        ),
    )
    graph.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the graphs of the rounds; needs matplotlib"
    )
    add_json_options(graph)


def _graph(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.ranks <= _MOST_RANKS:
        parser.error(f"argument --ranks: {arguments.ranks} must be from 1 to {_MOST_RANKS}")
    if arguments.period is not None and (arguments.mode in MODES or arguments.period < 1):
        parser.error(
            "argument --period: it must be 1 or more, and is for functions only; modes with names"
            " have their own"
        )
    if not 0 < arguments.tolerance < 1:
        parser.error(f"argument --tolerance: {arguments.tolerance} must be between 0 and 1")
    if arguments.png is not None and arguments.ranks > _IN_PICTURE:
        parser.error(
            f"argument --png: of {arguments.ranks} ranks no picture can be drawn, only of up to"
            f" {_IN_PICTURE}"
        )
    if arguments.mode in MODES:
        if not MODES[arguments.mode].takes(arguments.ranks):
            parser.error(
                f"argument --ranks: {arguments.mode} needs {MODES[arguments.mode].sizes} of ranks,"
                f" not {arguments.ranks}"
            )
        graphs = MODES[arguments.mode].graphs(arguments.ranks)
    elif ":" in arguments.mode:
        graphs = _of_function(arguments.mode, arguments.ranks, arguments.period or 1)
    else:
        parser.error(
            f"argument MODE: invalid choice: {arguments.mode!r} (choose from {', '.join(MODES)}),"
            " nor of the form pkg.mod:function"
        )
    found = mixing(graphs, arguments.tolerance)
    if not arguments.json:
        _print(arguments.mode, graphs, found, arguments.tolerance)
    title = f"{arguments.mode}, {arguments.ranks} ranks: {verdict(found, arguments.tolerance)}"
    title += f", spectral gap {found.spectral_gap:.3g}"
    title += f" per period of {found.period} rounds" if found.period > 1 else ""
    write_picture(lambda: draw_graphs(graphs, title), arguments.png)
    result = {
        "mode": arguments.mode,
        "ranks": arguments.ranks,
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
    write_json(arguments, result)
    return 0


def verdict(found: Mixing, tolerance: float) -> str:
    """Return in words when ranks have come to consensus."""
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


def _print(mode: str, graphs: list[Graph], found: Mixing, tolerance: float) -> None:
    n, period = len(graphs[0]), len(graphs)
    print(
        f"{mode} on {n} rank{'s' * (n != 1)},"
        f" {'the same graph in every round' if period == 1 else f'a period of {period} rounds'}"
    )
    for t, graph in enumerate(graphs):
        print(
            f"\nround {t}"
            + ("" if period == 1 else f" (t = {t}, {t + period}, {t + 2 * period}, ...)")
        )
        print(_wrapped(_sends(graph)) or "  nobody sends")
        if n <= _IN_TEXT:
            print()
            print(_matrix(graph))
    if n <= _IN_TEXT:
        print("\nA row for each receiver, a column for each sender: o itself, x another rank.")
    else:
        print(f"\nMatrices are drawn for up to {_IN_TEXT} ranks.")
    print(f"\nconsensus     {verdict(found, tolerance)}")
    print(
        f"spectral gap  {found.spectral_gap:.6g}: 1 - the second-largest singular value,"
        f" {found.contraction:.6g}, of"
    )
    print(
        "              the matrix of a round"
        if period == 1
        else f"              the product of the matrices of {period} rounds"
    )
    if period > 1:
        print(f"              {found.gap_per_round:.6g} per round (geometric mean)")


def _wrapped(items: list[str]) -> str:
    """Return the items, none of them broken, in lines of up to 80 characters."""
    whole = [item.replace(" ", "\0") for item in items]
    lines = textwrap.wrap(", ".join(whole), 78, break_on_hyphens=False, break_long_words=False)
    return "\n".join(f"  {line}" for line in lines).replace("\0", " ")


def _sends(graph: Graph) -> list[str]:
    """Return senders and receivers in words; an exchange of two ranks, once."""
    receivers: list[list[int]] = [[] for _ in graph]
    for receiver, row in enumerate(graph):
        for source, _ in row:
            if source != receiver:
                receivers[source].append(receiver)
    if len(graph) > 8 and all(len(found) == len(graph) - 1 for found in receivers):
        return ["every rank -> every other rank"]
    words = []
    for source, found in enumerate(receivers):
        if len(found) == 1 and receivers[found[0]] == [source]:
            words += [f"{source} <-> {found[0]}"] if source < found[0] else []
        elif found:
            words.append(f"{source} -> {' '.join(map(str, found))}")
    return words


def _matrix(graph: Graph) -> str:
    n = len(graph)
    lines = [f"  {'from':>6}  " + " ".join(f"{source % 10}" for source in range(n))]
    for receiver, row in enumerate(graph):
        sources = {source for source, _ in row}
        cells = [
            "." if source not in sources else "o" if source == receiver else "x"
            for source in range(n)
        ]
        lines.append(f"  {'to' if not receiver else '':>2} {receiver:3}  {' '.join(cells)}")
    return "\n".join(lines)


def draw_graphs(graphs: Sequence[Graph], title: str) -> Any:
    """Return a matplotlib Figure with a panel for each of the first rounds."""
    from matplotlib.figure import Figure

    shown = graphs[:_PANELS]
    columns = min(len(shown), _COLUMNS)
    rows = -(-len(shown) // columns)
    side = {1: 5.0, 2: 4.4}.get(columns, 3.6)
    figure = Figure(
        figsize=(max(columns * side, 6.4), rows * (side + 0.2) + 0.5), layout="constrained"
    )
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
    largest = (
        max(
            (weight for rank, row in enumerate(graph) for source, weight in row if source != rank),
            default=0,
        )
        or 1.0
    )
    for receiver, row in enumerate(graph):
        for source, weight in row:
            both = receiver in sources[source]
            if source != receiver and not (both and source > receiver):
                style = "<|-|>" if both else "-|>"
                _draw_arrow(
                    axes,
                    places[source],
                    places[receiver],
                    style,
                    thin * (0.3 + 0.9 * weight / largest),
                    size,
                )
    axes.plot(
        *zip(*places, strict=True),
        linestyle="",
        marker="o",
        markersize=size,
        color=_RANK,
        markeredgecolor=_INK,
        zorder=3,
    )
    for rank in range(0, n, 1 if n <= _NUMBERED else -(-n // 32)):
        x, y = places[rank] if n <= _NUMBERED else (1.12 * places[rank][0], 1.12 * places[rank][1])
        axes.text(x, y, str(rank), ha="center", va="center", fontsize=7.5, color=_INK, zorder=4)
    limit = 1.15 if n <= _NUMBERED else 1.25
    axes.set_xlim(-limit, limit)
    axes.set_ylim(-limit, limit)
    axes.set_aspect("equal")


def _draw_arrow(
    axes: Any,
    source: tuple[float, float],
    receiver: tuple[float, float],
    style: str,
    width: float,
    size: float,
) -> None:
    """Draw an arrow that bends towards the middle of the circle, so that it is not hidden between
    neighbours.
    """
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
