"""Tests of what a target has outside of its code: few ranks, something that only one job may use, a
server; and of hangs.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import torch
from hypothesis import find
from hypothesis import strategies as st

from bagua_ref import contrib
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.cases.strategies import worlds
from bagua_ref.conformance.cases.training_cases import graph_cases, sizes_of, worlds_of
from bagua_ref.conformance.checks.registry import Check, all_checks
from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.run import runner, search
from bagua_ref.conformance.run.search import PROFILES
from bagua_ref.conformance.targets import reference_algorithms, reference_target
from bagua_ref.conformance.targets.target import assemble, resolve
from bagua_ref.conformance.targets.world import MOST_RANKS, RankWorld, own_communicator

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[1] / "docs"


# Few ranks


def at_most(ranks: int, **parts: Any) -> Any:
    return SimpleNamespace(capabilities={"max_ranks": ranks}, **parts)


def small(world: RankWorld) -> Any:
    """The simulated world's communicator, which can have no more than two ranks."""
    if world.world_size > 2:
        raise RuntimeError(f"there are no {world.world_size} ranks")
    return own_communicator(world)


small.capabilities = {"max_ranks": 2}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("few_inputs")
def test_worlds_are_as_small_as_the_target_says() -> None:
    report = run_conformance(at_most(2, communicator=small), checks=["collectives.S3.9.allgather"])
    assert report.passed, str(report)
    assert report.max_ranks == 2
    assert "worlds of up to 2 ranks" in str(report)
    assert '"max_ranks": 2' in report.to_json()


@pytest.mark.usefixtures("few_inputs")
def test_a_check_that_needs_more_ranks_is_skipped() -> None:
    checks = ["comm_ops.S3.4.many_steps", "comm_ops.S3.5.ring[float32]", "algorithms.S13.restart"]
    report = run_conformance(at_most(2, kernels="reference"), checks=checks)
    assert {result.id: (result.status, result.message) for result in report.results} == {
        "comm_ops.S3.4.many_steps": ("skipped", "needs 6 ranks, the target has at most 2"),
        "comm_ops.S3.5.ring[float32]": ("passed", ""),
        "algorithms.S13.restart": ("skipped", "needs 3 ranks, the target has at most 2"),
    }
    tried = round(PROFILES["quick"] * all_checks()["comm_ops.S3.5.ring"].effort)
    assert report.results[1].examples == tried  # larger worlds do not count


@pytest.mark.parametrize(("smallest", "inputs"), [(1, 40), (2, 0)])
def test_worlds_that_are_too_large_are_drawn_again_until_none_has_fitted_for_long(
    smallest: int, inputs: int
) -> None:
    """A check that no world fits is left after some inputs; one that few worlds fit gets as many
    inputs as others.
    """
    drawn: list[int] = []

    def function(lab: Any, draw: Any) -> None:
        draw(st.integers(0, 2**40))  # so that inputs differ
        drawn.append(draw(st.sampled_from([*range(2, 7), smallest])))
        lab.need_ranks(drawn[-1])
        lab.call("add_", {"x": torch.ones(1), "y": torch.ones(1)}, ("x",))
        lab.comparisons += 1

    check = Check("kernels.S1.new", "kernels", "S1", "", function)
    target = resolve(at_most(1, kernels="reference"))
    found = search.search(check, None, target, search.Search(shrink=False), Journal())
    assert (found.examples, found.skipped) == (
        inputs,
        "" if inputs else "needs 2 ranks, the target has at most 1",
    )
    assert (len(drawn) > 150) == (inputs > 0), len(drawn)


def test_pytest_skips_it_too() -> None:
    from bagua_ref.conformance.run.pytest_plugin import judge
    from bagua_ref.conformance.run.runner import OneByOne
    from bagua_ref.conformance.run.search import Search

    check = all_checks()["comm_ops.S3.4.many_steps"]
    with pytest.raises(pytest.skip.Exception, match="needs 6 ranks, the target has at most 2"):
        judge(OneByOne(), resolve(at_most(2, kernels="reference")), check, None, Search(), ())


def test_without_a_limit_the_report_says_nothing() -> None:
    report = run_conformance("reference", checks=["kernels.S1.add[float16]"])
    assert report.max_ranks is None
    assert "worlds" not in str(report)


def test_a_communicator_of_the_command_line_has_capabilities() -> None:
    target = assemble("reference", f"{__name__}:small")
    assert (target.max_ranks, target.external, target.factory) == (2, False, f"{__name__}:small")


