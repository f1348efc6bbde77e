"""Tests of traces of powersgd and topk: correct ones pass, faults are located and named (S10, S11.2)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch import launch
from tests.trace_trainings import simulate, train_each

from bagua_ref.comm_ops import LowRank, TopK
from bagua_ref.conformance.expected import power_sgd_numpy, topk_numpy
from bagua_ref.conformance.trace import Recorder, TraceError, check_trace
from bagua_ref.conformance.trace.replay import merged_options

EVERY = {"warmup_steps": 0, "min_compression_rate": 0.01}
OURS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("powersgd", {**EVERY, "matrix_approximation_rank": 2}, (2,)),
    ("powersgd", {"warmup_steps": 2, "min_compression_rate": 0.5, "memory": "averaged", "warm_start": False, "seed": 5}, (1, 2)),
    ("powersgd", {**EVERY, "memory": None}, (3,)),
    ("topk", {"ratio": 0.1, "warmup_steps": 1}, (2, 1)),
    ("topk", {"ratio": 0.3, "error_feedback": False}, (2,)),
]


@pytest.mark.parametrize(("name", "options", "nodes"), OURS, ids=[f"{name}-{place}" for place, (name, *_) in enumerate(OURS)])
def test_our_training_does_not_diverge(tmp_path: Path, name: str, options: dict[str, Any], nodes: tuple[int, ...]) -> None:
    simulate(tmp_path, name, options, nodes, steps=5)
    report = check_trace(tmp_path)
    assert report.passed, report
    assert (report.algorithm, report.not_checked) == (name, [])
    known = {"memory", "warm_start", "seed", "ratio", "error_feedback"}
    assert report.options == {**report.options, **{key: value for key, value in options.items() if key in known}}


def test_our_training_in_16_bits_does_not_diverge(tmp_path: Path) -> None:
    for name, options, nodes in (OURS[0], OURS[3]):
        simulate(tmp_path / name, name, options, nodes, dtype=torch.bfloat16)
        assert check_trace(tmp_path / name).passed


def test_our_training_over_gloo_does_not_diverge(tmp_path: Path) -> None:
    cases = [(str(place), name, options) for place, (name, options, _) in enumerate(OURS)]
    launch(train_each, 2, tmp_path, cases)
    for folder, name, _ in cases:
        report = check_trace(tmp_path / folder)
        assert report.passed, report
        assert (report.algorithm, report.not_checked) == (name, [])


def test_a_memory_that_is_not_updated_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        planted.setattr(LowRank, "_decompress", lambda self, name, m, p, q, own: (self._factors[name].copy_(q), m.copy_(p @ q.T)))
        simulate(tmp_path, "powersgd", {**EVERY}, (2,))
    first = check_trace(tmp_path).first
    assert first is not None
    assert (first.tensor, first.expected == first.got) == ("e", False)


def test_a_sum_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TopK.__call__

    def summed(self: TopK, x: torch.Tensor) -> None:
        right(self, x)
        x *= self.comm.nranks()

    with monkeypatch.context() as planted:
        planted.setattr(TopK, "__call__", summed)
        simulate(tmp_path, "topk", {"ratio": 0.5}, (2,))
    assert [*check_trace(tmp_path).kinds] == ["as if summed, where a mean was expected"]


Change = Callable[[dict[str, Any]], dict[str, Any]]
N, ROWS, COLUMNS, R = 2, 6, 5, 2


def record_powersgd(directory: Path, change: Change = lambda values: {}, **options: Any) -> None:
    """Record an outsider's powersgd on one matrix after three other elements; ``change`` plants a fault."""
    generator, steps = np.random.default_rng(0), []
    errors, q = [np.zeros((ROWS, COLUMNS), np.float32)] * N, None
    for k in range(3):
        gradients = list(generator.standard_normal((N, 3 + ROWS * COLUMNS)).astype(np.float32))
        matrices = [g[3:].reshape(ROWS, COLUMNS) for g in gradients]
        done = power_sgd_numpy.power_sgd_round(matrices, errors, q, R, memory="local", seed=9, k=k, i=1)
        assert done.q is not None
        assert done.errors is not None
        mean = sum(g[:3] for g in gradients) / np.float32(N)
        values: dict[str, Any] = {"k": k, "matrices": json.dumps([[3, ROWS, COLUMNS, R, 1]]), "x": gradients, "e": errors}
        values |= {"q": [q] * N, "result": np.concatenate([mean, done.result.ravel()]), "new e": done.errors, "new q": [done.q] * N}
        steps.append(values | change(values))
        errors, q = done.errors, done.q
    for rank in range(N):
        given = {"memory": "local", "warm_start": True, "seed": 9, **options}
        with Recorder(directory, rank=rank, world_size=N, algorithm="powersgd", options=given) as recorder:
            for values in steps:
                found = {
                    role: values[role][rank]
                    for role in ("x", "e", "q")
                    if values[role] is not None and values[role][rank] is not None
                }
                recorder.before_op("all", found, k=values["k"], matrices=values["matrices"])
                recorder.after_op("all", {"x": values["result"], "e": values["new e"][rank], "q": values["new q"][rank]})
                recorder.step()


