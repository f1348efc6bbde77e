"""Tests that a target is judged by what it claims: nothing passes without a call, and nothing fails
that it does not have.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.launch import start_by_fork
from tests.scripts import ROOT
from torch import Tensor

from bagua_ref import contrib
from bagua_ref.backends.codec import Codec
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.conformance.checks.registry import Check, checks_of, prepare, variants
from bagua_ref.conformance.lab.journal import Journal
from bagua_ref.conformance.lab.lab import KERNELS
from bagua_ref.conformance.run import search
from bagua_ref.conformance.run.runner import reason_to_skip, row_id, verdict
from bagua_ref.conformance.targets.process import ProcessTarget
from bagua_ref.conformance.targets.process_link import Program
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps
from bagua_ref.conformance.targets.target import resolve

pytestmark = pytest.mark.slow

SUITES = ("kernels", "codec", "collectives", "comm_ops", "algorithms", "samplers")
CODECS = tuple(ReferenceBackend.codecs)
Found = dict[str, tuple[str, str]]
_NO_METHODS = ("capabilities", "codecs", "device_types", "name", "requests")


class Part:
    """A part of a target whose methods ``make`` makes by name, and counts their calls."""

    def __init__(self, calls: list[str], make: Callable[[str], Any], transport: Any = None) -> None:
        self._calls, self._make, self._transport = calls, make, transport

    def rank(self) -> int:
        return int(self._transport.rank())

    def nranks(self) -> int:
        return int(self._transport.nranks())

    def __getattr__(self, name: str) -> Any:
        method = None if name in _NO_METHODS else self._make(name)
        if method is None:
            raise AttributeError(name)
        if isinstance(method, type):
            self._calls.append(name)
            return method

        def counted(*arguments: Any, **options: Any) -> Any:
            self._calls.append(name)
            return method(*arguments, **options)

        return counted


def target_of(suite: str, method: Callable[..., Any]) -> Any:
    """Return a target of whose part every method is this one, and the list of its calls."""
    calls: list[str] = []
    part = Part(calls, lambda name: method)
    if suite == "codec":
        codec = partial(Part, calls, lambda name: method)
        codecs = dict.fromkeys(CODECS, lambda kernels: codec())
        return SimpleNamespace(kernels=SimpleNamespace(codecs=codecs), calls=calls)
    if suite == "collectives":
        communicator = lambda world: Part(calls, lambda name: method, world.transport)  # noqa: E731
        return SimpleNamespace(communicator=communicator, calls=calls)
    return SimpleNamespace(**{suite: part}, calls=calls)


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in arguments."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    return (
        [x for item in inner for x in tensors(item)]
        if isinstance(value, list | tuple | dict)
        else []
    )


def right(suite: str, *, dtype: str = "", most: int = 99, lacks: tuple[str, ...] = ()) -> Any:
    """Return a target with the package's own part, which raises for all that it does not claim."""
    calls: list[str] = []

    def method(name: str, owner: Any) -> Any:
        if name in lacks:
            return None
        own = getattr(owner, name)

        def guarded(*arguments: Any, **options: Any) -> Any:
            claimed = {getattr(torch, dtype)} if dtype else set()
            if dtype and not {x.dtype for x in tensors([arguments, options])} <= claimed:
                raise RuntimeError("this dtype is not claimed")
            if getattr(arguments[0] if arguments else None, "world_size", 0) > most:
                raise RuntimeError("so many ranks are not claimed")
            return own(*arguments, **options)

        return own if isinstance(own, type) else guarded

    def communicator(world: Any) -> Part:
        assert world.world_size <= most
        return Part(calls, partial(method, owner=world.transport), world.transport)

    own = {
        "kernels": ReferenceBackend(),
        "comm_ops": ReferenceCommOps("reference"),
        "algorithms": ReferenceAlgorithms("reference"),
        "samplers": contrib,
    }
    part = (
        communicator
        if suite == "collectives"
        else Part(calls, partial(method, owner=own.get(suite)))
    )
    capabilities = {"max_ranks": most, **({"dtypes": [dtype]} if dtype else {})}
    name = "communicator" if suite == "collectives" else suite
    return SimpleNamespace(**{name: part}, calls=calls, capabilities=capabilities)


