"""Tests of forward passes with other tensors in place of parameters, as of
torch.func.functional_call, and in transforms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.trainings import by_name, on_every_rank, simulate, weights, wrap
from tests.trainings import small_batch as batch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import bagua_ref
from bagua_ref.algorithms import Algorithm, GlobalAlgorithmRegistry
from bagua_ref.data_parallel import DistributedDataParallel


class Net(nn.Module):
    """Has a buffer that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 1)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))) * self.scale


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def maml(model: nn.Module, x: Tensor) -> None:
    """Reaches the parameters through fast weights; the inner loss is of a functional call, too."""
    slow = named(model)
    inner = functional_call(model, slow, (x,)).square().mean()
    slopes = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
    fast = {name: p - 0.1 * slope for (name, p), slope in zip(slow.items(), slopes, strict=True)}
    functional_call(model, fast, (x + 1,)).square().mean().backward()


def maml_of_several_tasks(model: nn.Module, x: Tensor) -> None:
    for task in range(2):
        maml(model, x + task)


def fast_weights_alone(model: nn.Module, x: Tensor) -> None:
    """No forward pass with the parameters precedes."""
    fast = {name: 0.9 * p for name, p in named(model).items()}
    functional_call(model, fast, (x,)).square().mean().backward()


def some_fast_weights(model: nn.Module, x: Tensor) -> None:
    name, weight = next(
        (name, p) for name, p in named(model).items() if name.endswith("head.weight")
    )
    functional_call(model, {name: weight * 0.5}, (x,)).square().mean().backward()


def penalty_on_slopes(model: nn.Module, x: Tensor) -> None:
    """Differentiates through torch.func.grad."""
    slopes = grad(lambda p: functional_call(model, p, (x,)).square().mean())(named(model))
    sum(slope.square().sum() for slope in slopes.values()).backward()


def ensemble(model: nn.Module, x: Tensor) -> None:
    both = {name: torch.stack([p, 0.5 * p]) for name, p in named(model).items()}
    vmap(lambda p: functional_call(model, p, (x,)))(both).square().mean().backward()


def slopes_of_inputs(model: nn.Module, x: Tensor) -> None:
    """The forward passes have the parameters, but run inside transforms."""
    slopes = vmap(grad(lambda sample: model(sample).sum()))(x)
    (slopes.square().mean() + model(x).square().mean()).backward()


def several_buffers(model: nn.Module, x: Tensor) -> None:
    buffers = {name: torch.stack([b, 2 * b]) for name, b in model.named_buffers()}
    vmap(lambda b: functional_call(model, (named(model), b), (x,)))(
        buffers
    ).square().mean().backward()


def another_ones_parameters(model: nn.Module, x: Tensor) -> None:
    """The target of the loss is computed with another module's parameters, before and after the
    forward pass.
    """
    prefix = "module." if isinstance(model, DistributedDataParallel) else ""
    other = {prefix + name: p for name, p in Net().named_parameters()}
    target = functional_call(model, other, (x,)).detach()
    loss = (model(x + 1) - target).square().mean()
    functional_call(model, other, (x,))
    loss.backward()


REACHING = [
    maml,
    maml_of_several_tasks,
    fast_weights_alone,
    some_fast_weights,
    penalty_on_slopes,
    ensemble,
    slopes_of_inputs,
    several_buffers,
    another_ones_parameters,
]
"""Their backward passes reach the parameters."""


def slopes_per_sample(model: nn.Module, x: Tensor) -> None:
    detached = {name: p.detach() for name, p in named(model).items()}
    slopes = vmap(
        grad(lambda p, sample: functional_call(model, p, (sample,)).square().mean()),
        in_dims=(None, 0),
    )(detached, x)
    for name, p in named(model).items():
        p.grad = slopes[name].mean(0)


def maml_of_first_order(model: nn.Module, x: Tensor) -> None:
    fast = {name: p.detach().clone().requires_grad_() for name, p in named(model).items()}
    functional_call(model, fast, (x,)).square().mean().backward()
    for name, p in named(model).items():
        p.grad = fast[name].grad


ALONE = [slopes_per_sample, maml_of_first_order]
"""They compute gradients of other tensors, and assign them."""


