"""The demo's results: a table on the terminal, ``index.html`` with curves, and ``results.json``."""

from __future__ import annotations

import json
import platform
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from html import escape
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import bagua_ref
from bagua_ref.algorithms import GlobalAlgorithmRegistry
from bagua_ref.base.utils import readable_bytes
from bagua_ref.cli.recipes import ALONE, Settings, make_model

__all__ = ["TrainingOutcome", "draw_curves", "print_table", "readable_bytes", "trailing_mean", "write_report"]

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

# Okabe and Ito's palette, slightly darker or lighter for contrast; dashes help where curves overlap.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07800", "#56b4e9")
_COLORS_ON_DARK = ("#4fa9e8", "#ff8a3d", "#2fcf9f", "#e79ac8", "#f0c030", "#a9dcff")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 3)))


@dataclass(frozen=True)
class TrainingOutcome:
    """The outcome of training with one algorithm.

    Attributes:
        algorithm: its name, or `ALONE`.
        test_accuracy: the share of test images that are classified correctly, mean over ranks.
        final_loss: the training loss, mean over ranks and the last epoch.
        bytes_per_step: bytes sent per step and rank.
        ratio: bytes_per_step divided by the bytes of a float32 all-reduce of the gradients; None if that needs no communication.
        steps_per_second: the speed of the slowest rank.
        weight_difference: the largest difference of any weight between two ranks after the last step.
        losses: the loss of each step, mean over ranks.
        bytes_sent: bytes sent up to each step, mean over ranks.
    """

    algorithm: str
    test_accuracy: float
    final_loss: float
    bytes_per_step: float
    ratio: float | None
    steps_per_second: float
    weight_difference: float
    losses: list[float]
    bytes_sent: list[float]

    def cells(self) -> tuple[str, ...]:
        """Return the cells of its row in the table."""
        return (
            self.algorithm,
            f"{self.test_accuracy:.1%}",
            f"{self.final_loss:.4f}",
            "-" if self.algorithm == ALONE else readable_bytes(self.bytes_per_step),
            "-" if self.ratio is None else f"{self.ratio:.3f}",
            f"{self.steps_per_second:.0f}",
            "-" if self.algorithm == ALONE else f"{self.weight_difference:.2g}",
        )


def print_table(outcomes: Sequence[TrainingOutcome], settings: Settings, console: Any) -> None:
    """Print the table."""
    from rich import box
    from rich.table import Table

    roomy = console.width >= 100
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if roomy else 0), title_justify="left", title=_headline(settings))
    for place, header in enumerate(_HEADERS.values()):
        table.add_column(header, justify="right" if place else "left", no_wrap=place == 0)
    for outcome in outcomes:
        table.add_row(*outcome.cells())
    console.print(table)


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
        async_note=_async_note({outcome.algorithm: outcome for outcome in outcomes}, settings),
        figures="\n".join(_figure(outcomes, settings, kind, caption) for kind, caption in _CAPTIONS.items()),
        algorithms="\n".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(GlobalAlgorithmRegistry[name][1])}</dd></div>" for name in settings.algorithms
        ),
        made=f"bagua_ref {bagua_ref.__version__}, torch {torch.__version__}, seed {settings.seed}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    )


def _row(cells: Sequence[str]) -> str:
    """Return one row of the table; its cells carry their headers for narrow screens, where each row is a block of lines."""
    first, *others = cells
    labelled = (
        f'<td data-label="{escape(header)}">{escape(cell)}</td>' for header, cell in zip(list(_HEADERS)[1:], others, strict=True)
    )
    return f"<tr><th scope=row>{escape(first)}</th>{''.join(labelled)}</tr>"


def _async_note(outcomes: Mapping[str, TrainingOutcome], settings: Settings) -> str:
    """Return why the loss of ``async`` lags behind, or nothing if it does not."""
    single, own = outcomes.get(ALONE), outcomes.get("async")
    if single is None or own is None or own.ratio is None or own.final_loss <= single.final_loss:
        return ""
    rounds = round(own.ratio * settings.steps)  # a round sends what one all-reduce of all gradients would
    return (
        "<li><code>async</code> averages weights in the background, at intervals of time. A run this short has few such rounds: "
        f"about {rounds} in {settings.steps} steps. Between them, each rank learns only from its own {settings.batch} of the "
        f"{settings.batch * settings.workers} images of a step, so the final loss is higher.</li>"
    )


