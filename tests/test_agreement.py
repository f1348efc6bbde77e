"""Ranks compare what they are about to do, and go on together after a failed round; in the
simulated world.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests import failing_ranks as faults
from tests.failing_ranks import Training
from tests.trainings import simulate, weights

import bagua_ref
from bagua_ref.errors import CommunicationError

DETERMINISTIC = [name for name in faults.ALGORITHMS if "async" not in name]


def test_each_rank_says_the_same_and_names_who_differs_in_what() -> None:
    def rank(r: int) -> list[str]:
        training = faults.begin("gradient_allreduce")
        training.try_to(training.backward if r == 2 else training.step)
        for _ in range(2):
            training.try_to(training.step)
        return training.errors

    said = simulate(4, rank)
    sentence = (
        "disagree: rank 2 has taken 3 optimizer steps, ranks 0, 1, 3 have taken 4 optimizer steps"
    )
    assert all(f"{sentence}. Call model.bagua_resync" in errors[0] for errors in said)
    assert all(errors[1].count("bagua_resynchronize") == 1 for errors in said)
    assert all("cannot train on: the ranks that train module" in errors[1] for errors in said)


def test_no_optimizer_uses_a_gradient_of_a_failed_round() -> None:
    def rank(r: int) -> torch.Tensor:
        training = faults.begin("gradient_allreduce")
        before = weights(training.module)
        training.module._bagua.steps_of_optimizers[0] += r
        with pytest.raises(CommunicationError, match="disagree"):
            training.backward()
        with pytest.raises(CommunicationError, match="cannot train on"):
            training.optimizer.step()
        return weights(training.module) - before

    assert not any(change.any() for change in simulate(2, rank))


def fail(training: Training) -> None:
    """Break the round on every rank, whatever the algorithm."""
    bagua_ref.barrier()
    training.module._bagua.rounds.abort("a test")
    with pytest.raises(CommunicationError, match="cannot train on: a test"):
        training.step()


def go_on(training: Training) -> list[torch.Tensor]:
    training.batches = 100
    seen = [weights(training.module)]
    for _ in range(4):
        training.step()
        seen.append(weights(training.module))
    return seen


@pytest.mark.parametrize("algorithm", DETERMINISTIC)
def test_resynchronized_ranks_go_on_as_if_all_had_begun_from_the_first_ones_state(
    algorithm: str,
) -> None:
    firsts: list[Any] = []

    def resynchronized(r: int) -> list[torch.Tensor]:
        training = faults.begin(algorithm)
        if r == 0:
            firsts.extend(
                copy.deepcopy([training.module.state_dict(), training.optimizer.state_dict()])
            )
            firsts.append(training.module.bagua_algorithm.counters())
        fail(training)
        training.module.bagua_resynchronize()
        return go_on(training)

    def begun_there(r: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = faults.network()
        optimizer, made = faults.ALGORITHMS[algorithm](module)
        module.load_state_dict(firsts[0])
        optimizer.load_state_dict(copy.deepcopy(firsts[1]))
        module.with_bagua([optimizer], made)
        module.bagua_algorithm.load_counters(firsts[2])
        return go_on(Training(r, module, optimizer, []))

    for ours, expected in zip(simulate(4, resynchronized), simulate(4, begun_there), strict=True):
        for mine, theirs in zip(ours, expected, strict=True):
            assert torch.equal(mine, theirs)


def test_averaging_in_the_background_goes_on_after_resynchronizing() -> None:
    def rank(r: int) -> torch.Tensor:
        training = faults.begin("async at the end of its warm-up")
        for _ in range(5):
            training.step()
        fail(training)
        training.module.bagua_resynchronize()
        start = weights(training.module)
        for _ in range(3):
            training.step()
        training.module.bagua_algorithm.abort(training.module)
        return start

    first, *others = simulate(3, rank)
    assert all(torch.equal(first, other) for other in others)


def test_only_a_wrapped_module_can_be_resynchronized() -> None:
    with pytest.raises(
        ValueError, match="this Linear is not wrapped, so there is nothing to resynchronize"
    ):
        torch.nn.Linear(1, 1).bagua_resynchronize()
