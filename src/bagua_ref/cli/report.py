"""The demo's results: a table on the terminal, ``index.html`` with curves, and ``results.json``."""

from __future__ import annotations

import json
import platform
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from html import escape
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch

import bagua_ref
from bagua_ref.algorithms import GlobalAlgorithmRegistry
from bagua_ref.base.utils import readable_bytes
from bagua_ref.cli.command import machine, print_rows
from bagua_ref.cli.recipes import (
    ALONE,
    RECIPES,
    Settings,
    TrainingOutcome,
    make_model,
    make_optimizer,
)
from bagua_ref.data_parallel.wrapping import named
from bagua_ref.planning import Estimate, MeasuredMachine, StepPlan, costs_of_job, plan_of, predict

__all__ = [
    "cells_of",
    "draw_curves",
    "predict_times",
    "print_table",
    "trailing_mean",
    "verdicts_of",
    "write_report",
]

_HEADERS = {
    "algorithm": "algorithm",
    "test accuracy": "test\naccuracy",
    "final loss": "final\nloss",
    "sent per step and rank": "sent per\nstep, rank",
    "ratio to full precision": "ratio\nto full",
    "weight difference": "weight\ndiff.",
    "ms per step": "ms per\nstep",
}
"""The page's columns that the terminal's table has, too, and their narrow headers there."""

_RATES = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7}
_LATENCY = Estimate.within(50e-6, 0.0)
_FULL = "gradient_allreduce"
_FASTER = 1.1  # from here on an algorithm is called faster than full precision

# Okabe and Ito's palette, slightly darker for contrast. As a pair, color and dashes are a curve's
# own.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07800", "#56b4e9")
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))
_GRAY = "#808080"
"""The color of axes and texts, which light and dark pages both show."""


def print_table(
    outcomes: Sequence[TrainingOutcome], settings: Settings, console: Any = None
) -> None:
    """Print the table and the verdicts."""
    predicted = predict_times(outcomes, settings)
    rows = [cells_of(outcome, settings, predicted) for outcome in outcomes]
    print_rows(
        _headline(settings),
        list(_HEADERS.values()),
        [[row[column] for column in _HEADERS] for row in rows],
        console,
    )
    for name, text in verdicts_of(outcomes, settings, predicted).items():
        print(f"{name}: {text}", file=console and console.file)


