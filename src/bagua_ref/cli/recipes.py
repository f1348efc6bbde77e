"""The demo's network, data, settings of each algorithm, and training. A new algorithm is one line
in `RECIPES`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import bagua_ref
from bagua_ref.algorithms import QAdamOptimizer
from bagua_ref.data_parallel.wrapping import Recipe, call_if_there
from bagua_ref.observe.meter import PER_STEP

__all__ = [
    "ALONE",
    "RECIPES",
    "Digits",
    "Settings",
    "TrainingOutcome",
    "make_model",
    "make_optimizer",
    "train",
]

ALONE = "single process"
"""The name of the baseline: the same batches in one process, with plain torch."""

GLOBAL_BATCH = 64
TRAINING_IMAGES = 1437  # four fifths of the images; the other 360 are the test set
_QUICK_STEPS = 10

# On one node, hierarchical communication saves no traffic, so it is off.
_OPTIONS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {"hierarchical": False},
    "bytegrad": {"hierarchical": False},
    "decentralized": {"hierarchical": False},
    "low_precision_decentralized": {"hierarchical": False},
    "qadam": {"hierarchical": False},
    "async": {"sync_interval_ms": 50},
    "local_sgd": {"period": 8},
    "diloco": {"period": 16, "fragments": 4, "delay": 2, "mix": 0.5},
    "powersgd": {"matrix_approximation_rank": 4, "warmup_steps": 10},
    "topk": {"ratio": 0.05, "warmup_steps": 10},
}
RECIPES = {name: Recipe(name, options, "the demo") for name, options in _OPTIONS.items()}


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer for training with algorithm ``name``, or `ALONE`."""
    if name == "qadam":
        # The variance freezes early: with Adam's eps of 1e-8, weights whose gradients were almost
        # zero until then get huge steps.
        return QAdamOptimizer(parameters, lr=2e-3, warmup_steps=50, eps=1e-3)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Settings:
    """The options that the user chose.

    Raises:
        ValueError: a number is out of range, or an algorithm is named twice.
    """

    ranks: int = 4
    epochs: int = 10
    seed: int = 0
    algorithms: tuple[str, ...] = tuple(RECIPES)
    quick: bool = False

    def __post_init__(self) -> None:
        for name, low, high, note in (
            ("ranks", 1, GLOBAL_BATCH, ", the number of images in a batch"),
            ("epochs", 1, 1000, ""),
            ("seed", 0, 2**32 - 1, ""),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)} must be from {low} to {high}{note}")
        if len(set(self.algorithms)) < len(self.algorithms):
            raise ValueError(f"algorithms: {' '.join(self.algorithms)} names an algorithm twice")

    @property
    def batch(self) -> int:
        """Images per step and worker."""
        return GLOBAL_BATCH // self.ranks

    @property
    def steps_per_epoch(self) -> int:
        """Steps per pass over the training images, without an incomplete last batch."""
        return _QUICK_STEPS if self.quick else TRAINING_IMAGES // (self.batch * self.ranks)

    @property
    def steps(self) -> int:
        """Steps per algorithm."""
        return self.steps_per_epoch * (1 if self.quick else self.epochs)


