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