def _figure(outcomes: Sequence[TrainingOutcome], settings: Settings, kind: str, caption: str) -> str:
    """Return one figure with a drawing for light and one for dark pages."""
    sources = {}
    for dark in (False, True):
        buffer = BytesIO()
        draw_curves(outcomes, kind, settings.steps_per_epoch, dark=dark).savefig(buffer, format="svg", metadata={"Date": None})
        sources[dark] = f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{sources[True]}">'
        f'<img src="{sources[False]}" alt="{escape(caption)}"></picture><figcaption>{escape(caption)}</figcaption></figure>'
    )


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
:root {{ color-scheme: light dark; --ink: #1c1e21; --soft: #5c6370; --line: #d5d8dd; --page: #ffffff; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e7ea; --soft: #a3a9b5; --line: #3a3f48; --page: #16181c; }} }}
body {{ margin: 2rem auto; max-width: 110rem; padding: 0 1.2rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin-bottom: 0; }}
h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
p, ul {{ max-width: 46rem; }}
.soft, figcaption {{ color: var(--soft); }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .4rem clamp(.3rem, .9vw, .9rem); border-bottom: 1px solid var(--line); text-align: right; font-weight: normal; }}
th[scope=col] {{ color: var(--soft); vertical-align: bottom; max-width: 8rem; }}
td {{ white-space: nowrap; }}
th[scope=row], dt, code {{ font-family: ui-monospace, monospace; font-size: .95em; }}
th:first-child {{ text-align: left; padding-left: 0; }}
.notes {{ padding-left: 1.2rem; }}
.notes li {{ margin-bottom: .5rem; }}
.grid {{ display: grid; gap: 1.5rem; }}
figure, dl, dd {{ margin: 0; }}
img {{ display: block; width: 100%; height: auto; }}
@media (max-width: 60rem) {{ table {{ font-size: .9rem; }} }}
@media (max-width: 46rem) {{ /* every row becomes a block, every cell a line of it */
  table, tbody, tr, th[scope=row] {{ display: block; }}
  thead {{ display: none; }}
  tr {{ margin-bottom: 1rem; padding: .7rem 1rem; border: 1px solid var(--line); border-radius: .5rem; }}
  th[scope=row] {{ border: 0; padding: 0 0 .3rem; font-weight: bold; }}
  table {{ font-size: 1rem; }}
  td {{ display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; }}
  td::before {{ content: attr(data-label); color: var(--soft); }}
}}
@media (min-width: 46rem) {{ /* two plots beside each other, and the third below in the middle */
  .grid {{ grid-template-columns: repeat(2, minmax(0, 1fr)); }}
  figure:last-child {{ grid-column: 1 / -1; justify-self: center; width: calc(50% - .75rem); }}
}}
@media (min-width: 75rem) {{ /* all three beside each other */
  .grid {{ grid-template-columns: repeat(3, minmax(0, 1fr)); }}
  figure:last-child {{ grid-column: auto; width: 100%; }}
}}
@media (min-width: 85rem) {{ /* the notes beside the table */
  .results {{ display: grid; grid-template-columns: 54rem minmax(0, 1fr); gap: 3rem; align-items: start; }}
}}
</style>
</head>
<body>
<h1>Training on handwritten digits</h1>
<p class="soft">{headline}</p>
<p>The same network was trained from the same weights on the same batches, once in a single process and then with each algorithm on
{workers} processes of this machine. An algorithm does well if its loss falls as fast as the single process's, its accuracy is the
same, and it sends less than full precision.</p>
<div class="results">
<table>
<thead><tr>{headers}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<ul class="soft notes">
<li>One test image is 0.3 % of accuracy.</li>
<li>Bytes are computed from tensor sizes: 2(n-1)/n of a buffer that is all-reduced, (n-1)/n of one that is gathered or exchanged, a
message as it is. Full precision is an all-reduce of all gradients in float32.</li>
<li>Messages between processes of one machine cost almost nothing, so here compression takes more time than it saves.</li>
<li>The weight difference is the largest difference between two ranks in any weight after the last step.</li>
{async_note}
</ul>
</div>
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