class Narrow(ReferenceBackend):
    """The reference's kernels and some of its codecs; it raises RuntimeError for all dtypes but
    one, if that is given.
    """

    def __init__(self, dtype: str = "", codecs: tuple[str, ...] = CODECS) -> None:
        self.calls, self.capabilities = list[str](), {"dtypes": [dtype]} if dtype else {}
        self.codecs = {name: self._narrow(ReferenceBackend.codecs[name]) for name in codecs}  # type: ignore[misc]
        for name in KERNELS:
            vars(self)[name] = partial(self._kernel, name)

    def _guard(self, name: str, x: Any) -> None:
        self.calls.append(name)
        # what it writes or reads first; others may have a dtype of their own
        if (
            self.capabilities
            and str(x.dtype).removeprefix("torch.") not in self.capabilities["dtypes"]
        ):
            raise RuntimeError(f"{x.dtype} is not claimed")

    def _kernel(self, name: str, *arguments: Any, **options: Any) -> Any:
        for x in tensors([arguments, options])[:1]:
            self._guard(name, x)
        return getattr(ReferenceBackend, name)(self, *arguments, **options)

    def _narrow(self, codec: type[Codec]) -> type[Codec]:
        def compress(made: Codec, x: Tensor, *arguments: Any, **options: Any) -> Any:
            self._guard(codec.__name__, x)
            return codec.compress(made, x, *arguments, **options)

        def decompress(made: Codec, payload: Tensor, num_chunks: int, out: Tensor) -> Any:
            self._guard(codec.__name__, out)
            return codec.decompress(made, payload, num_chunks, out)

        return type(codec.__name__, (codec,), {"compress": compress, "decompress": decompress})


@pytest.fixture
def judged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Found]:
    """Judge a suite of a target; except in proofs, with few inputs of one of the dtypes that it
    has.
    """
    is_proof = request.node.get_closest_marker("proof") is not None
    monkeypatch.setitem(search.PROFILES, "quick", 5 if is_proof else 2)
    return partial(judge, every_dtype=is_proof)


def judge(target: Any, suite: str, calls: list[Any] | None = None, *, every_dtype: bool) -> Found:
    """Return each check's status and message, having compared them with the calls that the target
    has counted.
    """
    prepare(suite)
    calls = target.calls if calls is None else calls
    parts, found = resolve(target), Found()
    for check in checks_of([suite]).values():
        dtypes = [dtype for dtype in variants(check) if not reason_to_skip(parts, check, dtype)]
        for dtype in dtypes if every_dtype else dtypes[:1]:
            before, name = len(calls), row_id(check, dtype)
            how = search.Search(shrink=False)
            status, message = verdict(search.search(check, dtype, parts, how, Journal()), False)
            found[name] = (status, message)
            assert status != "passed" or len(calls) > before, f"{name} passed without a call"
            assert status == "passed" or message, name
        if not dtypes:
            found[check.id] = ("skipped", reason_to_skip(parts, check, variants(check)[0]))
    return found


def of_status(status: str, found: Found) -> dict[str, str]:
    return {name: message for name, (each, message) in found.items() if each == status}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda lab, draw: lab.call("add_", {"x": torch.ones(1), "y": torch.ones(1)}, ("x",)),
            "nothing was compared",
        ),
        (lambda lab, draw: lab.assert_that(True, ""), "no call reached the target"),
        (
            lambda lab, draw: lab.assert_equal(
                lab.kernels.add_(torch.ones(1), torch.ones(1)), None
            ),
            "",
        ),
        (lambda lab, draw: lab.skip("no cheese"), "no cheese"),
    ],
)
def test_a_check_that_judges_nothing_is_skipped(function: Any, reason: str) -> None:
    check = Check("kernels.S1.new", "kernels", "S1", "", function)
    parts = resolve(ReferenceBackend())
    status, message = verdict(search.search(check, None, parts, search.Search(), Journal()), False)
    assert (status, message) == ("skipped" if reason else "passed", reason)


def raises(error: Exception) -> Callable[..., Any]:
    def method(*arguments: Any, **options: Any) -> Any:
        raise error

    return method


def own_input(*arguments: Any, **options: Any) -> Any:
    return arguments[0] if arguments else None


@pytest.mark.parametrize("suite", ["collectives", "comm_ops", "kernels", "samplers"])
def test_targets_that_do_nothing_right_pass_nothing(suite: str, judged: Any) -> None:
    found = judged(target_of(suite, raises(RuntimeError("out of cheese"))), suite)
    assert all("refuses" in name or "other_keys" in name for name in of_status("passed", found))
    assert of_status("failed", found)
    assert of_status("failed", judged(target_of(suite, own_input), suite))


@pytest.mark.parametrize("suite", SUITES)
def test_what_is_not_implemented_is_skipped(suite: str, judged: Any) -> None:
    found = judged(target_of(suite, raises(NotImplementedError("no cheese"))), suite)
    skipped = of_status("skipped", found)
    assert skipped.keys() == found.keys()
    assert any("not provided: " in said and "no cheese" in said for said in skipped.values())


def proof(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.proof)


