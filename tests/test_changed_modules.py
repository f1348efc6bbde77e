"""Tests of modules, parameters and optimizers that change after wrapping: training goes on exactly, or
is refused before weights part.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.launch import on_every_process
from tests.trainings import on_every_rank, sgd, weights
from tests.trainings import small_batch as batch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import bagua_ref
from bagua_ref.algorithms import GradientAllReduceAlgorithm, QAdamAlgorithm, QAdamOptimizer


class Half(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: range,
    change: Callable[[Net], object],
    steps: int = 4,
) -> None:
    """Train on the mean over the batches of ``ranks``, with a ``change`` before the third step."""
    for step in range(steps):
        if step == 2:
            change(module)  # type: ignore[arg-type]
        optimizer.zero_grad()
        batches = torch.cat([batch(rank, step) for rank in ranks])
        module(batches).square().mean().backward()
        optimizer.step()


# Names


def prunes(module: Net) -> None:
    prune.l1_unstructured(module.body, "weight", 0.5)


def parametrizes(module: Net) -> None:
    parametrize.register_parametrization(module.body, "weight", Half())


def normalizes(module: Net) -> None:
    torch.manual_seed(0)  # of its first vectors
    parametrizations.spectral_norm(module.body, "weight")


def renames(module: Net) -> None:
    module.trunk = module._modules.pop("body")
    module.forward = lambda x: module.head(module.trunk(x))  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [prunes, parametrizes, normalizes, renames])
@on_every_rank(2)
def test_a_parameter_trains_under_a_new_name(r: int, change: Callable[[Net], None]) -> torch.Tensor:
    module, alone = Net(), Net()
    optimizer = sgd(module)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    train(module, optimizer, range(r, r + 1), change)
    train(alone, sgd(alone), range(2), change)
    torch.testing.assert_close(weights(module), weights(alone))
    return weights(module)


@on_every_rank(2)
def test_a_parametrization_with_new_parameters_is_refused(r: int) -> None:
    module, optimizer = Net(), None
    optimizer = sgd(module)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    with pytest.raises(RuntimeError, match=r"Net was wrapped before .*'body.parametrizations.*'"):
        train(
            module,
            optimizer,
            range(r, r + 1),
            lambda module: parametrizations.weight_norm(module.body),
        )


@on_every_rank(2)
def test_messages_name_a_module_by_its_class_or_its_own_name(r: int) -> list[str]:
    modules = [Net(), Net(), nn.Linear(4, 2), Net()]
    modules[3].bagua_module_name = "teacher"  # type: ignore[assignment]
    for module in modules:
        module.with_bagua([sgd(module)], GradientAllReduceAlgorithm())  # type: ignore[operator]
    names = [module.bagua_module_name for module in modules]
    assert names == ["Net", "Net-2", "Linear", "teacher"]
    modules[0].with_bagua([], GradientAllReduceAlgorithm())  # type: ignore[operator]
    assert modules[0].bagua_module_name == "Net"
    return names


# What is passed to with_bagua, and what is made of a wrapped module


@pytest.mark.slow
@on_every_process(3)
def test_a_torch_group_is_taken_as_the_group() -> None:
    rank, module = bagua_ref.get_rank(), Net()
    group = dist.new_group([0, 2])
    optimizer = sgd(module)
    if rank == 1:
        with pytest.raises(TypeError, match="a torch ProcessGroup that this rank is in"):
            module.with_bagua([optimizer], GradientAllReduceAlgorithm(), group)
        return
    module.with_bagua([optimizer], GradientAllReduceAlgorithm(), group)
    train(module, optimizer, range(rank, rank + 1), lambda module: None)
    alone = Net()
    train(alone, sgd(alone), range(0, 3, 2), lambda module: None)
    torch.testing.assert_close(weights(module), weights(alone))


@on_every_rank(1)
def test_scripting_a_wrapped_module_says_what_works_instead(r: int) -> None:
    module = nn.Sequential(nn.Linear(4, 2))
    module.with_bagua([], GradientAllReduceAlgorithm())  # type: ignore[operator]
    with pytest.raises(AttributeError, match=r"bagua_ref.*load_state_dict.*torch\.jit\.trace"):
        torch.jit.script(module)
    expected = module(batch(r))
    assert torch.equal(torch.jit.trace(module, batch(r))(batch(r)), expected)
    fresh = nn.Sequential(nn.Linear(4, 2))
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(torch.jit.script(fresh)(batch(r)), expected)


@on_every_rank(2)
def test_qadam_says_that_its_module_was_converted(r: int) -> None:
    module = Net()
    optimizer = QAdamOptimizer(module.parameters(), warmup_steps=2)
    module.with_bagua([optimizer], QAdamAlgorithm(optimizer, hierarchical=False))
    train(module, optimizer, range(r, r + 1), lambda module: None)
    module.double()
    optimizer.zero_grad()
    with pytest.raises(
        RuntimeError, match=r"torch\.float64 and momenta torch\.float32.*with_bagua\(\) again"
    ):
        module(batch(r).double()).sum().backward()
