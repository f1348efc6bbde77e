"""Tests of the suite of algorithms with trainers that misbehave: each gets a verdict."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bagua_ref.backends import get_backend
from bagua_ref.conformance import Report, run_conformance
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms

pytestmark = pytest.mark.slow

RIGHT = ReferenceAlgorithms(get_backend("reference")).gradient_allreduce


def on(trainer, check="algorithms.S5.1.gradients[float32]", **options) -> Report:
    target = SimpleNamespace(algorithms=SimpleNamespace(gradient_allreduce=trainer))
    return run_conformance(target, ["algorithms"], checks=[check], shrink=False, **options)


def test_arguments_are_the_targets_to_keep():
    def uses_up_its_arguments(world, weights, program, **options):
        history = RIGHT(world, weights, program, **options)
        for _, given in program:
            for gradient in given.values():
                gradient.fill_(torch.nan)
            given.clear()
        program.clear()
        weights.clear()
        return history

    assert on(uses_up_its_arguments).passed


def raises(*arguments, **options):
    raise RuntimeError("out of cheese")


def exits(*arguments, **options):
    raise SystemExit(3)


def leaves_one_rank_waiting(world, weights, program, **options):
    if world.rank == 1:
        return [weights for _ in program]
    return RIGHT(world, weights, program, **options)


def returns(change):
    return lambda *arguments, **options: change(RIGHT(*arguments, **options))


def each_weight(change):
    return returns(lambda history: [[change(w) for w in tensors] for tensors in history])


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (raises, "raised RuntimeError: out of cheese"),
        (exits, "raised SystemExit: 3"),
        (leaves_one_rank_waiting, "deadlock: every simulated rank"),
        (returns(lambda history: None), "rank 0: a NoneType instead of a list of"),
        (returns(lambda history: history[1:]), "rank 0: a list of "),
        (
            returns(lambda history: [tensors[1:] for tensors in history]),
            "rank 0, entry 0: a list of ",
        ),
        (each_weight(lambda w: w.reshape(-1)[:, None]), " instead of torch.float32 of shape ("),
        (each_weight(lambda w: w.to(torch.complex64)), "parameter 0: torch.complex64 of shape"),
        (each_weight(torch.Tensor.tolist), "entry 0, parameter 0: a "),
        (each_weight(lambda w: w * torch.nan), "nan instead of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_trainer_that_misbehaves_gets_a_verdict(trainer, said):
    (failed,) = on(trainer).failures()
    assert said in failed.message
    assert failed.message.startswith("gradient_allreduce(lr=")
    assert "weights = [[torch.tensor(" in failed.counterexample
