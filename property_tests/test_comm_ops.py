"""Properties of bucket operations beyond the conformance suite: interleavings of ranks, and 1,024
ranks (S2.4, S3.2).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import every_backend

from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.conformance.cases.strategies import seeds, worlds
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps
from bagua_ref.simulation import SimulatedWorld


def run(nodes, inputs, backend, seed=0, **options):
    """Return every rank's result of a scatter-gather with one byte per element."""
    ops = ReferenceCommOps(backend)
    options = {
        "average": True,
        "scattergather": True,
        "compression": "MinMaxUInt8",
        "hierarchical": False,
        **options,
    }
    return SimulatedWorld(sum(nodes), nodes=nodes, seed=seed).run(
        lambda comm: ops.centralized(None, inputs[comm.rank()], **options)
    )


@every_backend
@given(nodes=worlds(), values=seeds, seed=st.integers(0, 2**32))
def test_S2_4_the_interleaving_of_ranks_does_not_matter(backend, nodes, values, seed):
    inputs = list(
        torch.randn(sum(nodes), 4 * len(nodes), generator=torch.Generator().manual_seed(values))
    )
    one, other = (run(nodes, inputs, backend, seed=s, hierarchical=True) for s in (0, seed))
    for a, b in zip(one, other, strict=True):
        assert_equal(a, b, EXACT)


@pytest.mark.proof
def test_S3_2_1024_ranks_on_65536_elements():
    results = run((1024,), [torch.full((65536,), float(rank)) for rank in range(1024)], "reference")
    assert all(torch.equal(result, results[0]) for result in results)
    assert_equal(results[0], torch.full((65536,), 511.5), SUM(1024))
