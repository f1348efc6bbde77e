"""Tests of modules, parameters and optimizers that change after wrapping: training goes on exactly, or
is refused before weights part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch import on_every_process
from tests.trainings import Net, by_name, on_every_rank, sgd, weights
from tests.trainings import small_batch as batch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import bagua_ref
from bagua_ref.algorithms import (
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.errors import CommunicationError


class Half(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


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


# Parameters whose content was swapped, which takes their hooks away


@contextmanager
def swapping() -> Iterator[None]:
    """Have torch swap parameters in this context instead of setting their data."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def converts_there_and_back(module: Net) -> None:
    with swapping():
        module.double().float()


def loads(module: Net) -> None:
    with swapping():
        module.load_state_dict({name: x.clone() for name, x in module.state_dict().items()})


def swaps_one(module: Net) -> None:
    torch.utils.swap_tensors(module.head.weight, nn.Parameter(module.head.weight.detach().clone()))


SWAPS = [converts_there_and_back, loads, swaps_one]


@pytest.mark.parametrize("change", SWAPS)
@pytest.mark.parametrize("algorithm", GlobalAlgorithmRegistry.available_algorithms())
@on_every_rank(2)
def test_training_goes_on_after_a_swap_as_without_it(
    r: int, algorithm: str, change: Callable[[Net], None]
) -> None:
    options: dict[str, Any] = {
        "local_sgd": {"period": 2},
        "diloco": {"period": 2},
        "async": {"warmup_steps": 6},
    }
    results = []
    for changes in (change, lambda module: None):
        module = Net()
        optimizer, made = by_name(algorithm, module, momentum=0.9, **options.get(algorithm, {}))
        module.with_bagua([optimizer], made)
        train(module, optimizer, range(r, r + 1), changes, steps=6)
        results.append(weights(module))
    assert torch.equal(*results)


@pytest.mark.parametrize("change", SWAPS)
@on_every_rank(2)
def test_the_users_hooks_are_called_after_a_swap_too(r: int, change: Callable[[Net], None]) -> None:
    module, calls = Net(), []
    module.head.weight.register_post_accumulate_grad_hook(calls.append)
    module.with_bagua([], GradientAllReduceAlgorithm())
    change(module)
    module(batch(r)).sum().backward()
    assert len(calls) == 1


@on_every_rank(2)
def test_a_rank_that_swaps_in_other_values_is_named_on_all(r: int) -> None:
    module = Net()
    optimizer = sgd(module)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())

    def change(module: Net) -> None:
        if r == 1:
            torch.utils.swap_tensors(module.head.weight, nn.Parameter(torch.ones(2, 3)))

    with pytest.raises(CommunicationError, match=r"rank 0 has weights .* rank 1 has weights"):
        train(module, optimizer, range(r, r + 1), change)
    module.bagua_resynchronize()
    train(module, optimizer, range(r, r + 1), lambda module: None)


@pytest.mark.parametrize("alone", [False, True])
@on_every_rank(3)
def test_a_swap_for_another_dtype_is_refused_on_all_ranks_until_wrapped_again(
    r: int, alone: bool
) -> torch.Tensor:
    module = Net()
    optimizer = sgd(module)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())

    def change(module: Net) -> None:
        if r == 1 or not alone:
            with swapping():
                module.body.double()

    with pytest.raises(
        RuntimeError,
        match=r"'body\.\w+' was swapped .* torch\.float32 .* torch\.float64 .*with_bagua\(\) again",
    ):
        train(module, optimizer, range(r, r + 1), change)
    module.float()
    optimizer = sgd(module)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    train(module, optimizer, range(r, r + 1), lambda module: None)
    return weights(module)


@pytest.mark.parametrize("change", SWAPS)
@on_every_rank(2)
def test_a_swap_inside_train_is_refused_at_the_step(r: int, change: Callable[[Net], None]) -> None:
    module = Net()
    optimizer = sgd(module)
    with (
        pytest.raises(RuntimeError, match=r"'\w+\.\w+' was swapped .*leave the context"),
        bagua_ref.train(module, [optimizer], GradientAllReduceAlgorithm()),
    ):
        train(module, optimizer, range(r, r + 1), change)
    with bagua_ref.train(module, [optimizer], GradientAllReduceAlgorithm()):
        train(module, optimizer, range(r, r + 1), lambda module: None)


@pytest.mark.parametrize("known", [True, False])
@on_every_rank(2)
def test_a_step_on_gradients_that_lost_their_hooks_is_refused(r: int, known: bool) -> None:
    module = Net()
    optimizer = sgd(module)
    module.with_bagua([optimizer] if known else [], GradientAllReduceAlgorithm())
    converts_there_and_back(module)
    module.head(module.body(batch(r))).sum().backward()  # not through the module's forward pass
    with pytest.raises(RuntimeError, match=r"'body\.weight' was swapped .*of this rank alone"):
        optimizer.step()
    module.bagua_resynchronize()  # type: ignore[operator]
    train(module, optimizer, range(r, r + 1), lambda module: None)


