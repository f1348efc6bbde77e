"""Small networks, their inputs, and runs of functions in a simulated world with a default group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.simulation import SimulatedWorld


def simulate(
    ranks: int, function: Callable[[int], Any], nodes: tuple[int, ...] | None = None, seed: int = 0
) -> list[Any]:
    """Return the results of ``function(rank)`` on every rank of a simulated world, with a default
    group.
    """

    def main(comm: Any) -> Any:
        bagua_ref.init_process_group()
        return function(comm.rank())

    return SimulatedWorld(ranks, nodes=nodes, seed=seed).run(main)


def equal(one: Any, other: Any) -> bool:
    """Return whether two trees of lists and tuples have equal values."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def on_every_rank(
    ranks: int, nodes: tuple[int, ...] | None = None, seed: int = 0
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test on every rank of a simulated world, with a default group; what it returns must be
    the same on all.

    The test's first argument is the rank.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            first, *others = simulate(ranks, lambda rank: test(rank, **given), nodes, seed)
            assert all(equal(first, other) for other in others)

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 6, generator=seeded, dtype=torch.float32).to(dtype)


def small_batch(rank: int, step: int = 0) -> torch.Tensor:
    """Return inputs of four features."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def small_network() -> nn.Sequential:
    """Return layers for a `small_batch`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def small_step(module: nn.Module, optimizer: Any, rank: int, step: int = 0) -> None:
    """Take a step with a `small_batch`."""
    optimizer.zero_grad()
    module(small_batch(rank, step)).square().mean().backward()
    optimizer.step()


class Net(nn.Module):
    """Two layers for a `small_batch`, and a method besides forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).square().mean()


def wrapped(
    algorithm: Algorithm, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """Return a `network` in training, and its optimizer; ``options`` are those of
    ``with_bagua``.
    """
    return wrap(network(dtype=dtype), algorithm, lr=0.1, momentum=0.9, **options)


def wrap(
    module: nn.Module, algorithm: Algorithm, lr: float, momentum: float = 0.0, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """Return a module, wrapped to be trained by SGD, and its optimizer; ``options`` are those of
    ``with_bagua``.
    """
    optimizer = sgd(module, lr, momentum)
    return module.with_bagua([optimizer], algorithm, **options), optimizer  # type: ignore[operator]


def by_name(
    name: str,
    module: nn.Module,
    lr: float = 0.1,
    momentum: float = 0.0,
    warmup_steps: int | None = None,
    **options: Any,
) -> tuple[Any, Algorithm]:
    """Return an optimizer of the kind that a registered algorithm takes, and the algorithm with
    options.

    Args:
        name: of the algorithm.
        module: what it trains.
        lr: of SGD.
        momentum: of SGD.
        warmup_steps: of QAdam's optimizer, where None is 2, or of the algorithm, where None is its
            own default.
        options: of the algorithm.
    """
    if name != "qadam":
        given = options if warmup_steps is None else {"warmup_steps": warmup_steps, **options}
        return sgd(module, lr, momentum), Algorithm.init(name, **given)
    optimizer = QAdamOptimizer(
        module.parameters(), lr=0.01, warmup_steps=2 if warmup_steps is None else warmup_steps
    )
    return optimizer, Algorithm.init(name, q_adam_optimizer=optimizer, **options)


class Scalar(nn.Module):
    """One weight, initially 0; the loss is x times the weight, so its gradient is x."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, x: float) -> torch.Tensor:
        return (self.w * x).sum()


def weights(module: nn.Module) -> torch.Tensor:
    """Return a copy of all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def sgd(module: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, **zero: Any
) -> None:
    """Take a step with each of a rank's batches; ``zero`` are options of zero_grad."""
    dtype = next(module.parameters()).dtype
    for step in steps:
        optimizer.zero_grad(**zero)
        module(batch(rank, step, dtype)).square().mean().backward()
        optimizer.step()


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward pass raises ArithmeticError."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


class Given(nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(w.clone() for w in weights)

    def forward(self, gradients: list[torch.Tensor]) -> Any:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))
