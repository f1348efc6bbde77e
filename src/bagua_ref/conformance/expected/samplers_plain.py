"""The samplers of S7 in plain Python, clause by clause, over lists.

torch is used only as far as the clauses require: `torch.randint` and `torch.randperm` of a seeded
generator.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch


def num_samples(length: int, replicas: int, drop_last: bool) -> int:
    """S7.1: the number of samples of a replica."""
    return length // replicas if drop_last else math.ceil(length / replicas)


def noise_limit(complexities: list[Any], random_level: float) -> int:
    """S7.2: the exclusive upper limit of the noise."""
    return int((max(complexities) - min(complexities)) * random_level + 1)


def indices(complexities: list[Any], replicas: int, rank: int, **options: Any) -> list[int]:
    """S7.3: the samples of one rank."""
    return stretches_of(complexities, [], replicas, **options)[0][rank]


class Draws:
    """An epoch's random numbers from torch's generator, recorded in the order in which they are
    drawn.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.noise: list[int] = []
        self.permutations: list[int] = []

    def draw_noise(self, limit: int, length: int) -> list[int]:
        """S7.2: draw the noise of each sample."""
        self.noise = torch.randint(limit, (length,), generator=self._generator).tolist()
        return self.noise

    def permutation(self, length: int) -> list[int]:
        """S7.3, S7.7: draw a permutation."""
        drawn: list[int] = torch.randperm(length, generator=self._generator).tolist()
        self.permutations += drawn
        return drawn


class RecordedDraws(Draws):
    """The random numbers of a record, replayed."""

    def __init__(self, noise: list[int], permutations: list[int]) -> None:
        self.noise, self._rest = noise, iter(permutations)

    def draw_noise(self, limit: int, length: int) -> list[int]:
        """Return the recorded noise."""
        return self.noise

    def permutation(self, length: int) -> list[int]:
        """Return the next numbers of the recorded permutations."""
        return list(itertools.islice(self._rest, length))


def stretches_of(
    complexities: list[Any],
    history: list[tuple[int, int]],
    replicas: int,
    cut: Any = None,
    drop_batches: bool = False,
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    drop_last: bool,
    random_level: float,
    draws: Draws | None = None,
) -> list[list[list[Any]]]:
    """Return each replica's items by stretch: one stretch for each (R, number drawn) of a history,
    then one for ``replicas`` (S7.6).

    Items are samples; with ``cut``, a batch_fn, they are batches (S7.4).
    """
    noise = [0] * len(complexities)
    draws = draws or Draws(seed + epoch)
    if shuffle:
        noise = draws.draw_noise(noise_limit(complexities, random_level), len(noise))
    left = sorted(range(len(noise)), key=lambda sample: complexities[sample] + noise[sample])
    found = []
    for count, drawn in [*history, (replicas, 0)]:
        number = num_samples(len(left), count, drop_last)
        chunks = draws.permutation(max(1, number)) if shuffle else list(range(number))
        shares: list[list[Any]] = [
            [left[(chunk * count + rank) % len(left)] for chunk in chunks[:number]]
            for rank in range(count)
        ]
        if cut is not None:
            shares = (
                equal_batches([cut(share) for share in shares], drop_batches)
                if left
                else [[] for _ in shares]
            )
        found.append(shares)
        items = [item for share in shares for item in share[:drawn]]
        gone = set(items if cut is None else [sample for batch in items for sample in batch])
        left = [] if drawn == len(shares[0]) else [sample for sample in left if sample not in gone]
    return found


FORMULAS: dict[Any, Any] = {"m * h * h": lambda m, h: m * h * h}
"""Costs of a batch of m samples, the largest of cost h, by the names in golden vectors."""


def batch_cost(costs: list[Any], batch: list[int], padded: Any) -> Any:
    """S7.7.1: the cost of a batch."""
    if padded is False:
        total = 0.0
        for sample in batch:
            total += costs[sample]
        return total
    largest = max(costs[sample] for sample in batch)
    return len(batch) * largest if padded is True else padded(len(batch), largest)


def budget_stretches(
    costs: list[Any],
    max_cost: Any,
    history: list[tuple[int, int]],
    replicas: int,
    *,
    padded: Any,
    shuffle: bool,
    seed: int,
    epoch: int,
    mix: int,
    drop_last: bool,
    draws: Draws | None = None,
) -> list[list[list[list[int]]]]:
    """S7.7: for each (R, steps drawn) of a history, and for ``replicas`` after it, the batches of
    each replica in the stretch.
    """
    draws = draws or Draws(seed + epoch)
    first = draws.permutation(len(costs)) if shuffle else range(len(costs))
    left = sorted(first, key=lambda sample: costs[sample])
    found = []
    for count, drawn in [*history, (replicas, 0)]:
        batches = filled_batches(costs, max_cost, left, padded)
        if shuffle and mix > 1:
            mixed = []
            for place in range(0, len(batches), mix):
                group = [sample for batch in batches[place : place + mix] for sample in batch]
                mixed += [group[turn] for turn in draws.permutation(len(group))]
            batches = filled_batches(costs, max_cost, mixed, padded)
        repeats = 0
        while len(batches) % count:
            price = [batch_cost(costs, batch, padded) for batch in batches]
            several = [place for place, batch in enumerate(batches) if len(batch) > 1]
            if drop_last:
                del batches[price.index(min(price))]
            elif several:
                place = max(several, key=lambda place: (price[place], -place))
                half = len(batches[place]) // 2
                batches[place : place + 1] = [batches[place][:half], batches[place][half:]]
            else:
                batches.append([left[repeats % len(left)]])
                repeats += 1
        batches.sort(key=lambda batch: batch_cost(costs, batch, padded))
        steps = [batches[place : place + count] for place in range(0, len(batches), count)]
        if shuffle:
            steps = [steps[turn] for turn in draws.permutation(len(steps))]
        found.append(
            [
                [step[(rank + number) % count] for number, step in enumerate(steps)]
                for rank in range(count)
            ]
        )
        gone = {sample for step in steps[:drawn] for batch in step for sample in batch}
        left = [] if drawn == len(steps) else [sample for sample in left if sample not in gone]
    return found


def filled_batches(
    costs: list[Any], max_cost: Any, samples: list[int], padded: Any = False
) -> list[list[int]]:
    """S7.7.2: samples in batches of cost at most ``max_cost``, except a single sample that costs
    more; user functions may exceed it, too.
    """
    batches: list[list[int]] = []
    for sample in samples:
        if not batches or batch_cost(costs, [*batches[-1], sample], padded) > max_cost:
            batches.append([])
        batches[-1].append(sample)
    return batches


def equal_batches(
    batches_of_replicas: list[list[list[int]]], drop_last: bool
) -> list[list[list[int]]]:
    """S7.4: equal numbers of batches for all replicas."""
    counts = [len(batches) for batches in batches_of_replicas]
    if drop_last:
        return [batches[: min(counts)] for batches in batches_of_replicas]
    padded = []
    for batches in batches_of_replicas:
        while len(batches) < max(counts):
            batches = batches + batches
        padded.append(batches[: max(counts)])
    return padded
