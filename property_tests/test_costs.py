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


@given(elements=st.integers(0, 10_000), n=RANKS)
def test_S14_1_chunks_are_a_partition_into_parts_that_differ_by_one_element_at_most(elements, n):
    chunks = chunk_bytes(elements, 1, n)
    assert (len(chunks), sum(chunks)) == (n, elements)
    assert max(chunks) - min(chunks) <= 1


def held_after(found, held):
    """Return what the ranks hold after messages that carry all of it, those of a round at once."""
    for messages in found:
        for dst, what in [(dst, held[src]) for src, dst, _ in messages]:
            held[dst] = held[dst] | what
    return held


@given(n=RANKS, root=st.integers(0, 8))
def test_S14_1_trees_reach_every_rank_in_the_fewest_rounds(n, root):
    root %= n
    for found, start in (
        (costs.broadcast(1, n, root), {root}),
        (costs.reduce(1, n, root), set(range(n))),
    ):
        assert len(found) == (n - 1).bit_length()
        assert sum(map(len, found)) == n - 1
        held = held_after(found, [{r} & start for r in range(n)])
        assert held[root] == start if len(start) > 1 else all(own == {root} for own in held)


@given(n=st.integers(2, 9))
def test_S14_1_rings_bring_each_rank_every_chunk_once(n):
    sizes = [2**j for j in range(n)]  # a message's size tells its chunk
    gathered = [{j} for j in range(n)]
    for messages in costs.all_gather(sizes):
        assert all(size in {sizes[j] for j in gathered[src]} for src, _, size in messages)
        for _, dst, size in messages:
            gathered[dst].add(size.bit_length() - 1)
    assert gathered == [set(range(n))] * n
    # by rank and chunk: whose values are in it
    partial = [[{r} for _ in range(n)] for r in range(n)]
    for messages in costs.reduce_scatter(sizes):
        sent = [
            (dst, size.bit_length() - 1, partial[src][size.bit_length() - 1])
            for src, dst, size in messages
        ]
        for dst, chunk, values in sent:
            assert not partial[dst][chunk] & values
            partial[dst][chunk] = partial[dst][chunk] | values
    assert all(partial[r][r] == set(range(n)) for r in range(n))
    assert costs.all_reduce(sizes) == costs.reduce_scatter(sizes) + costs.all_gather(sizes)


@given(n=RANKS, data=st.data())
def test_S14_1_all_to_all_sends_each_pair_its_chunk_once(n, data):
    sizes = [[100 * r + d for d in range(n)] for r in range(n)]
    found = costs.all_to_all(sizes)
    assert sorted(m for messages in found for m in messages) == sorted(
        (r, d, sizes[r][d]) for r in range(n) for d in range(n) if r != d
    )
    assert all(
        len({src for src, _, _ in messages}) == len({dst for _, dst, _ in messages}) == n
        for messages in found
    )


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
