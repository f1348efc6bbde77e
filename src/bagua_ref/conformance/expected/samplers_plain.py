"""The samplers of S7 and the places of cached values (S8.1) in plain Python, clause by clause, over lists.

torch is only asked for what the clause takes from it: `torch.randint` and `torch.randperm` of a seeded generator.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import xxhash


def num_samples(length: int, replicas: int, drop_last: bool) -> int:
    """S7.1."""
    return length // replicas if drop_last else math.ceil(length / replicas)


def noise_limit(complexities: list[Any], random_level: float) -> int:
    """S7.2: noise is below it."""
    return int((max(complexities) - min(complexities)) * random_level + 1)


def noise_and_chunks(
    complexities: list[Any], replicas: int, *, shuffle: bool, seed: int, epoch: int, drop_last: bool, random_level: float
) -> tuple[list[int], list[int]]:
    """S7.2 and S7.3: what torch's generator draws, the noise of each sample and the numbers of the chunks in order."""
    length = len(complexities)
    count = max(1, num_samples(length, replicas, drop_last))
    if not shuffle:
        return [0] * length, list(range(count))
    generator = torch.Generator().manual_seed(seed + epoch)
    noise = torch.randint(noise_limit(complexities, random_level), (length,), generator=generator).tolist()
    return noise, torch.randperm(count, generator=generator).tolist()


def indices_of(
    complexities: list[Any], noise: list[int], chunks: list[int], replicas: int, rank: int, drop_last: bool
) -> list[int]:
    """S7.2 and S7.3: the samples of one rank, given what was drawn."""
    keys = [key + extra for key, extra in zip(complexities, noise, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    drawn = [order[(chunk * replicas + rank) % len(order)] for chunk in chunks]
    return drawn[: num_samples(len(order), replicas, drop_last)]


def indices(complexities: list[Any], replicas: int, rank: int, **options: Any) -> list[int]:
    """S7.3: the samples of one rank."""
    noise, chunks = noise_and_chunks(complexities, replicas, **options)
    return indices_of(complexities, noise, chunks, replicas, rank, options["drop_last"])


def filled_batches(costs: list[int], max_cost: int, indices: list[int]) -> list[list[int]]:
    """Cut indices into batches greedily, as a user's function may: none costs more than ``max_cost``, unless it has one index."""
    batches: list[list[int]] = []
    for index in indices:
        if not batches or sum(costs[i] for i in batches[-1]) + costs[index] > max_cost:
            batches.append([])
        batches[-1].append(index)
    return batches


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


def stored_key(dataset_name: str, key: str) -> bytes:
    """S8.1: the key in the stores; without its escapes, two datasets could share one."""
    escaped = dataset_name.replace("%", "%25").replace("_", "%5F")
    return f"{escaped}_{key}".encode("utf-8", "surrogatepass")


def hash_of(stored: bytes) -> int:
    """S8.1: the hash of a stored key; modulo the number of stores, it is the index of the key's store."""
    return int(xxhash.xxh64_intdigest(stored, seed=0))
