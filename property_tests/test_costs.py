"""Properties of what communication costs (S14)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import (
    LinkCost,
    LinkCosts,
    chunk_bytes,
    loads_of,
    operation_seconds,
    round_seconds,
    traffic,
)
from bagua_ref.simulation import SimulatedWorld

RANKS = st.integers(1, 9)
SECONDS = st.floats(1e-9, 10.0)
LINKS = st.builds(LinkCosts, *[st.builds(LinkCost, SECONDS, st.floats(1e-12, 1e-3))] * 2)

OPERATIONS = {
    # By name: of n ranks, m elements per chunk and a root; and the same in the words of a
    # communicator.
    "allreduce": (
        lambda n, m, root: costs.all_reduce(chunk_bytes(m * n, 4, n)),
        lambda c, x, y, root: c.allreduce(y, y.clone()),
    ),
    "reduce_scatter": (
        lambda n, m, root: costs.reduce_scatter([4 * m] * n),
        lambda c, x, y, root: c.reduce_scatter(y, x),
    ),
    "allgather": (
        lambda n, m, root: costs.all_gather([4 * m] * n),
        lambda c, x, y, root: c.allgather(x, y),
    ),
    "alltoall": (
        lambda n, m, root: costs.all_to_all([[4 * m] * n] * n),
        lambda c, x, y, root: c.alltoall(y, y.clone()),
    ),
    "broadcast": (
        lambda n, m, root: costs.broadcast(4 * m, n, root),
        lambda c, x, y, root: c.broadcast(x, root),
    ),
    "reduce": (
        lambda n, m, root: costs.reduce(4 * m, n, root),
        lambda c, x, y, root: c.reduce(x, x.clone(), root),
    ),
    "gather": (
        lambda n, m, root: costs.gather([4 * m] * n, root),
        lambda c, x, y, root: c.gather(x, y, root),
    ),
    "scatter": (
        lambda n, m, root: costs.scatter([4 * m] * n, root),
        lambda c, x, y, root: c.scatter(y, x, root),
    ),
}


def operation(name, n, m, root):
    return OPERATIONS[name][0](n, m, root)


@st.composite
def operations(draw):
    n = draw(RANKS)
    found = operation(
        draw(st.sampled_from(sorted(OPERATIONS))),
        n,
        draw(st.integers(0, 50)),
        draw(st.integers(0, n - 1)),
    )
    return found, draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@given(n=st.integers(1, 6), m=st.integers(1, 5), root=st.integers(0, 5))
def test_S14_1_bytes_summed_over_ranks_are_those_that_communicators_count(name, n, m, root):
    root %= n

    def run(comm):
        for _ in range(n):  # as each rank counts the mean over ranks, a fraction
            OPERATIONS[name][1](comm, torch.zeros(m), torch.zeros(m * n), root)
        return comm.bytes_sent

    sent = sum(
        own[kind].bytes_sent
        for own in traffic(operation(name, n, m, root), [0] * n)
        for kind in own
    )
    assert sum(SimulatedWorld(n).run(run)) == n * sent


@given(operations())
def test_S14_1_what_is_sent_is_received_over_the_same_kind_of_link(given_):
    found, node_of = given_
    counts = traffic(found, node_of)
    for kind in ("inside", "between"):
        assert sum(own[kind].bytes_sent for own in counts) == sum(
            own[kind].bytes_received for own in counts
        )
        assert sum(own[kind].messages_sent for own in counts) == sum(
            own[kind].messages_received for own in counts
        )
    assert sum(own[kind].messages_sent for own in counts for kind in own) == sum(map(len, found))


@given(n=RANKS, m=st.integers(0, 10**6), links=LINKS)
def test_S14_2_on_nodes_of_one_rank_times_are_the_textbooks(n, m, links):
    alpha, beta = links.between
    alone = range(n)
    times = {name: operation_seconds(operation(name, n, m, 0), alone, links) for name in OPERATIONS}
    step, rounds = alpha + 4 * m * beta, (n - 1).bit_length()
    star = alpha + 4 * m * (n - 1) * beta if n > 1 else 0.0
    wanted = {
        "allreduce": 2 * (n - 1) * step,
        "broadcast": rounds * step,
        "reduce": rounds * step,
        "gather": star,
        "scatter": star,
    }
    for name in OPERATIONS:
        assert times[name] == pytest.approx(wanted.get(name, (n - 1) * step), rel=1e-12)


@given(given_=operations(), links=LINKS, slower=st.floats(1.0, 4.0))
def test_S14_2_a_slower_link_or_more_bytes_take_no_less_time(given_, links, slower):
    found, node_of = given_
    time = operation_seconds(found, node_of, links)
    for costly in (
        [LinkCost(alpha * slower, beta) for alpha, beta in links],
        [LinkCost(a, b * slower) for a, b in links],
    ):
        assert operation_seconds(found, node_of, LinkCosts(*costly)) >= time
    larger = [[(src, dst, nbytes + 1) for src, dst, nbytes in messages] for messages in found]
    assert operation_seconds(larger, node_of, links) >= time
    assert (
        operation_seconds(
            [[(s, d, 0) for s, d, _ in messages] for messages in found], node_of, links
        )
        <= time
    )


@given(per_node=st.integers(1, 4), nbytes=st.integers(1, 10**6), links=LINKS)
def test_S14_5_ranks_share_their_nodes_link_and_pairs_inside_do_not(per_node, nbytes, links):
    node_of = [0] * per_node + [1] * per_node
    across = [(r, per_node + r, nbytes) for r in range(per_node)]
    back = [(dst, src, size) for src, dst, size in across]
    alpha, beta = links.between
    assert round_seconds(loads_of(across, node_of), links) == alpha + per_node * nbytes * beta
    # out and in are two links
    assert (
        round_seconds(loads_of(across + back, node_of), links) == alpha + per_node * nbytes * beta
    )
    inside = [(a, b, nbytes) for a in range(per_node) for b in range(per_node) if a != b]
    wanted = links.inside.alpha + nbytes * links.inside.beta if inside else 0.0
    assert round_seconds(loads_of(inside, node_of), links) == wanted


@given(
    buckets=st.lists(st.tuples(st.integers(1, 1000), SECONDS), min_size=1, max_size=6),
    forward=SECONDS,
    backward=SECONDS,
    after=SECONDS,
)
def test_S14_4_a_step_takes_no_less_than_compute_or_communication_and_no_more_than_both(
    buckets, forward, backward, after
):
    nbytes, seconds = zip(*buckets, strict=True)
    step, exposed = costs.overlap(forward, backward, nbytes, seconds, after)
    compute, first_ready = forward + backward, forward + backward * nbytes[0] / sum(nbytes)
    assert max(compute, sum(seconds) + first_ready) + after <= step * (1 + 1e-12)
    assert step <= (compute + sum(seconds) + after) * (1 + 1e-12)
    assert step == pytest.approx(compute + exposed + after)
    assert (
        costs.overlap(forward, backward, nbytes, [0.0] * len(nbytes), after)[1] <= 1e-12 * compute
    )
    # nothing to hide behind
    assert costs.overlap(forward, backward, [1], seconds[:1])[0] == pytest.approx(
        compute + seconds[0]
    )
