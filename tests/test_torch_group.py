"""Tests of conformance checks on communicators, such as torch's process groups over real
threads.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bagua_ref.conformance import run_conformance
from bagua_ref.conformance.run.runner import NamedTarget
from bagua_ref.conformance.targets.torch_group import TorchGroup, gloo
from bagua_ref.conformance.targets.world import RankWorld, run_world
from bagua_ref.simulation.communicator import SimulatedCommunicator

pytestmark = pytest.mark.slow


class Forgetful(dist.ProcessGroupGloo):
    """Broadcasts always from rank 0."""

    def broadcast(self, tensor, src):
        return super().broadcast(tensor, 0)


def forgetful(world: RankWorld) -> TorchGroup:
    return TorchGroup(Forgetful(world.store, world.rank, world.world_size))


forgetful.real_threads = True


class Careless:
    """Wrap the simulated world's communicator with one fault."""

    def __init__(self, inner: SimulatedCommunicator) -> None:
        self._inner, self._seen = inner, []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def exchange(self, sends, recvs):
        self._inner.exchange(sends, recvs)
        for tensor, _ in recvs[1:]:
            tensor.zero_()

    def broadcast(self, tensor, src):
        if 0 <= src < self.nranks():
            self._inner.broadcast(tensor, src)

    def gather(self, send_tensor, recv_tensor, dst):
        raise RuntimeError("no gather here")

    def alltoall(self, send_tensor, recv_tensor):
        self._inner.alltoall(send_tensor, recv_tensor)
        if len(self._seen) % 2 and recv_tensor.numel():
            recv_tensor.view(-1)[0] = 0  # every second time
        self._seen.append(recv_tensor)

    def allreduce_inplace(self, tensor, op):
        if tensor.is_contiguous():
            self._inner.allreduce_inplace(tensor, op)
        else:
            self._inner.allreduce_inplace(tensor.as_strided(tensor.shape, (1,)), op)


def careless(world: RankWorld) -> Careless:
    return Careless(world.transport)


def judge(communicator, check, **options):
    target = type("Target", (), {"communicator": staticmethod(communicator)})()
    return run_conformance(target, ["collectives"], checks=[f"collectives.S3.9.{check}"], **options)


@pytest.mark.proof
def test_S3_9_a_group_with_a_fault_fails_and_shows_what_was_drawn():
    (failed,) = judge(forgetful, "broadcast").failures()
    assert "broadcast on nodes" in failed.message
    assert "brought = [" in failed.counterexample


@pytest.mark.parametrize("check", ["exchange", "refuses", "gather", "one_after_another", "gaps"])
def test_S3_9_every_fault_of_a_communicator_is_found(check):
    (failed,) = judge(careless, check, jobs=0).failures()
    assert failed.counterexample.startswith("nodes = (")


def test_real_threads_bring_what_their_ranks_return_and_raise_what_one_raises():
    def program(comm):
        x = torch.tensor([float(comm.rank())])
        comm.allreduce_inplace(x)
        return comm.rank(), x.item()

    assert run_world(gloo, (2, 1), program) == [(0, 3.0), (1, 3.0), (2, 3.0)]
    with pytest.raises(ZeroDivisionError):
        run_world(gloo, (2,), lambda comm: 1 / comm.rank())


@pytest.mark.proof
@pytest.mark.usefixtures("few_inputs")
def test_a_torch_group_is_judged_by_its_name():
    """A proof runs its whole suite."""
    target = NamedTarget(communicator="bagua_ref.conformance.targets.torch_group:gloo")
    checks = ["collectives.S3.9.barrier", "collectives.S3.9.allreduce"]
    report = run_conformance(target, checks=checks)
    assert report.counts()["passed"] == 2, report
