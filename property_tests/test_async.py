"""Properties of asynchronous averaging for any sequence of calls common to all ranks, in any
interleaving (S5.6).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bagua_ref
from bagua_ref.algorithms import AsyncModelAverageAlgorithm
from bagua_ref.algorithms.async_model_average import State
from bagua_ref.base.runtime import current_world
from bagua_ref.simulation import SimulatedWorld

ACTIONS = [
    "step",
    "step",
    "evaluate",
    "exception",
    "forward only",
    "no_sync",
    "abort",
    "resume",
    "pause",
]


class Trainer:
    """One rank, with a method for each action of a program."""

    def __init__(self, warmup_steps):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model.with_bagua(
            [self.optimizer],
            AsyncModelAverageAlgorithm(sync_interval_ms=10, warmup_steps=warmup_steps),
        )
        self.algorithm = self.model.bagua_algorithm
        self.warming_up = warmup_steps

    def loss(self):
        return self.model(torch.randn(2, 3)).square().mean()

    def step(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def evaluate(self):
        self.model.eval()
        self.loss()
        self.model.train()

    def exception(self):
        def fails():
            self.loss()
            raise ArithmeticError

        with pytest.raises(ArithmeticError):
            fails()

    def forward_only(self):
        self.kept = self.loss()

    def no_sync(self):
        with self.model.no_sync():
            self.loss().backward()

    def abort(self):
        self.algorithm.abort(self.model)

    def resume(self):
        self.algorithm.resume(self.model)

    def pause(self):
        current_world().sleep(0.05)


@given(
    ranks=st.integers(2, 4),
    warmup_steps=st.integers(0, 3),
    program=st.lists(st.sampled_from(ACTIONS), max_size=14),
    speeds=st.lists(st.floats(0, 0.05), min_size=4, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_S5_6_no_program_of_calls_hangs_loses_an_update_or_leaks(
    ranks, warmup_steps, program, speeds, seed
):
    def rank(comm):
        bagua_ref.init_process_group()
        trainer = Trainer(warmup_steps)
        aborted = False
        for action in program:
            current_world().sleep(speeds[comm.rank()])
            getattr(trainer, action.replace(" ", "_"))()
            if action in ("abort", "resume"):
                aborted = action == "abort"
            assert (trainer.algorithm._rounds.state is State.ABORTED) == aborted
            if action == "abort":
                assert trainer.algorithm._rounds._thread is None
        trainer.algorithm.abort(trainer.model)
        rounds, before = trainer.algorithm._rounds.completed, trainer.model.weight.detach().clone()
        current_world().sleep(1)
        assert torch.equal(before, trainer.model.weight)
        assert trainer.algorithm._rounds.ops[0].lock._holds == 0
        return rounds

    rounds = SimulatedWorld(ranks, seed=seed).run(rank)
    assert len(set(rounds)) == 1
