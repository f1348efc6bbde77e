"""Tests of the suite of algorithms with outside trainers: correct ones pass, faulty ones fail with
a script that runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests import outside_algorithms as outside
from tests import outside_compressed as compressed
from tests import outside_local_updates as local_updates
from tests.launch import run_script

from bagua_ref.conformance import Report, run_conformance
from bagua_ref.conformance.clauses import CLAUSES
from bagua_ref.conformance.run.search import PROFILES

GRADIENTS = "algorithms.S5.1.gradients[float32]"
PEERS = "algorithms.S5.3.shift_one[float32]"


LACKS = {
    "algorithms.S9.1.inside_nodes",
    "algorithms.S9.5.one_byte",
    "algorithms.S9.5.not_finite_bytes",
}
"""They use hierarchical averaging or compression, which the outside trainers of local updates do
not have.
"""


def on(target: Any, *checks: str, **options: Any) -> Report:
    return run_conformance(target, ["algorithms"], checks=checks, **{"time_limit": 3.0, **options})


@pytest.fixture
def four_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "quick", 4)


def clauses_of(section: str) -> list[str]:
    return [clause for clause in CLAUSES if clause.partition(".")[0] == section]


@pytest.mark.slow
@pytest.mark.usefixtures("four_inputs")
def test_a_trainer_of_its_own_passes_and_what_it_lacks_is_skipped():
    report = on(outside.Right(), "S5", "S5.1", "S5.3", "S5.5", "S2.4", "S2.5", seed=5)
    assert report.passed, report
    by_id = {result.id: result for result in report.results}
    assert by_id[GRADIENTS].status == by_id[PEERS].status == "passed"
    assert by_id["algorithms.S5.5.steps[float32]"].message == "the target's algorithms has no qadam"


@pytest.mark.slow
def test_arguments_are_the_targets_to_keep():
    assert on(outside.faulty(outside.UsesUpItsArguments)(), GRADIENTS, "S2.4").passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (outside.SumsAlways, "elements differ"),
        (outside.Raises, "raised RuntimeError: out of cheese"),
        (outside.Exits, "raised SystemExit: 3"),
        (outside.Dies, "the process died: exit code 4"),
        (outside.Sleeps, "no answer within 1 s"),
        (outside.LeavesOneRankWaiting, "deadlock: every simulated rank"),
        (outside.ReturnsNothing, "rank 0 returned a NoneType, not a list of"),
        (outside.ReturnsTooFewSteps, "rank 0 returned a list of "),
        (outside.ReturnsTooFewParameters, "rank 0 returned list as entry 0, not "),
        (outside.ReturnsOneDimension, "in entry 0, not torch.float32 of shape"),
        (outside.ReturnsAnotherDtype, "rank 0 returned torch.complex64 of shape"),
        (outside.ReturnsNumbers, "as parameter 0 in entry 0"),
        (outside.ReturnsNaN, "nan instead of"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_trainer_that_misbehaves_gets_a_verdict(kind, said):
    target = outside.faulty(kind)
    (failed,) = on(
        target(), GRADIENTS, shrink=False, time_limit=1.0 if kind is outside.Sleeps else 10.0
    ).failures()
    assert said in failed.message
    assert failed.message.startswith("gradient_allreduce(lr=")
    assert "algorithms.gradient_allreduce(world, " in failed.counterexample
    if kind is outside.Sleeps:
        assert f"from tests.outside_algorithms import {target.__name__}" in failed.counterexample
        assert failed.counterexample.rstrip().endswith(".run(program)  # does not return")
    elif hasattr(outside, target.__name__):
        repeats(failed.counterexample, target, "Right")


def repeats(script: str, target: type, right: str) -> None:
    """Assert that a script fails by itself, and passes with a right trainer instead."""
    ran = run_script(script)
    assert ran.returncode == 1, script
    assert "Error" in ran.stderr
    ran = run_script(script.replace(target.__name__, right))
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "right"),
    [(outside.StaysWithItsPeerTarget, "Right"), (outside.HalvesTwice, "ReferenceBackend")],
    ids=["trainer", "kernels"],
)
def test_a_counterexample_is_small_and_repeats_the_failure(target, right):
    (failed,) = on(target(), PEERS).failures()
    assert len(failed.counterexample) < 3000, failed.counterexample
    repeats(failed.counterexample, target, right)


# Trainers of their own, and faults of real ones.


@pytest.mark.slow
@pytest.mark.usefixtures("few_inputs")
def test_a_powersgd_with_another_basis_passes_but_for_its_messages() -> None:
    report = on(
        compressed.target(compressed.PowerSGD),
        *clauses_of("S10"),
        shrink=False,
        jobs=2,
        time_limit=10.0,
    )
    (failed,) = report.failures()
    assert failed.id == "algorithms.S10.5.messages"
    assert report.counts()["passed"] >= 22


@pytest.mark.slow
@pytest.mark.usefixtures("four_inputs")
def test_a_topk_passes() -> None:
    assert on(
        compressed.target(topk=compressed.TopK), "S11.2", shrink=False, jobs=2, time_limit=10.0
    ).passed


@pytest.mark.slow
@pytest.mark.usefixtures("four_inputs")
def test_local_updates_pass_and_what_they_lack_is_skipped() -> None:
    target = local_updates.target(local_updates.LocalSGD, local_updates.DiLoCo)
    report = on(target, *clauses_of("S9"), shrink=False, jobs=2, time_limit=10.0)
    assert not report.failures()
    skipped = {result.id: result.message for result in report.results if result.status == "skipped"}
    assert skipped.keys() == LACKS
    assert all("NotImplementedError" in message for message in skipped.values())
    assert report.counts()["passed"] >= 35


def test_a_memory_of_what_is_not_compressed_is_found() -> None:
    target = compressed.target(compressed.RemembersWhatIsNotCompressed)
    (failed,) = on(target, "algorithms.S10.1.compressed", shrink=False, time_limit=10.0).failures()
    assert "which is not compressed" in failed.message


@pytest.mark.parametrize(
    ("module", "argument", "kind", "check"),
    [
        (compressed, "powersgd", compressed.ZeroGivesNaN, "S10.2.zero_gradients"),
        (compressed, "powersgd", compressed.ZeroGivesNaN, "S10.3.dependent_columns"),
        (compressed, "powersgd", compressed.StaysDead, "S10.2.dead_columns"),
        (compressed, "powersgd", compressed.IsPoisoned, "S10.4.not_finite"),
        *(
            (compressed, "powersgd", compressed.TorchsHook, check)
            for check in ("S10.2.zero_gradients", "S10.2.dead_columns", "S10.3.dependent_columns")
        ),
        (compressed, "topk", compressed.DividesBySenders, "S11.2.rounds[float32]"),
        (compressed, "topk", compressed.RemembersOverflows, "S11.2.not_finite[float32]"),
        (local_updates, "local_sgd", local_updates.LastBucketOnly, "S9.1.period[float32]"),
        (local_updates, "local_sgd", local_updates.SkipsWithoutGradient, "S9.1.unused_parameters"),
        (local_updates, "local_sgd", local_updates.OffsetOne, "S9.1.period[float32]"),
        (local_updates, "local_sgd", local_updates.OffsetOne, "S9.1.offset"),
        (local_updates, "diloco", local_updates.LastOfFragmentOnly, "S9.4.schedule[float32]"),
        (local_updates, "diloco", local_updates.SharedOuterOptimizer, "S9.3.own_optimizers"),
        (local_updates, "diloco", local_updates.SharedOuterOptimizer, "S9.4.schedule[float32]"),
        (local_updates, "diloco", local_updates.WeightsOfTheApply, "S9.4.schedule[float32]"),
        (local_updates, "diloco", local_updates.Lerp, "S9.4.mix[float32]"),
        (local_updates, "diloco", local_updates.StartsInTheWarmUp, "S9.warmup"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_faults_of_real_trainers_are_found(
    module: Any, argument: str, kind: Any, check: str
) -> None:
    (failed,) = on(
        module.target(**{argument: kind}),
        f"algorithms.{check}",
        shrink=False,
        jobs=2,
        time_limit=10.0,
    ).failures()
    assert "elements differ" in failed.message
