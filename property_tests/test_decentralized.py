"""Properties of the graphs of decentralized averaging beyond the suites: whom ranks meet, and
convergence (S3.4, S3.5, S13).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import every_backend

from bagua_ref.comm_ops import shift_one_peer
from bagua_ref.conformance.cases.training_cases import GRAPHS
from bagua_ref.conformance.expected import decentralized_numpy as oracle
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps
from bagua_ref.formulas import graphs
from bagua_ref.simulation import SimulatedWorld


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


@given(
    n=st.integers(1, 64),
    t=st.integers(0, 2**40),
    mode=st.sampled_from([*GRAPHS, "shift_one", "all"]),
)
def test_S13_every_mode_is_doubly_stochastic(n, t, mode):
    if graphs.MODES[mode].takes(n):
        graph = graphs.MODES[mode].graph(t, n)
        assert graphs.checked_graph(graph, n) == graph
        assert graph == graphs.MODES[mode].graph(t % graphs.MODES[mode].period(n), n)


@every_backend
@pytest.mark.parametrize(("mode", "bound"), [("all", 1.0), ("shift_one", 1.0), ("ring", 0.7)])
@given(half=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_S3_4_S3_5_the_distance_from_consensus_contracts(backend, mode, bound, half, seed):
    """A quantized ring of 8 contracts by 0.648 per step, smaller rings faster; the others give the
    mean within 4 steps.
    """
    n, ops, ranks = (
        2 * half,
        ReferenceCommOps(backend),
        torch.randn(2 * half, 5, generator=torch.Generator().manual_seed(seed)),
    )

    def average(comm):
        if mode != "ring":
            return [
                ranks[comm.rank()],
                *ops.decentralized(
                    None, [ranks[comm.rank()]] + [None] * 3, mode=mode, hierarchical=False
                ),
            ]
        # the first spreads what replicas lack
        steps = [ranks[0].clone(), ranks[0].clone(), ranks[comm.rank()]] + [None] * 8
        return ops.low_precision_decentralized(None, steps, hierarchical=False)[1:]

    found = torch.stack([torch.stack(steps).double() for steps in SimulatedWorld(n).run(average)])
    distances = (found - found.mean(0)).square().sum((0, 2)).tolist()
    for before, after in itertools.pairwise(distances):
        assert after <= bound * before + 1e-10 * distances[0]
    assert distances[-1] <= distances[0] / 4
