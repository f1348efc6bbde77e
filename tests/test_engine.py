"""Tests of the communication engine: the worker, mark and wait (S2.4 to S2.6)."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from bagua_ref.base.runtime import World, current_world
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError
from bagua_ref.scheduling.engine import Engine, Round
from bagua_ref.simulation import SimulatedWorld


def bucket_of(name: str, *functions: Any, tensors: int = 1) -> BaguaBucket:
    made = [torch.ones(2).ensure_bagua_tensor(f"{name}{place}") for place in range(tensors)]
    bucket = BaguaBucket(made, name, flatten=True)
    for function in functions:
        bucket.append_python_op(function)
    return bucket


class Recorder(Round):
    """A round that calls functions when it begins and ends."""

    def __init__(self, begin: Any = None, end: Any = None, waits: bool = False) -> None:
        self._begin, self._end, self.waits = begin, end, waits

    def begin(self) -> None:
        if self._begin is not None:
            self._begin()

    def end(self) -> None:
        if self._end is not None:
            self._end()


def mark(*buckets: BaguaBucket) -> None:
    for bucket in buckets:
        for tensor in bucket.tensors:
            tensor.bagua_mark_communication_ready()


def test_S2_4_buckets_run_in_registered_order_on_one_other_thread() -> None:
    ran = []
    engine = Engine(World(), "m")
    buckets = [
        bucket_of(name, lambda name: ran.append((name, threading.current_thread().name)), tensors=2)
        for name in "abc"
    ]
    engine.register_ordered_buckets(buckets)
    for _ in range(3):
        mark(buckets[2], buckets[0], buckets[1])
        engine.wait_pending_comm_ops()
    assert [name for name, _ in ran] == list("abc") * 3
    assert {thread for _, thread in ran} == {"bagua_ref worker m"}
    engine.close()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_functions_and_rounds_of_other_buckets_run_after_the_round_under_way(
    is_open: bool, waits: bool
) -> None:
    ran: list[str] = []

    engine = Engine(World())
    engine.new_round = lambda: Recorder(
        lambda: ran.append("begin"), lambda: ran.append("end"), waits
    )
    bucket, other = bucket_of("a", ran.append), bucket_of("b", ran.append)
    engine.register_ordered_buckets([bucket])
    mark(bucket)
    assert engine.run(lambda: ran.append("run") or 3) == 3
    engine.run_round([other], is_open)
    engine.wait_pending_comm_ops()
    mark(bucket)
    engine.wait_pending_comm_ops()
    opened = ["b"] if is_open else ["begin", "b", "end"]
    assert ran == ["begin", "a", "end", "run", *opened, "begin", "a", "end"]
    engine.close()


def test_S2_5_an_error_is_raised_on_the_waiting_thread_and_the_worker_stays_usable() -> None:
    engine = Engine(World())
    fail = [True]
    ran = []

    def risky(name: str) -> None:
        if fail[0]:
            raise ZeroDivisionError("by design")
        ran.append(name)

    first, second = bucket_of("a", risky), bucket_of("b", ran.append)
    engine.register_ordered_buckets([first, second])
    mark(first, second)
    with pytest.raises(
        CommunicationError,
        match=r"bucket 'a', operation PythonOp\(.*risky\): ZeroDivisionError: by design",
    ) as raised:
        engine.wait_pending_comm_ops()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert ran == ["b"]
    fail[0] = False
    mark(first, second)
    engine.wait_pending_comm_ops()
    assert ran == ["b", "a", "b"]
    engine.close()


def test_S2_5_no_progress_names_bucket_and_operation() -> None:
    release = threading.Event()
    engine = Engine(World(), timeout=0.2)
    bucket = bucket_of("slow", lambda _: release.wait(30))
    engine.register_ordered_buckets([bucket])
    mark(bucket)
    with pytest.raises(
        CommunicationTimeoutError,
        match=r"timed out after 0.2 s waiting for other ranks to reach bucket 'slow' of step 0, operation PythonOp",
    ):
        engine.wait_pending_comm_ops()
    release.set()
    engine.wait_pending_comm_ops()
    engine.close()


def test_S2_5_the_timeout_is_per_progress_and_the_simulated_clock_counts() -> None:
    def rank(comm: Any) -> None:
        world = current_world()
        engine = Engine(world, timeout=100)
        steady = [bucket_of(name, lambda _: world.sleep(80)) for name in "abc"]
        engine.register_ordered_buckets(steady)
        mark(*steady)
        engine.wait_pending_comm_ops()  # 240 s in all, but never 100 s without progress
        stuck = bucket_of("d", lambda _: world.sleep(101))
        engine.register_ordered_buckets([stuck])
        mark(stuck)
        with pytest.raises(CommunicationTimeoutError, match="bucket 'd'"):
            engine.wait_pending_comm_ops()

    SimulatedWorld(1).run(rank)


def test_S2_4_marking_again_before_the_bucket_runs_does_nothing_and_registering_clears_marks() -> (
    None
):
    ran = []
    engine = Engine(World())
    bucket = bucket_of("a", ran.append, tensors=2)
    engine.register_ordered_buckets([bucket])
    bucket.tensors[0].bagua_mark_communication_ready()
    bucket.tensors[0].bagua_mark_communication_ready()
    engine.register_ordered_buckets([bucket])
    bucket.tensors[1].bagua_mark_communication_ready()
    engine.wait_pending_comm_ops()
    assert ran == []
    bucket.tensors[0].bagua_mark_communication_ready()
    engine.wait_pending_comm_ops()
    assert ran == ["a"]
    engine.close()


@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("flatten", [True, False])
def test_S2_4_a_bucket_marked_again_before_the_wait_is_loaded_after_the_run_that_is_under_way(
    flatten: bool, size: int
) -> None:
    entered, gate, seen = threading.Event(), threading.Event(), []
    parameter = torch.nn.Parameter(torch.zeros(size)).bagua_ensure_grad()
    parameter.ensure_bagua_tensor(
        "p", "", lambda p: p.grad, lambda p, grad: setattr(p, "grad", grad)
    )
    bucket = BaguaBucket([parameter], "0", flatten, alignment=4)

    def operation(flat: torch.Tensor) -> None:
        flat.mul_(2)
        entered.set()
        assert gate.wait(60)
        seen.append(flat.clone())

    bucket._ops = [operation]
    engine = Engine(World())
    engine.register_ordered_buckets([bucket])
    parameter.grad = torch.full((size,), 1.0)
    mark(bucket)
    assert entered.wait(60)
    parameter.grad = torch.full((size,), 10.0)
    mark(bucket)
    gate.set()
    engine.wait_pending_comm_ops()
    engine.close()
    second = 20.0 if flatten else 4.0  # not flat, the first result is copied into the tensor
    assert [flat[:size].unique().tolist() for flat in seen] == [[2.0], [second]]
    assert not any(flat[size:].any() for flat in seen)


@pytest.mark.parametrize("waits", [False, True])
def test_no_bucket_runs_in_a_round_that_was_refused_or_after_it(waits: bool) -> None:
    ran: list[str] = []
    engine, refuse = Engine(World()), [False]

    def open_round() -> None:
        if refuse[0]:
            raise CommunicationError("the ranks disagree")

    engine.new_round = lambda: Recorder(open_round, waits=waits)
    buckets = [bucket_of(name, ran.append) for name in "ab"]
    engine.register_ordered_buckets(buckets)
    mark(*buckets)
    engine.wait_pending_comm_ops()
    for refused in (True, False):
        refuse[0] = refused
        mark(*buckets)
        with pytest.raises(CommunicationError, match=r"^the ranks disagree$"):
            engine.wait_pending_comm_ops()
    assert ran == ["a", "b"]
    engine.close()


def test_a_round_begins_on_the_worker_with_its_first_tensor_before_any_bucket_is_complete() -> None:
    begun, ran = threading.Event(), list[str]()
    engine = Engine(World())
    engine.new_round = lambda: Recorder(begun.set, waits=True)
    buckets = [bucket_of(name, ran.append) for name in "ab"]
    engine.register_ordered_buckets(buckets)
    engine.mark_ready(buckets[1].tensors[0])
    assert begun.wait(10)
    assert ran == []
    mark(buckets[0])
    engine.wait_pending_comm_ops()
    assert ran == ["a", "b"]
    assert engine.meter.rounds == 1
    engine.close()


def test_what_waits_for_no_rank_begins_a_round_on_the_marking_thread_unless_the_worker_is_busy() -> (
    None
):
    entered, gate, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def operation(flat: torch.Tensor) -> None:
        entered.set()
        assert gate.wait(60)

    engine = Engine(World())
    engine.new_round = lambda: Recorder(lambda: threads.append(threading.current_thread()))
    bucket, slow = bucket_of("a"), bucket_of("b")
    slow._ops = [operation]
    engine.register_ordered_buckets([bucket])
    mark(bucket)
    engine.wait_pending_comm_ops()
    engine.run_round([slow])
    assert threads == [threading.current_thread()] * 2
    assert entered.wait(60)
    mark(bucket)
    gate.set()
    engine.wait_pending_comm_ops()
    assert len(threads) == 3
    assert threads[2] is not threading.current_thread()
    engine.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_round_is_closed_after_its_last_bucket_and_waiting_raises_what_that_raises(
    waits: bool,
) -> None:
    ran: list[str] = []
    engine, refuse = Engine(World()), [False]

    def close() -> None:
        ran.append("closed")
        if refuse[0]:
            raise CommunicationError("the ranks disagree")

    engine.new_round = lambda: Recorder(end=close, waits=waits)
    buckets = [bucket_of(name, ran.append) for name in "ab"]
    engine.register_ordered_buckets(buckets)
    mark(*buckets)
    mark(*buckets)  # another round, without a wait between them
    engine.wait_pending_comm_ops()
    assert ran == ["a", "b", "closed"] * 2
    refuse[0] = True
    for _ in range(2):
        mark(*buckets)
        with pytest.raises(CommunicationError, match=r"^the ranks disagree$"):
            engine.wait_pending_comm_ops()
    assert ran == ["a", "b", "closed"] * 3
    engine.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_round_in_which_a_bucket_fails_is_not_closed(waits: bool) -> None:
    ran: list[str] = []

    def fail(flat: torch.Tensor) -> None:
        raise ValueError("a test")

    engine, failing = Engine(World()), bucket_of("a", ran.append)
    good, failing._ops = failing._ops, [fail]
    engine.new_round = lambda: Recorder(end=lambda: ran.append("closed"), waits=waits)
    engine.register_ordered_buckets([failing])
    mark(failing)
    with pytest.raises(CommunicationError, match="a test"):
        engine.wait_pending_comm_ops()
    assert ran == []
    failing._ops = good
    mark(failing)
    engine.wait_pending_comm_ops()
    assert ran == ["a", "closed"]
    engine.close()


def test_S2_4_a_backward_abandoned_half_way_leaves_no_marks_behind() -> None:
    ran = []
    engine = Engine(World())
    buckets = [bucket_of("a", ran.append), bucket_of("b", ran.append, tensors=2)]
    engine.register_ordered_buckets(buckets)
    engine.begin_backward()
    mark(buckets[0])
    buckets[1].tensors[0].bagua_mark_communication_ready()
    engine.abandon_round()
    engine.begin_backward()
    mark(buckets[0])  # not "marked again", although its bucket was scheduled
    buckets[1].tensors[1].bagua_mark_communication_ready()
    with pytest.raises(CommunicationError, match="bucket 'b': 'b0'"):
        engine.end_backward(mark_unused=False)
    engine.wait_pending_comm_ops()
    assert ran == ["a", "a"]
    engine.close()


def test_S2_6_what_is_registered_twice_or_overlaps_is_refused_and_nothing_changes() -> None:
    ran = []
    engine = Engine(World())
    good = bucket_of("good", ran.append)
    engine.register_ordered_buckets([good])
    flat = torch.ones(4)
    overlapping = [
        BaguaBucket([part.ensure_bagua_tensor(f"part{place}")], str(place), flatten=False)
        for place, part in enumerate((flat[:3], flat[2:]))
    ]
    same_tensor_name = [
        BaguaBucket([torch.ones(1).ensure_bagua_tensor("w")], name, flatten=False) for name in "ab"
    ]
    for buckets, message in (
        ([bucket_of("a"), bucket_of("a")], "bucket name 'a' is registered twice"),
        (same_tensor_name, "tensor name 'w' is registered twice"),
        (overlapping, "'part0' and 'part1' overlap"),
        ([good, good], "registered twice"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.register_ordered_buckets(buckets)
    mark(good)
    engine.wait_pending_comm_ops()
    assert ran == ["good"]
    engine.close()


def test_a_tensor_of_a_closed_engine_cannot_be_marked() -> None:
    engine = Engine(World())
    bucket = bucket_of("a")
    engine.register_ordered_buckets([bucket])
    engine.close()
    with pytest.raises(ValueError, match="'a0' is in no registered bucket"):
        mark(bucket)


def test_closing_waits_for_what_is_under_way_at_most_the_timeout() -> None:
    release, ran = threading.Event(), []
    engine, patient = Engine(World(), timeout=0.2), Engine(World(), timeout=60)
    stuck, slow = (
        bucket_of("stuck", lambda _: release.wait(30)),
        bucket_of("slow", lambda _: release.wait(30), ran.append),
    )
    engine.register_ordered_buckets([stuck])
    patient.register_ordered_buckets([slow])
    mark(stuck, slow)
    engine.close()
    threading.Timer(0.2, release.set).start()
    patient.close()
    assert ran == ["slow"]


def test_a_forgotten_engine_takes_its_thread_along() -> None:
    engine = Engine(World(), "forgotten")
    bucket = bucket_of("a", lambda _: None)
    engine.register_ordered_buckets([bucket])
    mark(bucket)
    engine.wait_pending_comm_ops()
    thread = next(t for t in threading.enumerate() if t.name == "bagua_ref worker forgotten")
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
