"""Tests of the demo page's layout on screens of any width; test_cli.py tests its content."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bagua_ref.cli.recipes import ALONE, Settings, TrainingOutcome
from bagua_ref.cli.report import write_report

pytestmark = pytest.mark.slow


def outcome(algorithm: str, loss: float, ratio: float | None) -> TrainingOutcome:
    return TrainingOutcome(algorithm, 0.98, loss, 5000, ratio, 100, 0.1, [2.0, 1.0], [5000.0, 10000.0])


def page_of(folder: Path, *others: TrainingOutcome, **settings: object) -> str:
    return write_report([outcome(ALONE, 0.01, None), *others], Settings(**settings), folder).read_text()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("report"), outcome("bytegrad", 0.02, 0.25))


def test_the_page_takes_the_width_of_the_screen(page: str) -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_nothing_on_a_narrow_screen_is_wider_than_a_phone(page: str) -> None:
    style = re.sub(r"@media \(min-width:.*?\n}", "", page.split("<style>")[1].split("</style>")[0], flags=re.DOTALL)
    assert "min-width" not in style
    pixels = {"px": 1, "rem": 16}
    fixed = re.findall(r"([\d.]+)(px|rem)\b", re.sub(r"max-width: [\d.]+rem", "", style))
    assert len(fixed) > 5
    assert max(float(number) * pixels[unit] for number, unit in fixed) <= 390


def test_a_table_that_is_wider_than_the_screen_scrolls_by_itself(page: str) -> None:
    assert ".wide { overflow-x: auto; }" in page
    assert '<div class="wide">\n<table>' in page
    headers = re.findall(r"<th scope=col>(.*?)</th>", page)
    rows = re.findall(r"<tr><th scope=row>.*?</tr>", page)
    assert len(rows) == 2
    assert {row.count("<td") for row in rows} == {len(headers) - 1}
