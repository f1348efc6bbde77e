"""accelerate's LocalSGD, beside the expected values of S9.1 computed from the same gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from findings import simulated
from findings.common import RANKS, Row, first_difference, gradients, judged, on_ranks
from torch import nn

from bagua_ref.conformance.expected.local_updates_numpy import local_sgd
from bagua_ref.conformance.expected.tolerances import SUM

PEER = "accelerate==1.15.0"
SIZES, STEPS, PERIOD, LR = [8, 3], 8, 4, 0.125


def train() -> list[list[torch.Tensor]]:
    """Train on the calling rank; return its weights after each step."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(
        nn.ParameterList(nn.Parameter(torch.ones(size)) for size in SIZES)
    )
    optimizer, history = torch.optim.SGD(model.parameters(), lr=LR), []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD) as training:
        for of_ranks in gradients(SIZES, STEPS):
            for w, g in zip(model.parameters(), of_ranks[dist.get_rank()], strict=True):
                w.grad = g.clone()
            optimizer.step()
            training.step()
            history.append([w.detach().clone() for w in model.parameters()])
    return history


PROGRAM = """
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
accelerator = Accelerator(cpu=True)
model = accelerator.prepare_model(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as training:
    for step in range({steps}):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        training.step()
"""


def find() -> Iterator[Row]:
    given = [[[g.numpy() for g in rank] for rank in step] for step in gradients(SIZES, STEPS)]
    start, dtypes = [torch.ones(size).numpy() for size in SIZES], ["float32"] * len(SIZES)
    wanted = local_sgd(start, given, LR, dtypes, [RANKS], period=PERIOD)
    yield judged(
        f"accelerate LocalSGD ({PEER})",
        "S9.1",
        f"period {PERIOD}, offset 0",
        first_difference(on_ranks(train), wanted, SUM(32)),
        given=f"2 ranks, parameters of 8 and 3 float32, N(0, 1) gradients, SGD({LR})",
    )
    name = f"accelerate LocalSGD ({PEER})"
    words = {"given": "a Linear(3, 1), SGD(0.1), period 2, 4 steps"}
    yield simulated.simulated(name, "training", PROGRAM.format(steps=4), **words)
    yield simulated.simulated(
        name,
        "one step more on one rank",
        PROGRAM.format(steps="3 + rank"),
        why=(
            "The rank with a step more averages once more in the loop. Its average meets the one"
            " that the other makes on leaving the context, and nothing meets its own last one."
        ),
        promise=simulated.SILENT,
        given="a Linear(3, 1), SGD(0.1), period 2, 3 steps on rank 0 and 4 on rank 1",
        effect=simulated.HANGS,
    )
