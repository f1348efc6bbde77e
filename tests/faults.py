"""Trainings over gloo in which one rank loses step with the others, and what each rank then sees."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.algorithms.decentralized import DecentralizedAlgorithmImpl
from bagua_ref.errors import CommunicationError

WIDTH = 32


@dataclass
class Training:
    """A module of equal layers, each in a bucket of its own, on one rank."""

    rank: int
    module: nn.Module
    optimizer: torch.optim.Optimizer
    errors: list[str]
    batches: int = 0

    @property
    def rounds_begin_in_forward(self) -> bool:
        return isinstance(self.module.bagua_algorithm, DecentralizedAlgorithmImpl)

    def backward(self) -> None:
        """Run forward and backward passes on this rank's next batch."""
        self.batches += 1
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * self.rank + self.batches)
        self.module(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()

    def step(self) -> None:
        """Take a training step."""
        self.backward()
        self.optimizer.step()

    def try_to(self, action: Callable[[], object]) -> None:
        """Run ``action()`` as code that catches the errors of communication and goes on."""
        try:
            action()
        except CommunicationError as error:
            self.errors.append(str(error))

    def state(self) -> list[Any]:
        return copy.deepcopy([self.module.state_dict(), self.optimizer.state_dict(), self.module.bagua_algorithm.state_dict()])

    def load(self, state: list[Any]) -> None:
        for part, saved in zip((self.module, self.optimizer, self.module.bagua_algorithm), copy.deepcopy(state), strict=True):
            part.load_state_dict(saved)


def adam(module: nn.Module, warmup_steps: int) -> tuple[torch.optim.Optimizer, Algorithm]:
    optimizer = QAdamOptimizer(module.parameters(), lr=0.01, warmup_steps=warmup_steps)
    return optimizer, QAdamAlgorithm(optimizer, hierarchical=False)


def sgd(algorithm: Algorithm) -> Callable[[nn.Module], tuple[torch.optim.Optimizer, Algorithm]]:
    return lambda module: (torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), algorithm)


ALGORITHMS: dict[str, Callable[[nn.Module], tuple[torch.optim.Optimizer, Algorithm]]] = {
    "gradient_allreduce": sgd(GradientAllReduceAlgorithm()),
    "bytegrad": sgd(ByteGradAlgorithm(hierarchical=False)),
    "decentralized": sgd(DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="shift_one")),
    "decentralized, interval 2": sgd(DecentralizedAlgorithm(hierarchical=False, communication_interval=2)),
    "low_precision_decentralized": sgd(LowPrecisionDecentralizedAlgorithm(hierarchical=False)),
    "qadam in warm-up": lambda module: adam(module, 100),
    "qadam": lambda module: adam(module, 2),
    "async in warm-up": sgd(AsyncModelAverageAlgorithm(sync_interval_ms=10, warmup_steps=100)),
    "async at the end of its warm-up": sgd(AsyncModelAverageAlgorithm(sync_interval_ms=10, warmup_steps=5)),
}


def network() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def begin(algorithm: str, **options: Any) -> Training:
    torch.manual_seed(0)
    module = network()
    optimizer, made = ALGORITHMS[algorithm](module)
    module.with_bagua([optimizer], made, **options)
    training = Training(bagua_ref.get_rank(), module, optimizer, [])
    for _ in range(3):
        training.step()
    return training


def abandons_a_backward(training: Training) -> None:
    """Rank 1 catches its own exception in the middle of a backward pass and takes the next batch."""
    if training.rank == 1:

        def fail(grad: torch.Tensor) -> None:
            raise ZeroDivisionError

        handle = training.module[2].weight.register_hook(fail)
        try:
            training.backward()
        except ZeroDivisionError:
            handle.remove()
    for _ in range(4 - training.rank):
        training.try_to(training.step)


def skips_an_optimizer_step(training: Training) -> None:
    """Rank 1 does not call optimizer.step() once."""
    training.try_to(training.backward if training.rank == 1 else training.step)
    for _ in range(4):
        training.try_to(training.step)


def loads_another_checkpoint(training: Training) -> None:
    """The ranks load checkpoints of different steps."""
    earlier = training.state()
    training.step()
    training.step()
    training.load(training.state() if training.rank == 1 else earlier)
    for _ in range(4):
        training.try_to(training.step)


def loads_other_weights(training: Training) -> None:
    """Rank 1 alone loads weights."""
    if training.rank == 1:
        training.module.load_state_dict({name: value + 1 for name, value in training.module.state_dict().items()})
    for _ in range(4):
        training.try_to(training.step)


