"""Trainings over gloo in which one rank loses step with the others, and what each rank then
sees.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils.data
from tests.trainings import by_name
from torch import nn

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.algorithms.decentralized import DecentralizedAlgorithmImpl
from bagua_ref.base.runtime import current_world
from bagua_ref.errors import CommunicationError

WIDTH = 32
LIFE = 20
"""Seconds that a child of a killed rank lives on."""


@dataclass
class Training:
    """A module of equal layers, each in a bucket of its own, on one rank."""

    rank: int
    module: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int = 4
    """How many follow the fault."""
    batches: int = 0
    errors: list[str] = field(default_factory=list)
    first_error: float = math.inf
    """When it was."""

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
            self.first_error = min(self.first_error, time.monotonic())
            self.errors.append(str(error))

    def go_on(self, fewer: int = 0) -> None:
        """Take the steps that follow the fault."""
        for _ in range(self.steps - fewer):
            self.try_to(self.step)

    def state(self) -> list[Any]:
        return copy.deepcopy(
            [
                self.module.state_dict(),
                self.optimizer.state_dict(),
                self.module.bagua_algorithm.state_dict(),
            ]
        )

    def load(self, state: list[Any]) -> None:
        for part, saved in zip(
            (self.module, self.optimizer, self.module.bagua_algorithm),
            copy.deepcopy(state),
            strict=True,
        ):
            part.load_state_dict(saved)


Make = Callable[[nn.Module], tuple[Any, Algorithm]]


def named(name: str, **options: Any) -> Make:
    return lambda module: by_name(name, module, momentum=0.9, **options)


ALGORITHMS: dict[str, Make] = {
    "gradient_allreduce": named("gradient_allreduce"),
    "bytegrad": named("bytegrad", hierarchical=False),
    "decentralized": named("decentralized", hierarchical=False, peer_selection_mode="shift_one"),
    "decentralized, interval 2": named(
        "decentralized", hierarchical=False, communication_interval=2
    ),
    "low_precision_decentralized": named("low_precision_decentralized", hierarchical=False),
    "qadam in warm-up": lambda module: by_name(
        "qadam", module, warmup_steps=100, hierarchical=False
    ),
    "qadam": lambda module: by_name("qadam", module, hierarchical=False),
    "async in warm-up": named("async", sync_interval_ms=10, warmup_steps=100),
    "async at the end of its warm-up": named("async", sync_interval_ms=10, warmup_steps=5),
    "async": named("async", sync_interval_ms=10),
    "local_sgd": named("local_sgd", period=2, warmup_steps=1),
    "diloco": named("diloco", period=2, warmup_steps=1),
    "powersgd": named("powersgd", warmup_steps=2),
    "topk": named("topk"),
}


def network(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(
        *(layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    )


def begin(algorithm: str, steps: int = 3, **options: Any) -> Training:
    """Wrap a module and take ``steps``."""
    torch.manual_seed(0)
    module = network()
    optimizer, made = ALGORITHMS[algorithm](module)
    module.with_bagua([optimizer], made, **options)
    training = Training(bagua_ref.get_rank(), module, optimizer)
    for _ in range(steps):
        training.step()
    return training


def abandons_a_backward(training: Training, layer: int = 2) -> None:
    """Rank 1 catches its own exception in the middle of a backward pass and takes the next
    batch.
    """
    if training.rank == 1:

        def fail(grad: torch.Tensor) -> None:
            raise ZeroDivisionError

        handle = training.module[layer].weight.register_hook(fail)
        try:
            training.backward()
        except ZeroDivisionError:
            handle.remove()
    training.go_on(fewer=training.rank)


def raises_after_backward(training: Training) -> None:
    """Rank 1 catches its own exception between backward and optimizer.step() and takes the next
    batch.
    """
    if training.rank == 1:
        training.try_to(training.backward)
    training.go_on(fewer=training.rank)


def skips_an_optimizer_step(training: Training) -> None:
    """Rank 1 does not call optimizer.step() once."""
    training.try_to(training.backward if training.rank == 1 else training.step)
    training.go_on()


def loads_another_checkpoint(training: Training) -> None:
    """The ranks load checkpoints of different steps."""
    earlier = training.state()
    training.step()
    training.step()
    training.load(training.state() if training.rank == 1 else earlier)
    training.go_on()


def loads_other_weights(training: Training) -> None:
    """Rank 1 alone loads weights."""
    if training.rank == 1:
        training.module.load_state_dict(
            {name: value + 1 for name, value in training.module.state_dict().items()}
        )
    training.go_on()


def makes_other_buckets(training: Training) -> None:
    """Rank 1 alone puts its parameters into buckets of another size."""
    if training.rank == 1:
        context = training.module._bagua
        context.options = replace(context.options, bucket_bytes=2**20)
        context.reset()
    for _ in range(4):
        training.try_to(training.step)


def comes_late(training: Training) -> None:
    """Rank 1 comes later than the module's timeout."""
    if training.rank == 1:
        current_world().sleep(5)
    training.go_on()


