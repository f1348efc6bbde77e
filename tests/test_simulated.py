"""Tests of the simulated communicator and transport: disagreement, messages, groups, timeouts,
abort.
"""

from __future__ import annotations

import pytest
from tests.disagreements import DIFFERENT_CALLS
from tests.test_simulation import one

from bagua_ref.base.runtime import current_world
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError, SimulationError
from bagua_ref.simulation import SimulatedWorld

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def caught(function, *args):
    try:
        function(*args)
    except (SimulationError, ValueError, TypeError) as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("name", DIFFERENT_CALLS)
def test_S3_9_ranks_that_make_different_calls_are_told_who_calls_what_and_can_go_on(name):
    call, other, first, last = DIFFERENT_CALLS[name]

    def program(comm):
        untouched = one(comm.rank())
        result = caught(other if comm.rank() == 2 else call, comm)
        comm.allreduce_inplace(untouched)
        return result, untouched.item()

    (said,) = set(SimulatedWorld(3).run(program))
    (kind, message), total = said
    words = name.split()[0]
    assert (kind, total) == (
        {"dtypes": TypeError, "sizes": ValueError, "an": ValueError}.get(words, SimulationError),
        3,
    ), name
    before, _, after = message.partition(", but rank 2 calls ")
    assert first in before
    assert last in after
    assert "group 'simulated'" in message
    assert {
        "dtypes": "same dtype",
        "roots": "same arguments",
        "collectives": "same collective",
    }.get(words, "") in message


def test_messages_that_do_not_fit():
    def program(comm):
        if comm.rank() == 0:
            comm.send(one(count=2), 1)
            comm.send(one(), 1)
            comm.send(one(7), 1)
            return None
        long, narrow, right = one(count=3), one().half(), one()
        return (
            caught(comm.recv, long, 0),
            caught(comm.recv, narrow, 0),
            comm.recv(right, 0),
            right.item(),
            long.tolist(),
        )

    wrong_size, wrong_dtype, _, value, untouched = SimulatedWorld(2).run(program)[1]
    assert wrong_size[0] is ValueError
    assert "rank 0 sent 2 float32 elements, but rank 1 receives 3 float32 elements" in wrong_size[1]
    assert wrong_dtype[0] is TypeError
    assert "rank 0 sent 1 float32 element, but rank 1 receives 1 float16 element" in wrong_dtype[1]
    assert (value, untouched) == (7, [0, 0, 0])


def test_what_is_sent_is_what_it_was_when_it_was_sent():
    def program(comm):
        x = one(5)
        if comm.rank() == 0:
            comm.send(x, 1)
            x.zero_()
        else:
            current_world().sleep(1)
            comm.recv(x.zero_(), 0)
        return x.item()

    assert SimulatedWorld(2).run(program) == [0, 5]


def test_two_threads_of_a_rank_must_not_share_a_communicator():
    def program(comm):
        if comm.rank() == 0:
            current_world().spawn(comm.barrier, "second")
        else:
            current_world().sleep(1)
        comm.barrier()

    with pytest.raises(
        SimulationError,
        match="two threads of rank 0 use group 'simulated' at once: one is in barrier",
    ):
        SimulatedWorld(2).run(program)


def test_two_threads_of_a_rank_must_not_receive_from_one_peer():
    def program(comm):
        if comm.rank() == 0:
            current_world().spawn(lambda: comm.recv(one(), 1), "second")
            comm.recv(one(), 1)
        current_world().sleep(1)

    with pytest.raises(
        SimulationError, match="two threads of rank 0 receive from 1 of group 'simulated' at once"
    ):
        SimulatedWorld(2).run(program)


def test_connecting_groups_in_their_own_order():
    def program(comm):
        if comm.rank() == 1:
            return None
        group = current_world().transport.connect("some", (3, 0, 2), timeout=300.0)
        x = one(comm.rank())
        recv = one(count=3)
        group.allgather(x, recv)
        return group.rank(), group.name, recv.tolist()

    assert SimulatedWorld(4).run(program) == [
        (1, "some", [3, 0, 2]),
        None,
        (2, "some", [3, 0, 2]),
        (0, "some", [3, 0, 2]),
    ]


def test_connecting_different_ranks_under_one_name():
    with pytest.raises(
        SimulationError,
        match=r"group 'g' is being connected by rank . for ranks .*, but rank . connects it for",
    ):
        SimulatedWorld(2).run(
            lambda comm: current_world().transport.connect(
                "g", (0, 1) if comm.rank() else (1, 0), 300.0
            )
        )


def test_a_group_s_timeout_counts_virtual_seconds():
    def program(comm):
        group = current_world().transport.connect("g", (0, 1), timeout=30.0)
        try:
            if comm.rank() == 1:
                current_world().sleep(100)
            group.barrier()
        except CommunicationError as error:
            return type(error), str(error), current_world().now()
        return None

    first, second = SimulatedWorld(2).run(program)
    assert first == (
        CommunicationTimeoutError,
        "rank 0 timed out after 30.0 s waiting in barrier() of group 'g' for rank 1",
        30,
    )
    assert second == (
        CommunicationError,
        (
            "group 'g' was given up: rank 0 timed out after 30.0 s waiting in barrier() of group"
            " 'g' for rank 1"
        ),
        100,
    )


def test_abort_ends_operations_under_way_and_later_ones():
    def program(comm):
        group = current_world().transport.connect("g", range(4), timeout=300.0)
        errors = []
        if comm.rank() == 3:
            current_world().sleep(1)
            group.abort()
        operations = [
            lambda: group.recv(one(), src=3) if comm.rank() == 0 else group.barrier(),
            group.barrier,
            group.abort,
        ]
        for operation in operations:
            try:
                operation()
            except CommunicationError as error:
                errors.append(str(error))
        comm.barrier()
        return errors

    assert SimulatedWorld(4).run(program) == [["rank 3 aborted group 'g'"] * 2] * 4


def test_a_closed_transport_can_connect_anew():
    def program(comm):
        transport = current_world().transport
        group = transport.connect("g", (0, 1), timeout=300.0)
        group.barrier()
        transport.close()
        with pytest.raises(
            CommunicationError, match=f"rank {comm.rank()} has closed its communicator of group 'g'"
        ):
            group.barrier()
        with pytest.raises(CommunicationError, match="has closed"):
            group.send(one(), 1 - comm.rank())
        x = one(1)
        transport.connect("g", (1, 0), timeout=300.0).allreduce_inplace(x)
        comm.barrier()
        return x.item()

    assert SimulatedWorld(2).run(program) == [2, 2]
