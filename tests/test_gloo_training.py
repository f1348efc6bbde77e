"""Tests of training over gloo processes: every algorithm matches the simulated world, and all-reduce torch's DDP (S5)."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.algorithms import CASES, Run, assert_same, model
from tests.launch import launch, outcomes
from tests.trainings import network, simulate, train, weights, wrap
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
)
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.errors import CommunicationError

pytestmark = pytest.mark.slow


def train_ours_and_torchs(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    ours, theirs = network(), nn.parallel.DistributedDataParallel(network())
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        if module is ours:
            module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        train(module, optimizer, dist.get_rank(), range(steps))
    return weights(ours), weights(theirs.module)


@pytest.mark.parametrize("ranks", [2, 4])
def test_S5_1_gradient_allreduce_gives_torch_ddps_weights_after_20_steps(ranks: int) -> None:
    for ours, theirs in launch(train_ours_and_torchs, ranks, 20):
        # Each of 20 steps adds the rounding error of one sum to weights of magnitude at most about 1.
        assert_equal(ours, theirs, SUM(20 * ranks), magnitude=1.0)


STEPS = 7


def train_each(dtype: torch.dtype, names: list[str], do_flatten: bool) -> dict[str, list[torch.Tensor]]:
    """Return the weights after every step with each of the algorithms."""
    seen: dict[str, list[torch.Tensor]] = {}
    for name in names:
        run = Run(name, model(0, dtype), do_flatten=do_flatten)
        for number in range(STEPS):
            run.step(number)
            seen.setdefault(name, []).append(run.weights())
    return seen


@pytest.mark.parametrize(
    ("nodes", "dtype", "do_flatten"),
    [
        ((2,), torch.float32, True),
        ((1, 1), torch.float32, False),
        ((1, 3), torch.float32, True),
        ((2, 1), torch.bfloat16, True),
    ],
    ids=str,
)
def test_every_algorithm_trains_over_gloo_as_in_the_simulation(
    nodes: tuple[int, ...], dtype: torch.dtype, do_flatten: bool
) -> None:
    given = dtype, [name for name, case in CASES.items() if case.takes(nodes)], do_flatten
    real = launch(train_each, sum(nodes), *given, nodes=nodes)
    simulated = simulate(sum(nodes), lambda r: train_each(*given), nodes=nodes)
    for name in given[1]:
        for ours, expected in zip(real, simulated, strict=True):
            if CASES[name].replicated:
                assert_same(ours[name], real[0][name])
            # Two numbers have one sum, and gloo leaves sums of 16-bit numbers to us.
            exact = sum(nodes) == 2 or dtype is torch.bfloat16 or CASES[name].fixed_sums
            for step, (found, wanted) in enumerate(zip(ours[name], expected[name], strict=True)):
                if exact or not CASES[name].compresses:
                    assert_equal(found, wanted, EXACT if exact else SUM((step + 1) * (sum(nodes) + 1)), magnitude=1.0)


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
    module, optimizer = wrap(network(), ByteGradAlgorithm(hierarchical=False), lr=0.1, timeout=5)
    train(module, optimizer, bagua_ref.get_rank(), range(2))
    if bagua_ref.get_rank() == 1:
        handle = module[2].weight.register_post_accumulate_grad_hook(lambda parameter: (time.sleep(0.5), os._exit(3)))
        assert handle is not None
    try:
        train(module, optimizer, 0, range(3))
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_S2_5_a_peer_that_dies_is_an_error_that_names_bucket_and_operation() -> None:
    survivor, dead = outcomes(train_and_lose_a_peer, 2, collective_timeout=5, limit=60)
    assert dead.exitcode == 3
    assert "bucket '0', operation CentralizedLowPrecision" in survivor.result
