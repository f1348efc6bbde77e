"""Draw docs/images/plot-steps.png from the results of benchmarks/slow_link.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from common import load
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
LINES = {
    "DDP": "#444444",
    "bytegrad": "#1f77b4",
    "diloco, streaming": "#2ca02c",
    "powersgd": "#d62728",
}
LINKS = ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s")
TICKS = {10: "10 ms", 100: "100 ms", 1000: "1 s", 10_000: "10 s"}

if __name__ == "__main__":
    times = {(row["contender"], row["link"]): row["ours"] for row in load("slow_link")["rows"]}
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, color in LINES.items():
        values = [times[name, link] for link in LINKS]
        axes.plot(range(len(LINKS)), values, color=color, marker="o")
        axes.annotate(
            name, (2, values[-1]), (8, 0), textcoords="offset points", va="center", color=color
        )
    axes.set_yscale("log")
    axes.set_yticks(list(TICKS), TICKS.values())
    axes.minorticks_off()
    axes.set_xticks(range(len(LINKS)), LINKS)
    axes.set_xlim(-0.1, 2.75)
    axes.set_ylabel("time of a training step")
    axes.set_xlabel("bandwidth of each process's link")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs/images/plot-steps.png", dpi=160, metadata={"Software": None})
