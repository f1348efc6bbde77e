"""Tests of the demo's report: layout, curves, predicted times and verdicts; test_cli.py tests the
rest of its content.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bagua_ref.cli.recipes import ALONE, RECIPES, Settings, TrainingOutcome
from bagua_ref.cli.report import cells_of, draw_curves, predict_times, verdicts_of, write_report

pytestmark = pytest.mark.slow


def outcome(algorithm: str, loss: float, ratio: float | None) -> TrainingOutcome:
    return TrainingOutcome(
        algorithm, 0.98, loss, 5000, ratio, 100, 0.1, [2.0, 1.0], [5000.0, 10000.0]
    )


def page_of(folder: Path, *others: TrainingOutcome, **settings: object) -> str:
    return write_report(
        [outcome(ALONE, 0.01, None), *others], Settings(**settings), folder
    ).read_text()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("report"), outcome("bytegrad", 0.02, 0.25))


def test_the_page_takes_the_width_of_the_screen(page: str) -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_nothing_on_a_narrow_screen_is_wider_than_a_phone(page: str) -> None:
    style = re.sub(
        r"@media \(min-width:.*?\n}",
        "",
        page.split("<style>")[1].split("</style>")[0],
        flags=re.DOTALL,
    )
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


def test_no_two_curves_look_alike() -> None:
    figure = draw_curves([outcome(name, 0.02, 0.25) for name in RECIPES], "loss", 1)
    looks = [(line.get_color(), line._dash_pattern) for line in figure.axes[0].lines]
    assert len(looks) == len(set(map(str, looks))) == len(RECIPES)
    assert len(figure.legends[0].get_texts()) == len(RECIPES)


def test_a_curve_has_a_dot_where_its_warm_up_ends() -> None:
    warm = replace(
        outcome("powersgd", 0.02, 1.0),
        losses=[3.0, 2.0, 1.0],
        bytes_sent=[1.0, 2.0, 3.0],
        warmup_steps=2,
    )
    marked, plain = draw_curves([warm, outcome("topk", 0.02, 1.0)], "loss", 1).axes[0].lines
    assert (marked.get_marker(), marked.get_markevery()) == ("o", [1])
    assert plain.get_marker() == "None"


SETTINGS = Settings(ranks=4)
FULL = 2 * 3 / 4 * 4 * 38282  # bytes of an all-reduce, on each of four ranks
CHUNK = 4 * 9571  # bytes of the largest quarter of the gradients


def measured(
    name: str, nbytes: float, codec: float = 0.0, accuracy: float = 0.98, warmup: int = 0
) -> TrainingOutcome:
    """Return an outcome whose steps took 7 ms, of which 2 ms were waits."""
    times = {
        "bytes_sent": nbytes,
        "exposed_wait_seconds": 0.002,
        "codec_seconds": codec,
        "seconds": 0.007,
    }
    metrics = {f"{total}_per_step": value for total, value in times.items()}
    return replace(
        outcome(name, 0.02, nbytes / FULL),
        test_accuracy=accuracy,
        metrics=metrics,
        warmup_steps=warmup,
    )


def test_predicted_times_are_compute_and_what_links_take() -> None:
    found = predict_times(
        [outcome(ALONE, 0.01, None), measured("gradient_allreduce", FULL)], SETTINGS
    )
    rates = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7}
    in_turns = {rate: 0.005 + 6 * (50e-6 + CHUNK * 8 / bits) for rate, bits in rates.items()}
    assert found["gradient_allreduce"] == pytest.approx(in_turns)


def test_codecs_take_what_they_took_and_compute_is_the_median() -> None:
    sent = 6 * (32 + 9600)  # a chunk of 9,571 elements, rounded up to 32, and its header
    quick, slow = (
        predict_times([measured("bytegrad", sent, codec)], SETTINGS) for codec in (0.0, 0.001)
    )
    assert slow["bytegrad"]["1 Gbit/s"] - quick["bytegrad"]["1 Gbit/s"] == pytest.approx(0.001)
    assert quick["gradient_allreduce"]["10 Mbit/s"] == pytest.approx(
        0.005 + 6 * (50e-6 + CHUNK * 8 / 1e7)
    )
    longer = measured("local_sgd", FULL / 8)
    longer.metrics["seconds_per_step"] = 0.107
    found = predict_times(
        [measured("gradient_allreduce", FULL), measured("bytegrad", sent), longer], SETTINGS
    )
    assert found["bytegrad"] == quick["bytegrad"]


def test_there_is_no_prediction_without_steps_after_the_warm_up_or_of_half_a_cycle() -> None:
    warming = replace(measured("powersgd", FULL, warmup=300), metrics={})
    half = measured("local_sgd", FULL / 4)
    assert predict_times([warming], SETTINGS) == {}
    predicted = predict_times([measured("gradient_allreduce", FULL), warming, half], SETTINGS)
    assert list(predicted) == ["gradient_allreduce"]
    assert tuple(cells_of(warming, SETTINGS, predicted).values())[4:] == (
        "1.000",
        "220 of 220",
        "0.1",
        "10.0",
        "-",
        "-",
        "-",
    )
    verdicts = verdicts_of([warming, half], SETTINGS, predicted)
    assert verdicts["powersgd"].startswith("All 220 steps were warm-up")
    assert (
        verdicts["local_sgd"]
        == "Sends 25% of the bytes of full precision; it was trained for too few steps to predict"
        " times."
    )


def test_a_verdict_says_what_is_learned_sent_and_saved() -> None:
    ranked = [
        outcome(ALONE, 0.01, None),
        measured("gradient_allreduce", FULL, accuracy=0.985),
        measured("local_sgd", FULL / 8, accuracy=0.96),
        measured("topk", FULL / 5, accuracy=0.995, warmup=10),
    ]
    predicted = {
        "gradient_allreduce": {"1 Gbit/s": 0.006, "100 Mbit/s": 0.02, "10 Mbit/s": 0.2},
        "local_sgd": {"1 Gbit/s": 0.007, "100 Mbit/s": 0.01, "10 Mbit/s": 0.05},
        "topk": {"1 Gbit/s": 0.007, "100 Mbit/s": 0.02, "10 Mbit/s": 0.19},
    }
    assert verdicts_of(ranked, SETTINGS, predicted) == {
        "gradient_allreduce": (
            "Keeps the single process's accuracy to within a point, and sends 100% of the bytes of"
            " full precision; the others are compared with it."
        ),
        "local_sgd": (
            "Ends 2.0 points below the single process's accuracy, and sends 12% of the bytes of"
            " full precision; its steps should be 2.0 times as fast at 100 Mbit/s, 4.0 times as"
            " fast at 10 Mbit/s."
        ),
        "topk": (
            "Ends 1.5 points above the single process's accuracy, and sends 20% of the bytes of"
            " full precision, 10 steps of warm-up included; its steps should be no faster than"
            " those of gradient_allreduce."
        ),
    }
    assert verdicts_of(ranked, Settings(ranks=4, quick=True), predicted)["local_sgd"].startswith(
        "Sends 12% of the bytes"
    )


def test_the_page_says_where_and_how_it_was_made(page: str) -> None:
    assert "<code>bagua-ref demo --ranks 4 --epochs 10 --seed 0</code>" in page
    assert re.search(r"UTC, \w+ .*, bagua_ref [\d.]+\w*, torch \S+, python [\d.]+\. ", page)