def write_report(outcomes: Sequence[TrainingOutcome], settings: Settings, output: Path) -> Path:
    """Write ``index.html`` and ``results.json`` into the folder ``output``; return the page's
    path.
    """
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(settings),
        "machine": machine(),
        "versions": {
            "bagua_ref": bagua_ref.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "settings": {
            **asdict(settings),
            "batch": settings.batch,
            "steps": settings.steps,
            "parameters": _parameters(),
        },
        "results": [asdict(outcome) for outcome in outcomes],
        "predicted_seconds": predict_times(outcomes, settings),
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    page = output / "index.html"
    page.write_text(_page(outcomes, settings, results))
    return page


def predict_times(
    outcomes: Sequence[TrainingOutcome], settings: Settings
) -> dict[str, dict[str, float]]:
    """Return the seconds of a step after the warm-up, by algorithm and rate, if each worker had a
    machine of its own (S14).

    Codecs take as long as they did in the demo. So does compute: the median over algorithms, as all
    train the same network. Full precision is always there; other algorithms are missing if too few
    steps were trained to know their codec and bytes.
    """
    assumed = MeasuredMachine(None, (_LATENCY, Estimate.within(0.0, 0.0)), shared_processor=True)
    found: dict[str, tuple[StepPlan, MeasuredMachine]] = {}
    for outcome in outcomes:
        if outcome.metrics:
            plan = _plan(outcome.algorithm, settings)
            try:
                found[outcome.algorithm] = (
                    plan,
                    costs_of_job(outcome.metrics, plan, _LATENCY, assumed, 0.0),
                )
            except ValueError:
                # without a whole cycle of exchanges, bytes per step are not the plan's
                continue
    if not found:
        return {}
    compute = Estimate.within(
        median(costs.compute.value for _, costs in found.values() if costs.compute), 0.0
    )
    found.setdefault(_FULL, (_plan(_FULL, settings), assumed))

    def seconds(plan: StepPlan, costs: MeasuredMachine, rate: float) -> float:
        links = _LATENCY, Estimate.within(8 / rate, 0.0)
        return predict(plan, replace(costs, compute=compute, between=links).machine()).seconds

    return {
        name: {rate: seconds(*each, bits) for rate, bits in _RATES.items()}
        for name, each in found.items()
    }


def _plan(name: str, settings: Settings) -> StepPlan:
    model = make_model()
    algorithm = named(name, [make_optimizer(name, model.parameters())], **RECIPES[name].options)
    return plan_of(algorithm, model, (1,) * settings.ranks)


def cells_of(
    outcome: TrainingOutcome, settings: Settings, predicted: dict[str, dict[str, float]]
) -> dict[str, str]:
    """Return the cells of an outcome's row on the page, by column."""
    alone, times = outcome.algorithm == ALONE, predicted.get(outcome.algorithm, {})
    warmup = (
        f"{min(outcome.warmup_steps, settings.steps)} of {settings.steps}"
        if outcome.warmup_steps
        else "-"
    )
    return {
        "algorithm": outcome.algorithm,
        "test accuracy": f"{outcome.test_accuracy:.1%}",
        "final loss": f"{outcome.final_loss:.4f}",
        "sent per step and rank": "-" if alone else readable_bytes(outcome.bytes_per_step),
        "ratio to full precision": "-" if outcome.ratio is None else f"{outcome.ratio:.3f}",
        "steps of warm-up": warmup,
        "weight difference": "-" if alone else f"{outcome.weight_difference:.2g}",
        "ms per step": f"{1e3 / outcome.steps_per_second:.1f}",
        **{
            f"ms at {rate}": f"{1e3 * times[rate]:.1f}" if rate in times else "-" for rate in _RATES
        },
    }


def verdicts_of(
    outcomes: Sequence[TrainingOutcome], settings: Settings, predicted: dict[str, dict[str, float]]
) -> dict[str, str]:
    """Return a sentence on each algorithm: accuracy, bytes and predicted speed."""
    accuracy = {outcome.algorithm: outcome.test_accuracy for outcome in outcomes}
    alone = None if settings.quick else accuracy.get(ALONE)
    return {
        name: _verdict(o, settings, alone, predicted)
        for o in outcomes
        if (name := o.algorithm) != ALONE
    }


def _verdict(
    outcome: TrainingOutcome,
    settings: Settings,
    alone: float | None,
    predicted: dict[str, dict[str, float]],
) -> str:
    if outcome.warmup_steps >= settings.steps:
        return (
            f"All {settings.steps} steps were warm-up, in which whole gradients are all-reduced, so"
            " nothing was saved yet."
        )
    parts = []
    if alone is not None:
        points = 100 * (outcome.test_accuracy - alone)
        away = (
            f"ends {abs(points):.1f} points {'below' if points < 0 else 'above'} the single"
            " process's accuracy"
        )
        parts.append(
            "keeps the single process's accuracy to within a point" if abs(points) < 1 else away
        )
    part = (
        "nothing"
        if outcome.ratio is None
        else f"{outcome.ratio:.0%} of the bytes of full precision"
    )
    parts.append(
        f"sends {part}"
        + f", {outcome.warmup_steps} steps of warm-up included" * (outcome.warmup_steps > 0)
    )
    times = predicted.get(outcome.algorithm)
    if times is None:
        speed = "it was trained for too few steps to predict times"
    elif outcome.algorithm == _FULL:
        speed = "the others are compared with it"
    else:
        faster = {rate: predicted[_FULL][rate] / times[rate] for rate in _RATES}
        worth = [
            f"{factor:.1f} times as fast at {rate}"
            for rate, factor in faster.items()
            if factor >= _FASTER
        ]
        speed = f"its steps should be {', '.join(worth) or f'no faster than those of {_FULL}'}"
    text = f"{', and '.join(parts)}; {speed}."
    return text[0].upper() + text[1:]


def _headline(settings: Settings) -> str:
    workers = "1 worker" if settings.ranks == 1 else f"{settings.ranks} workers"
    return (
        f"{workers}, {settings.steps} steps of {settings.batch * settings.ranks} images,"
        f" {_parameters():,} parameters"
    )


def _command(settings: Settings) -> str:
    names = [] if settings.algorithms == tuple(RECIPES) else ["--algorithms", *settings.algorithms]
    length = "--quick" if settings.quick else f"--epochs {settings.epochs}"
    return " ".join(
        ["bagua-ref demo", f"--ranks {settings.ranks}", length, f"--seed {settings.seed}", *names]
    )


def _parameters() -> int:
    return sum(parameter.numel() for parameter in make_model().parameters())


def _page(outcomes: Sequence[TrainingOutcome], settings: Settings, results: dict[str, Any]) -> str:
    predicted, where = results["predicted_seconds"], results["machine"]
    rows = [cells_of(outcome, settings, predicted) for outcome in outcomes]
    verdicts = {
        name: escape(text) for name, text in verdicts_of(outcomes, settings, predicted).items()
    }
    return _PAGE.format(
        headline=escape(_headline(settings)),
        workers=settings.ranks,
        cores=f"{where['cores']} core{'s' * (where['cores'] != 1)}",
        headers="".join(f"<th scope=col>{escape(header)}</th>" for header in rows[0]),
        rows="\n".join(
            "<tr><th"
            f" scope=row>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
            for first, *rest in (row.values() for row in rows)
        ),
        figures="\n".join(
            _figure(outcomes, settings, kind, caption) for kind, caption in _CAPTIONS.items()
        ),
        algorithms="\n".join(
            f"<div><dt>{_linked(f'algorithms/{name}', name)}</dt><dd>{text}</dd><dd"
            f" class=soft>{_about(name)}</dd></div>"
            for name, text in verdicts.items()
        ),
        formulas=_linked("advise", "bagua-ref advise"),
        command=escape(results["command"]),
        made=escape(
            f"{results['date'][:16].replace('T', ' ')} UTC, {where['system']}, {where['cpu']}, "
            + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        ),
    )


def _about(name: str) -> str:
    """Return the registered description of an algorithm, without its clauses, which its page
    links.
    """
    text = re.sub(r" \(S\d[^)]*\)", "", GlobalAlgorithmRegistry[name][1])
    return re.sub(r"``(.*?)``", r"<code>\1</code>", escape(text))


def _linked(page: str, text: str) -> str:
    """Return the text with a link to a page of the docs, if this is a checkout: the built page, or
    else its source.
    """
    root = Path(bagua_ref.__file__).parents[2]
    found = next(
        (path for path in (root / f"site/{page}.html", root / f"docs/{page}.md") if path.is_file()),
        None,
    )
    return (
        escape(text) if found is None else f'<a href="{escape(found.as_uri())}">{escape(text)}</a>'
    )


def _figure(
    outcomes: Sequence[TrainingOutcome], settings: Settings, kind: str, caption: str
) -> str:
    buffer = BytesIO()
    draw_curves(outcomes, kind, settings.steps_per_epoch).savefig(
        buffer, format="svg", metadata={"Date": None}
    )
    source = f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"
    return (
        f'<figure><img src="{source}"'
        f' alt="{escape(caption)}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def draw_curves(outcomes: Sequence[TrainingOutcome], kind: str, window: int) -> Any:
    """Return a matplotlib Figure.

    Args:
        outcomes: the outcomes, one for each curve.
        kind: "loss" or "traffic" by step, or "loss by traffic".
        window: the number of steps over which losses are averaged, up to each step.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 5.4), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    together = [outcome for outcome in outcomes if outcome.algorithm != ALONE]
    shown: list[float] = []
    for outcome in outcomes:
        losses = trailing_mean(outcome.losses, window)
        shown += losses
        steps = range(1, len(losses) + 1)
        megabytes = [count / 1e6 for count in outcome.bytes_sent]
        if outcome.algorithm == ALONE:
            if kind == "loss":
                axes.plot(steps, losses, color=_GRAY, alpha=0.4, linewidth=6, label=ALONE)
            continue
        place = together.index(outcome)
        x, y = {
            "loss": (steps, losses),
            "traffic": (steps, megabytes),
            "loss by traffic": (megabytes, losses),
        }[kind]
        style: dict[str, Any] = {
            "color": _COLORS[place % len(_COLORS)],
            "linestyle": _DASHES[place // len(_COLORS) % len(_DASHES)],
        }
        if outcome.warmup_steps:
            style |= {
                "marker": "o",
                "markevery": [min(outcome.warmup_steps, len(losses)) - 1],
                "markersize": 7,
            }
        width = max(1.2, 2.8 - 0.2 * place)  # curves that coincide remain visible
        axes.plot(x, y, **style, linewidth=width, label=outcome.algorithm)
    axes.set_xlabel("MB sent by each rank" if kind == "loss by traffic" else "step")
    axes.set_ylabel("MB sent by each rank" if kind == "traffic" else "training loss")
    if kind != "traffic" and max(shown) > 10 * min(shown):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color=_GRAY, alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", colors=_GRAY)
    parts: list[Any] = [*axes.spines.values(), axes.xaxis.label, axes.yaxis.label]
    for part in parts:
        part.set_color(_GRAY)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=_GRAY)
    return figure


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Return, for each value, the mean of the last ``window`` values (fewer at the beginning).

    >>> trailing_mean([4.0, 2.0, 0.0], 2)
    [4.0, 3.0, 1.0]
    """
    sums = [0.0, *accumulate(values)]
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]


_CAPTIONS = {
    "loss": (
        "Training loss: mean over ranks and over the epoch that ends at each step. Dots end"
        " warm-ups."
    ),
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
th, td {{ padding: .4rem .6rem; border-bottom: 1px solid #8886; text-align: right; font-weight: normal; }}
th[scope=row], dt, code {{ font-family: ui-monospace, monospace; font-size: .95em; }}
th:first-child {{ text-align: left; }}
td, th[scope=row] {{ white-space: nowrap; }}
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
<li>In a warm-up, whole gradients are all-reduced, so the ratio is 1. What is sent is the mean over all steps.</li>
<li>The weight difference is the largest difference between two ranks in any weight after the last step.</li>
<li>"ms per step" is measured here, where {workers} processes share {cores} and messages cost almost nothing: a single process is
faster, and compression takes more time than it saves. The columns after it are predicted: each worker on a machine like this one,
joined by links of that rate with 50 µs of latency, with the compute and codec times of this run, after the warm-up.
{formulas} predicts the same for your model and network.</li>
<li><code>async</code> averages weights in the background, at intervals of time. A run this short has few such rounds; between them,
each rank learns only from its own images, so the final loss is higher.</li>
</ul>
<h2>Algorithms</h2>
<dl class="grid">
{algorithms}
</dl>
<h2>Curves</h2>
<div class="grid">
{figures}
</div>
<h2>This run</h2>
<p class="soft"><code>{command}</code><br>{made}. The numbers are in results.json.</p>
</body>
</html>
"""
