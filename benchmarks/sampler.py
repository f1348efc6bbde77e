"""The balanced sampler on one thread: an epoch of 1e6 samples for 8 replicas, and how well
it balances.

    python benchmarks/sampler.py [--quick] [--json PATH]

Times are compared with S7 over a dict of complexities that is sorted in each epoch, as in the
original; the balance is compared with torch's DistributedSampler. A time covers `set_epoch` and
drawing every index of one rank, without constructors. Both samplers must draw the same indices
before anything is timed.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator

import common  # beside this file
import numpy as np
import torch
from torch.utils.data import DistributedSampler

from bagua_ref.contrib import LoadBalancingDistributedSampler

REPLICAS = 8


class DictSampler:
    """S7 with a dict from sample to complexity, copied, changed and sorted in each epoch."""

    def __init__(
        self, complexities: list, replicas: int, rank: int, seed: int, random_level: float
    ) -> None:
        self.complexities = dict(enumerate(complexities))
        self.replicas, self.rank, self.seed, self.epoch = replicas, rank, seed, 0
        self.bound = int((max(complexities) - min(complexities)) * random_level + 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        noisy = self.complexities.copy()
        noise = torch.randint(self.bound, (len(noisy),), generator=generator).tolist()
        for index in noisy:
            noisy[index] += noise[index]
        order = list(OrderedDict(sorted(noisy.items(), key=lambda item: item[1])))
        count = -(-len(order) // self.replicas)
        chunks = [
            [order[(chunk * self.replicas + rank) % len(order)] for rank in range(self.replicas)]
            for chunk in range(count)
        ]
        return iter(
            [
                chunks[chunk][self.rank]
                for chunk in torch.randperm(count, generator=generator).tolist()
            ]
        )


def log_normal(size: int, kind: str) -> torch.Tensor:
    values = torch.exp(
        torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    )
    return values.long() + 1 if kind == "lengths" else values


def time_rows(size: int, rounds: int) -> list[common.Row]:
    rows = []
    for kind in ("lengths", "floats"):
        for random_level in (0, 0.1):
            complexities = log_normal(size, kind)
            ours = LoadBalancingDistributedSampler(
                range(size), None, REPLICAS, 3, random_level=random_level, complexities=complexities
            )
            plain = DictSampler(complexities.tolist(), REPLICAS, 3, 0, random_level)
            ours.set_epoch(1)
            plain.set_epoch(1)
            assert list(ours) == list(plain)
            epochs = iter(range(2, 10**6))

            def epoch_of(
                sampler: LoadBalancingDistributedSampler | DictSampler,
                epochs: Iterator[int] = epochs,
            ) -> Callable[[], None]:
                def draw() -> None:
                    sampler.set_epoch(next(epochs))
                    for _ in sampler:
                        pass

                return draw

            medians = common.alternate({"ours": epoch_of(ours), "dict": epoch_of(plain)}, rounds)
            work = f"epochs/s, {size / 1e6:g}e6 {kind}, random_level {random_level}"
            rows.append(
                common.Row(
                    work,
                    "1/s",
                    1 / medians["ours"],
                    {"dict": 1 / medians["dict"]},
                    "dict",
                    common.at_least(20.0),
                )
            )
    return rows


def balance_rows(size: int, batch_size: int) -> list[common.Row]:
    lengths = log_normal(size, "lengths").numpy()
    rows = []
    for random_level in (0, 0.1, 1):
        works = {}
        for name in ("ours", "torch"):
            per_rank = []
            for rank in range(REPLICAS):
                sampler = (
                    LoadBalancingDistributedSampler(
                        range(size),
                        None,
                        REPLICAS,
                        rank,
                        random_level=random_level,
                        complexities=lengths,
                    )
                    if name == "ours"
                    else DistributedSampler(range(size), REPLICAS, rank)
                )
                drawn = lengths[list(sampler)]
                per_rank.append(np.add.reduceat(drawn, np.arange(0, len(drawn), batch_size)))
            work = np.array(per_rank)
            works[name] = float((work.max(axis=0) / work.mean(axis=0)).mean())
        work = (
            f"slowest/mean, {size / 1e6:g}e6 log-normal lengths, batch {batch_size}, random_level"
            f" {random_level}"
        )
        rows.append(
            common.Row(
                work,
                "-",
                works["ours"],
                {"DistributedSampler": works["torch"]},
                "DistributedSampler",
            )
        )
    return rows


def main() -> int:
    args = common.arguments("The balanced sampler on one thread: time of an epoch, balance.")
    torch.set_num_threads(1)
    size, rounds = (20_000, 3) if args.quick else (1_000_000, 5)
    rows = time_rows(size, rounds) + balance_rows(size // 10, 1) + balance_rows(size // 10, 8)
    return common.report("sampler", rows, args)


if __name__ == "__main__":
    sys.exit(main())
