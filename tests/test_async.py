"""Tests of asynchronous model averaging: operation, state machine and weight lock (S3.6, S5.6)."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.launch import launch, on_every_process, outcomes
from tests.trainings import FailsInBackward, network, on_every_rank, simulate, weights, wrap
from torch import nn

import bagua_ref
from bagua_ref.algorithms import AsyncModelAverageAlgorithm, GradientAllReduceAlgorithm
from bagua_ref.algorithms.async_rounds import State
from bagua_ref.base.runtime import current_world
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.errors import CommunicationError
from bagua_ref.groups.process_group import _destroy_at_exit


def wrapped(seed: int = 0, **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    module, optimizer = wrap(
        network(seed), AsyncModelAverageAlgorithm(**{"sync_interval_ms": 100, **arguments}), lr=0.05
    )
    return module, optimizer, module.bagua_algorithm


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seconds: float = 0.05) -> None:
    """One training step that takes ``seconds``, half of them inside forward and backward."""
    optimizer.zero_grad()
    loss = module(torch.randn(4, 6)).square().mean()
    current_world().sleep(seconds / 2)
    loss.backward()
    optimizer.step()
    current_world().sleep(seconds / 2)


# The operation.


@on_every_rank(3)
def test_S3_6_all_stop_at_the_same_round_once_all_want_to(r: int) -> None:
    bucket = BaguaBucket([torch.full((4,), float(r)).ensure_bagua_tensor("x")], "0", flatten=True)
    op = bucket.append_asynchronous_model_average_op("all")
    rounds = 0
    while op.get_status() != "stopped":
        if rounds == 2 + r:
            op.abort()
            assert op.get_status() == "stopping"
        bucket.execute()
        rounds += 1
    bucket.execute()  # no longer does anything
    op.reset()
    assert op.get_status() == "running"
    bucket.execute()
    assert (rounds, op.get_status()) == (5, "running")


@on_every_rank(1)
def test_the_operation_is_a_context_manager_for_the_lock(r: int) -> None:
    bucket = BaguaBucket([torch.ones(2).ensure_bagua_tensor("x")], "0", flatten=True)
    op = bucket.append_asynchronous_model_average_op("all")
    with op, op:
        assert op.lock._holds == 2
    assert op.lock._holds == 0
    with pytest.raises(RuntimeError, match="without lock_weight"):
        op.unlock_weight()


@on_every_rank(2)
def test_bad_input_of_the_operation(r: int) -> None:
    flat = BaguaBucket([torch.ones(2).ensure_bagua_tensor("x")], "0", flatten=True)
    with pytest.raises(ValueError, match="peer_selection_mode='shift_one' must be 'all'"):
        flat.append_asynchronous_model_average_op("shift_one")
    with pytest.raises(ValueError, match="needs flatten=True"):
        BaguaBucket(
            [torch.ones(2).ensure_bagua_tensor("x")], "0", flatten=False
        ).append_asynchronous_model_average_op("all")
    with pytest.raises(TypeError, match="int64"):
        BaguaBucket(
            [torch.ones(2, dtype=torch.int64).ensure_bagua_tensor("x")], "0", True
        ).append_asynchronous_model_average_op("all")


# The algorithm.


def test_S5_6_warmup_is_exactly_that_many_steps_of_allreduce_and_rounds_start_at_the_second_forward_after_it() -> (
    None
):
    def rank(r: int) -> list[tuple[bool, State]]:
        module, optimizer, algorithm = wrapped(warmup_steps=3, sync_interval_ms=10_000)
        seen = []
        torch.manual_seed(r)
        for _ in range(6):
            optimizer.zero_grad()
            module(torch.randn(4, 6)).square().mean().backward()
            seen.append(
                (
                    torch.cat([p.grad.reshape(-1) for p in module.parameters()]).clone(),
                    algorithm._rounds.state,
                )
            )
            optimizer.step()
        assert [bucket._async_op for bucket in module.bagua_buckets]
        algorithm.abort(module)
        return seen

    zero, one = simulate(2, rank)
    assert [torch.equal(a, b) for (a, _), (b, _) in zip(zero, one, strict=True)] == [True] * 3 + [
        False
    ] * 3
    assert [state for _, state in zero] == [State.IDLE] * 4 + [State.RUNNING] * 2


@on_every_rank(2)
def test_S5_6_an_interval_of_zero_means_no_rounds(r: int) -> None:
    module, optimizer, algorithm = wrapped(sync_interval_ms=0)
    for _ in range(5):
        step(module, optimizer)
    assert algorithm._rounds.state is State.IDLE
    algorithm.abort(module)
    assert algorithm._rounds.completed == 0


@on_every_rank(2)
def test_S5_6_the_interval_counts_from_the_end_of_a_round(r: int) -> None:
    module, optimizer, algorithm = wrapped(sync_interval_ms=1000)
    for _ in range(2):
        step(module, optimizer, 0)
    started = current_world().now()
    while algorithm._rounds.completed < 4:
        current_world().sleep(0.05)
    elapsed = current_world().now() - started
    algorithm.abort(module)
    assert 3.0 <= elapsed < 4.0


@on_every_rank(2)
def test_S5_6_weights_do_not_change_between_forward_and_the_end_of_backward(r: int) -> None:
    module, optimizer, algorithm = wrapped()
    for _ in range(10):
        optimizer.zero_grad()
        loss = module(torch.randn(4, 6)).square().mean()
        before = weights(module)
        current_world().sleep(0.5)  # many intervals
        assert torch.equal(before, weights(module))
        loss.backward()
        assert torch.equal(before, weights(module))
        optimizer.step()
        current_world().sleep(0.5)
    assert algorithm._rounds.completed > 5
    algorithm.abort(module)


def holds(algorithm: Any) -> int:
    algorithm._holder.collect()  # as a waiting round does
    return sum(op.lock._holds for op in algorithm._rounds.ops)


class BoomError(Exception):
    pass


def drop_exception_in_forward(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    handle = module[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(BoomError()))
    with pytest.raises(BoomError):
        module(torch.randn(4, 6))
    handle.remove()


def drop_exception_in_backward(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(ArithmeticError):
        FailsInBackward.apply(module(torch.randn(4, 6))).sum().backward()


def drop_exception_deep_in_backward(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    handle = module[1].register_forward_hook(
        lambda module, args, output: FailsInBackward.apply(output)
    )
    with pytest.raises(ArithmeticError):
        module(torch.randn(4, 6)).sum().backward()
    handle.remove()


def drop_exception_in_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        raise BoomError

    with pytest.raises(BoomError):
        optimizer.step(closure)


def drop_output_freed(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    output = module(torch.randn(4, 6))
    assert module.bagua_algorithm._rounds.ops[0].lock._holds == 1
    del output


def drop_no_grad(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        module.kept = module(torch.randn(4, 6))


def drop_eval(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.kept = module(torch.randn(4, 6))
    module.eval()
    module.bagua_algorithm._holder.collect()
    assert module.bagua_algorithm._rounds.ops[0].lock._holds == 0
    module.train()


def drop_optimizer_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.kept = module(torch.randn(4, 6))
    optimizer.step()


def drop_closure(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.randn(4, 6)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


DROPS = [function for name, function in sorted(globals().items()) if name.startswith("drop_")]


@pytest.mark.parametrize("drop", DROPS)
@on_every_rank(2)
def test_S5_6_nothing_is_held_whatever_happens_after_a_forward(
    r: int, drop: Callable[..., None]
) -> None:
    module, optimizer, algorithm = wrapped()
    step(module, optimizer)
    drop(module, optimizer)
    gc.collect()
    assert holds(algorithm) == 0
    before = algorithm._rounds.completed
    for _ in range(3):
        step(module, optimizer)
    current_world().sleep(1)
    assert algorithm._rounds.completed > before + 5
    algorithm.abort(module)


@on_every_rank(1)
def test_S5_6_two_forwards_hold_once_and_the_last_one_counts(r: int) -> None:
    module, _, algorithm = wrapped()
    outputs = [module(torch.randn(4, 6)), module(torch.randn(4, 6))]
    assert holds(algorithm) == 1
    sum(output.sum() for output in outputs).backward()
    assert holds(algorithm) == 0


@on_every_rank(3)
def test_S5_6_ranks_may_abort_in_different_phases(r: int) -> None:
    module, optimizer, algorithm = wrapped(warmup_steps=2)
    # rank 0 aborts at the end of warm-up, the others much later
    for _ in range(2 if r == 0 else 30):
        step(module, optimizer)
    algorithm.abort(module)
    for _ in range(3):
        step(module, optimizer)
    assert algorithm._rounds.state is State.ABORTED


@on_every_rank(2)
def test_S5_6_an_abort_in_warmup_leaves_the_allreduce_and_holds_until_resume(
    r: int,
) -> torch.Tensor:
    module, optimizer, algorithm = wrapped(warmup_steps=4)
    torch.manual_seed(r)
    step(module, optimizer)
    algorithm.abort(module)
    for _ in range(3):
        step(module, optimizer)
    warm = weights(module)
    for _ in range(5):
        step(module, optimizer)
    assert algorithm._rounds.completed == 0
    return warm


@on_every_rank(2)
def test_wrapping_anew_stops_the_rounds_and_the_new_algorithm_works(r: int) -> torch.Tensor:
    module, optimizer, old = wrapped()
    torch.manual_seed(r)
    for _ in range(5):
        step(module, optimizer)
    current_world().sleep(0.2 * r)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    assert old._rounds.state is State.ABORTED
    assert old._rounds._thread is None
    for _ in range(3):
        step(module, optimizer)
    return weights(module)


@on_every_rank(2)
def test_a_failed_wrapping_takes_the_rounds_up_again(r: int) -> None:
    module, optimizer, algorithm = wrapped()
    step(module, optimizer)
    with pytest.raises(ValueError, match="do_flatten=False"):
        module.with_bagua([optimizer], AsyncModelAverageAlgorithm(), do_flatten=False)
    for _ in range(4):
        step(module, optimizer)
    assert algorithm._rounds.state is State.RUNNING
    algorithm.abort(module)


def test_a_run_may_end_without_abort() -> None:
    def rank(r: int) -> State:
        module, optimizer, algorithm = wrapped()
        for _ in range(4):
            step(module, optimizer)
        return algorithm._rounds.state

    before = set(threading.enumerate())
    assert simulate(3, rank) == [State.RUNNING] * 3
    assert set(threading.enumerate()) <= before


@on_every_rank(2)
def test_S5_6_a_failed_round_is_raised_on_the_training_thread_once(r: int) -> None:
    module, optimizer, algorithm = wrapped()
    for _ in range(3):
        step(module, optimizer)

    def explode(flat: Any) -> None:
        raise BoomError("in a round")

    module.bagua_buckets[0]._ops.insert(0, explode)
    current_world().sleep(1)
    with pytest.raises(
        CommunicationError,
        match=r"asynchronous averaging stopped in round \d+: BoomError: in a round",
    ):
        step(module, optimizer)
    step(module, optimizer)
    assert algorithm._rounds.state is State.ABORTED
    assert holds(algorithm) == 0


@on_every_rank(2)
def test_copies_of_the_module_hold_nothing(r: int) -> None:
    module, optimizer, algorithm = wrapped()
    step(module, optimizer)
    other = copy.deepcopy(module)
    other(torch.randn(4, 6))
    assert holds(algorithm) == 0
    assert module.bagua_train_step_counter == 1
    algorithm.abort(module)


@on_every_rank(2)
def test_S5_6_buckets_are_made_anew_only_when_the_warm_up_ends(r: int) -> None:
    module, optimizer, algorithm = wrapped(warmup_steps=2)
    resets = []
    reset = module._bagua.reset
    module._bagua.reset = lambda: (resets.append(module.bagua_train_step_counter), reset())
    for _ in range(5):
        step(module, optimizer)
    algorithm.abort(module)
    assert len(resets) == 1


@pytest.mark.parametrize("scheduled", [False, True])
@on_every_rank(1)
def test_wrapping_anew_leaves_the_optimizers_step_as_it_was(r: int, scheduled: bool) -> None:
    """A learning rate scheduler also replaces the optimizer's step."""

    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)] if scheduled else []
    before = vars(optimizer).get("step")
    module.with_bagua([optimizer], AsyncModelAverageAlgorithm())
    assert vars(optimizer)["step"] is not before
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    assert vars(optimizer).get("step") is before
    module.with_bagua([optimizer], AsyncModelAverageAlgorithm())
    schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    step(module, optimizer)
    for scheduler in schedulers:
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5 ** len(schedulers)
    module.with_bagua([optimizer], GradientAllReduceAlgorithm())
    step(module, optimizer)


