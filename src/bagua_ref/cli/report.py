"""The demo's results: a table on the terminal, ``index.html`` with curves, and ``results.json``."""

from __future__ import annotations

import json
import platform
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from html import escape
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import bagua_ref
from bagua_ref.algorithms import GlobalAlgorithmRegistry
from bagua_ref.cli.command import print_rows
from bagua_ref.cli.recipes import ALONE, Settings, TrainingOutcome, make_model

__all__ = ["draw_curves", "print_table", "trailing_mean", "write_report"]

_HEADERS = {
    "algorithm": "algorithm",
    "test accuracy": "test\naccuracy",
    "final loss": "final\nloss",
    "sent per step and rank": "sent per\nstep, rank",
    "ratio to full precision": "ratio\nto full",
    "steps per second": "steps/s",
    "weight difference": "weight\ndiff.",
}
"""The headers of the table's columns, and their narrow forms for terminals."""

# Okabe and Ito's palette, slightly darker for contrast; dashes help where curves overlap.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07800", "#56b4e9")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 3)))


def print_table(outcomes: Sequence[TrainingOutcome], settings: Settings, console: Any = None) -> None:
    """Print the table."""
    print_rows(_headline(settings), list(_HEADERS.values()), [outcome.cells() for outcome in outcomes], console)


def write_report(outcomes: Sequence[TrainingOutcome], settings: Settings, output: Path) -> Path:
    """Write ``index.html`` and ``results.json`` into the folder ``output``; return the page's path."""
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"bagua_ref": bagua_ref.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "settings": {**asdict(settings), "batch": settings.batch, "steps": settings.steps, "parameters": _parameters()},
        "results": [asdict(outcome) for outcome in outcomes],
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    page = output / "index.html"
    page.write_text(_page(outcomes, settings))
    return page


def _headline(settings: Settings) -> str:
    workers = "1 worker" if settings.workers == 1 else f"{settings.workers} workers"
    return f"{workers}, {settings.steps} steps of {settings.batch * settings.workers} images, {_parameters():,} parameters"


def _parameters() -> int:
    return sum(parameter.numel() for parameter in make_model().parameters())


def _page(outcomes: Sequence[TrainingOutcome], settings: Settings) -> str:
    return _PAGE.format(
        headline=escape(_headline(settings)),
        workers=settings.workers,
        headers="".join(f"<th scope=col>{escape(header)}</th>" for header in _HEADERS),
        rows="\n".join(_row(outcome.cells()) for outcome in outcomes),
        figures="\n".join(_figure(outcomes, settings, kind, caption) for kind, caption in _CAPTIONS.items()),
        algorithms="\n".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(GlobalAlgorithmRegistry[name][1])}</dd></div>" for name in settings.algorithms
        ),
        made=f"bagua_ref {bagua_ref.__version__}, torch {torch.__version__}, seed {settings.seed}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    )


def _row(cells: Sequence[str]) -> str:
    first, *others = map(escape, cells)
    return f"<tr><th scope=row>{first}</th>{''.join(f'<td>{cell}</td>' for cell in others)}</tr>"


def _figure(outcomes: Sequence[TrainingOutcome], settings: Settings, kind: str, caption: str) -> str:
    buffer = BytesIO()
    draw_curves(outcomes, kind, settings.steps_per_epoch).savefig(buffer, format="svg", metadata={"Date": None})
    source = f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"
    return f'<figure><img src="{source}" alt="{escape(caption)}"><figcaption>{escape(caption)}</figcaption></figure>'


def draw_curves(outcomes: Sequence[TrainingOutcome], kind: str, window: int) -> Any:
    """Return a matplotlib Figure.

    Args:
        outcomes: the outcomes, one for each curve.
        kind: "loss" or "traffic" by step, or "loss by traffic".
        window: the number of steps over which losses are averaged, up to each step.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    together = [outcome for outcome in outcomes if outcome.algorithm != ALONE]
    for outcome in outcomes:
        losses = trailing_mean(outcome.losses, window)
        steps = range(1, len(losses) + 1)
        megabytes = [count / 1e6 for count in outcome.bytes_sent]
        if outcome.algorithm == ALONE:
            if kind == "loss":
                axes.plot(steps, losses, color="black", alpha=0.3, linewidth=6, label=ALONE)
            continue
        place = together.index(outcome)
        x, y = {"loss": (steps, losses), "traffic": (steps, megabytes), "loss by traffic": (megabytes, losses)}[kind]
        color, dashes = _COLORS[place % len(_COLORS)], _DASHES[place % len(_DASHES)]
        axes.plot(x, y, color=color, linestyle=dashes, linewidth=1.8, label=outcome.algorithm)
    axes.set_xlabel("MB sent by each rank" if kind == "loss by traffic" else "step")
    axes.set_ylabel("MB sent by each rank" if kind == "traffic" else "training loss")
    if kind != "traffic":
        axes.set_yscale("log")
    axes.grid(color="#d5d8dd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Return, for each value, the mean of the last ``window`` values (fewer at the beginning).

    >>> trailing_mean([4.0, 2.0, 0.0], 2)
    [4.0, 3.0, 1.0]
    """
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]


_CAPTIONS = {
    "loss": "Training loss: mean over ranks and over the epoch that ends at each step.",
    "traffic": "What each rank has sent since the first step.",
    "loss by traffic": "The same loss against the bytes sent: further left is cheaper.",
}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bagua_ref demo</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 2rem auto; max-width: 75rem; padding: 0 1.2rem; font: 16px/1.5 system-ui, sans-serif; }}
p, ul {{ max-width: 46rem; }}
.soft, figcaption, th[scope=col] {{ opacity: .7; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .4rem .7rem; border-bottom: 1px solid; text-align: right; font-weight: normal; }}
th[scope=row], dt, code {{ font-family: ui-monospace, monospace; font-size: .95em; }}
th:first-child {{ text-align: left; }}
.grid {{ display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); }}
figure, dl, dd {{ margin: 0; }}
img {{ display: block; width: 100%; }}
</style>
</head>
<body>
<h1>Training on handwritten digits</h1>
<p class="soft">{headline}</p>
<p>The same network was trained from the same weights on the same batches, once in a single process and then with each algorithm on
{workers} processes of this machine. An algorithm does well if its loss falls as fast as the single process's, its accuracy is the
same, and it sends less than full precision.</p>
<div class="wide">
<table>
<thead><tr>{headers}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
<ul class="soft">
<li>One test image is 0.3 % of accuracy.</li>
<li>Bytes are computed from tensor sizes: 2(n-1)/n of a buffer that is all-reduced, (n-1)/n of one that is gathered or exchanged, a
message as it is. Full precision is an all-reduce of all gradients in float32.</li>
<li>Messages between processes of one machine cost almost nothing, so here compression takes more time than it saves.</li>
<li>The weight difference is the largest difference between two ranks in any weight after the last step.</li>
<li><code>async</code> averages weights in the background, at intervals of time. A run this short has few such rounds; between them,
each rank learns only from its own images, so the final loss is higher.</li>
</ul>
<h2>Curves</h2>
<div class="grid">
{figures}
</div>
<h2>Algorithms</h2>
<dl class="grid">
{algorithms}
</dl>
<p class="soft">{made}. The numbers are in results.json.</p>
</body>
</html>
"""
