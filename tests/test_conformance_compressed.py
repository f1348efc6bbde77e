"""Tests of the checks of powersgd and topk with outside trainers: correct ones pass, faults are found (S10, S11.2)."""

from __future__ import annotations

from typing import Any

import pytest
from tests import outside_compressed as outside

from bagua_ref.conformance import Report, run_conformance
from bagua_ref.conformance.clauses import CLAUSES

CLAUSES_OF_S10 = [clause for clause in CLAUSES if clause.partition(".")[0] == "S10"]


def on(target: Any, *checks: str) -> Report:
    return run_conformance(target, ["algorithms"], checks=checks, shrink=False, jobs=2)


@pytest.mark.slow
@pytest.mark.usefixtures("few_inputs")
def test_a_powersgd_of_its_own_with_another_basis_passes_but_for_its_messages() -> None:
    report = on(outside.target(outside.PowerSGD), *CLAUSES_OF_S10)
    (failed,) = report.failures()
    assert failed.id == "algorithms.S10.5.messages"
    assert report.counts()["passed"] >= 22


@pytest.mark.slow
@pytest.mark.usefixtures("few_inputs")
def test_a_topk_of_its_own_passes() -> None:
    assert on(outside.target(topk=outside.TopK), "S11.2").passed


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (outside.ZeroGivesNaN, "algorithms.S10.2.zero_gradients"),
        (outside.ZeroGivesNaN, "algorithms.S10.3.dependent_columns"),
        (outside.StaysDead, "algorithms.S10.2.dead_columns"),
        (outside.IsPoisoned, "algorithms.S10.4.not_finite"),
        (outside.DividesBySenders, "algorithms.S11.2.rounds[float32]"),
        (outside.RemembersOverflows, "algorithms.S11.2.not_finite[float32]"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value,
)
def test_faults_of_real_trainers_are_found(kind: type[outside.Training], check: str) -> None:
    target = outside.target(topk=kind) if issubclass(kind, outside.TopK) else outside.target(kind)
    (failed,) = on(target, check).failures()
    assert "elements differ" in failed.message


def test_a_memory_of_what_is_not_compressed_is_found() -> None:
    (failed,) = on(outside.target(outside.RemembersWhatIsNotCompressed), "algorithms.S10.1.compressed").failures()
    assert "which is not compressed" in failed.message


@pytest.mark.parametrize("check", ["S10.2.zero_gradients", "S10.2.dead_columns", "S10.3.dependent_columns"])
def test_faults_of_torchs_own_hook_are_found(check: str) -> None:
    hook = outside.target(lambda *given: outside.Hooked(*given, outside.torchs_powersgd))
    (failed,) = on(hook, f"algorithms.{check}").failures()
    assert "elements differ" in failed.message
