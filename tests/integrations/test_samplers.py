"""Balanced samplers inside trainers: each rank draws its share once, or is told why it cannot."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.launch import launch, preload
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from bagua_ref.contrib import (
    BudgetBatchSampler,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua_ref.integrations.transformers import use_bagua

preload(__name__)
LENGTHS = list(range(1, 25))
STEPS = 8  # in the second epoch


def rank() -> int:
    return int(os.environ["RANK"])


def balanced(of_rank: int, ranks: int = 2) -> LoadBalancingDistributedSampler:
    return LoadBalancingDistributedSampler(LENGTHS, None, ranks, of_rank, complexities=LENGTHS)


def loaders(of_rank: int) -> list[DataLoader[Any]]:
    samples = torch.arange(24)
    batches = LoadBalancingDistributedBatchSampler(
        balanced(of_rank), lambda indices: [indices[i : i + 2] for i in range(0, len(indices), 2)]
    )
    budget = BudgetBatchSampler(LENGTHS, 48, num_replicas=2, rank=of_rank)
    return [
        DataLoader(samples, sampler=balanced(of_rank), batch_size=2),
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
        DataLoader(torch.arange(24), sampler=sampler, batch_size=2)
    )
    sampler.set_epoch(3)
    order = list(sampler)
    sampler.set_epoch(3)
    state = sampler.state_dict(samples=6)
    sampler.set_epoch(0)
    sampler.load_state_dict(state)
    sampler.set_epoch(3)
    with pytest.warns(UserWarning, match="the loaded position is kept"):
        drawn = [index for batch in loader for index in batch.tolist()]
    assert drawn == order[6:]
    assert sampler.epoch == 3
    list(loader)
    assert sampler.epoch == 4


class Net(LightningModule):
    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []
        self.train_dataloader = lambda: loader

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen += batch.tolist()
        return self.layer(batch.float()[:, None]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-9)

    def forward(self, index: torch.Tensor) -> dict[str, torch.Tensor]:  # for transformers
        return {"loss": self.training_step(index, 0)}


def by_hand(loader: Any, sampler: Any, place: Path, steps: int | None, resume: bool) -> list[int]:
    """Draw two epochs, or the first ``steps`` batches of them, or what is left after these."""
    seen: list[int] = []
    first = 0
    if resume:
        first, state = torch.load(place)
        sampler.load_state_dict(state)
    for epoch in range(first, 2):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for batch in loader:
            seen += batch.tolist()
            if len(seen) == 2 * (steps or -1):
                torch.save(
                    (epoch, sampler.state_dict(samples=len(seen) - 12 * epoch)), place
                )  # Ray fetches ahead
                return seen
    return seen


def in_stateful_loader(folder: Path, *how: Any) -> list[int]:
    sampler = balanced(rank())
    loader = StatefulDataLoader(torch.arange(24), sampler=sampler, batch_size=2, num_workers=1)
    state = SimpleNamespace(
        set_epoch=sampler.set_epoch,
        state_dict=lambda samples: loader.state_dict(),
        load_state_dict=loader.load_state_dict,
    )
    return by_hand(loader, state, folder / f"{rank()}.pt", *how)


def in_ray(folder: Path, *how: Any) -> list[int]:
    import ray.data
    import ray.train.torch as ray_torch

    for function in (ray.data.Dataset.iter_torch_batches, ray.data.DataIterator.iter_torch_batches):
        assert not any("sampler" in name for name in inspect.signature(function).parameters)
    context = SimpleNamespace(get_world_size=lambda: 2, get_world_rank=rank)
    with (
        patch.object(ray.train, "get_context", lambda: context),
        patch.object(ray_torch, "get_device", lambda: torch.device("cpu")),
        patch.dict(
            ray_torch.prepare_data_loader.__globals__, record_extra_usage_tag=lambda *tag: None
        ),
    ):
        plain, *batches = loaders(rank())
        loader = ray_torch.prepare_data_loader(plain)
        for each in batches:  # otherwise Ray would put torch's sampler in the place of ours
            kept = ray_torch.prepare_data_loader(each, add_dist_sampler=False)
            assert kept.batch_sampler is each.batch_sampler
        return by_hand(loader, plain.sampler, folder / f"{rank()}.pt", *how)


def in_fabric(folder: Path, *how: Any) -> list[int]:
    os.environ["TORCHELASTIC_RUN_ID"] = "1"  # rank and size come from the environment
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    plain, *batches = loaders(rank())
    for loader in batches:  # Lightning says so itself
        with pytest.raises(TypeError, match="use_distributed_sampler=False"):
            fabric.setup_dataloaders(loader)
        assert len(list(fabric.setup_dataloaders(loader, use_distributed_sampler=False))) > 1
    return by_hand(fabric.setup_dataloaders(plain), plain.sampler, folder / f"{rank()}.pt", *how)


def in_lightning(folder: Path, steps: int | None, resume: bool) -> list[int]:
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    net = Net(StatefulDataLoader(torch.arange(24), sampler=balanced(rank()), batch_size=2))
    saving = ModelCheckpoint(folder, "last", every_n_train_steps=STEPS)
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        max_steps=steps or -1,
        logger=False,
        callbacks=[saving] if steps else [],
        enable_checkpointing=steps is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(net, ckpt_path=folder / "last.ckpt" if resume else None)
    return net.seen


class Epochs(transformers.TrainerCallback):
    """As in the documentation."""

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **others: Any
    ) -> None:
        train_dataloader.sampler.set_epoch(int(state.epoch))


def in_transformers(
    folder: Path, steps: int | None, resume: bool, bagua: bool = False
) -> list[int]:
    samples = [{"index": index} for index in range(24)]

    class Balanced(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(samples, sampler=balanced(rank()), batch_size=2)

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_training_stop = state.global_step == steps

    options: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": []}
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=2, learning_rate=1e-9, save_steps=STEPS, **options
    )
    net = Net(DataLoader([]))
    trainer = Balanced(net, arguments, train_dataset=samples, callbacks=[Stop()])
    if bagua:
        use_bagua(trainer, "gradient_allreduce")
    else:
        trainer.add_callback(Epochs())
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS}") if resume else None)
    return net.seen


def in_transformers_with_bagua(folder: Path, *how: Any) -> list[int]:
    return in_transformers(folder, *how, bagua=True)


def whole_begun_and_rest(trainer: Any, folder: Path) -> list[list[int]]:
    warnings.simplefilter("ignore")
    return [trainer(folder, *how) for how in ((None, False), (STEPS, False), (None, True))]


@pytest.mark.parametrize(
    "trainer",
    [
        in_stateful_loader,
        in_ray,
        in_fabric,
        in_lightning,
        in_transformers,
        in_transformers_with_bagua,
    ],
)
def test_a_trainer_draws_each_sample_once_and_resumes_in_an_epoch(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trainer in (in_stateful_loader, in_ray):
        drawn = []
        for number in "01":
            monkeypatch.setenv("RANK", number)
            drawn.append(whole_begun_and_rest(trainer, tmp_path))
    else:
        drawn = launch(whole_begun_and_rest, 2, trainer, tmp_path, init=False)
    for whole, begun, rest in drawn:
        assert len(begun) == 2 * STEPS
        assert begun + rest == whole
        assert whole[:12] != whole[12:]  # another order
    for epoch in (slice(12), slice(12, 24)):
        assert sorted(drawn[0][0][epoch] + drawn[1][0][epoch]) == list(range(24))