def by_hand(
    compute: Callable[[nn.Module, Tensor], None], ranks: int, averaged: bool
) -> list[Tensor]:
    """Return each rank's weights after three steps without this package."""
    models = [Net() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            compute(model, batch(rank, step))
        if averaged:
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(p.grad for p in same) / ranks
                for p in same:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [weights(model) for model in models]


def train(
    rank: int,
    compute: Callable[[nn.Module, Tensor], None],
    form: str,
    algorithm: str = "gradient_allreduce",
) -> Tensor:
    model: Any = Net()
    options: dict[str, Any] = {"period": 2} if algorithm in ("local_sgd", "diloco") else {}
    if algorithm == "async":
        options = {"warmup_steps": 1, "sync_interval_ms": 1}
    optimizer, made_for = by_name(algorithm, model, **options)
    if form == "wrapper":
        model = DistributedDataParallel(model)
    else:
        model.with_bagua([optimizer], made_for, do_flatten=form == "flat")
    for step in range(3):
        optimizer.zero_grad()
        compute(model, batch(rank, step))
        optimizer.step()
    if algorithm == "async":
        model.bagua_algorithm.abort(model)
    return weights(model)


@pytest.mark.parametrize(
    ("compute", "form"),
    [*((compute, "flat") for compute in REACHING), (maml, "not flat"), (maml, "wrapper")],
)
def test_S5_a_backward_that_reaches_the_parameters_is_synchronized(
    compute: Callable[..., None], form: str
) -> None:
    for found, expected in zip(
        simulate(2, lambda r: train(r, compute, form)),
        by_hand(compute, 2, averaged=True),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", ["flat", "wrapper"])
@pytest.mark.parametrize("compute", ALONE)
def test_S5_gradients_of_other_tensors_stay_with_their_rank(
    compute: Callable[..., None], form: str
) -> None:
    for found, expected in zip(
        simulate(2, lambda r: train(r, compute, form)),
        by_hand(compute, 2, averaged=False),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("algorithm", GlobalAlgorithmRegistry.available_algorithms())
@on_every_rank(2)
def test_S5_every_algorithm_takes_functional_calls(r: int, algorithm: str) -> None:
    local, changed = Net(), {}
    for compute in (maml, slopes_of_inputs, slopes_per_sample):
        found = train(r, compute, "flat", algorithm)
        changed[compute.__name__] = not torch.equal(found, weights(local)) and bool(
            found.isfinite().all()
        )
    assert all(changed.values()), changed


@on_every_rank(2)
def test_S5_3_decentralized_averages_around_a_functional_backward(r: int) -> Tensor:
    model = Net()
    model.with_bagua([], Algorithm.init("decentralized", hierarchical=False))
    with torch.no_grad():
        model.head.bias.fill_(r)
    fast_weights_alone(model, batch(r, 0))
    assert model.bagua_train_step_counter == 1
    assert model.head.bias == 0.5
    return weights(model)


def test_S5_a_functional_forward_under_no_sync_stays_local_and_its_step_is_legal() -> None:
    def rank(r: int) -> tuple[Tensor, int]:
        model, optimizer = wrap(Net(), Algorithm.init("gradient_allreduce"), lr=0.1)
        fast = {name: 0.9 * p for name, p in named(model).items()}
        with model.no_sync():
            loss = functional_call(model, fast, (batch(r, 0),)).square().mean()
        loss.backward()
        optimizer.step()
        model.training_step = lambda x: model.head(model.body(x)).sum()
        model.training_step(batch(r, 1)).backward()
        with pytest.raises(RuntimeError, match="followed no training forward"):
            optimizer.step()
        return weights(model), model.bagua_train_step_counter

    (first, _), (second, steps) = simulate(2, rank)
    assert not torch.equal(first, second)
    assert steps == 1


@on_every_rank(2)
def test_S5_a_call_that_replaces_frozen_parameters_only_is_a_training_forward(r: int) -> Tensor:
    model = Net()
    model.body.requires_grad_(False)
    model.with_bagua([], Algorithm.init("gradient_allreduce"))
    loss = (
        functional_call(
            model, {"body.weight": torch.ones(3, 4, requires_grad=True)}, (batch(r, 0),)
        )
        .square()
        .mean()
    )
    assert model.bagua_train_step_counter == 1
    loss.backward()
    return model.head.weight.grad.clone()


@on_every_rank(2)
def test_a_functional_forward_of_an_earlier_step_makes_no_backward_legal(r: int) -> None:
    model, optimizer = wrap(Net(), Algorithm.init("gradient_allreduce"), lr=0.1)
    for train_before in (False, True):
        slopes_per_sample(model, batch(r, 0))
        if train_before:
            model(batch(r, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.head(model.body(batch(r, 1))).sum().backward()
        with pytest.raises(RuntimeError, match="followed no training forward"):
            optimizer.step()
        model.bagua_resynchronize()
        optimizer.zero_grad()


@on_every_rank(2)
def test_S5_buffers_are_not_broadcast_during_a_functional_backward(r: int) -> None:
    model, alone = DistributedDataParallel(Net()), Net()
    for module in (model.module, alone):
        module.scale.fill_(1.0 + r)
    fast_weights_alone(model, batch(0, 0))
    assert model.module.scale.item() == 1 + r  # saved for backward
    fast_weights_alone(alone, batch(0, 0))
    mean = alone.head.bias.grad.clone()
    bagua_ref.allreduce_inplace(mean, bagua_ref.ReduceOp.AVG)
    torch.testing.assert_close(model.module.head.bias.grad, mean)


@on_every_rank(2)
def test_a_module_keeps_its_check_of_parameters_after_a_functional_call(r: int) -> None:
    model = Net()
    model.with_bagua([], Algorithm.init("gradient_allreduce"))
    maml(model, batch(r, 0))
    model.head.weight = nn.Parameter(torch.zeros(1, 3))
    with pytest.raises(RuntimeError, match=r"'head\.weight'.*with_bagua\(\) again"):
        model(batch(r, 0))
    with pytest.raises(RuntimeError, match=r"'head\.weight'"):
        model(batch(r, 0))