def forgets_a_batch(training: Training) -> None:
    """Rank 1 skips a batch before its forward pass."""
    training.batches += training.rank
    training.go_on()


def looks_at_a_batch(training: Training) -> None:
    """Rank 0 runs a forward pass in training mode, without backward."""
    forwards = 0
    if training.rank == 0:
        training.module(torch.ones(1, WIDTH))
        forwards = training.rounds_begin_in_forward
    training.go_on(fewer=forwards)


def ends_early(training: Training, pause: float = 3.0) -> None:
    """Rank 1 takes one step less and waits in a barrier, to which rank 0 does not come when its
    step fails, before a pause.
    """
    training.go_on(fewer=training.rank)
    if training.rank == 1:
        training.try_to(bagua_ref.barrier)
    else:
        current_world().sleep(pause)


def dies(training: Training) -> None:
    """Rank 1 is killed between two steps."""
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    training.go_on()


def dies_before_its_children(training: Training, children: Callable[[], object]) -> None:
    """Rank 1 is killed between two steps, and processes that it has started live on for a while."""
    if training.rank == 1:
        kept = children()
        os.kill(os.getpid(), signal.SIGKILL)
        del kept
    training.go_on()


class Slow(torch.utils.data.Dataset[int]):
    """Samples of which all but the first ones take long."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index > 3:
            time.sleep(LIFE)
        return index


def workers() -> Any:
    """Start workers of a DataLoader, which soon load a sample that takes long."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # daemons may not have children
    samples = iter(
        torch.utils.data.DataLoader(Slow(), num_workers=2, multiprocessing_context="fork")
    )
    next(samples)
    return samples


def fork() -> None:
    """Fork a process by os.fork()."""
    if os.fork() == 0:
        time.sleep(LIFE)
        os._exit(0)


def fork_unseen() -> None:
    """Fork a process of which Python does not know, as libraries do, by the function of C."""
    if ctypes.CDLL(None).fork() == 0:
        ctypes.CDLL(None).sleep(int(LIFE))
        ctypes.CDLL(None)._exit(0)


def start_a_program() -> Any:
    """Start a program that inherits all descriptors that programs may inherit."""
    return subprocess.Popen(["sleep", str(LIFE)], close_fds=False)


def serves_and_dies(training: Training) -> None:
    """Rank 0, which serves the job's store, is killed between two steps, while a process that it
    has forked lives on.
    """
    if training.rank == 0:
        fork()
        os.kill(os.getpid(), signal.SIGKILL)
    training.go_on()


_held: list[socket.socket] = []


def serve_the_store() -> None:
    """Let rank 0 serve the store, as without torchrun, at a port that it finds."""
    agents = torch.distributed.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), wait_for_workers=False
    )
    if os.environ["RANK"] == "0":
        # Held until this process ends, so that no other program gets it before the store listens.
        _held.append(socket.socket())
        _held[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _held[0].bind(("127.0.0.1", 0))
        agents.set("port", str(_held[0].getsockname()[1]))
    os.environ["MASTER_PORT"] = agents.get("port").decode()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]


def dies_in_backward(training: Training) -> None:
    """Rank 1 is killed in the middle of a backward pass."""
    if training.rank == 1:
        training.module[2].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    training.go_on()


def stops(training: Training, seconds: float) -> None:
    """Rank 1 is stopped for some seconds."""
    if training.rank == 1:
        awake = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        awake.wait()
    training.go_on()


def raises_before_backward(training: Training) -> None:
    """Rank 1 catches its own exception between forward and backward and takes the next batch."""
    forwards = 0
    if training.rank == 1:
        training.optimizer.zero_grad()
        training.module(torch.ones(4, WIDTH))
        forwards = training.rounds_begin_in_forward
    training.go_on(fewer=forwards)


def is_stopped(training: Training) -> None:
    """Rank 1 is stopped for good."""
    if training.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    training.go_on()


