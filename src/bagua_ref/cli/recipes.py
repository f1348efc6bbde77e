"""The demo's network, data and settings of each algorithm. A new algorithm is one line in `RECIPES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bagua_ref.algorithms import Algorithm, QAdamOptimizer

__all__ = ["ALONE", "RECIPES", "Digits", "Recipe", "Settings", "make_model"]

ALONE = "single process"
"""The name of the baseline: the same batches in one process, with plain torch."""

GLOBAL_BATCH = 64
TRAINING_IMAGES = 1437  # four fifths of the images; the other 360 are the test set
_QUICK_STEPS = 10


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _qadam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # The variance freezes early: with Adam's eps of 1e-8, weights whose gradients were almost zero until then get huge steps.
    return QAdamOptimizer(parameters, lr=2e-3, warmup_steps=50, eps=1e-3)


@dataclass(frozen=True)
class Recipe:
    """The setup of training with one algorithm.

    Args:
        arguments: the arguments of ``Algorithm.init``.
        make_optimizer: makes the optimizer from the parameters.
        optimizer_argument: the name of the algorithm's argument for the optimizer, if it has one.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _sgd
    optimizer_argument: str | None = None

    def make_algorithm(self, name: str, optimizer: torch.optim.Optimizer) -> Algorithm:
        """Return the algorithm registered as ``name``."""
        wanted = {self.optimizer_argument: optimizer} if self.optimizer_argument is not None else {}
        return Algorithm.init(name, **self.arguments, **wanted)


# On one node, hierarchical communication saves no traffic, so it is off.
RECIPES: dict[str, Recipe] = {
    "gradient_allreduce": Recipe({"hierarchical": False}),
    "bytegrad": Recipe({"hierarchical": False}),
    "decentralized": Recipe({"hierarchical": False}),
    "low_precision_decentralized": Recipe({"hierarchical": False}),
    "qadam": Recipe({"hierarchical": False}, _qadam, "q_adam_optimizer"),
    "async": Recipe({"sync_interval_ms": 50}),
    "local_sgd": Recipe({"period": 8}),
    "diloco": Recipe({"period": 16, "fragments": 4, "delay": 2, "mix": 0.5}),
    "powersgd": Recipe({"matrix_approximation_rank": 4, "warmup_steps": 10}),
    "topk": Recipe({"ratio": 0.05, "warmup_steps": 10}),
}


@dataclass(frozen=True)
class Settings:
    """The options that the user chose.

    Raises:
        ValueError: a number is out of range or a name is unknown.
    """

    workers: int = 4
    epochs: int = 10
    seed: int = 0
    algorithms: tuple[str, ...] = tuple(RECIPES)
    quick: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= GLOBAL_BATCH:
            raise ValueError(f"workers={self.workers} must be from 1 to {GLOBAL_BATCH}, the number of images in a batch")
        if not 1 <= self.epochs <= 1000:
            raise ValueError(f"epochs={self.epochs} must be from 1 to 1000")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be from 0 to {2**32 - 1}")
        for name in self.algorithms:
            if name not in RECIPES:
                raise ValueError(f"algorithms: {name!r} must be one of {', '.join(RECIPES)}")
        if len(set(self.algorithms)) < len(self.algorithms):
            raise ValueError(f"algorithms: {' '.join(self.algorithms)} names an algorithm twice")

    @property
    def batch(self) -> int:
        """Images per step and worker."""
        return GLOBAL_BATCH // self.workers

    @property
    def steps_per_epoch(self) -> int:
        """Steps per pass over the training images, without an incomplete last batch."""
        return _QUICK_STEPS if self.quick else TRAINING_IMAGES // (self.batch * self.workers)

    @property
    def steps(self) -> int:
        """Steps per algorithm."""
        return self.steps_per_epoch * (1 if self.quick else self.epochs)


@dataclass(frozen=True)
class Digits:
    """Images (m, 1, 8, 8) with values from 0 to 1 and their labels (m,), split into a training and a test set."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @staticmethod
    def load() -> Digits:
        """Return the 1797 digits of scikit-learn, always with the same split."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
        labels = torch.tensor(digits.target, dtype=torch.int64)[order]
        return Digits(images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES], images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:])

    def save(self, path: Path) -> None:
        """Write the file that `restore` reads, so that workers need not import scikit-learn."""
        np.savez(path, **{name: tensor.numpy() for name, tensor in vars(self).items()})

    @staticmethod
    def restore(path: Path) -> Digits:
        """Read the file that `save` wrote."""
        with np.load(path) as arrays:
            return Digits(**{name: torch.from_numpy(arrays[name]) for name in arrays.files})

    def batches(self, settings: Settings, share: int, shares: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield part ``share`` of ``shares`` of every step's batch; the whole batch does not depend on ``shares``."""
        whole = settings.batch * settings.workers
        size = whole // shares
        for step in range(settings.steps):
            epoch, place = divmod(step, settings.steps_per_epoch)
            order = torch.randperm(TRAINING_IMAGES, generator=torch.Generator().manual_seed(settings.seed + epoch))
            mine = order[place * whole + share * size :][:size]
            yield self.train_images[mine], self.train_labels[mine]


def make_model() -> nn.Module:
    """Return a convolutional network with 38,282 parameters for images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
