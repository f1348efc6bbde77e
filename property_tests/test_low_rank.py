"""Properties of the columns of powersgd beyond the suite: orthonormal for any numbers (S10.3)."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bagua_ref.conformance import SUM, assert_equal
from bagua_ref.conformance.cases.strategies import seeds
from bagua_ref.conformance.expected import compression_numpy as oracle
from bagua_ref.formulas.low_rank import orthonormalize


def test_columns_of_a_sum_that_cancels_are_not_tame():
    columns = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert oracle.is_tame(1e-3 * columns, 1e-3)
    assert not oracle.is_tame(1e-3 * columns, 1.0)
    assert oracle.is_tame(columns * [1.0, 1e-3])
    assert not oracle.is_tame(columns @ [[1.0, 1.0], [0.0, 1e-3]])
    assert oracle.is_tame(0 * columns, 1.0)


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 6),
    rank=st.integers(0, 6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=seeds,
)
@example(rows=3, columns=3, rank=2, dtype=torch.float32, scale=1.0, seed=0)
def test_S10_3_columns_are_orthonormal_or_zero_and_span_what_they_did(
    rows, columns, rank, dtype, scale, seed
):
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randn(size, generator=generator, dtype=dtype)
        for size in ((rows, rank), (rank, columns))
    )
    given_columns = left @ right * scale
    found = given_columns.clone()
    orthonormalize([found])
    assert_equal(
        found,
        torch.from_numpy(oracle.orthonormal(given_columns.numpy())).to(dtype),
        SUM(2**20),
        magnitude=1.0,
    )
    q = found.double()
    lengths = (q * q).sum(0)
    expected = torch.diag((lengths > 0.5).double())
    # Gram-Schmidt in float64 loses at most 1e6 * eps, the most that the threshold leaves.
    assert (q.T @ q - expected).abs().max() < (
        16 * torch.finfo(dtype).eps if dtype is torch.float32 else 1e-9
    )
    x = given_columns.double()
    if rank:
        assert (x - q @ (q.T @ x)).abs().max() <= 1e-5 * x.abs().max() * columns
