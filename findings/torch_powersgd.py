"""torch's PowerSGD hook, run by the checks of S10."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from findings.common import DIFFERS, Row, judged
from tests import outside_compressed as outside

from bagua_ref.conformance import run_conformance

PEER = "torch==2.13.0"
IMPLEMENTATION = f"torch powerSGD_hook ({PEER})"


def make(world: Any, settings: dict[str, Any]) -> Any:
    """Return the hook with its default epsilon, over the simulated world."""
    state, hook = outside.torchs_powersgd(world, settings)
    assert state.orthogonalization_epsilon == 0  # the default
    return state, hook


CASES: dict[str, tuple[str, dict[str, str]]] = {
    "S10.2.zero_gradients": (
        "fault",
        {
            "why": "A gradient that is exactly zero on all ranks gives NaN: a column is divided by its norm, which is 0.",
            "promise": "An epsilon, 0 by default, may be added to the norm; it is described as a means against division by zero, "
            "which at 0 it does not prevent.",
            "effect": "A layer that was unused in one step, such as a frozen branch, is NaN from then on, and so is its memory.",
        },
    ),
    "S10.2.dead_columns": (
        "fault",
        {
            "why": "Once the factors of a gradient are zero or NaN, they stay so.",
            "promise": "Nothing is said of it.",
            "effect": "With warm start, one such round ends the training of that gradient.",
        },
    ),
    "S10.1.compressed": (
        "fault",
        {
            "why": "Gradients that are not compressed have an error memory, too: the difference between the rank's own and the mean "
            "gradient, which is never sent and grows from round to round where ranks differ.",
            "promise": "Error feedback is described as the memory of what compression loses; nothing is lost in these.",
            "effect": "The sum over ranks stays right; the memory's size grows with the steps, and float32 loses the gradient's digits.",
        },
    ),
    "S10.3.dependent_columns": (
        DIFFERS,
        {
            "why": "Dependent columns are orthogonalised in float32 without a threshold; what rounding left of a dependent column passes "
            "as a direction of its own.",
            "promise": "Nothing is said of it.",
            "effect": "Where the rank of a gradient is below that of the approximation, results are off.",
        },
    ),
}


def find() -> Iterator[Row]:
    target = outside.target(lambda *given: outside.Hooked(*given, make))
    for check, (otherwise, words) in CASES.items():
        report = run_conformance(target, ["algorithms"], checks=[f"algorithms.{check}"], jobs=1)
        failures = report.failures()
        message = f"check algorithms.{check}: {failures[0].message}" if failures else None
        clause, _, case = check.rpartition(".")
        given = failures[0].counterexample.split("program = ")[-1].splitlines()[0] if failures else ""
        yield judged(IMPLEMENTATION, clause, case.replace("_", " "), message, otherwise, given=given, **words)
