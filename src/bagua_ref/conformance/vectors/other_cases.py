"""Cases of peers (S3.4), samplers (S7), the cache's placement (S8.1) and QAdam's step with frozen v (S5.5)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from bagua_ref.comm_ops import shift_one_peer
from bagua_ref.conformance.vectors.case import Case, case_id, seed_of
from bagua_ref.conformance.vectors.numbers import Numbers
from bagua_ref.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["cache_cases", "optimizer_cases", "peer_cases", "sampler_cases"]


def peer_cases() -> Iterator[Case]:
    """Yield every case of suite ``peers``: who averages with whom."""
    for nranks in (2, 4, 6, 8, 10, 14, 16, 34, 64, 1024):
        # All ranks at many steps; from 16 ranks on some of each, also steps beyond 32 bits.
        ranks = range(nranks) if nranks <= 16 else sorted({0, 1, nranks // 2 - 1, nranks // 2, nranks // 2 + 1, nranks - 1})
        steps = [*range(nranks + 2 if nranks <= 16 else 9), 1_000_003, 2**40 + 3]
        queries = [(rank, step) for step in steps for rank in ranks]
        peers = [shift_one_peer(rank, nranks, step) for rank, step in queries]
        inputs = {"rank": torch.tensor([rank for rank, _ in queries]), "step": torch.tensor([step for _, step in queries])}
        yield Case(
            "peers", "shift_one_peer", "S3.4", "int64", f"{nranks}-ranks",
            inputs, {"peer": torch.tensor(peers)}, {"nranks": nranks}, ("valid", "edge"),
        )  # fmt: skip


_SAMPLERS: tuple[dict[str, Any], ...] = tuple(
    {"N": n, "num_replicas": r, "shuffle": shuffle, "drop_last": drop_last, "random_level": level, "seed": seed, "epoch": epoch}
    for n, r in ((1, 1), (1, 4), (3, 4), (10, 3), (12, 3), (64, 8), (101, 7), (257, 16))
    for shuffle, drop_last, level, seed, epoch in (
        (False, False, 0.0, 0, 0),
        (False, True, 0.0, 0, 0),
        (True, False, 0.0, 0, 1),
        (True, False, 0.25, 1234, 3),
        (True, True, 1.0, 7, 0),
        (True, False, 1.0, 2**40, 17),
    )
)


def sampler_cases() -> Iterator[Case]:
    """Yield every case of suite ``samplers``: which samples each replica draws, and in which batches."""
    for place, settings in enumerate(_SAMPLERS):
        for kind in ("int64", "float64"):
            name = "-".join(
                f"{key}{settings[option]:g}"
                for key, option in (("N", "N"), ("R", "num_replicas"), ("seed", "seed"), ("epoch", "epoch"))
            )
            name = f"{place:02}-{name}"
            yield _indices(name, kind, settings)
            if kind == "int64" and not settings["drop_last"] and settings["N"] >= 10:
                yield from (_batches(name, settings, drop_last) for drop_last in (False, True))


def _complexities(operation: str, kind: str, name: str, count: int) -> Tensor:
    numbers = Numbers(seed_of(case_id("samplers", operation, kind, name)))
    values = [numbers.below(40) for _ in range(count)]  # with ties
    return torch.tensor(values) if kind == "int64" else torch.tensor([value / 4 for value in values], dtype=torch.float64)


def _samplers(complexities: Tensor, settings: dict[str, Any]) -> list[Any]:
    samplers = []
    for rank in range(settings["num_replicas"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some datasets here have nothing to balance
            sampler = LoadBalancingDistributedSampler(
                range(settings["N"]), None, settings["num_replicas"], rank, settings["shuffle"], settings["seed"],
                settings["drop_last"], settings["random_level"], complexities=complexities, backend="reference",
            )  # fmt: skip
        sampler.set_epoch(settings["epoch"])
        samplers.append(sampler)
    return samplers


def _drawn(complexities: Tensor, settings: dict[str, Any], num_samples: int) -> dict[str, Tensor]:
    """Return what torch's generator gives for S7.2 and S7.3, so that vectors are of use without torch, too."""
    chunks = max(1, num_samples)
    if not settings["shuffle"]:
        return {"noise": torch.zeros(settings["N"], dtype=torch.int64), "chunk_order": torch.arange(chunks)}
    numbers = complexities.tolist()
    limit = int((max(numbers) - min(numbers)) * settings["random_level"] + 1)
    generator = torch.Generator().manual_seed(settings["seed"] + settings["epoch"])
    noise = torch.randint(limit, (settings["N"],), generator=generator)
    return {"noise": noise, "chunk_order": torch.randperm(chunks, generator=generator)}


