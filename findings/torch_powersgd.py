"""torch's PowerSGD hook, run by the checks of S10."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from findings.common import DIFFERS, Row, judged, on_ranks
from tests import outside_compressed as outside
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.expected.tolerances import EXACT, assert_equal

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
            "why": (
                "A gradient that is exactly zero on all ranks gives NaN: a column is divided by its"
                " norm, which is 0."
            ),
            "promise": (
                "The epsilon that is added to norms is 0 by default, and described as a means"
                " against division by zero; 0 is recommended where no column can be 0."
            ),
            "given": "Drawn by the check: gradients of zero on all ranks, 2 ranks",
            "effect": "The weights of a layer that no rank used in one step become NaN.",
        },
    ),
    "S10.3.dependent_columns": (
        DIFFERS,
        {
            "why": (
                "Dependent columns are orthogonalised in float32 without a threshold; what rounding"
                " left of a dependent column passes as a direction of its own."
            ),
            "promise": "Nothing is said of it.",
            "given": (
                "Drawn by the check: gradients of a rank below that of the approximation, 2 ranks"
            ),
            "effect": (
                "Where the rank of a gradient is below that of the approximation, results are off."
            ),
        },
    ),
}


def remembered(rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient that this rank gives in each round, and what the hook remembers of it,
    which is not compressed.
    """
    state = hooks.PowerSGDState(None, start_powerSGD_iter=2)
    state.iter = 2
    x = torch.randn(10, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(rounds):
        hooks.powerSGD_hook(state, outside.Bucket([x.clone()])).wait()
    return x, state.error_dict[0].clone()


def find() -> Iterator[Row]:
    sizes = {}
    for rounds in (10, 100):
        x, memory = on_ranks(remembered, rounds)[0]
        sizes[rounds] = float(memory.abs().max())
    try:
        assert_equal(memory, torch.zeros(10), EXACT)
        complaint = None
    except AssertionError as error:
        grown = ", ".join(f"{size:.3g} after {rounds} rounds" for rounds, size in sizes.items())
        complaint = (
            f"memory of a vector of 10: {error}; its largest value is {grown}, of the gradient"
            f" {x.abs().max():.3g}"
        )
    yield judged(
        IMPLEMENTATION,
        "S10.1",
        "memory of what is not compressed",
        complaint,
        why=(
            "Gradients that are not compressed have an error memory, too: the rank's own minus the"
            " mean gradient, which no compression lost and which grows from round to round where"
            " ranks differ."
        ),
        promise="Error feedback is described as the memory of what compression loses.",
        given="2 ranks, a vector of 10 of N(0, 1), the same in each round, default options",
        effect=(
            "The sum over ranks stays right, but memories grow with the steps, and float32 loses"
            " digits of the gradient."
        ),
    )
    target = outside.target(lambda *given: outside.Hooked(*given, make))
    for check, (otherwise, words) in CASES.items():
        report = run_conformance(target, ["algorithms"], checks=[f"algorithms.{check}"], jobs=1)
        failures = report.failures()
        message = f"check algorithms.{check}: {failures[0].message}" if failures else None
        clause, _, case = check.rpartition(".")
        yield judged(IMPLEMENTATION, clause, case.replace("_", " "), message, otherwise, **words)
