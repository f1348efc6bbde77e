"""Tests that a target is judged by what it claims: nothing passes without a call, and nothing fails
that it does not have.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from tests.launch import start_by_fork
from tests.limited_targets import CODECS, COLLECTIVES, METHODS_OF, Narrow, Target, only, real
from tests.scripts import ROOT

from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.conformance.checks.registry import Check, checks_of, prepare, variants
from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.run import search
from bagua_ref.conformance.run.runner import reason_to_skip, row_id, verdict
from bagua_ref.conformance.targets.process import ProcessTarget
from bagua_ref.conformance.targets.process_link import Program
from bagua_ref.conformance.targets.target import resolve
from bagua_ref.conformance.targets.world import RankWorld

pytestmark = pytest.mark.slow

FAST = ("kernels", "codec", "collectives", "comm_ops", "algorithms", "samplers")
"""Suites of which all of this takes seconds."""
CHEAP = ("collectives", "comm_ops", "samplers", "kernels")
Found = dict[str, tuple[str, str]]
Judged = Callable[..., Found]


def suites(fast: Iterable[str] = FAST) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in fast else [pytest.mark.proof]) for name in METHODS_OF
    ]


def each_of(fast: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return parameters of which the others are left to proofs."""
    return [*fast, *(pytest.param(name, marks=pytest.mark.proof) for name in others)]


@pytest.fixture
def judged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Judged:
    """Judge a suite of a target; except in proofs, with few inputs of one of the dtypes that it
    has.
    """
    is_proof = request.node.get_closest_marker("proof") is not None
    monkeypatch.setitem(search.PROFILES, "quick", 5 if is_proof else 2)
    return partial(judge, every_dtype=is_proof)


def judge(target: Any, suite: str, calls: list[Any], *, every_dtype: bool) -> Found:
    """Return each check's status and message, having compared them with the calls that the target
    has counted.
    """
    prepare(suite)
    parts, found = resolve(target), Found()
    for check in checks_of([suite]).values():
        dtypes = [dtype for dtype in variants(check) if not reason_to_skip(parts, check, dtype)]
        for dtype in dtypes if every_dtype else dtypes[:1]:
            before = len(calls)
            status, message = verdict(
                search.search(check, dtype, parts, search.Search(shrink=False), Journal()), False
            )
            found[row_id(check, dtype)] = (status, message)
            assert status != "passed" or len(calls) > before, (
                f"{row_id(check, dtype)} passed without a call"
            )
            assert status == "passed" or message, row_id(check, dtype)
        if not dtypes:
            found[check.id] = ("skipped", reason_to_skip(parts, check, variants(check)[0]))
    return found


def statuses(found: Found) -> set[str]:
    return {status for status, _ in found.values()}


def failures(found: Found) -> dict[str, str]:
    return {name: message for name, (status, message) in found.items() if status == "failed"}


# A call and a comparison


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda lab, draw: lab.call("add_", {"x": torch.ones(1), "y": torch.ones(1)}, ("x",)),
            "nothing was compared",
        ),
        (lambda lab, draw: lab.assert_that(True, ""), "no call reached the target"),
        (
            lambda lab, draw: lab.assert_equal(lab.kernels().name, "reference"),
            "no call reached the target",
        ),
        (
            lambda lab, draw: lab.assert_equal(
                lab.kernels().add_(torch.ones(1), torch.ones(1)), None
            ),
            "",
        ),
        (lambda lab, draw: lab.skip("no cheese"), "no cheese"),
    ],
)
def test_a_check_that_judges_nothing_is_skipped(function: Any, reason: str) -> None:
    check = Check("kernels.S1.new", "kernels", "S1", "", function)
    backend = ReferenceBackend()
    status, message = verdict(
        search.search(check, None, resolve(backend), search.Search(), Journal()), False
    )
    assert (status, message) == ("skipped" if reason else "passed", reason)
    assert not vars(backend)  # calls are no longer counted


# Targets that do nothing right


@pytest.mark.parametrize("suite", suites(CHEAP))
@pytest.mark.parametrize("error", each_of([RuntimeError], [ValueError, TypeError]))
def test_what_raises_passes_nothing_but_refusals(
    suite: str, error: type[Exception], judged: Judged
) -> None:
    def raises(part: Any, *arguments: Any, **options: Any) -> Any:
        raise error("out of cheese")

    target = Target(suite, lambda name: raises)
    found = judged(target, suite, target.calls)
    assert all(
        "refuses" in name or "other_keys" in name
        for name, (status, _) in found.items()
        if status == "passed"
    )
    assert failures(found)