def test_a_forgotten_module_takes_its_thread_along_without_waiting_for_the_interval() -> None:
    bagua_ref.init_process_group()
    module, optimizer, algorithm = wrapped(sync_interval_ms=600_000)
    for _ in range(2):
        step(module, optimizer, 0)
    thread = algorithm._rounds._thread
    while not algorithm._rounds.completed:
        time.sleep(0.01)
    del module, optimizer, algorithm
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    bagua_ref.destroy_process_group()


@on_every_rank(2)
def test_S5_6_abort_and_resume_take_the_module_under_both_of_its_names(r: int) -> None:
    module, _, algorithm = wrapped()
    states = []
    for name in ("bagua_ddp", "bagua_module"):
        for method in (algorithm.abort, algorithm.resume):
            with pytest.raises(ValueError, match="NoneType is not the module"):
                method()
            with pytest.raises(
                ValueError, match="Linear is not the module that this algorithm trains"
            ):
                method(**{name: nn.Linear(2, 2)})
            method(**{name: module if name == "bagua_module" else module._bagua})
            states.append(algorithm._rounds.state)
    assert states == [State.ABORTED, State.IDLE] * 2


# Real processes.


@pytest.mark.slow
@on_every_process(2, limit=60)
def test_S5_6_a_process_may_end_without_abort() -> None:
    module, optimizer, algorithm = wrapped(sync_interval_ms=1)
    deadline = time.monotonic() + 20
    while algorithm._rounds.completed < 3 and time.monotonic() < deadline:
        step(module, optimizer, 0)
    assert algorithm._rounds.completed >= 3


