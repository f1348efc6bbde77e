"""Trainings that `bagua_ref.record` records, each with a fault that makes it part from the right
one at a known record.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bagua_ref

STEPS, AT = 7, 3
"""Steps of a training, and the one at which most faults begin."""


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
    )


class Training:
    """A training whose methods faults replace."""

    def __init__(self) -> None:
        self.seed, self.first, self.rank = 0, 0, 0
        torch.manual_seed(0)
        self.batches = [
            torch.randn(8, 6, generator=torch.Generator().manual_seed(k)) for k in range(STEPS)
        ]
        self.build()

    def build(self) -> None:
        torch.manual_seed(self.seed)
        random.seed()  # from the system, as in most scripts, which use neither
        np.random.seed()  # noqa: NPY002
        self.model: nn.Module = network()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.9
        )

    def part(self, name: str) -> Any:
        return self.model.get_submodule(name)

    def before(self, k: int) -> None:
        """Run before step k."""

    def forward(self, k: int, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        return y

    def loss(self, k: int, y: Tensor) -> Tensor:
        return y.square().mean()

    def backward(self, k: int, loss: Tensor) -> None:
        loss.backward()

    def after_backward(self, k: int) -> None:
        """Run before the optimizer's step k."""

    def step(self, k: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, folder: Path | None, stop: int = STEPS, **options: Any) -> None:
        """Train; None: without recording."""
        batches = self.batches[self.first : stop]
        options = {"first_step": self.first or None, **options}
        with (
            bagua_ref.record(self.model, self.optimizer, folder, batches, **options)
            if folder
            else contextlib.nullcontext() as recording
        ):
            k = self.first
            for x in recording or batches:
                self.before(k)
                loss = self.loss(k, self.forward(k, x))
                self.backward(k, recording.loss(loss) if recording else loss)
                self.after_backward(k)
                self.step(k)
                k += 1


@dataclass(frozen=True)
class Fault:
    """A fault: its name, what it does to a `Training`, and where and how the records must part."""

    name: str
    plant: Callable[[Training], None]
    step: int
    record: str
    cause: str


def at(
    place: str, action: Callable[[Training, Any], Any], once: bool = True
) -> Callable[[Training], None]:
    """Return a fault that replaces a method from step `AT` on, or in it alone; the action gets the
    training and the argument.
    """

    def plant(t: Training) -> None:
        right = getattr(t, place)

        def faulty(k: int, *args: Any) -> Any:
            if k == AT or (k > AT and not once):
                return action(t, args[0] if args else None)
            return right(k, *args)

        setattr(t, place, faulty)

    return plant


def batches(change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[Training], None]:
    def plant(t: Training) -> None:
        t.batches = change(t.batches)

    return plant


def other_seed(t: Training) -> None:
    t.seed = 1
    t.build()


def other_weights(t: Training) -> None:
    t.part("4").weight.data *= 1.5


def without_decay(t: Training) -> None:
    biases = [p for name, p in t.model.named_parameters() if name.endswith("bias")]
    rest = [p for name, p in t.model.named_parameters() if not name.endswith("bias")]
    t.optimizer = torch.optim.SGD(
        [{"params": rest}, {"params": biases, "weight_decay": 0.1}], lr=0.1, momentum=0.9
    )


def option(name: str, value: float) -> Callable[[Training], None]:
    def change(t: Training, _: Any) -> None:
        t.optimizer.param_groups[0][name] = value

    return at("before", change, once=False)


def frozen(t: Training) -> None:
    t.part("0").weight.requires_grad_(False)


def with_grads(change: Callable[[Tensor], Tensor]) -> Callable[[Training], None]:
    def apply(t: Training, _: Any) -> None:
        for p in t.model.parameters():
            assert p.grad is not None
            p.grad = change(p.grad)

    return at("after_backward", apply)


def stale(t: Training) -> None:
    old = t.part("1").running_mean.clone()
    at("before", lambda t, _: t.part("1").running_mean.copy_(old))(t)


def accumulate(t: Training) -> None:
    t.step = lambda k: Training.step(t, k) if k % 2 else None  # type: ignore[method-assign, return-value]


