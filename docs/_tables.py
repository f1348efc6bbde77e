"""Tables of the docs, each from what a benchmark has written; `_benchmarks.py` puts them into the
pages.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import predicted_times as predicted
from common import load, measured, number, path_of
from links import RATES
from slow_link import AT_INTERVALS, EVERY_STEP, FASTER, LINKS
from time_to_quality import CONTENDERS, PEERS, TASKS, judged, target

from bagua_ref.cli import report
from bagua_ref.cli.recipes import Settings, TrainingOutcome

PER_TABLE = 6
"""Algorithms in a table of faults."""
LEARNT = {  # what slow_link.py calls it -> what learning_compressed.py calls it
    "bytegrad": "bytegrad",
    **{
        f"bytegrad, {codec}": f"bytegrad, {codec}, error memory"
        for codec in ("MXFP8", "MXFP4", "OneBit")
    },
    "powersgd": "powersgd, rank 1",
    **{name: name for name in ("powersgd, rank 4", "topk, 1 %")},
}


def grid(*rows: list[str]) -> str:
    """Return a table whose first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def comparison(name: str) -> str:
    """Return a benchmark's rows: ours, peers, ratio and target."""
    result = load(name)
    rows = []
    for row in result["rows"]:
        peers = ", ".join(f"{peer} {number(value)}" for peer, value in row["peers"].items())
        ratio = f"{row['ratio']:.2f} to {row['against']}{'' if row['kept'] else ' **missed**'}"
        unit = "" if row["unit"] == "-" else f" {row['unit']}"
        rows.append(
            [row["work"], number(row["ours"]) + unit, peers, ratio, row["limit"].replace("-", "–")]
        )
    return f"{grid(['work', 'ours', 'peers', 'ratio', 'target'], *rows)}\n\n{measured(result)}"


def gpu_kernels() -> str:
    """Return the share of copy bandwidth that each kernel of a GPU reaches, by dtype and size."""
    result = load("gpu_kernels")
    rows = [
        (*row["work"].rsplit(" ", 2), row["ratio"])
        for row in result["rows"]
        if row["against"] == "copy"
    ]
    columns = list(
        dict.fromkeys((dtype, size) for _, dtype, size, _ in rows if len(size) > len("262,144"))
    )
    found = {(kernel, dtype, size): ratio for kernel, dtype, size, ratio in rows}
    shares = [
        [kernel, *(f"{found[(kernel, *column)]:.2f}" for column in columns)]
        for kernel in dict.fromkeys(row[0] for row in rows)
    ]
    return f"{grid(['kernel', *(f'{dtype}, {size}' for dtype, size in columns)], *shares)}\n\n{measured(result)}"


def predicted_times() -> str:
    """Return how far predictions are from measured times, for each setting and for all."""
    result = load("predicted_times")
    groups = {
        name: [row for row in result["rows"] if row["setting"] == name]
        for name in (r["setting"] for r in result["rows"])
    }
    rows = [
        [name, str(len(group)), *(f"{part:.0%}" for part in predicted.judged(group).values())]
        for name, group in {**groups, "all": result["rows"]}.items()
    ]
    rows.append(
        ["target", "", *(f"{limit.kind} {bar:.0%}" for bar, limit in predicted.BARS.values())]
    )
    return f"{grid(['setting', 'times', 'median error', 'largest error', 'pairs in order'], *rows)}\n\n{measured(result)}"


def published_epochs() -> str:
    """Return published and predicted seconds of epochs of BERT-Large."""
    rows = {row["work"]: row for row in load("published_times")["rows"] if row["unit"] == "s"}
    names = dict.fromkeys(work.partition(", ")[0] for work in rows)
    networks = dict.fromkeys(work.partition(", ")[2] for work in rows)
    cells = [[rows[f"{name}, {network}"] for network in networks] for name in names]
    shown = [
        [f"{row['peers']['published']:,.0f}, {row['ours']:,.0f}" for row in found]
        for found in cells
    ]
    return grid(
        ["", *networks], *([f"`{name}`", *found] for name, found in zip(names, shown, strict=True))
    )


