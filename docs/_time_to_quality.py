"""The page and the pictures of the time to quality, from what the benchmark has written: ``python docs/_time_to_quality.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from links import RATES  # noqa: E402
from time_to_quality import CONTENDERS, PEERS, TASKS, judged, target  # noqa: E402

PAGE = ROOT / "docs" / "time-to-quality.md"
_PAGE = """\
# Time to quality

How long a training over slow links takes until it is as good as one that averages gradients in every step.

Four processes are each behind a link of their own, and share two cores. The **digits** are scikit-learn's: a convolutional network
with 38,282 parameters, 16 images per process and step, SGD with momentum. The **language model** is a transformer with a million
parameters that predicts the next character of the text of Python's `help()`: 8 pieces of 64 characters per process and step, AdamW.

The loss to reach is the one on held-out data with which `gradient_allreduce` and DDP end, after 200 steps on digits and 64 steps
of the language model. The others may take more steps: they send everything once in 32. "Streaming" is
`fragments=4, delay=7, mix=0.5`: a quarter at a time, which has 7 steps to arrive. torchft's DiLoCo has the same fragments,
settings and optimizers. Its processes meet and send each other the model in the first exchange, which is in its time: a second on
digits, about 40 s of the language model at 10 Mbit/s. The others do this before the clock starts. DiLoCo's global weights are
judged, of the others those of rank 0. Weights are copied while the clock runs, and judged afterwards.

{tasks}
On digits, plain DiLoCo loses again what it has learnt, with bagua_ref as with torchft: its outer momentum overshoots once the loss
is small. Streaming with `mix=0.5` does not.

Made by `python benchmarks/time_to_quality.py` and `python docs/_time_to_quality.py`, on {dates}, with {versions}.
"""


def picture(task: str, link: str) -> str:
    return f"time-to-quality-{task}-{link}.png".replace("/", "-per-").replace(" ", "-").lower()


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
    figure.savefig(PAGE.parent / "images" / picture(task, link))


def section(result: dict[str, Any], task: str) -> str:
    rows = {(row.extra["link"], row.extra["contender"]): row for row in judged(result) if row.extra.get("task") == task}
    lines = [
        f"## {task.capitalize()}", "", f"Loss to reach: {target(result, task):.3f}.", "",
        f"| contender | {' | '.join(RATES)} | steps | MB sent by each rank |", "|---|" + "---|" * (len(RATES) + 2),
    ]  # fmt: skip
    for name in CONTENDERS:
        found = [rows.get((link, name)) for link in RATES]
        times = ["not measured" if row is None else f"{row.ours:.1f} s" if row.unit == "s" else "not reached" for row in found]
        steps = sorted({row.extra["steps"] for row in found if row is not None and row.unit == "s"})
        sent = sorted(row.extra["bytes"] / 1e6 for row in found if row is not None and row.unit == "s")
        of = [f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}", f"{sent[-1]:.1f}"] if steps else ["-", "-"]
        first, _, rest = name.partition(", ")
        shown = name if name in PEERS else f"`{first}`" + (f", {rest}" if rest else "")
        lines.append(f"| {' | '.join([shown, *times, *of])} |")
    measured = [link for link in RATES if any((link, name) in rows for name in CONTENDERS)]
    pictures = [f"![Held-out loss over seconds: {task}, {link}](images/{picture(task, link)})" for link in measured]
    return "\n".join([*lines, "", *pictures, ""])


def load() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "time_to_quality.json").read_text(encoding="utf-8"))


def page() -> str:
    """Return the page's text."""
    result = load()
    versions = {name: version for run in result["runs"] for name, version in run["versions"].items()}
    return _PAGE.format(
        tasks="\n".join(section(result, task) for task in TASKS),
        dates=" and ".join(sorted({run["date"][:10] for run in result["runs"]})),
        versions=" and ".join(f"{name} {versions[name]}" for name in ("torch", "torchft", "torchft-nightly") if name in versions),
    )


if __name__ == "__main__":
    result = load()
    for task in TASKS:
        for link in RATES:
            if any((row["task"], row["link"]) == (task, link) for row in result["rows"]):
                draw(result, task, link)
    PAGE.write_text(page(), encoding="utf-8")
