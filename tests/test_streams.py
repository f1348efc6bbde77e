"""Order of work on a device that queues it, seen through stand-ins for streams that remember what
came before (S2.5).
"""

from __future__ import annotations

import subprocess
import threading
import time
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainings import simulate

import bagua_ref
from bagua_ref.base import runtime
from bagua_ref.base.runtime import World, current_world
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.comm_ops.asynchronous import WeightLock
from bagua_ref.communicators import missing, processes
from bagua_ref.communicators.connection import Connection
from bagua_ref.communicators.missing import Peers
from bagua_ref.communicators.processes import Processes, this_process
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError
from bagua_ref.scheduling.engine import Engine

CPU = torch.device("cpu")


class Stream:
    """Knows what is done before anything that is queued on it next."""

    def __init__(self, name: str) -> None:
        self.name, self.before = name, frozenset()

    def queue(self, what: str) -> None:
        self.before |= {what}

    def record_event(self) -> frozenset[str]:
        return self.before


class Streams:
    """In place of the streams of `runtime`: threads begin on the default stream, an event is what
    was queued before it.
    """

    def __init__(self) -> None:
        self.default = Stream("default")
        self.held: set[tuple[Stream, int]] = set()
        """A stream, and the address of memory that is kept until the stream is through with it."""
        self._local = threading.local()

    @property
    def current(self) -> Stream:
        return getattr(self._local, "stream", self.default)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def side_stream(self, device: torch.device) -> Stream:
        return Stream("side")

    def record_event(self, device: torch.device) -> frozenset[str]:
        return self.current.before

    def order_after(self, event: Any, device: torch.device) -> None:
        self.current.before |= event or frozenset()

    def hold(self, tensors: Any, device: torch.device) -> None:
        self.held |= {(self.current, tensor.data_ptr()) for tensor in tensors}

    @contextmanager
    def use_stream(self, stream: Stream | None, device: torch.device) -> Any:
        outer = self.current
        self._local.stream = stream or outer
        try:
            yield
        finally:
            self._local.stream = outer


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Streams:
    fakes = Streams()
    for name in (
        "current_stream",
        "side_stream",
        "record_event",
        "order_after",
        "hold",
        "use_stream",
    ):
        monkeypatch.setattr(runtime, name, getattr(fakes, name))
    return fakes


def bucket_on(stream: Stream, tensors: int, *functions: Any) -> BaguaBucket:
    bucket = BaguaBucket(
        [torch.ones(2).ensure_bagua_tensor(f"t{place}") for place in range(tensors)],
        "b",
        flatten=True,
    )
    for function in functions:
        bucket.append_python_op(function)
    bucket.stream = stream
    return bucket


def test_S2_5_operations_run_on_the_groups_stream_after_all_marks_and_the_waiting_stream_after_them(
    fakes,
):
    side, seen = Stream("side"), []

    def operation(name: str) -> None:
        seen.append((fakes.current, fakes.current.before))
        fakes.current.queue("operation")

    bucket, engine = bucket_on(side, 2, operation), Engine(World(), "m")
    engine.register_ordered_buckets([bucket])
    another = Stream("another")
    with fakes.use_stream(another, CPU):
        another.queue("first gradient")
        bucket.tensors[0].bagua_mark_communication_ready()
        another.queue("copy into flat storage")
    fakes.default.queue("second gradient")
    bucket.tensors[1].bagua_mark_communication_ready()
    fakes.default.queue("the rest of backward")
    engine.wait_pending_comm_ops()
    engine.close()
    ((stream, before),) = seen
    assert stream is side
    assert before == {"first gradient", "copy into flat storage", "second gradient"}
    assert "operation" in fakes.default.before
    assert fakes.held == {(side, bucket.tensors[0].data_ptr())}


