"""The contract of a communicator, over every transport: simulated ranks, gloo, shared memory, and a
card (S3.9).
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests import communication_cases as cases
from tests import disagreements
from tests.launch import launch
from tests.test_communication import simulate, world_of_one  # noqa: F401  a fixture

import bagua_ref
from bagua_ref import ReduceOp
from bagua_ref.base.runtime import current_world
from bagua_ref.communicators.collectives import combine
from bagua_ref.communicators.connection import Connection
from bagua_ref.communicators.torch_distributed import TorchDistributedCommunicator
from bagua_ref.errors import CommunicationError
from bagua_ref.groups.communication import _get_default_group

NRANKS = 3


def default_comm():
    return _get_default_group().get_global_communicator()


def new_comm():
    return bagua_ref.new_group().get_global_communicator()


class InStep:
    """Worlds for the conformance suite on real processes, which draw the same inputs and hear of
    each other's results.

    The first ranks are a smaller world; its nodes are not those of the input, which collectives on
    tensors do not see.
    """

    def __init__(self):
        self.comms = [
            bagua_ref.new_group(list(range(n + 1))).get_global_communicator()
            for n in range(bagua_ref.get_world_size())
        ]
        self.store, self.rank, self.round = (
            dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])),
            bagua_ref.get_rank(),
            0,
        )

    def run_world(self, factory, nodes, program, seed):
        """Return every rank's result or raise the first rank's error, as the conformance package's
        function does.
        """
        self.round += 1
        result = error = None
        if self.rank < sum(nodes):
            try:
                result = program(self.comms[sum(nodes) - 1])
            except Exception as raised:
                error = raised
        self.store.set(f"{self.round}-{self.rank}", pickle.dumps((result, error)))
        ended = [pickle.loads(self.store.get(f"{self.round}-{rank}")) for rank in range(sum(nodes))]
        for _, error in ended:
            if error is not None:
                raise error
        return [result for result, _ in ended]


def passes_the_suite(seed=0, inputs=4):
    """Run the collectives' suite of the oracle, up to the first failure."""
    from bagua_ref.conformance.checks.registry import checks_of
    from bagua_ref.conformance.lab.journal import Journal
    from bagua_ref.conformance.run.search import PROFILES, Search, search
    from bagua_ref.conformance.targets import world
    from bagua_ref.conformance.targets.target import resolve

    PROFILES["quick"], world.run_world, ran = inputs, InStep().run_world, 0
    target = resolve(
        SimpleNamespace(
            communicator=world.own_communicator,
            capabilities={"max_ranks": bagua_ref.get_world_size()},
        )
    )
    for name, check in checks_of(["collectives"]).items():
        if name.endswith("barrier"):  # its ranks share a list
            continue
        outcome = search(check, None, target, Search("quick", seed, shrink=False), Journal())
        assert outcome.message == "", (name, outcome.message)
        ran += 1
    assert ran == 19


def passes_further_cases():
    for case in cases.CASES:
        case(default_comm())


