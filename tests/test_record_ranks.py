"""Tests of recorded trainings on several ranks: faults of communication are located and named;
equal runs do not differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launch import launch
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.record import diff_records
from bagua_ref.simulation import SimulatedWorld

STEPS, AT, RANKS = 5, 2, 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def learn(
    folder: Path,
    model: nn.Module,
    optimizer: Any,
    rank: int,
    change: Callable[..., int] = lambda *_: 0,
) -> None:
    """Train; ``change`` may do anything before a step, and returns a number that is added to that
    of the rank's data.
    """
    with bagua_ref.record(model, optimizer, folder) as recording:
        ranks = recording._manifest["world_size"]
        for step in range(STEPS):
            other = change(step, model, optimizer)
            x = torch.randn(
                4, 7, generator=torch.Generator().manual_seed(10 * step + (rank + other) % ranks)
            )
            recording.loss(model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()


def with_algorithm(
    folder: Path, name: str = "gradient_allreduce", change: Any = lambda *_: 0, **options: Any
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.with_bagua([optimizer], Algorithm.init(name, **options))
    learn(folder, model, optimizer, bagua_ref.get_rank(), change)


def simulate(folder: Path, *args: Any, ranks: int = RANKS, **options: Any) -> None:
    def rank(comm: Any) -> None:
        bagua_ref.init_process_group()
        with_algorithm(folder, *args, **options)

    SimulatedWorld(ranks).run(rank)


def swapped(step: int, *_: Any) -> int:
    return int(step == AT)


def alone(step: int, model: Any, optimizer: Any) -> int:
    model.require_backward_grad_sync = step != AT
    return 0


FLAT = {"hierarchical": False}
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, str, str]]] = {
    "data of the other rank": ({}, {"change": swapped}, (AT, "input:0", "other order of data")),
    "summed gradients": (FLAT, {**FLAT, "average": False}, (0, "grad:0.weight", "missing mean")),
    "compressed gradients": (
        {},
        {"name": "bytegrad", **FLAT},
        (0, "grad:0.weight", "communication"),
    ),
    "no communication": (
        {},
        {"name": "local_sgd", "period": 3},
        (0, "grad:0.weight", "missing mean"),
    ),
    "another peer": (
        {"name": "decentralized", "peer_selection_mode": "hypercube", **FLAT, "ranks": 4},
        {"name": "decentralized", "peer_selection_mode": "shift_one", **FLAT, "ranks": 4},
        (1, "weight:0.weight", "update"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_communication_is_located_and_named(name: str, tmp_path: Path) -> None:
    right, faulty, expected = FAULTS[name]
    simulate(tmp_path / "a", **right)
    simulate(tmp_path / "b", **faulty)
    first = diff_records(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.step, first.record, first.cause) == expected, str(first)
    assert first.rank == 0


def over_gloo(folder: Path) -> None:
    with_algorithm(folder / "gloo")


def test_simulated_ranks_and_processes_over_gloo_do_not_differ(tmp_path: Path) -> None:
    launch(over_gloo, RANKS, tmp_path)
    simulate(tmp_path / "simulated")
    report = diff_records(tmp_path / "gloo", tmp_path / "simulated")
    assert report.first is None, str(report)
    assert report.ranks == [0, 1]
    assert report.records > 100


def with_torch(folder: Path) -> None:
    """Train with torch's DistributedDataParallel, with and without its hook for float16, and with
    FSDP2.
    """
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    for name in ("ddp", "again", "fp16", "bn", "bn_own", "fsdp", "fsdp_again", "fsdp_lr"):
        model: Any = network()
        if name.startswith("bn"):
            model.insert(1, nn.BatchNorm1d(9))
        if name.startswith("fsdp"):
            mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model, broadcast_buffers=name != "bn_own")
        if name == "fp16":
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def change(step: int, model: Any, optimizer: Any, name: str = name) -> int:
            optimizer.param_groups[0]["lr"] = 0.02 if name == "fsdp_lr" and step == AT else 0.01
            return 0

        learn(folder / name, model, optimizer, dist.get_rank(), change)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    launch(with_torch, RANKS, folder, init=False)
    return folder


def test_torchs_ddp_is_recorded_and_equal_to_ours(torchs: Path, tmp_path: Path) -> None:
    assert diff_records(torchs / "ddp", torchs / "again").first is None
    first = diff_records(torchs / "ddp", torchs / "fp16").first
    assert first is not None
    assert (first.step, first.record, first.cause) == (0, "grad:0.weight", "dtype or device"), str(
        first
    )
    assert first.details.count("float16") == 1


def test_buffers_that_only_one_run_broadcasts_are_named(torchs: Path) -> None:
    first = diff_records(torchs / "bn", torchs / "bn_own").first
    assert first is not None
    assert (first.step, first.rank, first.record) == (1, 1, "buffer_after:1.running_mean")
    assert first.cause == "buffers of ranks"
    assert "broadcast_buffers=True" in first.details


def test_fsdp_is_recorded(torchs: Path) -> None:
    assert diff_records(torchs / "fsdp", torchs / "fsdp_again").first is None
    first = diff_records(torchs / "fsdp", torchs / "fsdp_lr").first
    assert first is not None
    assert (first.step, first.record, first.cause) == (AT, "option:0.weight", "learning rate"), str(
        first
    )