@pytest.mark.parametrize(
    ("capabilities", "error", "said"),
    [
        ({"max_ranks": 0}, ValueError, r"capabilities\['max_ranks'\]=0 must be at least 1"),
        ({"max_ranks": "2"}, TypeError, r"capabilities\['max_ranks'\]='2' must be an int"),
        ({"max_ranks": True}, TypeError, r"capabilities\['max_ranks'\]=True must be an int"),
        ({"external": 1}, TypeError, r"capabilities\['external'\]=1 must be a bool"),
    ],
)
def test_capabilities_are_checked(capabilities: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        resolve(SimpleNamespace(communicator=small, capabilities=capabilities))


def test_capabilities_of_the_target_precede_those_of_its_kernels() -> None:
    kernels = type(
        "Kernels", (ReferenceBackend,), {"capabilities": {"dtypes": ["float32"], "max_ranks": 3}}
    )()
    target = resolve(SimpleNamespace(kernels=kernels, capabilities={"max_ranks": 2}))
    assert (target.dtypes, target.max_ranks) == (("float32",), 2)


def test_the_pages_say_how_many_ranks_there_are() -> None:
    for suite, ranks in MOST_RANKS.items():
        page = (DOCS / "conformance" / f"{suite}.md").read_text()
        assert re.findall(r"up to (\d+) ranks", page) == [str(ranks)], suite
    page = (DOCS / "conformance" / "limits.md").read_text()
    said = " ".join(page.split())
    assert {
        suite: int(ranks) for ranks, suite in re.findall(r"(\d+) (?:ranks )?in `(\w+)`", said)
    } == MOST_RANKS
    assert f"There are up to {runner.MOST_JOBS} jobs" in said


def test_there_are_worlds_of_so_many_ranks() -> None:
    """That there are no larger ones is asserted for every world."""
    assert (
        sum(find(worlds(), lambda nodes: sum(nodes) >= MOST_RANKS["collectives"]))
        == MOST_RANKS["collectives"]
    )
    nodes = find(
        worlds_of(True, sizes_of("ring", 9)), lambda nodes: sum(nodes) >= MOST_RANKS["comm_ops"]
    )
    assert sum(nodes) == MOST_RANKS["comm_ops"]
    _, nodes, _ = find(graph_cases(6), lambda case: sum(case[1]) >= MOST_RANKS["algorithms"])
    assert sum(nodes) == MOST_RANKS["algorithms"]


def test_larger_worlds_than_the_pages_say_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST_RANKS, "collectives", 8)
    report = run_conformance(
        SimpleNamespace(communicator=own_communicator), checks=["collectives.S3.9.allgather"]
    )
    assert "MOST_RANKS and the pages say less" in report.failures()[0].message


# One job


def test_an_external_target_has_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.torch.multiprocessing, "cpu_count", lambda: 3)
    inside, outside = (
        resolve(SimpleNamespace(samplers=contrib, capabilities={"external": external}))
        for external in (False, True)
    )
    assert [runner._jobs(jobs, inside) for jobs in (None, 0, 2)] == [3, 0, 2]
    assert [runner._jobs(jobs, outside) for jobs in (None, 0, 2)] == [1, 0, 2]


# Connections that are lost


class Counts(ReferenceBackend):
    """A backend whose calls are counted."""

    calls = 0

    def _add_(self, x, y):
        Counts.calls += 1
        self.fail(Counts.calls, x)
        super()._add_(x, y)


class Dies(Counts):
    def fail(self, call, x):
        if call > 9:
            raise redis.exceptions.ConnectionError("Error 111 connecting to gpu7:6379")


class HangsAndDies(Counts):
    def fail(self, call, x):
        if call == 10:
            raise TimeoutError("no answer from gpu7")
        if call > 10:
            raise ConnectionRefusedError(111, "Connection refused")


class Wrapped(Counts):
    def fail(self, call, x):
        if call > 9:
            raise RuntimeError("no answer") from ConnectionRefusedError(111, "Connection refused")


class NeverThere(Counts):
    def fail(self, call, x):
        raise ConnectionRefusedError(111, "Connection refused")


class FailsOnce(Counts):
    def fail(self, call, x):
        if call == 10:
            raise ConnectionResetError(104, "Connection reset by peer")


class FailsInTurns(Counts):
    def fail(self, call, x):
        if call > 9 and call % 2:
            raise RuntimeError("no memory")
        if call > 9:
            raise OSError("no space")


