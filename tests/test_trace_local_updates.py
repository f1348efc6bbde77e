"""Tests of traces of local SGD and DiLoCo: correct ones pass, faults are located and named (S9)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch import launch
from tests.trace_trainings import simulate, train_each

from bagua_ref.algorithms.fragments import FragmentSchedule
from bagua_ref.cli import main
from bagua_ref.conformance.trace import Recorder, TraceError, check_trace
from bagua_ref.conformance.trace.options import merged_options, parse_options

OURS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("local_sgd", {"period": 2, "warmup_steps": 2}, (2, 1)),
    ("local_sgd", {"period": 3, "offset": 1}, (1,)),
    ("local_sgd", {"period": 2, "warmup_steps": 1, "hierarchical": True}, (2, 1)),
    ("diloco", {"period": 2, "warmup_steps": 1}, (3,)),
    ("diloco", {"period": 4, "fragments": 2, "delay": 1, "mix": 0.5}, (1, 2)),
    ("diloco", {"period": 2, "fragments": [["0.weight", "2.bias"], ["2.weight", "0.bias"]], "compression": "MinMaxUInt8"}, (2, 3)),
]


@pytest.mark.parametrize(("name", "options", "nodes"), OURS, ids=[f"{name}-{place}" for place, (name, *_) in enumerate(OURS)])
def test_S9_our_training_does_not_diverge(tmp_path: Path, name: str, options: dict[str, Any], nodes: tuple[int, ...]) -> None:
    simulate(tmp_path, name, options, nodes, steps=6)
    report = check_trace(tmp_path)
    assert report.passed, report
    assert (report.algorithm, report.not_checked) == (name, [])
    recorded = {**options, "fragments": 2} if isinstance(options.get("fragments"), list) else options
    assert report.options == {**report.options, **recorded}


def test_S9_our_training_over_gloo_does_not_diverge(tmp_path: Path) -> None:
    cases = [(str(place), name, options) for place, (name, options, _) in enumerate(OURS) if not options.get("hierarchical")]
    launch(train_each, 2, tmp_path, cases)
    for folder, name, _ in cases:
        report = check_trace(tmp_path / folder)
        assert report.passed, report
        assert (report.algorithm, report.not_checked) == (name, [])


def test_S9_a_schedule_that_is_not_kept_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(
            FragmentSchedule, "applied_after", lambda self, step: None if step % self.gap else step // self.gap % self.count
        )
        simulate(tmp_path, "diloco", {"period": 2, "fragments": 2}, (2,))
    report = check_trace(tmp_path)
    assert str(report.first).startswith("step 0, rank 0, bucket 'fragment1', tensor 'fragment'[0]")
    assert [*report.kinds] == ["as if another fragment had been sent after that step than is due (-1: none)"]
    assert check_trace(tmp_path, options={"period": None}).passed  # values alone are right


def test_S9_1_an_offset_that_is_not_kept_is_found_and_named(tmp_path: Path) -> None:
    simulate(tmp_path, "local_sgd", {"period": 2}, (2,))
    report = check_trace(tmp_path, options={"offset": 1})
    assert report.first is not None
    assert (report.first.tensor, report.first.expected, report.first.got) == ("averages", 0, 1)
    assert [*report.kinds] == ["as if weights had been averaged after another step than the period and the offset say"]


Change = Callable[[dict[str, Any]], dict[str, Any]]
N = 2


def record(directory: Path, change: Change = lambda values: {}, **options: Any) -> None:
    """Record an outsider's DiLoCo with period 1, one fragment and a plain outer step; ``change`` plants a fault."""
    generator, steps, half = np.random.default_rng(0), [], np.float32(0.5)
    g = generator.standard_normal(6).astype(np.float32)
    xs = [g] * N
    for t, gradients in enumerate(generator.standard_normal((4, N, 6)).astype(np.float32), start=1):
        xs = [x - half * gradient for x, gradient in zip(xs, gradients, strict=True)]
        values: dict[str, Any] = {"t": t, "fragment": 0, "g": [g] * N, "x": [np.append(g - x, np.zeros(2, np.float32)) for x in xs]}
        values |= {"D": sum(values["x"]) / np.float32(N), "weights": xs, "before": xs}
        g = g - half * values["D"][:6]
        xs = [g + np.float32(0.25) * (x - g) for x in xs]
        steps.append(values | {"new g": [g] * N, "after": xs})
        steps[-1] |= change(steps[-1])
    for rank in range(N):
        given = {"mix": 0.25, "period": 1, **options}
        with Recorder(directory, rank=rank, world_size=N, algorithm="diloco", options=given) as recorder:
            for values in steps:
                sent = {name: values[name][rank] for name in ("x", "g", "weights")}
                recorder.before_op("all", sent, t=values["t"], fragment=values["fragment"])
                applied = {"g": values["new g"][rank], "before": values["before"][rank], "weights": values["after"][rank]}
                recorder.after_op("all", {"x": values["D"], **applied})
                recorder.step()


