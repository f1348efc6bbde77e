"""Tests of the suite of algorithms with outside trainers: a correct one passes, faulty ones fail with a script that runs."""

from __future__ import annotations

import pytest
from tests import outside_algorithms as outside
from tests.launch import run_script

from bagua_ref.conformance import run_conformance

pytestmark = pytest.mark.slow

GRADIENTS = "algorithms.S5.1.gradients[float32]"
PEERS = "algorithms.S5.3.shift_one[float32]"


def on(target, *checks, **options):
    return run_conformance(target, ["algorithms"], checks=checks or None, **{"time_limit": 3.0, **options})


@pytest.mark.usefixtures("few_inputs")
def test_a_trainer_of_its_own_passes_and_what_it_lacks_is_skipped():
    report = on(outside.Right(), "S5", "S5.1", "S5.3", "S5.5", "S2.4", "S2.5", seed=5)
    assert report.passed, report
    by_id = {result.id: result for result in report.results}
    assert by_id[GRADIENTS].status == by_id[PEERS].status == "passed"
    assert by_id["algorithms.S5.5.steps[float32]"].message == "the target's algorithms has no qadam"


def test_arguments_are_the_targets_to_keep():
    assert on(outside.faulty(outside.UsesUpItsArguments)(), GRADIENTS, "S2.4").passed


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (outside.SumsAlways, "elements differ"),
        (outside.Raises, "raised RuntimeError: out of cheese"),
        (outside.Exits, "raised SystemExit: 3"),
        (outside.Dies, "the process died: exit code 4"),
        (outside.Sleeps, "no answer within 3 s"),
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
    report = on(outside.faulty(kind)(), GRADIENTS, shrink=False)
    (failed,) = report.failures()
    assert said in failed.message
    assert failed.message.startswith("gradient_allreduce(lr=")
    assert "algorithms.gradient_allreduce(world, weights[comm.rank()], inputs[comm.rank()], **options)" in failed.counterexample


@pytest.mark.parametrize(
    ("target", "check"),
    [
        (outside.SumsAlwaysTarget, GRADIENTS),
        (outside.StaysWithItsPeerTarget, PEERS),
        (outside.RaisesTarget, GRADIENTS),
        (outside.LeavesOneRankWaitingTarget, GRADIENTS),
        (outside.ReturnsTooFewStepsTarget, GRADIENTS),
        (outside.HalvesTwice, PEERS),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_counterexample_runs_fails_by_itself_and_passes_with_a_right_trainer(target, check):
    (failed,) = on(target(), check).failures()
    ran = run_script(failed.counterexample)
    assert ran.returncode == 1, failed.counterexample
    assert "Error" in ran.stderr
    right = "ReferenceBackend" if target is outside.HalvesTwice else "Right"
    ran = run_script(failed.counterexample.replace(target.__name__, right))
    assert ran.returncode == 0, ran.stderr


def test_a_counterexample_is_small():
    (failed,) = on(outside.StaysWithItsPeerTarget(), PEERS).failures()
    assert len(failed.counterexample) < 3000, failed.counterexample


def test_the_script_of_one_that_hangs_is_kept():
    (failed,) = on(outside.SleepsTarget(), GRADIENTS, shrink=False).failures()
    assert "from tests.outside_algorithms import SleepsTarget" in failed.counterexample
    assert failed.counterexample.rstrip().endswith(".run(program)  # does not return")
