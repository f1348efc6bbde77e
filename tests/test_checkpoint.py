"""Tests of checkpoints: training resumes from one bit for bit (S5)."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.simulation import SimulatedWorld

Checkpoint = bytes

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


class Run:
    """One rank's training, with everything that a script holds."""

    def __init__(self, algorithm: str, optimizer: str = "SGD", wrapper: bool = False, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(100 + bagua_ref.get_rank())  # a resumed process draws other weights, which loading overwrites
        self.dtype = dtype
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        self.optimizer = OPTIMIZERS[optimizer](module.parameters())
        arguments = ([self.optimizer], Algorithm.init(algorithm))
        self.model = (
            DistributedDataParallel(module, optimizers=arguments[0], algorithm=arguments[1])
            if wrapper
            else module.with_bagua(*arguments)
        )

    def train(self, steps: range) -> list[torch.Tensor]:
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * bagua_ref.get_rank() + step)
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 6, generator=generator).to(self.dtype)).square().mean().backward()
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


def simulate(ranks: int, function: Any, *args: Any, seed: int = 0) -> list[Any]:
    def main(comm: Any) -> Any:
        bagua_ref.init_process_group()
        return function(comm.rank(), *args)

    return SimulatedWorld(ranks, nodes=(1, ranks - 1), seed=seed).run(main)


def check_resuming(options: dict[str, Any], ranks: int = 3, from_first: bool = False) -> None:
    """Train 7 steps at once; save after 3, resume in another world, and repeat the last 4."""

    def in_one_go(r: int) -> tuple[Checkpoint, list[torch.Tensor]]:
        run = Run(**options)
        run.train(range(3))
        return run.save(), run.train(range(3, 7))

    def resumed(r: int, checkpoints: list[Checkpoint]) -> tuple[list[torch.Tensor], int]:
        run = Run(**options)
        run.train(range(1))  # a script may have trained before it loads
        run.load(checkpoints[0 if from_first else r])
        return run.train(range(3, 7)), run.model.bagua_train_step_counter

    checkpoints, expected = zip(*simulate(ranks, in_one_go), strict=True)
    for (state, counter), wanted in zip(simulate(ranks, resumed, checkpoints, seed=1), expected, strict=True):
        assert counter == 7
        assert all(map(torch.equal, state, wanted))


@pytest.mark.parametrize("wrapper", [False, True], ids=["with_bagua", "wrapper"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_S5_training_resumes_bit_for_bit(algorithm: str, optimizer: str, wrapper: bool) -> None:
    check_resuming({"algorithm": algorithm, "optimizer": optimizer, "wrapper": wrapper})


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_S5_in_half_precision_too(algorithm: str) -> None:
    check_resuming({"algorithm": algorithm, "optimizer": "Adam", "dtype": torch.bfloat16})


def test_S5_where_ranks_are_alike_the_first_ones_checkpoint_is_enough() -> None:
    # All ranks have the same state except for buffers, which the wrapper broadcasts.
    check_resuming({"algorithm": "gradient_allreduce", "wrapper": True}, from_first=True)


def test_a_checkpoint_of_either_kind_of_model_loads_into_the_wrapper() -> None:
    def in_one_go(r: int) -> tuple[Checkpoint, list[torch.Tensor]]:
        run = Run("gradient_allreduce")
        run.train(range(3))
        return run.save(), run.train(range(3, 4))[:6]

    def resumed(r: int, checkpoints: list[Checkpoint]) -> list[torch.Tensor]:
        run = Run("gradient_allreduce", wrapper=True)
        run.load(checkpoints[r])
        return run.train(range(3, 4))[:6]

    checkpoints, expected = zip(*simulate(2, in_one_go), strict=True)
    for state, wanted in zip(simulate(2, resumed, checkpoints), expected, strict=True):
        assert all(map(torch.equal, state, wanted))


def test_a_model_that_was_loaded_before_it_is_wrapped_goes_on_too() -> None:
    options: dict[str, Any] = {"algorithm": "bytegrad", "optimizer": "Adam"}

    def in_one_go(r: int) -> tuple[Checkpoint, list[torch.Tensor]]:
        run = Run(**options)
        run.train(range(3))
        return run.save(), run.train(range(3, 7))[:6]

    def resumed(r: int, checkpoints: list[Checkpoint]) -> list[torch.Tensor]:
        run = Run(**options)
        if r == 0:
            run.load(checkpoints[0])  # wrapping broadcasts rank 0's state
        run.model.with_bagua([run.optimizer], Algorithm.init("bytegrad"))
        return run.train(range(3, 7))[:6]

    checkpoints, expected = zip(*simulate(3, in_one_go), strict=True)
    for state, wanted in zip(simulate(3, resumed, checkpoints), expected, strict=True):
        assert all(map(torch.equal, state, wanted))
