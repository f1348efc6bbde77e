"""Tests of process groups and functional collectives, in the simulated world and in a world of one
(S1, S3.9).
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests import communication_cases as cases

import bagua_ref
from bagua_ref.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua_ref.communicators.base import NonMember
from bagua_ref.errors import CommunicationError, NotInitializedError
from bagua_ref.groups.communication import (
    BaguaProcessGroup,
    _get_default_group,
    _rank_not_in_comm,
    _rank_not_in_group,
    from_torch_group,
    get_backend,
    get_communicator,
)
from bagua_ref.simulation import SimulatedWorld


@pytest.fixture
def world_of_one():
    bagua_ref.init_process_group(timeout=30)
    yield
    bagua_ref.destroy_process_group()


def simulate(function, nodes=(2, 1)):
    """Run ``function()`` on each rank of a simulated world with a default group."""

    def main(comm):
        bagua_ref.init_process_group()
        try:
            return function()
        finally:
            bagua_ref.destroy_process_group()

    return SimulatedWorld(sum(nodes), nodes=nodes).run(main)


def test_S1_without_comm_the_default_group_is_meant():
    def program():
        x = torch.tensor([bagua_ref.get_rank() + 1.0])
        bagua_ref.allreduce_inplace(x)
        return x.item(), bagua_ref.broadcast_object(bagua_ref.get_rank(), 2)

    assert simulate(program) == [(6.0, 2)] * 3


def test_S1_communicators_follow_nodes():
    """With ranks 0-1 and 2 on two nodes, 0 and 2 are the leaders."""

    def program():
        group = _get_default_group()
        comms = (
            group.get_global_communicator(),
            group.get_inter_node_communicator(),
            group.get_intra_node_communicator(),
        )
        return [(comm.rank(), comm.nranks()) for comm in comms]

    assert simulate(program, (2, 1)) == [
        [(0, 3), (0, 2), (0, 2)],
        [(1, 3), (-1, 2), (1, 2)],
        [(2, 3), (1, 2), (0, 1)],
    ]


def test_S1_the_leader_is_the_lowest_group_rank_of_a_node():
    """In a group without rank 0, rank 1 leads the first node."""

    def program():
        group = bagua_ref.new_group([3, 1, 2])
        comm = group.get_inter_node_communicator()
        sums = torch.tensor([float(bagua_ref.get_rank())])
        bagua_ref.allreduce_inplace(sums, comm=comm)
        return group.ranks, comm.rank(), sums.item()

    ranks = (1, 2, 3)
    assert simulate(program, (2, 2)) == [
        (ranks, -1, 0.0),
        (ranks, 0, 3.0),
        (ranks, 1, 3.0),
        (ranks, -1, 3.0),
    ]


def test_S3_9_a_rank_outside_comm_returns_at_once():
    def program():
        group = bagua_ref.new_group([1, 2])
        comm = group.get_global_communicator()
        for outside in (
            comm,
            group.get_inter_node_communicator(),
            group.get_intra_node_communicator(),
        ):
            if bagua_ref.get_rank() == 0:
                cases.outsiders_see_nothing(outside)
        x = torch.ones(2)
        bagua_ref.allreduce_inplace(x, comm=comm)
        return (
            x[0].item(),
            _rank_not_in_comm(comm),
            _rank_not_in_group(group),
            bagua_ref.get_rank() in group,
            comm.nranks(),
        )

    outside, inside = (1.0, True, True, False, 2), (2.0, False, False, True, 2)
    assert simulate(program) == [outside, inside, inside]
    assert not _rank_not_in_comm(None)
    assert not _rank_not_in_group(None)


def test_many_groups_of_one_set_of_ranks_do_not_meet():
    def program():
        rank = bagua_ref.get_rank()
        groups = [bagua_ref.new_group() for _ in range(3)]
        # Ranks may connect and use groups in different orders, as long as the order within each
        # group is the same.
        totals = []
        for group in groups[::-1]:
            x = torch.tensor([float(rank)])
            bagua_ref.allreduce_inplace(x, comm=group.get_global_communicator())
            totals.append(x.item())
        return totals, len({group.group_name for group in groups})

    assert simulate(program) == [([3.0] * 3, 3)] * 3


def test_the_background_group_is_another_one():
    def program():
        group = bagua_ref.new_group([0, 2])
        first, second = group.for_background(), group.for_background()
        assert first.is_background
        assert not group.is_background
        assert first.for_background() is first
        assert first.ranks == group.ranks
        assert group != first != second
        assert first.get_global_communicator() is not group.get_global_communicator()
        assert first.get_global_communicator() is first.get_global_communicator()
        return first.group_name, second.group_name

    assert len(set(simulate(program))) == 1
    assert len({*simulate(program)[0]}) == 2


def test_communicators_by_name():
    def program():
        assert (
            get_communicator("default", "global") is _get_default_group().get_global_communicator()
        )
        group = bagua_ref.new_group()
        assert get_communicator(group.group_name, "intra") is group.get_intra_node_communicator()
        assert get_communicator(group.group_name, "inter") is group.get_inter_node_communicator()
        with pytest.raises(ValueError, match="group_name='nobody' must be one of"):
            get_communicator("nobody", "global")
        with pytest.raises(ValueError, match="comm_name='outer' must be one of"):
            get_communicator("default", "outer")

    simulate(program)


def test_S1_a_group_of_no_ranks_has_no_members():
    def program():
        group = bagua_ref.new_group(ranks=[])
        x = torch.ones(2)
        for comm in (
            group.get_global_communicator(),
            group.get_inter_node_communicator(),
            group.get_intra_node_communicator(),
        ):
            assert isinstance(comm, NonMember)
            assert _rank_not_in_comm(comm)
            bagua_ref.allreduce_inplace(x, comm=comm)
        assert _rank_not_in_group(group)
        assert torch.equal(x, torch.ones(2))
        with pytest.raises(ValueError, match="does not hold this rank"):
            torch.nn.Linear(2, 2).with_bagua([], GradientAllReduceAlgorithm(), process_group=group)

    simulate(program)


@pytest.mark.parametrize("ranks", [[0, 0], [3], [-1], [0.5]])
def test_ranks_that_make_no_group(ranks):
    def program():
        with pytest.raises(ValueError, match="ranks="):
            bagua_ref.new_group(ranks)
        assert bagua_ref.new_group([0]).ranks == (0,)  # group names still agree between ranks

    simulate(program)


def test_the_communication_of_a_wrapped_module_is_found_by_the_modules_name():
    def program():
        module = torch.nn.Linear(2, 1)
        module.bagua_module_name = "scorer"
        with pytest.raises(
            ValueError,
            match=(
                r"model_name='scorer' must be the bagua_module_name of a wrapped module; known are"
                r" \[\]"
            ),
        ):
            get_backend("scorer")
        module.with_bagua([], GradientAllReduceAlgorithm())
        module(torch.ones(1, 2)).sum().backward()
        get_backend("scorer").wait_pending_comm_ops()
        with pytest.raises(
            ValueError,
            match=(
                r"of the wrapped module 'scorer' is"
                r" bagua_ref\.communication\.get_backend\('scorer'\)"
            ),
        ):
            bagua_ref.get_backend("scorer")
        with pytest.raises(ValueError, match=r"installed are [^;]*$"):
            bagua_ref.get_backend("scorrer")
        first = get_backend("scorer")
        module.with_bagua([], GradientAllReduceAlgorithm())
        assert get_backend("scorer") is not first

    simulate(program)


def test_two_groups_of_one_name():
    def program():
        BaguaProcessGroup([0, 1], None, "mine")
        with pytest.raises(ValueError, match="group_name='mine' is taken"):
            BaguaProcessGroup([0, 2], None, "mine")

    simulate(program)


def test_a_group_keeps_its_world():
    """A group's communicators belong to the rank that made it, whichever thread asks for them."""

    def program():
        group = bagua_ref.new_group()
        group.get_global_communicator()
        return group

    for rank, group in enumerate(simulate(program)):
        assert group._rank == rank
        with pytest.raises(NotInitializedError, match="closed"):
            group.get_global_communicator()


