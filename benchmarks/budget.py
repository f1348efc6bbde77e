"""Batches under a budget: the share of real tokens in the time of an epoch, and the time to plan
one, beside what people use.

    pip install transformers lhotse
    python benchmarks/budget.py [--quick] [--json PATH]

100,000 log-normal lengths (mu 5, cut at 20 means) on 8 replicas. A step takes as long as its
slowest replica, a batch as long as its samples padded to the longest: share = real tokens /
(8 * sum over steps of the slowest batch).
Peers: torch's DistributedSampler and the LengthGroupedSampler of transformers with batches of a
fixed size, lhotse's DynamicBucketingSampler with 30 synchronised buckets and the same budget.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import common  # beside this file
import numpy as np
import torch
from torch.utils.data import DistributedSampler

from bagua_ref.contrib import BudgetBatchSampler

REPLICAS = 8
Batches = Sequence[Sequence[int]]


def log_normal(size: int, sigma: float) -> np.ndarray:
    lengths = np.exp(np.random.default_rng(0).normal(5, sigma, size)).astype(np.int64) + 1
    return np.minimum(lengths, int(20 * lengths.mean()))


def ours(lengths: np.ndarray, budget: int) -> list[Batches]:
    return [
        list(BudgetBatchSampler(lengths, budget, True, REPLICAS, rank, mix=8))
        for rank in range(REPLICAS)
    ]


def fixed_size(
    samplers: Callable[[int], Sequence[Any]], batch_size: int, epoch: int
) -> list[Batches]:
    drawn = [list(sampler) for sampler in samplers(epoch)]
    return [
        [own[place : place + batch_size] for place in range(0, len(own), batch_size)]
        for own in drawn
    ]


def plain(size: int) -> Callable[[int], Sequence[Any]]:
    def samplers(epoch: int) -> Sequence[Any]:
        made = [DistributedSampler(range(size), REPLICAS, rank) for rank in range(REPLICAS)]
        for sampler in made:
            sampler.set_epoch(epoch)
        return made

    return samplers


def grouped(lengths: np.ndarray, batch_size: int) -> Callable[[int], Sequence[Any]]:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    def samplers(epoch: int) -> Sequence[Any]:
        generator = torch.Generator().manual_seed(epoch)
        order = list(
            LengthGroupedSampler(
                batch_size * REPLICAS, lengths=lengths.tolist(), generator=generator
            )
        )
        return [  # as accelerate hands out its batches
            [
                order[place + of]
                for place in range(rank * batch_size, len(order), batch_size * REPLICAS)
                for of in range(batch_size)
                if place + of < len(order)
            ]
            for rank in range(REPLICAS)
        ]

    return samplers


def bucketed(
    lengths: np.ndarray, budget: int, epoch: int, ranks: Sequence[int] = range(REPLICAS)
) -> list[Batches]:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = CutSet.from_cuts(
        [MonoCut(str(index), 0, float(length), 0) for index, length in enumerate(lengths.tolist())]
    )
    drawn = []
    for rank in ranks:
        sampler = DynamicBucketingSampler(
            cuts,
            max_duration=float(budget),
            num_buckets=30,
            shuffle=True,
            world_size=REPLICAS,
            rank=rank,
            sync_buckets=True,
        )
        sampler.set_epoch(epoch)
        drawn.append([[int(cut.id.split("_")[0]) for cut in batch] for batch in sampler])
    return drawn


def share(lengths: np.ndarray, drawn: list[Batches]) -> float:
    """Return real tokens over the replicas' time, each step as long as its slowest replica."""
    steps = min(len(own) for own in drawn)
    tokens = np.array([[lengths[batch].sum() for batch in own[:steps]] for own in drawn])
    cost = np.array([[len(batch) * lengths[batch].max() for batch in own[:steps]] for own in drawn])
    real = int(tokens.sum())
    return real / (REPLICAS * int(cost.max(axis=0).sum()))


def seconds(plan: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    plan()
    return time.perf_counter() - begun


def main() -> int:
    args = common.arguments("Batches under a budget: real tokens, time to plan.")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    size = 10_000 if args.quick else 100_000
    rows = []
    for sigma, budget_in_means in ((0.5, 20), (1, 20), (1, 50), (0.5, 8)):
        lengths = log_normal(size, sigma)
        budget = max(int(budget_in_means * lengths.mean()), int(lengths.max()))
        work = f"share of real tokens, sigma {sigma:g}, budget {budget / lengths.mean():.3g} means"
        batch_size = int(budget // lengths.mean())
        peers = {
            "DistributedSampler": share(lengths, fixed_size(plain(size), batch_size, 0)),
            "group_by_length": share(
                lengths, fixed_size(grouped(lengths, batch_size), batch_size, 0)
            ),
        }
        peers["lhotse"] = share(lengths, bucketed(lengths, budget, 0))
        bar = 0.98 if budget_in_means >= 20 else 0.96
        rows.append(
            common.Row(
                f"{work}, mix=8",
                "-",
                share(lengths, ours(lengths, budget)),
                {"bar": bar, **peers},
                "bar",
                common.at_least(1.0),
            )
        )
    lengths = log_normal(10 * size, 1)
    budget = max(int(20 * lengths.mean()), int(lengths.max()))
    batch_size = int(budget // lengths.mean())
    sampler = BudgetBatchSampler(lengths, budget, num_replicas=REPLICAS, rank=0)
    peers = {
        "bar": 1.5 * size / 100_000,
        "DistributedSampler": seconds(lambda: list(plain(len(lengths))(1)[0])),
        "group_by_length": seconds(lambda: grouped(lengths, batch_size)(1)),
        "lhotse": 10 * seconds(lambda: bucketed(lengths[:size], budget, 1, [0])),
    }
    planned = min(seconds(functools.partial(sampler.set_epoch, epoch)) for epoch in (1, 2, 3))
    work = f"plan an epoch of {len(lengths) / 1e6:g}e6 (lhotse: 10 times a tenth, drawn to its end)"
    rows.append(common.Row(work, "s", planned, peers, "bar", common.at_most(1.0)))
    return common.report("budget", rows, args)


if __name__ == "__main__":
    sys.exit(main())
