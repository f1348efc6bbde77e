"""Decent-DP's wrapper: trainings along its graphs, beside the expected values of S13 computed from
the same gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from findings.common import Given, Row, first_difference, gradients, judged
from tests.launch import launch

from bagua_ref.conformance.expected.decentralized_numpy import train_decentralized
from bagua_ref.conformance.expected.tolerances import SUM

PEER = "decent-dp==0.2.3"
RANKS, STEPS, LR = 4, 6, 0.125
SIZES = [5, 40]


def train(topology: str, views: bool) -> list[list[torch.Tensor]]:
    """Train on the calling rank; return its weights after each step but the first, which is taken
    in the second forward.
    """
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    model = Given(SIZES)
    wrapped = DecentralizedDataParallel(
        model,
        lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=LR),
        topology=topology,
        param_as_bucket_view=views,
        _local_world_size=1,
    )
    history = []
    for of_ranks in gradients(SIZES, STEPS, RANKS):
        wrapped(of_ranks[dist.get_rank()]).backward()
        history.append([w.detach().clone() for w in model.weights])
    return history[1:]


def pairs(*edges: tuple[int, int]) -> list[list[tuple[int, float]]]:
    """Return the graph in which the two ranks of each edge average: each receiving rank's sources
    and weights.
    """
    return [[(a, 0.5), (b, 0.5)] for rank in range(RANKS) for a, b in edges if rank in (a, b)]


GRAPHS: dict[str, list[Any]] = {
    "one-peer-exp": [pairs((0, 1), (2, 3)), pairs((0, 2), (1, 3))],
    "ring": [pairs((0, 1), (2, 3)), pairs((0, 3), (1, 2))],
}


def complaint(topology: str, mode: Any, views: bool) -> str | None:
    """Return where the weights leave those of a mode of S13; each step averages before it applies
    the gradients.
    """
    given = [
        [np.concatenate([g.numpy() for g in rank]) for rank in step]
        for step in gradients(SIZES, STEPS, RANKS)
    ]
    start = np.ones(sum(SIZES), np.float32)
    history = train_decentralized(start, given, LR, "float32", None, mode, interval=1)
    wanted = [[np.split(x, np.cumsum(SIZES)[:-1]) for x in ranks] for ranks in history[1:]]
    return first_difference(launch(train, RANKS, topology, views), wanted, SUM(32))


def find() -> Iterator[Row]:
    name = f"Decent-DP DecentralizedDataParallel ({PEER})"
    given = (
        f"{RANKS} ranks over gloo, each on a node of its own, parameters of 5 and 40 float32, N(0,"
        f" 1) gradients, SGD({LR})"
    )
    for views in (True, False):
        case = f"topology=complete, param_as_bucket_view={views}"
        yield judged(name, "S3.4", case, complaint("complete", "all", views), given=given)
    for topology, graphs in GRAPHS.items():
        yield judged(
            name,
            "S13",
            f"topology={topology}, its graphs one after another",
            complaint(topology, graphs, True),
            why=(
                "The first exchange, which the second forward begins, takes the graph of step 1,"
                " and the next one that of step 3: the graph of step 2 is left out, and two steps"
                " in a row average with the same rank."
            ),
            promise=(
                "A topology is described as a list of graphs, one for each iteration of the"
                " pattern."
            ),
            given=given,
            effect="The first rounds mix less than the pattern does; from then on they follow it.",
        )
        taken = [graphs[0], *(graphs[t % 2] for t in (1, 3, 4, 5, 6))]
        yield judged(
            name,
            "S13",
            f"topology={topology}, the graph of step 2 left out",
            complaint(topology, taken, True),
            given=given,
        )
