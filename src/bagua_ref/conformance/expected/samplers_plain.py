"""The samplers of S7 in plain Python, clause by clause, over lists.

torch is only asked for what the clause takes from it: `torch.randint` and `torch.randperm` of a seeded generator.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def num_samples(length: int, replicas: int, drop_last: bool) -> int:
    """S7.1."""
    return length // replicas if drop_last else math.ceil(length / replicas)


def noise_limit(complexities: list[Any], random_level: float) -> int:
    """S7.2: noise is below it."""
    return int((max(complexities) - min(complexities)) * random_level + 1)


def order_and_chunks(
    complexities: list[Any], replicas: int, *, shuffle: bool, seed: int, epoch: int, drop_last: bool, random_level: float
) -> tuple[list[int], list[int]]:
    """S7.2 and the first half of S7.3: the samples in order, and the numbers of the chunks in the order of drawing."""
    keys, count = list(complexities), max(1, num_samples(len(complexities), replicas, drop_last))
    chunks = list(range(count))
    if shuffle:
        generator = torch.Generator().manual_seed(seed + epoch)
        noise = torch.randint(noise_limit(complexities, random_level), (len(keys),), generator=generator).tolist()
        keys = [key + extra for key, extra in zip(keys, noise, strict=True)]
        chunks = torch.randperm(count, generator=generator).tolist()
    return sorted(range(len(keys)), key=lambda index: keys[index]), chunks


def indices(complexities: list[Any], replicas: int, rank: int, **options: Any) -> list[int]:
    """S7.3: the samples of one rank."""
    order, chunks = order_and_chunks(complexities, replicas, **options)
    drawn = [order[(chunk * replicas + rank) % len(order)] for chunk in chunks]
    return drawn[: num_samples(len(order), replicas, options["drop_last"])]


def equal_batches(batches_of_replicas: list[list[list[int]]], drop_last: bool) -> list[list[list[int]]]:
    """S7.4: the same number of batches for each replica."""
    counts = [len(batches) for batches in batches_of_replicas]
    if drop_last:
        return [batches[: min(counts)] for batches in batches_of_replicas]
    padded = []
    for batches in batches_of_replicas:
        while len(batches) < max(counts):
            batches = batches + batches
        padded.append(batches[: max(counts)])
    return padded
