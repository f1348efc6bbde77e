"""Tests of real processes, over gloo and through shared memory, where the simulated world does not
suffice (S1, S2.5, S3.9).
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests import communication_cases as cases
from tests import disagreements, leaving
from tests.launch import launch, on_every_process, outcomes

import bagua_ref
from bagua_ref import ReduceOp
from bagua_ref.communicators.collectives import combine
from bagua_ref.communicators.connection import Connection
from bagua_ref.communicators.missing import Peers
from bagua_ref.communicators.pipelining import exchange_pipelined
from bagua_ref.communicators.processes import Processes
from bagua_ref.communicators.torch_distributed import TorchDistributedCommunicator
from bagua_ref.errors import CommunicationError
from bagua_ref.groups.communication import _get_default_group, from_torch_group

pytestmark = pytest.mark.slow


def default_comm():
    return _get_default_group().get_global_communicator()


transports = pytest.mark.parametrize("over_gloo", [True, False], ids=["gloo", "memory"])


def warm_up(comm):
    """Let processes that may share memory do so."""
    comm.allreduce_inplace(torch.ones(1))


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


def run_suite(seed=0, inputs=4):
    """Run the collectives' suite on the processes of this world; return each check's message, up to
    the first failure.
    """
    from bagua_ref.conformance.checks.registry import checks_of
    from bagua_ref.conformance.lab.journal import Journal
    from bagua_ref.conformance.run.search import PROFILES, Search, search
    from bagua_ref.conformance.targets import world
    from bagua_ref.conformance.targets.target import resolve

    PROFILES["quick"], world.run_world, messages = inputs, InStep().run_world, {}
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
        messages[name] = outcome.message
        if outcome.message:
            break  # ranks may no longer be in step
    return messages


def run_suite_and_cases():
    messages = run_suite()
    for case in cases.CASES:
        case(default_comm())
    return messages


@pytest.mark.parametrize(
    ("nranks", "over_gloo"),
    [
        pytest.param(2, True, id="2-gloo"),
        pytest.param(4, True, id="4-gloo", marks=pytest.mark.proof),
        pytest.param(3, False, id="3-memory"),
    ],
)
def test_S3_9_the_suite_and_further_cases_pass_on_processes(nranks, over_gloo):
    for messages in launch(run_suite_and_cases, nranks, over_gloo=over_gloo):
        assert len(messages) == 19
        assert set(messages.values()) == {""}, messages


class ThroughTheHost(TorchDistributedCommunicator):
    """A communicator that copies every tensor through the host, as for CUDA tensors of ranks that
    share a GPU.
    """

    def _reachable(self, tensor, copied=True):
        return tensor.clone() if copied else torch.empty_like(tensor)


def random_shard(rank, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduce_random():
    """Return this rank's results for several dtypes and operators, and sizes on both sides of every
    switch of algorithm.
    """
    rank, n, results = bagua_ref.get_rank(), bagua_ref.get_world_size(), {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            for size in (60, 300_000):
                x = random_shard(rank, size, dtype)
                bagua_ref.allreduce_inplace(x, op)
                y = random_shard(rank, size // n * n, dtype)
                bagua_ref.reduce_scatter_inplace(y, op)
                z = random_shard(rank, size, dtype)
                bagua_ref.reduce_inplace(z, 0, op)
                results[str(dtype), op.name, size] = x, y.chunk(n)[rank], z
    return results


@transports
def test_S3_9_reductions_of_random_floats(over_gloo):
    """All ranks get the same bits; our own sums go in rank order, with 16-bit floats added in
    float32 and rounded once.
    """
    nranks = 3
    results = launch(reduce_random, nranks, over_gloo=over_gloo)
    for (dtype, op, size), (total, _, reduced) in results[0].items():
        shards = [random_shard(rank, size, total.dtype) for rank in range(nranks)]
        expected = combine(shards, ReduceOp[op])
        exact = dtype != "torch.float32" or op == "MAX"
        for rank in range(nranks):
            everywhere, scattered, _ = results[rank][dtype, op, size]
            assert torch.equal(everywhere, total)
            parts = [shard[: size // nranks * nranks].chunk(nranks)[rank] for shard in shards]
            assert torch.equal(scattered, combine(parts, ReduceOp[op]))
        for result in (total, reduced):
            assert (
                torch.equal(result, expected)
                if exact
                else torch.allclose(result, expected, rtol=0, atol=1e-6)
            )


@transports
@on_every_process(3)
def test_large_tensors_do_not_wait_for_each_other(over_gloo):
    """Neighbours send each other 8 MiB at once, more than any buffer in between holds."""
    rank, n, comm = bagua_ref.get_rank(), bagua_ref.get_world_size(), default_comm()
    send = torch.full((2**21,), float(rank))
    from_left, from_right = torch.empty(2**21), torch.empty(2**21)
    comm.exchange(
        [(send, (rank - 1) % n), (send, (rank + 1) % n)],
        [(from_left, (rank - 1) % n), (from_right, (rank + 1) % n)],
    )
    assert from_left.unique().tolist() == [(rank - 1) % n]
    assert from_right.unique().tolist() == [(rank + 1) % n]
    everything = torch.empty(n * 2**21)
    bagua_ref.allgather(send, everything)
    assert everything.view(n, -1)[:, -1].tolist() == list(range(n))


@on_every_process(2)
def test_tensors_that_gloo_cannot_reach_go_through_the_hosts_memory():
    group = _get_default_group()
    transport = group._job.transport
    for name, shares_memory in (("gloo", False), ("memory", True)):
        place = (
            dist.PrefixStore(name, transport.store),
            name,
            transport.rank,
            group.ranks,
            30.0,
            transport.peers,
            shares_memory,
        )
        comm = ThroughTheHost(Connection(*place), uses_nccl=False)
        for call in cases.calls(comm.nranks()):
            cases.check(comm, call)
        cases.large_reductions(comm)


def on_a_gpu(backend):
    bagua_ref.init_process_group(backend=backend, timeout=60)
    torch.set_default_device("cuda")
    return run_suite_and_cases()


@pytest.mark.gpu
@pytest.mark.parametrize(("nranks", "backend"), [(1, "nccl"), (2, "gloo")])
def test_S3_9_collectives_of_cuda_tensors(nranks, backend):
    """NCCL needs a GPU per rank; ranks that share one use the host's memory."""
    for messages in launch(on_a_gpu, nranks, backend, init=False):
        assert set(messages.values()) == {""}, messages


