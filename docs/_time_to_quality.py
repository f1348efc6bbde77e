"""The pictures of docs/time-to-quality.md, from what the benchmark has written: ``python docs/_time_to_quality.py``."""

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
    axes = figure.add_subplot(title=f"{task}, {link}", xlabel="seconds", ylabel="held-out loss", xscale="log", yscale="log")
    for row in result["rows"]:
        if (row["task"], row["link"]) == (task, link):
            name, (seconds, _, losses) = row["contender"], zip(*row["curve"], strict=True)
            style = {"color": f"C{CONTENDERS.index(name)}", "linestyle": "--" if name in PEERS else "-", "linewidth": 1.6}
            axes.plot(seconds, losses, label=name, **style)
    axes.axhline(target(result, task), color="#808080", linewidth=0.8)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(color="#d5d8dd", linewidth=0.6)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(Path(__file__).parent / "images" / picture(task, link))


if __name__ == "__main__":
    result = load("time_to_quality")
    for task in TASKS:
        for link in RATES:
            if any((row["task"], row["link"]) == (task, link) for row in result["rows"]):
                draw(result, task, link)
