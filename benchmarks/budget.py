"""Batches under a budget: the share of real tokens in the time of an epoch, and the time to plan
one, beside what people use.

    pip install transformers lhotse trl
    python benchmarks/budget.py [--quick] [--json PATH]

100,000 log-normal lengths (mu 5, cut at 20 means) on 8 replicas. A step takes as long as its
slowest replica, a batch as long as
its samples padded to the longest: share = real tokens / (8 * sum over steps of the slowest batch).
Peers: torch's DistributedSampler and the LengthGroupedSampler of transformers with batches of a
fixed size, lhotse's DynamicBucketingSampler with 30 synchronised buckets and the same budget.
Randomness is matched by repeated pairs: of the pairs of samples that share a batch in one epoch,
the share that does so again in the next; ours is at a ``mix`` with no more than lhotse's.

TRL's TokenBudgetBatcher packs samples without padding, in any order, and evens out the attention of
a step's rows; it is compared with ``padded=False``, where a batch takes as long as its samples
together. It leaves the last samples that fill no step.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import warnings
from collections import Counter, defaultdict
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


def ours(
    lengths: np.ndarray, budget: int, mix: int, epoch: int, padded: bool = True
) -> list[Batches]:
    samplers = [
        BudgetBatchSampler(lengths, budget, padded, REPLICAS, rank, mix=mix)
        for rank in range(REPLICAS)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


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


def packed(lengths: np.ndarray, budget: int) -> list[Batches]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    samples = (  # of different tokens: they share no prefix
        {
            "input_ids": torch.full((length,), index),
            "completion_mask": torch.ones(length),
            "group_id": index,
        }
        for index in torch.randperm(
            len(lengths), generator=torch.Generator().manual_seed(0)
        ).tolist()
        for length in (int(lengths[index]),)
    )
    steps = [
        [[sample["group_id"] for sample in row.samples] for row in rows]
        for rows in TokenBudgetBatcher(samples, REPLICAS, budget, defaultdict(list))
    ]
    return list(zip(*steps, strict=True))


def share(lengths: np.ndarray, drawn: list[Batches], padded: bool = True) -> float:
    """Return real tokens over the replicas' time, each step as long as its slowest replica."""
    steps = min(len(own) for own in drawn)
    tokens = np.array([[lengths[batch].sum() for batch in own[:steps]] for own in drawn])
    cost = (
        np.array([[len(batch) * lengths[batch].max() for batch in own[:steps]] for own in drawn])
        if padded
        else tokens
    )
    real = int(tokens.sum())
    return real / (REPLICAS * int(cost.max(axis=0).sum()))


def repeated_pairs(first: list[Batches], second: list[Batches]) -> float:
    batch_of = {
        index: (rank, number)
        for rank, own in enumerate(second)
        for number, batch in enumerate(own)
        for index in batch
    }
    pairs = again = 0
    for own in first:
        for batch in own:
            pairs += len(batch) * (len(batch) - 1)
            met = Counter(batch_of[index] for index in batch if index in batch_of)
            again += sum(count * (count - 1) for count in met.values())
    return again / max(1, pairs)


def seconds(plan: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    plan()
    return time.perf_counter() - begun


def main() -> int:
    args = common.arguments("Batches under a budget: real tokens, repeated pairs, time to plan.")
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
        buckets = [bucketed(lengths, budget, epoch) for epoch in (0, 1)]
        peers["lhotse"] = share(lengths, buckets[0])
        theirs = repeated_pairs(*buckets)
        bar = 0.98 if budget_in_means >= 20 else 0.96
        eight = ours(lengths, budget, 8, 0)
        extra = {
            "repeated_pairs_lhotse": theirs,
            "repeated_pairs_mix_8": repeated_pairs(eight, ours(lengths, budget, 8, 1)),
        }
        rows.append(
            common.Row(
                f"{work}, mix=8",
                "-",
                share(lengths, eight),
                {"bar": bar, **peers},
                "bar",
                common.at_least(1.0),
                extra,
            )
        )
        for mix in (1, 2, 4, 8, 16, 32, 64, 128):
            mine = ours(lengths, budget, mix, 0)
            pairs = repeated_pairs(mine, ours(lengths, budget, mix, 1))
            if pairs <= theirs:
                break
        extra = {"mix": mix, "repeated_pairs": pairs, "repeated_pairs_lhotse": theirs}
        rows.append(
            common.Row(
                f"{work}, as random as lhotse (mix={mix})",
                "-",
                share(lengths, mine),
                peers,
                "lhotse",
                common.at_least(1.0),
                extra,
            )
        )

    for sigma, budget_in_means in ((1, 20), (0.5, 8)):
        lengths = log_normal(size, sigma)
        budget = max(int(budget_in_means * lengths.mean()), int(lengths.max()))
        work = (
            f"share of real tokens, packed, sigma {sigma:g}, budget {budget / lengths.mean():.3g}"
            " means, mix=8"
        )
        peers = {
            "bar": 0.98 if budget_in_means >= 20 else 0.96,
            "trl": share(lengths, packed(lengths, budget), padded=False),
        }
        mine = share(lengths, ours(lengths, budget, 8, 0, padded=False), padded=False)
        rows.append(common.Row(work, "-", mine, peers, "bar", common.at_least(1.0)))

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
