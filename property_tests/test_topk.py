"""Properties of topk in simulated worlds: bits equal to the second implementation's, conservation, messages (S11.2)."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests.strategies import COMPRESSIBLE, adversarial, inputs, name_of
from property_tests.test_local_updates import Problem, buckets

import bagua_ref
from bagua_ref.algorithms import TopKAlgorithm
from bagua_ref.comm_ops.top_k import count_of, largest
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.conformance.expected import topk_numpy as oracle
from bagua_ref.conformance.inputs.strategies import worlds

STEPS = 4
ratios = st.sampled_from([0.01, 0.3, 1.0]) | st.floats(1e-9, 1)
seeds = st.integers(0, 2**32 - 1)


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


@given(m=st.integers(0, 10**6), ratio=ratios)
@example(m=100, ratio=0.29)  # 28.999999999999996 in float64
def test_S11_2_the_count(m, ratio):
    assert count_of(m, ratio) == oracle.sent_count(m, ratio)


@st.composite
def problems(draw, ranks=5, numel=20, steps=STEPS):
    dtype = draw(st.sampled_from(COMPRESSIBLE))
    sizes = st.integers(0, numel).map(lambda size: (size,)) | st.just(())
    problem = Problem(draw(worlds(ranks)), [torch.zeros(draw(sizes), dtype=dtype) for _ in range(3)], draw(seeds), steps)
    if draw(st.booleans()):
        for ranks in problem.gradients:
            for gradients in ranks:
                gradients[1] = draw(adversarial(dtype, gradients[1].numel(), finite=draw(st.booleans()))).view(gradients[1].shape)
    return problem


def split_into_buckets(weights, bucket_size):
    """Return the places of the weights in each bucket (S2.1)."""
    filled, split = bucket_size, []
    for place in reversed(range(len(weights))):
        if filled >= bucket_size:
            split.append([])
            filled = 0
        split[-1].append(place)
        filled += weights[place].element_size() * weights[place].numel()
    return split


def look(module):
    return [w.grad.clone() for w in module.weights], module.bagua_algorithm.memories.state()


@given(problem=problems(), ratio=ratios, error_feedback=st.booleans(), bucket_size=buckets, seed=seeds)
def test_S11_2_every_round_follows_the_oracle_to_the_bit(problem, ratio, error_feedback, bucket_size, seed):
    results = problem.train(TopKAlgorithm(ratio, error_feedback), seed, bucket_size, look)
    split = split_into_buckets(problem.weights, bucket_size)
    errors = {tuple(b): [np.zeros(sum(problem.weights[p].numel() for p in b), np.float32)] * len(results) for b in split}
    for step, bucket in itertools.product(range(STEPS), split):
        key = tuple(bucket)
        sent = [np.concatenate([ranks[p].float().reshape(-1).numpy() for p in bucket]) for ranks in problem.gradients[step]]
        if not sent[0].size:
            continue
        with np.errstate(all="ignore"):
            wanted, left = oracle.topk_round(
                sent, errors[key] if error_feedback else None, ratio, name_of(problem.weights[0].dtype)
            )
        errors[key] = left or errors[key]
        for rank, seen in enumerate(results):
            gradients, memories = seen[step][1]
            assert_equal(
                torch.cat([gradients[p].reshape(-1) for p in bucket]), torch.from_numpy(wanted).to(gradients[0].dtype), EXACT
            )
            if error_feedback:
                assert_equal(
                    torch.cat([memories[f"weights.{p}"].reshape(-1) for p in bucket]), torch.from_numpy(errors[key][rank]), EXACT
                )


@inputs(20)
@given(nodes=worlds(5), ratio=ratios, seed=seeds)
def test_S11_2_what_was_applied_and_the_mean_of_the_memories_is_the_sum_of_the_means(nodes, ratio, seed):
    problem = Problem(nodes, [torch.zeros(30)], seed, STEPS)
    results = problem.train(TopKAlgorithm(ratio), look=look)
    ranks = len(results)
    applied = sum(seen[0][0] for _, seen in results[0]) + sum(r[-1][1][1]["weights.0"] for r in results) / ranks
    wanted = sum(g[0] for step in problem.gradients for g in step) / ranks
    magnitude = sum(g[0].abs() for step in problem.gradients for g in step) / ranks
    assert_equal(applied, wanted, SUM(4 * ranks * STEPS), magnitude=magnitude.max().item())


@inputs(20)
@given(nodes=worlds(5), numel=st.integers(1, 300), ratio=ratios)
def test_S11_2_the_bytes_are_those_of_k_indices_and_values(nodes, numel, ratio):
    def sent(module):
        return bagua_ref.groups.communication._get_default_group().bytes_sent

    problem, k = Problem(nodes, [torch.zeros(numel)], 0, 3), oracle.sent_count(numel, ratio)
    for seen in problem.train(TopKAlgorithm(ratio), look=sent):
        assert seen[2][1] - seen[1][1] == 8 * k * (sum(nodes) - 1)
