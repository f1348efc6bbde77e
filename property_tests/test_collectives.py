"""Properties of collectives beyond the conformance suite: further dtypes, and the order of floating-point sums (S3.9)."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_ref.communicators import collectives
from bagua_ref.conformance.inputs.strategies import worlds
from bagua_ref.simulation import SimulatedWorld
from bagua_ref.types import ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64])
@given(nodes=worlds(), count=st.integers(0, 7), data=st.data())
def test_S3_9_other_dtypes_move_too(dtype, nodes, count, data):
    n = sum(nodes)
    src = data.draw(st.integers(0, n - 1))

    def values(rank):
        return (torch.arange(n * count) * 31 + 211 * rank).to(dtype)

    def program(comm):
        broadcast, exchanged, gathered = values(comm.rank()), values(comm.rank()), torch.zeros(n * n * count, dtype=dtype)
        comm.broadcast(broadcast, src)
        comm.alltoall_inplace(exchanged)
        comm.allgather(values(comm.rank()), gathered)
        return broadcast, exchanged, gathered

    for rank, (broadcast, exchanged, gathered) in enumerate(SimulatedWorld(n, nodes=nodes).run(program)):
        assert torch.equal(broadcast, values(src))
        assert torch.equal(exchanged, torch.cat([values(peer)[rank * count : (rank + 1) * count] for peer in range(n)]))
        assert torch.equal(gathered, torch.cat([values(peer) for peer in range(n)]))


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
