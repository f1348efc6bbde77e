"""torch's DistributedDataParallel where gradients take another way than `.grad` at the end of
backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from findings.common import DIFFERS, RANKS, Row, first_difference, judged, on_ranks
from torch.nn.parallel import DistributedDataParallel

from bagua_ref.conformance.expected.tolerances import SUM

PEER = "torch==2.13.0"
GIVEN = (
    "2 ranks, a Linear(4, 3), SGD(0.125), 3 steps with a batch of 8 rows a rank; expected: one"
    " process on all rows"
)
STEPS, LR = 3, 0.125
Weights = list[list[torch.Tensor]]
"""By step and parameter."""


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def loss(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return module(rows).square().mean()


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def on_all_rows() -> Weights:
    """Return the weights of one process that trains on the rows of both ranks."""
    module = model()
    optimizer, after = torch.optim.SGD(module.parameters(), lr=LR), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(module, torch.cat([batch(step, rank) for rank in range(RANKS)])).backward()
        optimizer.step()
        after.append(weights(module))
    return after


def stepping_inside_backward(hooks_first: bool) -> Weights:
    """Train with one optimizer per parameter, stepped in a hook as soon as the parameter's gradient
    is accumulated.
    """
    module = model()
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=LR) for parameter in module.parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def register() -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    if hooks_first:
        register()
    ddp, after = DistributedDataParallel(module), []
    if not hooks_first:
        register()
    for count in range(STEPS):
        loss(ddp, batch(count, dist.get_rank())).backward()
        after.append(weights(module))
    return after


def differentiating_by_function(functional: bool) -> Weights:
    """Train on gradients that `torch.autograd.grad`, or `torch.func.grad` of a functional call,
    returns.
    """
    module, after = model(), []
    ddp, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=LR)
    for step in range(STEPS):
        rows = batch(step, dist.get_rank())
        if functional:
            named = dict(ddp.named_parameters())
            found = torch.func.grad(
                lambda p, rows=rows: torch.func.functional_call(ddp, p, (rows,)).square().mean()
            )(named)
            gradients = [found[name] for name in named]
        else:
            gradients = list(torch.autograd.grad(loss(ddp, rows), list(module.parameters())))
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        after.append(weights(module))
    return after


def complaint(found: list[Weights]) -> str | None:
    """Return where the ranks' weights first leave those of one process, and how far the ranks are
    apart in the end.
    """
    difference = first_difference(found, [[of_step] * RANKS for of_step in on_all_rows()], SUM(16))
    if difference is None:
        return None
    apart = max(
        float((a - b).abs().max()) for a, b in zip(*(of_rank[-1] for of_rank in found), strict=True)
    )
    return f"{difference}; after step {STEPS} the ranks' weights are up to {apart:.2g} apart"


def find() -> Iterator[Row]:
    name = f"torch DistributedDataParallel ({PEER})"
    for hooks_first in (True, False):
        yield judged(
            name,
            "S5.1",
            f"steps inside backward, hooks registered {'before' if hooks_first else 'after'}"
            " wrapping",
            complaint(on_ranks(stepping_inside_backward, hooks_first)),
            DIFFERS,
            why=(
                "A hook that runs when a gradient is accumulated runs before the gradient is"
                " reduced, whichever was registered first, so each rank's optimizer steps with its"
                " own gradient, and no error says so."
            ),
            promise=(
                "Its documentation does not speak of such hooks. A tutorial of torch recommends"
                " them to save memory in one process and says nothing of several."
            ),
            given=GIVEN,
            effect="Ranks train on their own data alone and drift apart in silence.",
        )
    for functional, case in (
        (False, "torch.autograd.grad"),
        (True, "torch.func.grad of a functional call"),
    ):
        yield judged(
            name,
            "S5.1",
            case,
            complaint(on_ranks(differentiating_by_function, functional)),
            DIFFERS,
            why=(
                "Functions of autograd return gradients and accumulate none, so nothing is reduced."
            ),
            promise=(
                "It works only if gradients are accumulated in `.grad`, and not with"
                " `torch.autograd.grad`; that this is no error is not said."
            ),
            given=GIVEN,
            effect="Ranks train on their own data alone and drift apart in silence.",
        )
