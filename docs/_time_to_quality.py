"""Plots of the first page and of docs/time-to-quality.md, from benchmarks/results: ``python
docs/_time_to_quality.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _tables import CONTENDERS, PEERS, RATES, TASKS, load, picture, target


def draw(result: dict[str, Any], task: str, link: str) -> None:
    """Draw losses by seconds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(5.4, 4.4), layout="constrained", dpi=160)
    axes = figure.add_subplot(
        title=f"{task}, {link}",
        xlabel="seconds",
        ylabel="held-out loss",
        xscale="log",
        yscale="log",
    )
    for row in result["rows"]:
        if (row["task"], row["link"]) == (task, link):
            name, (seconds, _, losses) = row["contender"], zip(*row["curve"], strict=True)
            style = {
                "color": f"C{CONTENDERS.index(name)}",
                "linestyle": "--" if name in PEERS else "-",
                "linewidth": 1.6,
            }
            axes.plot(seconds, losses, label=name, **style)
    axes.axhline(target(result, task), color="#808080", linewidth=0.8)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(color="#d5d8dd", linewidth=0.6)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(Path(__file__).parent / "images" / picture(task, link))


SHOWN = {
    "DDP": "DDP",
    "bytegrad": "bytegrad",
    "powersgd": "powersgd",
    "diloco, streaming": "diloco, every 32 steps",
}
"""Contenders of `draw_steps`, and their labels."""


def draw_steps(rows: list[dict[str, Any]]) -> None:
    """Draw the time of a step over the rate of the link."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "steps", "font.family": "sans-serif"}
    )
    figure = Figure(figsize=(5.6, 3), layout="constrained")
    axes = figure.add_subplot(ylabel="ms per training step", yscale="log")
    for place, (name, label) in enumerate(SHOWN.items()):
        times = {
            row["link"]: row["ours"]
            for row in rows
            if row["contender"] == name and row["link"] in RATES
        }
        (line,) = axes.plot(
            list(times), list(times.values()), color=f"C{place}", marker="o", linewidth=2
        )
        beside = {"xytext": (-8, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        axes.annotate(label, (0, times["10 Mbit/s"]), color=line.get_color(), **beside)
    axes.set_xlim(-1.3, 2.15)
    axes.set_xticks(range(3), list(RATES))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color="#d5d8dd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).parent / "images" / "plot-steps.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw_steps(load("slow_link")["rows"])
    result = load("time_to_quality")
    for task in TASKS:
        for link in RATES:
            if any((row["task"], row["link"]) == (task, link) for row in result["rows"]):
                draw(result, task, link)
