"""Properties of collectives beyond the conformance suite: the order of floating-point sums (S3.9)."""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_ref.communicators import collectives
from bagua_ref.types import ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=9), st.sampled_from(FLOATS))
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
        torch.testing.assert_close(result, torch.from_numpy(expected).to(dtype), rtol=0, atol=0, equal_nan=True)
