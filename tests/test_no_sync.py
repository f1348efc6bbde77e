"""Tests that a forward pass decides whether its backward pass is synchronized (S5), whatever other
passes come between.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.launch import on_every_process
from tests.trainings import FailsInBackward, by_name, on_every_rank, simulate, weights, wrap
from tests.trainings import small_batch as batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import bagua_ref
from bagua_ref.algorithms import Algorithm, AsyncModelAverageAlgorithm, GradientAllReduceAlgorithm
from bagua_ref.data_parallel import DistributedDataParallel

ALGORITHMS = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "decentralized": {},
    "low_precision_decentralized": {},
    "qadam": {},
    "local_sgd": {"period": 1},
    "diloco": {"period": 1},
    "powersgd": {"warmup_steps": 1},
    "topk": {"warmup_steps": 1},
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


def mean_gradients(losses: Callable[[Net, int], list[torch.Tensor]]) -> list[torch.Tensor]:
    module = Net()
    for rank in range(2):
        (sum(losses(module, rank)) / 2).backward()  # type: ignore[union-attr]
    return gradients(module)


def around(module: Any, x: torch.Tensor) -> torch.Tensor:
    return loss_of(checkpoint(module, x.requires_grad_(), use_reentrant=True))


def both(
    module: Any, rank: int, first_no_sync: bool, whole: bool = True, in_checkpoint: bool = False
) -> list[torch.Tensor]:
    """Return the losses of a forward pass outside `no_sync` and of one inside, in either order."""

    def synchronized() -> torch.Tensor:
        return around(module, batch(rank)) if in_checkpoint else loss_of(module(batch(rank), whole))

    def local() -> torch.Tensor:
        with module.no_sync() if hasattr(module, "bagua_algorithm") else nullcontext():
            return loss_of(module(batch(rank, 1)))

    return [local(), synchronized()] if first_no_sync else [synchronized(), local()]


@pytest.mark.parametrize(
    ("first_no_sync", "in_checkpoint"), [(False, False), (True, False), (True, True)]
)
def test_S5_a_backward_pass_of_a_forward_pass_under_no_sync_stays_local_and_the_other_one_reduces_both(
    first_no_sync: bool, in_checkpoint: bool
) -> None:
    def rank(r: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        module = Net().with_bagua([], GradientAllReduceAlgorithm())
        losses = both(module, r, first_no_sync, in_checkpoint=in_checkpoint)
        local, synchronized = losses if first_no_sync else losses[::-1]
        local.backward()
        before = gradients(module)
        synchronized.backward()
        return before, gradients(module)

    (before, after), (other_before, other_after) = simulate(2, rank)
    assert not any(map(torch.equal, before, other_before))
    assert all(map(torch.equal, after, other_after))
    torch.testing.assert_close(after, mean_gradients(lambda module, r: both(module, r, True)))


@pytest.mark.parametrize("first_no_sync", [False, True])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd", "decentralized"])
def test_S5_a_backward_pass_that_reaches_both_is_synchronized_whole(
    algorithm: str, first_no_sync: bool
) -> None:
    # If the forward pass under no_sync came last, the gradients of the second half, which the other
    # one does not use, arrive first.
    def rank(r: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        model, optimizer = wrapped(algorithm, wrapper=False)
        sum(both(model, r, first_no_sync, whole=False)).backward()  # type: ignore[union-attr]
        found = gradients(model)
        optimizer.step()
        return found, weights(model)

    (found, first), (other, second) = simulate(2, rank)
    if algorithm != "decentralized":
        assert torch.equal(first, second)
    if algorithm == "gradient_allreduce":
        assert all(map(torch.equal, found, other))
        torch.testing.assert_close(
            found, mean_gradients(lambda module, r: both(module, r, True, whole=False))
        )


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


@pytest.mark.parametrize("before", [nothing, without_gradients])
@pytest.mark.parametrize("no_sync", [False, True])
def test_S5_a_reentrant_checkpoint_around_the_module_is_one_training_forward_pass(
    no_sync: bool, before: Any
) -> None:
    def rank(r: int) -> tuple[list[list[torch.Tensor]], int]:
        module, _ = wrapped("gradient_allreduce", wrapper=False)
        seen = []
        for step in range(2):  # without an optimizer step between
            if step == 0:
                before(module, batch(r, 50))
                loss_of(module(batch(r, 60))).backward()
            with module.no_sync() if no_sync else nullcontext():
                output = checkpoint(module, batch(r, step).requires_grad_(), use_reentrant=True)
                module.zero_grad()
                loss_of(output).backward()
            seen.append(gradients(module))
        return seen, module.bagua_train_step_counter

    (first, steps), (second, _) = simulate(2, rank)
    assert steps == 3
    for found, other in zip(first, second, strict=True):
        assert any(map(torch.equal, found, other)) != no_sync


@on_every_rank(2)
def test_S5_a_forward_pass_without_gradients_counts_no_step_and_sends_nothing(r: int) -> None:
    module = Net()
    module.register_buffer("extra", torch.zeros(1))
    model = DistributedDataParallel(module, algorithm=Algorithm.init("decentralized"))
    sent = model.bagua_metrics()["bytes_sent"]
    for _ in range(3):
        without_gradients(model, batch(r))
    assert (model.bagua_train_step_counter, model.bagua_metrics()["bytes_sent"] - sent) == (0, 0)


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


@on_every_rank(2)
def test_S5_what_a_backward_pass_has_reached_is_forgotten_at_its_end_though_an_engines_thread_may_still_hold_it(
    r: int,
) -> None:
    module = Net().with_bagua([], GradientAllReduceAlgorithm())
    held: list[Any] = []
    handle = module.first.weight.register_post_accumulate_grad_hook(
        lambda p: held.append(module._bagua._passes.reached)
    )
    loss_of(module(batch(r))).backward()
    assert held[0].synchronized
    assert module._bagua._passes.reached is None
    handle.remove()


@on_every_rank(1)
def test_S5_a_backward_pass_that_failed_half_way_does_not_disturb_a_reentrant_checkpoint_around_the_module(
    r: int,
) -> None:
    module, alone = Net().with_bagua([], GradientAllReduceAlgorithm()), Net()
    x = FailsInBackward.apply(batch(r).requires_grad_())  # type: ignore[no-untyped-call]
    with pytest.raises(ArithmeticError):
        loss_of(module(x)).backward()
    module.zero_grad()
    around(module, batch(r)).backward()
    assert module.bagua_train_step_counter == 2
    loss_of(alone(batch(r))).backward()
    torch.testing.assert_close(gradients(module), gradients(alone))


@on_every_rank(2)
def test_S5_a_backward_pass_that_failed_leaves_nothing_to_the_next_one(
    r: int,
) -> list[torch.Tensor]:
    module = Net().with_bagua([], GradientAllReduceAlgorithm())
    with module.no_sync():
        x = FailsInBackward.apply(batch(r).requires_grad_())  # type: ignore[no-untyped-call]
        failing = loss_of(module(x))
    synchronized = loss_of(module(batch(r, 1)))
    with pytest.raises(ArithmeticError):
        failing.backward()
    module.zero_grad()
    synchronized.backward()
    torch.testing.assert_close(
        gradients(module), mean_gradients(lambda module, r: [loss_of(module(batch(r, 1)))])
    )
    return gradients(module)