def places():
    group = _get_default_group()
    comms = (
        group.get_global_communicator(),
        group.get_inter_node_communicator(),
        group.get_intra_node_communicator(),
    )
    x = torch.tensor([10.0 ** bagua_ref.get_rank()])
    bagua_ref.allreduce_inplace(x, comm=comms[2])
    bagua_ref.allreduce_inplace(x, comm=comms[1])
    bagua_ref.broadcast(x, 0, comms[2])
    identity = (
        bagua_ref.env.get_node_rank(),
        bagua_ref.get_local_rank(),
        bagua_ref.get_local_size(),
    )
    return identity, [(comm.rank(), comm.nranks()) for comm in comms], x.item()


def test_S1_nodes_as_the_launcher_says():
    assert launch(places, 3, nodes=(1, 2)) == [
        ((0, 0, 1), [(0, 3), (0, 2), (0, 1)], 111.0),
        ((1, 0, 2), [(1, 3), (1, 2), (0, 2)], 111.0),
        ((1, 1, 2), [(2, 3), (-1, 2), (1, 2)], 111.0),
    ]


def nodes_of_two():
    bagua_ref.init_process_group(local_world_size=2)
    return places()


def test_S1_nodes_as_the_caller_says():
    found = launch(nodes_of_two, 4, init=False)
    assert [identity for identity, _, _ in found] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert found[3][1:] == ([(3, 4), (-1, 2), (1, 2)], 1111.0)


@on_every_process(2, init=False)
def test_S1_nodes_by_host_name_without_a_launcher():
    del os.environ["GROUP_RANK"]
    bagua_ref.init_process_group()
    assert bagua_ref.env.get_node_rank() == 0


@pytest.mark.parametrize("within_torchs", [False, True])
@on_every_process(2, init=False)
def test_S1_one_store_serves_one_job_after_another(within_torchs):
    if within_torchs:
        dist.init_process_group("gloo")
    for _ in range(3):
        bagua_ref.init_process_group(timeout=30)
        x = torch.ones(1)
        bagua_ref.allreduce_inplace(x)
        assert x.item() == 2.0
        bagua_ref.destroy_process_group()
    if within_torchs:
        dist.barrier()


@on_every_process(2, init=False)
def test_S1_nobody_leaves_init_process_group_before_all_are_connected(tmp_path):
    """Otherwise a rank that ends immediately would break ranks that are still connecting."""
    if os.environ["RANK"] == "1":
        connect = dist.init_process_group

        def slowly(*args, **options):
            connect(*args, **options)
            time.sleep(0.3)
            (tmp_path / "connected").touch()

        dist.init_process_group = slowly
    bagua_ref.init_process_group()
    assert (tmp_path / "connected").exists()


