"""Tests of the figures in README.md and the docs: what was measured is filled in from committed
results, and all else is known.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.scripts import ROOT, load_script

pages = load_script("docs/_generate.py")
NOT_PROSE = re.compile(
    r"^```.*?^```|<!-- table: [\w, ]+ -->|`[^`]*`|\]\([^)]*\)"
    r"|(?:Python|torch(?:\s+other\s+than)?|NumPy|CuPy|NVRTC|Bagua|License|capability|version|arXiv:)"
    r"\s*[\d.]+(?: and [\d.]+)?",
    re.MULTILINE | re.DOTALL,
)
UNIT = (
    r"(?:(?:ns|µs|ms|s|[kKMGT]i?B)(?:/s|/step)?|(?:micro|milli)?seconds?|minutes?|hours?|%|percent"
    r"|points|times|steps/s|steps per second|samples/s|bytes per \w+)(?![\w/])"
)
WORD = r"(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty)"
LOOKS_MEASURED = re.compile(
    rf"(?<![\w.,/-])\d[\d,.]*(?: (?:to|and) \d[\d,.]*)? {UNIT}|\b{WORD} (?:times as"
    r" \w+|(?:milli|micro)?seconds?|minutes?)"
    r"|\b(?:twice|half) as (?:fast|slow|long|much|many)|(?<![\w.,/-])\d+\.\d+(?![\w.])"
)
"""Numbers with a unit of time, size, rate or ratio, and all with decimals."""
ELSEWHERE = (
    "docs/spec.md",
    "docs/conformance.md",
    "docs/checks.md",
    "docs/vectors.md",
    "docs/porting.md",
)
"""Pages of rules that were set, not measured."""
NOT_MEASURED = json.loads((ROOT / "tests" / "not_measured.json").read_text())
"""Limits, options, targets and what is computed on the page, by page."""


def prose(text: str) -> str:
    """Return what a page says in sentences and tables that the build does not fill."""
    return pages.FIGURE.sub("", NOT_PROSE.sub("", text))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages.PAGES, ids=name_of)
def test_figures_in_sentences_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert text == pages.filled(page), "run: python docs/_generate.py"
    assert text.count("<!-- =") == len(pages.FIGURE.findall(text)), (
        "a figure is not written as docs/_generate.py says"
    )


@pytest.mark.parametrize(
    "page", [page for page in pages.PAGES if not name_of(page).startswith(ELSEWHERE)], ids=name_of
)
def test_every_other_number_that_looks_measured_is_known_not_to_be(page: Path) -> None:
    found = {
        " ".join(match[0].split()) for match in LOOKS_MEASURED.finditer(prose(page.read_text()))
    }
    # tests/test_docs.py compares these with what is computed
    if name_of(page).startswith("docs/algorithms/"):
        found = {number for number in found if not number.endswith(" MB")}
    assert found == set(NOT_MEASURED.get(name_of(page), [])), (
        "mark what was measured with its result; the rest belongs into tests/not_measured.json"
    )


def test_every_committed_result_has_a_table_and_every_table_is_on_one_page() -> None:
    blocks = [name for page in pages.PAGES for name in pages.TABLE.findall(page.read_text())]
    results = {path.stem for path in (ROOT / "benchmarks/results").glob("*.json")}
    shown = {pages.TABLES.get(name, (None, name))[1] for name in blocks}
    assert results <= shown
    assert all(blocks.count(name) == 1 for name in {*pages.TABLES, *blocks})


def test_the_build_fills_in_tables() -> None:
    text = pages.on_page_markdown("before\n\n<!-- table: straggler -->\n\nafter")
    (row,) = pages.rows_of("straggler")
    assert f"| {row['work']} | {pages.number(row['ours'])} steps/s |" in text
    assert text.startswith("before\n\n| work | ours |")
    assert text.endswith("\n\nafter")


def test_a_figure_that_is_typed_in_or_out_of_date_is_found(tmp_path: Path) -> None:
    for typed in (
        "takes 3 ms",
        "5 % slower",
        "twice as slow",
        "64 bytes per sample",
        "ends 1.1 below",
    ):
        assert LOOKS_MEASURED.search(prose(f"It {typed}."))
    (row,) = pages.rows_of("straggler")
    page = tmp_path / "page.md"
    page.write_text(f"makes 1.0<!-- = straggler: {row['work']}: ours --> steps")
    assert f"makes {row['ours']:.1f}<" in pages.filled(page)
    page.write_text("makes 1<!-- = straggler: nobody: ours --> steps")
    with pytest.raises(ValueError, match="has 0 rows of 'nobody'"):
        pages.filled(page)


def test_what_advise_quotes_as_learnt_is_in_the_results() -> None:
    quoted = json.loads((ROOT / "src/bagua_ref/planning/learnt.json").read_text())
    for text, of in ((row["text"], row["of"]) for row in quoted):
        name = re.findall(r"(\w+)\.json", text)[0]
        rows = {pages.name_of(row): row for row in pages.rows_of(name) if row["unit"] != "MB"}
        if name == "time_to_quality":
            base = rows["language model, gradient_allreduce, 10 Mbit/s"]
            said = f"took {rows[of]['steps']} steps, with gradient_allreduce {base['steps']}, to"
        elif name == "sparse_steps":
            base = rows["language model: gradient_allreduce"]
            said = (
                f"took {rows[of]['ours']:.0f} steps, with gradient_allreduce {base['ours']:.0f}, to"
            )
        elif name == "learning":
            base = rows["gradient_allreduce"]
            said = f"{rows[of]['ours']:.2f} % accuracy on digits, gradient_allreduce {base['ours']:.2f} %"
        else:
            said = f"{rows[of]['difference']:+.2f} ± {rows[of]['standard_error']:.2f} points"
        assert said in text, of
