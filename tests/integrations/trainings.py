"""Small trainings by hand, with which those inside trainers are compared."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from bagua_ref.algorithms import Algorithm, QAdamOptimizer

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "decentralized": {"hierarchical": False},
    "low_precision_decentralized": {"hierarchical": False},
    "qadam": {"hierarchical": False},
    "local_sgd": {"period": 3},
    "diloco": {"period": 2},
    "powersgd": {"warmup_steps": 2, "matrix_approximation_rank": 2, "min_compression_rate": 1.0},
    "topk": {"ratio": 0.1, "warmup_steps": 2},
}
CASES = [*((name, 2) for name in ALGORITHMS), ("bytegrad", 1), ("local_sgd", 1)]
"""Algorithms and the number of batches whose gradients accumulate."""
STEPS = 6


def network(rank: int) -> nn.Sequential:
    """Return a network that begins differently on every rank."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "qadam":
        return QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=3)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def batches(rank: int, steps: int = STEPS) -> list[torch.Tensor]:
    return list(torch.randn(steps, 4, 6, generator=torch.Generator().manual_seed(100 + rank)))


def by_hand(rank: int, name: str, accumulate: int = 1, steps: int = STEPS) -> torch.Tensor:
    """Return the weights after a training with ``with_bagua``."""
    module = network(rank)
    optimizer = optimizer_of(name, module)
    options = {"q_adam_optimizer": optimizer} if name == "qadam" else {}
    module.with_bagua([optimizer], Algorithm.init(name, **ALGORITHMS[name], **options))
    for number, batch in enumerate(batches(rank, steps * accumulate)):
        last = number % accumulate == accumulate - 1
        with nullcontext() if last else module.no_sync():
            (module(batch).square().mean() / accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    weights = weights_of(module)
    module._bagua.close()
    return weights


def weights_of(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])
