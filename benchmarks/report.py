"""One page with a plot of each benchmark's results: ``python benchmarks/report.py`` writes
benchmarks/report.html.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import common
from time_to_quality import judged

FOLDER = Path(__file__).parent


class Scale:
    """Places on an axis in percent, logarithmic where positive values span more than a decade."""

    def __init__(self, values: Sequence[float]) -> None:
        self.log = min(values) > 0 and max(values) > 10 * min(values)
        low, high = (self._at(edge(values)) for edge in (min, max))
        self.low = low if self.log or low > high / 2 > 0 else min(low, 0.0)
        self.width = high - self.low or 1.0

    def _at(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def place(self, value: float) -> float:
        return round(5 + 90 * (self._at(value) - self.low) / self.width, 2)

    def axis(self, height: int) -> str:
        """Return lines from top to bottom and what they stand for."""
        drawn = ""
        for part in range(5):
            x, at = 5 + 90 * part / 4, self.low + self.width * part / 4
            text = common.number(10**at if self.log else at)
            drawn += (
                f'<line x1="{x}%" x2="{x}%" y1="16" y2="{height}"/><text x="{x}%"'
                f' y="12">{text}</text>'
            )
        return drawn


def key(names: dict[str, float], colours: dict[str, int]) -> str:
    """Return names and values in their colours."""
    texts = (
        (colours[name], f"● {escape(name)} {common.number(value)}") for name, value in names.items()
    )
    return ", ".join(
        f'<span style="color:var(--c{colour})">{text}</span>' for colour, text in texts
    )


def tracks(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each row with a dot for ours and each peer and a stroke for the bar; those
    of a unit have one axis.
    """
    values = [{"ours": row["ours"], **row["peers"]} for row in rows]
    colours = {
        name: min(place, 8)
        for place, name in enumerate(dict.fromkeys(name for each in values for name in each))
    }
    bars = [
        (
            None
            if row["limit"] == "-"
            else float(row["limit"].split()[-1]) * row["peers"][row["against"]]
        )
        for row in rows
    ]
    for unit in dict.fromkeys(row["unit"] for row in rows):
        group = [each for each in zip(rows, values, bars, strict=True) if each[0]["unit"] == unit]
        scale = Scale(
            [
                value
                for _, each, bar in group
                for value in (*each.values(), bar)
                if value is not None
            ]
        )
        head = f"{'logarithmic axis; ' * scale.log}● a value, | the bar"
        axis = f'<svg width="100%" height="22">{scale.axis(22)}</svg>'
        yield (
            f'<h3>{"share" if unit == "-" else escape(unit)}</h3><div class="track"><p'
            f' class="dim">{head}</p>{axis}</div>'
        )
        for row, each, bar in group:
            drawn = '<line x1="0" x2="100%" y1="9" y2="9"/>'
            for name, value in reversed(each.items()):  # ours last, on top
                size, colour = 4 if colours[name] else 6, f"var(--c{colours[name]})"
                drawn += f'<circle cx="{scale.place(value)}%" cy="9" r="{size}" fill="{colour}"/>'
            if bar is not None:
                x = scale.place(bar)
                drawn += (
                    f'<line class="bar{"" if row["kept"] else " missed"}" x1="{x}%" x2="{x}%"'
                    ' y1="0" y2="18"/>'
                )
            verdict = row.get(
                "ended"
            ) or f"{row['ratio']:.2f} × {row['against']}" + f", {row['limit']}" * (bar is not None)
            work = escape(row["work"]) + ("" if row["kept"] else " <b>missed</b>")
            text = f'<p>{work}</p><p class="dim">{key(each, colours)}; {escape(verdict)}</p>'
            yield (
                f'<div class="track"><div>{text}</div><svg width="100%"'
                f' height="18">{drawn}</svg></div>'
            )


def fault(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a fault as one of a comparison without peers."""
    ended = (
        row["outcome"]
        if isinstance(row["outcome"], str)
        else " / ".join(dict.fromkeys(row["outcome"]))
    )
    work = f"{row.get('algorithm', 'cache')}: {row['fault']}"
    return {
        "work": work,
        "unit": "s",
        "ours": row["seconds"],
        "peers": {},
        "limit": "-",
        "kept": True,
        "ended": ended.partition(":")[0],
    }


def curves(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield losses over seconds, one picture for each task and link."""
    for task, link in dict.fromkeys((row["task"], row["link"]) for row in rows):
        group = [row for row in rows if (row["task"], row["link"]) == (task, link)]
        colours = {row["contender"]: place % 9 for place, row in enumerate(group)}
        xs, ys = (
            Scale([point[place] for row in group for point in row["curve"]]) for place in (0, 2)
        )
        drawn = ""
        for row in group:
            points = " ".join(
                f"{xs.place(seconds)},{100 - ys.place(loss)}" for seconds, _, loss in row["curve"]
            )
            drawn += f'<polyline points="{points}" stroke="var(--c{colours[row["contender"]]})"/>'
        ends = {row["contender"]: row["curve"][-1][2] for row in group}
        losses = [loss for row in group for *_, loss in row["curve"]]
        yield (
            f"<h3>{escape(task)}, {escape(link)}: loss ({min(losses):.3g} to {max(losses):.3g})"
            " over seconds</h3>"
        )
        yield (
            f'<svg width="100%" height="220">{xs.axis(220)}<svg y="16" width="100%" height="204"'
            ' viewBox="0 0 100 100"'
        )
        yield (
            f' preserveAspectRatio="none">{drawn}</svg></svg><p class="dim">at the end:'
            f" {key(ends, colours)}</p>"
        )


def section(path: Path) -> str:
    """Return a benchmark's part of the page."""
    result = json.loads(path.read_text(encoding="utf-8"))
    result = result if isinstance(result, dict) else {"rows": result}
    title = (
        ast.get_docstring(ast.parse((FOLDER / f"{path.stem}.py").read_text(encoding="utf-8"))) or ""
    ).partition("\n")[0]
    measured = (
        common.measured(result)
        if result.keys() & {"date", "runs"}
        else "Date and machine were not recorded."
    )
    drawn = [row for row in result["rows"] if "curve" in row and "ours" not in row]
    rows = map(common.as_json, judged(result)) if path.stem == "time_to_quality" else result["rows"]
    plots = "".join(
        [*tracks([row if "ours" in row else fault(row) for row in rows]), *curves(drawn)]
    )
    head = f'<h2>{path.stem}</h2><p>{escape(title)}</p><p class="dim">{escape(measured)}</p>'
    return f'<section id="{path.stem}">{head}{plots}</section>'


def page() -> str:
    paths, style = (
        sorted((FOLDER / "results").glob("*.json")),
        (FOLDER / "report.css").read_text(encoding="utf-8"),
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Benchmarks'
        " of bagua_ref</title>"
    )
    links = "".join(f'<a href="#{path.stem}">{path.stem}</a>' for path in paths)
    body = f"<h1>Benchmarks of bagua_ref</h1><nav>{links}</nav>{''.join(map(section, paths))}"
    return (
        "<!doctype html><html"
        f' lang="en"><head>{head}<style>{style}</style></head><body>{body}</body></html>\n'
    )


if __name__ == "__main__":
    (FOLDER / "report.html").write_text(page(), encoding="utf-8")