@on_every_process(3)
def test_a_group_of_torchs_among_some_ranks():
    rank, torch_group = bagua_ref.get_rank(), dist.new_group([0, 2])
    group = from_torch_group(torch_group)
    if rank == 1:
        assert (group.ranks, group.get_global_communicator().rank()) == ((), -1)
        return
    x = torch.tensor([rank + 1.0])
    bagua_ref.allreduce_inplace(x, comm=torch_group.bagua_patch().bagua_get_global_communicator())
    bagua_ref.allreduce_inplace(x, comm=group.get_global_communicator())
    assert (group.ranks, x.item()) == ((0, 2), 8.0)


# Threads


@transports
@on_every_process(3)
def test_two_threads_with_a_group_each(over_gloo):
    """Each thread reduces its own numbers in its own group; the sizes differ between threads."""
    rank, groups, wrong = (
        bagua_ref.get_rank(),
        [bagua_ref.new_group(), bagua_ref.new_group().for_background()],
        [],
    )

    def work(thread):
        comm = groups[thread].get_global_communicator()  # both threads connect at the same time
        for i in range(60):
            size = 1 + (i * 7919 * (thread + 1)) % 90_000
            x = torch.full((size,), float(rank + 1 + 10 * thread + i))
            comm.allreduce_inplace(x)
            expected = sum(r + 1.0 + 10 * thread + i for r in range(comm.nranks()))
            if x.min().item() != expected or x.max().item() != expected:
                wrong.append((thread, i))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
    for thread in threads if rank % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@transports
@on_every_process(2)
def test_two_threads_in_one_group_are_an_error_and_never_mixed_up(over_gloo):
    comm, inside = default_comm(), threading.Event()

    def wait_for_rank_1():
        inside.set()
        comm.barrier()

    thread = threading.Thread(target=wait_for_rank_1)
    if bagua_ref.get_rank() == 0:
        thread.start()
        inside.wait()
        time.sleep(0.2)
        with pytest.raises(CommunicationError, match="another thread"):
            comm.allreduce_inplace(torch.ones(1))
        time.sleep(0.2)  # rank 1 waits for this barrier before it takes part
        bagua_ref.new_group().get_global_communicator().barrier()
        thread.join()
    else:
        bagua_ref.new_group().get_global_communicator().barrier()
        comm.barrier()
    x = torch.ones(5)
    comm.allreduce_inplace(x)  # the group still works
    assert x.tolist() == [2.0] * 5


# Failures


def caught(function, *arguments):
    """Return the error that a call ends with, as text."""
    try:
        function(*arguments)
    except CommunicationError as error:
        return str(error)
    return "no error"


def call_differently():
    """Return the error of each case, and of the call after it; each case has a group of its own."""
    last, found = bagua_ref.get_rank() == bagua_ref.get_world_size() - 1, {}
    for name, (call, other, *_) in disagreements.DIFFERENT_CALLS.items():
        comm = bagua_ref.new_group().get_global_communicator()
        begin = time.monotonic()
        found[name] = (
            caught(other if last else call, comm),
            caught(comm.barrier),
            time.monotonic() - begin,
        )
    return found


@pytest.mark.parametrize(
    ("nranks", "over_gloo"), [(2, True), (3, False)], ids=["2-gloo", "3-memory"]
)
def test_S3_9_ranks_that_make_different_calls_are_told_at_once_who_calls_what(nranks, over_gloo):
    others = "ranks 0-1 call" if nranks == 3 else "rank 0 calls"
    for found in launch(call_differently, nranks, over_gloo=over_gloo):
        for name, (message, then, seconds) in found.items():
            _, _, first, last = disagreements.DIFFERENT_CALLS[name]
            assert (
                f"{others} {first}" in message
                or first in message.partition(others)[2].partition(", rank")[0]
            ), (name, message)
            assert last in message.partition(f", rank {nranks - 1} calls ")[2], (name, message)
            assert "all ranks must call the same collective" in message, name
            assert then != "no error", name
            assert seconds < 5, name


def send_something_else():
    rank, found = bagua_ref.get_rank(), {}
    for name, (send, receive, *_) in disagreements.DIFFERENT_MESSAGES.items():
        comm = bagua_ref.new_group().get_global_communicator()
        warm_up(comm)
        begin = time.monotonic()
        found[name] = (
            [caught(receive if rank else send, comm), caught(comm.barrier)],
            time.monotonic() - begin,
        )
    return found


