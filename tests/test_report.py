"""Tests of the demo page's layout on phones and wide screens; test_cli.py tests its content."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bagua_ref.cli.recipes import ALONE, Settings
from bagua_ref.cli.report import TrainingOutcome, write_report

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


def test_a_cell_says_its_column_where_the_header_is_out_of_sight(page: str) -> None:
    headers = re.findall(r"<th scope=col>(.*?)</th>", page)
    rows = re.findall(r"<tr><th scope=row>.*?</tr>", page)
    assert len(rows) == 2
    for row in rows:
        assert re.findall(r'<td data-label="(.*?)">', row) == headers[1:]
        assert row.count("<td") == len(headers) - 1
    assert "content: attr(data-label)" in page


def test_the_page_says_why_async_has_the_higher_loss(tmp_path: Path) -> None:
    page = page_of(tmp_path, outcome("async", 0.13, 0.022), workers=4, epochs=10)
    assert "averages weights in the background" in page
    assert "about 5 in 220 steps" in page
    assert "its own 16 of the 64 images" in page.replace("\n", " ")


@pytest.mark.parametrize("row", [outcome("async", 0.01, 0.022), outcome("async", 0.13, None), outcome("bytegrad", 0.13, 0.25)])
def test_the_page_explains_no_loss_that_is_not_there(row: TrainingOutcome, tmp_path: Path) -> None:
    assert "averages weights in the background" not in page_of(tmp_path, row)
