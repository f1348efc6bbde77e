"""Tables and figures of the docs, from committed results and from the code. It is a mkdocs hook: a line
``<!-- table: NAME -->`` of a page becomes a table when the pages are built; NAME is one of `TABLES`, or
that of a benchmark.

A number in a sentence is committed, in README.md too, and is followed by its source:

    takes 351<!-- = allreduce_step: memory, perceptron, 25e6 elements in 8: ours --> MiB

names a file of benchmarks/results, a row and an entry of it, or one of its peers. ``-difference``
changes the sign, ``ours / 1e3`` divides. ``python docs/_generate.py`` updates these numbers, and a test
compares them.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import predicted_times
from common import as_json, load, measured, number
from time_to_quality import TASKS, judged

from bagua_ref.conformance.checks.registry import all_checks
from bagua_ref.conformance.clauses import CLAUSES, SUITES
from bagua_ref.formulas.graphs import MODES
from bagua_ref.formulas.mixing import mixing

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(r"^<!-- table: ([\w, ]+) -->$", re.MULTILINE)
FIGURE = re.compile(
    r"([-+]?\d[\d,]*(?:\.(\d+))?)<!-- = (\w+): ([^>]+): (-?)([^>:/]+?)(?: / (\S+))? -->"
)
LINKS = ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s", "not slowed")
Row = dict[str, Any]


@cache
def rows_of(name: str) -> list[Row]:
    """Return the rows of a result; those of time_to_quality are made of its curves."""
    if name == "time_to_quality":
        return [as_json(row) for row in judged(load(name))]
    return list(load(name)["rows"])


def name_of(row: Row) -> str:
    """Return what a row is about, without figures that change from run to run."""
    about = [row[part] for part in ("task", "contender", "link") if part in row]
    return ", ".join(about) if len(about) > 1 else str(row["work"])


def figure(found: re.Match[str]) -> str:
    """Return a number in a sentence as it is now, with the comment that says where it is from."""
    text, decimals, name, work, minus, entry, divisor = found.groups()
    rows = [row for row in rows_of(name) if name_of(row) == work]
    values = {{**row, **row.get("peers", {})}[entry] for row in rows}
    if len(values) != 1:
        raise ValueError(
            f"{name}.json has {len(rows)} rows of {work!r}, whose {entry} is {sorted(values)}; a"
            " figure needs one value"
        )
    value = float(values.pop()) / float(divisor or 1) * (-1 if minus else 1)
    sign = "+" if text.startswith("+") else ""
    return f"{value:{sign},.{len(decimals or '')}f}{found[0][len(text) :]}"


def grid(head: list[str], rows: Iterable[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


def pivot(
    rows: list[Row],
    down: Callable[[Row], str],
    across: Callable[[Row], str],
    cell: Callable[[Row], str],
) -> str:
    """Return a table with a line for each value of ``down`` and a column for each of ``across``."""
    cells = {(down(row), across(row)): cell(row) for row in rows}
    columns = list(dict.fromkeys(place for _, place in cells))
    lines = dict.fromkeys(place for place, _ in cells)
    return grid(
        ["", *columns], ([line, *(cells.get((line, c), "–") for c in columns)] for line in lines)
    )


def _missed(row: Row) -> str:
    return "" if row["kept"] else " **missed**"


def comparison(name: str) -> str:
    """Return a benchmark's rows: ours, peers, ratio and target."""
    lines = []
    for row in rows_of(name):
        peers = ", ".join(f"{peer} {number(value)}" for peer, value in row["peers"].items())
        ratio = f"{row['ratio']:.2f} to {row['against']}{_missed(row)}"
        unit = "" if row["unit"] == "-" else f" {row['unit']}"
        target = row["limit"].replace("-", "–")
        lines.append([row["work"], number(row["ours"]) + unit, peers, ratio, target])
    return grid(["work", "ours", "peers", "ratio", "target"], lines)


def gpu_kernels() -> str:
    """Return the share of copy bandwidth that each kernel of a GPU reaches, by dtype and size."""
    rows = [row for row in rows_of("gpu_kernels") if row["against"] == "copy"]
    return pivot(
        [row for row in rows if not row["work"].endswith(" 262,144")],
        lambda row: str(row["work"].rsplit(" ", 2)[0]),
        lambda row: ", ".join(row["work"].rsplit(" ", 2)[1:]),
        lambda row: f"{row['ratio']:.2f}",
    )


