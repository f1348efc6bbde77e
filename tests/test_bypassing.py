"""Tests of training that bypasses the wrapped module or changes its parameters: it must raise, not
diverge silently.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.launch import on_every_process
from tests.trainings import Net, by_name, on_every_rank, weights, wrap
from tests.trainings import small_batch as batch
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    DecentralizedAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
)
from bagua_ref.data_parallel import DistributedDataParallel

ALGORITHMS = GlobalAlgorithmRegistry.available_algorithms()


def wrapped(
    algorithm: str = "gradient_allreduce", **options: Any
) -> tuple[Net, torch.optim.Optimizer]:
    module = Net()
    optimizer, made_for = by_name(
        algorithm,
        module,
        **options,
        **({"period": 2} if algorithm in ("local_sgd", "diloco") else {}),
    )
    return module.with_bagua([optimizer], made_for), optimizer


@pytest.mark.parametrize(
    ("algorithm", "trained_before"),
    [*((name, True) for name in ALGORITHMS), ("gradient_allreduce", False)],
)
@on_every_rank(2)
def test_a_step_after_a_method_was_called_instead_of_the_module_raises(
    r: int, algorithm: str, trained_before: bool
) -> None:
    module, optimizer = wrapped(algorithm)
    if trained_before:
        module(batch(r)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = weights(module)
    module.training_step(batch(r)).backward()
    for _ in range(2):  # it fails again on retry
        with pytest.raises(
            RuntimeError,
            match=(
                r"gradients of this rank alone.*'head.bias' followed no training forward.*model\(x\)"
            ),
        ):
            optimizer.step()
    assert torch.equal(weights(module), before)
    module.bagua_resynchronize()  # as after any error
    optimizer.zero_grad()
    module(batch(r)).sum().backward()
    optimizer.step()
    if algorithm == "async":
        module.bagua_algorithm.abort(module)


@on_every_rank(2)
def test_without_a_known_optimizer_gradients_are_synchronized_as_they_come(r: int) -> torch.Tensor:
    module = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        module.module.training_step(batch(r, step)).backward()
        optimizer.step()
    return weights(module)


@on_every_rank(2)
def test_without_a_known_optimizer_an_algorithm_that_needs_forwards_refuses_the_step(
    r: int,
) -> None:
    module = DistributedDataParallel(Net(), algorithm=DecentralizedAlgorithm())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        module(batch(r, step)).sum().backward()
        optimizer.step()
    module.module.training_step(batch(r)).backward()
    with pytest.raises(RuntimeError, match=r"SGD was about to step.* gradients of this rank alone"):
        optimizer.step()


@on_every_rank(2)
def test_local_gradients_on_purpose_and_torch_autograd_grad_stay_legal(r: int) -> None:
    module, optimizer = wrapped()
    with module.no_sync():
        module(batch(r)).sum().backward()
    optimizer.step()
    with module.no_sync():
        module.training_step(batch(r)).backward()
    optimizer.step()
    optimizer.zero_grad()
    found = torch.autograd.grad(module.training_step(batch(r)), list(module.parameters()))
    for parameter, gradient in zip(module.parameters(), found, strict=True):
        parameter.grad = gradient
    optimizer.step()
    x = batch(r).requires_grad_()
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    optimizer.zero_grad()
    (slope.square().mean() + module(x).square().mean()).backward()
    optimizer.step()


@on_every_rank(2)
def test_without_a_known_optimizer_no_sync_keeps_gradients_local_too(r: int) -> None:
    model, alone = DistributedDataParallel(Net()), Net()
    with model.no_sync():
        model.module.training_step(batch(r)).backward()
    alone.training_step(batch(r)).backward()
    assert torch.equal(model.module.head.weight.grad, alone.head.weight.grad)


@on_every_rank(2)
def test_a_step_whose_closure_makes_the_gradients_counts_also_with_a_learning_rate_of_zero(
    r: int,
) -> None:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)  # as at the start of a warm-up
    module.with_bagua([optimizer], DecentralizedAlgorithm(hierarchical=False))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(batch(r)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert module._bagua.steps_of_optimizers[0] == 3


@on_every_rank(2)
def test_one_forward_may_have_several_backwards_and_optimizers(r: int) -> torch.Tensor:
    module = Net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (module.body, module.head)]
    module.with_bagua(optimizers, GradientAllReduceAlgorithm(), find_unused_parameters=True)
    output = module(batch(r))
    output.square().mean().backward(retain_graph=True)
    output.sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for step in range(2):
        module(batch(r, step)).square().mean().backward()
        optimizers[step].step()
    return weights(module)


# Parameters that change


def _unfreeze(module: Net) -> str:
    module.body.weight.requires_grad_(True)
    return "body.weight"


def _replace(module: Net) -> str:
    module.head.weight = nn.Parameter(torch.zeros(2, 3))
    return "head.weight"


def _add(module: Net) -> str:
    module.head.extra = nn.Parameter(torch.zeros(1))
    return "head.extra"


def _add_a_module(module: Net) -> str:
    module.more = nn.Linear(1, 1)
    return "more.weight', 'more.bias"


@pytest.mark.parametrize("change", [_unfreeze, _replace, _add, _add_a_module])
@on_every_rank(2)
def test_parameters_that_appear_after_wrapping_are_named_at_the_next_training_forward(
    r: int, change: Any
) -> None:
    module = Net()
    module.body.weight.requires_grad_(False)
    wrap(module, GradientAllReduceAlgorithm(), lr=0.1)
    module(batch(r)).sum().backward()
    name = change(module)
    with torch.no_grad():
        module.eval()(batch(r))  # evaluation still works
    module.train()
    steps = module.bagua_train_step_counter
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"'{name}'.*with_bagua\(\) again"):
            module(batch(r))
    assert module.bagua_train_step_counter == steps
    module.with_bagua(
        [torch.optim.SGD(module.parameters(), lr=0.1)],
        GradientAllReduceAlgorithm(),
        find_unused_parameters=True,
    )
    module(batch(r)).sum().backward()
    everywhere = module.head.weight.grad.clone()
    bagua_ref.broadcast(everywhere, 0)
    assert torch.equal(everywhere, module.head.weight.grad)


@on_every_rank(2)
def test_what_is_ignored_or_frozen_may_change(r: int) -> None:
    module = Net()
    module._bagua_params_and_buffers_to_ignore = ["body.weight"]
    module.with_bagua([], GradientAllReduceAlgorithm())
    module.body.weight = nn.Parameter(torch.zeros(3, 4))
    module.head.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    module(batch(r)).sum().backward()
    module.head.frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'head\.frozen'"):
        module(batch(r))


# Modules that cannot be wrapped


@on_every_rank(2)
def test_a_child_of_a_wrapped_module_cannot_be_wrapped_too(r: int) -> None:
    module, _ = wrapped()
    with pytest.raises(ValueError, match="parameter 'weight' takes part in the training of Net"):
        module.head.with_bagua([], GradientAllReduceAlgorithm())
    module(batch(r)).sum().backward()


@on_every_rank(2)
def test_a_parameter_is_free_again_when_its_training_is_forgotten(r: int) -> None:
    head = nn.Linear(3, 2)
    for _ in range(2):
        whole = nn.Sequential(nn.Linear(4, 3), head)
        whole.with_bagua([], GradientAllReduceAlgorithm())
        whole(batch(r)).sum().backward()
        del whole
    head.with_bagua([], GradientAllReduceAlgorithm())


@on_every_process(2)
def test_sharded_modules_are_refused_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded, replicated = Net(), Net()
    fully_shard(sharded, mesh=mesh)
    replicated.head.weight = nn.Parameter(
        distribute_tensor(replicated.head.weight.detach(), mesh, [Replicate()])
    )
    whole = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    for module, message in (
        (sharded, "'body.weight' is a DTensor"),
        (replicated, "'head.weight' is a DTensor"),
        (whole, "FullyShardedDataParallel"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            module.with_bagua(
                [torch.optim.SGD(module.parameters(), lr=0.1)], GradientAllReduceAlgorithm()
            )