def test_before_and_after():
    assert not bagua_ref.is_initialized()
    bagua_ref.destroy_process_group()  # nothing to do
    for call in (
        bagua_ref.barrier,
        bagua_ref.new_group,
        lambda: bagua_ref.broadcast(torch.ones(1)),
    ):
        with pytest.raises(NotInitializedError, match=r"init_process_group\(\)"):
            call()
    with pytest.raises(NotInitializedError):
        BaguaProcessGroup([0], None, "early")


def test_twice(world_of_one):
    with pytest.raises(RuntimeError, match=r"destroy_process_group\(\)"):
        bagua_ref.init_process_group()


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "mpi"},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"local_world_size": 0},
        {"store": dist.HashStore()},
        {"store": dist.HashStore(), "rank": 1, "world_size": 1},
        {"rank": 5, "world_size": 2},
        {"rank": -2},
        {"world_size": 0},
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_S1_bad_arguments_leave_nothing_behind(arguments):
    with pytest.raises(ValueError, match="|".join(arguments)):
        bagua_ref.init_process_group(**arguments)
    assert not bagua_ref.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "arguments", [{"store": "somewhere", "rank": 0, "world_size": 1}, {"timeout": "soon"}]
)
def test_S1_arguments_of_another_type_are_named(arguments):
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(arguments))}='so"):
        bagua_ref.init_process_group(**arguments)
    assert not bagua_ref.is_initialized()