def test_S2_5_a_second_round_does_not_wait_for_streams_of_the_first(fakes):
    side, seen = Stream("side"), []
    bucket, engine = (
        bucket_on(side, 1, lambda name: seen.append(fakes.current.before)),
        Engine(World(), "m"),
    )
    engine.register_ordered_buckets([bucket])
    old = Stream("old")
    with fakes.use_stream(old, CPU):
        bucket.tensors[0].bagua_mark_communication_ready()
    engine.wait_pending_comm_ops()
    old.queue("what came later there")
    bucket.tensors[0].bagua_mark_communication_ready()
    engine.wait_pending_comm_ops()
    engine.close()
    assert seen == [frozenset(), frozenset()]


def test_S3_6_rounds_and_training_wait_for_each_others_work_on_the_device(fakes):
    side, lock = Stream("side"), None
    fakes.default.queue("initial weights")
    lock = WeightLock(World(), CPU)
    with fakes.use_stream(side, CPU):
        lock.take_for_round()
        assert side.before == {"initial weights"}
        side.queue("first average")
        lock.release_from_round()
    lock.hold()
    assert "first average" in fakes.default.before
    fakes.default.queue("step")
    lock.release()
    fakes.default.queue("something else")
    with fakes.use_stream(side, CPU):
        lock.take_for_round()
    assert "step" in side.before
    assert "something else" not in side.before


def test_S3_6_a_round_that_takes_back_what_training_has_dropped_waits_for_trainings_stream(fakes):
    lock, side = WeightLock(World(), CPU), Stream("side")
    lock.hold()
    fakes.default.queue("forward")
    lock.on_wait = lock.release  # on the round's thread, whose current stream is another one
    with fakes.use_stream(side, CPU):
        lock.take_for_round()
    assert "forward" in side.before


def test_a_group_has_one_stream_for_a_device_unless_it_was_given_one_and_simulated_ranks_none(
    fakes,
):
    mine = Stream("mine")

    def rank(r: int) -> None:
        group = bagua_ref.groups.communication.new_group()
        assert group.side_stream(CPU) is None
        assert (
            bagua_ref.groups.communication.new_group(stream=mine).for_background().side_stream(CPU)
            is mine
        )
        current_world().transport.has_streams = True
        assert group.side_stream(CPU) is group.side_stream(CPU)
        assert group.side_stream(CPU) is not group.for_background().side_stream(CPU)

    simulate(2, rank)


def test_on_a_cpu_there_is_nothing_to_order():
    assert (
        runtime.current_stream(CPU) is runtime.side_stream(CPU) is runtime.record_event(CPU) is None
    )
    with runtime.use_stream(None, CPU):
        runtime.order_after(None, CPU)


@pytest.mark.gpu
def test_a_side_stream_waits_for_an_event_and_is_waited_for():
    device = torch.device("cuda", torch.cuda.current_device())
    side = runtime.side_stream(device)
    x = torch.zeros(2**24, device=device)
    for _ in range(100):
        x += 1
    ready = runtime.record_event(device)
    with runtime.use_stream(side, device):
        assert runtime.current_stream(device) == side
        runtime.order_after(ready, device)
        y = x * 2
        done = runtime.record_event(device)
    runtime.order_after(done, device)
    assert bool((y == 200).all())


@pytest.fixture
def peers(no_thread_is_left: None) -> Any:
    """The only rank of a job, whose threads end with the test."""
    made = Peers(dist.HashStore(), 0, 1, Processes([], 0))
    yield made
    made.leave()


class Work:
    def __init__(self, completed: bool) -> None:
        self.completed, self.asked = completed, 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.completed

    def wait(self) -> None:
        """Over NCCL: the current stream waits."""


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def watch(peers: Peers, work: Work, timeout: float, interrupt: Any) -> None:
    peers.watch_work(work, "allreduce", "all/1", [0], interrupt, timeout)


def test_S2_5_what_is_done_in_time_is_not_given_up_and_what_is_not_is_once(peers):
    given_up = []
    watch(peers, Work(completed=True), 0.01, lambda *_: given_up.append("done"))
    watch(peers, Work(completed=False), 0.1, lambda *_: given_up.append("late"))
    slow = Work(completed=False)
    watch(peers, slow, 60, lambda *_: given_up.append("slow"))
    wait_until(lambda: given_up)
    slow.completed = True
    wait_until(lambda: not peers._works)
    assert given_up == ["late"]


