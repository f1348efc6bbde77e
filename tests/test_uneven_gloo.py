"""Training inside join() over gloo processes: as in the simulated world, and as in torch's own
join().
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.launch import launch, on_every_process
from tests.test_uneven import (
    ALGORITHMS,
    ENDED,
    Counts,
    joined,
    train,
    two_modules,
    without_join,
    wrapped,
)
from tests.trainings import batch, by_name, network, simulate, weights
from torch import nn

import bagua_ref
from bagua_ref.algorithms import AsyncModelAverageAlgorithm, GradientAllReduceAlgorithm
from bagua_ref.communicators import missing
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.errors import CommunicationError

pytestmark = pytest.mark.slow

EPOCHS: list[Counts] = [[4, 1, 2], [0, 3, 1], [2, 2, 2]]
PAIRED = "decentralized, shift_one"


def everything(r: int | None = None) -> dict[str, torch.Tensor]:
    """Train with every algorithm that three ranks can have."""
    r = bagua_ref.get_rank() if r is None else r
    results = {name: joined(name, EPOCHS, r) for name in ALGORITHMS if name != PAIRED}
    optimizer, algorithm = by_name("qadam", module := network(), warmup_steps=3, hierarchical=False)
    module.with_bagua([optimizer], algorithm)
    for epoch in EPOCHS:
        with bagua_ref.join([module], divide_by_initial_world_size=False):
            train(module, optimizer, r, epoch[r])
    results["qadam"] = weights(module)
    module, optimizer = wrapped(AsyncModelAverageAlgorithm(sync_interval_ms=1, warmup_steps=5))
    for epoch in EPOCHS:
        with bagua_ref.join([module]):
            train(module, optimizer, r, epoch[r])
    module.bagua_algorithm.abort(module)
    results["modules"] = torch.cat(two_modules(r))
    return results


@pytest.mark.proof
def test_every_algorithm_trains_on_uneven_data_as_in_the_simulated_world() -> None:
    for ours, expected in zip(launch(everything, 3), simulate(3, everything), strict=True):
        for name, result in ours.items():
            torch.testing.assert_close(
                result, expected[name], rtol=1e-4, atol=1e-2 if name == "qadam" else 1e-5, msg=name
            )


def each_without_join(names: list[str]) -> None:
    """Train as `without_join` in one job after another."""
    missing._PATIENCE = 60.0  # what is noticed late exceeds the time limit
    for name in names:
        bagua_ref.init_process_group(timeout=120)
        if bagua_ref.get_rank():
            with pytest.raises(CommunicationError, match=ENDED) as raised:
                without_join(name)
            assert len(str(raised.value)) < 300, name
            assert raised.value.__cause__ is None, name
        else:
            without_join(name)
        bagua_ref.destroy_process_group()


@pytest.mark.parametrize(
    ("over_gloo", "names"),
    [
        (False, [*ALGORITHMS, "qadam"]),
        (True, ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized"]),
    ],
    ids=["memory", "gloo"],
)
def test_an_error_outside_of_join_says_to_use_it(over_gloo: bool, names: list[str]) -> None:
    launch(each_without_join, 2, names, init=False, over_gloo=over_gloo, limit=50)


def rank_0_serves_and_ends_first() -> None:
    found = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        found.set("port", str(bagua_ref.env.find_free_network_port()))
    os.environ.update(MASTER_PORT=found.get("port").decode(), TORCHELASTIC_USE_AGENT_STORE="False")
    bagua_ref.init_process_group(timeout=30)
    module, optimizer = wrapped(GradientAllReduceAlgorithm())
    if rank := bagua_ref.get_rank():
        train(module, optimizer, rank, 2)
        time.sleep(0.5)  # until rank 0 has nothing left to do
        with pytest.raises(CommunicationError, match=ENDED):
            train(module, optimizer, rank, 1)
    else:
        train(module, optimizer, rank, 2)
    bagua_ref.destroy_process_group()


def test_a_rank_that_serves_the_store_does_not_end_before_others_know_why() -> None:
    launch(rank_0_serves_and_ends_first, 2, init=False)


@pytest.mark.filterwarnings("ignore")
@on_every_process(3)
def test_weights_are_those_of_torchs_join() -> None:
    for divide in (True, False):
        compare_with_torchs_join(divide)


def compare_with_torchs_join(divide: bool) -> None:
    rank, seen = bagua_ref.get_rank(), []
    for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        model = kind(
            nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
            bucket_cap_mb=1e-4,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in EPOCHS:
            with model.join(divide_by_initial_world_size=divide):
                for step in range(epoch[rank]):
                    optimizer.zero_grad()
                    model(batch(rank, step)).square().mean().backward()
                    optimizer.step()
            seen.append(weights(model))
            if kind is DistributedDataParallel:
                for mine in (seen[-1], *model.buffers()):
                    bagua_ref.broadcast(first := mine.clone(), 0)
                    assert torch.equal(mine, first)
    torch.testing.assert_close(seen[: len(EPOCHS)], seen[len(EPOCHS) :], rtol=1e-4, atol=1e-6)


@on_every_process(3)
def test_an_early_end_and_an_exception_reach_all_ranks() -> None:
    rank = bagua_ref.get_rank()
    module, optimizer = wrapped(GradientAllReduceAlgorithm())
    with (
        pytest.raises(
            RuntimeError, match=r"^rank 1 has no more batches, which ends training on all ranks"
        ),
        bagua_ref.join([module], throw_on_early_termination=True),
    ):
        train(module, optimizer, rank, [3, 1, 3][rank])
    train(module, optimizer, rank, 1)
    bagua_ref.broadcast(first := weights(module), 0)
    assert torch.equal(weights(module), first)

    def fail() -> None:
        with bagua_ref.join([module]):
            train(module, optimizer, rank, [3, 1, 3][rank])
            if rank == 1:
                raise ValueError("a batch is broken")

    with pytest.raises((ValueError, CommunicationError), match="a batch is broken"):
        fail()
