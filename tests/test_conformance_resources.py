"""Tests of what a target has outside of its code: few ranks, something that only one job may use, a
server; and of hangs.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import find

from bagua_ref import contrib
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.cases.strategies import worlds
from bagua_ref.conformance.cases.training_cases import graph_cases, sizes_of, worlds_of
from bagua_ref.conformance.checks.registry import all_checks
from bagua_ref.conformance.run import runner
from bagua_ref.conformance.run.search import PROFILES
from bagua_ref.conformance.targets.target import resolve
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


def test_a_communicator_of_the_command_line_has_capabilities() -> None:
    target = runner.NamedTarget("reference", communicator=f"{__name__}:small").load(10.0)
    assert (target.max_ranks, target.external) == (2, False)


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


def test_the_page_says_how_many_ranks_there_are() -> None:
    page = (DOCS / "conformance.md").read_text()
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


# One job


def test_an_external_target_has_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 3)
    inside, outside = (
        resolve(SimpleNamespace(samplers=contrib, capabilities={"external": external}))
        for external in (False, True)
    )
    assert [runner.default_jobs(inside), runner.default_jobs(outside)] == [3, 1]