def test_S1_a_rank_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK='first' must be an integer"):
        bagua_ref.get_rank()


def test_S1_a_world_of_one_comes_and_goes(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        bagua_ref.init_process_group()
        assert dist.is_initialized()
        assert (bagua_ref.get_rank(), bagua_ref.get_world_size()) == (0, 1)
        comm = _get_default_group().get_global_communicator()
        bagua_ref.destroy_process_group()
        assert not dist.is_initialized()
        with pytest.raises(CommunicationError, match="destroyed"):
            comm.barrier()


def test_S1_torchs_default_group_is_used_and_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrong in ({"rank": 1}, {"world_size": 2}, {"backend": "nccl"}):
            with pytest.raises(ValueError, match="disagrees"):
                bagua_ref.init_process_group(**wrong)
        for _ in range(2):  # the second time on the same store
            bagua_ref.init_process_group(backend="gloo")
            bagua_ref.barrier()
            bagua_ref.destroy_process_group()
            assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_S1_from_a_store():
    bagua_ref.init_process_group(dist.HashStore(), 0, 1, 1)
    try:
        x = torch.ones(3)
        bagua_ref.allreduce_inplace(x)
        assert x.tolist() == [1, 1, 1]
        assert bagua_ref.env.get_node_rank() == 0
    finally:
        bagua_ref.destroy_process_group()


def test_torch_groups_become_ours(world_of_one):
    torch_group = dist.new_group([0])
    group = from_torch_group(torch_group)
    assert group.ranks == (0,)
    assert from_torch_group(torch_group).group_name != group.group_name
    with pytest.raises(TypeError, match="ProcessGroup"):
        from_torch_group([0])
    with pytest.raises(NotInitializedError, match="bagua_patch"):
        torch_group.bagua_pg  # noqa: B018
    assert torch_group.bagua_patch() is torch_group
    patched = torch_group.bagua_pg
    assert torch_group.bagua_patch().bagua_pg is patched
    assert torch_group.bagua_get_global_communicator() is patched.get_global_communicator()
    assert torch_group.bagua_get_inter_node_communicator() is patched.get_inter_node_communicator()
    assert torch_group.bagua_get_intra_node_communicator() is patched.get_intra_node_communicator()


def test_a_group_may_be_closed_while_it_is_being_closed(world_of_one, monkeypatch):
    """Garbage collection, which may begin anywhere, closes the groups of trainings that have
    ended.
    """
    group, closed = bagua_ref.new_group(), []

    def close(kind):
        closed.append(kind)
        group.close()

    communicators = {
        "global": group.get_global_communicator(),
        "inter": group.get_inter_node_communicator(),
        "intra": group.get_intra_node_communicator(),
    }
    for kind, communicator in communicators.items():
        monkeypatch.setattr(communicator, "close", partial(close, kind))
    group.close()
    assert closed == [*communicators]


def test_a_dropped_group_frees_its_connections(world_of_one):
    def connections():
        return len(os.listdir("/proc/self/task"))

    bagua_ref.barrier()
    before = connections()
    for _ in range(5):
        bagua_ref.new_group().get_global_communicator().barrier()
    assert connections() <= before + 8  # threads of one group at most, not of five


def test_no_communicator_of_its_own_pretends_to_be_one():
    outside = NonMember(3, "elsewhere")
    assert (outside.rank(), outside.nranks(), outside.bytes_sent) == (-1, 3, 0)
    with pytest.raises(AttributeError):
        outside.allredcue  # noqa: B018
