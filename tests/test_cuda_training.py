"""Tests of whole trainings in the simulated world: the emulated CUDA sources and the reference give
the same bits.

The simulated world's collectives add in rank order, so no library's order of summation can make a
difference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cuda_emulation import build
from tests.cuda_emulation.backend import EmulatedBackend
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.algorithms.q_adam import QAdamOptimizer
from bagua_ref.backends import get_backend
from bagua_ref.base.runtime import current_world
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.simulation import SimulatedWorld

pytestmark = build.proofs

STEPS = 6
ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {"hierarchical": True},
    "bytegrad": {"hierarchical": True},
    "decentralized": {"hierarchical": False, "peer_selection_mode": "shift_one"},
    "low_precision_decentralized": {"hierarchical": True},
    "qadam": {"hierarchical": True},
    "async": {"sync_interval_ms": 20, "warmup_steps": 2},
    "local_sgd": {"period": 2, "hierarchical": True},
    "diloco": {"period": 4, "fragments": 2, "delay": 1, "compression": "MinMaxUInt8"},
    "powersgd": {"warmup_steps": 1, "min_compression_rate": 0.5},
    "topk": {"ratio": 0.2, "warmup_steps": 1},
    "demo": {"top_k": 3, "chunk": 8, "transform": None, "compression": "Stat2"},
}


def train(name: str, kernels: Any, dtype: torch.dtype, flatten: bool) -> list[torch.Tensor]:
    def rank(comm: Any) -> torch.Tensor:
        bagua_ref.init_process_group()
        torch.manual_seed(comm.rank())
        model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3)).to(dtype)
        options = dict(ALGORITHMS[name])
        if name == "qadam":
            optimizer: Any = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=3)
            options["q_adam_optimizer"] = optimizer
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model.with_bagua(
            [optimizer], Algorithm.init(name, **options), do_flatten=flatten, backend=kernels
        )
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * comm.rank() + step)
            optimizer.zero_grad()
            model(torch.randn(5, 7, generator=generator).to(dtype)).square().mean().backward()
            optimizer.step()
            current_world().sleep(0.01)
        if name == "async":
            model.bagua_algorithm.abort(model)
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    return SimulatedWorld(6, nodes=(3, 1, 2)).run(rank)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("dtype", "flatten"), [(torch.float32, True), (torch.bfloat16, False)], ids=str
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_leaves_the_same_weights_to_the_bit(name, dtype, flatten):
    flatten |= name == "async"  # which asks for flat buckets (S5.6)
    emulated = EmulatedBackend()
    calls: list[str] = []
    submit = emulated._submit
    emulated._submit = lambda plan, device: (
        calls.extend(launch.kernel for launch in plan.launches),
        submit(plan, device),
    )
    expected = train(name, get_backend("reference"), dtype, flatten)
    actual = train(name, emulated, dtype, flatten)
    for mine, wanted in zip(actual, expected, strict=True):
        assert_equal(mine, wanted, EXACT)
    needed = {
        "bytegrad": "compress_on_chip",
        "low_precision_decentralized": "combine_ring",
        "decentralized": "average",
        "qadam": "update_momentum",
        "async": "async_average",
        "diloco": "compress_on_chip",
    }
    if name in needed:  # otherwise this would compare the reference with itself
        assert any(call.startswith(needed[name]) for call in calls), set(calls)
