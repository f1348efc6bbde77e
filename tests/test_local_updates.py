"""Tests of local SGD and DiLoCo: what counts as a step, bad input, global weights, failures, states
and overlap (S9).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.trainings import (
    Scalar,
    batch,
    network,
    on_every_rank,
    sgd,
    simulate,
    train,
    weights,
    wrap,
    wrapped,
)
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
)
from bagua_ref.errors import CommunicationError, SimulationError

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
"""The parameters of `network`, of 192, 32, 96 and 12 bytes."""


def plain(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0)


def scalar(
    algorithm: Algorithm, dtype: torch.dtype = torch.float32
) -> tuple[Any, torch.optim.Optimizer, Callable[[float], float]]:
    """Return a wrapped `Scalar`, its optimizer, and a function that takes a step of the given size
    upwards.
    """
    module, optimizer = wrap(Scalar(dtype), algorithm, lr=1.0)

    def step(size: float) -> float:
        optimizer.zero_grad()
        module(-size).backward()
        optimizer.step()
        return float(module.w.item())

    return module, optimizer, step


# Steps


@pytest.mark.parametrize("skipped", range(1, 8))
@on_every_rank(4, nodes=(2, 2))
def test_a_step_that_a_rank_of_a_node_skips_is_an_error_on_every_rank_of_every_node(
    r: int, skipped: int
) -> None:
    module, _, step = scalar(LocalSGDAlgorithm(3, warmup_steps=2, hierarchical=True))

    def go_on() -> None:
        for number in range(1, 14):
            if r == 1 and number == skipped:
                module(1.0).backward()
            else:
                step(1.0)

    with pytest.raises(CommunicationError, match=r"disagree|gave up"):
        go_on()


ALGORITHMS = [LocalSGDAlgorithm(2), DiLoCoAlgorithm(2, plain)]
BOTH = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["local_sgd", "diloco"])


@BOTH
@on_every_rank(2)
def test_steps_under_no_sync_count_but_communicate_nothing(r: int, algorithm: Algorithm) -> None:
    module, _, step = scalar(algorithm)
    seen = [step(r)]
    with module.no_sync():
        seen.append(step(r))  # would average
    assert [*seen, step(r), step(r)] == [[0, 0, 0, 2], [1, 2, 3, 2]][r]


@on_every_rank(2)
def test_what_is_in_flight_is_applied_on_time_under_no_sync(r: int) -> None:
    module, _, step = scalar(DiLoCoAlgorithm(3, plain, delay=1))
    seen = [step(r), step(r)]  # sends 0 - (0 + 2)/2
    with module.no_sync():
        seen.append(step(r))  # applies it
    assert seen == [[0, 0, 1], [1, 2, 1]][r]


@BOTH
@on_every_rank(2)
def test_the_last_of_several_optimizers_counts(r: int, algorithm: Algorithm) -> None:
    module = nn.ModuleDict({"a": Scalar(), "b": Scalar()})
    module.forward = lambda x: module["a"](x) + module["b"](x)  # type: ignore[method-assign]
    optimizers = [torch.optim.SGD(module[name].parameters(), lr=1.0) for name in "ab"]
    module.with_bagua(optimizers, algorithm)
    seen = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        module(-float(r)).backward()
        for optimizer in optimizers:
            optimizer.step()
        seen += [module["a"].w.item(), module["b"].w.item()]
    assert module._bagua.steps_of_optimizers == [3, 3]
    assert seen == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2]][r]


@pytest.mark.parametrize(
    "algorithm",
    [LocalSGDAlgorithm(9, 1), DiLoCoAlgorithm(9, warmup_steps=1)],
    ids=["local_sgd", "diloco"],
)
@on_every_rank(2)
def test_a_backward_belongs_to_the_step_after_the_finished_ones(
    r: int, algorithm: Algorithm
) -> None:
    module = nn.ModuleDict({"a": Scalar(), "b": Scalar()})
    module.forward = lambda x: module["a"](x) + module["b"](x)  # type: ignore[method-assign]
    optimizers = [torch.optim.SGD(module[name].parameters(), lr=1.0) for name in "ab"]
    module.with_bagua(optimizers, algorithm)
    loss = module(-float(r))
    loss.backward(retain_graph=True)  # of step 1, which is the warm-up
    optimizers[1].step()
    loss.backward()  # of step 2
    assert [module["a"].w.grad.item(), module["b"].w.item()] == [[-0.5, 0.5], [-1.5, 0.5]][r]


# Bad input


kept: list[torch.optim.Optimizer] = []


def sharing(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    """One optimizer for all fragments, as in torchft's example."""
    if not kept:
        kept.append(plain(tensors))
    else:
        kept[0].add_param_group({"params": tensors})
    return kept[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"fragments": 5},
            ValueError,
            "fragments=5 must be at most 4, the number of trained parameters",
        ),
        (
            {"fragments": [NAMES[:3], NAMES[2:]]},
            ValueError,
            "fragments name '2.weight' more than once",
        ),
        (
            {"fragments": [[*NAMES, "3.bias"]]},
            ValueError,
            "fragments name '3.bias' more than once, or though the module trains no such parameter",
        ),
        ({"fragments": [NAMES[:3]]}, ValueError, "fragments name '2.bias' not at all"),
        (
            {"outer_optimizer": lambda tensors: None},
            TypeError,
            "outer_optimizer returned a NoneType; it must return a torch.optim",
        ),
        (
            {"outer_optimizer": lambda tensors: plain(tensors[1:])},
            ValueError,
            "outer_optimizer returned a SGD of 3 tensors that are",
        ),
        (
            {"outer_optimizer": sharing, "fragments": 2},
            ValueError,
            "outer_optimizer returned a SGD of 4 tensors that are not exactly",
        ),
    ],
)
@on_every_rank(1)
def test_what_does_not_fit_the_module_is_refused_and_changes_nothing(
    r: int, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    kept.clear()
    module = network()
    before = weights(module)
    with pytest.raises(error, match=message):
        module.with_bagua([sgd(module)], DiLoCoAlgorithm(period=10, **options))
    assert "_bagua" not in module.__dict__
    assert torch.equal(weights(module), before)
    _, optimizer = wrap(module, DiLoCoAlgorithm(period=2), lr=0.1, momentum=0.9)
    train(module, optimizer, r, range(2))


@on_every_rank(2)
def test_outer_settings_that_differ_between_ranks_are_an_error_on_every_rank(r: int) -> None:
    _, _, step = scalar(DiLoCoAlgorithm(2, lambda tensors: torch.optim.SGD(tensors, lr=0.5 + r)))
    step(1.0)
    with pytest.raises(CommunicationError) as caught:
        step(1.0)
    message = str(caught.value)
    assert "rank 0 has outer optimizers with settings of checksum" in message


@pytest.mark.parametrize(
    "algorithm",
    [LocalSGDAlgorithm(2, hierarchical=True), LocalSGDAlgorithm(2), DiLoCoAlgorithm(2)],
    ids=["nodes", "all", "diloco"],
)
@on_every_rank(2)
def test_a_round_that_one_rank_leaves_out_under_no_sync_is_an_error_on_every_rank(
    r: int, algorithm: Algorithm
) -> None:
    module, _, step = scalar(algorithm)
    step(1.0)

    def go_on() -> None:
        if r:
            with module.no_sync():
                step(1.0)
        for _ in range(3):
            step(1.0)

    with pytest.raises(CommunicationError, match="disagree"):
        go_on()


@BOTH
@on_every_rank(2)
def test_a_rank_that_skips_a_step_is_named(r: int, algorithm: Algorithm) -> None:
    module, _, step = scalar(algorithm)
    step(1.0)
    step(1.0)  # averages
    for _ in range(r):
        module(1.0).backward()
    step(1.0)
    with pytest.raises(
        CommunicationError,
        match="rank 0 has run 2 backward passes since the last round, rank 1 has run 3",
    ):
        step(1.0)


# Global weights


@on_every_rank(2)
def test_global_weights_are_shown_and_the_local_ones_put_back(r: int) -> None:
    module, _, step = scalar(DiLoCoAlgorithm(2, plain, warmup_steps=1), torch.bfloat16)
    show, seen = module.bagua_algorithm.global_weights, []

    def look() -> None:
        with show(), show():
            seen.append(module.w.item())
        seen.append(module.w.item())

    step(2.0 * r)
    look()  # in the warm-up: the weights
    for _ in range(3):
        step(2.0 * r)
        look()
    with pytest.raises(ZeroDivisionError), show():
        raise ZeroDivisionError
    assert [*seen, module.w.item()] == [[1, 1, 1, 1, 3, 3, 3, 3, 3], [1, 1, 1, 3, 3, 3, 3, 5, 5]][r]


@on_every_rank(1)
def test_training_inside_global_weights_is_refused(r: int) -> None:
    module, optimizer, step = scalar(DiLoCoAlgorithm(3, plain))
    step(1.0)
    with module.bagua_algorithm.global_weights():
        with pytest.raises(
            RuntimeError, match=r"a training forward pass inside `with global_weights\(\)`"
        ):
            module(1.0)
        module.eval()
        assert module(1.0).item() == 0
        module.train()
    module(-1.0).backward()
    with (
        module.bagua_algorithm.global_weights(),
        pytest.raises(RuntimeError, match="an optimizer step inside"),
    ):
        optimizer.step()


# Failures


@on_every_rank(1)
def test_a_mean_that_was_lost_is_not_applied_later(r: int) -> None:
    module, _, step = scalar(DiLoCoAlgorithm(3, plain, delay=2), torch.float32)
    step(1.0)
    flight = module.bagua_algorithm._in_flight
    module._bagua.engine.wait_pending_comm_ops()
    flight.missing = 1  # as if that had raised, and somebody had caught it
    for action in (module.bagua_algorithm.state_dict, lambda: (step(1.0), step(1.0))):
        with pytest.raises(CommunicationError, match="the mean of fragment 0 has not arrived"):
            action()


# States


def streaming() -> DiLoCoAlgorithm:
    return DiLoCoAlgorithm(6, fragments=2, delay=2, mix=0.25, warmup_steps=1)


def test_what_is_equal_on_all_ranks_loads_at_any_number_of_ranks() -> None:
    def saved(r: int) -> list[Any]:
        module, optimizer = wrapped(streaming())
        # fragment 0 was applied after step 4, fragment 1 sent after step 5
        train(module, optimizer, r, range(6))
        return [module.state_dict(), module.bagua_algorithm.state_dict()]

    (model, state), *_ = simulate(2, saved)
    for ranks in (1, 3):

        def loaded(r: int) -> torch.Tensor:
            module, optimizer = wrap(network(seed=r), streaming(), lr=0.1, momentum=0.9)
            module.load_state_dict(model)
            module.bagua_algorithm.load_state_dict(state, drop_local=bool(r))
            again = module.bagua_algorithm.state_dict()
            assert all(
                torch.equal(again["global_weights"][name], g)
                for name, g in state["global_weights"].items()
            )
            train(module, optimizer, r, range(6, 10))
            with module.bagua_algorithm.global_weights():
                return weights(module)

        results = simulate(ranks, loaded)
        assert all(torch.equal(result, results[0]) for result in results)


@on_every_rank(2)
def test_what_a_rank_did_before_loading_does_not_count(r: int) -> None:
    module, optimizer = wrapped(LocalSGDAlgorithm(4))
    train(module, optimizer, r, range(2))
    states = copy.deepcopy(
        [part.state_dict() for part in (module, optimizer, module.bagua_algorithm)]
    )
    for step in range(r):
        module(batch(r, step)).sum().backward()  # without a step
    for part, state in zip((module, optimizer, module.bagua_algorithm), states, strict=True):
        part.load_state_dict(state)
    train(module, optimizer, r, range(2, 6))


@on_every_rank(1)
def test_loading_replaces_what_is_in_flight_and_keeps_tensors_that_a_user_holds(r: int) -> None:
    module: Any = network()
    optimizer, rate = sgd(module), torch.tensor(0.5)
    module.with_bagua(
        [optimizer], DiLoCoAlgorithm(4, lambda tensors: torch.optim.SGD(tensors, lr=rate), delay=2)
    )
    algorithm = module.bagua_algorithm
    empty = copy.deepcopy(algorithm.state_dict())
    train(module, optimizer, r, range(2))
    saved = copy.deepcopy(algorithm.state_dict())
    train(module, optimizer, r, range(2, 3))
    algorithm.load_state_dict(empty)
    assert algorithm._in_flight is None
    rate.fill_(0.25)
    algorithm.load_state_dict(saved)
    assert rate == 0.5
    assert algorithm._in_flight.due == 4
    saved["in_flight"][0]["mean"]["0.bias"].fill_(9)  # it is no longer the algorithm's
    assert not (algorithm._in_flight.mean["0.bias"] == 9).any()


def spoil_global_weights(state: dict[str, Any]) -> None:
    state["global_weights"]["0.bias"] += 1


def spoil_outer_momentum(state: dict[str, Any]) -> None:
    state["outer_optimizers"][0]["state"][0]["momentum_buffer"] += 1


@pytest.mark.parametrize("spoil", [spoil_global_weights, spoil_outer_momentum])
@on_every_rank(2)
def test_global_state_that_differs_after_loading_is_an_error_in_the_next_round(
    r: int, spoil: Callable[[Any], None]
) -> None:
    module, optimizer = wrapped(DiLoCoAlgorithm(4))
    train(module, optimizer, r, range(5))
    state = copy.deepcopy(module.bagua_algorithm.state_dict())
    if r:
        spoil(state)
    module.bagua_algorithm.load_state_dict(state)
    train(module, optimizer, r, range(5, 7))
    with pytest.raises(
        CommunicationError, match="disagree: rank 0 has weights and optimizer state of checksum"
    ):
        train(module, optimizer, r, range(7, 8))


@on_every_rank(2)
def test_weights_of_one_rank_that_change_before_the_local_phase_are_an_error_in_the_first_round(
    r: int,
) -> None:
    module, _, step = scalar(DiLoCoAlgorithm(2))
    with torch.no_grad():
        module.w.fill_(r)  # g would differ
    step(1.0)
    with pytest.raises(CommunicationError, match="disagree: rank 0 has weights"):
        step(1.0)


@BOTH
@on_every_rank(2)
def test_wrapping_again_and_resynchronizing_start_from_the_first_ranks_weights(
    r: int, algorithm: Algorithm
) -> None:
    module, _, step = scalar(algorithm)
    seen = [step(r + 1)]
    module.bagua_resynchronize()
    seen += [module.w.item(), step(r + 1), step(r + 1), step(r + 1)]
    _, optimizer = wrap(module, GradientAllReduceAlgorithm(), lr=1.0)
    optimizer.zero_grad()
    module(-1.0 - r).backward()
    optimizer.step()
    # Steps go on from 1, so that the next one averages 2 and 3.
    assert [*seen, module.w.item()] == [[1, 1, 2.5, 3.5, 5.5, 7], [2, 1, 2.5, 4.5, 5.5, 7]][r]


# Overlap


def late_partner(delay: int) -> Callable[[int], float]:
    def rank(r: int) -> float:
        module, optimizer, step = scalar(DiLoCoAlgorithm(4, plain, delay=delay))
        for _ in range(3 - delay):
            step(2.0 * r)
        if r == 1:
            bagua_ref.barrier()  # to which rank 0 comes after it has sent its part and computed on
        step(2.0 * r)  # sends
        for _ in range(delay - 1):
            step(2.0 * r)
        optimizer.zero_grad()
        module(-2.0 * r).backward()
        if r == 0:
            bagua_ref.barrier()
        optimizer.step()  # applies
        return float(module.w.item())

    return rank


def test_S9_4_steps_go_on_while_a_fragment_is_on_its_way() -> None:
    for delay in (1, 2, 3):
        assert simulate(2, late_partner(delay)) == [4.0 - delay] * 2
    # without a delay, rank 0 would wait for rank 1 in its step
    with pytest.raises(SimulationError, match="deadlock"):
        simulate(2, late_partner(0))
