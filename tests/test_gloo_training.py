"""Tests of training over gloo processes: every algorithm matches the simulated world, and
all-reduce torch's DDP (S5).
"""

from __future__ import annotations

import os
import time

import pytest
import torch
from tests.algorithms import CASES, Run, assert_same, model
from tests.launch import launch, on_every_process, outcomes
from tests.trainings import network, simulate, train, wrap
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    ByteGradAlgorithm,
)
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.errors import CommunicationError

pytestmark = pytest.mark.slow


STEPS = 7


class Mixed(nn.Sequential):
    """A layer of float32 and one of float64."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.Linear(8, 3).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x).double())  # type: ignore[no-any-return]


def train_each(
    dtype: torch.dtype | None, names: list[str], do_flatten: bool
) -> dict[str, list[torch.Tensor]]:
    """Return the weights after every step with each of the algorithms."""
    seen: dict[str, list[torch.Tensor]] = {}
    for name in names:
        run = Run(name, Mixed() if dtype is None else model(0, dtype), do_flatten=do_flatten)
        for number in range(STEPS):
            run.step(number)
            seen.setdefault(name, []).append(run.weights())
    return seen


@pytest.mark.parametrize(
    ("nodes", "dtype", "do_flatten"),
    [
        pytest.param((1, 2), torch.float32, True, marks=pytest.mark.proof),
        pytest.param((2,), torch.bfloat16, False, marks=pytest.mark.proof),
        ((1, 1), None, True),
    ],
    ids=str,
)
def test_every_algorithm_trains_over_gloo_as_in_the_simulation(
    nodes: tuple[int, ...], dtype: torch.dtype | None, do_flatten: bool
) -> None:
    """None is a dtype for each layer, which the global weights of DiLoCo follow."""
    given = (
        dtype,
        [name for name, case in CASES.items() if case.takes(nodes) and (dtype or case.float64)],
        do_flatten,
    )
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
                    assert_equal(
                        found,
                        wanted,
                        EXACT if exact else SUM((step + 1) * (sum(nodes) + 1)),
                        magnitude=1.0,
                    )


@pytest.mark.parametrize("over_gloo", [True, False], ids=["gloo", "memory"])
@on_every_process(3)
def test_S3_1_tensors_are_divided_once_by_the_operation_that_is_a_mean(over_gloo: bool) -> None:
    """Also if a sum follows means, and when it replaces them; the mean divides tensors while they
    are loaded into the bucket.
    """
    for flatten in (True, False):
        tensor = torch.zeros(3).ensure_bagua_tensor("t")
        bucket = BaguaBucket([tensor], "b", flatten)
        for average, clear, expected in (
            (True, False, 2.0),
            (True, False, 2.0),
            (False, False, 6.0),
            (False, True, 6.0),
        ):
            if clear:
                bucket.clear_ops()
            bucket.append_centralized_synchronous_op(average=average)
            tensor.fill_(bagua_ref.get_rank() + 1.0)
            bucket.execute()
            assert tensor.tolist() == [expected] * 3


def train_and_lose_a_peer() -> str:
    module, optimizer = wrap(network(), ByteGradAlgorithm(hierarchical=False), lr=0.1, timeout=5)
    train(module, optimizer, bagua_ref.get_rank(), range(2))
    if bagua_ref.get_rank() == 1:
        handle = module[2].weight.register_post_accumulate_grad_hook(
            lambda parameter: (time.sleep(0.5), os._exit(3))
        )
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
