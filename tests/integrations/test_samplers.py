"""Balanced samplers inside trainers: each rank draws its share once, or is told why it cannot."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from tests.launch import launch, preload
from torch.utils.data import DataLoader

from bagua_ref.contrib import (
    BudgetBatchSampler,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

preload(__name__)
LENGTHS = list(range(1, 97))


def rank() -> int:
    return int(os.environ["RANK"])


def balanced(of_rank: int, ranks: int = 2) -> LoadBalancingDistributedSampler:
    return LoadBalancingDistributedSampler(LENGTHS, None, ranks, of_rank, complexities=LENGTHS)


def loaders(of_rank: int) -> list[DataLoader[Any]]:
    samples = torch.arange(96)
    batches = LoadBalancingDistributedBatchSampler(
        balanced(of_rank), lambda indices: [indices[i : i + 4] for i in range(0, len(indices), 4)]
    )
    budget = BudgetBatchSampler(LENGTHS, 400, num_replicas=2, rank=of_rank)
    return [
        DataLoader(samples, sampler=balanced(of_rank), batch_size=4),
        DataLoader(samples, batch_sampler=batches),
        DataLoader(samples, batch_sampler=budget),
    ]


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("dispatch", [False, True])
def test_accelerate_may_not_share_out_a_share_again(kind: int, dispatch: bool) -> None:
    loader = prepare_data_loader(
        loaders(0)[kind],
        num_processes=2,
        process_index=0,
        dispatch_batches=dispatch,
        put_on_device=dispatch,
    )
    if dispatch:
        loader.state.num_processes, num_processes = 2, loader.state.num_processes
    try:
        with pytest.raises(RuntimeError, match=r"do not pass this DataLoader to accelerator\.prep"):
            next(iter(loader))
    finally:
        if dispatch:
            loader.state.num_processes = num_processes


def test_a_position_survives_accelerates_own_count_of_epochs() -> None:
    sampler = balanced(0, 1)
    loader = Accelerator(cpu=True).prepare(
        DataLoader(torch.arange(96), sampler=sampler, batch_size=4)
    )
    sampler.set_epoch(3)
    order = list(sampler)
    sampler.set_epoch(3)
    state = sampler.state_dict(samples=20)
    sampler.set_epoch(0)
    sampler.load_state_dict(state)
    sampler.set_epoch(3)
    with pytest.warns(UserWarning, match="the loaded position is kept"):
        drawn = [index for batch in loader for index in batch.tolist()]
    assert drawn == order[20:]
    assert sampler.epoch == 3
    list(loader)
    assert sampler.epoch == 4


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen += batch.tolist()
        return self.layer(batch.float()[:, None]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)

    def train_dataloader(self) -> DataLoader[Any]:
        return loaders(rank())[0]


def drawn_in_lightning() -> list[int]:
    os.environ["TORCHELASTIC_RUN_ID"] = "1"  # rank and size come from the environment
    warnings.simplefilter("ignore")
    net = Net()
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(net)
    return net.seen


def drawn_in_fabric() -> list[int]:
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    plain, *batches = loaders(rank())
    for loader in batches:  # Lightning says so itself
        with pytest.raises(TypeError, match="use_distributed_sampler=False"):
            fabric.setup_dataloaders(loader)
        assert len(list(fabric.setup_dataloaders(loader, use_distributed_sampler=False))) > 1
    return [index for batch in fabric.setup_dataloaders(plain) for index in batch.tolist()]


@pytest.mark.parametrize("drawn", [drawn_in_lightning, drawn_in_fabric])
def test_lightning_leaves_a_balanced_sampler_alone(drawn: Any) -> None:
    shares = launch(drawn, 2, init=False)
    assert [len(share) for share in shares] == [48, 48]
    assert sorted(shares[0] + shares[1]) == list(range(96))


def drawn_in_transformers(folder: Path) -> list[int]:
    seen: list[int] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
            seen.extend(index.tolist())
            return {"loss": self.layer(index.float()[:, None]).sum()}

    class Balanced(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            samples = [{"index": index} for index in range(96)]
            return DataLoader(samples, sampler=balanced(rank()), batch_size=4)

    options = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": []}
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=1, learning_rate=1e-9, **options
    )
    Balanced(Model(), arguments, train_dataset=range(96)).train()
    return seen


def test_a_trainers_own_loader_keeps_its_balanced_sampler(tmp_path: Path) -> None:
    shares = launch(drawn_in_transformers, 2, tmp_path, init=False)
    assert sorted(shares[0] + shares[1]) == list(range(96))
