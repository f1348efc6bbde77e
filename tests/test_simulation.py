"""Tests of the simulated world: ranks, one interleaving per seed, no state shared that processes
would not share.
"""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch

from bagua_ref.base.runtime import current_world
from bagua_ref.env import get_local_rank, get_local_size, get_node_rank, get_rank, get_world_size
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def one(value=0.0, count=1):
    return torch.full((count,), float(value))


def test_S1_identity_on_uneven_nodes():
    def program(comm):
        assert comm.rank() == get_rank()
        return get_rank(), get_world_size(), get_local_rank(), get_local_size(), get_node_rank()

    world = SimulatedWorld(4, nodes=(1, 3))
    assert world.run(program) == [
        (0, 4, 0, 1, 0),
        (1, 4, 0, 3, 1),
        (2, 4, 1, 3, 1),
        (3, 4, 2, 3, 1),
    ]
    assert world.run(lambda comm: current_world().transport.node_of) == [(0, 1, 1, 1)] * 4
    assert get_rank() == 0
    assert get_world_size() == 1
    assert repr(world) == "SimulatedWorld(4, nodes=(1, 3), seed=0)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "world_size=0 must be at least 1"),
        ({"world_size": 2.0}, TypeError, "world_size=2.0 must be an int"),
        ({"world_size": True}, TypeError, "world_size=True must be an int"),
        (
            {"world_size": 3, "nodes": (1, 1)},
            ValueError,
            "nodes=(1, 1) must be .* sum to world_size=3",
        ),
        ({"world_size": 3, "nodes": (4, -1)}, ValueError, "nodes=(4, -1) must be"),
        ({"world_size": 3, "nodes": (3, 0)}, ValueError, "each at least 1"),
        ({"world_size": 3, "seed": "a"}, TypeError, "seed='a' must be an int"),
        (
            {"world_size": 2, "compute": 1.0},
            ValueError,
            "compute=1.0 must be seconds or .* with a link",
        ),
        *(
            ({"world_size": 2, "link": "1Gbit,1ms", "compute": value}, ValueError, "compute=")
            for value in (-1.0, "x")
        ),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
        SimulatedWorld(**arguments)


def interleaving(seed, steps=4):
    trace = []

    def background():
        for step in range(steps):
            trace.append((get_rank(), "background", step))
            current_world().sleep(1)

    def program(comm):
        world, lock = current_world(), current_world().lock()
        world.spawn(background, "background")
        for step in range(steps):
            trace.append((comm.rank(), step))
            with lock:
                world.event().set()
        comm.barrier()
        world.sleep(10)

    SimulatedWorld(4, seed=seed).run(program)
    return trace


def test_a_seed_gives_one_interleaving_and_another_seed_another():
    traces = [interleaving(seed) for seed in range(5)]
    assert [interleaving(seed) for seed in range(5)] == traces
    assert len({tuple(trace) for trace in traces}) == 5
    assert len({frozenset(trace) for trace in traces}) == 1


def test_only_one_thread_runs_at_a_time():
    running = []

    def work():
        for _ in range(20):
            running.append(get_rank())
            assert len(running) == 1
            time.sleep(0.0005)
            running.pop()
            current_world().event().set()

    def program(comm):
        thread = current_world().spawn(work, "second")
        work()
        thread.join()

    SimulatedWorld(4).run(program)


def test_every_run_starts_afresh():
    world = SimulatedWorld(2)

    def program(comm):
        assert current_world().now() == 0
        assert current_world().default_group is None
        current_world().default_group = comm
        current_world().sleep(3)
        x = one(comm.rank())
        comm.allreduce_inplace(x)
        return x.item()

    assert [world.run(program), world.run(program)] == [[1, 1], [1, 1]]
    assert world.virtual_time == 3


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1).item(), random.random, lambda: random.gauss(0, 1)],
    ids=["torch", "random", "gauss"],
)
def test_ranks_have_their_own_random_generators(draw):
    """Of two numbers of ``gauss``, the second changes an attribute only."""

    def program(comm):
        numbers = [draw()]
        torch.manual_seed(comm.rank())
        random.seed(comm.rank())
        for _ in range(3):
            comm.barrier()
            numbers.append(draw())
        thread = current_world().spawn(lambda: numbers.append(draw()), "of the same process")
        thread.join()
        return numbers

    torch.manual_seed(7)
    random.seed(7)
    first = draw()
    torch.manual_seed(7)
    random.seed(7)
    results = SimulatedWorld(3).run(program)
    assert draw() == first, "the caller's generators are as before"
    for rank, numbers in enumerate(results):
        torch.manual_seed(rank)
        random.seed(rank)
        assert numbers == [first] + [draw() for _ in range(4)]


def test_ranks_may_run_on_the_same_cores_as_without_a_simulation():
    """A thread that is about to run is kept on one core, so that it wakes faster; one that runs is
    not.
    """
    allowed = os.sched_getaffinity(0)
    own = {min(allowed)}

    def cores(comm):
        found = [os.sched_getaffinity(0)]
        for given in (own, allowed):
            comm.barrier()
            found.append(os.sched_getaffinity(0))
            os.sched_setaffinity(0, given)
        comm.barrier()
        return [*found, os.sched_getaffinity(0)]

    assert SimulatedWorld(3).run(cores) == [[allowed, allowed, own, allowed]] * 3
    assert os.sched_getaffinity(0) == allowed


def test_backward_runs_on_the_rank_s_own_thread():
    def program(comm):
        seen = []
        assert not torch._C._is_multithreading_enabled()
        x = one(comm.rank()).requires_grad_()
        x.register_post_accumulate_grad_hook(
            lambda p: seen.append(threading.get_ident()) or comm.allreduce_inplace(p.grad)
        )
        (x * (comm.rank() + 1)).sum().backward()
        assert seen == [threading.get_ident()]
        return x.grad.item()

    assert SimulatedWorld(3).run(program) == [6, 6, 6]


def test_worlds_may_be_nested():
    def program(comm):
        inner = SimulatedWorld(3, seed=comm.rank()).run(
            lambda c: (get_world_size(), c.broadcast_object(get_rank(), src=2))
        )
        comm.barrier()
        return inner, get_world_size()

    assert SimulatedWorld(2).run(program) == [([(3, 2)] * 3, 2)] * 2


@pytest.mark.proof
def test_1024_ranks():
    n, chunk = 1024, 96

    def program(comm):
        x = one(comm.rank(), count=4)
        comm.allreduce_inplace(x)
        payload = torch.full((n * chunk,), comm.rank() % 251, dtype=torch.uint8)
        comm.alltoall_inplace(payload)
        return (
            x[0].item(),
            payload.view(n, chunk)[:, 0].clone(),
            int(payload.sum(dtype=torch.int64)),
        )

    expected = torch.arange(n) % 251
    for total, column, checksum in SimulatedWorld(n, nodes=(500, 524)).run(program):
        assert total == n * (n - 1) / 2
        assert torch.equal(column, expected.to(torch.uint8))
        assert checksum == chunk * int(expected.sum())