def ends_while_averaging(interval: float, ending: str) -> int:
    """Train two steps on rank 0 and forty on rank 1, leave the loop as the quick start does, and
    end.
    """
    module, optimizer, algorithm = wrapped(sync_interval_ms=interval)
    for _ in range(40 if (rank := bagua_ref.get_rank()) else 2):
        step(module, optimizer, 0.01)
    rounds = algorithm._rounds
    while rounds.completed < (3 if interval == 1 else 1) and rank == 0:
        step(module, optimizer, 0)
    if ending == "drops the module":
        del module, optimizer, algorithm
        gc.collect()
    output = module(torch.randn(4, 6)) if ending == "holds weights" else None  # as long as it lives
    if ending == "interpreter":
        _destroy_at_exit(current_world(), os.getpid())
    else:
        bagua_ref.destroy_process_group()
    assert not bagua_ref.is_initialized()
    assert rounds.state is State.ABORTED
    del output
    return rounds.completed


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["destroys", "holds weights", "interpreter", "drops the module"])
def test_S5_6_averaging_ends_with_the_process_group_once_every_rank_ends(ending: str) -> None:
    few, many = launch(ends_while_averaging, 2, 1, ending, limit=60)
    assert few == many > 2


@pytest.mark.slow
def test_S5_6_averaging_that_waits_for_a_long_interval_ends_with_the_process_group() -> None:
    assert launch(ends_while_averaging, 2, 600_000, "destroys", limit=60)[0] >= 1


