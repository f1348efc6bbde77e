"""diloco and weights that were loaded or copied back: the global weights follow, or the exchange is
refused; other changes of weights are none of its business. In the simulated world.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.trainings import simulate, weights
from tests.trainings import small_batch as batch
from torch import nn

from bagua_ref.algorithms import DiLoCoAlgorithm
from bagua_ref.errors import CommunicationError

KINDS: dict[str, Callable[[], DiLoCoAlgorithm]] = {
    "plain": lambda: DiLoCoAlgorithm(period=2),
    "without momentum": lambda: DiLoCoAlgorithm(
        period=2, outer_optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.7)
    ),
    "streaming": lambda: DiLoCoAlgorithm(period=4, fragments=2, delay=1),
    "mixing": lambda: DiLoCoAlgorithm(period=4, fragments=2, mix=0.5),
    "compressed": lambda: DiLoCoAlgorithm(period=2, compression="MinMaxUInt8", error_feedback=True),
}


def begin(kind: str = "plain", lr: float = 0.3) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    module.with_bagua([optimizer], KINDS[kind]())
    return module, optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer, r: int, number: int) -> None:
    optimizer.zero_grad()
    (module(batch(r, number)) - 1).square().mean().backward()
    optimizer.step()


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, r: int, numbers: range) -> None:
    for number in numbers:
        step(module, optimizer, r, number)


def whole(module: nn.Module, best: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(best)


def parts(module: Any, best: dict[str, torch.Tensor]) -> None:
    for place in "02":
        module[int(place)].load_state_dict(
            {name[2:]: value for name, value in best.items() if name[0] == place}
        )


def inside(module: nn.Module, best: dict[str, torch.Tensor]) -> None:
    nn.ModuleDict({"model": module}).load_state_dict(
        {f"model.{name}": value for name, value in best.items()}
    )


def copied(module: nn.Module, best: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(best[name])


def copied_data(module: nn.Module, best: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.data.copy_(best[name])


@pytest.mark.parametrize("load", [whole, parts, inside])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [8, 9])
def test_the_global_weights_follow_loaded_ones(kind: str, load: Any, at: int) -> None:
    def rank(r: int) -> None:
        module, optimizer = begin(kind)
        best = copy.deepcopy(module.state_dict())
        start = weights(module)
        for number in range(at):
            step(module, optimizer, r, number)
        load(module, best)
        optimizer.param_groups[0]["lr"] = 0.0
        for number in range(at, 18):
            step(module, optimizer, r, number)
            assert torch.equal(weights(module), start)

    simulate(3, rank)


def test_training_goes_on_from_loaded_weights_as_from_the_start() -> None:
    def rank(r: int) -> None:
        module, optimizer = begin()
        best = copy.deepcopy(module.state_dict())
        seen = []
        for _ in range(2):
            module.load_state_dict(best)
            for number in range(4):
                step(module, optimizer, r, number)
            seen.append(weights(module))
        assert torch.equal(*seen)

    simulate(2, rank)


@pytest.mark.parametrize("copy_back", [copied, copied_data])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_copied_back_from_before_the_last_exchange_are_refused(
    kind: str, copy_back: Any
) -> None:
    def rank(r: int) -> None:
        module, optimizer = begin(kind)
        best = copy.deepcopy(module.state_dict())
        for number in range(8):
            step(module, optimizer, r, number)
        copy_back(module, best)
        with pytest.raises(CommunicationError, match=r"set back.*bagua_resynchronize"):
            steps(module, optimizer, r, range(8, 14))
        copy_back(module, best)
        module.bagua_resynchronize()
        optimizer.param_groups[0]["lr"] = 0.0
        start = weights(module)
        for number in range(8):
            step(module, optimizer, r, number)
        assert torch.equal(weights(module), start)

    simulate(2, rank)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_load_different_weights_are_refused(ranks: int) -> None:
    def rank(r: int) -> None:
        module, optimizer = begin()
        best = copy.deepcopy(module.state_dict())
        for number in range(4):
            step(module, optimizer, r, number)
        if r == 1:
            module.load_state_dict(best)
        with pytest.raises(CommunicationError, match=r"state was loaded.*bagua_resync"):
            steps(module, optimizer, r, range(4, 8))

    simulate(ranks, rank)


# Ordinary changes


def clip(module: nn.Module, kept: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.01, 0.01)


def decay(module: nn.Module, kept: dict[str, Any]) -> None:
    with torch.no_grad():
        torch._foreach_mul_([*module.parameters()], 0.99)


def swap_and_swap_back(module: nn.Module, kept: dict[str, Any]) -> None:
    before = copy.deepcopy(module.state_dict())
    mean = kept.setdefault("mean", before)
    for name, value in module.state_dict().items():
        value.copy_(mean[name])
    module.eval()(batch(0))
    module.train()(batch(0))
    for name, value in module.state_dict().items():
        value.copy_(before[name])


def undo_some_steps(module: nn.Module, kept: dict[str, Any]) -> None:
    kept["steps"] = kept.get("steps", 0) + 1
    if kept["steps"] % 4 == 3:  # not those after which weights are exchanged
        copied(module, kept["before"])
    kept["before"] = copy.deepcopy(module.state_dict())


@pytest.mark.parametrize("change", [clip, decay, swap_and_swap_back, undo_some_steps])
def test_what_changes_weights_after_each_step_is_not_accused(change: Any) -> None:
    def rank(r: int) -> torch.Tensor:
        torch.manual_seed(0)
        module: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        module.with_bagua([optimizer], DiLoCoAlgorithm(period=6))
        kept: dict[str, Any] = {}
        for number in range(24):
            step(module, optimizer, r, number)
            change(module, kept)
        module.bagua_algorithm.state_dict()
        return weights(module)

    simulate(2, rank)


def test_a_rank_may_load_weights_of_a_step_since_the_last_exchange() -> None:
    def rank(r: int) -> torch.Tensor:
        torch.manual_seed(0)
        module: Any = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        module.with_bagua([optimizer], DiLoCoAlgorithm(period=4))
        for number in range(8):
            before = copy.deepcopy(module.state_dict())
            step(module, optimizer, r, number)
            if (r, number) in ((1, 1), (1, 6)):
                module.load_state_dict(before)
        return weights(module)

    first, other = simulate(2, rank)
    assert torch.equal(first, other)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_checkpoint_is_loaded_in_any_order(model_first: bool) -> None:
    def rank(r: int) -> None:
        module, optimizer = begin("streaming")
        for number in range(6):
            step(module, optimizer, r, number)
        state = copy.deepcopy(module.bagua_algorithm.state_dict())
        model = copy.deepcopy(module.state_dict())
        for number in range(6, 13):
            step(module, optimizer, r, number)
        expected = weights(module)
        again, optimizer = begin("streaming")
        step(again, optimizer, r, 0)
        if model_first:
            again.load_state_dict(model)
        again.bagua_algorithm.load_state_dict(state)
        if not model_first:
            again.load_state_dict(model)
        for number in range(6, 13):
            step(again, optimizer, r, number)
        assert torch.equal(weights(again), expected)

    simulate(2, rank)
