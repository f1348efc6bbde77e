"""Tables of docs/reference/faults.md from what ``make faults`` and ``make soak`` measured: ``python docs/_faults.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("reference") / "faults.md"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PER_TABLE = 6
"""Algorithms in a table of faults."""
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def cell(row: dict[str, Any]) -> str:
    """Return how rank 0 and rank 1 ended, and the seconds of the slower one."""
    first, second = row["outcome"]
    ended = first if first == second else f"{first} / {second}"
    return f"{ended}, {row['seconds']:g} s"


def runs(result: dict[str, Any]) -> str:
    """Return when and where the rows of a result come from."""
    counts: dict[str, int] = {}
    for row in result["rows"]:
        run = result["runs"][row["run"]]
        where = f"{run['machine']['cores']} cores, torch {run['versions']['torch']}, Python {run['versions']['python']}"
        where = f"{run['date'][:10]}, {run['machine']['cpu']}, {where}"
        counts[where] = counts.get(where, 0) + 1
    shares = [f"{count} of {len(result['rows'])} " * (len(counts) > 1) + where for where, count in counts.items()]
    return f"Measured: {'; '.join(shares)}."


def training() -> str:
    result = read("faults_training")
    rows: list[dict[str, Any]] = result["rows"]
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    cells = {(row["fault"], row["algorithm"]): cell(row) for row in rows}
    lines = []
    for part in (algorithms[:PER_TABLE], algorithms[PER_TABLE:]):  # one table would be too wide to read
        lines += [f"| rank 1 | {' | '.join(part)} |", "|---" * (len(part) + 1) + "|"]
        for fault in dict.fromkeys(row["fault"] for row in rows):
            found = [cells.get((fault, algorithm), "not run") for algorithm in part]
            lines.append(f"| {fault} | {' | '.join(found)} |")
        lines.append("")
    return "\n".join([*lines, runs(result)])


def soak() -> str:
    result = read("soak")
    works: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        works.setdefault(row["work"], {})[row["unit"]] = row
    launches = works.pop("launches", None)
    lines = [
        "| training | steps | MiB after 2,000 steps | at the end | ratio | threads | open files | keys in Redis |",
        "|---" * 8 + "|",
    ]
    for work, units in works.items():
        mib, threads, files, keys = (units[unit] for unit in ("MiB", "threads", "open files", "keys in Redis"))
        sizes = f"{mib['steps']:,} | {mib['peers'][mib['against']]:.1f} | {mib['ours']:.1f} | {mib['ratio']:.3f}"
        lines.append(f"| {work} | {sizes} | {span(threads)} | {span(files)} | {keys['ours']:g} |")
    if launches is not None:
        row = launches["exit 0"]
        lines += ["", f"{row['ours']:g} of {row['peers']['launches']:g} launches ended with exit status 0."]
    return "\n".join([*lines, "", runs(result)])


def span(row: dict[str, Any]) -> str:
    least, most = row["peers"]["least"], row["ours"]
    return f"{most:g}" if least == most else f"{least:g} to {most:g}"


def cache() -> str:
    lines = ["| the cache's server | training | seconds |", "|---|---|---|"]
    for row in read("faults_cache"):
        outcome = row["outcome"].partition(":")[0]
        lines.append(f"| {row['fault'].replace('|', '/')} | {outcome} | {row['seconds']:.2f} |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page with the tables as they are now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{training()}\n\n### Cache\n\n{cache()}\n\n### Long runs\n\n{soak()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
