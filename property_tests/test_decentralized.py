"""Properties of decentralized averaging beyond the suites: pairing of ranks, many ranks, and convergence (S3.4, S3.5, S13)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import every_backend_in_proof, inputs

from bagua_ref.comm_ops import shift_one_peer
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.conformance.expected import decentralized_numpy as oracle
from bagua_ref.conformance.inputs.graph_cases import NAMES, doubly_stochastic
from bagua_ref.conformance.targets.reference_ops import ReferenceCommOps
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


def averaged(backend, graph, start, rounds, dropped=0):
    """Return all ranks' elements after each of ``rounds`` averages, the first of which is number ``dropped``."""
    op, n = ReferenceCommOps(backend), len(start)
    alike = [torch.zeros_like(start[0])] * dropped
    results = SimulatedWorld(n).run(
        lambda comm: op.decentralized_on_graph(
            None, [*alike, start[comm.rank()]] + [None] * (rounds - 1), graph=graph, hierarchical=False
        )
    )
    return [torch.stack(ranks) for ranks in list(zip(*results, strict=True))[dropped:]]


def drawn(n, seed):
    return list(torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)))


@every_backend_in_proof
@pytest.mark.parametrize("mode", ["one_peer_exponential", "hypercube"])
@inputs(8)
@given(doublings=st.integers(1, 6), first=st.integers(0, 8), seed=st.integers(0, 2**16))
def test_S13_1_S13_2_log2_n_rounds_from_any_step_give_every_rank_the_mean(backend, mode, doublings, first, seed):
    n = 2**doublings
    start = drawn(n, seed)
    stacked = torch.stack(start).double()
    last = averaged(backend, mode, start, doublings, first)[-1]
    mean = stacked.mean(0).float().expand(n, -1)
    assert_equal(last, mean.contiguous(), SUM(2 * doublings), magnitude=stacked.abs().mean(0))
    whole = [torch.round(x * 8) for x in start]  # of which every sum is exact
    exact = torch.stack(whole).mean(0).expand(n, -1)
    assert_equal(averaged(backend, mode, whole, doublings, first)[-1] + 0.0, exact + 0.0, EXACT)


@every_backend_in_proof
@inputs(12)
@given(n=st.integers(1, 64), seed=st.integers(0, 2**16), rounds=st.integers(1, 4))
def test_S13_5_mixtures_of_permutations_keep_the_mean_and_never_add_distance(backend, n, seed, rounds):
    start = drawn(n, seed)
    found = averaged(backend, [doubly_stochastic(n, seed + t) for t in range(rounds)], start, rounds)
    before = torch.stack(start).double()
    for after in found:
        size = before.abs().mean(0)
        # Sums of rows and columns are 1 up to the rounding of three weights to float32.
        assert ((after.double().mean(0) - before.mean(0)).abs() <= 1e-6 * size + 1e-12).all()
        assert (after.double() - after.double().mean(0)).norm() <= (1 + 1e-6) * (before - before.mean(0)).norm() + 1e-6
        before = after.double()


@given(n=st.integers(1, 64), t=st.integers(0, 2**40), mode=st.sampled_from([*NAMES, "shift_one", "all"]))
def test_S13_every_mode_is_doubly_stochastic(n, t, mode):
    if graphs.MODES[mode].takes(n):
        graph = graphs.MODES[mode].graph(t, n)
        assert graphs.checked_graph(graph, n) == graph
        assert graph == graphs.MODES[mode].graph(t % graphs.MODES[mode].period(n), n)