class OfSomeInputs(Counts):
    """A fault of the backend that looks like one of a connection."""

    def fail(self, call, x):
        if x.numel() > 3:
            raise ConnectionResetError(104, "Connection reset by peer")


DIED = "the server behind the target is probably down"


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (
            Dies,
            (
                r"add_ raised ConnectionError: Error 111 connecting to gpu7:6379; 9 inputs passed,"
                rf" then .*{DIED}"
            ),
        ),
        (
            HangsAndDies,
            rf"add_ raised TimeoutError: no answer from gpu7; 9 inputs passed, then .*{DIED}",
        ),
        (NeverThere, r"add_ raised ConnectionRefusedError: \[Errno 111\] Connection refused"),
        (
            FailsOnce,
            (
                r"results differ for the same input: at first, add_ raised ConnectionResetError:"
                r" .*; .* again, no violation"
            ),
        ),
        (
            FailsInTurns,
            (
                r"results differ for the same input: at first, add_ raised (.*): no .*; .* again,"
                r" add_ raised (?!\1).*: no .*"
            ),
        ),
        (Wrapped, rf"add_ raised RuntimeError: no answer; 9 inputs passed, then .*{DIED}"),
        (OfSomeInputs, r"add_ raised ConnectionResetError: \[Errno 104\] Connection reset by peer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_connection_that_is_lost_is_said(backend: Any, said: str) -> None:
    failed = run_conformance(backend(), checks=["kernels.S1.add[float32]"]).failures()[0]
    assert re.fullmatch(said, failed.message), failed.message
    assert "kernels.add_(" in failed.counterexample


# Calls that do not return


def sleeps(*arguments: Any, **options: Any) -> Any:
    time.sleep(1000)


class Sleeps(ReferenceBackend):
    _add_ = sleeps


class SleepingSampler(contrib.LoadBalancingDistributedSampler):
    __iter__ = sleeps


class SleepingBatchSampler(contrib.LoadBalancingDistributedBatchSampler):
    __init__ = sleeps


class Target:
    kernels = Sleeps()
    samplers = SimpleNamespace(
        LoadBalancingDistributedSampler=SleepingSampler,
        LoadBalancingDistributedBatchSampler=SleepingBatchSampler,
    )

    @staticmethod
    def communicator(world):
        comm = own_communicator(world)
        comm.allgather = comm.allreduce_inplace = comm.barrier = sleeps
        return comm

    class comm_ops(reference_target.ReferenceCommOps):  # noqa: N801
        def __init__(self):
            super().__init__(ReferenceBackend())

        centralized = sleeps

    comm_ops = comm_ops()  # type: ignore[assignment,misc]

    class algorithms(reference_algorithms.ReferenceAlgorithms):  # noqa: N801
        def __init__(self):
            super().__init__(ReferenceBackend())

        bytegrad = sleeps

    algorithms = algorithms()  # type: ignore[assignment,misc]


LAST = {
    "kernels.S1.add[float32]": "result = kernels.add_(x, y)",
    **dict.fromkeys(
        (f"collectives.S3.9.{name}" for name in ("allgather", "refuses", "every_dtype", "barrier")),
        "results = run_world(communicator, nodes, program, ",
    ),
    "comm_ops.S3.2.low_precision[float32]": "comm_ops.centralized(world, inputs[world.rank], ",
    "algorithms.S5.2.gradients[float32]": "algorithms.bytegrad(world, weights[world.rank], ",
    "samplers.S7.3.digits": "found = list(sampler)",
    "samplers.S7.4.batches": "batches = samplers.LoadBalancingDistributedBatchSampler(sampler, ",
}
"""The statement that does not return, by check."""


def test_a_call_that_does_not_return_ends_its_script() -> None:
    found = {
        failed.id: failed
        for failed in run_conformance(Target(), checks=[*LAST], time_limit=1.0).failures()
    }
    assert found.keys() == LAST.keys()
    for check, failed in found.items():
        assert "no answer within 1 s" in failed.message
        assert len(failed.message) < 200
        line = failed.counterexample.rstrip().splitlines()[-1]
        assert line.endswith("does not return"), line
        assert line.startswith(LAST[check]), line
        compile(failed.counterexample, "script", "exec")


def test_a_statement_of_several_lines_that_does_not_return_has_the_comment_above() -> None:
    script = (
        run_conformance(Target(), checks=["samplers.S7.5.refuses"], time_limit=1.0)
        .failures()[0]
        .counterexample
    )
    assert re.search(
        r"\n# does not return:\ntry:\n    samplers\.LoadBalancingDistributed\w+\(", script
    ), script
