"""Properties that every algorithm has in the life of a training: restarts, accumulation, dtypes,
wrapping again, gloo, options.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import re
import threading
import weakref
from typing import Any

import pytest
import torch
from tests.algorithms import CASES, Run, assert_same, model
from tests.trainings import batch, simulate, weights
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm, AlgorithmImpl, GradientAllReduceAlgorithm
from bagua_ref.conformance import EXACT, assert_equal

pytestmark = pytest.mark.filterwarnings(
    "ignore:qadam freezes v:UserWarning", "ignore:no QAdamAlgorithm renews:UserWarning"
)
STEPS = 7
LAST = {re.split("[ ,]", name)[0]: name for name in CASES}.values()
"""One case of each algorithm, with most of what it can keep: for properties that do not depend on
its options.
"""
ALONE = [name for name in LAST if CASES[name].takes((1,))]


def every(**needed: bool) -> pytest.MarkDecorator:
    """Return a parametrization by the last case of each algorithm among those with these
    attributes.
    """
    names = [
        name
        for name, case in CASES.items()
        if all(getattr(case, key) is value for key, value in needed.items())
    ]
    return pytest.mark.parametrize(
        "name", {re.split("[ ,]", name)[0]: name for name in names}.values()
    )


def on_ranks(name: str, function: Any, **options: Any) -> list[Any]:
    """Return the results of ``function(rank)``; where all ranks have the same weights, results must
    be equal.
    """
    results = simulate(sum(CASES[name].nodes), function, **{"nodes": CASES[name].nodes, **options})
    if CASES[name].replicated:
        for result in results:
            assert_same(result, results[0])
    return results


def trained(name: str, **options: Any) -> list[torch.Tensor]:
    """Return each rank's weights after all steps."""

    def rank(r: int) -> torch.Tensor:
        run = Run(name, **options)
        run.step(*range(STEPS))
        return run.weights()

    return on_ranks(name, rank)


undisturbed = functools.cache(trained)


def on_its_ranks(test: Any) -> Any:
    """Run a test on every rank of an algorithm; the weights that it returns, if any, must be those
    of an undisturbed training.
    """

    def run(name: str) -> None:
        results = on_ranks(name, lambda r: test(r, name))
        if results[0] is not None:
            assert_same(results, undisturbed(name))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# Restarts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name not in LAST)) for name in CASES]
)
def test_a_restart_at_any_step_equals_an_undisturbed_run_to_the_bit(name: str) -> None:
    do_flatten = list(CASES).index(name) % 2 == 0  # in turn, so that both occur with each algorithm
    dtype = torch.float32 if do_flatten else torch.bfloat16

    def rank(r: int) -> None:
        run = Run(name, model(r, dtype), do_flatten=do_flatten)
        saved, files = [run.state()], []
        for number in range(STEPS):
            files.append(io.BytesIO())
            torch.save(saved[-1], files[-1])
            run.step(number)
            saved.append(run.state())
        untouched = Run(name, model(r, dtype), do_flatten=do_flatten)
        untouched.step(*range(STEPS))
        assert_same(untouched.state(), saved[-1])  # saving changes nothing
        for at in range(STEPS):
            files[at].seek(0)
            state = torch.load(files[at], weights_only=True)
            assert_same(saved[at], state)  # training changes nothing of what was saved
            if at % 2 == do_flatten:
                continue
            early = CASES[name].replicated and at % 4 > 1
            again = Run(
                name, model(77, dtype), before=state if early else None, do_flatten=do_flatten
            )
            if not early:
                again.step(90)  # a script may have trained before it loads
            again.load(state)
            again.step(*range(at, min(at + 3, STEPS)))
            assert_same(again.state(), saved[min(at + 3, STEPS)])
            assert_same(state[2], saved[at][2])  # training shares nothing with what was loaded

    simulate(sum(CASES[name].nodes), rank, nodes=CASES[name].nodes)


