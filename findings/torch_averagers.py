"""torch's two model averagers, beside the expected values of S9.1 computed from the same
gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from findings.common import RANKS, Row, first_difference, gradients, judged, on_ranks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from bagua_ref.conformance.expected.local_updates_numpy import local_sgd
from bagua_ref.conformance.expected.tolerances import SUM

PEER = "torch==2.13.0"
SIZES, STEPS, PERIOD, LR = [5, 3], 12, 4, 0.125


def train(hierarchical: bool, warmup_steps: int) -> list[list[torch.Tensor]]:
    """Train on the calling rank, with mean gradients in warm-up; return its weights after each
    step.
    """
    weights = [torch.nn.Parameter(torch.ones(size)) for size in SIZES]
    optimizer = torch.optim.SGD(weights, lr=LR)
    averager = (
        HierarchicalModelAverager(OrderedDict([(PERIOD, RANKS)]), warmup_steps)
        if hierarchical
        else PeriodicModelAverager(PERIOD, warmup_steps)
    )
    history = []
    for t, of_ranks in enumerate(gradients(SIZES, STEPS), start=1):
        for w, g in zip(weights, of_ranks[dist.get_rank()], strict=True):
            w.grad = g.clone()
        if t <= warmup_steps:
            average_parameters((w.grad for w in weights), dist.group.WORLD)
        optimizer.step()
        averager.average_parameters(weights)
        history.append([w.detach().clone() for w in weights])
    return history


def complaint(hierarchical: bool, warmup_steps: int) -> str | None:
    """Return where the weights leave those of S9.1 with offset=1."""
    given = [[[g.numpy() for g in rank] for rank in step] for step in gradients(SIZES, STEPS)]
    start, dtypes = [torch.ones(size).numpy() for size in SIZES], ["float32"] * len(SIZES)
    wanted = local_sgd(
        start, given, LR, dtypes, [RANKS], period=PERIOD, warmup_steps=warmup_steps, offset=1
    )
    return first_difference(on_ranks(train, hierarchical, warmup_steps), wanted, SUM(32))


def find() -> Iterator[Row]:
    for hierarchical, name in (
        (False, "PeriodicModelAverager"),
        (True, "HierarchicalModelAverager"),
    ):
        for warmup_steps in (4, 3):
            yield judged(
                f"torch {name} ({PEER})",
                "S9.1",
                f"period {PERIOD}, warm-up of {warmup_steps} steps, offset 1",
                complaint(hierarchical, warmup_steps),
                why=(
                    "The hierarchical averager counts its periods from step 0, and the periodic one"
                    " from the end of the warm-up: with the same period and warm-up they average"
                    " after different steps, unless the period divides the warm-up."
                ),
                promise=(
                    "The hierarchical averager is documented as an extension of the periodic one,"
                    " and also that it averages where its step can be divided by a period."
                ),
                given=(
                    "2 ranks, parameters of 5 and 3 float32, N(0, 1) gradients, one group of all"
                    f" ranks, SGD({LR})"
                ),
                effect=(
                    "After warm-up, the first averaging comes up to period - 1 steps later than"
                    " with the other averager."
                ),
            )
