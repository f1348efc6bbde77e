"""A timeline of the last calls of each rank."""

from __future__ import annotations

import itertools
from typing import Any

from bagua_ref.explain.verdict import Explanation

_RANKS = 64
_CALLS = 20


def draw_timeline(found: Explanation, colors: tuple[str, ...]) -> Any:
    """Return a matplotlib Figure of the last calls of up to 64 ranks: dots are completed calls,
    bars are pending until the dump.
    """
    from matplotlib.figure import Figure

    ranks = sorted({*[call.rank for call in found.waits], *found.dumps})
    awaited = {rank for call in found.waits for rank in call.waits_for}
    ranks = sorted(sorted(ranks, key=lambda rank: rank not in awaited)[:_RANKS])
    figure = Figure(figsize=(9.0, 1.6 + 0.3 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    end = max(dump.time for dump in found.dumps.values())
    names: dict[str, str] = {}
    for place, rank in enumerate(ranks):
        tracks = (of[rank][-_CALLS:] for of in found.tracks.values() if rank in of)
        for row in itertools.chain(*tracks):
            name = found.operations[row["operation"]].text.partition(" ")[0]
            color = names.setdefault(name, colors[len(names) % len(colors)])
            start = row["created"] / 1e9 - end
            axes.plot(start, place, marker="o", markersize=4, color=color)
            if row["pending"]:
                axes.barh(place, found.dumps[rank].time - end - start, 0.5, start, color=color)
    for name, color in names.items():
        axes.plot([], [], marker="o", linestyle="", color=color, label=name)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds before the last dump (dots: complete, bars: waiting)")
    if names:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