def destroys_alone() -> str:
    module, optimizer, _algorithm = wrapped(sync_interval_ms=1)
    for _ in range(5):
        step(module, optimizer, 0.01)
    if bagua_ref.get_rank() == 1:
        os._exit(0)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bagua_ref.algorithms").addHandler(handler)
    bagua_ref.destroy_process_group()
    assert not bagua_ref.is_initialized()
    return said[0]


@pytest.mark.slow
def test_S5_6_the_warning_of_a_rank_that_ends_alone_says_what_to_call() -> None:
    survivor, _ = outcomes(destroys_alone, 2, collective_timeout=5, limit=60)
    assert survivor.result.endswith(
        "Every rank must call model.bagua_algorithm.abort(model), or end by destroy_process_group()"
    )


def loses_a_peer() -> str:
    module, optimizer, _algorithm = wrapped(sync_interval_ms=1)
    for _ in range(5):
        step(module, optimizer, 0.01)
    if bagua_ref.get_rank() == 1:
        os._exit(3)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            step(module, optimizer, 0.01)
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_S5_6_a_rank_that_dies_makes_the_others_raise() -> None:
    survivor, dead = outcomes(loses_a_peer, 2, collective_timeout=5, limit=60)
    assert dead.exitcode == 3
    assert "asynchronous averaging stopped in round" in (survivor.result or ""), survivor