@pytest.mark.parametrize("suite", suites())
def test_what_is_not_implemented_is_skipped(suite: str, judged: Judged) -> None:
    def raises(part: Any, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("no cheese")

    target = Target(suite, lambda name: raises)
    found = judged(target, suite, target.calls)
    assert statuses(found) == {"skipped"}, failures(found)
    assert any(
        "not provided: " in message and "no cheese" in message for _, message in found.values()
    )


@pytest.mark.parametrize("suite", suites(CHEAP))
def test_what_returns_its_input_has_been_called(suite: str, judged: Judged) -> None:
    def returns(part: Any, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if arguments else None

    target = Target(suite, lambda name: returns)
    assert failures(judged(target, suite, target.calls))


# Targets that are right, but cannot do everything


@pytest.mark.parametrize(
    "dtype",
    each_of(["float32", "bfloat16", "int64"], ["float16", "float64", "uint8", "int8", "int16"]),
)
@pytest.mark.parametrize("suite", ["kernels", "codec", "comm_ops", "algorithms"])
def test_kernels_of_one_dtype_fail_nothing(suite: str, dtype: str, judged: Judged) -> None:
    target = Narrow(dtype)
    found = judged(target, suite, target.calls)
    assert not failures(found)
    if suite == "kernels":
        assert found["kernels.S2.3.gather_flat"][0] == "passed"
    if dtype == "float32":
        assert "passed" in statuses(found)


@pytest.mark.parametrize(
    "dtype",
    each_of(
        ["float32", "bool"], ["float16", "bfloat16", "float64", "uint8", "int8", "int32", "int64"]
    ),
)
def test_a_communicator_of_one_dtype_fails_nothing(dtype: str, judged: Judged) -> None:
    target = Target("collectives", real("collectives", only(dtype)), dtypes=[dtype])
    found = judged(target, "collectives", target.calls)
    assert not failures(found)
    reducing = {
        f"collectives.S3.9.{name}"
        for name in (
            "allreduce",
            "reduce",
            "reduce_scatter",
            "long",
            "one_after_another",
            "refuses",
            "gaps",
        )
    }
    integers = {"uint8", "int8", "int32", "int64"}
    skipped = {"collectives.S3.9.broadcast_object", *(reducing if dtype == "bool" else ())}
    skipped |= {"collectives.S3.9.wraps_around"} if dtype not in integers else set()
    skipped |= {"collectives.S3.9.nan"} if dtype in {"bool", *integers} else set()
    assert {name for name, (status, _) in found.items() if status == "skipped"} == skipped


@pytest.mark.parametrize("dtype", each_of(["float32"], ["float16", "bfloat16", "float64"]))
@pytest.mark.parametrize("suite", each_of(["comm_ops"], ["algorithms"]))
def test_operations_of_one_dtype_fail_nothing(suite: str, dtype: str, judged: Judged) -> None:
    target = Target(suite, real(suite, only(dtype)), dtypes=[dtype])
    found = judged(target, suite, target.calls)
    assert not failures(found)
    assert "passed" in statuses(found)


@pytest.mark.parametrize("most", each_of([2], [1, 3]))
@pytest.mark.parametrize("suite", each_of(["collectives", "comm_ops"], ["algorithms"]))
def test_small_worlds_fail_nothing(suite: str, most: int, judged: Judged) -> None:
    def guard(arguments: Any) -> None:
        for world in [first for first in arguments[0][:1] if isinstance(first, RankWorld)]:
            if world.world_size > most:
                raise RuntimeError(f"{world.world_size} ranks are not claimed")

    target = Target(suite, real(suite, guard), max_ranks=most)
    if suite == "collectives":
        made = target.communicator

        def communicator(world: RankWorld) -> Any:
            guard([[world], {}])
            return made(world)

        target.communicator = communicator
    found = judged(target, suite, target.calls, every_dtype=False)
    assert not failures(found)
    assert "passed" in statuses(found)
    assert (suite, most) != ("collectives", 2) or statuses(found) == {"passed"}


@pytest.mark.parametrize(
    "missing", ["lacks", pytest.param("does not implement", marks=pytest.mark.proof)]
)
@pytest.mark.parametrize(
    "suite",
    [
        name
        for name in suites(["kernels", "comm_ops"])
        if name.values[0] not in ("codec", "collectives")
    ],
)
def test_a_single_method_fails_nothing(suite: str, missing: str, judged: Judged) -> None:
    def raises(part: Any, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("not here")

    make, other, passed = real(suite), None if missing == "lacks" else raises, set[str]()
    for only_one in METHODS_OF[suite]:
        target = Target(suite, lambda name, one=only_one: make(name) if name == one else other)
        found = judged(target, suite, target.calls, every_dtype=False)
        assert not failures(found), only_one
        passed |= {check for check, (status, _) in found.items() if status == "passed"}
    assert passed


@pytest.mark.parametrize(
    "codec", each_of(["OneBit"], [name for name in CODECS if name != "OneBit"])
)
def test_a_single_codec_fails_nothing(codec: str, judged: Judged) -> None:
    target = Narrow(codecs=[codec])
    found = judged(target, "codec", target.calls)
    assert not failures(found)
    assert "passed" in statuses(found)
    others = judged(target, "comm_ops", target.calls)
    assert not failures(others)
    assert (statuses(others) == {"skipped"}) == (codec != "MinMaxUInt8")


@pytest.mark.parametrize(
    "missing", each_of([("alltoall_v", "barrier")], [(name,) for name in COLLECTIVES]), ids="-".join
)
def test_a_communicator_without_some_methods_fails_nothing(
    missing: tuple[str, ...], judged: Judged
) -> None:
    make = real("collectives")
    target = Target("collectives", lambda each: None if each in missing else make(each))
    found = judged(target, "collectives", target.calls)
    assert not failures(found)
    for name in missing:
        assert any(
            f"the target's communicator has no {name}" in message for _, message in found.values()
        )
    assert "passed" in statuses(found)


# Programs


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests about parts of programs."""
    start_by_fork(monkeypatch)
    seen, ask = list[str](), Program.ask

    def recorded(program: Program, call: str, *arguments: Any, **options: Any) -> Any:
        seen.extend([call] if call not in ("hello", "world") else [])
        return ask(program, call, *arguments, **options)

    monkeypatch.setattr(Program, "ask", recorded)
    return seen


def judged_program(
    fault: str, suites: Iterable[str], asked: list[str], judged: Judged, **capabilities: Any
) -> Found:
    target = ProcessTarget(f"{shlex.quote(sys.executable)} {ROOT}/tests/process_program.py {fault}")
    target.capabilities |= {"max_ranks": 3, **capabilities}
    try:
        return {
            name: result
            for suite in suites
            for name, result in judged(target, suite, asked).items()
        }
    finally:
        target.end()


PROGRAMS = each_of([("kernels", "codec", "samplers")], [("collectives",)])


@pytest.mark.parametrize("suites", PROGRAMS)
def test_a_program_that_answers_with_errors_passes_nothing(
    suites: tuple[str, ...], asked: list[str], judged: Judged
) -> None:
    found = judged_program("errors", suites, asked, judged, max_ranks=2)
    assert failures(found)
    assert "passed" not in statuses(found)


@pytest.mark.parametrize(
    "dtype", each_of(["float32"], ["", "float16", "bfloat16", "float64", "int64", "bool"])
)
@pytest.mark.parametrize("suites", PROGRAMS)
def test_what_a_program_or_its_adapter_refuses_is_not_passed(
    suites: tuple[str, ...], dtype: str, asked: list[str], judged: Judged
) -> None:
    found = judged_program("", suites, asked, judged, **({"dtypes": [dtype]} if dtype else {}))
    assert not failures(found)
    assert "passed" in statuses(found)
    why = {
        name.partition("[")[0]: message
        for name, (_, message) in found.items()
        if "capabilities exclude" not in message
    }
    refused = {name for name in why if "refuses" in name and "codec" in suites}
    refused |= {name for name in why if name.startswith("samplers.")}
    assert {name for name, message in why.items() if message} == refused
    assert all(why[name].startswith("cannot be asked: ") for name in refused)