@transports
def test_S3_9_a_message_of_another_size_or_dtype_is_an_error_on_both_ranks(over_gloo):
    sender, receiver = launch(send_something_else, 2, over_gloo=over_gloo)
    for name, (_, _, sent, received) in disagreements.DIFFERENT_MESSAGES.items():
        (message, then), seconds = receiver[name]
        assert then != "no error"
        assert seconds < 5
        assert not over_gloo or f"rank 0 sent {sent}, but rank 1 receives {received}" in message, (
            name
        )
        assert over_gloo or "rank 0 of the group has sent" in message, name
        assert any("rank 1 gave up" in text for text in sender[name][0]), (name, sender[name])


@transports
@on_every_process(2)
def test_a_late_rank_is_waited_for(over_gloo):
    for size, late in ((300_000, 1), (3, 0)):
        if bagua_ref.get_rank() == late:
            time.sleep(0.4)  # longer than one uninterruptible wait
        x = torch.ones(size)
        bagua_ref.allreduce_inplace(x)
        assert x.sum().item() == 2 * size


def collectives_that_wait(comm):
    x = torch.ones(120_000)
    return {
        "allreduce": lambda: comm.allreduce_inplace(x),
        "small allreduce": lambda: comm.allreduce_inplace(x[:10]),
        "allgather": lambda: comm.allgather_inplace(x),
        "alltoall": lambda: comm.alltoall_inplace(x),
        "broadcast": lambda: comm.broadcast(x, 1),
        "recv": lambda: comm.recv(x, 1),
        "exchange": lambda: comm.exchange([(x, 1)], [(torch.empty(3), 1)]),
        "barrier": comm.barrier,
    }


WAITING = (
    "allreduce",
    "small allreduce",
    "allgather",
    "alltoall",
    "broadcast",
    "recv",
    "exchange",
    "barrier",
)


