"""Trainings that tests record: ours with every algorithm, and an outside one through three
calls.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.base.runtime import current_world
from bagua_ref.conformance.trace import Recorder
from bagua_ref.simulation import SimulatedWorld


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, pause: float = 0.0
) -> None:
    generator = torch.Generator().manual_seed(rank)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 7, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        if pause:
            current_world().sleep(pause)


def train(
    directory: Path,
    name: str,
    options: dict[str, Any],
    *,
    steps: int = 4,
    backend: Any = None,
    dtype: torch.dtype = torch.float32,
    **recording: Any,
) -> Recorder:
    """Train with algorithm ``name`` on the calling rank while recording; the world exists
    already.
    """
    model = network().to(dtype)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=2)
        options = {**options, "q_adam_optimizer": optimizer}
    rank = bagua_ref.get_rank()
    with Recorder(directory, **recording) as recorder:
        model.with_bagua([optimizer], Algorithm.init(name, **options), backend=backend)
        learn(model, optimizer, rank, steps, pause=0.02 if name == "async" else 0.0)
        if name == "async":
            model.bagua_algorithm.abort(model)
    return recorder


def simulate(
    directory: Path, name: str, options: dict[str, Any], nodes: tuple[int, ...], **settings: Any
) -> list[Recorder]:
    """Record a training in the simulated world; return each rank's recorder."""

    def rank(comm: Any) -> Recorder:
        bagua_ref.init_process_group()
        return train(directory, name, options, **settings)

    return SimulatedWorld(sum(nodes), nodes=nodes).run(rank)


def record_steps(
    directory: Path,
    steps: Sequence[tuple[Sequence[Any], dict[str, Any], Sequence[Any]]],
    algorithm: str | None = None,
    **options: Any,
) -> None:
    """Record an outsider's steps of one bucket on all ranks: each is inputs by rank, info, and
    outputs by rank.
    """
    ranks = len(steps[0][0])
    for rank in range(ranks):
        with Recorder(
            directory, rank=rank, world_size=ranks, algorithm=algorithm, options=options
        ) as recorder:
            for inputs, info, outputs in steps:
                recorder.before_op("all", inputs[rank], **info)
                recorder.after_op("all", outputs[rank])
                recorder.step()


def train_and_die(directory: Path) -> None:
    """Train on real processes until rank 1 exits during its third step; rank 0's next exchange then
    fails.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], Algorithm.init("bytegrad", hierarchical=False), timeout=5)
    with Recorder(directory):
        learn(model, optimizer, bagua_ref.get_rank(), 2)
        loss = model(torch.randn(8, 7)).square().mean()
        if bagua_ref.get_rank() == 1:
            os._exit(3)
        loss.backward()


def train_each(directory: Path, cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    """Train with several algorithms on one rank of real processes, one after the other."""
    for folder, name, options in cases:
        train(directory / folder, name, options)
