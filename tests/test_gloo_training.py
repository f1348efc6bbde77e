"""Tests of training over gloo processes: it matches the simulated world (S5.1, S5.2)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch import launch, outcomes
from tests.trainings import simulate
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    TopKAlgorithm,
)
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.errors import CommunicationError
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.slow


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> list[torch.Tensor]:
    """Return every step's gradients after communication."""
    gradients = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(8, 20, generator=generator)).square().mean().backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
        optimizer.step()
    return gradients


def train_ours_and_torchs(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    ours, theirs = network(), nn.parallel.DistributedDataParallel(network())
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        if module is ours:
            module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        train(module, optimizer, dist.get_rank(), steps)
    return weights(ours), weights(theirs.module)


@pytest.mark.parametrize("ranks", [2, 4])
def test_S5_1_gradient_allreduce_gives_torch_ddps_weights_after_20_steps(ranks: int) -> None:
    for ours, theirs in launch(train_ours_and_torchs, ranks, 20):
        # Each of 20 steps adds the rounding error of one sum to weights of magnitude at most about 1.
        assert_equal(ours, theirs, SUM(20 * ranks), magnitude=1.0)


Make = Callable[[nn.Module], tuple[torch.optim.Optimizer, Algorithm]]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def qadam(module: nn.Module) -> tuple[torch.optim.Optimizer, Algorithm]:
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=3)
    return optimizer, QAdamAlgorithm(optimizer, hierarchical=False)


def hierarchical_qadam(module: nn.Module) -> tuple[torch.optim.Optimizer, Algorithm]:
    optimizer, _ = qadam(module)
    return optimizer, QAdamAlgorithm(optimizer)


def one_bit_adam(module: nn.Module) -> tuple[torch.optim.Optimizer, Algorithm]:
    optimizer, _ = qadam(module)
    return optimizer, QAdamAlgorithm(optimizer, hierarchical=False, compression="OneBit", error_feedback=True)


EXACT_ANYWHERE: list[Make] = [
    lambda module: (sgd(module), ByteGradAlgorithm(hierarchical=True)),
    lambda module: (sgd(module), ByteGradAlgorithm(hierarchical=False)),
    lambda module: (sgd(module), DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="shift_one")),
    lambda module: (sgd(module), LowPrecisionDecentralizedAlgorithm(hierarchical=False)),
    lambda module: (sgd(module), LowPrecisionDecentralizedAlgorithm(communication_interval=2)),
    lambda module: (sgd(module), TopKAlgorithm(0.1)),
]
"""Sums are in an order that is fixed."""

EXACT_IN_PAIRS: list[Make] = [
    lambda module: (sgd(module), GradientAllReduceAlgorithm(hierarchical=True)),
    lambda module: (sgd(module), DecentralizedAlgorithm(hierarchical=False, communication_interval=2)),
    lambda module: (sgd(module), DecentralizedAlgorithm(hierarchical=True)),
    qadam,
    hierarchical_qadam,
    lambda module: (sgd(module), AsyncModelAverageAlgorithm(sync_interval_ms=10, warmup_steps=100)),
    lambda module: (sgd(module), LocalSGDAlgorithm(period=2, warmup_steps=1)),
    lambda module: (sgd(module), DiLoCoAlgorithm(period=4, fragments=2, delay=1, mix=0.5)),
    lambda module: (sgd(module), PowerSGDAlgorithm(2, warmup_steps=1, min_compression_rate=1.0)),
]
"""gloo chooses the order of a sum, which matters from three ranks on."""

EXACT_WITH_CODECS: list[Make] = [
    lambda module: (sgd(module), ByteGradAlgorithm(compression="MXFP8")),
    lambda module: (sgd(module), ByteGradAlgorithm(hierarchical=False, compression="OneBit", error_feedback=True)),
    one_bit_adam,
    lambda module: (sgd(module), LowPrecisionDecentralizedAlgorithm(hierarchical=False, compression="MXINT8")),
    lambda module: (sgd(module), DiLoCoAlgorithm(period=2, compression="MXFP4", error_feedback=True)),
]