def test_works_that_are_done_are_not_kept_and_those_behind_one_under_way_not_asked(peers):
    for _ in range(2):
        work = Work(completed=True)
        watch(peers, work, 60, pytest.fail)
        kept = weakref.ref(work)
        del work
        wait_until(lambda: kept() is None)  # noqa: B023
    slow, behind = Work(completed=False), Work(completed=True)
    watch(peers, slow, 60, pytest.fail)
    watch(peers, behind, 60, pytest.fail)
    wait_until(lambda: slow.asked > 2)
    assert behind.asked == 0
    slow.completed = True
    wait_until(lambda: not peers._works)


def test_S2_5_work_that_fails_is_given_up_though_the_library_cannot_be_aborted(peers):
    class Failed(Work):
        def is_completed(self) -> bool:
            raise RuntimeError("remote error")

    def give_up(*_: Any) -> None:
        given_up.append("failed")
        raise RuntimeError("the library cannot be aborted")

    given_up = []
    watch(peers, Failed(completed=False), 0.01, give_up)
    wait_until(lambda: given_up)
    watch(peers, Work(completed=False), 0.01, lambda *_: given_up.append("next"))
    wait_until(lambda: len(given_up) == 2)
    assert given_up == ["failed", "next"]


def test_S2_5_after_a_collective_that_does_not_end_the_next_one_raises_and_the_library_is_aborted(
    peers, monkeypatch
):
    connection = Connection(dist.HashStore(), "a group", 0, [0], 0.3, peers)
    aborted = []
    group = type("Group", (), {"abort": lambda self: aborted.append(self)})()

    def nccl_group() -> Any:
        connection._nccl = group
        return group

    monkeypatch.setattr(connection, "_nccl_group", nccl_group)
    connection.run("allreduce", lambda group: [Work(completed=True)], over_nccl=True)
    # returns, as the host does not wait
    connection.run("allreduce", lambda group: [Work(completed=False)], over_nccl=True)
    wait_until(lambda: aborted)
    with pytest.raises(
        CommunicationTimeoutError,
        match=r"broadcast on .*'a group'.*: allreduce timed out after 0.3 s",
    ):
        connection.run("broadcast", lambda group: [Work(completed=True)], over_nccl=True)


def test_S2_5_work_on_a_device_with_a_rank_that_has_died_or_given_up_is_given_up_with_its_name(
    no_thread_is_left, monkeypatch
):
    """At once, and not at the timeout of a minute."""
    monkeypatch.setattr(missing, "_INTERVAL", 0.05)
    monkeypatch.setattr(missing, "_EARLY", 0.05)
    store = dist.HashStore()
    with subprocess.Popen(["sleep", "60"]) as program:
        theirs = [this_process()[0], program.pid, processes._start_time(program.pid)]
        ours, other = (
            Peers(store, rank, 2, Processes(found, 0))
            for rank, found in enumerate(([this_process(), theirs], []))
        )
        whys = list[str]()
        ours.watch_work(Work(completed=False), "allreduce", "a/1", [0, 1], whys.append, 60)
        other.give_up("a", "enough")
        wait_until(lambda: whys)
        ours.watch_work(Work(completed=False), "allreduce", "b/1", [0, 1], whys.append, 60)
        program.kill()
        wait_until(lambda: len(whys) == 2)
        assert whys == ["rank 1 gave up: enough", "the process of rank 1 has ended"]
        ours.leave()
        other.leave()


def test_S2_5_where_nccl_refuses_ranks_that_share_a_card_the_error_names_gloo(peers, monkeypatch):
    connection = Connection(dist.HashStore(), "a group", 0, [0], 5, peers)
    monkeypatch.setattr(connection, "_nccl_group", lambda: None)

    def start(group: Any) -> Any:
        raise RuntimeError(
            "NCCL error\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA"
            " device 80"
        )

    with pytest.raises(
        CommunicationError,
        match=r"share a GPU, which NCCL refuses; init_process_group\(backend='gloo'\)",
    ):
        connection.run("allreduce", start, over_nccl=True)
