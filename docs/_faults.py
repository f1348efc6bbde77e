"""The tables of docs/faults.md, written by ``python docs/_faults.py`` from what ``make faults`` has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("faults.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def read(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())
    return rows


def cell(row: dict[str, Any]) -> str:
    """Return how rank 0 and rank 1 ended, and the seconds of the slower one."""
    first, second = row["outcome"]
    ended = first if first == second else f"{first} / {second}"
    return f"{ended}, {row['seconds']:g} s"


def training() -> str:
    rows = read("faults_training")
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    cells = {(row["fault"], row["algorithm"]): cell(row) for row in rows}
    lines = [f"| rank 1 | {' | '.join(algorithms)} |", "|---" * (len(algorithms) + 1) + "|"]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        lines.append(f"| {fault} | {' | '.join(cells[fault, algorithm] for algorithm in algorithms)} |")
    return "\n".join(lines)


def cache() -> str:
    lines = ["| the cache's server | training | seconds |", "|---|---|---|"]
    for row in read("faults_cache"):
        outcome = row["outcome"].partition(":")[0]
        lines.append(f"| {row['fault'].replace('|', '/')} | {outcome} | {row['seconds']:.2f} |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page with the tables as they are now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{training()}\n\n### Cache\n\n{cache()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