def test_S9_4_what_an_outsider_records_is_checked_from_the_send_to_the_mix(tmp_path: Path) -> None:
    record(tmp_path)
    report = check_trace(tmp_path)
    assert report.passed, report
    assert report.not_checked == []
    assert len(report.executions) == 4 * 5  # the mean, the difference, g, the mix and the schedule


@pytest.mark.parametrize(
    ("change", "tensor", "kind"),
    [
        (lambda v: {"D": sum(v["x"])}, "x", "as if summed, where a mean was expected"),
        (lambda v: {"D": v["x"][0]}, "x", "like no known cause"),
        (lambda v: {"weights": v["g"]}, "difference", ""),
        (lambda v: {"x": [x + (np.arange(8) == 7) for x in v["x"]]}, "x", ""),
        (lambda v: {"new g": [v["new g"][0], v["new g"][1] * np.float32(1.5)]}, "g", ""),
        (
            lambda v: {"after": [(x + g) / 2 for x, g in zip(v["before"], v["new g"], strict=True)]},
            "weights",
            "like no known cause",
        ),
        (lambda v: {"after": v["new g"]}, "weights", "like no known cause"),
        (lambda v: {"fragment": 1}, "fragment", "as if another fragment had been sent after that step than is due"),
        (lambda v: {"t": 0}, "fragment", "as if another fragment had been sent after that step than is due"),
    ],
    ids=["sum", "first rank's", "g again", "padding", "g differs", "half", "no mix", "fragment", "step 0"],
)
def test_S9_a_fault_of_an_outsider_is_found(tmp_path: Path, change: Change, tensor: str, kind: str) -> None:
    def plant(values: dict[str, Any]) -> dict[str, Any]:
        return {name: np.asarray(new, np.float32) if name == "D" else new for name, new in change(values).items()}

    record(tmp_path, plant)
    report = check_trace(tmp_path)
    assert report.first is not None
    assert report.first.tensor == tensor
    assert any(found.startswith(kind) for found in report.kinds), report.kinds


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda v: {}, {"fragments": 2}, "period=1 must be a multiple of the number of fragments, 2"),
        (lambda v: {"g": [g[:5] for g in v["g"]]}, {}, "inputs g and weights have 5 and 6 elements, and x has 8"),
        (lambda v: {"x": [x[:5] for x in v["x"]], "D": v["D"][:5]}, {}, "inputs g and weights have 6 and 6 elements, and x has 5"),
        (lambda v: {"new g": [g.astype(np.float64) for g in v["new g"]]}, {}, "output g of rank 0 has 6 elements of torch.float64"),
    ],
    ids=["schedule", "g", "x", "dtype"],
)
def test_S9_what_does_not_fit_is_not_replayed(tmp_path: Path, change: Change, options: dict[str, Any], message: str) -> None:
    record(tmp_path, change, **options)
    with pytest.raises(TraceError, match=message):
        check_trace(tmp_path)


def test_S9_options_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    assert main(["trace", "check", str(tmp_path), "--option", "mix=0.5", "--option", "period=none"]) == 1
    assert "tensor 'weights'[0]" in capsys.readouterr().out
    assert parse_options(["compression=none", "period=4"]) == {"compression": None, "period": 4}
    for option, value in (("period", 0), ("fragments", None), ("delay", -1), ("mix", 2), ("compression", "zip"), ("mix", True)):
        with pytest.raises(ValueError, match=f"option {option}={value!r} must be"):
            merged_options("diloco", {}, {option: value})
    with pytest.raises(ValueError, match="option offset=-1 must be"):
        merged_options("local_sgd", {}, {"offset": -1})