@pytest.mark.parametrize(
    ("suite", "dtype"),
    [
        *[(suite, "float32") for suite in ("kernels", "codec", "comm_ops")],
        *[("kernels", "int64"), ("comm_ops", "bfloat16"), proof("algorithms", "float32")],
        *[proof("kernels", dtype) for dtype in ("float16", "float64", "uint8", "int16")],
        *[proof("algorithms", dtype) for dtype in ("float64", "int64")],
    ],
)
def test_kernels_of_one_dtype_fail_nothing(suite: str, dtype: str, judged: Any) -> None:
    found = judged(Narrow(dtype), suite)
    assert not of_status("failed", found)
    assert suite != "kernels" or found["kernels.S2.3.gather_flat"][0] == "passed"
    assert of_status("passed", found) or dtype != "float32"


@pytest.mark.parametrize("dtype", ["float32", "bool", *map(proof, ("bfloat16", "uint8", "int16"))])
def test_a_communicator_of_one_dtype_fails_nothing(dtype: str, judged: Any) -> None:
    found = judged(right("collectives", dtype=dtype), "collectives")
    assert not of_status("failed", found)
    reducing = {"allreduce", "reduce", "reduce_scatter", "long", "one_after_another"}
    reducing |= {"refuses", "gaps"}
    skipped = {"broadcast_object", *(reducing if dtype in ("bool", "int16") else ())}
    skipped |= {"wraps_around"} if dtype != "uint8" else set()
    skipped |= {"nan"} if "float" not in dtype else set()
    assert of_status("skipped", found).keys() == {f"collectives.S3.9.{name}" for name in skipped}


@pytest.mark.parametrize(
    ("suite", "limit"),
    [
        ("comm_ops", {"dtype": "float32"}),
        ("comm_ops", {"most": 2}),
        ("collectives", {"most": 2}),
        ("collectives", {"lacks": ("alltoall_v", "barrier")}),
        ("kernels", {"lacks": tuple(name for name in KERNELS if name != "average_")}),
        ("comm_ops", {"lacks": ("centralized", "decentralized_on_graph")}),
        ("samplers", {"lacks": ("BudgetBatchSampler",)}),
        proof("comm_ops", {"dtype": "float16"}),
        proof("collectives", {"most": 1}),
        proof("algorithms", {"dtype": "float32"}),
        proof("algorithms", {"most": 2}),
        proof("algorithms", {"lacks": ("gradient_allreduce", "diloco", "decentralized")}),
    ],
)
def test_a_right_target_with_limits_fails_nothing(suite: str, limit: Any, judged: Any) -> None:
    found = judged(right(suite, **limit), suite)
    assert not of_status("failed", found)
    assert of_status("passed", found)
    skipped = of_status("skipped", found).values()
    for name in limit.get("lacks", ()) if suite == "collectives" else ():
        assert any(f"the target's communicator has no {name}" in said for said in skipped)


@pytest.mark.parametrize("codec", ["OneBit", proof("MXFP4"), proof("MinMaxUInt8")])
def test_a_single_codec_fails_nothing(codec: str, judged: Any) -> None:
    found = judged(Narrow(codecs=(codec,)), "codec")
    assert not of_status("failed", found)
    assert of_status("passed", found)
    others = judged(Narrow(codecs=(codec,)), "comm_ops")
    assert not of_status("failed", others)
    assert bool(of_status("passed", others)) == (codec == "MinMaxUInt8")


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


def judged_program(fault: str, suites: Any, asked: list[str], judged: Any, **limits: Any) -> Found:
    target = ProcessTarget(f"{shlex.quote(sys.executable)} {ROOT}/tests/process_program.py {fault}")
    target.capabilities |= {"max_ranks": 3, **limits}
    found = Found()
    try:
        for suite in suites:
            found |= judged(target, suite, asked)
    finally:
        target.end()
    return found


PROGRAMS = [("kernels", "codec", "samplers"), proof(("collectives",))]


@pytest.mark.proof
@pytest.mark.parametrize("suites", PROGRAMS)
def test_a_program_that_answers_with_errors_passes_nothing(
    suites: Any, asked: list[str], judged: Any
) -> None:
    found = judged_program("errors", suites, asked, judged, max_ranks=2)
    assert of_status("failed", found)
    assert not of_status("passed", found)


@pytest.mark.parametrize("dtype", ["float32", *map(proof, ("", "float64", "int64", "bool"))])
@pytest.mark.parametrize("suites", PROGRAMS)
def test_what_a_program_or_its_adapter_refuses_is_not_passed(
    suites: Any, dtype: str, asked: list[str], judged: Any
) -> None:
    found = judged_program("", suites, asked, judged, **({"dtypes": [dtype]} if dtype else {}))
    assert not of_status("failed", found)
    assert of_status("passed", found)
    why = {
        name.partition("[")[0]: message
        for name, (_, message) in found.items()
        if "capabilities exclude" not in message
    }
    refused = {name for name in why if "refuses" in name and "codec" in suites}
    refused |= {name for name in why if name.startswith("samplers.")}
    assert {name for name, message in why.items() if message} == refused
    assert all(why[name].startswith("cannot be asked: ") for name in refused)