def _indices(name: str, kind: str, settings: dict[str, Any]) -> Case:
    complexities = _complexities("sampler_indices", kind, name, settings["N"])
    samplers = _samplers(complexities, settings)
    drawn = torch.tensor([list(sampler) for sampler in samplers], dtype=torch.int64)
    inputs = {"complexities": complexities, **_drawn(complexities, settings, samplers[0].num_samples)}
    flags = ("edge",) if settings["N"] < settings["num_replicas"] or settings["N"] == 1 else ("valid",)
    return Case("samplers", "sampler_indices", "S7.3", kind, name, inputs, {"indices": drawn}, dict(settings), flags)


def _batches(name: str, settings: dict[str, Any], drop_last: bool) -> Case:
    name = f"{name}-{'drop' if drop_last else 'repeat'}"
    complexities = _complexities("sampler_batches", "int64", name, settings["N"])
    costs, limit = complexities.tolist(), 60

    def cut(indices: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        for index in indices:
            if not batches or sum(costs[i] for i in batches[-1]) + costs[index] > limit:
                batches.append([])
            batches[-1].append(index)
        return batches

    samplers = _samplers(complexities, settings)
    drawn = [list(LoadBalancingDistributedBatchSampler(sampler, cut, drop_last)) for sampler in samplers]
    outputs = {
        "sizes": torch.tensor([[len(batch) for batch in batches] for batches in drawn], dtype=torch.int64),
        "indices": torch.tensor([index for batches in drawn for batch in batches for index in batch], dtype=torch.int64),
    }
    inputs = {"complexities": complexities, **_drawn(complexities, settings, samplers[0].num_samples)}
    parameters = {**settings, "drop_last_batch": drop_last, "max_cost": limit}
    return Case("samplers", "sampler_batches", "S7.4", "int64", name, inputs, outputs, parameters)


def cache_cases() -> Iterator[Case]:
    """Yield every case of suite ``cache``: the hash of a key, and the store that it lives in."""
    for place, dataset_name in enumerate(("", "mnist", "Größe/数据 🙂", "a" * 40)):
        keys = ["", *map(str, range(20)), "ключ", "x" * 7, "y" * 31, "z" * 32, "w" * 33, "0123456789" * 20]
        text = [f"{dataset_name}_{key}".encode() for key in keys]
        hashes = [xxhash.xxh64_intdigest(key, seed=0) for key in text]
        inputs = {
            "keys": torch.from_numpy(np.frombuffer("".join(keys).encode(), np.uint8).copy()),
            "lengths": torch.tensor([len(key.encode()) for key in keys]),
        }
        for num_stores in (1, 2, 3, 7, 64):
            outputs = {
                "hash": torch.from_numpy(np.array(hashes, np.uint64)),
                "store": torch.tensor([number % num_stores for number in hashes]),
            }
            yield Case(
                "cache", "cache_store", "S8.1", "uint8", f"{place}-{num_stores}-stores",
                inputs, outputs, {"dataset_name": dataset_name, "num_stores": num_stores}, ("valid", "edge"),
            )  # fmt: skip


def optimizer_cases() -> Iterator[Case]:
    """Yield steps along m with frozen v, by torch's operations, so within ULP(4) (S5.5): suite ``qadam``, one of ``algorithms``."""
    for dtype, float_of in ((torch.float32, np.float32), (torch.float64, np.float64)):
        for place, (s, lr, betas, eps) in enumerate(
            (
                (1, 1e-3, (0.9, 0.999), 1e-8),
                (2, 0.05, (0.9, 0.999), 1e-8),
                (100, 1e-2, (0.95, 0.98), 1e-4),
                (5000, 0.1, (0.0, 0.5), 1e-2),
                (100, 1e-2, (0.9, 0.999), 1e-8),
            )
        ):
            suite, operation, flag, since, zeros = ("qadam", "qadam_step", "valid", "1", 0)
            if place == 4:
                suite, operation, flag, since, zeros = ("algorithms", "qadam_frozen_step", "edge", "2", 24)
            still = slice(0, zeros, 3)
            name = f"s{s}-{place}"
            numbers = Numbers(seed_of(case_id(suite, operation, str(dtype).removeprefix("torch."), name)))
            # The step is no larger than the weight, so that its last bit stays the weight's.
            p, m, v = numbers.uniform(24, dtype, 1, 2), numbers.uniform(24, dtype, -0.1, 0.1), numbers.uniform(24, dtype, 0.5, 1)
            v[still] = 0
            step_size, correction = float_of(lr / (1 - betas[0] ** s)), float_of((1 - betas[1] ** s) ** 0.5)
            denominator = np.sqrt(v.numpy()) / correction + float_of(eps)
            result = torch.from_numpy(p.numpy() - step_size * m.numpy() / denominator)
            result[still] = p[still]
            parameters = {"s": s, "lr": lr, "beta1": betas[0], "beta2": betas[1], "eps": eps}
            yield Case(
                suite, operation, "S5.5", str(dtype).removeprefix("torch."), name,
                {"p": p, "m": m, "v": v}, {"p": result}, parameters, (flag,), "ULP(4)", since=since,
            )  # fmt: skip
