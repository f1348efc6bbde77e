"""Tests of the ranges that torch.profiler shows for communication."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from tests.launch import on_every_process
from tests.trainings import by_name, wrap
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bagua_ref.algorithms import Algorithm


def ranges_of(module: Any, optimizer: torch.optim.Optimizer, all_threads: bool) -> Counter[str]:
    """Return how often each of our ranges is in a profile of three steps, of this thread or of
    all.
    """
    settings = (
        torch._C._profiler._ExperimentalConfig(profile_all_threads=True) if all_threads else None
    )
    with profile(activities=[ProfilerActivity.CPU], experimental_config=settings) as profiled:
        for _ in range(3):
            module(torch.ones(2, 300)).sum().backward()
            optimizer.step()
    return Counter(
        event.name.removeprefix("bagua_ref::")
        for event in profiled.events()
        if event.name.startswith("bagua_ref::")
    )


OPERATIONS = {
    "gradient_allreduce": "CentralizedFullPrecision",
    "bytegrad": "Hierarchical",
    "decentralized": "Decentralized",
    "low_precision_decentralized": "Hierarchical",
    "qadam": "CentralizedFullPrecision",
}


@on_every_process(2)
def test_a_profile_names_each_bucket_each_wait_and_on_all_threads_each_operation() -> None:
    for algorithm, operation in OPERATIONS.items():
        optimizer, made = by_name(
            algorithm,
            module := nn.Linear(300, 300),
            warmup_steps=50 if algorithm == "qadam" else None,
        )
        module.with_bagua([optimizer], made)  # type: ignore[operator]
        for all_threads in (False, True):
            ranges = ranges_of(module, optimizer, all_threads)
            assert ranges[f"{algorithm}/bucket0"] == 3
            assert ranges[f"{algorithm}/wait"] >= 3
        assert ranges[f"{algorithm}/bucket0/{operation}"] == 3


PHASES = {
    "gradient_allreduce": {"wire/allreduce_inplace": 1},
    "bytegrad": {"compress": 2, "decompress": 2, "wire/alltoall": 1, "wire/allgather_inplace": 1},
    "decentralized": {"wire/allreduce_inplace": 1, "update": 1},
    "low_precision_decentralized": {"compress": 1, "decompress": 3, "wire/exchange": 1},
    "topk": {"compress": 1, "decompress": 1, "wire/allgather": 2},
    "powersgd": {"compress": 2, "decompress": 1, "wire/allreduce_inplace": 2},
    "local_sgd": {"wire/allreduce_inplace": 1},
    "diloco": {"wire/alltoall_inplace": 1, "wire/allgather_inplace": 1, "update": 1},
}
"""Ranges in each step, at least; a codec that works in steps has one for each."""


@on_every_process(2)
def test_a_profile_names_the_phases_of_communication() -> None:
    for algorithm, expected in PHASES.items():
        options: dict[str, Any] = (
            {"hierarchical": False}
            if "decentralized" in algorithm or algorithm == "bytegrad"
            else {}
        )
        options |= {"period": 1} if algorithm in ("local_sgd", "diloco") else {}
        options |= {"warmup_steps": 0} if algorithm == "powersgd" else {}
        module, optimizer = wrap(nn.Linear(300, 300), Algorithm.init(algorithm, **options), lr=0.01)
        ranges = ranges_of(module, optimizer, all_threads=True)
        phases = {
            name: n
            for name, n in ranges.items()
            if name.partition("/")[0] in ("compress", "decompress", "update", "wire")
        }
        assert phases.keys() >= expected.keys(), algorithm
        for name, count in phases.items():
            compresses = name in ("compress", "decompress") and algorithm != "topk"
            assert count >= 3 * expected[name] if compresses else count == 3 * expected[name], (
                algorithm,
                name,
            )