def comes_late(training: Training) -> None:
    """Rank 1 comes later than the module's timeout."""
    if training.rank == 1:
        time.sleep(2)
    for _ in range(4):
        training.try_to(training.step)


def forgets_a_batch(training: Training) -> None:
    """Rank 1 skips a batch before its forward pass."""
    training.batches += training.rank
    for _ in range(4):
        training.try_to(training.step)


def looks_at_a_batch(training: Training) -> None:
    """Rank 0 runs a forward pass in training mode, without backward."""
    forwards = 0
    if training.rank == 0:
        training.module(torch.ones(1, WIDTH))
        forwards = training.rounds_begin_in_forward
    for _ in range(4 - forwards):
        training.try_to(training.step)


def ends_early(training: Training) -> None:
    """Rank 1 takes one step less and waits in a barrier, to which rank 0 does not come when its step fails."""
    for _ in range(4 - training.rank):
        training.try_to(training.step)
    if training.rank == 1:
        training.try_to(bagua_ref.barrier)
    else:
        time.sleep(3)


def dies(training: Training) -> None:
    """Rank 1 is killed between two steps."""
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(4):
        training.try_to(training.step)


def dies_in_backward(training: Training) -> None:
    """Rank 1 is killed in the middle of a backward pass."""
    if training.rank == 1:
        training.module[2].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    for _ in range(4):
        training.try_to(training.step)


def stops(training: Training, seconds: float) -> None:
    """Rank 1 is stopped for some seconds."""
    if training.rank == 1:
        awake = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        awake.wait()
    for _ in range(4):
        training.try_to(training.step)


def raises_before_backward(training: Training) -> None:
    """Rank 1 catches its own exception between forward and backward and takes the next batch."""
    forwards = 0
    if training.rank == 1:
        training.optimizer.zero_grad()
        training.module(torch.ones(4, WIDTH))
        forwards = training.rounds_begin_in_forward
    for _ in range(4 - forwards):
        training.try_to(training.step)


def ends_by_an_exception(training: Training) -> None:
    """Rank 1 ends with an exception that nobody catches."""
    if training.rank == 1:
        raise ValueError("a batch is empty")
    for _ in range(4):
        training.try_to(training.step)


def leaves(training: Training) -> None:
    """Rank 1 ends after fewer steps, without abort or destroy_process_group()."""
    if training.rank == 1:
        raise SystemExit(0)
    for _ in range(4):
        training.try_to(training.step)


def destroys(training: Training) -> None:
    """Rank 1 calls destroy_process_group() in the middle."""
    if training.rank == 1:
        bagua_ref.destroy_process_group()
    for _ in range(4):
        training.try_to(training.step)


def is_interrupted(training: Training) -> None:
    """Rank 1 gets Ctrl-C while it waits for rank 0, and goes on."""
    if training.rank == 0:
        time.sleep(2)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell's background jobs ignore it
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    for _ in range(4):
        try:
            training.try_to(training.step)
        except KeyboardInterrupt:
            training.errors.append("KeyboardInterrupt")


def leaves_a_parameter_unused(training: Training) -> None:
    """Rank 1's loss does not depend on the last layer once."""
    if training.rank == 1:
        training.optimizer.zero_grad()
        training.try_to(lambda: training.module(torch.ones(4, WIDTH)))
        training.try_to(lambda: training.module[:4](torch.ones(4, WIDTH)).sum().backward())
        training.try_to(training.optimizer.step)
    for _ in range(4 - training.rank):
        training.try_to(training.step)


def has_a_nan(training: Training) -> None:
    """Rank 1's gradients are NaN once."""
    if training.rank == 1:
        handle = training.module[2].weight.register_hook(lambda grad: grad * float("nan"))
        training.try_to(training.step)
        handle.remove()
    for _ in range(4 - training.rank):
        training.try_to(training.step)


def run(
    fault: Callable[[Training], None], algorithms: list[str], options: dict[str, Any]
) -> dict[str, tuple[list[str], float, int]]:
    """Return for each algorithm the errors of this rank, the seconds it took, and the optimizer steps taken."""
    results = {}
    for algorithm in algorithms:
        training = begin(algorithm, **options)
        start = time.monotonic()
        fault(training)
        results[algorithm] = training.errors, time.monotonic() - start, training.module._bagua.steps_of_optimizers[0]
        bagua_ref.barrier()
    return results
