"""Tests of the ranges that torch.profiler shows for communication."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.launch import launch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bagua_ref.algorithms import Algorithm, QAdamOptimizer


def _profile(algorithm: str) -> list[dict[str, int]]:
    """Return how often each of our ranges is in a profile of three steps, for this thread and for all threads."""
    torch.manual_seed(0)
    module = nn.Linear(300, 300)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    options: dict[str, Any] = {}
    if algorithm == "qadam":
        optimizer = QAdamOptimizer(module.parameters(), warmup_steps=50)
        options = {"q_adam_optimizer": optimizer}
    module.with_bagua([optimizer], Algorithm.init(algorithm, **options))
    seen = []
    for settings in (None, torch._C._profiler._ExperimentalConfig(profile_all_threads=True)):
        with profile(activities=[ProfilerActivity.CPU], experimental_config=settings) as profiled:
            for _ in range(3):
                module(torch.ones(2, 300)).sum().backward()
                optimizer.step()
        seen.append(Counter(event.name for event in profiled.events() if event.name.startswith("bagua_ref::")))
    return seen


@pytest.mark.parametrize(
    ("algorithm", "operation"),
    [
        ("gradient_allreduce", "CentralizedFullPrecision"),
        ("bytegrad", "Hierarchical"),
        ("decentralized", "Decentralized"),
        ("low_precision_decentralized", "Hierarchical"),
        ("qadam", "CentralizedFullPrecision"),
    ],
)
def test_a_profile_names_each_bucket_each_wait_and_on_all_threads_each_operation(algorithm: str, operation: str) -> None:
    for one_thread, all_threads in launch(_profile, 2, algorithm):
        for ranges in (one_thread, all_threads):
            assert ranges[f"bagua_ref::{algorithm}/bucket0"] == 3
            assert ranges[f"bagua_ref::{algorithm}/wait"] >= 3
        assert all_threads[f"bagua_ref::{algorithm}/bucket0/{operation}"] == 3


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


def _phases(algorithm: str) -> dict[str, int]:
    module: Any = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    options: dict[str, Any] = {"hierarchical": False} if "decentralized" in algorithm or algorithm == "bytegrad" else {}
    options |= {"period": 1} if algorithm in ("local_sgd", "diloco") else {}
    options |= {"warmup_steps": 0} if algorithm == "powersgd" else {}
    module.with_bagua([optimizer], Algorithm.init(algorithm, **options))
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=settings) as profiled:
        for _ in range(3):
            module(torch.ones(2, 300)).sum().backward()
            optimizer.step()
    return Counter(event.name.removeprefix("bagua_ref::") for event in profiled.events() if event.name.startswith("bagua_ref::"))


def _all_phases() -> list[dict[str, int]]:
    return [_phases(algorithm) for algorithm in PHASES]


def test_a_profile_names_the_phases_of_communication() -> None:
    for found in launch(_all_phases, 2):
        for (algorithm, expected), ranges in zip(PHASES.items(), found, strict=True):
            phases = {
                name: count
                for name, count in ranges.items()
                if name.partition("/")[0] in ("compress", "decompress", "update", "wire")
            }
            assert phases.keys() >= expected.keys(), algorithm
            for name, count in phases.items():
                compresses = name in ("compress", "decompress") and algorithm != "topk"
                assert count >= 3 * expected[name] if compresses else count == 3 * expected[name], (algorithm, name)
