"""Tests of real processes, over gloo and through shared memory, where the simulated world does not
suffice (S1, S2.5, S3.9).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests import leaving
from tests.launch import launch, on_every_process, outcomes

import bagua_ref
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


def comms_of(names):
    """Return communicators that share memory, and others over gloo, by name and transport."""
    group = _get_default_group()
    transport = group._job.transport
    found = {}
    for name in names:
        comm = bagua_ref.new_group().get_global_communicator()
        found[name, "memory"] = comm
        store = dist.PrefixStore(f"over gloo {name}", transport.store)
        place = f"over gloo {name}", transport.rank, group.ranks
        found[name, "gloo"] = TorchDistributedCommunicator(
            Connection(store, *place, comm._connection._seconds, transport.peers), False
        )
    return found


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


def places_in_turn():
    """Three jobs on one store: nodes as the launcher says, as the caller says, and by host name."""
    found = []
    for job in range(3):
        if job == 2:
            del os.environ["GROUP_RANK"]
        bagua_ref.init_process_group(local_world_size=2 if job == 1 else -1, timeout=30)
        found.append(places())
        bagua_ref.destroy_process_group()
    return found


def test_S1_nodes_as_the_launcher_or_the_caller_says_or_by_host_name():
    ranks = launch(places_in_turn, 4, nodes=(1, 3), init=False)
    by_launcher, by_caller, by_name = zip(*ranks, strict=True)
    assert by_launcher[:3] == (
        ((0, 0, 1), [(0, 4), (0, 2), (0, 1)], 1111.0),
        ((1, 0, 3), [(1, 4), (1, 2), (0, 3)], 1111.0),
        ((1, 1, 3), [(2, 4), (-1, 2), (1, 3)], 1111.0),
    )
    assert [place[0] for place in by_caller] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert by_caller[3][1:] == ([(3, 4), (-1, 2), (1, 2)], 1111.0)
    assert [place[0] for place in by_name] == [(0, rank, 4) for rank in range(4)]


@on_every_process(2, init=False)
def test_S1_torchs_store_serves_one_job_after_another():
    dist.init_process_group("gloo")
    for _ in range(3):
        bagua_ref.init_process_group(timeout=30)
        x = torch.ones(1)
        bagua_ref.allreduce_inplace(x)
        assert x.item() == 2.0
        bagua_ref.destroy_process_group()
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


# Failures


def caught(function, *arguments):
    """Return the error that a call ends with, as text."""
    try:
        function(*arguments)
    except CommunicationError as error:
        return str(error)
    return "no error"


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
    comms = comms_of(WAITING)
    rank, raised = bagua_ref.get_rank(), {}
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)

    def wait(name, comm):
        begin = time.monotonic()
        error = caught(collectives_that_wait(comm)[name[0]])
        raised[name] = comm.name, error, time.monotonic() - begin
        assert caught(comm.barrier) != "no error"

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


@pytest.mark.parametrize(
    ("manner", "timeout", "why"),
    [
        ("dies", 60, "the process of rank 1 has ended"),
        ("gives up", 60, "rank 1 gave up: enough"),
        ("stays away", 2, "timed out after 2 s; rank 1 did not come"),
    ],
)
def test_S2_5_a_rank_that_does_not_come_is_named_in_every_collective_of_the_others(
    manner, timeout, why
):
    """With the collective and the group, and long before the timeout, if that is a minute."""
    ended = outcomes(wait_for_rank_1, 3, manner, collective_timeout=timeout)
    for rank in (0, 2):
        assert len(ended[rank].result or ()) == 2 * len(WAITING), ended[rank].traceback
        for (collective, _), (group, message, seconds) in ended[rank].result.items():
            where = f"{collective.split()[-1]} on rank {rank} in group {group!r} of ranks 0-2"
            assert message.startswith(where)
            assert why in message
            assert seconds < 15


@on_every_process(2)
def test_abort_and_ctrl_c_end_a_collective_under_way_and_the_others_are_told():
    """Rank 1 joins none of them before rank 0 has given up, each in a group of its own."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    comms = comms_of(["allreduce", "broadcast", "barrier", "recv", "Ctrl-C"])
    interrupted = [comm for (name, _), comm in comms.items() if name == "Ctrl-C"]
    if bagua_ref.get_rank() == 0:
        for (collective, _), comm in comms.items():
            if comm not in interrupted:
                threading.Timer(0.2, comm.abort).start()
                with pytest.raises(CommunicationError, match=r"given up|aborted"):
                    collectives_that_wait(comm)[collective]()
                with pytest.raises(CommunicationError, match="aborted"):
                    comm.barrier()
        for comm in interrupted:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                comm.allreduce_inplace(torch.ones(10))
            with pytest.raises(CommunicationError, match="interrupted earlier, in allreduce"):
                comm.barrier()
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
        for comm in interrupted:
            with pytest.raises(
                CommunicationError, match="rank 0 gave up: KeyboardInterrupt in allr"
            ):
                allreduce_twice(comm)  # gloo completes what has been started
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
    peers.leave()


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
    peers.leave()


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


@pytest.mark.proof
def test_a_script_leaves_cleanly():
    """One manner of leaving; `make proof` repeats all of them, from fresh interpreters as well."""
    manners = ["keeps references"]
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