def on_paper(n: int) -> dict[str, float]:
    """Return the seconds in which n ranks add up 400 MB of gradients, each behind 100 Gbit/s and 20
    µs, by the formulas of S14.

    `bagua_ref.formulas.costs` lists all messages, of which there are billions at this scale; a test
    compares it for few ranks.
    """
    alpha, beta, size = 20e-6, 8e-11, 4e8
    group = 2 ** round(math.log2(n) / 2)
    rings = [(group, size), (n // group, size / group)]
    return {
        "ring": 2 * (n - 1) * (alpha + size / n * beta),
        "ring of rings": sum(2 * (k - 1) * (alpha + part / k * beta) for k, part in rings),
        "tree: reduce, broadcast": 2 * math.ceil(math.log2(n)) * (alpha + size * beta),
        "bytegrad, in turns": 2 * (n - 1) * (alpha + size / 4 / n * beta),
        "bytegrad, at once": 2 * (alpha + (n - 1) * size / 4 / n * beta),
        "one peer": alpha + size * beta,
        "ring, each 32nd step": 2 * (n - 1) * (alpha + size / n * beta) / 32,
    }


def scale_on_paper() -> str:
    """Return the milliseconds of each way to average, for 16 to 65,536 ranks."""
    times = {n: on_paper(n) for n in (16, 256, 4096, 65536)}
    rows = [
        [name, *(f"{1e3 * found[name]:,.0f}" for found in times.values())] for name in times[16]
    ]
    return grid(["", *(f"{n:,} ranks" for n in times)], *rows)


def scale() -> str:
    """Return the seconds of 20 steps on simulated ranks, and what they need."""
    result = load("scale")
    found = {(row["algorithm"], row["ranks"]): row for row in result["rows"]}
    ranks = sorted({n for _, n in found})
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        last = found[name, ranks[-1]]
        times = [f"{found[name, n]['ours']:.3g}" for n in ranks]
        memory = f"{last['memory_per_rank'] / 1e3:,.0f} KB"
        distance = (
            f"{last['distance']:.3g}, {last['distance_in_theory']:.3g}"
            if "distance" in last
            else "-"
        )
        rows.append([name, *times, number(last["peers"]["copy"]), memory, distance])
    head = [
        "",
        *(f"{n:,} ranks, s" for n in ranks),
        "copy, s",
        "memory per rank",
        "distance, in theory",
    ]
    return f"{grid(head, *rows)}\n\n{measured(result)}"


def fuse_step() -> str:
    """Return how many times as fast as the loop a fused step is, for some optimizers and shapes."""
    result, kinds = load("fuse_step"), ("gradients kept", "gradients new")
    found = {row["work"]: row for row in result["rows"]}

    def cells(row: dict[str, Any]) -> list[str]:
        return [
            f"{row['peers']['for-loop'] / row['ours']:.2f}{'' if row['kept'] else ' **missed**'}",
            f"{row['asked for']:g}",
        ]

    works = [f"{name} 500 x 1,000" for name in ("SGD", "Adam")]
    works += [
        f"{name} {shape}"
        for shape in ("ResNet-50", "GPT-2, width 256")
        for name in ("SGD", "AdamW")
    ]
    rows = [
        [work, *cells(found[f"{work}, {kinds[0]}"]), *cells(found[f"{work}, {kinds[1]}"])]
        for work in works
    ]
    return f"{grid(['', kinds[0], 'target', kinds[1], 'target'], *rows)}\n\n{measured(result)}"


def published_order() -> str:
    result = load("published_order")
    rows = [
        [
            row["work"],
            f"{row['ours']:.3f}",
            f"{min(row['seeds']):.3f} to {max(row['seeds']):.3f}",
            f"{row['most_bytes_per_step'] / 1e3:.0f}",
        ]
        for row in result["rows"]
    ]
    return f"{grid(['training', 'loss', 'of the seeds', 'kB that a rank sends in a step, at most'], *rows)}\n\n{measured(result)}"


def learning() -> str:
    result = load("learning")
    alone = result["rows"][0]["ours"]
    rows = [
        [
            row["work"],
            *(f"{seed:.1f}" for seed in row["seeds"]),
            f"**{row['ours']:.2f}**",
            f"{row['ours'] - alone:+.2f}",
        ]
        for row in result["rows"]
    ]
    seeds = [f"seed {seed}" for seed in range(len(result["rows"][0]["seeds"]))]
    return (
        f"{grid(['algorithm', *seeds, 'mean', 'to a single process'], *rows)}\n\n{measured(result)}"
    )


def _difference(row: dict[str, Any]) -> str:
    return f"{row['difference']:+.2f} ± {row['standard_error']:.2f}"


def learning_compressed() -> str:
    result = load("learning_compressed")
    rows = [
        [
            f"{row['work']}{'' if row['kept'] else ' **missed**'}",
            f"{row['ours']:.2f}",
            _difference(row),
        ]
        for row in result["rows"]
    ]
    return (
        f"{grid(['algorithm', 'accuracy', 'to `gradient_allreduce`'], *rows)}\n\n{measured(result)}"
    )


def slow_link() -> str:
    """Return each contender's bytes and milliseconds over every link, and what it learns."""
    result, learnt = (
        load("slow_link"),
        {row["work"]: _difference(row) for row in load("learning_compressed")["rows"]},
    )
    times = {(row["contender"], row["link"]): row for row in result["rows"]}
    rows = []
    for name in (*EVERY_STEP, *AT_INTERVALS):
        found = [times[name, link] for link in LINKS]
        sent = sorted(row["bytes_per_step"] / 1e6 for row in found)[len(found) // 2]
        cells = [
            f"{sent:.3g}",
            *(f"{row['ours']:,.0f}" for row in found),
            learnt.get(LEARNT.get(name, ""), "–"),
        ]
        rows.append([_linked(name, "algorithms/"), *cells])
    rows.sort(key=lambda row: "](" in row[0])  # peers first
    return (
        f"{grid(['algorithm', 'MB sent per step', *LINKS, 'learns'], *rows)}\n\n{measured(result)}"
    )


def demo() -> str:
    """Return the demo's table and verdicts from `_demo.json`, which `bagua-ref demo --json-file`
    wrote; its curves are cut.
    """
    result = json.loads(Path(__file__).with_name("_demo.json").read_text(encoding="utf-8"))
    settings = Settings(
        **{field.name: result["settings"][field.name] for field in fields(Settings)}
    )
    outcomes, predicted = (
        [TrainingOutcome(**row) for row in result["results"]],
        result["predicted_seconds"],
    )
    cells = [report.cells_of(outcome, settings, predicted) for outcome in outcomes]
    rows = [
        [_linked(name, "algorithms/"), *rest] for name, *rest in (row.values() for row in cells)
    ]
    verdicts = report.verdicts_of(outcomes, settings, predicted)
    said = "\n".join(f"- `{name}`: {text[0].lower()}{text[1:]}" for name, text in verdicts.items())
    return f"{grid(list(cells[0]), *rows)}\n\n{said}\n\n{measured({**result, 'rows': result['results']})}"


def _linked(name: str, folder: str) -> str:
    """Return a contender's name, with a link to its page if it is one of ours."""
    first, comma, rest = name.partition(", ")
    page = Path(__file__).parent / folder / f"{first}.md"
    return f"[`{first}`]({folder}{first}.md){comma}{rest}" if page.exists() else name


def slow_link_targets() -> str:
    result = load("slow_link")
    rows = []
    for row in result["rows"]:
        if row["contender"] in FASTER[row["link"]]:
            times, peer = f"{FASTER[row['link']][row['contender']][0]:g}", row["against"]
            rows.append(
                [
                    row["contender"],
                    row["link"],
                    f"{row['ours']:,.0f}",
                    f"{row['limit_ms']:,.0f}",
                    f"{peer}, {row['peers'][peer]:,.0f} ms",
                    f"{1 / row['ratio']:.2f}",
                    times if row["kept"] else f"{times}, **missed**",
                ]
            )
    rows.sort(key=lambda row: list(LINKS).index(row[1]))
    return grid(
        ["algorithm", "link", "ms per step", "bytes alone", "peer", "speed-up", "target"], *rows
    )


def picture(task: str, link: str) -> str:
    return f"time-to-quality-{task}-{link}.png".replace("/", "-per-").replace(" ", "-").lower()


def time_to_quality(task: str) -> str:
    """Return the seconds to the loss of a task over every link, and its pictures."""
    result = load("time_to_quality")
    rows = {
        (row.extra["link"], row.extra["contender"]): row
        for row in judged(result)
        if row.extra.get("task") == task
    }
    lines = []
    for name in CONTENDERS:
        found = [rows.get((link, name)) for link in RATES]
        times = [
            (
                "not measured"
                if row is None
                else f"{row.ours:.1f} s"
                if row.unit == "s"
                else "not reached"
            )
            for row in found
        ]
        steps = sorted({row.extra["steps"] for row in found if row is not None and row.unit == "s"})
        sent = sorted(
            row.extra["bytes"] / 1e6 for row in found if row is not None and row.unit == "s"
        )
        of = (
            [f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}", f"{sent[-1]:.1f}"]
            if steps
            else ["–", "–"]
        )
        first, comma, rest = name.partition(", ")
        lines.append([name if name in PEERS else f"`{first}`{comma}{rest}", *times, *of])
    drawn = [link for link in RATES if any((link, name) in rows for name in CONTENDERS)]
    pictures = "\n".join(
        f"![Held-out loss over seconds: {task}, {link}](images/{picture(task, link)})"
        for link in drawn
    )
    table = grid(["contender", *RATES, "steps", "MB sent by each rank"], *lines)
    return (
        f"Loss to reach: {target(result, task):.3f}.\n\n{table}\n\n{measured(result)}\n\n{pictures}"
    )


def faults_training() -> str:
    """Return how rank 0 and rank 1 ended, and the seconds of the slower one."""
    result = load("faults_training")
    algorithms = list(dict.fromkeys(row["algorithm"] for row in result["rows"]))
    cells = {
        (
            row["fault"],
            row["algorithm"],
        ): f"{' / '.join(dict.fromkeys(row['outcome']))}, {row['seconds']:g} s"
        for row in result["rows"]
    }
    tables = []
    # one table would be too wide to read
    for part in (algorithms[:PER_TABLE], algorithms[PER_TABLE:]):
        faults = dict.fromkeys(row["fault"] for row in result["rows"])
        rows = [
            [fault, *(cells.get((fault, algorithm), "not run") for algorithm in part)]
            for fault in faults
        ]
        tables.append(grid(["rank 1", *part], *rows))
    return "\n\n".join([*tables, measured(result)])


def faults_cache() -> str:
    rows = load("faults_cache")
    cells = [
        [row["fault"].replace("|", "/"), row["outcome"].partition(":")[0], f"{row['seconds']:.2f}"]
        for row in rows
    ]
    return grid(["the cache's server", "training", "seconds"], *cells)


def soak() -> str:
    result = load("soak")
    works: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        works.setdefault(row["work"], {})[row["unit"]] = row
    launches = works.pop("launches", {}).get("exit 0")
    rows = []
    for work, units in works.items():
        mib, threads, files, keys = (
            units[unit] for unit in ("MiB", "threads", "open files", "keys in Redis")
        )
        sizes = [
            f"{mib['steps']:,}",
            f"{mib['peers'][mib['against']]:.1f}",
            f"{mib['ours']:.1f}",
            f"{mib['ratio']:.3f}",
        ]
        rows.append([work, *sizes, _span(threads), _span(files), f"{keys['ours']:g}"])
    head = [
        "training",
        "steps",
        "MiB after 2,000 steps",
        "at the end",
        "ratio",
        "threads",
        "open files",
        "keys in Redis",
    ]
    ended = (
        f"{launches['ours']:g} of {launches['peers']['launches']:g} launches ended with exit"
        " status 0."
        if launches
        else ""
    )
    return "\n\n".join(filter(None, [grid(head, *rows), ended, measured(result)]))


def _span(row: dict[str, Any]) -> str:
    return " to ".join(
        dict.fromkeys(f"{value:g}" for value in (row["peers"]["least"], row["ours"]))
    )


TABLES: dict[str, Callable[[], str]] = {
    **{
        made.__name__: made
        for made in (fuse_step, gpu_kernels, learning, learning_compressed, published_order)
    },
    **{
        made.__name__: made
        for made in (
            slow_link,
            slow_link_targets,
            predicted_times,
            faults_training,
            faults_cache,
            soak,
        )
    },
    **{made.__name__: made for made in (published_epochs, scale, scale_on_paper, demo)},
    **{f"time_to_quality, {task}": partial(time_to_quality, task) for task in TASKS},
}
"""What fills the blocks of pages; others are named like a benchmark, and compare."""


def table(name: str) -> str | None:
    """Return what fills the block ``name``, None if it is not of results."""
    return (
        TABLES[name]() if name in TABLES else comparison(name) if path_of(name).exists() else None
    )
