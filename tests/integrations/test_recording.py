"""Tests of the callbacks that record trainings of Lightning and Hugging Face: faults are located,
bits stay.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bagua_ref.record import diff_records, lightning_callback, transformers_callback

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
    """Return those of an epoch, after which checkpoints are written: Lightning does not go on
    inside one.
    """
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(6, generator=generator), "labels": torch.randn((), generator=generator)}
        for _ in range(4 * AT)
    ]


def by_transformers(
    folder: Path | None, lr: float = 0.1, steps: int = STEPS, resume: bool = False
) -> Any:
    from transformers import Trainer, TrainingArguments

    model = Network()
    arguments = TrainingArguments(
        output_dir="saved",
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=lr,
        report_to=[],
        use_cpu=True,
        save_strategy="steps",
        save_steps=AT,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        logging_strategy="no",
        seed=1,
    )
    callbacks = [transformers_callback(folder)] if folder else []
    trainer = Trainer(model, arguments, train_dataset=samples(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=f"saved/checkpoint-{AT}" if resume else None)
    return model


def by_lightning(
    folder: Path | None, lr: float = 0.1, steps: int = STEPS, resume: bool = False
) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            late = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: lr / 0.1 if step >= AT else 1.0
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": late, "interval": "step"}}

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(samples(), batch_size=4)  # type: ignore[arg-type]

    warnings.simplefilter("ignore")
    module = Module()
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(
                "saved",
                "{step}",
                every_n_train_steps=AT,
                save_top_k=-1,
                enable_version_counter=False,
            )
        ]
        + ([lightning_callback(folder)] if folder else []),
    )
    trainer.fit(module, ckpt_path=f"saved/step={AT}.ckpt" if resume else None)
    return module


each_trainer = pytest.mark.parametrize(
    ("train", "package", "step"),
    [(by_lightning, "lightning", AT), (by_transformers, "transformers", 0)],
    ids=["lightning", "hf"],
)


@each_trainer
def test_a_trainer_is_recorded(
    train: Any, package: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    recorded, plain = train(tmp_path / "a"), train(None)
    assert all(
        torch.equal(x, y) for x, y in zip(recorded.parameters(), plain.parameters(), strict=True)
    )
    train(tmp_path / "b")
    report = diff_records(tmp_path / "a", tmp_path / "b")
    assert report.first is None, str(report)
    assert report.steps == list(range(STEPS))
    train(tmp_path / "c", lr=0.05)
    first = diff_records(tmp_path / "a", tmp_path / "c").first
    assert first is not None
    assert (first.step, first.kind, first.cause) == (step, "option", "learning rate"), str(first)


@each_trainer
def test_a_trainer_that_goes_on_from_a_checkpoint_adds_to_its_record(
    train: Any, package: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "a")
    train(tmp_path / "b", steps=AT + 1)  # its last step is lost
    train(tmp_path / "b", resume=True)
    report = diff_records(tmp_path / "a", tmp_path / "b")
    assert report.first is None, str(report)
    assert report.steps == list(range(STEPS))
    if package == "transformers":
        Path(f"saved/checkpoint-{AT}/optimizer.pt").unlink()
    else:
        saved = torch.load(f"saved/step={AT}.ckpt", weights_only=False)
        saved["optimizer_states"][0]["state"] = {}
        torch.save(saved, f"saved/step={AT}.ckpt")
    train(tmp_path / "b", resume=True)
    first = diff_records(tmp_path / "a", tmp_path / "b").first
    assert first is not None
    assert (first.step, first.kind, first.cause) == (AT, "start", "restored state"), str(first)