def train_each(algorithms: str, do_flatten: bool) -> list[torch.Tensor]:
    """Return every step's gradients and the last weights, of each of the algorithms."""
    seen = []
    for make in globals()[algorithms]:
        module = network()
        optimizer, algorithm = make(module)
        flat = do_flatten or isinstance(algorithm, AsyncModelAverageAlgorithm)
        module.with_bagua([optimizer], algorithm, do_flatten=flat)
        seen += [*train(module, optimizer, bagua_ref.get_rank(), 6), weights(module)]
    return seen


@pytest.mark.parametrize("do_flatten", [True, False])
@pytest.mark.parametrize(
    ("algorithms", "nodes"),
    [
        ("EXACT_ANYWHERE", (2,)),
        ("EXACT_ANYWHERE", (2, 2)),
        ("EXACT_IN_PAIRS", (2,)),
        ("EXACT_IN_PAIRS", (1, 1)),
        ("EXACT_WITH_CODECS", (2,)),
        ("EXACT_WITH_CODECS", (1, 1)),
    ],
)
def test_S5_each_algorithm_trains_over_gloo_as_in_the_simulation_to_the_bit(
    algorithms: str, nodes: tuple[int, ...], do_flatten: bool
) -> None:
    real = launch(train_each, sum(nodes), algorithms, do_flatten, nodes=nodes)
    simulated = simulate(sum(nodes), lambda rank: train_each(algorithms, do_flatten), nodes)
    for ours, expected in zip(real, simulated, strict=True):
        for tensor, in_simulation in zip(ours, expected, strict=True):
            assert_equal(tensor, in_simulation, EXACT)


def train_bytegrad() -> list[torch.Tensor]:
    """Return every step's gradients and the last weights, hierarchical and not."""
    seen = []
    for hierarchical in (True, False):
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        module.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=hierarchical))
        seen += [*train(module, optimizer, bagua_ref.get_rank(), 5), weights(module)]
    return seen


@pytest.mark.parametrize("nodes", [(1, 3)])
def test_S5_2_bytegrad_is_bit_identical_across_ranks_and_to_the_simulation(nodes: tuple[int, ...]) -> None:
    def rank(comm: Any) -> list[torch.Tensor]:
        bagua_ref.init_process_group()
        return train_bytegrad()

    real = launch(train_bytegrad, sum(nodes), nodes=nodes)
    simulated = SimulatedWorld(sum(nodes), nodes=nodes).run(rank)
    for result in [*real, *simulated]:
        for tensor, first in zip(result, real[0], strict=True):
            assert_equal(tensor, first, EXACT)


def means_then_sum(flatten: bool) -> list[float]:
    """Return the values after two means and a sum in a row, and after a sum alone."""
    tensor = torch.zeros(3).ensure_bagua_tensor("t")
    bucket = BaguaBucket([tensor], "b", flatten)
    results = []
    for average in (True, True, False):
        bucket.append_centralized_synchronous_op(average=average)
        tensor.fill_(bagua_ref.get_rank() + 1.0)
        bucket.execute()
        results += tensor.unique().tolist()
    bucket.clear_ops().append_centralized_synchronous_op(average=False)
    tensor.fill_(bagua_ref.get_rank() + 1.0)
    bucket.execute()
    return results + tensor.unique().tolist()


@pytest.mark.parametrize("flatten", [True, False])
def test_S3_1_tensors_are_divided_once_by_the_operation_that_is_a_mean(flatten: bool) -> None:
    assert launch(means_then_sum, 3, flatten) == [[2.0, 2.0, 6.0, 6.0]] * 3


def train_and_lose_a_peer() -> str:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=False), timeout=5)
    train(module, optimizer, bagua_ref.get_rank(), 2)
    if bagua_ref.get_rank() == 1:
        handle = module[2].weight.register_post_accumulate_grad_hook(lambda parameter: (time.sleep(0.5), os._exit(3)))
        assert handle is not None
    try:
        train(module, optimizer, 0, 3)
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_S2_5_a_peer_that_dies_is_an_error_that_names_bucket_and_operation() -> None:
    survivor, dead = outcomes(train_and_lose_a_peer, 2, collective_timeout=5, limit=60)
    assert dead.exitcode == 3
    assert "bucket '0', operation CentralizedLowPrecision" in survivor.result
