"""Tests that suites call methods as the documentation says, and that a correct optimizer may round
in its own way (S1).
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_ref.algorithms import q_adam_optimizer
from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.run.runner import check_ids
from bagua_ref.conformance.run.search import PROFILES
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps, ReferenceTarget

PAGE = Path(__file__).parents[1] / "docs" / "checks.md"


def documented(suite: str) -> dict[str, tuple[int, set[str], set[str]]]:
    """Return for each method in the suite's page how many positional arguments it takes, and what
    others it must and may take.
    """
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = (" ".join(part.split()) for part in section if part.lower().startswith(f"{suite}\n"))
    found = {}
    for name, arguments in re.findall(r"`(\w+)\((world, [^)]*)\)`", text):
        positional, _, named = arguments.partition(" *, ")
        others = named.split(", ")
        optional = {other.partition("=")[0] for other in others if "=" in other}
        found[name] = (
            positional.count(","),
            {other for other in others if "=" not in other},
            optional,
        )
    return found


def test_operations_are_called_as_the_suites_page_says() -> None:
    """The package's own pass their suite, so that it passes no argument which they do not take, and
    leaves none out.
    """
    found = documented("comm_ops")
    assert set(found) == {name for name in vars(ReferenceCommOps) if not name.startswith("_")}
    for name, (count, names, optional) in found.items():
        assert not optional, name
        parameters = list(inspect.signature(getattr(ReferenceCommOps, name)).parameters.values())[
            1:
        ]
        assert len([p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]) == count, name
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == names, name
        assert all(p.default is p.empty for p in parameters), name


class Strict:
    """The package's own algorithms, which take what is documented, no more and no less."""

    def __init__(self) -> None:
        self._documented, self._algorithms = documented("algorithms"), ReferenceTarget().algorithms

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._documented:
            raise AttributeError(name)
        count, required, optional = self._documented[name]

        def call(*args: Any, **options: Any) -> Any:
            if len(args) != count or not required <= set(options) <= required | optional:
                raise TypeError(
                    f"{name} is called with {len(args)} arguments and {sorted(options)}, not"
                    f" {self._documented[name]}"
                )
            return getattr(self._algorithms, name)(*args, **options)

        return call


@pytest.mark.proof
def test_algorithms_are_called_as_the_suites_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "quick", 10)  # few choose what is passed
    wanted = [
        name
        for name in check_ids()
        if name.startswith("algorithms.") and (name.endswith("[float32]") or "[" not in name)
    ]
    target = types.SimpleNamespace(algorithms=Strict())
    report = run_conformance(target, ["algorithms"], checks=wanted, jobs=0, shrink=False)
    assert {result.status for result in report.results} == {"passed"}, report
    target.algorithms._documented["gradient_allreduce"][1].remove("average")
    report = run_conformance(
        target, ["algorithms"], checks=["algorithms.S5.1.gradients[float32]"], jobs=0, shrink=False
    )
    assert "gradient_allreduce is called with" in str(report)


def in_float64(
    group: dict[str, Any],
    parameters: list[torch.Tensor],
    states: list[dict[str, torch.Tensor]],
    s: int,
    warmup: int,
) -> None:
    """Step along m as S5.5 has it, rounded once."""
    beta1, beta2 = group["betas"]
    for parameter, state in zip(parameters, states, strict=True):
        state["step"] += 1
        p, m, v = (x.double() for x in (parameter, state["exp_avg"], state["exp_avg_sq"]))
        step = group["lr"] / (1 - beta1**s) * m / (v.sqrt() / (1 - beta2**s) ** 0.5 + group["eps"])
        parameter.copy_(p - torch.where((v > 0) | (s <= warmup), step, 0))


@pytest.mark.usefixtures("few_inputs")
def test_a_frozen_step_may_be_rounded_as_an_optimizer_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(q_adam_optimizer, "_frozen_step", in_float64)
    report = run_conformance("reference", checks=["algorithms.S5.5.steps[float32]"], jobs=0)
    assert report.passed, report


def test_a_frozen_step_that_is_not_adams_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(group: dict[str, Any], *args: Any) -> None:
        in_float64({**group, "lr": group["lr"] * 1.001}, *args)

    monkeypatch.setattr(q_adam_optimizer, "_frozen_step", longer)
    assert not run_conformance(
        "reference", checks=["algorithms.S5.5.steps[float32]"], jobs=0, shrink=False
    ).passed
