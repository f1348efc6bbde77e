"""Tests of the checkpoints of models that are wrapped in a class of their own (S5)."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
from tests.trainings import sgd, simulate
from torch import nn

import bagua_ref
from bagua_ref.algorithms import GradientAllReduceAlgorithm
from bagua_ref.data_parallel import DistributedDataParallel

Checkpoint = bytes


class Run:
    """One rank's training, with everything that a script holds."""

    def __init__(self, wrapper: bool) -> None:
        # a resumed process draws other weights, which loading overwrites
        torch.manual_seed(100 + bagua_ref.get_rank())
        module: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = sgd(module)
        wrap = partial(DistributedDataParallel, module) if wrapper else module.with_bagua
        self.model: Any = wrap(optimizers=[self.optimizer], algorithm=GradientAllReduceAlgorithm())

    def train(self, steps: range) -> list[torch.Tensor]:
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * bagua_ref.get_rank() + step)
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 6, generator=generator)).square().mean().backward()
            self.optimizer.step()
        return [t.detach().clone() for t in [*self.model.parameters(), *self.model.buffers()]]

    def save(self) -> Checkpoint:
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "algorithm": self.model.bagua_algorithm.state_dict(),
        }
        torch.save(state, file)
        return file.getvalue()

    def load(self, checkpoint: Checkpoint) -> None:
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.bagua_algorithm.load_state_dict(state["algorithm"])


@pytest.mark.parametrize("wrapper", [False, True])
def test_S5_where_ranks_are_alike_the_first_ones_checkpoint_is_enough_for_the_wrapper(
    wrapper: bool,
) -> None:
    """All ranks have the same state except for buffers, which the wrapper broadcasts; either kind
    of model may have saved it.
    """

    def in_one_go(r: int) -> tuple[Checkpoint, list[torch.Tensor]]:
        run = Run(wrapper)
        run.train(range(3))
        return run.save(), run.train(range(3, 7))[:6]

    def resumed(r: int) -> list[torch.Tensor]:
        run = Run(wrapper=True)
        run.train(range(1))  # a script may have trained before it loads
        run.load(checkpoints[0])
        found = run.train(range(3, 7))[:6]
        assert run.model.bagua_train_step_counter == 7
        return found

    checkpoints, expected = zip(*simulate(3, in_one_go, nodes=(1, 2)), strict=True)
    for state, wanted in zip(simulate(3, resumed, nodes=(1, 2), seed=1), expected, strict=True):
        assert all(map(torch.equal, state, wanted))