def fuse_step() -> str:
    """Return how many times as fast as the loop a fused step is, for some optimizers and shapes."""
    chosen = re.compile(r"(?:(?:SGD|Adam) 500|(?:SGD|AdamW) (?:ResNet|GPT)).*, gradients")
    return pivot(
        [row for row in rows_of("fuse_step") if chosen.match(row["work"])],
        lambda row: str(row["work"].rpartition(", ")[0]),
        lambda row: str(row["work"].rpartition(", ")[2]),
        lambda row: (
            f"{row['peers']['for-loop'] / row['ours']:.2f}, target {row['asked for']:g}"
            + _missed(row)
        ),
    )


def predictions() -> str:
    """Return how far predictions are from measured times, for each setting and for all."""
    rows = rows_of("predicted_times")
    groups = {name: list(group) for name, group in groupby(rows, lambda row: row["setting"])}
    lines = [
        [name, *(f"{part:.0%}" for part in predicted_times.judged(group).values())]
        for name, group in {**groups, "all": rows}.items()
    ]
    lines.append(
        ["target", *(f"{limit.kind} {bar:.0%}" for bar, limit in predicted_times.BARS.values())]
    )
    return grid(["setting", *predicted_times.BARS], lines)


def learning() -> str:
    """Return accuracies, their range over the seeds, and the difference to a single process."""
    rows = rows_of("learning")
    alone = rows[0]["ours"]
    lines = [
        [
            row["work"],
            f"{row['ours']:.2f}",
            f"{min(row['seeds']):.1f} to {max(row['seeds']):.1f}",
            f"{row['ours'] - alone:+.2f}",
        ]
        for row in rows
    ]
    return grid(["algorithm", "mean", "of the seeds", "to a single process"], lines)


def learning_compressed() -> str:
    lines = []
    for row in rows_of("learning_compressed"):
        difference = f"{row['difference']:+.2f} ± {row['standard_error']:.2f}{_missed(row)}"
        lines.append([row["work"], f"{row['ours']:.2f}", difference])
    return grid(["algorithm", "accuracy", "to `gradient_allreduce`"], lines)


def slow_link() -> str:
    """Return each contender's bytes and milliseconds over every link."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows_of("slow_link"):
        found.setdefault(row["contender"], {})[row["link"]] = row
    lines = []
    for name, links in found.items():
        sent = sorted(row["bytes_per_step"] / 1e6 for row in links.values())[len(links) // 2]
        times = [f"{links[link]['ours']:,.0f}{_missed(links[link])}" for link in LINKS]
        lines.append([_linked(name), f"{sent:.3g}", *times])
    lines.sort(key=lambda line: "](" in line[0])  # peers first
    return grid(["algorithm", "MB sent per step", *LINKS], lines)


def _linked(name: str) -> str:
    """Return a contender's name, with a link to its page if it is one of ours."""
    first, comma, rest = name.partition(", ")
    page = f"algorithms/{first}.md"
    return f"[`{first}`]({page}){comma}{rest}" if (ROOT / "docs" / page).exists() else name


def quality(task: str) -> str:
    """Return the seconds to the loss of a task over every link."""
    rows = [row for row in rows_of("time_to_quality") if row.get("task") == task]
    return pivot(
        rows,
        lambda row: _linked(row["contender"]),
        lambda row: str(row["link"]),
        lambda row: f"{row['ours']:.1f} s" if row["unit"] == "s" else "not reached",
    )


def sparse_steps(task: str) -> str:
    """Return the steps, bytes and predicted seconds of each contender to the loss of a task."""
    rows = [row for row in rows_of("sparse_steps") if row["task"] == task]
    bytes_of = {row["work"]: row for row in rows if row["unit"] == "MB"}
    lines = []
    for row in (row for row in rows if row["unit"] != "MB"):
        name = row["work"].removeprefix(f"{task}: ").removesuffix(", not reached")
        if row["unit"] == "loss":
            lines.append([_linked(name), f"not reached: loss {row['ours']:.3f}", *["–"] * 3])
            continue
        steps, sent = f"{row['ours']:.0f}", f"{row['bytes'] / 1e6:.3g} MB"
        if judged := bytes_of.get(row["work"]):
            steps += f" ({row['ratio']:.2f} x{_missed(row)})"
            sent += f" (1/{1 / judged['ratio']:.0f}{_missed(judged)})"
        times = [f"{row[f'seconds, {link}']:.3g} s" for link in LINKS[:2]]
        lines.append([_linked(name), steps, sent, *times])
    return grid(["algorithm", "steps", "sent by a rank", *LINKS[:2]], lines)


