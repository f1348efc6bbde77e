"""Tests of the callbacks that explain hangs: they watch while a Trainer runs, and no longer."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_ref.integrations.hangs import lightning_callback, transformers_callback


def by_lightning(folder: Path) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        max_steps=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning_callback(folder)],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 2)))


def by_transformers(folder: Path) -> None:
    callback = transformers_callback(folder)
    for event in ("on_train_begin", "on_train_end"):
        getattr(callback, event)(None, None, None)


@pytest.mark.parametrize(
    ("train", "package"), [(by_lightning, "lightning"), (by_transformers, "transformers")]
)
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_is_watched(train: Any, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    hook = sys.excepthook
    train(tmp_path / "dumps")
    assert sys.excepthook is hook
    stacks = json.loads((tmp_path / "dumps" / "stacks_rank_0.json").read_text())
    assert (stacks["reason"], stacks["error"]) == ("exit", None)