@every(memory=True)
def test_memories_of_another_rank_are_refused_by_name_unless_they_are_dropped(name: str) -> None:
    def save(r: int) -> Any:
        run = Run(name)
        run.step(*range(4))
        return run.state()

    (saved, *_) = simulate(3, save)

    def rank(r: int) -> torch.Tensor:
        run = Run(name)
        before = run.algorithm.state_dict()
        with pytest.raises(
            ValueError,
            match=f"memories of rank 0 of 3, and this is rank {r} of 2: .*drop_local=True",
        ):
            run.algorithm.load_state_dict(saved[2])
        assert_same(run.algorithm.state_dict(), before)
        run.module.load_state_dict(saved[0])
        run.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        run.algorithm.load_state_dict(saved[2], drop_local=True)
        assert not any(memory.any() for memory in memories(run))
        run.step(4, 5)
        if not name.startswith("diloco"):
            return run.weights()
        with run.algorithm.global_weights():
            return run.weights()

    ours, theirs = simulate(2, rank)
    assert_equal(ours, theirs, EXACT)


def memories(run: Run) -> list[torch.Tensor]:
    """Return what this rank remembers."""
    kept = run.algorithm.state_dict()["memories"]
    return (
        [b[key] for b in kept for key in ("worker", "server")]
        if isinstance(kept, list)
        else list(kept.values())
    )


# Passes