def other_order(t: Training, x: Tensor) -> Tensor:
    """Return the network's output, its first layer with the products added from the last to the
    first.
    """
    layer = t.part("0")

    def added(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        total = layer.bias.clone().expand_as(output)
        for column in reversed(range(x.shape[1])):
            total = total + x[:, column : column + 1] * layer.weight[:, column]
        return total

    with_hook = layer.register_forward_hook(added, prepend=True)
    try:
        y: Tensor = t.model(x)
        return y
    finally:
        with_hook.remove()


def clipped(t: Training, _: Any) -> None:
    torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)


def all_in_bfloat16(t: Training) -> None:
    t.model.bfloat16()
    t.forward = lambda k, x: t.model(x.bfloat16()).float()  # type: ignore[method-assign]


def infinite(t: Training, x: Tensor) -> Tensor:
    hook = t.part("2").register_forward_hook(lambda module, args, output: output / 0, prepend=True)
    y: Tensor = t.model(x)
    hook.remove()
    return y


def wrong_backward(t: Training, x: Tensor) -> Tensor:
    def with_hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        output.register_hook(lambda grad: grad.sign())
        return output

    hook = t.part("2").register_forward_hook(with_hook)
    y: Tensor = t.model(x)
    hook.remove()
    return y


def larger_model(t: Training) -> None:
    t.model.append(nn.Linear(3, 3))  # type: ignore[operator]


FAULTS = [
    Fault("another seed", other_seed, 0, "weight:0.weight", "random state"),
    Fault("other initial weights", other_weights, 0, "weight:4.weight", "initial weights"),
    Fault(
        "shuffled batches",
        batches(lambda b: [*b[:AT], b[5], b[6], b[3], b[4]]),
        AT,
        "batch:",
        "other order of data",
    ),
    Fault(
        "a sample of another data set",
        batches(lambda b: [*b[:AT], b[AT] + 1, *b[AT + 1 :]]),
        AT,
        "batch:",
        "other data",
    ),
    Fault(
        "a batch left out", batches(lambda b: [*b[:AT], *b[AT + 1 :]]), AT, "batch:", "skipped step"
    ),
    Fault(
        "another dropout",
        at("before", lambda t, _: setattr(t.part("3"), "p", 0.5)),
        AT,
        "output:",
        "settings of a module",
    ),
    Fault(
        "weights changed between steps",
        at("before", lambda t, _: t.part("0").weight.data.mul_(2)),
        AT,
        "output:",
        "forward",
    ),
    Fault("a stale buffer", stale, AT, "buffer:1.running_mean", "buffer"),
    Fault(
        "a skipped step",
        at("step", lambda t, _: t.optimizer.zero_grad()),
        AT,
        "batch:#2",
        "skipped step",
    ),
    Fault("accumulated gradients", accumulate, 0, "batch:#2", "gradient accumulation"),
    Fault("another learning rate", option("lr", 0.05), AT, "option:0.weight", "learning rate"),
    Fault("weight decay on biases", without_decay, 0, "option:0.bias", "option"),
    Fault("flipped signs", with_grads(torch.neg), AT, "grad:0.weight", "gradient changed"),
    Fault(
        "products added in another order",
        at("forward", other_order),
        AT,
        "output:",
        "reduction order",
    ),
    Fault("a division by zero", at("forward", infinite), AT, "output:", "not finite"),
    Fault("a summed loss", at("loss", lambda t, y: y.square().sum()), AT, "loss:", "missing mean"),
    Fault("another loss", at("loss", lambda t, y: y.abs().mean()), AT, "loss:", "loss"),
    Fault(
        "a scaled loss",
        at("backward", lambda t, loss: (loss * 128).backward()),
        AT,
        "local:4.bias",
        "scaled gradient",
    ),
    Fault("a wrong backward", at("forward", wrong_backward), AT, "local:1.weight", "backward"),
    Fault("a layer more", larger_model, 0, "weight:5.weight", "model"),
    Fault("clipped norms", at("after_backward", clipped), AT, "grad:0.weight", "clipping"),
    Fault("bfloat16", all_in_bfloat16, 0, "weight:0.weight", "dtype or device"),
    Fault("a frozen weight", frozen, 0, "local:0.weight", "missing gradient"),
]
