"""Tests that nothing in a simulated world hangs or leaks: deadlocks, errors, interrupts, threads
that outlive their rank.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref

import pytest
import torch

from bagua_ref.base.runtime import current_world
from bagua_ref.errors import SimulationError
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def one(value=0.0, count=1):
    return torch.full((count,), float(value))


def match_all(error, *parts):
    for part in parts:
        assert part in str(error.value), f"{part!r} is not in {error.value}"


def test_a_rank_that_left_early_is_named():
    def program(comm):
        if comm.rank() in (0, 2, 3):
            comm.allreduce_inplace(one(count=3))

    with pytest.raises(SimulationError) as error:
        SimulatedWorld(6).run(program)
    match_all(
        error,
        "ranks 0, 2-3 wait in allreduce(op=SUM) of 3 float32 elements of group 'simulated'",
        "ranks 1, 4-5 have returned",
    )


def test_a_deadlock_is_seen_at_once_though_a_watchdog_is_set():
    world = SimulatedWorld(2)

    def program(comm):
        if comm.rank() == 0:
            comm.recv(one(), src=1)
        else:
            current_world().event().wait(timeout=300)

    with pytest.raises(SimulationError) as error:
        world.run(program)
    match_all(
        error,
        "rank 0 waits in recv(src=1) of 1 float32 element of group 'simulated'",
        "rank 1 waits for an event",
    )
    assert world.virtual_time == 0


def test_waiting_for_nothing():
    def program(comm):
        world, lock = current_world(), current_world().lock()
        world.spawn(world.event().wait, "worker")
        lock.acquire()
        lock.acquire()

    with pytest.raises(SimulationError) as error:
        SimulatedWorld(2).run(program)
    match_all(error, "ranks 0-1 wait for a lock", "ranks 0-1 wait for an event in thread 'worker'")


def test_a_background_thread_cannot_keep_a_stuck_world_going(monkeypatch):
    monkeypatch.setattr("bagua_ref.simulation.scheduler._WAKE_UPS", 1000)

    def program(comm):
        world = current_world()

        def tick():
            while True:
                world.sleep(1)

        world.spawn(tick, "clock")
        if comm.rank() == 0:
            comm.barrier()

    with pytest.raises(
        SimulationError,
        match=(
            r"only background threads woke up, 1000 times until 1000.0 s: rank 0 waits in barrier"
        ),
    ):
        SimulatedWorld(2).run(program)


def test_a_long_list_is_cut():
    with pytest.raises(SimulationError, match=r"; 14 more wait$"):
        SimulatedWorld(30).run(lambda comm: comm.recv(one(), src=(comm.rank() + 1) % 30))


@pytest.mark.parametrize(
    "error", [KeyError("lost"), SystemExit(3), KeyboardInterrupt("rank"), AssertionError("no")]
)
def test_a_rank_that_raises_ends_the_run_with_its_own_exception(error):
    entered, left = [], []

    def program(comm):
        try:
            entered.append(comm.rank())
            if comm.rank() == 2:
                current_world().sleep(1)
                raise error
            comm.barrier()
        finally:
            left.append(comm.rank())

    with pytest.raises(type(error)) as raised:
        SimulatedWorld(4).run(program)
    assert raised.value is error
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["raised in rank 2 of the simulated world"]
    assert sorted(entered) == sorted(left) == [0, 1, 2, 3]
    assert raised.traceback[-1].name == "program"


def test_an_exception_of_a_background_thread_ends_the_run_too():
    def program(comm):
        def fail():
            raise LookupError("in the background")

        if comm.rank() == 1:
            current_world().spawn(fail, "worker")
        comm.barrier()
        current_world().sleep(1)

    with pytest.raises(LookupError, match="in the background") as raised:
        SimulatedWorld(2).run(program)
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == [
            "raised in rank 1's thread 'worker' of the simulated world"
        ]


def test_background_threads_end_silently_with_the_run():
    ended = []

    def program(comm):
        world = current_world()

        def forever(wait):
            try:
                while True:
                    wait()
            finally:
                with world.lock():
                    world.queue().put(1)
                    ended.append(comm.rank())
                raise RuntimeError("too late to matter")

        lock, sleeper = world.lock(), lambda: world.sleep(1)
        lock.acquire()
        for wait in (
            world.event().wait,
            world.queue().get,
            lock.acquire,
            sleeper,
            lambda: comm.recv(one(), 1 - comm.rank()),
        ):
            world.spawn(lambda wait=wait: forever(wait), "forever")
        world.sleep(0.5)
        return "done"

    assert SimulatedWorld(2).run(program) == ["done", "done"]
    assert sorted(ended) == [0] * 5 + [1] * 5


def test_a_thread_that_never_ran_is_ended_too():
    started = []
    for seed in range(20):
        SimulatedWorld(1, seed=seed).run(
            lambda comm: current_world().spawn(lambda: started.append(1), "late") and None
        )
    assert 0 < len(started) < 20, "both happen"


def test_code_that_catches_everything_cannot_keep_a_thread():
    def program(comm):
        def stubborn():
            for _ in range(3):
                try:
                    current_world().event().wait()
                except BaseException:
                    attempts.append(1)

        current_world().spawn(stubborn, "stubborn")
        current_world().sleep(1)

    attempts = []
    SimulatedWorld(1).run(program)
    assert len(attempts) == 3


def test_an_interrupt_of_the_caller_unwinds_all_ranks():
    left = []

    def program(comm):
        try:
            if comm.rank() == 1:
                # in this thread, so that it does not wake the caller
                signal.raise_signal(signal.SIGINT)
            while True:
                current_world().sleep(1)
        finally:
            left.append(comm.rank())

    with pytest.raises(KeyboardInterrupt):
        SimulatedWorld(3).run(program)
    assert set(left) <= {0, 1, 2}
    assert 1 in left


def test_too_few_threads(monkeypatch):
    start, started = threading.Thread.start, []

    def refuse_the_third(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        SimulatedWorld(4).run(lambda comm: comm.barrier())
    monkeypatch.undo()
    assert not any(thread.is_alive() for thread in started)


def test_a_rank_that_waits_within_backward_is_unwound():
    def program(comm):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: comm.barrier())
        if comm.rank() == 1:
            current_world().sleep(1)
            raise LookupError("not there")
        (x * 2).sum().backward()

    with pytest.raises(LookupError, match="not there"):
        SimulatedWorld(2).run(program)


class WithFinalizer:
    def __init__(self, function, *arguments):
        self.cycle = self
        weakref.finalize(self, function, *arguments)


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_ends_within_a_finalizer_ends_silently(seed):
    """pytest turns exceptions in finalizers into errors."""

    def program(comm):
        if comm.rank() == 1:
            raise LookupError("not there")
        while True:
            for function in (current_world().queue().put, current_world().event().set):
                thing = WithFinalizer(function, *[1] * (function.__name__ == "put"))
                del thing.cycle, thing
            current_world().sleep(1)

    with pytest.raises(LookupError, match="not there"):
        SimulatedWorld(4, seed=seed).run(program)


def test_garbage_is_collected_at_the_same_points_in_every_run(monkeypatch):
    monkeypatch.setattr("bagua_ref.simulation.scheduler._COLLECT", 50)

    def program(comm):
        world, items, trace = current_world(), current_world().queue(), []

        def consume():
            while True:
                trace.append((world.now(), items.get()))

        world.spawn(consume, "consumer")
        for step in range(100):
            WithFinalizer(items.put, step)
            world.sleep(1)
        return trace

    threshold = gc.get_threshold()
    traces = []
    try:
        for generation_0 in (1, 50, 10_000):
            gc.set_threshold(generation_0)
            traces.append(SimulatedWorld(2).run(program))
    finally:
        gc.set_threshold(*threshold)
    assert gc.isenabled()
    assert len(traces[0][0]) > 50
    assert traces[1:] == traces[:1] * 2
