"""The centralized operations of S3.1 to S3.3 through buckets, flat or not, on every backend, in simulated worlds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import COMPRESSIBLE, FLOATS, adversarial, every_backend_in_proof, name_of

import bagua_ref
from bagua_ref.bucket import BaguaBucket
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.conformance.expected import comm_ops_scalar
from bagua_ref.simulation import SimulatedWorld


@st.composite
def worlds(draw):
    """Ranks per node: 1 to 9 ranks on 1 to 4 uneven nodes."""
    n = draw(st.integers(1, 9))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
    return [end - start for start, end in zip([0, *cuts], [*cuts, n], strict=True)]


@st.composite
def cases(draw, dtypes, finite):
    """A world, a dtype, and each rank's numbers, cut into tensors in the same way everywhere."""
    nodes, dtype = draw(worlds()), draw(st.sampled_from(dtypes))
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    inputs = [draw(adversarial(dtype, sum(sizes), finite=finite)) for _ in range(sum(nodes))]
    return nodes, dtype, sizes, inputs


def run(nodes, inputs, sizes, backend, flatten, alignment, seed=0, **options):
    """Return the flat result, with padding, of every rank."""

    def rank(comm):
        bagua_ref.init_process_group()
        parts = inputs[comm.rank()].clone().split(sizes)
        tensors = [part.clone().ensure_bagua_tensor(f"t{place}") for place, part in enumerate(parts)]
        bucket = BaguaBucket(tensors, "0", flatten=flatten, alignment=alignment, backend=backend)
        bucket.append_centralized_synchronous_op(**options)
        bucket.execute()
        return bucket.flattened_tensor() if flatten else torch.cat([t.reshape(-1) for t in tensors])

    return SimulatedWorld(sum(nodes), nodes=tuple(nodes), seed=seed).run(rank)


def expected(operation, nodes, inputs, dtype, average, hierarchical, alignment):
    count = inputs[0].numel()
    xs = [[*x.tolist(), *[0.0] * (-count % alignment)] for x in inputs]
    name = name_of(dtype)
    if hierarchical:
        results = comm_ops_scalar.hierarchical(operation, xs, nodes, name, average)
    else:
        results = operation(xs, name, average)
    return [torch.tensor(x, dtype=torch.float64).to(dtype)[:count] for x in results]


def alignment_for(nodes, hierarchical):
    return math.lcm(sum(nodes), len(nodes)) if hierarchical else sum(nodes)


@every_backend_in_proof
@given(case=cases(FLOATS, finite=False), average=st.booleans(), flatten=st.booleans())
def test_S3_1_scatter_gather_adds_in_rank_order(backend, case, average, flatten):
    nodes, dtype, sizes, inputs = case
    alignment = alignment_for(nodes, False)
    results = run(nodes, inputs, sizes, backend, flatten, alignment, average=average, scattergather=True)
    wanted = expected(comm_ops_scalar.scatter_gather, nodes, inputs, dtype, average, False, alignment)
    for result, want in zip(results, wanted, strict=True):
        assert_equal(result[: want.numel()], want, EXACT)


@every_backend_in_proof
@given(case=cases(COMPRESSIBLE, finite=False), average=st.booleans(), hierarchical=st.booleans(), flatten=st.booleans())
def test_S3_2_S3_3_low_precision_is_equal_to_the_bit_on_every_rank(backend, case, average, hierarchical, flatten):
    nodes, dtype, sizes, inputs = case
    alignment = alignment_for(nodes, hierarchical)
    results = run(
        nodes, inputs, sizes, backend, flatten, alignment,
        average=average, scattergather=True, compression="MinMaxUInt8", hierarchical=hierarchical,
    )  # fmt: skip
    wanted = expected(comm_ops_scalar.low_precision, nodes, inputs, dtype, average, hierarchical, alignment)
    for result, want in zip(results, wanted, strict=True):
        assert_equal(result[: want.numel()], want, EXACT)


@every_backend_in_proof
@given(case=cases(FLOATS, finite=True), average=st.booleans(), hierarchical=st.booleans(), scattergather=st.booleans())
def test_S3_1_S3_3_full_precision_is_the_sum_or_mean_over_all_ranks(backend, case, average, hierarchical, scattergather):
    nodes, dtype, sizes, inputs = case
    inputs = [x / 16 if dtype is not torch.float16 else x / 64 for x in inputs]  # room for the sum
    n = sum(nodes)
    options = {"average": average, "hierarchical": hierarchical, "scattergather": scattergather}
    alignment = alignment_for(nodes, hierarchical) if scattergather else 1
    results = [r[: sum(sizes)] for r in run(nodes, inputs, sizes, backend, True, alignment, **options)]
    exact = torch.stack([x.double() for x in inputs])
    magnitude = exact.abs().sum(0) / (n if average else 1)
    want = (exact.sum(0) / (n if average else 1)).to(dtype)
    for result in results:
        assert_equal(result, results[0], EXACT)
        # Hierarchical sums are rounded once more on the way.
        assert_equal(result, want, SUM(n + 1), magnitude=magnitude)


@every_backend_in_proof
@given(case=cases((torch.float32,), finite=True), seed=st.integers(0, 2**32))
def test_S2_4_the_interleaving_of_ranks_does_not_matter(backend, case, seed):
    nodes, _, sizes, inputs = case
    options = {"scattergather": True, "compression": "MinMaxUInt8", "hierarchical": True}
    alignment = alignment_for(nodes, True)
    one, other = (run(nodes, inputs, sizes, backend, True, alignment, seed=s, **options) for s in (0, seed))
    for a, b in zip(one, other, strict=True):
        assert_equal(a, b, EXACT)


@pytest.mark.parametrize("hierarchical", [True, False])
def test_S3_3_the_mean_of_uneven_nodes_counts_every_rank_once(hierarchical):
    inputs = [torch.full((4,), float(rank)) for rank in range(4)]
    for result in run([3, 1], inputs, [4], "reference", True, 4, hierarchical=hierarchical):
        assert result.tolist() == [1.5] * 4  # the mean of node means would be 2


def test_S3_2_1024_ranks_on_65536_elements():
    inputs = [torch.full((65536,), float(rank)) for rank in range(1024)]
    results = run([1024], inputs, [65536], "reference", True, 1024, scattergather=True, compression="MinMaxUInt8")
    assert all(torch.equal(result, results[0]) for result in results)
    assert_equal(results[0], torch.full((65536,), 511.5), SUM(1024))
