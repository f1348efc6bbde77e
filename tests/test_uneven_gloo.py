"""Training inside join() over gloo processes: as in the simulated world, and as in torch's own join()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.launch import launch
from tests.test_uneven import ALGORITHMS, Counts, joined, train, two_modules, wrapped
from tests.trainings import batch, network, simulate, weights
from torch import nn

import bagua_ref
from bagua_ref.algorithms import AsyncModelAverageAlgorithm, GradientAllReduceAlgorithm, QAdamAlgorithm, QAdamOptimizer
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.errors import CommunicationError

pytestmark = pytest.mark.slow

EPOCHS: list[Counts] = [[4, 1, 2], [0, 3, 1], [2, 2, 2]]
PAIRED = "decentralized, shift_one"


def everything(r: int) -> dict[str, torch.Tensor]:
    """Train with every algorithm that three ranks can have."""
    results = {name: joined(name, EPOCHS, r) for name in ALGORITHMS if name != PAIRED}
    module = network()
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=3)
    module.with_bagua([optimizer], QAdamAlgorithm(optimizer, hierarchical=False))
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


def everything_here() -> dict[str, torch.Tensor]:
    return everything(bagua_ref.get_rank())


def test_every_algorithm_trains_on_uneven_data_as_in_the_simulated_world() -> None:
    for ours, expected in zip(launch(everything_here, 3), simulate(3, everything), strict=True):
        for name, result in ours.items():
            torch.testing.assert_close(result, expected[name], rtol=1e-4, atol=1e-2 if name == "qadam" else 1e-5, msg=name)


def a_pair() -> torch.Tensor:
    return joined(PAIRED, [[2, 0], [1, 3]], bagua_ref.get_rank())


def test_pairs_of_ranks_average_though_one_has_no_batches() -> None:
    for ours, expected in zip(launch(a_pair, 2), simulate(2, lambda r: joined(PAIRED, [[2, 0], [1, 3]], r)), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def ours_and_torchs(divide: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the weights after each epoch, and the buffers at the end, of our wrapper and of torch's."""
    rank = bagua_ref.get_rank()
    seen: list[Any] = []
    for kind in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        model = kind(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)), bucket_cap_mb=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for epoch in EPOCHS:
            with model.join(divide_by_initial_world_size=divide):
                for step in range(epoch[rank]):
                    optimizer.zero_grad()
                    model(batch(rank, step)).square().mean().backward()
                    optimizer.step()
            results.append(weights(model))
        seen.append((results, [buffer.clone() for buffer in model.buffers()]))
    (ours, buffers), (theirs, _) = seen
    return [*zip(ours, theirs, strict=True), (torch.cat([b.reshape(-1).double() for b in buffers]),) * 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("divide", [True, False])
def test_weights_are_those_of_torchs_join(divide: bool) -> None:
    results = launch(ours_and_torchs, 3, divide)
    for epochs in results:
        for place, (ours, theirs) in enumerate(epochs):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
            assert torch.equal(ours, results[0][place][0])


def ends() -> tuple[str, str, torch.Tensor]:
    """End one training early on all ranks and go on, and one by an exception of rank 1; return what this rank sees."""
    rank = bagua_ref.get_rank()
    module, optimizer = wrapped(GradientAllReduceAlgorithm())
    said = []
    for kind in (RuntimeError, ValueError, CommunicationError):
        try:
            with bagua_ref.join([module], throw_on_early_termination=kind is RuntimeError):
                train(module, optimizer, rank, [3, 1, 3][rank])
                if rank == 1 and kind is ValueError:
                    raise ValueError("a batch is broken")
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
        if kind is RuntimeError:
            train(module, optimizer, rank, 1)
            after = weights(module)
    return said[0], said[1], after


def test_an_early_end_and_an_exception_reach_all_ranks() -> None:
    results = launch(ends, 3)
    for early, failed, after in results:
        assert early.startswith("rank 1 has no more batches, which ends training on all ranks")
        assert torch.equal(after, results[0][2])
        assert "a batch is broken" in failed
