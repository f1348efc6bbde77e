"""Tables of docs/benchmarks.md from benchmarks/results: ``python docs/_benchmarks.py``. A test fails if they are out of date."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("benchmarks.md")
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
    machine, versions = result["machine"], result["versions"]
    where = f"{result['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, torch {versions['torch']}"
    return "\n".join([*lines, "", f"Measured: {where}."])


def page() -> str:
    return BLOCK.sub(
        lambda block: f"<!-- {block[1]}: begin -->\n\n{table(block[1])}\n\n<!-- {block[1]}: end -->\n", PAGE.read_text()
    )


if __name__ == "__main__":
    PAGE.write_text(page())
