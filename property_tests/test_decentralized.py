"""Properties of the graphs of decentralized averaging beyond the suites: whom ranks meet, at any step (S3.4, S13)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagua_ref.comm_ops import shift_one_peer
from bagua_ref.conformance.expected import decentralized_numpy as oracle
from bagua_ref.conformance.inputs.graph_cases import NAMES
from bagua_ref.formulas import graphs


@given(half=st.integers(1, 64), step=st.integers(0, 1000))
def test_S3_4_shift_one_is_an_involution_between_the_halves(half, step):
    for rank in range(2 * half):
        peer = shift_one_peer(rank, 2 * half, step)
        assert (peer < half) != (rank < half)
        assert shift_one_peer(peer, 2 * half, step) == rank
        assert peer == oracle.pairs(2 * half, step)[rank]


@given(half=st.integers(1, 64), first=st.integers(0, 1000), data=st.data())
def test_S3_4_shift_one_meets_every_rank_of_the_other_half_in_half_as_many_steps(half, first, data):
    rank = data.draw(st.integers(0, 2 * half - 1))
    met = {shift_one_peer(rank, 2 * half, step) for step in range(first, first + half)}
    assert met == set(range(half, 2 * half) if rank < half else range(half))


@given(n=st.integers(1, 64), t=st.integers(0, 2**40), mode=st.sampled_from([*NAMES, "shift_one", "all"]))
def test_S13_every_mode_is_doubly_stochastic(n, t, mode):
    if graphs.MODES[mode].takes(n):
        graph = graphs.MODES[mode].graph(t, n)
        assert graphs.checked_graph(graph, n) == graph
        assert graph == graphs.MODES[mode].graph(t % graphs.MODES[mode].period(n), n)