def is_interrupted_in_backward(training: Training) -> None:
    """Rank 1 gets Ctrl-C in the middle of a backward pass, and does nothing more."""
    if training.rank != 1:
        training.go_on()
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    training.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGINT))
    with suppress(KeyboardInterrupt):
        training.step()


def handles_ctrl_c(training: Training) -> None:
    """Rank 1 gets Ctrl-C between two steps, and stays in the handler until the others gave up."""
    if training.rank != 1:
        training.go_on()
        return
    store = torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        store.wait(["0", "2"])


def ends_by_an_uncaught_exception(training: Training) -> None:
    """Rank 1's interpreter ends by an exception, as a script's."""
    if training.rank == 1:
        sys.last_value = ValueError("no batch 7")
        atexit._run_exitfuncs()
    training.go_on()


def destroys_after_an_error(training: Training) -> None:
    """Rank 1 calls destroy_process_group() while it handles an exception."""
    if training.rank == 1:
        try:
            raise ValueError("no batch 7")
        except ValueError:
            bagua_ref.destroy_process_group()
    training.go_on()


def gives_up(training: Training) -> None:
    """Rank 1 aborts the group, and does nothing more."""
    if training.rank == 1:
        training.module._bagua.process_group.abort("it has had enough")
    else:
        training.go_on()


def steps_without_a_forward(training: Training) -> None:
    """Rank 1 differentiates its layers instead of the module, is refused the step, and does nothing
    more.
    """
    if training.rank == 1:
        training.optimizer.zero_grad()
        training.module[2](training.module[0](torch.ones(1, WIDTH))).sum().backward()
        with suppress(RuntimeError):
            training.optimizer.step()
    else:
        training.go_on()


def waits_in_a_barrier(training: Training) -> None:
    """Rank 1 waits in a barrier, to which the others do not come."""
    training.try_to(bagua_ref.barrier if training.rank == 1 else training.step)


def ends_by_an_exception(training: Training) -> None:
    """Rank 1 ends with an exception that nobody catches."""
    if training.rank == 1:
        raise ValueError("a batch is empty")
    training.go_on()


def leaves(training: Training) -> None:
    """Rank 1's interpreter ends after fewer steps, without abort or destroy_process_group()."""
    if training.rank == 1:
        # SystemExit would be caught, and the worker end without the interpreter's own work
        ctypes.pythonapi.Py_Exit(0)
    training.go_on()


def destroys(training: Training) -> None:
    """Rank 1 calls destroy_process_group() in the middle."""
    if training.rank == 1:
        bagua_ref.destroy_process_group()
    training.go_on()


def is_interrupted(training: Training) -> None:
    """Rank 1 gets Ctrl-C while it waits for rank 0, and goes on."""
    if training.rank == 0:
        current_world().sleep(2)
    else:
        # the shell's background jobs ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
        training.try_to(lambda: training.module[:-2](torch.ones(4, WIDTH)).sum().backward())
        training.try_to(training.optimizer.step)
    training.go_on(fewer=training.rank)


def freezes_a_parameter(training: Training) -> None:
    """Rank 1 freezes a parameter after wrapping."""
    if training.rank == 1:
        training.module[2].weight.requires_grad_(False)
    training.go_on()


def has_no_number(training: Training, value: float) -> None:
    """Rank 1's gradients are NaN or infinite once."""
    if training.rank == 1:
        handle = training.module[2].weight.register_hook(lambda grad: torch.full_like(grad, value))
        training.try_to(training.step)
        handle.remove()
    training.go_on(fewer=training.rank)


def loses_its_link(training: Training, device: str, seconds: float | None) -> None:
    """Rank 1's network device goes down, for some seconds or for ever."""
    if training.rank == 1:
        subprocess.run(["ip", "link", "set", device, "down"], check=True)
        if seconds is not None:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; ip link set {device} up"])
    training.go_on()


def run(
    fault: Callable[[Training], None], algorithms: list[str], options: dict[str, Any]
) -> dict[str, tuple[list[str], float, int]]:
    """Return for each algorithm the errors of this rank, the seconds it took, and the optimizer
    steps taken.
    """
    results = {}
    for algorithm in algorithms:
        training = begin(algorithm, **options)
        start = time.monotonic()
        fault(training)
        results[algorithm] = (
            training.errors,
            time.monotonic() - start,
            training.module._bagua.steps_of_optimizers[0],
        )
        bagua_ref.barrier()
    return results
