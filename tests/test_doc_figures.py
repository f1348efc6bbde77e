"""Tests of the figures in README.md and the docs: what was measured is filled in from
benchmarks/results, and all else is known.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
from tests.scripts import ROOT, load_script

from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import LinkCosts

pages = load_script("docs/_benchmarks.py")
tables = sys.modules["_tables"]

NOT_PROSE = re.compile(
    r"^```.*?^```|<!-- ([\w, ]+): begin -->.*?<!-- \1: end -->|`[^`]*`|\]\([^)]*\)"
    r"|(?:Python|torch(?:\s+other\s+than)?|NumPy|CuPy|NVRTC|Bagua|License|capability|version|arXiv:)\s*[\d.]+(?:"
    r" and [\d.]+)?",
    re.MULTILINE | re.DOTALL,
)
UNIT = (
    r"(?:(?:ns|µs|ms|s|[kKMGT]i?B)(?:/s|/step)?|(?:micro|milli)?seconds?|minutes?|hours?|%|percent|points|times"
    r"|steps/s|steps per second|samples/s|bytes per \w+)(?![\w/])"
)
WORD = r"(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty)"
LOOKS_MEASURED = re.compile(
    rf"(?<![\w.,/-])\d[\d,.]*(?: (?:to|and) \d[\d,.]*)? {UNIT}|\b{WORD} (?:times as"
    r" \w+|(?:milli|micro)?seconds?|minutes?)"
    r"|\b(?:twice|half) as (?:fast|slow|long|much|many)|(?<![\w.,/-])\d+\.\d+(?![\w.])"
)
"""Numbers with a unit of time, size, rate or ratio, and all with decimals."""

ELSEWHERE = ("docs/spec.md", "docs/findings.md", "docs/conformance", "docs/porting.md")
"""Pages of rules that were set, not measured, and of what `python -m findings` writes and
checks.
"""
NOT_MEASURED = {
    "a limit, a default or an option": {
        "README.md": ["1 %"],
        "docs/advise.md": ["10 %", "30 %", "1.5 times"],
        "docs/algorithms/bytegrad.md": ["256 KB"],
        "docs/algorithms/diloco.md": ["0.7", "0.9"],
        "docs/benchmarks.md": ["20 ms"],
        "docs/cache.md": ["512 MiB"],
        "docs/cuda.md": ["32 KiB", "50 ms"],
        "docs/data_parallel.md": ["10 MiB"],
        "docs/demo.md": ["50 µs"],
        "docs/faults.md": ["five seconds"],
        "docs/learning.md": ["2 %"],
        "docs/process-groups.md": ["0.001"],
        "docs/quickstart.md": ["10 MiB", "300 seconds"],
        "docs/reference/cache.md": ["100 GiB", "0.1 s", "5 s", "512 MiB"],
        "docs/reference/faults.md": ["12 s", "20 s", "200 times"],
        "docs/reference/memory.md": ["256 KiB"],
        "docs/reference/process-groups.md": ["512 KiB", "8 MiB", "ten seconds"],
        "docs/reference/traces.md": ["1 GiB"],
        "docs/reference/vectors.md": ["0.5"],
        "docs/samplers.md": ["0.1"],
        "docs/trainers.md": ["0.6"],
        "docs/choosing.md": ["6.5"],
    },
    "a target or a rule of thumb": {
        "docs/index.md": ["20 minutes"],
        "docs/learning.md": ["1.5 points", "95 %"],
        "docs/metrics.md": ["5 %"],
        "docs/reference/faults.md": ["2 %", "0.2 ms", "3 %"],
        "docs/traces.md": ["five minutes"],
        "docs/tutorial.md": ["20 minutes", "twice as fast"],
    },
    "computed: from numbers or formulas on the page": {
        "docs/algorithms/async.md": ["four times as many", "20 and 15 ms", "20 ms"],
        "docs/algorithms/low_precision_decentralized.md": ["0.8", "3 bytes per parameter"],
        "docs/algorithms/qadam.md": ["0.01"],
        "docs/budget.md": ["16 bytes per sample"],
        "docs/codecs.md": ["1.03", "0.53", "0.13"],
        "docs/cuda.md": ["9 bytes per element"],
        "docs/demo.md": ["0.3 %"],
        "docs/samplers.md": ["8 bytes per sample"],
    },
    "of short runs on a card, whose results are not kept": {
        "docs/reference/cuda.md": [
            "0.2 ms",
            "0.94 and 2.4 times",
            "1.9",
            "18.2 steps/s",
            "19.4",
            "3.0 to 3.3 ms",
            "35 to 42 ms",
            "46.0",
        ],
    },
    "an example's input": {"docs/metrics.md": ["30 ms"]},
    "of what is published or assumed, and what was fitted to it": {
        "docs/predictions.md": ["50 %", "83 %", "99 %", "5 ms", "10 %"],
        "docs/scale.md": ["1 %", "400 MB", "20 µs"],
    },
}


def prose(text: str) -> str:
    """Return what a page says in sentences and tables that no script fills."""
    return pages.FIGURE.sub("", NOT_PROSE.sub("", text))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages.PAGES, ids=name_of)
def test_figures_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert text == pages.filled(text), "run: python docs/_benchmarks.py"
    assert text.count("<!-- =") == len(pages.FIGURE.findall(text)), (
        "a figure is not written as docs/_benchmarks.py says"
    )


@pytest.mark.parametrize(
    "page", [page for page in pages.PAGES if not name_of(page).startswith(ELSEWHERE)], ids=name_of
)
def test_every_other_number_that_looks_measured_is_known_not_to_be(page: Path) -> None:
    known = {number for where in NOT_MEASURED.values() for number in where.get(name_of(page), [])}
    found = {
        re.sub(r"\s+", " ", match[0]) for match in LOOKS_MEASURED.finditer(prose(page.read_text()))
    }
    # tests/test_docs.py compares these with what is computed
    if name_of(page).startswith("docs/algorithms/"):
        found = {number for number in found if not number.endswith(" MB")}
    assert found == known, (
        "mark what was measured with its result; the rest belongs into NOT_MEASURED"
    )


def test_every_table_of_results_is_on_one_page() -> None:
    blocks = [match[1] for page in pages.PAGES for match in pages.BLOCK.finditer(page.read_text())]
    assert all(blocks.count(name) == 1 for name in tables.TABLES)
    # made from the code
    assert {name for name in blocks if tables.table(name) is None} == {"mixing", "table"}


@pytest.mark.parametrize(
    "text",
    [
        "A step takes 3 ms.",
        "It is 1.3 times as fast.",
        "It sends 26 MB a step.",
        "5 % slower",
        "twice as slow",
        "three times as long",
        "0.83 to 0.95 of the steps",
        "64 bytes per sample",
        "about 20 microseconds",
        "ends 1.1 below",
    ],
)
def test_a_figure_that_is_typed_in_is_found(text: str) -> None:
    assert LOOKS_MEASURED.search(prose(text))


def test_a_changed_figure_is_found() -> None:
    rows = json.loads((ROOT / "benchmarks/results/straggler.json").read_text())["rows"]
    place = f"<!-- = straggler: {rows[0]['work']}: ours -->"
    assert pages.filled(f"makes 1{place} steps") == f"makes {rows[0]['ours']:.0f}{place} steps"
    assert pages.filled(f"makes 1.0{place} steps") == f"makes {rows[0]['ours']:.1f}{place} steps"
    with pytest.raises(ValueError, match="has 0 rows of 'nobody'"):
        pages.filled("makes 1<!-- = straggler: nobody: ours --> steps")


@pytest.mark.parametrize("n", [4, 16, 64])
def test_times_on_paper_are_those_of_the_formulas(n: int) -> None:
    links, size, group = LinkCosts.parse("100Gbit,20us"), 400_000_000, 2 ** round(math.log2(n) / 2)

    def seconds(operation: costs.Operation, k: int) -> float:
        return costs.operation_seconds(operation, range(k), links)

    def ring(total: int, k: int) -> float:
        return seconds(costs.all_reduce(costs.chunk_bytes(total, 1, k)), k)

    chunk = size // 4 // n
    turns = seconds(costs.all_to_all([[chunk] * n] * n) + costs.all_gather([chunk] * n), n)
    found = tables.on_paper(n)
    assert found == pytest.approx(
        {
            "ring": ring(size, n),
            "ring of rings": ring(size, group) + ring(size // group, n // group),
            "tree: reduce, broadcast": seconds(costs.reduce(size, n) + costs.broadcast(size, n), n),
            "bytegrad, in turns": turns,
            "bytegrad, at once": turns - 2 * (n - 2) * 20e-6,
            "one peer": seconds([[(0, 1, size)]], 2),
            "ring, each 32nd step": ring(size, n) / 32,
        }
    )
