"""Properties of error memory in simulated worlds: bits equal to the second implementation's, and conservation (S11.1)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests.strategies import COMPRESSIBLE, adversarial, inputs, name_of
from tests.trainings import Given, simulate

from bagua_ref.algorithms import ByteGradAlgorithm, DiLoCoAlgorithm
from bagua_ref.backends import list_codecs
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.conformance.expected import compression_numpy as oracle
from bagua_ref.conformance.expected.algorithms_plain import buckets as split
from bagua_ref.conformance.expected.algorithms_plain import node_sum
from bagua_ref.conformance.inputs.strategies import seeds, worlds

STEPS = 3
CODECS = list_codecs("reference")
buckets = st.sampled_from([1, 40, 2**20])


class Problem:
    """Parameters of zeros, and gradients by step, rank and parameter."""

    def __init__(self, nodes, weights, seed, steps=STEPS):
        self.nodes, self.weights = nodes, weights
        generator = torch.Generator().manual_seed(seed)
        self.gradients = [
            [[torch.randn(w.shape, generator=generator).to(w.dtype) for w in weights] for _ in range(sum(nodes))]
            for _ in range(steps)
        ]

    def train(self, algorithm, look, seed=0, bucket_size=2**20):
        """Return by rank and step what ``look(module)`` returns."""

        def rank(rank):
            module = Given(self.weights)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            module.with_bagua([optimizer], algorithm)
            seen = []
            for gradients in self.gradients:
                optimizer.zero_grad()
                module(gradients[rank]).backward()
                optimizer.step()
                seen.append(look(module))
            return seen

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(bucket_size))
            return simulate(sum(self.nodes), rank, self.nodes, seed)

    def places(self, bucket_size):
        """Return the places of the parameters in each bucket."""
        return split([w.numel() for w in self.weights], [name_of(w.dtype) for w in self.weights], bucket_size)


@st.composite
def problems(draw):
    dtype = draw(st.sampled_from(COMPRESSIBLE))
    sizes = st.integers(0, 40).map(lambda size: (size,)) | st.just(())
    problem = Problem(draw(worlds(6)), [torch.zeros(draw(sizes), dtype=dtype) for _ in range(3)], draw(seeds))
    if draw(st.booleans()):
        for ranks in problem.gradients:
            for gradients in ranks:
                gradients[1] = draw(adversarial(dtype, gradients[1].numel(), finite=draw(st.booleans()))).view(gradients[1].shape)
    return problem


def look(module):
    return [w.grad.clone() for w in module.weights], module.bagua_algorithm.state_dict()["memories"]["buckets"]


def leaders_inputs(nodes, xs, dtype, average):
    """Return y by leader (S3.3), as float32."""
    divisor, starts = len(xs) / len(nodes) if average else None, [0, *itertools.accumulate(nodes)]
    sums = [node_sum([x.tolist() for x in xs[a:b]], dtype, divisor) for a, b in itertools.pairwise(starts)]
    return [np.array(y, np.float32) for y in sums]


def memory_of(problem, places, kept):
    """Return the entry of a bucket in what a rank keeps."""
    names = [f"weights.{place} {tuple(problem.weights[place].shape)}" for place in places]
    return next(entry for entry in kept if entry["tensors"] == names)


@inputs(40)
@given(
    problem=problems(),
    codec=st.sampled_from(CODECS),
    hierarchical=st.booleans(),
    average=st.booleans(),
    bucket_size=buckets,
    seed=seeds,
)
def test_S11_1_every_round_follows_the_oracle_to_the_bit(problem, codec, hierarchical, average, bucket_size, seed):
    algorithm = ByteGradAlgorithm(hierarchical, average, compression=codec, error_feedback=True)
    results = problem.train(algorithm, look, seed, bucket_size)
    nodes, dtype, n = problem.nodes, name_of(problem.weights[0].dtype), len(results)
    alignment = math.lcm(n, len(nodes)) if hierarchical else n
    holders = [0, *itertools.accumulate(nodes)][:-1] if hierarchical else range(n)
    for places in problem.places(bucket_size):
        filled = sum(problem.weights[place].numel() for place in places)
        m = filled + -filled % alignment
        workers = [np.zeros(m, np.float32) for _ in holders]
        servers = [np.zeros(m // len(holders), np.float32) for _ in holders]
        for step in range(STEPS):
            xs = [np.concatenate([ranks[p].float().reshape(-1).numpy() for p in places]) for ranks in problem.gradients[step]]
            xs = [np.concatenate([x, np.zeros(m - filled, np.float32)]) for x in xs]
            with np.errstate(all="ignore"):
                inputs = leaders_inputs(nodes, xs, dtype, average) if hierarchical else xs
                wanted, workers, servers = oracle.error_feedback_round(inputs, workers, servers, codec, dtype, filled, average)
            for seen in results:
                found = torch.cat([seen[step][0][p].reshape(-1) for p in places])
                assert_equal(found, torch.from_numpy(wanted[:filled]).to(found.dtype), EXACT)
            for rank, worker, server in zip(holders, workers, servers, strict=True):
                kept = memory_of(problem, places, results[rank][step][1])
                assert_equal(kept["worker"], torch.from_numpy(worker), EXACT)
                assert_equal(kept["server"], torch.from_numpy(server), EXACT)
    for rank in set(range(n)) - set(holders):
        assert results[rank][-1][1] == []  # memories live at the leaders


@pytest.mark.parametrize("codec", CODECS)
@inputs(10)
@given(
    nodes=worlds(6),
    dtype=st.sampled_from(COMPRESSIBLE),
    hierarchical=st.booleans(),
    average=st.booleans(),
    numel=st.integers(1, 100),
    seed=seeds,
)
@example(nodes=(1, 3), dtype=torch.float32, hierarchical=True, average=True, numel=37, seed=0)
@example(nodes=(2, 1), dtype=torch.float32, hierarchical=False, average=False, numel=37, seed=0)
def test_S11_1_what_was_applied_and_what_was_kept_is_the_sum_of_the_means(codec, nodes, dtype, hierarchical, average, numel, seed):
    problem = Problem(nodes, [torch.zeros(numel, dtype=dtype)], seed, STEPS)
    results = problem.train(ByteGradAlgorithm(hierarchical, average, compression=codec, error_feedback=True), look)
    kept = [entry for seen in results for entry in seen[-1][1]]
    workers = sum(entry["worker"].double() for entry in kept) / (len(kept) if average else 1)
    left = (workers + torch.cat([entry["server"] for entry in kept]))[:numel]
    applied = sum(gradients[0].double() for gradients, _ in results[0])
    share = len(results) if average else 1
    wanted = sum(ranks[0].double() for step in problem.gradients for ranks in step) / share
    size = sum(ranks[0].double().abs() for step in problem.gradients for ranks in step).max() / share
    size += sum(entry["worker"].abs().max() for entry in kept)
    found = (applied + left).to(dtype)
    # In a 16-bit dtype, rounding a leader's input and the result counts most.
    roundings = 8 * len(results) * STEPS if dtype is torch.float32 else 4 * STEPS
    assert_equal(found, wanted.to(dtype), SUM(roundings), magnitude=size.item())


@inputs(20)
@given(nodes=worlds(5), codec=st.sampled_from(CODECS), delay=st.integers(0, 1), seed=seeds)
def test_S9_5_diloco_sends_what_compression_left_out_of_the_fragment_before(nodes, codec, delay, seed):
    problem = Problem(nodes, [torch.zeros(5), torch.zeros(3, 7)], seed, 8)
    outer = torch.optim.SGD
    algorithm = DiLoCoAlgorithm(
        4, lambda g: outer(g, lr=1.0), fragments=[["weights.0"], ["weights.1"]], delay=delay, mix=1.0, compression=codec,
        error_feedback=True,
    )  # fmt: skip

    def look(module):
        algorithm = module.bagua_algorithm
        copies = [g.detach().clone() for fragment in algorithm._fragments for g in fragment.copies]
        return [w.detach().clone() for w in module.weights], copies, algorithm.state_dict()

    results = problem.train(algorithm, look, seed)
    n = len(results)
    for place, weight in enumerate(problem.weights):
        m = weight.numel() + -weight.numel() % n
        workers, servers = [np.zeros(m, np.float32)] * n, [np.zeros(m // n, np.float32)] * n
        g = weight.reshape(-1).numpy()
        for period in range(2):
            sent = 4 * period + 2 * (place + 1) - delay - 1  # the step, from 0
            xs = [seen[sent][0][place].reshape(-1).numpy() for seen in results]  # mix=1: weights are never replaced
            ds = [np.concatenate([g - x, np.zeros(m - g.size, np.float32)]) for x in xs]
            mean, workers, servers = oracle.error_feedback_round(ds, workers, servers, codec, "float32", g.size)
            g = g - mean[: g.size]
            for rank, seen in enumerate(results):
                _, copies, state = seen[sent + delay]
                assert_equal(copies[place].reshape(-1), torch.from_numpy(g), EXACT)
                kept = state["memories"]["buckets"][place]
                assert_equal(kept["worker"], torch.from_numpy(workers[rank]), EXACT)
                assert_equal(kept["server"], torch.from_numpy(servers[rank]), EXACT)