def demo() -> str:
    """Return the table of the demo from `_demo.json`, which `bagua-ref demo --json-file` wrote."""
    result = json.loads(Path(__file__).with_name("_demo.json").read_text(encoding="utf-8"))
    head = ["algorithm", "test accuracy", "final loss", "sent per step and rank", "ms per step"]
    lines = [
        [
            _linked(row["algorithm"]),
            f"{row['test_accuracy']:.1%}",
            f"{row['final_loss']:.4f}",
            f"{row['bytes_per_step'] / 1e3:.1f} kB",
            f"{1e3 / row['steps_per_second']:.1f}",
        ]
        for row in result["results"]
    ]
    return grid(head, lines)


def hangs() -> str:
    """Return what is said about programs that hang, from `_hangs.json`, which `_hangs.py` wrote."""
    rows = json.loads(Path(__file__).with_name("_hangs.json").read_text(encoding="utf-8"))
    head = ["program", "explain", "likely cause", "line (simulated)", "torch's analyser"]
    lines = [
        [
            row["program"].replace("_", " "),
            f"`{row['kind']}`",
            row["cause"],
            f"{row['line']} ({row['simulated'] or '-'})",
            f"`{row['torch']}`",
        ]
        for row in rows
    ]
    return grid(head, lines)


def findings() -> str:
    """Return a table for each peer that was judged: what differs, and how many cases agree."""
    results = json.loads((ROOT / "findings" / "results.json").read_text(encoding="utf-8"))
    peers: dict[str, list[Row]] = {}
    for row in (row for rows in results.values() for row in rows):
        peers.setdefault(row["implementation"].partition(" ")[0], []).append(row)
    parts = []
    for peer, rows in sorted(peers.items(), key=lambda item: item[0].casefold()):
        agree: Counter[str] = Counter()
        told: dict[tuple[str, str], dict[str, list[str]]] = {}
        for row in rows:
            part = f"`{row['implementation'].removeprefix(f'{peer} ').partition(' (')[0]}`"
            if row["verdict"] == "agrees":
                agree[part] += 1
            else:
                cases = told.setdefault((row["verdict"], row["why"]), {})
                cases.setdefault(row["case"], []).append(part)
        lines = [
            [
                verdict,
                "; ".join(f"{', '.join(found)}: {case}" for case, found in cases.items()),
                why,
            ]
            for (verdict, why), cases in sorted(told.items(), reverse=True)
        ]
        if agree:
            counts = ", ".join(f"{part} {count}" for part, count in agree.items())
            lines.append(["agrees", counts, "number of cases"])
        version = re.search(r"==(.*?)\)", " ".join(row["implementation"] for row in rows))
        heading = f"### {peer}{f' {version[1]}' if version else ''}"
        parts.append(f"{heading}\n\n{grid(['verdict', 'part and case', 'what it does'], lines)}")
    return "\n\n".join(parts)