class Digits(NamedTuple):
    """Images (m, 1, 8, 8) with values from 0 to 1 and their labels (m,), split into a training and
    a test set.
    """

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
        return Digits(
            images[:TRAINING_IMAGES],
            labels[:TRAINING_IMAGES],
            images[TRAINING_IMAGES:],
            labels[TRAINING_IMAGES:],
        )

    def batches(
        self, settings: Settings, share: int, shares: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield part ``share`` of ``shares`` of every step's batch; the whole batch does not depend
        on ``shares``.
        """
        whole = settings.batch * settings.ranks
        size = whole // shares
        for step in range(settings.steps):
            epoch, place = divmod(step, settings.steps_per_epoch)
            order = torch.randperm(
                TRAINING_IMAGES, generator=torch.Generator().manual_seed(settings.seed + epoch)
            )
            mine = order[place * whole + share * size :][:size]
            yield self.train_images[mine], self.train_labels[mine]


def make_model() -> nn.Module:
    """Return a convolutional network with 38,282 parameters for images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@dataclass(frozen=True)
class TrainingOutcome:
    """The outcome of training with one algorithm.

    Attributes:
        algorithm: its name, or `ALONE`.
        test_accuracy: the share of test images that are classified correctly, mean over ranks.
        final_loss: the training loss, mean over ranks and the last epoch.
        bytes_per_step: bytes sent per step and rank.
        ratio: bytes_per_step divided by the bytes of a float32 all-reduce of the gradients; None if
            that needs no communication.
        steps_per_second: the speed of the slowest rank.
        weight_difference: the largest difference of any weight between two ranks after the last
            step.
        losses: the loss of each step, mean over ranks.
        bytes_sent: bytes sent up to each step, mean over ranks.
        warmup_steps: the steps, if any, in which all gradients are all-reduced first.
        metrics: those of ``bagua_metrics()`` per step after the warm-up, mean over ranks; empty:
            there were no such steps.
    """

    algorithm: str
    test_accuracy: float
    final_loss: float
    bytes_per_step: float
    ratio: float | None
    steps_per_second: float
    weight_difference: float
    losses: list[float]
    bytes_sent: list[float]
    warmup_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def train(
    name: str, settings: Settings, digits: Digits, report: Callable[..., None]
) -> TrainingOutcome:
    """Train with algorithm ``name``, or alone, from the seed; every rank of the world calls it, and
    gets the same outcome.

    Args:
        name: a name in `RECIPES`, or `ALONE` for one process that takes whole batches.
        settings: the settings of the demo.
        digits: the data.
        report: called with this rank's ``loss`` after each step.
    """
    alone = name == ALONE
    torch.manual_seed(settings.seed)
    model: Any = make_model()
    optimizer = make_optimizer(name, model.parameters())
    if not alone:
        RECIPES[name].wrap(model, [optimizer])
    rank, ranks = (0, 1) if alone else (bagua_ref.get_rank(), bagua_ref.get_world_size())
    warmup = (
        0
        if alone
        else getattr(optimizer, "warmup_steps", RECIPES[name].options.get("warmup_steps", 0))
    )
    losses, sent, counts = [], [], list[dict[str, float | int]]()
    begin = time.perf_counter()
    for images, labels in digits.batches(settings, rank, ranks):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sent.append(0 if alone else model.bagua_metrics()["bytes_sent"])
        if not alone and len(losses) in (max(warmup, 1), settings.steps):
            counts.append(model.bagua_metrics())
        report(loss=losses[-1])
    seconds = torch.tensor([time.perf_counter() - begin])
    call_if_there("abort", model)  # async averages in the background until it is stopped
    model.eval()
    shared = nullcontext if alone else getattr(model.bagua_algorithm, "global_weights", nullcontext)
    with torch.no_grad(), shared():
        accuracy = (
            (model(digits.test_images).argmax(1) == digits.test_labels).double().mean().item()
        )
    metrics = {}
    if len(counts) == 2:
        before, now = counts
        steps = now["steps"] - before["steps"]
        metrics = {
            f"{total}_per_step": (now[total] - before.get(total, 0)) / steps for total in PER_STEP
        }
    means = torch.tensor([accuracy, *metrics.values(), *losses, *sent], dtype=torch.float64)
    highest = parameters_to_vector(model.parameters()).detach().clone()
    lowest = highest.clone()
    if not alone:
        for values, operation in (
            (means, "AVG"),
            (seconds, "MAX"),
            (highest, "MAX"),
            (lowest, "MIN"),
        ):
            bagua_ref.allreduce_inplace(values, bagua_ref.ReduceOp[operation])
    accuracy, *rest = means.tolist()
    metrics = dict(zip(metrics, rest, strict=False))
    losses, sent = rest[len(metrics) :][: settings.steps], rest[-settings.steps :]
    last_epoch = losses[-settings.steps_per_epoch :]
    # of a float32 all-reduce of all gradients, on each rank
    full = 2 * (ranks - 1) / ranks * 4 * len(highest)
    return TrainingOutcome(
        algorithm=name,
        test_accuracy=accuracy,
        final_loss=sum(last_epoch) / len(last_epoch),
        bytes_per_step=sent[-1] / settings.steps,
        ratio=sent[-1] / settings.steps / full if full else None,
        steps_per_second=settings.steps / seconds.item(),
        weight_difference=float((highest - lowest).max()),
        losses=losses,
        bytes_sent=sent,
        warmup_steps=warmup,
        metrics=metrics,
    )
