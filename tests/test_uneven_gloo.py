"""Training inside join() over gloo processes: as in the simulated world, and as in torch's own join()."""

from __future__ import annotations

import pytest
import torch
from tests.launch import launch, on_every_process
from tests.test_uneven import ALGORITHMS, Counts, joined, train, two_modules, wrapped
from tests.trainings import batch, by_name, network, simulate, weights
from torch import nn

import bagua_ref
from bagua_ref.algorithms import AsyncModelAverageAlgorithm, GradientAllReduceAlgorithm
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


def test_every_algorithm_trains_on_uneven_data_as_in_the_simulated_world() -> None:
    for ours, expected in zip(launch(everything, 3), simulate(3, everything), strict=True):
        for name, result in ours.items():
            torch.testing.assert_close(result, expected[name], rtol=1e-4, atol=1e-2 if name == "qadam" else 1e-5, msg=name)


def a_pair() -> torch.Tensor:
    return joined(PAIRED, [[2, 0], [1, 3]], bagua_ref.get_rank())


def test_pairs_of_ranks_average_though_one_has_no_batches() -> None:
    for ours, expected in zip(launch(a_pair, 2), simulate(2, lambda r: a_pair()), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("divide", [True, False])
@on_every_process(3)
def test_weights_are_those_of_torchs_join(divide: bool) -> None:
    rank, seen = bagua_ref.get_rank(), []
    for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        model = kind(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)), bucket_cap_mb=1e-4)
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
        pytest.raises(RuntimeError, match=r"^rank 1 has no more batches, which ends training on all ranks"),
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
