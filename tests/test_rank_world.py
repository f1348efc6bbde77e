"""Tests of a simulated rank's threads, locks, events, queues and clock."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from functools import partial

import pytest

from bagua_ref.base.runtime import World, current_world
from bagua_ref.env import get_rank
from bagua_ref.errors import SimulationError
from bagua_ref.observe.meter import Meter
from bagua_ref.scheduling.worker import Worker
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_spawned_threads_belong_to_their_rank():
    def program(comm):
        seen = queue.SimpleQueue()
        outer = current_world()
        thread = outer.spawn(
            lambda: seen.put(
                (get_rank(), current_world() is outer, threading.current_thread().name)
            ),
            "helper",
        )
        thread.join()
        assert not thread.is_alive()
        return seen.get_nowait()

    assert SimulatedWorld(2).run(program) == [(0, True, "helper"), (1, True, "helper")]


def test_a_thread_that_has_ended_holds_nothing():
    class Thing:
        pass

    def program(comm):
        thing = Thing()
        held = weakref.ref(thing)
        thread = current_world().spawn(partial(repr, thing), "holder")
        del thing
        thread.join()
        return held() is None

    assert SimulatedWorld(1).run(program) == [True]


def test_join_may_time_out():
    def program(comm):
        world = current_world()
        thread = world.spawn(lambda: world.sleep(5), "sleeper")
        thread.join(timeout=2)
        times = [(world.now(), thread.is_alive())]
        thread.join()
        return [*times, (world.now(), thread.is_alive())]

    assert SimulatedWorld(1).run(program) == [[(2, True), (5, False)]]


@pytest.mark.parametrize("seed", range(5))
def test_a_lock_goes_to_who_came_first(seed):
    def program(comm):
        world, order = current_world(), []
        lock = world.lock()

        def wait(number):
            world.sleep(number + 1)
            with lock:
                order.append(number)
                world.sleep(10)

        with lock:
            threads = [
                world.spawn(lambda number=number: wait(number), str(number)) for number in range(5)
            ]
            world.sleep(100)
        assert lock.acquire(timeout=1) is False, (
            "released to the first waiter, not to whoever asks next"
        )
        for thread in threads:
            thread.join()
        return order

    assert SimulatedWorld(1, seed=seed).run(program) == [[0, 1, 2, 3, 4]]


def test_a_lock_excludes_and_may_time_out():
    def program(comm):
        world, lock = current_world(), current_world().lock()
        inside = []

        def enter():
            for _ in range(10):
                with lock:
                    inside.append(1)
                    world.sleep(0.1)
                    assert len(inside) == 1
                    inside.pop()

        threads = [world.spawn(enter, str(number)) for number in range(3)]
        for thread in threads:
            thread.join()
        assert lock.acquire()
        assert not lock.acquire(timeout=0)
        before = world.now()
        assert not lock.acquire(timeout=2)
        assert world.now() == before + 2
        lock.release()
        with pytest.raises(RuntimeError, match="not held"):
            lock.release()
        return lock.acquire(timeout=0)

    assert SimulatedWorld(1).run(program) == [True]


def test_a_waiter_that_gave_up_is_not_handed_the_lock():
    def program(comm):
        world, lock = current_world(), current_world().lock()
        lock.acquire()
        thread = world.spawn(lambda: lock.acquire(timeout=1), "impatient")
        thread.join()
        lock.release()
        return lock.acquire(timeout=5), world.now()

    assert SimulatedWorld(1).run(program) == [(True, 1)]


def test_events():
    def program(comm):
        world, event = current_world(), current_world().event()
        assert not event.is_set()
        assert event.wait(timeout=0) is False
        assert event.wait(timeout=2) is False
        assert world.now() == 2
        woken = []
        threads = [
            world.spawn(lambda: woken.append(event.wait()), str(number)) for number in range(3)
        ]
        late = world.spawn(lambda: woken.append(event.wait(timeout=9)), "late")
        world.sleep(1)
        assert woken == []
        event.set()
        event.clear()
        for thread in [*threads, late]:
            thread.join()
        assert woken == [True] * 4
        assert world.now() == 3
        event.set()
        return event.is_set(), event.wait(), event.wait(timeout=0)

    assert SimulatedWorld(1).run(program) == [(True, True, True)]


@pytest.mark.parametrize("seed", range(5))
def test_queues_are_first_in_first_out(seed):
    def program(comm):
        world, items, got = current_world(), current_world().queue(), []
        thread = world.spawn(lambda: got.extend(items.get() for _ in range(6)), "consumer")
        for number in range(3):
            items.put(number)
        world.sleep(1)
        for number in range(3, 6):
            items.put(number)
        thread.join()
        for timeout in (0, 2):
            with pytest.raises(queue.Empty):
                items.get(timeout=timeout)
        assert world.now() == 3
        items.put(None)
        return got, items.get(timeout=0)

    assert SimulatedWorld(1, seed=seed).run(program) == [([0, 1, 2, 3, 4, 5], None)]


def test_what_a_world_made_still_works_after_its_run_where_nobody_waits():
    def program(comm):
        world = current_world()
        return world, world.lock(), world.event(), world.queue(), comm

    world, lock, event, items, comm = SimulatedWorld(2).run(program)[0]
    with lock:
        event.set()
    assert event.is_set()
    assert event.wait()
    items.put(1)
    assert items.get() == 1
    assert world.now() == 0
    with pytest.raises(
        SimulationError, match="'MainThread' would have to wait for simulated ranks"
    ):
        items.get()
    with pytest.raises(SimulationError, match="not one of this run's threads"):
        comm.barrier()


def test_a_foreign_thread_is_told_to_use_spawn():
    def program(comm):
        errors = []

        def foreign():
            try:
                comm.barrier()
            except SimulationError as error:
                errors.append(error)

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        comm.barrier()
        return str(errors[0])

    assert "current_world().spawn" in SimulatedWorld(2).run(program)[0]


def test_a_finalizer_may_release_a_lock_at_any_point():
    class Guard:
        def __init__(self, lock):
            self.itself = self
            self.finalizer = weakref.finalize(self, lock.release)

    def program(comm):
        lock = current_world().lock()
        for _ in range(5):
            lock.acquire()
            Guard(lock)
            thread = current_world().spawn(gc.collect, "collector")
            lock.acquire()
            lock.release()
            thread.join()
        return lock.acquire(timeout=0)

    assert SimulatedWorld(1).run(program) == [True]


def test_a_worker_that_is_collected_lets_no_other_thread_run_within_its_finalizer():
    def program(comm):
        world, ran = current_world(), []
        items = world.queue()

        def consume():
            while True:
                ran.append(items.get())

        world.spawn(consume, "consumer")
        world.sleep(1)
        items.put(1, False)
        before = list(ran)
        items.put(2)
        world.sleep(1)
        worker = Worker(world, "worker", 1.0, Meter(world, ""))
        gone = weakref.ref(worker)
        switches = switches_of(world)
        del worker
        assert gone() is None
        return before, ran, switches_of(world) - switches

    def switches_of(world):
        return world.queue()._scheduler._switches

    assert SimulatedWorld(1).run(program) == [([], [1, 2], 0)]


def test_sleeping_costs_no_time():
    def program(comm):
        world = current_world()
        world.sleep(1e6 * (comm.rank() + 1))
        woke = world.now()
        comm.barrier()
        return woke, world.now()

    started = time.monotonic()
    world = SimulatedWorld(2)
    assert world.run(program) == [(1e6, 2e6), (2e6, 2e6)]
    assert world.virtual_time == 2e6
    assert time.monotonic() - started < 100


def test_sleepers_wake_in_order():
    def program(comm):
        world, order = current_world(), []

        def sleeper(seconds):
            world.sleep(seconds)
            order.append((seconds, world.now()))

        for thread in [world.spawn(lambda s=s: sleeper(s), f"{s} s") for s in (3, 1, 2, 0)]:
            thread.join()
        return order

    assert SimulatedWorld(1).run(program) == [[(0, 0), (1, 1), (2, 2), (3, 3)]]


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_sleeping_backwards(seconds):
    with pytest.raises(ValueError, match=f"seconds={seconds} to sleep must be 0 or more"):
        SimulatedWorld(1).run(lambda comm: current_world().sleep(seconds))


def test_loops_that_only_ask_come_to_an_end():
    def program(comm):
        world, event = current_world(), current_world().event()
        world.spawn(lambda: (world.sleep(5), event.set()), "setter")
        while not event.is_set():
            pass
        thread = world.spawn(lambda: world.sleep(5), "sleeper")
        while thread.is_alive():
            pass
        world.spawn(lambda: world.sleep(100), "until the end")
        while world.now() < 20:
            pass
        return world.now()

    assert SimulatedWorld(1).run(program) == [110]


def test_a_timeout_of_a_rank_fires_when_nobody_is_in_a_collective():
    def program(comm):
        assert current_world().event().wait(timeout=300) is False
        comm.barrier()
        return current_world().now()

    assert SimulatedWorld(2).run(program) == [300, 300]


def test_background_timeouts_are_intervals_and_let_time_pass():
    """A thread that waits for an event with a timeout keeps the world running."""

    def program(comm):
        world, start = current_world(), current_world().event()

        def background():
            assert start.wait(timeout=5) is False
            comm.barrier()

        if comm.rank() == 0:
            comm.barrier()
        else:
            world.spawn(background, "background").join()
        return world.now()

    assert SimulatedWorld(2).run(program) == [5, 5]


def test_a_real_lock_serves_a_with_block_and_refuses_one_release_too_many():
    lock = World().lock()
    with lock as held:
        assert held is lock
        assert lock.acquire(timeout=0.01) is False
    assert lock.acquire(timeout=0)
    lock.release()
    with pytest.raises(RuntimeError, match="not held"):
        lock.release()


def test_a_real_lock_handed_over_just_as_the_time_runs_out_is_taken():
    lock, taken = World().lock(), []
    lock.acquire()
    waiter = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=0.1)))
    waiter.start()
    while not lock._waiting:
        time.sleep(0.001)
    with lock._mutex:  # stands for a release in progress
        time.sleep(0.5)
        lock._waiting.pop(0).release()
    waiter.join()
    assert taken == [True]


def test_a_real_lock_is_not_released_while_a_waiter_is_giving_up():
    lock = World().lock()
    lock.acquire()
    releaser = threading.Thread(target=lock.release)
    with lock._mutex:  # stands for a waiter that removes itself from the list
        releaser.start()
        time.sleep(0.2)
        assert lock._held
    releaser.join()
    assert lock.acquire(timeout=0)


def test_a_real_clock_goes_on_while_one_sleeps():
    world = World()
    before = world.now()
    world.sleep(0.01)
    assert world.now() >= before + 0.01
