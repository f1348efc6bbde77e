"""Tables of docs/advise.md, docs/benchmarks.md and docs/reference/cuda.md from benchmarks/results: ``python docs/_benchmarks.py``.

A test fails if they are out of date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from predicted_times import BARS, judged  # noqa: E402

PAGES = [Path(__file__).parent / f"{name}.md" for name in ("advise", "benchmarks", "reference/cuda")]
RESULTS = BENCHMARKS / "results"
BLOCK = re.compile(r"<!-- (\w+): begin -->\n.*?<!-- \1: end -->\n", re.DOTALL)


def number(value: float | None) -> str:
    """Return three significant digits, whole from 100 on."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(name: str) -> str:
    """Return a benchmark's results, with the machine and the date below."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    rows = result["rows"]
    lines = ["| work | ours | peers | ratio | target |", "|---|---|---|---|---|"]
    for row in rows:
        peers = ", ".join(f"{peer} {number(value)}" for peer, value in row["peers"].items())
        ratio = f"{row['ratio']:.2f} to {row['against']}{'' if row['kept'] else ' **missed**'}"
        lines.append(
            f"| {row['work']} | {number(row['ours'])} {row['unit']} | {peers} | {ratio} | {row['limit'].replace('-', '–')} |"
        )
    return "\n".join([*lines, "", _measured(result)])


def shares(name: str) -> str:
    """Return the share of copy bandwidth that each kernel of a GPU reaches, by dtype and size."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    rows = [(*row["work"].rsplit(" ", 2), row["ratio"]) for row in result["rows"] if row["against"] == "copy"]
    columns = list(dict.fromkeys((dtype, size) for _, dtype, size, _ in rows if len(size) > len("262,144")))
    found = {(kernel, dtype, size): ratio for kernel, dtype, size, ratio in rows}
    lines = ["| kernel | " + " | ".join(f"{dtype}, {size}" for dtype, size in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for kernel in dict.fromkeys(kernel for kernel, *_ in rows):
        lines.append(f"| {kernel} | " + " | ".join(f"{found[(kernel, *column)]:.2f}" for column in columns) + " |")
    return "\n".join([*lines, "", _measured(result)])


def errors(name: str) -> str:
    """Return how far predictions are from measured times, for each setting and for all."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    rows = result["rows"]
    lines = ["| setting | times | median error | largest error | pairs in order |", "|---|---|---|---|---|"]
    groups = {
        setting: [row for row in rows if row["setting"] == setting] for setting in dict.fromkeys(row["setting"] for row in rows)
    }
    for setting, group in {**groups, "all": rows}.items():
        figures = (f"{figure:.0%}" for figure in judged(group).values())
        lines.append(f"| {setting} | {len(group)} | {' | '.join(figures)} |")
    bars = (f"{limit.kind} {bar:.0%}" for bar, limit in BARS.values())
    return "\n".join([*lines, f"| target | | {' | '.join(bars)} |", "", _measured(result["runs"][-1])])


def _measured(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    return f"Measured: {result['date'][:10]}, {where}, torch {versions['torch']}."


def filled(page: Path) -> str:
    """Return the text of a page with its tables as the results are now."""

    def block(found: re.Match[str]) -> str:
        made = {"gpu_kernels": shares, "predicted_times": errors}.get(found[1], table)(found[1])
        return f"<!-- {found[1]}: begin -->\n\n{made}\n\n<!-- {found[1]}: end -->\n"

    return BLOCK.sub(block, page.read_text())


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
