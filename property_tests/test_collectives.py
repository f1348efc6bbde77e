"""Properties of collectives beyond the conformance suite: the order of floating-point sums, and
integers of any size (S3.9).
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests.strategies import FLOATS

from bagua_ref.communicators import collectives
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.cases.strategies import dtype_named
from bagua_ref.conformance.cases.table import REDUCED
from bagua_ref.conformance.expected import collectives_plain as plain
from bagua_ref.types import ReduceOp

INTEGERS = tuple(map(dtype_named, REDUCED))


def rows_of(numbers):
    """Three numbers of each of up to nine ranks."""
    return st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=9)


@given(rows_of(st.floats(width=32)), st.sampled_from(FLOATS))
# from the left, ones are lost one by one
@example([[2.0**24, 1, 1], [1, 1, 1], [1, 2.0**24, 1]], torch.float32)
# the sum of the last is too large, not its mean
@example([[2048, 256, 60000], *[[1, 1, 0]] * 3, [1, 1, 60000]], torch.float16)
@example([[2048, 256, 1], *[[1, 1, 1]] * 4], torch.bfloat16)
def test_S3_9_floats_are_combined_in_rank_order_and_rounded_once(rows, dtype):
    tensors = [torch.tensor(row, dtype=torch.float32).to(dtype) for row in rows]
    wide = np.float64 if dtype is torch.float64 else np.float32
    arrays = [tensor.to(torch.float64).numpy().astype(wide) for tensor in tensors]
    functions = {
        ReduceOp.SUM: np.add,
        ReduceOp.AVG: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }
    for op, function in functions.items():
        with np.errstate(all="ignore"):
            expected = reduce(function, arrays) / wide(len(rows) if op is ReduceOp.AVG else 1)
        result = collectives.combine(tensors, op)
        torch.testing.assert_close(
            result, torch.from_numpy(expected).to(dtype), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(
    "op", [op for op in ReduceOp if op is not ReduceOp.AVG], ids=lambda op: op.name
)
@given(rows=rows_of(st.integers(-(2**63), 2**63 - 1)), dtype=st.sampled_from(INTEGERS))
def test_S3_9_integers_wrap_around_and_inputs_stay_as_they_are(op, rows, dtype):
    tensors = [torch.tensor(row).to(dtype) for row in rows]
    collectives.combine(tensors[:1], op).zero_()
    assert_equal(
        collectives.combine(tensors, op), plain.combine(torch.stack(tensors), op.name), EXACT
    )
    assert [tensor.tolist() for tensor in tensors] == [
        torch.tensor(row).to(dtype).tolist() for row in rows
    ]
