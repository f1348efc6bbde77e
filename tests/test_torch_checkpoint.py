"""Tests of resuming through torch.distributed.checkpoint, with any order of wrapping and loading
(S5).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.launch import on_every_process
from tests.trainings import on_every_rank
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import bagua_ref
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.data_parallel import DistributedDataParallel

pytestmark = pytest.mark.slow

ALGORITHMS = [
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "low_precision_decentralized",
    "qadam",
    "async",
    "local_sgd",
]


class Training:
    """A model in training on this rank, optionally wrapped."""

    def __init__(self, algorithm: str, optimizer: str) -> None:
        torch.manual_seed(bagua_ref.get_rank())
        self.algorithm, self.memory, self.wrapped = (
            algorithm.split()[0],
            algorithm.endswith("memory"),
            False,
        )
        self.module: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        made: Any = QAdamOptimizer if self.algorithm == "qadam" else getattr(torch.optim, optimizer)
        options = {"warmup_steps": 2} if self.algorithm == "qadam" else {}
        self.optimizer = made(self.module.parameters(), lr=0.05, **options)

    def wrap(self, wrapper: bool) -> None:
        options: dict[str, Any] = {
            "qadam": {"q_adam_optimizer": self.optimizer, "error_feedback": self.memory},
            "async": {"warmup_steps": 100},
            "local_sgd": {"period": 3},
            "diloco": {"period": 3, "compression": "MinMaxUInt8", "error_feedback": self.memory}
            if self.memory
            else {"period": 6, "fragments": 2, "delay": 2},
            "bytegrad": {"error_feedback": self.memory},
            "powersgd": {"min_compression_rate": 0.5, "warmup_steps": 1},
            "topk": {"warmup_steps": 1},
        }.get(self.algorithm, {})
        algorithm = Algorithm.init(self.algorithm, **options)
        self.wrapped = True
        if wrapper:
            self.module = DistributedDataParallel(
                self.module, optimizers=[self.optimizer], algorithm=algorithm
            )
        else:
            self.module.with_bagua([self.optimizer], algorithm)

    @property
    def plain(self) -> nn.Module:
        return (
            self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        )

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + bagua_ref.get_rank())
            self.optimizer.zero_grad()
            self.module(torch.randn(4, 6, generator=generator)).square().mean().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.plain, self.optimizer)
        own = {"model": model, "optimizer": optimizer}
        if self.wrapped:
            own["algorithm"] = self.module.bagua_algorithm.state_dict()
        # with some algorithms, weights differ between ranks
        return {f"rank{bagua_ref.get_rank()}": own}

    def load(self, path: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        own = state[f"rank{bagua_ref.get_rank()}"]
        set_state_dict(
            self.plain,
            self.optimizer,
            model_state_dict=own["model"],
            optim_state_dict=own["optimizer"],
        )
        if self.wrapped:
            self.module.bagua_algorithm.load_state_dict(own["algorithm"])

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.module.parameters()])


def _resume(algorithm: str, optimizer: str, wrapper: bool, path: str) -> None:
    whole = Training(algorithm, optimizer)
    whole.wrap(wrapper)
    whole.train(range(4))
    dcp.save(whole.state(), checkpoint_id=path)
    whole.train(range(4, 8))
    for wrap_first in (True, False):
        resumed = Training(algorithm, optimizer)
        if wrap_first:
            resumed.wrap(wrapper)
            resumed.load(path)
        else:
            resumed.load(path)
            resumed.wrap(wrapper)
            # now the algorithm's state, and the weights, as wrapping gave every rank rank 0's
            resumed.load(path)
        assert resumed.module.bagua_train_step_counter == 4
        resumed.train(range(4, 8))
        difference = resumed.weights() - whole.weights()
        assert not difference.any(), (algorithm, wrap_first, difference)


RESUMED = [
    ("gradient_allreduce", "AdamW", True),
    ("decentralized", "AdamW", False),
    ("low_precision_decentralized", "SGD", False),
    ("qadam with memory", "", False),
    ("local_sgd", "AdamW", False),
    ("bytegrad with memory", "SGD", False),
    ("diloco", "AdamW", False),
    ("diloco with memory", "SGD", False),
    ("powersgd", "SGD", False),
    ("topk", "AdamW", False),
    ("async", "AdamW", False),
]


@on_every_process(2)
def test_a_training_resumes_bit_for_bit_whether_it_is_wrapped_or_loaded_first(
    tmp_path: Path,
) -> None:
    for number, case in enumerate(RESUMED):
        _resume(*case, str(tmp_path / str(number)))


@on_every_rank(2)
def test_a_step_that_only_makes_state_on_one_rank_counts_and_communicates_nothing(r: int) -> None:
    for algorithm in (
        "gradient_allreduce",
        "low_precision_decentralized",
        "qadam",
        "local_sgd",
        "diloco",
        "powersgd",
        "topk",
    ):
        found = []
        for looks in (True, False):
            training = Training(algorithm, "SGD")
            training.wrap(False)
            for turn in range(3):
                if looks and r == 0:  # torch creates missing state by a step with lr=0
                    training.optimizer.zero_grad()
                    get_optimizer_state_dict(training.module, training.optimizer)
                training.train(range(turn, turn + 1))
            assert training.module.bagua_algorithm.state_dict().get("optimizer_steps", 3) == 3
            found.append(training.weights())
        assert torch.equal(*found), algorithm


def test_qadams_step_that_only_makes_state_does_not_count() -> None:
    training = Training("qadam", "")
    get_optimizer_state_dict(training.module, training.optimizer)
    assert training.optimizer.step_id == 0
    assert all(float(entry["step"]) == 0 for entry in training.optimizer.state.values())


@on_every_rank(2)
def test_wrapping_makes_no_gradients(r: int) -> None:
    for algorithm in ALGORITHMS:
        training = Training(algorithm, "SGD")
        training.wrap(False)
        assert all(p.grad is None for p in training.module.parameters()), algorithm
        for bucket in training.module.bagua_buckets:
            assert bucket.check_flatten(), algorithm
            assert bucket.flattened_tensor().numel() * 4 >= bucket.bytes() > 0
