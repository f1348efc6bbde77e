"""Tests that a forward pass decides whether its backward pass is synchronized (S5), whatever other
passes come between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.launch import on_every_process
from tests.trainings import by_name, on_every_rank, simulate, weights, wrap
from tests.trainings import small_batch as batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import bagua_ref
from bagua_ref.algorithms import AsyncModelAverageAlgorithm, GradientAllReduceAlgorithm
from bagua_ref.data_parallel import DistributedDataParallel

ALGORITHMS = {
    "gradient_allreduce": {},
    "decentralized": {},
    "low_precision_decentralized": {},
    "local_sgd": {"period": 1},
}


class Net(nn.Module):
    """A network of which the second half is used only where ``whole``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        return self.second(self.first(x).tanh()) if whole else self.first(x)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def under_no_sync(model: Any, x: torch.Tensor) -> None:
    with model.no_sync():
        model(x)


def without_gradients(model: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def without_gradients_under_no_sync(model: Any, x: torch.Tensor) -> None:
    with torch.inference_mode(), model.no_sync():
        model(x)


def in_evaluation(model: Any, x: torch.Tensor) -> None:
    model.eval()
    without_gradients(model, x)
    model.train()


def in_evaluation_until_the_next_step(model: Any, x: torch.Tensor) -> None:
    model.eval()
    without_gradients(model, x)


def nothing(model: Any, x: torch.Tensor) -> None:
    pass


BETWEEN = (
    under_no_sync,
    without_gradients,
    without_gradients_under_no_sync,
    in_evaluation,
    in_evaluation_until_the_next_step,
)


def wrapped(algorithm: str, wrapper: bool) -> tuple[Any, torch.optim.Optimizer]:
    optimizer, algorithm_of = by_name(algorithm, module := Net(), **ALGORITHMS[algorithm])
    wrap_it = partial(DistributedDataParallel, module) if wrapper else module.with_bagua
    return wrap_it(optimizers=[optimizer], algorithm=algorithm_of), optimizer


def train(
    rank: int, algorithm: str, between: Callable[[Any, torch.Tensor], None], wrapper: bool
) -> torch.Tensor:
    model, optimizer = wrapped(algorithm, wrapper)
    for step in range(4):
        model.train()
        optimizer.zero_grad()
        loss = loss_of(model(batch(rank, step)))
        between(model, batch(rank, 50))
        loss.backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(
    ("algorithm", "wrapper"),
    [*((name, False) for name in ALGORITHMS), ("gradient_allreduce", True)],
)
def test_S5_a_forward_pass_between_another_one_and_its_backward_pass_changes_nothing(
    algorithm: str, wrapper: bool
) -> None:
    def of(between: Callable[[Any, torch.Tensor], None]) -> list[torch.Tensor]:
        return simulate(2, lambda rank: train(rank, algorithm, between, wrapper))

    expected = of(nothing)
    for between in (
        BETWEEN
        if algorithm == "gradient_allreduce"
        else (under_no_sync, in_evaluation_until_the_next_step)
    ):
        for found, without in zip(of(between), expected, strict=True):
            assert torch.equal(found, without), between.__name__


@pytest.mark.slow
@on_every_process(2)
def test_S5_such_training_is_that_on_the_whole_batch_as_with_torchs_class() -> None:
    rank = bagua_ref.get_rank()
    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(alone(torch.cat([batch(0, step), batch(1, step)]))).backward()
        optimizer.step()
    for between in BETWEEN:
        ddp = TorchDDP(Net())
        of_ddp = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            ddp.train()
            of_ddp.zero_grad()
            loss = loss_of(ddp(batch(rank, step)))
            between(ddp, batch(rank, 50))
            loss.backward()
            of_ddp.step()
        for found in (weights(ddp), train(rank, "gradient_allreduce", between, False)):
            torch.testing.assert_close(found, weights(alone))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in module.parameters()]


@dataclass
class Output:
    value: torch.Tensor


class Hiding(Net):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, whole: bool = True) -> Any:
        return self.kind(value=super().forward(x, whole))


@pytest.mark.parametrize("kind", [Output, dict, SimpleNamespace])
def test_S5_outputs_that_hide_their_tensors_are_taken_as_by_torchs_class(kind: Any) -> None:
    """torch's class reduces the first backward pass after a forward pass outside no_sync, of
    whichever forward pass.
    """

    def value(output: Any) -> torch.Tensor:
        return loss_of(output["value"] if isinstance(output, dict) else output.value)

    def rank(r: int) -> list[list[torch.Tensor]]:
        module = Hiding(kind).with_bagua([], GradientAllReduceAlgorithm())
        with module.no_sync():
            loss = value(module(batch(r)))
        without_gradients(module, batch(r, 1))
        loss.backward()
        seen = [gradients(module)]
        module.zero_grad()
        synchronized = value(module(batch(r)))
        with module.no_sync():
            value(module(batch(r, 1))).backward()
        seen.append(gradients(module))
        synchronized.backward()
        seen.append(gradients(module))
        module.zero_grad()
        with module.no_sync():
            value(module(batch(r))).backward()
        return [*seen, gradients(module)]

    (alone, local, all_, again), (other_alone, other_local, other_all, other_again) = simulate(
        2, rank
    )
    assert not any(map(torch.equal, alone, other_alone))
    assert not any(map(torch.equal, again, other_again))
    assert all(map(torch.equal, local, other_local)) == (kind is SimpleNamespace)
    assert all(map(torch.equal, all_, other_all))


@on_every_rank(2)
def test_S5_6_a_forward_pass_without_gradients_lets_no_round_in_before_the_backward_pass(
    r: int,
) -> None:
    module, optimizer = wrap(Net(), AsyncModelAverageAlgorithm(sync_interval_ms=0), lr=0.1)
    holder = module.bagua_algorithm._holder
    for between in (nothing, without_gradients, without_gradients):
        loss = loss_of(module(batch(r)))
        between(module, batch(r, 1))
        assert holder._forward is not None
        assert holder._forward.awaits_backward
        loss.backward()
        assert holder._forward is None
        without_gradients(module, batch(r))
        assert holder._forward is None
        optimizer.step()
    module.bagua_algorithm.abort(module)
