"""Properties of the choice of topk beyond the suite: of any numbers, and of many (S11.2)."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests.strategies import adversarial, inputs

from bagua_ref.comm_ops.top_k import count_of, largest
from bagua_ref.conformance.expected import compression_numpy as oracle
from bagua_ref.conformance.inputs.strategies import seeds


@given(x=adversarial(torch.float32, 40), data=st.data())
@example(x=torch.tensor([1.0, -1.0, torch.nan, torch.inf, -torch.nan, 1.0]), data=None)
@example(x=torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32), data=None)
def test_S11_2_the_largest_are_chosen_ties_go_to_the_lower_index_and_nan_is_the_largest(x, data):
    for k in range(x.numel() + 1) if data is None else [data.draw(st.integers(0, x.numel()))]:
        assert largest(x, k).tolist() == oracle.kept(x.numpy(), k)


@inputs(30)
@given(m=st.integers(1, 40_000), share=st.floats(0, 1), levels=st.sampled_from([2, 1000, 2**20]), seed=seeds)
@example(m=20_000, share=0.01, levels=2**20, seed=0)
@example(m=20_000, share=0.01, levels=2, seed=0)
@example(m=20_000, share=0.05, levels=2**20, seed=63)
def test_S11_2_the_largest_of_many_are_those_of_a_stable_sort(m, share, levels, seed):
    x = torch.randint(-levels, levels, (m,), generator=torch.Generator().manual_seed(seed)).float()
    x[:: 1 + seed % 64] *= 3  # where a sample looks, numbers may be larger than elsewhere
    k = int(share * m)
    wanted = torch.sort(x.abs(), descending=True, stable=True).indices[:k].sort().values
    assert torch.equal(largest(x, k), wanted)


@given(m=st.integers(0, 10**6), ratio=st.sampled_from([0.01, 0.3, 1.0]) | st.floats(1e-9, 1))
@example(m=100, ratio=0.29)  # 28.999999999999996 in float64
def test_S11_2_the_count(m, ratio):
    assert count_of(m, ratio) == oracle.sent_count(m, ratio)
