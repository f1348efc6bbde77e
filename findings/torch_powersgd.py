"""torch's PowerSGD hook, run by the checks of S10."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from findings.common import DIFFERS, Row, judged, on_ranks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.expected.tolerances import EXACT, assert_equal

PEER = "torch==2.13.0"
IMPLEMENTATION = f"torch powerSGD_hook ({PEER})"


class Bucket:
    """DDP's bucket, as far as hooks use it."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        self._flat = torch.cat([g.reshape(-1) for g in gradients])
        self._shapes = [g.shape for g in gradients]

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def powersgd(
    world: Any, weights: list[torch.Tensor], program: list[Any], **settings: Any
) -> list[Any]:
    """Play a program with the hook and its default epsilon: all gradients are one bucket, in DDP's
    order, last parameter first, and its all-reduces go through the simulated world.
    """
    group = SimpleNamespace(size=lambda: world.world_size)
    state = hooks.PowerSGDState(
        group,
        settings["matrix_approximation_rank"],
        start_powerSGD_iter=2,
        min_compression_rate=settings["min_compression_rate"],
        use_error_feedback=settings["memory"] is not None,
        warm_start=settings["warm_start"],
        random_seed=settings["seed"] % 2**31,
    )
    state.iter = 2
    assert state.orthogonalization_epsilon == 0  # the default

    def all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        world.transport.allreduce_inplace(tensor)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future)

    # All ranks share the module, as they are threads; each has a copy of the function with a
    # transport of its own.
    dist_of_rank = SimpleNamespace(all_reduce=all_reduce, group=SimpleNamespace(WORLD=group))
    hook = type(hooks.powerSGD_hook)(
        hooks.powerSGD_hook.__code__,
        {**vars(hooks), "dist": dist_of_rank},
        "hook",
        hooks.powerSGD_hook.__defaults__,
    )

    def step(gradients: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        given = [gradients.get(place, torch.zeros_like(w)) for place, w in enumerate(weights)]
        bucket = Bucket(given[::-1])
        bucket.buffer().copy_(hook(state, bucket).wait())
        return bucket.gradients()[::-1]

    def memories() -> list[torch.Tensor | None]:
        if 0 not in state.error_dict:
            return [None] * len(weights)
        parts = state.error_dict[0].split([w.numel() for w in weights[::-1]])
        return [part.view(w.shape).clone() for part, w in zip(parts[::-1], weights, strict=True)]

    # Which part of the hook's Q belongs to which parameter is its own affair.
    act = {
        "step": step,
        "memories": memories,
        "factors": lambda: [None] * len(weights),
        "restart": lambda: weights,
        "new buckets": lambda: weights,
    }
    return [act[name](*arguments) for name, *arguments in program]


class Target:
    algorithms = SimpleNamespace(powersgd=powersgd)


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
        hooks.powerSGD_hook(state, Bucket([x.clone()])).wait()
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
    for check, (otherwise, words) in CASES.items():
        report = run_conformance(Target(), ["algorithms"], checks=[f"algorithms.{check}"])
        failures = report.failures()
        message = f"check algorithms.{check}: {failures[0].message}" if failures else None
        clause, _, case = check.rpartition(".")
        yield judged(IMPLEMENTATION, clause, case.replace("_", " "), message, otherwise, **words)
