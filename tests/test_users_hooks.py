"""Tests that hooks of the user on a parameter act before its gradient is reduced, whichever was
registered first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch import on_every_process
from tests.trainings import on_every_rank
from tests.trainings import small_batch as batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import bagua_ref
from bagua_ref.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua_ref.base.runtime import current_world
from bagua_ref.data_parallel import DistributedDataParallel

Hook = Callable[[Any], None]


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = (
                layer(x)
                if self.reentrant is None
                else checkpoint(layer, x, use_reentrant=self.reentrant)
            )
            x = x.tanh()
        return x


def scale(parameter: torch.Tensor) -> None:
    """Differs between ranks, so that it matters whether it comes before the mean."""
    assert parameter.grad is not None
    current_world().sleep(1e-3)  # so that the worker would run if there were anything to do
    parameter.grad.mul_(2 if parameter.grad.flatten()[0] > 0 else -3)


def clamp(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-2, 1e-2)


def replace(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.abs() * 2


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


HOOKS = (scale, clamp, replace, drop)


def register(module: nn.Module, hook: Hook, which: slice = slice(None)) -> None:
    for parameter in list(module.parameters())[which]:
        parameter.register_post_accumulate_grad_hook(hook)


def backward(module: nn.Module, rank: int) -> list[torch.Tensor | None]:
    dtype = next(module.parameters()).dtype
    module(batch(rank).to(dtype).requires_grad_()).square().sum().backward()
    return [p.grad for p in module.parameters()]


def mean_of_hooked(hook: Hook, make: Callable[[], nn.Module] = Net) -> list[torch.Tensor]:
    """Return the mean over ranks of the gradients that the hook leaves, zero where it leaves
    none.
    """
    found = []
    for rank in range(2):
        module = make()
        register(module, hook)
        zeros = [torch.zeros_like(p) for p in module.parameters()]
        found.append(
            [
                zero if g is None else g
                for zero, g in zip(zeros, backward(module, rank), strict=True)
            ]
        )
    return [(a + b) / 2 for a, b in zip(*found, strict=True)]


def check(found: list[Any], hook: Hook, make: Callable[[], nn.Module] = Net) -> None:
    for mine, expected in zip(found, mean_of_hooked(hook, make), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(("do_flatten", "hook"), [(True, scale), (False, drop)])
@pytest.mark.parametrize("order", ["before", "after", "both"])
@pytest.mark.parametrize("form", ["with_bagua", "wrapper", "train"])
@on_every_rank(2)
def test_a_hook_acts_before_the_reduction(
    r: int, form: str, order: str, do_flatten: bool, hook: Hook
) -> None:
    def wrap(module: nn.Module) -> Any:
        if form == "wrapper":
            return DistributedDataParallel(module, gradient_as_bucket_view=do_flatten)
        if form == "with_bagua":
            return module.with_bagua([], GradientAllReduceAlgorithm(), do_flatten=do_flatten)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return bagua_ref.train(
            module, [optimizer], GradientAllReduceAlgorithm(), do_flatten=do_flatten
        )

    module, seen = Net(), []
    first = module.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append("first"))
    if order != "after":
        register(module, hook, slice(0, 6 if order == "before" else 3))
    if order == "both":
        removed = module.first.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append("removed")
        )
    wrapped = wrap(module)
    if form == "train":
        wrapped.__enter__()
    if order != "before":
        later = module.first.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append("last")
        )
        register(module, hook, slice(0 if order == "after" else 3, 6))
        later.remove()
    if order == "both":
        removed.remove()
    found = [None if g is None else g.clone() for g in backward(module, r)]
    if form == "train":
        wrapped.__exit__(None, None, None)
    first.remove()
    backward(module, r)
    assert seen == ["first"]
    check(found, hook)


def _frozen_and_back(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False).requires_grad_(True)


def _wrapped_again(module: nn.Module) -> None:
    module.with_bagua([], Algorithm.init("gradient_allreduce"))  # type: ignore[operator]


def _in_another_dtype(module: nn.Module) -> None:
    _wrapped_again(module.double())


@pytest.mark.parametrize(
    ("change", "reentrant"),
    [
        (lambda module: None, True),
        (lambda module: None, False),
        (_frozen_and_back, None),
        (_wrapped_again, True),
        (_in_another_dtype, None),
    ],
)
@pytest.mark.parametrize("late", [False, True])
@on_every_rank(2)
def test_it_does_so_too_after_changes_and_in_checkpoints(
    r: int, late: bool, change: Any, reentrant: bool | None
) -> None:
    module = Net(reentrant).with_bagua(
        [], GradientAllReduceAlgorithm(), do_flatten=change is not _in_another_dtype
    )
    if not late:
        register(module, scale)
    change(module)
    if late:
        register(module, scale)
    found = backward(module, r)
    check(found, scale, lambda: Net().to(module.first.weight.dtype))


@on_every_rank(2)
def test_a_hook_registered_between_forward_and_backward_or_by_a_hook_acts_before_the_reduction(
    r: int,
) -> None:
    module = Net().with_bagua([], GradientAllReduceAlgorithm())
    once: list[Any] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: (
                once.append(p.register_post_accumulate_grad_hook(scale)) if len(once) < 6 else None
            )
        )
    backward(module, r)  # the hooks that this registers act from the next backward pass on
    module.zero_grad()
    found = backward(module, r)
    for handle in once:
        handle.remove()
    module.zero_grad()
    loss = module(batch(r)).square().sum()
    register(module, clamp)
    loss.backward()
    first, second = [
        [g.clone() for g in found if g is not None],
        [p.grad for p in module.parameters()],
    ]
    check(second, clamp)
    assert len(first) == 6


@pytest.mark.slow
@on_every_process(2, over_gloo=True)
def test_hooks_of_torchs_class_act_as_here() -> None:
    rank = bagua_ref.get_rank()
    for hook in HOOKS:
        for after in (False, True):
            found = []
            for wrap in (TorchDDP, DistributedDataParallel):
                module = Net()
                if not after:
                    register(module, hook)
                wrapped = wrap(module)
                if after:
                    register(module, hook)
                backward(wrapped, rank)
                found.append([p.grad for p in module.parameters()])
            torch.testing.assert_close(found[0], found[1])
            check(found[1], hook)


@pytest.mark.proof
@on_every_process(2)
def test_hooks_of_a_compiled_module_act_before_the_reduction() -> None:
    for form in ("module", "method", "before"):
        torch._dynamo.reset()
        module: Any = Net()
        if form == "before":
            module = torch.compile(module, backend="aot_eager")
        module.with_bagua([], GradientAllReduceAlgorithm())
        if form == "module":
            called = torch.compile(module, backend="aot_eager")
        else:
            called = module
        if form == "method":
            module.compile(backend="aot_eager")
        backward(called, bagua_ref.get_rank())
        register(called, scale)
        called.zero_grad()
        check(backward(called, bagua_ref.get_rank()), scale)


@pytest.mark.slow
@on_every_process(4)
def test_hooks_of_a_sharded_module_act_before_the_reduction() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module: Any = Net()
    for layer in (module.first, module.second):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    order: list[str] = []
    module.with_bagua([], GradientAllReduceAlgorithm(), mesh["replicate"])
    before = {name: 0 for name, _ in module.named_parameters()}
    scaled = {}
    for name, parameter in module.named_parameters():

        def hook(p: Any, name: str = name) -> None:
            order.append(name)
            p.grad.to_local().mul_(1 + dist.get_rank() // 2)
            scaled[name] = p.grad.to_local().clone()

        parameter.register_post_accumulate_grad_hook(hook)
    module(batch(dist.get_rank())).square().sum().backward()
    assert sorted(order) == sorted(before)
    for name, parameter in module.named_parameters():
        expected = scaled[name]
        dist.all_reduce(expected, group=mesh["replicate"].get_group())
        torch.testing.assert_close(parameter.grad.to_local(), expected / 2)