def test_S10_what_an_outsider_records_is_checked(tmp_path: Path) -> None:
    record_powersgd(tmp_path)
    report = check_trace(tmp_path)
    assert report.passed, report
    assert report.not_checked == []
    assert len(report.executions) == 3 * 3  # the averaged gradients, e and Q


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (lambda v: {"result": v["result"] * np.float32(N)}, "x"),
        (lambda v: {"result": np.concatenate([v["result"][:3], v["x"][0][3:]])}, "x"),
        (lambda v: {"result": np.concatenate([v["x"][0][:3], v["result"][3:]])}, "x"),
        (lambda v: {"new e": [e * np.float32(1.01) for e in v["new e"]]}, "e"),
        (lambda v: {"new q": [q * np.float32(N) for q in v["new q"]]}, "factor"),
        (lambda v: {"matrices": json.dumps([[3, ROWS, COLUMNS, R, 0]])}, "x"),
    ],
    ids=["sum", "not compressed", "others local", "memory", "factor", "place"],
)
def test_S10_a_fault_of_an_outsider_is_found(tmp_path: Path, change: Change, tensor: str) -> None:
    record_powersgd(tmp_path, change)
    report = check_trace(tmp_path)
    assert report.first is not None
    assert report.first.tensor == tensor


def test_S10_another_basis_is_no_fault(tmp_path: Path) -> None:
    turned = np.array([[0.6, -0.8], [0.8, 0.6]], np.float32)
    record_powersgd(tmp_path, lambda v: {"new q": [q @ turned for q in v["new q"]]})
    assert check_trace(tmp_path).passed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: {"matrices": "[[1, 2"}, "the recorded matrices cannot be used"),
        (lambda v: {"matrices": "[[0, 6]]"}, "the recorded matrices cannot be used"),
        (lambda v: {"matrices": json.dumps([[4, ROWS, COLUMNS, R, 0]])}, "in a bucket of 33 elements"),
        (lambda v: {"matrices": json.dumps([[3, ROWS, COLUMNS, 6, 0]])}, "in a bucket of 33 elements"),
        (lambda v: {"e": [e[:2] for e in v["e"]]}, "input e of rank 0 has 10 elements, and must have 30"),
        (
            lambda v: {"e": [e.astype(np.float64) for e in v["e"]]},
            "input 'e' of rank 0 is torch.float64, and must be torch.float32",
        ),
        (lambda v: {"k": v["k"] + 3, "e": None}, "input 'q' was not recorded on rank 0"),
        (lambda v: {"new q": [q[:2] for q in v["new q"]]}, "output q of rank 0 has 4 elements, and must have 10"),
    ],
    ids=["text", "numbers", "beyond", "rank", "e", "dtype", "missing", "q"],
)
def test_S10_what_does_not_fit_is_not_replayed(tmp_path: Path, change: Change, message: str) -> None:
    record_powersgd(tmp_path, change)
    with pytest.raises(TraceError, match=message):
        check_trace(tmp_path)


def record_topk(directory: Path, change: Change = lambda values: {}, **info: Any) -> None:
    """Record an outsider's topk on 10 elements; ``change`` plants a fault."""
    generator, errors, steps = np.random.default_rng(1), [np.zeros(10, np.float32)] * N, []
    for _ in range(3):
        gradients = list(generator.standard_normal((N, 10)).astype(np.float32))
        result, left = topk_numpy.topk_round(gradients, errors, 0.3, "float32")
        assert left is not None
        values: dict[str, Any] = {"x": gradients, "e": errors, "result": result, "new e": left}
        steps.append(values | change(values))
        errors = left
    for rank in range(N):
        with Recorder(directory, rank=rank, world_size=N, algorithm="topk", options={"ratio": 0.3}) as recorder:
            for values in steps:
                recorder.before_op("all", {role: values[role][rank] for role in ("x", "e") if values[role] is not None}, **info)
                recorder.after_op("all", {"x": values["result"], "e": values["new e"][rank]})
                recorder.step()


def test_S11_2_what_an_outsider_records_is_checked_bit_for_bit(tmp_path: Path) -> None:
    record_topk(tmp_path / "right")
    report = check_trace(tmp_path / "right")
    assert report.passed, report
    assert len(report.executions) == 3 * 2
    record_topk(tmp_path / "wrong", lambda v: {"result": np.nextafter(v["result"], np.float32(9))})
    assert not check_trace(tmp_path / "wrong").passed
    record_topk(tmp_path / "kept", lambda v: {"new e": [x + e for x, e in zip(v["x"], v["e"], strict=True)]})
    first = check_trace(tmp_path / "kept").first
    assert first is not None
    assert first.tensor == "e"


def test_S11_2_what_does_not_fit_is_not_replayed(tmp_path: Path) -> None:
    record_topk(tmp_path / "e", lambda v: {"e": None})
    with pytest.raises(TraceError, match="input 'e' was not recorded on rank 0"):
        check_trace(tmp_path / "e")
    assert not check_trace(tmp_path / "e", options={"error_feedback": False}).passed
    record_topk(tmp_path / "elements", elements=11)
    with pytest.raises(TraceError, match="elements=11 of a bucket of 10"):
        check_trace(tmp_path / "elements")


def test_options_are_checked() -> None:
    for option, value in (("memory", "global"), ("warm_start", 2), ("seed", -1), ("seed", 2**32)):
        with pytest.raises(ValueError, match=f"option {option}={value!r} must be"):
            merged_options("powersgd", {}, {option: value})
    for option, value in (("ratio", 0), ("ratio", 1.5), ("error_feedback", None)):
        with pytest.raises(ValueError, match=f"option {option}={value!r} must be"):
            merged_options("topk", {}, {option: value})
