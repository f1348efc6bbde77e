"""Tests of processes forked after ``init_process_group``, over gloo: they cannot use the parent's
groups, nor disturb them (S1).
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tests import failing_ranks as faults
from tests.launch import on_every_process
from tests.trainings import batch, network
from torch.utils.data import DataLoader, Dataset

import bagua_ref
from bagua_ref.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua_ref.communicators import gloo_sockets
from bagua_ref.communicators.gloo_sockets import open_sockets

REFUSED = (
    "CommunicationError: this process was forked after init_process_group() and cannot use its"
    " parent's process groups; "
)


def outcome(function: Callable[[], Any]) -> str:
    """Return what ``function()`` returns or raises, as text."""
    try:
        return str(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def forked(function: Callable[[], Any]) -> str:
    """Return the outcome of ``function()`` in a forked child, or how the child ended."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os.write(writer, outcome(function).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text if code == 0 else f"exit code {code}"


class Training:
    """A wrapped network and its steps."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.module: Any = network()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.module.with_bagua([self.optimizer], algorithm)

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.module(batch(bagua_ref.get_rank(), 0)).square().sum()
        return loss


def assert_undisturbed(training: Training) -> None:
    """Use all connections once more."""
    x = torch.full((100_000,), bagua_ref.get_rank() + 1.0)
    bagua_ref.allreduce_inplace(x)
    assert x[-1].item() == 3
    training.step()
    bagua_ref.new_group().get_global_communicator().barrier()


@on_every_process(2)
def test_S1_everything_that_would_communicate_is_refused_in_a_forked_child() -> None:
    training = Training(GradientAllReduceAlgorithm())
    group, x = bagua_ref.new_group(), torch.ones(3)
    communicator = group.get_global_communicator()
    training.step()
    loss = training.loss()
    tries: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: bagua_ref.allreduce_inplace(x),
        "send": lambda: bagua_ref.send(x, 1 - bagua_ref.get_rank()),
        "barrier": communicator.barrier,
        "broadcast_object": lambda: communicator.broadcast_object("o"),
        "abort": lambda: communicator.abort("enough"),
        "connect": group.get_intra_node_communicator,
        "new_group": bagua_ref.new_group,
        "destroy": bagua_ref.destroy_process_group,
        "init": bagua_ref.init_process_group,
        "forward": training.loss,
        "backward": loss.backward,
        "optimizer step": training.optimizer.step,
        "wrap": lambda: Training(GradientAllReduceAlgorithm()),
        "wrap again": lambda: training.module.with_bagua([], GradientAllReduceAlgorithm()),
    }
    said: dict[str, str] = json.loads(
        forked(lambda: json.dumps({name: outcome(function) for name, function in tries.items()}))
    )
    loss.backward()
    training.optimizer.step()
    assert_undisturbed(training)
    assert {name: text[: len(REFUSED)] for name, text in said.items()} == dict.fromkeys(
        said, REFUSED
    )
    assert "'spawn'" in said["allreduce"]
    does_not_communicate(training)


def in_eval_mode(training: Training) -> str:
    training.module.eval()
    with torch.no_grad():
        return str(training.module(batch(0, 0)).shape)


def drops_everything(training: Training) -> int:
    del training.module.__dict__["_bagua"]
    training.__dict__.clear()
    world = bagua_ref.base.runtime.current_world()
    world.default_group = world.transport = None
    return gc.collect() * 0


def does_not_communicate(training: Training) -> None:
    """Fork children that disturb nobody."""
    said = [
        forked(
            lambda: (bagua_ref.get_rank(), bagua_ref.get_world_size(), bagua_ref.is_initialized())
        ),
        forked(lambda: in_eval_mode(training)),
        # a module that is not wrapped
        forked(lambda: network()(batch(0, 0)).square().sum().backward()),
        forked(lambda: drops_everything(training)),
        forked(lambda: forked(lambda: bagua_ref.barrier())[: len(REFUSED)]),
    ]
    assert_undisturbed(training)
    assert said == [
        f"({bagua_ref.get_rank()}, 2, True)",
        "torch.Size([4, 3])",
        "None",
        "0",
        REFUSED,
    ]


@on_every_process(2, init=False)
def test_S2_5_a_forked_child_holds_no_socket_of_its_parents_groups() -> None:
    """Of none of the kinds that the parent has."""
    faults.serve_the_store()
    bagua_ref.init_process_group(timeout=60)
    training = Training(GradientAllReduceAlgorithm())
    training.step()
    communicator: Any = training.module._bagua.process_group.get_global_communicator()
    found, port = open_sockets(), int(os.environ["MASTER_PORT"])
    kinds = {
        "mesh": {
            os.fstat(peer.socket.fileno()).st_ino
            for peer in communicator._connection._mesh.peers.values()
        },
        "gloo": set(communicator._connection._gloo_sockets._sockets.values()),
        "store": {
            inode
            for file, inode in found.items()
            if (ports := gloo_sockets._ports(file)) and ports[0] == port
        },
    }

    def counts() -> dict[str, int]:
        return {
            kind: len(sockets & set(open_sockets().values())) for kind, sockets in kinds.items()
        }

    in_child = json.loads(forked(lambda: json.dumps(counts())))
    assert_undisturbed(training)
    here = counts()
    bagua_ref.barrier()  # a rank that is done closes its connections
    assert here["mesh"] == here["gloo"] == 1
    # it listens, and both ranks have connections
    assert here["store"] > 1 if bagua_ref.get_rank() == 0 else here["store"] == 0
    assert in_child == {"mesh": 0, "gloo": 0, "store": 0}


@on_every_process(1, init=False)
def test_S1_a_child_may_start_a_group_of_its_own() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)

    def own() -> str:
        bagua_ref.init_process_group()
        training = Training(GradientAllReduceAlgorithm())
        training.step()
        bagua_ref.destroy_process_group()
        return "trained"

    assert forked(own) == "trained"


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return batch(bagua_ref.get_rank(), index)[0]


@on_every_process(2)
def test_S1_training_with_forked_workers_of_a_data_loader() -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # daemons may not have children
    for name in ("gradient_allreduce", "async"):
        train_with_workers(name)


def train_with_workers(name: str) -> None:
    training, steps = Training(Algorithm.init(name)), 0
    for _ in range(2):
        loader = DataLoader(Samples(), batch_size=3, num_workers=2, multiprocessing_context="fork")
        for samples in loader:
            training.module(samples).square().sum().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            steps += 1
    if name == "async":
        training.module.bagua_algorithm.abort(training.module)
    assert steps == 8
