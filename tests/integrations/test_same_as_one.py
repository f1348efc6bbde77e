"""Trainers of public libraries under `same_as_one`: right ones are the same as one process, and those
whose tokens weigh by rank are found.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bagua_ref.simulation.same_as_one import SameAsOne, same_as_one

accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")

WORDS = 32
Step = Callable[[list[dict[str, Tensor]]], nn.Module]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS))


def sum_of_losses(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    logits = model(part["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, part["labels"].flatten(), reduction="sum")


def tokens(parts: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([(part["labels"] != -100).sum() for part in parts]).sum().float()


def of_transformers(is_right: bool, folder: Path) -> Step:
    """Return a step of transformers' Trainer, with AdamW, clipping and accumulation."""

    def step(parts: list[dict[str, Tensor]]) -> nn.Module:
        transformers.set_seed(0)
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16}
        dropout = {"resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0}
        config = transformers.GPT2Config(vocab_size=WORDS, **sizes, **dropout)
        n = len(parts[0]["labels"])
        rows = [{k: v[i] for k, v in part.items()} for part in parts for i in range(n)]

        class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
            def get_train_dataloader(self) -> Any:
                return DataLoader(rows, batch_size=n)  # type: ignore[arg-type]

        options = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=n,
            gradient_accumulation_steps=len(parts),
            average_tokens_across_devices=is_right,
            max_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model=transformers.GPT2LMHeadModel(config), args=options)
        trainer.train()
        return trainer.model  # type: ignore[no-any-return]

    return step


def of_accelerate(is_right: bool, folder: Path) -> Step:
    """Return a loop with accelerate that divides by the tokens of all ranks, or of its own."""

    def step(parts: list[dict[str, Tensor]]) -> nn.Module:
        accelerate.utils.set_seed(0)
        own = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=len(parts))
        model = net()
        model, optimizer = own.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        count = tokens(parts)
        if is_right:
            count = own.reduce(count, "sum") / own.num_processes
        for part in parts:
            with own.accumulate(model):
                own.backward(sum_of_losses(model, part) / count * len(parts))
                if own.sync_gradients:
                    own.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return model

    return step


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Divides by the tokens of all ranks, or of each microbatch."""

    def __init__(self, parts: list[dict[str, Tensor]], is_right: bool) -> None:
        super().__init__()
        self.net, self.parts, self.is_right = net(), parts, is_right

    def setup(self, stage: str) -> None:
        count = self.trainer.strategy.reduce(tokens(self.parts), reduce_op="sum")
        self.count = count / self.trainer.world_size / len(self.parts)

    def training_step(self, part: dict[str, Tensor], index: int) -> Tensor:
        count = self.count if self.is_right else tokens([part]).clamp(1)
        return sum_of_losses(self.net, part) / count

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def of_lightning(is_right: bool, folder: Path) -> Step:
    """Return a step of Lightning's Trainer, whose optimizer calls a closure."""

    def step(parts: list[dict[str, Tensor]]) -> nn.Module:
        lightning.seed_everything(0, verbose=False)
        module = Module(parts, is_right)
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            max_steps=1,
            accumulate_grad_batches=len(parts),
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(parts, batch_size=None))  # type: ignore[arg-type]
        return module

    return step


TRAINERS = {"transformers": of_transformers, "accelerate": of_accelerate, "lightning": of_lightning}


def judged(name: str, is_right: bool, folder: Path) -> SameAsOne:
    ids = torch.arange(64).view(8, 8) * 7 % WORDS
    batch = {"input_ids": ids, "labels": ids * 5 % WORDS}
    report = same_as_one(TRAINERS[name](is_right, folder), batch)
    assert report.is_comparable
    assert len(report.layouts) == 8
    return report


@pytest.mark.parametrize("name", TRAINERS)
def test_same_as_one_passes_a_trainer_that_counts_the_tokens_of_all_ranks(
    name: str, tmp_path: Path
) -> None:
    report = judged(name, True, tmp_path)
    assert not report.differences, report


@pytest.mark.parametrize("name", TRAINERS)
def test_same_as_one_finds_tokens_that_weigh_by_rank(name: str, tmp_path: Path) -> None:
    report = judged(name, False, tmp_path)
    found = {str(layout) for layout in report.differences}
    assert {"2 x 1, unequal tokens", "2 x 2, unequal tokens"} <= found, report
    assert all("unequal" in name or "without" in name for name in found), report
    [text] = [
        text for layout, text in report.differences.items() if str(layout).startswith("2 x 1, u")
    ]
    assert "tokens do not weigh as in one process (rank 0: " in text
