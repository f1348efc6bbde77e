"""Properties of decentralized averaging beyond the suites: pairing of ranks, and convergence (S3.4, S3.5)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import every_backend_in_proof

from bagua_ref.comm_ops import shift_one_peer
from bagua_ref.conformance.expected import decentralized_numpy as oracle
from bagua_ref.conformance.targets.reference_ops import ReferenceCommOps
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


def distances(rounds):
    """Return the squared distance of all ranks from their mean, by round."""
    stacked = [torch.stack([x.double() for x in ranks]) for ranks in rounds]
    return [(ranks - ranks.mean(0)).square().sum().item() for ranks in stacked]


@every_backend_in_proof
@pytest.mark.parametrize("mode", ["all", "shift_one"])
@given(half=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_S3_4_the_distance_from_consensus_contracts(backend, mode, half, seed):
    n, ops = 2 * half, ReferenceCommOps(backend)
    start = list(torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)))
    results = SimulatedWorld(n).run(
        lambda comm: ops.decentralized(None, [start[comm.rank()]] + [None] * (n - 1), mode=mode, hierarchical=False)
    )
    found = distances([start, *zip(*results, strict=True)])
    for before, after in itertools.pairwise(found):
        assert after <= before + 1e-10 * found[0]
    assert found[-1] <= found[0] / 4  # with 8 ranks at most 1/128 in exact arithmetic


@every_backend_in_proof
@given(n=st.integers(2, 8), seed=st.integers(0, 2**16))
def test_S3_5_the_distance_from_consensus_contracts(backend, n, seed):
    ops, ranks = ReferenceCommOps(backend), torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
    same = ranks[0].clone()
    results = SimulatedWorld(n).run(
        lambda comm: ops.low_precision_decentralized(None, [same, same, ranks[comm.rank()]] + [None] * 8, hierarchical=False)
    )
    # Ranks differ from their replicas at first: the first of these steps spreads the difference, the others mix it.
    found = distances(list(zip(*results, strict=True))[1:])
    for before, after in itertools.pairwise(found):
        assert after <= 0.7 * before + 1e-10 * found[0]  # a ring of 8 contracts by 0.648 per step, smaller rings faster
