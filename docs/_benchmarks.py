"""Figures of README.md and the docs, from benchmarks/results: ``python docs/_benchmarks.py`` fills
them in, and a test compares.

A table stands between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``, the name of a benchmark
or of a table of `_tables.py`. A number in a sentence is followed by where it is from, and is
written with as many decimals as it has there:

    takes 351<!-- = allreduce_step: memory, perceptron, 25e6 elements in 8: ours --> MiB

names a file, a row and an entry of it, or one of its peers. ``-difference`` changes the sign,
``ours / 1e3`` divides.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _tables import judged, load, table
from common import as_json

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"<!-- ([\w, ]+): begin -->\n.*?<!-- \1: end -->\n", re.DOTALL)
FIGURE = re.compile(
    r"([-+]?\d[\d,]*(?:\.(\d+))?)<!-- = (\w+): ([^>]+): (-?)([^>:/]+?)(?: / (\S+))? -->"
)


def figure(found: re.Match[str]) -> str:
    """Return a number in a sentence as it is now, with the comment that says where it is from."""
    text, decimals, name, work, minus, entry, divisor = found.groups()
    result = load(name)
    # its rows are curves
    measured = map(as_json, judged(result)) if name == "time_to_quality" else result["rows"]
    rows: list[dict[str, Any]] = [row for row in measured if name_of(row) == work]
    values = {{**row, **row.get("peers", {})}[entry] for row in rows}
    if len(values) != 1:
        raise ValueError(
            f"{name}.json has {len(rows)} rows of {work!r}, whose {entry} is {sorted(values)}; a"
            " figure needs one value"
        )
    value = float(values.pop()) / float(divisor or 1) * (-1 if minus else 1)
    sign = "+" if text.startswith("+") else ""
    return f"{value:{sign},.{len(decimals or '')}f}{found[0][len(text) :]}"


def name_of(row: dict[str, Any]) -> str:
    """Return what a row is about, without figures that change from run to run."""
    if "contender" not in row:
        return str(row["work"])
    return (
        f"{row['task']}, {row['contender']}, {row['link']}"
        if "task" in row
        else f"{row['contender']}, {row['link']}"
    )


def filled(text: str) -> str:
    """Return a page's text with the tables and figures as the results are now."""

    def block(found: re.Match[str]) -> str:
        name, made = found[1], table(found[1])
        return (
            found[0]
            if made is None
            else f"<!-- {name}: begin -->\n\n{made}\n\n<!-- {name}: end -->\n"
        )

    return FIGURE.sub(figure, BLOCK.sub(block, text))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