@every()
def test_gradients_accumulate_under_no_sync_and_nothing_else_happens(name: str) -> None:
    def rank(r: int, at_once: bool) -> torch.Tensor:
        run = Run(name)
        run.step(*range(STEPS // 2))
        run.optimizer.zero_grad()
        if at_once:
            (run.loss(50) + run.loss(51)).backward()
        else:
            alone, before, sent = (
                copy.deepcopy(run.module),
                run.state(),
                run.module.bagua_metrics()["bytes_sent"],
            )
            with run.module.no_sync():
                run.loss(50).backward()
            alone(batch(r, 50)).square().mean().backward()
            assert_same(
                [p.grad for p in run.module.parameters()], [p.grad for p in alone.parameters()]
            )
            assert_same(run.state(), before)
            assert run.module.bagua_metrics()["bytes_sent"] == sent
            run.loss(51).backward()
        run.optimizer.step()
        return run.weights()

    in_turn, at_once = (
        on_ranks(name, lambda r, both=both: rank(r, both)) for both in (False, True)
    )
    if CASES[name].replicated:  # others average weights in forward passes
        # rounding may decide on a chunk's levels
        torch.testing.assert_close(in_turn, at_once, atol=2e-3, rtol=0)


@every()
@on_its_ranks
def test_a_closure_that_runs_the_backward_pass_changes_nothing(r: int, name: str) -> torch.Tensor:
    run = Run(name)
    for number in range(STEPS):

        def closure(number: int = number) -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(number)
            loss.backward()
            return loss

        assert run.optimizer.step(closure).isfinite()  # type: ignore[union-attr]
    return run.weights()


@every(counts=True)
@on_its_ranks
def test_a_step_that_no_backward_pass_preceded_counts_as_none(r: int, name: str) -> torch.Tensor:
    run = Run(name)
    for number in range(STEPS):
        run.step(number)
        run.optimizer.zero_grad()
        if r or number % 2:  # also on some ranks alone
            run.optimizer.step()
    assert run.module._bagua.steps_of_optimizers == [STEPS]
    return run.weights()


@every(undone=True)
def test_a_step_that_a_grad_scaler_skips_is_as_if_it_had_never_been(name: str) -> None:
    def rank(r: int, spoiled: int | None) -> list[Any]:
        run, scaler = Run(name), bagua_ref.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        if name.startswith("qadam"):
            run.algorithm.grad_scaler = scaler
        for number in range(STEPS):
            for overflows in (True, False) if number == spoiled else (False,):
                run.optimizer.zero_grad()
                scaler.scale(
                    run.loss(number) * (torch.inf if overflows and r == 1 else 1.0)
                ).backward()
                scaler.step(run.optimizer)
                scaler.update(4.0)
        state = run.state()
        state[2].pop("rounds", None)  # which counts what was sent
        return state

    ranks, nodes = sum(CASES[name].nodes), CASES[name].nodes
    never, *skipped = (
        simulate(ranks, lambda r, at=at: rank(r, at), nodes=nodes) for at in (None, 1, 5)
    )
    for found in skipped:
        assert_same(found, never)


# Parameters


class Odd(nn.Module):
    """Has weights that are tied, frozen, and ignored, of which the last are trained by each rank
    alone.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.tied, self.frozen, self.ignored = (nn.Linear(6, 6) for _ in range(4))
        self.tied.weight = self.used.weight
        self.frozen.requires_grad_(False)
        self._bagua_params_and_buffers_to_ignore, self._ddp_params_and_buffers_to_ignore = (
            ["ignored.weight"],
            ["ignored.bias"],
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.tied(self.frozen(self.used(x))), self.ignored(x)])


@every()
def test_frozen_ignored_and_tied_parameters(name: str) -> None:
    def rank(r: int) -> Any:
        run, alone = Run(name, Odd()), Odd()
        still = copy.deepcopy(run.module.frozen.state_dict())
        own, plain = (torch.optim.SGD(m.ignored.parameters(), lr=0.1) for m in (run.module, alone))
        for number in range(STEPS):
            for m, optimizer in ((run.module, own), (alone, plain)):
                optimizer.zero_grad()
                run.optimizer.zero_grad()
                m(batch(r, number)).square().mean().backward()
                optimizer.step()
                if m is run.module:
                    run.optimizer.step()
        assert_same(run.module.ignored.state_dict(), alone.ignored.state_dict())
        assert_same(run.module.frozen.state_dict(), still)
        assert run.module.frozen.weight not in run.optimizer.state
        names = [
            t.bagua_backend_tensor().name
            for bucket in run.module.bagua_buckets
            for t in bucket.tensors
        ]
        assert len(set(names)) == len(names)
        assert set(names) <= {"tied.bias", "used.bias", "used.weight", "tied.weight"}
        return run.module.used.state_dict()

    on_ranks(name, rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@every()
def test_other_dtypes_train_or_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    def rank(r: int) -> torch.Tensor:
        run = Run(name, model(0, dtype))
        run.step(*range(STEPS))
        momenta = [
            value
            for state in run.optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        ]
        assert {value.dtype for value in momenta} == {dtype}
        return run.weights()

    if dtype is torch.float64 and not CASES[name].float64:
        with pytest.raises(TypeError, match=r"(parameter|bucket) '.*float64"):
            on_ranks(name, rank)
    else:
        for found in on_ranks(name, rank):
            assert found.dtype is dtype
            assert found.isfinite().all()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name not in LAST)) for name in CASES]
)
def test_the_default_dtype_changes_nothing(name: str) -> None:
    models = [model(r) for r in range(sum(CASES[name].nodes))]

    def rank(r: int) -> Any:
        run = Run(name, models[r])
        run.step(*range(STEPS))
        state = run.algorithm.state_dict()
        state.pop("outer_optimizers", None)  # torch counts steps in the default dtype
        return run.weights(), state

    expected = simulate(len(models), rank, nodes=CASES[name].nodes)
    models = [model(r) for r in range(len(models))]
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(simulate(len(models), rank, nodes=CASES[name].nodes), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# Buckets


@every()
def test_the_size_of_buckets_changes_only_what_shares_a_chunk(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = undisturbed(name)
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "1")
    for mine, wanted in zip(trained(name), together, strict=True):
        assert CASES[name].compresses or torch.equal(mine, wanted)
        assert mine.isfinite().all()


@every(kept=True)
@on_its_ranks
def test_what_is_kept_survives_new_buckets_of_the_same_tensors(r: int, name: str) -> torch.Tensor:
    run = Run(name)
    run.step(*range(STEPS // 2))
    run.module._bagua.reset()
    run.step(*range(STEPS // 2, STEPS))
    return run.weights()


@every(flat=False)
def test_a_bucket_that_is_not_flat_changes_nothing(name: str) -> None:
    for mine, wanted in zip(trained(name, do_flatten=False), undisturbed(name), strict=True):
        assert_equal(mine, wanted, EXACT)


# Modules


class _Refusing(AlgorithmImpl):
    def init_operations(self, ctx: Any, bucket: Any) -> None:
        bucket.append_centralized_synchronous_op(compression="zip")


class Refusing(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return _Refusing(process_group)


@every()
def test_wrapping_again_replaces_the_algorithm_and_a_failed_attempt_does_not(name: str) -> None:
    def rank(r: int) -> torch.Tensor:
        run = Run(name)
        run.step(*range(4))
        with pytest.raises(ValueError, match="compression='zip'"):
            run.module.with_bagua([run.optimizer], Refusing())
        run.step(*range(4, STEPS))
        found = run.weights()
        old = run.module._bagua
        run.module.with_bagua(
            [sgd := torch.optim.SGD(run.module.parameters(), lr=0.1)], GradientAllReduceAlgorithm()
        )
        run.optimizer, optimizer = sgd, run.optimizer
        run.step(0, 1)
        with pytest.raises(AssertionError):
            assert_same(run.weights(), found)
        assert (old.bagua_train_step_counter, run.module.bagua_train_step_counter) == (STEPS, 2)
        run.optimizer = optimizer
        run.wrap()
        run.step(2, 3, 4)
        return found

    found = on_ranks(name, rank)
    if CASES[name].replicated:  # each attempt broadcasts the first rank's weights
        assert_same(found, undisturbed(name))


@every()
@on_its_ranks
def test_two_modules_keep_states_of_their_own(r: int, name: str) -> torch.Tensor:
    one, other = Run(name), Run(name)
    assert torch.equal(one.weights(), weights(model(0)))  # the first rank's
    for number in range(STEPS):
        one.step(number)
        other.step(30 + number)
    return one.weights()


@every()
@on_its_ranks
def test_a_copy_or_pickle_of_the_module_is_an_ordinary_module(r: int, name: str) -> None:
    run = Run(name)
    run.step(*range(3))
    before = run.state()
    for other in (copy.deepcopy(run.module), pickle.loads(pickle.dumps(run.module))):
        assert_same(other.state_dict(), before[0])
        other(batch(r, 0)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert other.bagua_buckets is None
    assert_same(run.state(), before)
    assert run.module.bagua_train_step_counter == 3


@pytest.mark.parametrize("name", ALONE)
def test_a_forgotten_model_is_collected_and_takes_its_threads_along(name: str) -> None:
    bagua_ref.init_process_group()
    try:
        module = model()
        module.bagua_module_name = "forgotten model"
        run = Run(name, module)
        run.step(*range(STEPS))
        gone = [weakref.ref(part) for part in (run.module, run.optimizer, run.algorithm)]
        threads = [thread for thread in threading.enumerate() if "forgotten model" in thread.name]
        assert threads
        del run, module
        gc.collect()
        assert [reference() for reference in gone] == [None] * 3
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    finally:
        bagua_ref.destroy_process_group()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CASES
        if CASES[name].takes((1,)) and not CASES[name].compresses and "diloco" not in name
    ],
)
def test_a_rank_alone_trains_as_without(name: str) -> None:
    def rank(r: int) -> torch.Tensor:
        run = Run(name)
        run.step(*range(STEPS))
        return run.weights()

    (found,) = simulate(1, rank)
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        optimizer.zero_grad()
        alone(batch(0, number)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(found, weights(alone), atol=1e-6, rtol=0)