def wait_for_rank_1(manner):
    """Let rank 1 join none of the others' collectives, each with its own group and thread; return
    the errors.
    """
    comms = {name: bagua_ref.new_group().get_global_communicator() for name in WAITING}
    rank, raised = bagua_ref.get_rank(), {}
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)

    def wait(name, comm):
        begin = time.monotonic()
        error = caught(collectives_that_wait(comm)[name])
        raised[name] = comm.name, error, time.monotonic() - begin
        assert caught(comm.barrier) != "no error"

    for comm in comms.values():
        warm_up(comm)
    bagua_ref.barrier()
    if rank == 1:
        if manner == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        for comm in comms.values() if manner == "gives up" else ():
            comm.abort("enough")
        store.wait(["0", "2"], timedelta(seconds=100))
        os._exit(0)
    threads = [threading.Thread(target=wait, args=entry) for entry in comms.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.set(str(rank), "")
    return raised


@transports
@pytest.mark.parametrize(
    ("manner", "timeout", "why"),
    [
        ("dies", 60, "the process of rank 1 has ended"),
        ("gives up", 60, "rank 1 gave up: enough"),
        ("stays away", 2, "timed out after 2 s; rank 1 did not come"),
    ],
)
def test_S2_5_a_rank_that_does_not_come_is_named_in_every_collective_of_the_others(
    manner, timeout, why, over_gloo
):
    """With the collective and the group, and long before the timeout, if that is a minute."""
    ended = outcomes(wait_for_rank_1, 3, manner, over_gloo=over_gloo, collective_timeout=timeout)
    for rank in (0, 2):
        assert set(ended[rank].result or ()) == set(WAITING), ended[rank].traceback
        for collective, (group, message, seconds) in ended[rank].result.items():
            where = f"{collective.split()[-1]} on rank {rank} in group {group!r} of ranks 0-2"
            assert message.startswith(where)
            assert why in message
            assert seconds < 15


@transports
@on_every_process(2)
def test_abort_and_ctrl_c_end_a_collective_under_way_and_the_others_are_told(over_gloo):
    """Rank 1 joins none of them before rank 0 has given up, each in a group of its own."""
    under_way = "allreduce", "broadcast", "barrier", "recv"
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    comms = [bagua_ref.new_group().get_global_communicator() for _ in range(len(under_way) + 1)]
    for comm in comms:
        warm_up(comm)
    if bagua_ref.get_rank() == 0:
        for collective, comm in zip(under_way, comms, strict=False):
            threading.Timer(0.2, comm.abort).start()
            with pytest.raises(CommunicationError, match=r"given up|aborted"):
                collectives_that_wait(comm)[collective]()
            with pytest.raises(CommunicationError, match="aborted"):
                comm.barrier()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            comms[-1].allreduce_inplace(torch.ones(10))
        with pytest.raises(CommunicationError, match="interrupted earlier, in allreduce"):
            comms[-1].barrier()
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
        with pytest.raises(CommunicationError, match="rank 0 gave up: KeyboardInterrupt in allr"):
            allreduce_twice(comms[-1])  # gloo completes what has been started
    bagua_ref.barrier()  # other groups still work


def allreduce_twice(comm):
    for _ in range(2):
        comm.allreduce_inplace(torch.ones(10))


def test_S2_5_a_store_that_is_gone_is_our_error():
    class Gone(dist.HashStore):
        def clone(self):
            return self

        def set(self, *_):
            raise RuntimeError("Connection reset by peer")

    peers = Peers(Gone(), 0, 1, Processes([], 0))
    with pytest.raises(
        CommunicationError, match=r"connect on .*'alone'.* failed; .*Connection reset by peer"
    ):
        Connection(dist.HashStore(), "alone", 0, [0], 30.0, peers)
    peers.close()


ENDS = {
    "done": nullcontext(),
    "given up": pytest.raises(CommunicationError, match="was aborted"),
    "failed": pytest.raises(CommunicationError, match="closed by peer"),
}


@pytest.fixture
def connection():
    """The connection of the only rank of a job."""
    peers = Peers(dist.HashStore(), 0, 1, Processes([], 0))
    yield Connection(dist.HashStore(), "alone", 0, [0], 30.0, peers)
    peers.close()


@pytest.mark.parametrize("end", ENDS)
def test_works_are_freed_before_abort_can_have_the_turn_even_if_the_error_is_kept(end, connection):
    freed = []

    class Work:
        @staticmethod  # as with torch's, no Python frame refers to the work
        def wait(*_):
            if end == "given up":
                connection._closed = "test"
            if end != "done":
                raise RuntimeError("closed by peer" if end == "failed" else "not yet")

        @staticmethod
        def is_completed():
            return end == "failed"

        def __del__(self):
            freed.append(connection._turn.locked())

    with ENDS[end] as kept:
        connection.run("wait", lambda group: [Work()])
    assert freed == [True], kept


def test_S2_5_no_work_outlives_what_failed_between_two_pieces_even_if_the_error_is_kept(connection):
    freed = []

    class Work:
        def __del__(self):
            freed.append("work")

    class Group:
        @staticmethod
        def recv(*_):
            return Work()

    def fill(_):
        raise FloatingPointError

    with pytest.raises(FloatingPointError) as kept:
        connection.run(
            "alltoall",
            lambda _: exchange_pipelined(Group, [], [(torch.zeros(4), 0)], ([0], [0]), fill),
        )
    assert freed == ["work"], kept  # or the other ranks would not notice


# Scripts


def test_a_script_leaves_cleanly():
    """Three manners of leaving; `make proof` repeats all of them, from fresh interpreters as
    well.
    """
    manners = ["keeps references", "leaves a thread behind", "brings torch's group"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, leaving.__file__, "1", *manners]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.stdout.splitlines() == [f"{manner}, 0, 0" for manner in manners], ended.stderr


FAILS_ONCE = r"""
import os, signal, torch, bagua_ref
bagua_ref.init_process_group(timeout=30)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
weight = torch.ones(4)
for step in range(20):
    gradient = weight * (bagua_ref.get_rank() + 1)
    bagua_ref.allreduce_inplace(gradient, bagua_ref.ReduceOp.AVG)
    weight -= 0.1 * gradient
    if attempt == "0" and step == 7 and bagua_ref.get_rank() == 1:
        {fail}
print(f"trained {{attempt}} {{bagua_ref.get_rank()}} {{weight[0].item():.4f}}\n", end="", flush=True)
"""


@pytest.mark.proof
@pytest.mark.parametrize(
    "fail", ['raise RuntimeError("once")', "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_restarted_worker_group_trains_again(fail, tmp_path):
    """As with ``torchrun --max-restarts=1`` when one rank fails or is killed once; none meets what
    the failed attempt left.
    """
    script = tmp_path / "fails_once.py"
    script.write_text(FAILS_ONCE.format(fail=fail))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--monitor-interval=0.1",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TMPDIR": str(tmp_path),
    }
    port = bagua_ref.env.find_free_network_port()
    launcher = subprocess.Popen(
        [*command, f"--master-port={port}", str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, complaints = launcher.communicate(timeout=120)
    finally:
        launcher.terminate()  # it ends its workers, too, which kill() would not
        launcher.wait(60)
    assert launcher.returncode == 0, complaints
    trained = sorted(line for line in output.splitlines() if line.startswith("trained"))
    assert trained == [f"trained 1 {rank} {0.85**20:.4f}" for rank in range(2)], complaints