def random_shard(rank, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduces_random_floats():
    """All ranks get the same bits; our own sums go in rank order, with 16-bit floats added in
    float32 and rounded once. Sizes are on both sides of every switch of algorithm.
    """
    comm, rank = default_comm(), bagua_ref.get_rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            exact = dtype is not torch.float32 or op is ReduceOp.MAX
            for size in (60, 300_000):
                shards = [random_shard(r, size, dtype) for r in range(NRANKS)]
                expected = combine(shards, op)
                comm.allreduce_inplace(everywhere := shards[rank].clone(), op)
                comm.reduce_inplace(on_zero := shards[rank].clone(), 0, op)
                for result in (everywhere, on_zero) if rank == 0 else (everywhere,):
                    assert (
                        torch.equal(result, expected)
                        if exact
                        else torch.allclose(result, expected, rtol=0, atol=1e-6)
                    )
                zeros = comm.broadcast_object(everywhere)
                assert torch.equal(everywhere, zeros)
                comm.reduce_scatter_inplace(scattered := shards[rank].clone(), op)
                assert torch.equal(scattered.chunk(NRANKS)[rank], expected.chunk(NRANKS)[rank])


def sends_large_tensors_without_waiting():
    """Neighbours send each other 8 MiB at once, more than any buffer in between holds."""
    rank, comm = bagua_ref.get_rank(), default_comm()
    send = torch.full((2**21,), float(rank))
    from_left, from_right = torch.empty(2**21), torch.empty(2**21)
    left, right = (rank - 1) % NRANKS, (rank + 1) % NRANKS
    comm.exchange([(send, left), (send, right)], [(from_left, left), (from_right, right)])
    assert from_left.unique().tolist() == [left]
    assert from_right.unique().tolist() == [right]
    comm.allgather(send, everything := torch.empty(NRANKS * 2**21))
    assert everything.view(NRANKS, -1)[:, -1].tolist() == list(range(NRANKS))


class ThroughTheHost(TorchDistributedCommunicator):
    """A communicator that copies every tensor through the host, as for CUDA tensors of ranks that
    share a GPU.
    """

    def _reachable(self, tensor, copied=True):
        return tensor.clone() if copied else torch.empty_like(tensor)


def reaches_tensors_through_the_host():
    group, shares_memory = _get_default_group(), default_comm()._connection.memory is not None
    transport = group._job.transport
    store, rank = dist.PrefixStore("host", transport.store), transport.rank
    comm = ThroughTheHost(
        Connection(store, "host", rank, group.ranks, 30.0, transport.peers, shares_memory), False
    )
    for call in cases.calls(comm.nranks()):
        cases.check(comm, call)
    cases.large_reductions(comm)


def has_a_group_for_each_thread():
    """Each thread reduces its own numbers in its own group; the sizes differ between threads."""
    rank, wrong = bagua_ref.get_rank(), []
    groups = [bagua_ref.new_group(), bagua_ref.new_group().for_background()]

    def work(thread):
        comm = groups[thread].get_global_communicator()  # both threads connect at the same time
        for i in range(60):
            size = 1 + (i * 7919 * (thread + 1)) % 90_000
            x = torch.full((size,), float(rank + 1 + 10 * thread + i))
            comm.allreduce_inplace(x)
            expected = sum(r + 1.0 + 10 * thread + i for r in range(NRANKS))
            if x.min().item() != expected or x.max().item() != expected:
                wrong.append((thread, i))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
    for thread in threads if rank % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def refuses_two_threads_in_one_group():
    comm, meeting = default_comm(), new_comm()
    if bagua_ref.get_rank() == 0:
        thread = threading.Thread(target=comm.barrier)
        thread.start()
        while not current_world().peers.under_way():
            time.sleep(0.01)
        with pytest.raises(CommunicationError, match="another thread"):
            comm.allreduce_inplace(torch.ones(1))
        meeting.barrier()  # the others wait for this one before they take part
        thread.join()
    else:
        meeting.barrier()
        comm.barrier()
    comm.allreduce_inplace(x := torch.ones(5))  # the group still works
    assert x.tolist() == [float(NRANKS)] * 5


def waits_for_a_late_rank():
    for size, late in ((300_000, 1), (3, 0)):
        if bagua_ref.get_rank() == late:
            time.sleep(0.4)  # longer than one uninterruptible wait
        bagua_ref.allreduce_inplace(x := torch.ones(size))
        assert x.sum().item() == NRANKS * size


def caught(function, *arguments):
    """Return the error that a call ends with, as text."""
    try:
        function(*arguments)
    except CommunicationError as error:
        return str(error)
    return "no error"


def tells_at_once_who_calls_what():
    """Also that ranks whose calls differ cannot go on; each case has a group of its own."""
    last = bagua_ref.get_rank() == NRANKS - 1
    for name, (call, other, first, others) in disagreements.DIFFERENT_CALLS.items():
        comm, begin = new_comm(), time.monotonic()
        message = caught(other if last else call, comm)
        assert (
            f"ranks 0-1 call {first}" in message
            or first in message.partition("ranks 0-1 call")[2].partition(", rank")[0]
        ), (name, message)
        assert others in message.partition(f", rank {NRANKS - 1} calls ")[2], (name, message)
        assert "all ranks must call the same collective" in message, name
        assert caught(comm.barrier) != "no error", name
        assert time.monotonic() - begin < 5, name


def tells_of_messages_that_do_not_fit():
    """On both ranks: each case has a group of its own."""
    rank = bagua_ref.get_rank()
    for name, (send, receive, sent, received) in disagreements.DIFFERENT_MESSAGES.items():
        group = bagua_ref.new_group([0, 1])
        if rank > 1:
            continue
        comm = group.get_global_communicator()
        begin, in_memory = time.monotonic(), comm._connection.memory is not None
        message, then = caught(receive if rank else send, comm), caught(comm.barrier)
        if rank == 0:
            assert "rank 1 gave up" in message + then, (name, message, then)
        elif in_memory:
            assert "rank 0 of the group has sent" in message, name
        else:
            assert f"rank 0 sent {sent}, but rank 1 receives {received}" in message, name
        assert then != "no error"
        assert time.monotonic() - begin < 5


OF_PROCESSES = (
    passes_the_suite,
    passes_further_cases,
    reduces_random_floats,
    sends_large_tensors_without_waiting,
    reaches_tensors_through_the_host,
    has_a_group_for_each_thread,
    refuses_two_threads_in_one_group,
    waits_for_a_late_rank,
    tells_at_once_who_calls_what,
    tells_of_messages_that_do_not_fit,
)


def of_processes():
    for part in OF_PROCESSES:
        part()


@pytest.mark.slow
@pytest.mark.parametrize(
    "over_gloo", [pytest.param(True, marks=pytest.mark.proof), False], ids=["gloo", "memory"]
)
def test_S3_9_a_communicator_of_processes(over_gloo):
    launch(of_processes, NRANKS, over_gloo=over_gloo)


@pytest.mark.parametrize("nodes", [(1,), (1, 2)], ids=str)
def test_S3_9_a_simulated_communicator(nodes):
    for case in cases.CASES:
        simulate(lambda: case(default_comm()), nodes)  # noqa: B023


@pytest.mark.usefixtures("world_of_one")
def test_S3_9_a_communicator_of_one_process():
    passes_further_cases()


def on_a_gpu(backend):
    bagua_ref.init_process_group(backend=backend, timeout=60)
    torch.set_default_device("cuda")
    passes_the_suite()
    passes_further_cases()


@pytest.mark.gpu
@pytest.mark.parametrize(("nranks", "backend"), [(1, "nccl"), (2, "gloo")])
def test_S3_9_a_communicator_of_cuda_tensors(nranks, backend):
    """NCCL needs a GPU per rank; ranks that share one use the host's memory."""
    launch(on_a_gpu, nranks, backend, init=False)