@pytest.mark.slow
@pytest.mark.parametrize("nranks", [2, 3])
@on_every_process()
def test_over_gloo_training_goes_on_after_a_swap(nranks: int) -> None:
    rank, module, alone = bagua_ref.get_rank(), Net(), Net()
    optimizer = sgd(module)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    train(module, optimizer, range(rank, rank + 1), loads)
    train(alone, sgd(alone), range(nranks), lambda module: None)
    torch.testing.assert_close(weights(module), weights(alone))


# Optimizers that hold parameters of no wrapped module


SEVERAL = ["gradient_allreduce", "qadam", "local_sgd", "decentralized", "async"]
"""Algorithms that differ in what they compare."""


def outside(count: int = 2) -> nn.Parameter:
    return nn.Parameter(torch.ones(count))


def step_of(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    module(batch(rank)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("algorithm", SEVERAL)
@on_every_rank(2)
def test_parameters_of_no_wrapped_module_are_refused_at_the_step(
    r: int, algorithm: str, later: bool
) -> None:
    module, extra = Net(), outside()
    options: dict[str, Any] = {"period": 2} if algorithm in ("local_sgd", "diloco") else {}
    optimizer, made = by_name(algorithm, module, **options)
    if not later:
        optimizer.add_param_group({"params": [extra]})
    module.with_bagua([optimizer], made)
    if later:
        step_of(module, optimizer, r)
        optimizer.add_param_group({"params": [extra]})
    before = weights(module)
    module(batch(r)).sum().backward()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"parameter 0 of group 1, of shape \(2,\).*ignored=\[...\]"
        ):
            optimizer.step()
    if algorithm not in ("decentralized", "async"):  # which change weights in between
        assert torch.equal(weights(module), before)
    extra.requires_grad_(False)
    module.bagua_resynchronize()  # type: ignore[operator]
    step_of(module, optimizer, r)
    if algorithm == "async":
        module.bagua_algorithm.abort(module)  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("known", [True, False])
@on_every_rank(2)
def test_an_optimizer_of_another_model_is_refused_at_the_first_step(r: int, known: bool) -> None:
    module, optimizer = Net(), sgd(Net())
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    stepped = optimizer if known else sgd(module)
    with pytest.raises(
        RuntimeError, match=r"none of the parameters of SGD, .* when module 'Net' was wrapped"
    ):
        step_of(module, stepped, r)


@on_every_rank(2)
def test_an_optimizer_made_before_parameters_were_assigned_is_refused(r: int) -> None:
    module = Net()
    optimizer = sgd(module)
    module.load_state_dict(Net().state_dict(), assign=True)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    with pytest.raises(RuntimeError, match="or replaced since the optimizer was made"):
        step_of(module, optimizer, r)


@on_every_rank(2)
def test_parameters_unfrozen_later_and_those_of_train_are_refused_too(r: int) -> None:
    module, extra = Net(), outside().requires_grad_(False)
    optimizer = torch.optim.SGD([*module.parameters(), extra], lr=0.1)
    with bagua_ref.train(module, [optimizer], GradientAllReduceAlgorithm()):
        step_of(module, optimizer, r)
        extra.requires_grad_(True)
        with pytest.raises(RuntimeError, match="parameter 4 of group 0"):
            step_of(module, optimizer, r)
    with bagua_ref.train(module, [optimizer], GradientAllReduceAlgorithm(), ignored=[extra]):
        step_of(module, optimizer, r)


@on_every_rank(2)
def test_optimizers_that_are_not_refused(r: int) -> None:
    """Shared by two wrapped modules, with empty groups, frozen, ignored and tied parameters."""
    one, two, centers = Net(), Net(), outside()
    two.head.weight = one.head.weight  # type: ignore[assignment]  # of one training, ignored in the other
    frozen = outside().requires_grad_(False)
    held = [*one.parameters(), *(p for p in two.parameters() if p is not one.head.weight)]
    optimizer = torch.optim.SGD(held, lr=0.1)
    other = torch.optim.SGD(list(two.parameters()), lr=0.1)
    optimizer.add_param_group({"params": [frozen]})
    optimizer.add_param_group({"params": []})
    optimizer.add_param_group({"params": [centers]})
    one.with_bagua([optimizer], GradientAllReduceAlgorithm(), ignored=[centers, "head.weight"])
    two.with_bagua([optimizer, other], GradientAllReduceAlgorithm())
    for step in range(2):
        (one(batch(r, step)).sum() + two(batch(r, step)).sum() + centers.sum()).backward()
        optimizer.step()
        other.step()
        one.bagua_resynchronize()  # keeps what is ignored


@on_every_rank(2)
def test_ignored_parameters_stay_local(r: int) -> torch.Tensor:
    def made(rank: int) -> Net:
        module = Net()
        with torch.no_grad():
            module.head.weight.fill_(rank + 1)
        module.register_buffer("mask", torch.full((2,), float(rank)))
        return module

    module, alone = made(r), made(r)
    optimizer = sgd(module)
    module.with_bagua(
        [optimizer], GradientAllReduceAlgorithm(), ignored=["mask", module.head.weight]
    )
    assert module.mask.tolist() == [r, r]
    assert module.head.weight.unique().tolist() == [r + 1]
    module(batch(r)).sum().backward()
    alone(batch(r)).sum().backward()
    assert torch.equal(module.head.weight.grad, alone.head.weight.grad)
    return module.body.weight.grad


@pytest.mark.parametrize(
    ("ignored", "error", "message"),
    [
        (["centers"], ValueError, "'centers' is no parameter or buffer of this Net"),
        ([3], TypeError, "must be a list of names and of parameters"),
    ],
)
@on_every_rank(2)
def test_what_cannot_be_ignored_is_refused(
    r: int, ignored: list[Any], error: type[Exception], message: str
) -> None:
    module = Net()
    with pytest.raises(error, match=message):
        module.with_bagua([sgd(module)], GradientAllReduceAlgorithm(), ignored=ignored)


# Gradients that arrive after the synchronized backward pass


def first_synchronized(model: Any, rank: int) -> None:
    model(batch(rank)).square().mean().backward()
    with model.no_sync():
        model(batch(rank, 1)).square().mean().backward()


def backward_in_reverse(model: Any, rank: int) -> None:
    with model.no_sync():
        first = model(batch(rank)).square().mean()
    model(batch(rank, 1)).square().mean().backward()
    first.backward()


def then_in_evaluation(model: Any, rank: int) -> None:
    model(batch(rank)).square().mean().backward()
    model.eval()
    model(batch(rank, 1)).square().mean().backward()
    model.train()


ORDERS = [first_synchronized, backward_in_reverse, then_in_evaluation]
LOCAL = {"decentralized", "low_precision_decentralized", "local_sgd", "diloco"}
"""Algorithms that exchange weights, whose gradients are local anyway."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("algorithm", SEVERAL)
@on_every_rank(2)
def test_gradients_after_the_synchronized_ones_are_refused_where_replicas_are_equal(
    r: int, algorithm: str, order: Callable[[Any, int], None]
) -> None:
    module = Net()
    options: dict[str, Any] = {
        "local_sgd": {"period": 2},
        "diloco": {"period": 2},
        "async": {"warmup_steps": 4},
    }
    optimizer, made = by_name(algorithm, module, **options.get(algorithm, {}))
    module.with_bagua([optimizer], made)
    before = weights(module)
    if algorithm in LOCAL:
        if (algorithm, order) != ("decentralized", backward_in_reverse):  # refused in backward()
            order(module, r)
            optimizer.step()
        return
    order(module, r)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'\w+\.\w+' got another gradient, under no_sync"):
            optimizer.step()
    assert torch.equal(weights(module), before)
    module.bagua_resynchronize()  # type: ignore[operator]
    step_of(module, optimizer, r)


@pytest.mark.parametrize("order", ORDERS)
@on_every_rank(2)
def test_under_the_wrappers_name_they_are_refused_without_knowing_the_optimizer(
    r: int, order: Callable[[Any, int], None]
) -> None:
    model = DistributedDataParallel(Net())
    optimizer = sgd(model)
    order(model, r)
    with pytest.raises(RuntimeError, match=r"'\w+\.\w+' got another gradient"):
        optimizer.step()


@on_every_rank(2)
def test_gradients_that_are_synchronized_dropped_or_of_others_are_not_refused(
    r: int,
) -> torch.Tensor:
    module = Net()
    optimizers = [sgd(module.body), sgd(module.head)]
    module.with_bagua(optimizers, GradientAllReduceAlgorithm(), find_unused_parameters=True)
    first_synchronized(module, r)
    module(batch(r, 2)).square().mean().backward()  # synchronizes what has arrived before, too
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    first_synchronized(module, r)
    for optimizer in optimizers:
        optimizer.zero_grad()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    module(batch(r)).square().mean().backward()
    with module.no_sync():
        module(batch(r, 1).detach()).square().mean().backward(inputs=[module.head.bias])
    optimizers[0].step()  # has no gradient of this rank alone
    with pytest.raises(RuntimeError, match=r"'head\.bias'"):
        optimizers[1].step()
    return weights(module)
