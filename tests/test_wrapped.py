"""Tests of the warning where ``hierarchical=True`` costs bytes: by the messages of ranks (S14.1)."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from tests.launch import launch

import bagua_ref
from bagua_ref.algorithms import Algorithm, ByteGradAlgorithm, QAdamOptimizer
from bagua_ref.simulation import SimulatedWorld

STEPS = 4


class Own(ByteGradAlgorithm):
    """An algorithm of a user's, whose ``hierarchical`` may mean something else."""


def train(name: str, steps: int, options: dict[str, Any]) -> None:
    bagua_ref.init_process_group()
    model = torch.nn.Linear(100, 20)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), warmup_steps=2)
        options = {"q_adam_optimizer": optimizer, **options}
    model.with_bagua(
        optimizer, Own(**options) if name == "own" else Algorithm.init(name, **options)
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
    bagua_ref.destroy_process_group()


def simulate(nodes: tuple[int, ...], name: str, **options: Any) -> tuple[list[str], int]:
    """Return the warnings, and the bytes of the rank that sends most in some steps."""
    sent = []
    for steps in (0, STEPS):
        world = SimulatedWorld(sum(nodes), nodes=nodes, link="1Gbit,1ms")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            world.run(lambda _, steps=steps: train(name, steps, options))
        sent.append(world.timeline.messages)
    warned = [warning for warning in seen if "hierarchical" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in warned)
    of_rank = Counter[int]()
    for (source, _, nbytes), count in (sent[1] - sent[0]).items():
        of_rank[source] += count * nbytes
    return [str(warning.message) for warning in warned], max(of_rank.values(), default=0)


@pytest.mark.parametrize(
    ("name", "n"),
    [("bytegrad", 2), ("low_precision_decentralized", 3), ("qadam", 4), ("local_sgd", 3)],
)
def test_one_rank_warns_where_the_option_costs_bytes(name: str, n: int) -> None:
    options = {"period": 2} if name == "local_sgd" else {}
    (text,), sent = simulate((n,), name, hierarchical=True, **options)
    assert sent > simulate((n,), name, hierarchical=False, **options)[1]
    assert "hierarchical=False" in text


@pytest.mark.parametrize(
    ("nodes", "name", "options"),
    [
        ((1,), "bytegrad", {}),
        ((3,), "bytegrad", {"hierarchical": False}),
        ((2, 1), "bytegrad", {}),
        ((3,), "own", {}),
        ((3,), "gradient_allreduce", {}),
        ((2,), "decentralized", {}),  # as many bytes either way
        ((3,), "decentralized", {"hierarchical": False}),
    ],
)
def test_nobody_warns_otherwise(nodes: tuple[int, ...], name: str, options: dict[str, Any]) -> None:
    assert simulate(nodes, name, **options)[0] == []


def warnings_over_gloo() -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = torch.nn.Linear(100, 20)
        model.with_bagua(torch.optim.SGD(model.parameters(), lr=0.1), "bytegrad")
    return [str(warning.message) for warning in seen]


def test_processes_warn_on_the_first_rank() -> None:
    first, other = launch(warnings_over_gloo, 2)
    assert len(first) == 1
    assert "hierarchical=False" in first[0]
    assert other == []