def sim_report() -> str:
    """Return a row for each public program that `python -m findings.sim` ran, and one for each fix."""
    rows = json.loads((ROOT / "findings" / "sim" / "results.json").read_text(encoding="utf-8"))
    verdicts = {"agree": "OK", "found": "found", "undecided": "no verdict"}

    def told(row: Row) -> str:
        notes = "; ".join([row["message"].partition(". Nothing that")[0], *row["hints"][:1]])
        notes = re.sub(r"[\w./-]+/(\w+\.py:)", r"\1", notes).replace("_", "&#95;<wbr>")
        colon = ", hint: " if row["verdict"] == "agree" else ": "
        return f"{verdicts[row['verdict']]}{colon * bool(notes.strip('; '))}{notes.strip('; ')}"

    lines = [
        [
            re.sub("([/_-])", r"\1<wbr>", row["program"]) + f"<br>{row['source']}",
            told(row),
            f"{row['runs']}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
        if not row["pair"]
    ]
    pairs: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["pair"]:
            pairs.setdefault(row["pair"], {})[row["which"]] = row
    fixes = [
        [name, *(f"{pair[which]['source']}: {told(pair[which])}" for which in ("before", "after"))]
        for name, pair in pairs.items()
    ]
    programs = grid(["program", "verdict", "runs", "s"], lines)
    return f"{programs}\n\n{grid(['public fix', 'before', 'after'], fixes)}"


def torchs_tests() -> str:
    """Return a row for each of torch's tests that ended otherwise in the simulated world."""
    path = ROOT / "findings" / "sim" / "torchs_tests.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    results: dict[str, str] = found["results"]
    counts = Counter(text[:4] for text in results.values() if text[:4] in ("pass", "skip"))
    rest = {name: text for name, text in results.items() if text[:4] not in counts}
    lines = [[f"torch {found['torch']}, 3 ranks", f"{len(results)} tests"]]
    lines += [["pass", f"{counts['pass']}"], ["skip themselves", f"{counts['skip']}"]]
    return grid(
        ["torch's `distributed_test`", ""], lines + [[f"`{n}`", t] for n, t in rest.items()]
    )


def checks(suite: str) -> str:
    """Return a row for each check of a suite."""
    found = [check for check in all_checks().values() if check.suite == suite]
    lines = [[f"`{check.id}`", _clause(check.clause), check.sentence] for check in found]
    return grid(["check", "clause", "what must hold"], lines)


def clauses() -> str:
    """Return a row for each clause, with the names of its checks."""
    lines = []
    for clause, about in CLAUSES.items():
        found: dict[str, list[str]] = {}
        for check in all_checks().values():
            if check.clause == clause:
                found.setdefault(check.suite, []).append(check.id.split(".")[-1])
        each = [f"{suite}: {', '.join(ids)}" for suite, ids in found.items()]
        lines.append([_clause(clause), about, "<br>".join(each) or "not covered"])
    return grid(["clause", "about", "checks"], lines)


def _clause(clause: str) -> str:
    return f"[{clause}](spec.md#{clause.lower().replace('.', '-')})"


def graphs() -> str:
    """Return rounds to consensus and spectral gap of each graph; rounds in bold if exact."""
    ranks = (3, 4, 6, 8, 16, 32, 64)

    def cell(mode: str, n: int) -> str:
        if not MODES[mode].takes(n):
            return "–"
        found = mixing(MODES[mode].graphs(n))
        rounds = f"**{found.rounds}**" if found.exact else f"{found.rounds:,}"
        return f"{rounds} ({found.gap_per_round:.2g})"

    return grid(
        ["mode", *(f"n = {n}" for n in ranks)],
        ([f'`"{mode}"`', *(cell(mode, n) for n in ranks)] for mode in MODES),
    )


TABLES: dict[str, tuple[Callable[[], str], str]] = {
    **{
        made.__name__: (made, made.__name__)
        for made in (gpu_kernels, fuse_step, learning, learning_compressed, slow_link)
    },
    **{f"quality, {task}": (partial(quality, task), "time_to_quality") for task in TASKS},
    **{f"sparse steps, {task}": (partial(sparse_steps, task), "sparse_steps") for task in TASKS},
    **{f"checks, {suite}": (partial(checks, suite), "") for suite in SUITES},
    "predictions": (predictions, "predicted_times"),
    "clauses": (clauses, ""),
    "demo": (demo, ""),
    "findings": (findings, ""),
    "sim_report": (sim_report, ""),
    "torchs_tests": (torchs_tests, ""),
    "hangs": (hangs, ""),
    "mixing": (graphs, ""),
}
"""Tables by name, each with the result that it is made from; others compare a benchmark's rows."""


def table(name: str) -> str:
    """Return the table ``name``, followed by when and where it was measured."""
    made, result = TABLES.get(name, (partial(comparison, name), name))
    return f"{made()}\n\n{measured(load(result))}" if result else made()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the tables of a page that mkdocs builds."""
    return TABLE.sub(lambda found: table(found[1]), markdown)


def filled(page: Path) -> str:
    """Return a page's text with the figures in its sentences as they are now."""
    return FIGURE.sub(figure, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path), encoding="utf-8")
