"""torch's PowerSGD hook, run by the checks of S10."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from findings.common import DIFFERS, Row, judged, on_ranks
from tests import outside_compressed as outside
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.expected.tolerances import EXACT, assert_equal
from bagua_ref.conformance.trace import Recorder, check_trace

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


OPTIONS: dict[str, dict[str, Any]] = {
    "default options": {},
    "use_error_feedback=False": {"use_error_feedback": False},
    "orthogonalization_epsilon=1e-8": {"orthogonalization_epsilon": 1e-8},
    "batch_tensors_with_same_shape=True": {"batch_tensors_with_same_shape": True},
}
SHAPES = [(12, 10), (12, 10), (9, 14)]
"""Of the gradients of a bucket; the first two have one shape."""


def recorded(folder: str, settings: dict[str, Any]) -> None:
    """Record four rounds on matrices, from the second on: the first factors are of torch's own
    generator.
    """
    state = hooks.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1, **settings)
    state.iter = 2
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes = [n * m for n, m in SHAPES]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    described = json.dumps(
        [
            [start, n, m, 2, place]
            for place, (start, (n, m)) in enumerate(zip(starts, SHAPES, strict=True))
        ]
    )
    # Batched, gradients of one shape come first; without, they come as in the bucket: the same
    # order here.
    memory = "averaged" if state.use_error_feedback else None
    with Recorder(folder, algorithm="powersgd", options={"memory": memory}) as recorder:
        for k in range(4):
            bucket = outside.Bucket([torch.randn(shape, generator=generator) for shape in SHAPES])
            given = {"x": bucket.buffer().clone()}
            if k:
                given["q"] = state.q_memory_dict[0].reshape(-1).clone()
                if memory:
                    given["e"] = state.error_dict[0].clone()
            result = hooks.powerSGD_hook(state, bucket).wait()
            if k:
                recorder.before_op("all", given, k=k, matrices=described)
                recorder.after_op(
                    "all", {"x": result} | ({"e": state.error_dict[0].clone()} if memory else {})
                )
                recorder.step()


def trace_complaint(settings: dict[str, Any]) -> str | None:
    """Return what the trace of such a training is blamed for."""
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(recorded, folder, settings)
        report = check_trace(folder)
    return None if report.passed else str(report)


def find() -> Iterator[Row]:
    for name, settings in OPTIONS.items():
        yield judged(
            IMPLEMENTATION,
            "S10.2",
            f"{name}, rounds from equal factors and memories",
            trace_complaint(settings),
            given="2 ranks, gradients of 12 x 10, 12 x 10 and 9 x 14 of N(0, 1), rank 2, 3 rounds",
        )
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
