"""Tables of docs/benchmarks.md and docs/reference/cuda.md from benchmarks/results: ``python docs/_benchmarks.py``.

A test fails if they are out of date.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGES = [Path(__file__).parent / f"{name}.md" for name in ("benchmarks", "reference/cuda")]
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
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


def _measured(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    return f"Measured: {result['date'][:10]}, {where}, torch {versions['torch']}."


def filled(page: Path) -> str:
    """Return the text of a page with its tables as the results are now."""

    def block(found: re.Match[str]) -> str:
        made = shares(found[1]) if found[1] == "gpu_kernels" else table(found[1])
        return f"<!-- {found[1]}: begin -->\n\n{made}\n\n<!-- {found[1]}: end -->\n"

    return BLOCK.sub(block, page.read_text())


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
