"""torch's post-local SGD: the hook for gradients with the optimizer and the averager that its
documentation combines it with.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from findings.common import RANKS, Given, Row, first_difference, gradients, judged, on_ranks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from bagua_ref.conformance.expected.local_updates_numpy import local_sgd
from bagua_ref.conformance.expected.tolerances import SUM

PEER = "torch==2.13.0"
SIZES, STEPS, PERIOD, WARMUP, LR = [5, 3], 12, 4, 3, 0.125


def train(inside_groups: bool, restart: int) -> list[list[torch.Tensor]]:
    """Train on the calling rank; after ``restart`` steps continue from a checkpoint. Return its
    weights after each step.
    """
    model = Given(SIZES)
    subgroup = None if inside_groups else dist.group.WORLD
    state = PostLocalSGDState(None, subgroup, WARMUP, post_local_gradient_allreduce=inside_groups)
    if inside_groups:  # each rank is a node of its own
        state.subgroup, _ = dist.new_subgroups(1)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, post_localSGD_hook)

    def optimizer() -> PostLocalSGDOptimizer:
        return PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=LR), PeriodicModelAverager(PERIOD, WARMUP)
        )

    steps, history = optimizer(), []
    for t, of_ranks in enumerate(gradients(SIZES, STEPS)):
        if t == restart:
            saved, steps = steps.state_dict(), optimizer()
            steps.load_state_dict(saved)
        steps.zero_grad()
        ddp(of_ranks[dist.get_rank()]).backward()
        steps.step()
        history.append([w.detach().clone() for w in model.weights])
    return history


def complaint(inside_groups: bool, restart: int = STEPS) -> str | None:
    """Return where the weights leave those of S9.1 with offset=1."""
    given = [[[g.numpy() for g in rank] for rank in step] for step in gradients(SIZES, STEPS)]
    start, dtypes = [torch.ones(size).numpy() for size in SIZES], ["float32"] * len(SIZES)
    wanted = local_sgd(
        start, given, LR, dtypes, [RANKS], period=PERIOD, warmup_steps=WARMUP, offset=1
    )
    return first_difference(on_ranks(train, inside_groups, restart), wanted, SUM(32))


def find() -> Iterator[Row]:
    name = f"torch post_localSGD_hook ({PEER})"
    given = (
        f"2 ranks, DDP, parameters of 5 and 3 float32, N(0, 1) gradients, SGD({LR}),"
        " PeriodicModelAverager"
    )
    settings = f"period {PERIOD}, warm-up of {WARMUP} steps, offset 1"
    yield judged(
        name,
        "S9.1",
        f"{settings}, post_local_gradient_allreduce=False",
        complaint(False),
        given=given,
    )
    yield judged(name, "S9.1", f"{settings}, subgroups of one rank", complaint(True), given=given)
    yield judged(
        name,
        "S9.1",
        f"{settings}, continued from the optimizer's checkpoint",
        complaint(False, restart=6),
        given=given,
    )
