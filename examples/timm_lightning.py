"""Train an image classifier of timm on scikit-learn's handwritten digits in Lightning, once with
each algorithm.

torchrun --nproc_per_node=2 examples/timm_lightning.py --plot timm.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from loss_curves import Point, draw
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset, random_split

from bagua_ref.integrations.lightning import BaguaStrategy

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "local_sgd": {"period": 8},
}


class Classifier(LightningModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        self.net = timm.create_model(model, num_classes=10, in_chans=1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        scores = self.net(images)
        self.log("loss", cross_entropy(scores, labels), sync_dist=True)
        self.log("accuracy", (scores.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Curve(Callback):
    """Keeps a point for each validation."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sent = trainer.strategy.model.bagua_metrics()["bytes_sent"]
        self.points.append(
            Point(trainer.global_step, sent / 1e6, trainer.callback_metrics["loss"].item())
        )


def main(argv: Sequence[str] | None = None) -> dict[str, list[Point]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--model", default="resnet10t", help="its name in timm")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses")
    arguments = parser.parse_args(argv)

    digits = load_digits()
    images = interpolate(
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, size=32, mode="bilinear"
    )
    data = TensorDataset(images, torch.tensor(digits.target))

    curves = {}
    for name in arguments.algorithms:
        seed_everything(0)
        training, held_out = random_split(data, [1440, len(data) - 1440])
        curve = Curve()
        trainer = Trainer(
            strategy=BaguaStrategy(name, **ALGORITHMS[name]),
            accelerator="cpu",
            devices=2,
            max_epochs=arguments.epochs,
            callbacks=[curve],
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # On each rank, Lightning takes a share of each.
        trainer.fit(
            Classifier(arguments.model),
            DataLoader(training, 32, shuffle=True),
            DataLoader(held_out, 128),
        )
        curves[name] = curve.points
        accuracy = trainer.callback_metrics["accuracy"].item()
        if trainer.is_global_zero:
            reached = curve.points[-1]
            print(
                f"{name}: accuracy {accuracy:.1%}, held-out loss {reached.loss:.3f},"
                f" {reached.megabytes:.1f} MB sent by each rank"
            )
    if trainer.is_global_zero and arguments.plot:
        draw(curves, f"{arguments.model} on handwritten digits", arguments.plot)
    return curves


if __name__ == "__main__":
    main()
