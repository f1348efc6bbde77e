"""Tests of the checks of local updates with outside trainers: correct ones pass, the faults of real ones are found (S9)."""

from __future__ import annotations

from typing import Any

import pytest
from tests import outside_local_updates as outside

from bagua_ref.conformance import Report, run_conformance
from bagua_ref.conformance.clauses import CLAUSES

CLAUSES_OF_S9 = [clause for clause in CLAUSES if clause.partition(".")[0] == "S9"]
LACKS = {"algorithms.S9.1.inside_nodes", "algorithms.S9.5.one_byte", "algorithms.S9.5.not_finite_bytes"}
"""They use hierarchical averaging or compression, which the outside trainers do not have."""


def on(target: Any, *checks: str) -> Report:
    return run_conformance(target, ["algorithms"], checks=checks or CLAUSES_OF_S9, shrink=False, jobs=2)


@pytest.mark.slow
@pytest.mark.usefixtures("few_inputs")
def test_trainers_of_their_own_pass_and_fail_only_what_they_lack() -> None:
    report = on(outside.target(outside.LocalSGD, outside.DiLoCo))
    failed = {result.id: result.message for result in report.failures()}
    assert failed.keys() == LACKS
    assert all("NotImplementedError" in message for message in failed.values())
    assert report.counts()["passed"] >= 35


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (outside.LastBucketOnly, "algorithms.S9.1.period[float32]"),
        (outside.SkipsWithoutGradient, "algorithms.S9.1.unused_parameters"),
        (outside.OffsetOne, "algorithms.S9.1.period[float32]"),
        (outside.OffsetOne, "algorithms.S9.1.offset"),
        (outside.LastOfFragmentOnly, "algorithms.S9.4.schedule[float32]"),
        (outside.SharedOuterOptimizer, "algorithms.S9.3.own_optimizers"),
        (outside.SharedOuterOptimizer, "algorithms.S9.4.schedule[float32]"),
        (outside.WeightsOfTheApply, "algorithms.S9.4.schedule[float32]"),
        (outside.Lerp, "algorithms.S9.4.mix[float32]"),
        (outside.StartsInTheWarmUp, "algorithms.S9.warmup"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value,
)
def test_faults_of_real_trainers_are_found(kind: type[outside.Training], check: str) -> None:
    target = outside.target(local_sgd=kind) if issubclass(kind, outside.LocalSGD) else outside.target(diloco=kind)
    (failed,) = on(target, check).failures()
    assert "elements differ" in failed.message
