"""Tests of the fused optimizer with wrapping, DDP, gradient scalers and schedulers (S6)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.launch import on_every_process
from tests.trainings import simulate
from torch import Tensor, nn

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    GradientAllReduceAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.contrib import fuse_optimizer
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.slow

Optimizer = torch.optim.Optimizer


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make(name: str, module: nn.Module) -> Any:
    if name == "qadam":
        return QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=3)
    return torch.optim.Adam(module.parameters(), lr=0.01)


def train(
    module: nn.Module, optimizer: Any, rank: int, steps: int, fused: bool, set_to_none: bool
) -> list[Tensor]:
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))
        module(inputs).square().mean().backward()
        if fused and step % 4 != 3:  # sometimes an ordinary step
            optimizer.fuse_step()
        else:
            optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


def wrapped(
    rank: int, name: str, fuse: bool, set_to_none: bool, do_flatten: bool, fuse_first: bool
) -> tuple[list[Tensor], int, int]:
    """Return the weights after 10 steps, the number of fused groups, and the number of weights that
    have moved meanwhile.
    """
    module = network()
    optimizer = make(name, module)
    algorithm: Any
    if name == "qadam":
        algorithm = QAdamAlgorithm(optimizer, hierarchical=False)
    elif name == "async":
        algorithm = Algorithm.init("async", warmup_steps=100)
    elif name in ("local_sgd", "diloco"):
        algorithm = Algorithm.init(name, period=4)
    elif name in ("powersgd", "topk"):
        algorithm = Algorithm.init(name, warmup_steps=2)
    else:
        algorithm = Algorithm.init(name, hierarchical=False)
    if fuse and fuse_first:
        fuse_optimizer(optimizer)
    module.with_bagua([optimizer], algorithm, do_flatten=do_flatten)
    held = [p.data_ptr() for p in module.parameters()]
    if fuse and not fuse_first:
        fuse_optimizer(optimizer)
    with no_warning():
        weights = train(module, optimizer, rank, 10, fuse, set_to_none)
    moved = sum(p.data_ptr() != at for p, at in zip(module.parameters(), held, strict=True))
    return weights, optimizer._bagua_fused_count if fuse else 0, moved


@pytest.mark.parametrize(
    ("name", "do_flatten", "fuse_first", "set_to_none"),
    [
        ("gradient_allreduce", True, True, True),
        ("gradient_allreduce", False, False, False),
        ("decentralized", False, False, False),
        ("decentralized", True, True, True),
        ("qadam", False, True, True),
        ("qadam", True, False, False),
        ("async", True, False, True),
        ("local_sgd", True, True, False),
        ("diloco", True, False, True),
        ("topk", True, False, True),
    ],
)
def test_S6_a_wrapped_module_trains_as_with_the_unfused_optimizer(
    name: str, do_flatten: bool, fuse_first: bool, set_to_none: bool
) -> None:
    def rank(fuse: bool) -> Callable[[Any], Any]:
        def main(comm: Any) -> Any:
            bagua_ref.init_process_group()
            return wrapped(comm.rank(), name, fuse, set_to_none, do_flatten, fuse_first)

        return main

    for (ours, count, moved), (theirs, _, _) in zip(
        SimulatedWorld(2).run(rank(True)), SimulatedWorld(2).run(rank(False)), strict=True
    ):
        for mine, right in zip(ours, theirs, strict=True):
            assert torch.equal(mine, right)
        # Weights that a bucket holds are not moved, and momenta there, after a warm-up of 3 steps,
        # are not stepped as one.
        apart = name == "decentralized" and not do_flatten and not fuse_first
        assert count == (0 if apart else 3 if name == "qadam" else 8)
        assert moved == (6 if name not in ("decentralized", "async") and not fuse_first else 0)


def test_S6_low_precision_decentralized_refuses_a_fused_optimizer() -> None:
    def main(r: int) -> None:
        module = network()
        optimizer = fuse_optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
        module.with_bagua(
            [optimizer], Algorithm.init("low_precision_decentralized", hierarchical=False)
        )

    with pytest.raises(ValueError, match="optimizers hold a fused SGD"):
        simulate(2, main)


def test_S6_gradients_and_momenta_stay_in_their_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "200")

    def main(r: int) -> None:
        module = network()
        optimizer: Any = fuse_optimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        module.with_bagua([optimizer], GradientAllReduceAlgorithm())
        for set_to_none in (True, False, False):
            train(module, optimizer, r, 2, True, set_to_none)
            assert len(module.bagua_buckets) == 2
            assert all(bucket.check_flatten() for bucket in module.bagua_buckets)

        module = network()
        optimizer = make("qadam", module)
        module.with_bagua(
            [optimizer], QAdamAlgorithm(optimizer, hierarchical=False), do_flatten=False
        )
        train(module, optimizer, r, 4, False, True)
        pointers = [optimizer.state[p]["exp_avg"].data_ptr() for p in module.parameters()]
        fuse_optimizer(optimizer)
        train(module, optimizer, r, 2, True, True)
        assert [optimizer.state[p]["exp_avg"].data_ptr() for p in module.parameters()] == pointers

    simulate(2, main)


def ddp(fuse: bool, view: bool, set_to_none: bool) -> tuple[list[Tensor], int]:
    module = network()
    parallel = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=view)
    optimizer: Any = torch.optim.Adam(module.parameters(), lr=0.01)
    if fuse:
        fuse_optimizer(optimizer)
    with no_warning():
        weights = train(parallel, optimizer, torch.distributed.get_rank(), 10, fuse, set_to_none)
    return weights, optimizer._bagua_fused_count if fuse else 8


@on_every_process(2)
def test_S6_torch_ddp_trains_as_with_the_unfused_optimizer() -> None:
    for view in (False, True):
        for set_to_none in (False, True):
            (ours, count), (theirs, _) = ddp(True, view, set_to_none), ddp(False, view, set_to_none)
            assert count == 8
            assert all(map(torch.equal, ours, theirs))


def twins(
    make: Callable[[Any], Optimizer], replace_step: bool = False
) -> tuple[nn.Module, Any, nn.Module, Any]:
    ours, theirs = network(), network()
    return (
        ours,
        fuse_optimizer(make(ours.parameters()), replace_step=replace_step),
        theirs,
        make(theirs.parameters()),
    )


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


@pytest.mark.parametrize("replace", [True, False])
def test_S6_a_grad_scaler_unscales_and_skips_overflows(replace: bool) -> None:
    ours, fused, theirs, plain = twins(
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), replace
    )
    for module, optimizer in ((ours, fused), (theirs, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(8):
            optimizer.zero_grad()
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            if step in (3, 4):
                inputs[0, 0] = torch.inf
            scaler.scale(module(inputs).square().mean()).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1, error_if_nonfinite=False)
            scaler.step(optimizer)
            scaler.update()
            if optimizer is fused and not replace and step == 5:
                fused.fuse_step()
            if optimizer is plain and not replace and step == 5:
                plain.step()
    assert_equal(ours, theirs)
    assert fused._bagua_fused_count == (6 if replace else 1)


def test_S6_learning_rate_schedulers_made_before_fusing_see_fuse_step_as_a_step() -> None:
    def schedule(optimizer: Optimizer) -> Any:  # of momentum, too
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=12)

    ours, theirs = network(), network()
    fused: Any = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    schedulers = schedule(fused), schedule(plain)
    fuse_optimizer(fused)
    with no_warning():  # such as: "lr_scheduler.step() before optimizer.step()"
        for step in range(10):
            train(ours, fused, step, 1, True, True)
            train(theirs, plain, step, 1, False, True)
            for scheduler in schedulers:
                scheduler.step()
            assert fused.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
            assert_equal(ours, theirs)
    assert fused._bagua_fused_count == 10


@pytest.mark.parametrize("before", [True, False])
def test_S6_a_replaced_step_is_fused_whoever_calls_it(before: bool) -> None:
    """A scheduler wraps the method, whether made before or after it is replaced, and hooks run
    once.
    """
    ours, theirs, calls = network(), network(), list[str]()
    fused: Any = torch.optim.Adam(ours.parameters())
    plain = torch.optim.Adam(theirs.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)]
    if not before:
        fuse_optimizer(fused, replace_step=True)
    schedulers.append(torch.optim.lr_scheduler.ExponentialLR(fused, 0.5))
    if before:
        fuse_optimizer(fused, replace_step=True)
    fused.register_step_pre_hook(lambda *_: calls.append("before"))
    fused.register_step_post_hook(lambda *_: calls.append("after"))
    with no_warning():
        for step in range(6):
            for module, optimizer in ((ours, fused), (theirs, plain)):
                inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))

                def loss(
                    module: nn.Module = module,
                    optimizer: Any = optimizer,
                    inputs: torch.Tensor = inputs,
                ) -> torch.Tensor:
                    optimizer.zero_grad()
                    found = module(inputs).square().mean()
                    found.backward()
                    return found

                steps = fused.fuse_step if optimizer is fused and step % 2 else optimizer.step
                expected = loss().detach()
                if step < 3:
                    assert steps(loss) == expected
                else:
                    assert steps() is None
            for scheduler in schedulers:
                scheduler.step()
            assert_equal(ours, theirs)
    assert fused._bagua_fused_count == 6
    assert calls == ["before", "after"] * 6
