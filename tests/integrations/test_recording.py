"""Tests of the callbacks that record trainings of Lightning and Hugging Face: faults are located, bits stay."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bagua_ref.conformance.trace import diff_records
from bagua_ref.conformance.trace.callbacks import lightning_callback, transformers_callback

STEPS, AT = 5, 2


class Network(nn.Module):
    """A network whose forward returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.net(x).squeeze(-1)
        return {"loss": (y - labels).square().mean(), "logits": y}


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(6, generator=generator), "labels": torch.randn((), generator=generator)} for _ in range(4 * STEPS)]


def by_transformers(folder: Path | None, lr: float = 0.1) -> Any:
    from transformers import Trainer, TrainingArguments

    model = Network()
    arguments = TrainingArguments(
        output_dir="unused", max_steps=STEPS, per_device_train_batch_size=4, learning_rate=lr, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no", seed=1,
    )  # fmt: skip
    callbacks = [transformers_callback(folder)] if folder else []
    Trainer(model, arguments, train_dataset=samples(), callbacks=callbacks).train()
    return model


def by_lightning(folder: Path | None, lr: float = 0.1) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr / 0.1 if step >= AT else 1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": late, "interval": "step"}}

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(samples(), batch_size=4)  # type: ignore[arg-type]

    warnings.simplefilter("ignore")
    module = Module()
    trainer = pl.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[lightning_callback(folder)] if folder else [],
    )  # fmt: skip
    trainer.fit(module)
    return module


@pytest.mark.parametrize(
    ("train", "package", "step"), [(by_lightning, "lightning", AT), (by_transformers, "transformers", 0)], ids=["lightning", "hf"]
)
def test_a_trainer_is_recorded(train: Any, package: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    recorded, plain = train(tmp_path / "a"), train(None)
    assert all(torch.equal(x, y) for x, y in zip(recorded.parameters(), plain.parameters(), strict=True))
    train(tmp_path / "b")
    report = diff_records(tmp_path / "a", tmp_path / "b")
    assert report.first is None, str(report)
    assert report.steps == list(range(STEPS))
    train(tmp_path / "c", lr=0.05)
    first = diff_records(tmp_path / "a", tmp_path / "c").first
    assert first is not None
    assert (first.step, first.kind, first.cause) == (step, "option", "learning rate"), str(first)
