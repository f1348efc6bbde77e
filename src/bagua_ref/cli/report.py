"""The demo's results as a table on the terminal, as ``index.html`` with curves and as ``results.json``."""

from __future__ import annotations

import json
import platform
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import bagua_ref
from bagua_ref.algorithms import GlobalAlgorithmRegistry
from bagua_ref.cli.curves import draw_curves
from bagua_ref.cli.progress import readable_bytes
from bagua_ref.cli.recipes import ALONE, Settings, make_model
from bagua_ref.cli.results import TrainingOutcome

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_table", "table_rows", "write_report"]

_HEADERS = (
    "algorithm",
    "test accuracy",
    "final loss",
    "sent per step and rank",
    "ratio to full precision",
    "steps per second",
    "weight difference",
)
_NARROW_HEADERS = (
    "algorithm",
    "test\naccuracy",
    "final\nloss",
    "sent per\nstep, rank",
    "ratio\nto full",
    "steps/s",
    "weight\ndiff.",
)


def table_rows(outcomes: Sequence[TrainingOutcome]) -> list[tuple[str, ...]]:
    """Return the table's cells, a row per outcome."""
    return [
        (
            outcome.algorithm,
            f"{outcome.test_accuracy:.1%}",
            f"{outcome.final_loss:.4f}",
            "-" if outcome.algorithm == ALONE else readable_bytes(outcome.bytes_per_step),
            "-" if outcome.ratio is None else f"{outcome.ratio:.3f}",
            f"{outcome.steps_per_second:.0f}",
            "-" if outcome.algorithm == ALONE else f"{outcome.weight_difference:.2g}",
        )
        for outcome in outcomes
    ]


def print_table(outcomes: Sequence[TrainingOutcome], settings: Settings, console: Console) -> None:
    """Print the table."""
    from rich import box
    from rich.table import Table

    roomy = console.width >= 100
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if roomy else 0), title_justify="left", title=_headline(settings))
    for place, header in enumerate(_NARROW_HEADERS):
        table.add_column(header, justify="right" if place else "left", no_wrap=place == 0)
    for row in table_rows(outcomes):
        table.add_row(*row)
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
        rows="\n".join(_row(cells) for cells in table_rows(outcomes)),
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
    labelled = (f'<td data-label="{escape(header)}">{escape(cell)}</td>' for header, cell in zip(_HEADERS[1:], others, strict=True))
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
