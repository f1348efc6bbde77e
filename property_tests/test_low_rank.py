"""Properties of powersgd in simulated worlds: rounds that follow the oracle, conservation, exactness, restarts (S10)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests.strategies import inputs
from property_tests.test_local_updates import Problem, Run, assert_same, assert_states_equal, buckets, simulate

from bagua_ref.algorithms import GradientAllReduceAlgorithm, PowerSGDAlgorithm, TopKAlgorithm
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.conformance.expected import power_sgd_numpy as oracle
from bagua_ref.conformance.inputs.strategies import worlds
from bagua_ref.formulas.low_rank import matrix_shape, orthonormalize

STEPS = 5
RATE = 0.01
"""A rate at which every matrix is compressed, even where that saves nothing."""

shapes = st.sampled_from([(), (0,), (7,), (3, 2), (5, 9), (9, 5), (1, 6), (6, 1), (4, 3, 2, 2), (0, 3), (16, 16)])
dtypes = st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), min_size=1, max_size=4)
single = st.just([torch.float32]) | st.just([torch.float64, torch.float32])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def problems(draw, kinds=dtypes, nodes=worlds(5)):  # noqa: B008
    seed = draw(seeds)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(draw(shapes), generator=generator).to(dtype) for dtype in draw(kinds)]
    return Problem(draw(nodes), weights, seed, STEPS)


options = st.fixed_dictionaries(
    {
        "matrix_approximation_rank": st.integers(1, 4),
        "min_compression_rate": st.sampled_from([RATE, 1.0, 2.0]),
        "memory": st.sampled_from(["local", "averaged", None]),
        "warm_start": st.booleans(),
        "seed": seeds,
    }
)


ROUNDED = SUM(400)
"""For projections on columns whose span is known to 100 times the rounding of what was added up for them (`is_tame`)."""


def look(module):
    """Return the averaged gradients, and what is kept, by name of parameter."""
    algorithm = module.bagua_algorithm
    memories, factors = algorithm.memories.state(), algorithm.factors.state()
    return [w.grad.clone() for w in module.weights], memories, factors


def wide(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


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
def test_S10_3_columns_are_orthonormal_or_zero_and_span_what_they_did(rows, columns, rank, dtype, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, generator=generator, dtype=dtype) for size in ((rows, rank), (rank, columns)))
    given_columns = left @ right * scale
    found = given_columns.clone()
    orthonormalize([found])
    assert_equal(found, torch.from_numpy(oracle.orthonormal(given_columns.numpy())).to(dtype), SUM(2**20), magnitude=1.0)
    q = found.double()
    lengths = (q * q).sum(0)
    expected = torch.diag((lengths > 0.5).double())
    # Gram-Schmidt in float64 loses at most 1e6 * eps, the most that the threshold leaves.
    assert (q.T @ q - expected).abs().max() < (16 * torch.finfo(dtype).eps if dtype is torch.float32 else 1e-9)
    x = given_columns.double()
    if rank:
        assert (x - q @ (q.T @ x)).abs().max() <= 1e-5 * x.abs().max() * columns


def rounds(problem, **given_options):
    """Train with powersgd; return by rank and step the averaged gradients, e and Q."""
    seed, bucket_size = given_options.pop("schedule", 0), given_options.pop("bucket_size", 2**20)
    results = problem.train(PowerSGDAlgorithm(**{"warmup_steps": 0, **given_options}), seed, bucket_size, look)
    return [[seen for _, seen in rank] for rank in results]


def means(problem):
    """Return by step the exactly averaged gradients."""
    algorithm = GradientAllReduceAlgorithm()
    return [seen for _, seen in problem.train(algorithm, look=lambda module: [w.grad.clone() for w in module.weights])[0]]


@given(problem=problems(), options=options, bucket_size=buckets, seed=seeds)
def test_S10_2_each_round_follows_the_oracle_from_equal_memories_and_factors(problem, options, bucket_size, seed):
    results, exact = rounds(problem, **options, schedule=seed, bucket_size=bucket_size), means(problem)
    rank, rate = options["matrix_approximation_rank"], options["min_compression_rate"]
    common = {name: options[name] for name in ("memory", "warm_start", "seed")}
    for k in range(STEPS):
        for place, w in enumerate(problem.weights):
            name, i, shape = f"weights.{place}", len(problem.weights) - 1 - place, matrix_shape(w.shape, rank, rate)
            averaged = [seen[k][0][place] for seen in results]
            for gradient in averaged[1:]:
                assert_equal(gradient, averaged[0], EXACT)
            r = oracle.compressed_rank(tuple(w.shape), rank, rate)
            assert r == (0 if shape is None else shape[2])
            if shape is None:
                assert_equal(averaged[0], exact[k][place], EXACT)
                assert all(name not in kept for seen in results for kept in seen[k][1:])
                continue
            sent = [ranks[place].to(wide(w.dtype)).reshape(shape[:2]).numpy() for ranks in problem.gradients[k]]
            errors, q = None, None
            if options["memory"] is not None:
                errors = [seen[k - 1][1][name].numpy() if k else np.zeros_like(sent[0]) for seen in results]
            if k:
                q = results[0][k - 1][2][name].numpy()
            columns = oracle.start(q if common["warm_start"] else None, (shape[1], r), sent[0].dtype.type, common["seed"], k, i)
            size = oracle.norm([*sent, *(errors or [])])
            if not oracle.is_tame(oracle.added([*sent, *(errors or [])]) @ columns, size):
                continue
            wanted = oracle.power_sgd_round(sent, errors, q, r, **common, k=k, i=i)
            narrow = torch.from_numpy(wanted.result).to(w.dtype).reshape(w.shape)
            assert_equal(averaged[0], narrow, ROUNDED if w.dtype in (torch.float32, torch.float64) else SUM(4), magnitude=size)
            for seen, e in zip(results, wanted.errors or (), strict=False):
                assert_same([seen[k][1][name]], [e], ROUNDED, size)


@inputs(25)
@given(problem=problems(kinds=single), options=options, warm_up=st.integers(0, 2))
def test_S10_5_what_was_applied_and_the_mean_of_the_memories_is_the_sum_of_the_means(problem, options, warm_up):
    if options["memory"] is None:
        options["memory"] = "local"
    results, exact = rounds(problem, **options, warmup_steps=warm_up), means(problem)
    for place, w in enumerate(problem.weights):
        applied = sum(seen[0][place].double() for seen in results[0])
        left = [seen[-1][1].get(f"weights.{place}", torch.zeros(w.shape)).double().reshape(w.shape) for seen in results]
        wanted = sum(step[place].double() for step in exact)
        every = [g[place].double().numpy() for ranks in problem.gradients for g in ranks] + [e.numpy() for e in left]
        tolerance = SUM(200 * len(results))
        assert_equal((applied + sum(left) / len(left)).to(w.dtype), wanted.to(w.dtype), tolerance, magnitude=oracle.norm(every))


@inputs(25)
@given(problem=problems(kinds=single), memory=st.sampled_from(["local", "averaged", None]), seed=seeds)
def test_S10_at_full_rank_it_is_the_mean(problem, memory, seed):
    results = rounds(problem, matrix_approximation_rank=64, min_compression_rate=RATE, memory=memory, seed=seed)
    for step, exact in zip(results[0], means(problem), strict=True):
        for w, mine, wanted in zip(problem.weights, step[0], exact, strict=True):
            if w.dim() > 1 and w.numel():  # square matrices of random numbers may be close to singular
                part = 1e-3 if w.dtype is torch.float32 else 1e-6
                assert (mine - wanted).abs().max() <= part * wanted.abs().max()


@inputs(25)
@given(nodes=worlds(4), rank=st.integers(1, 3), n=st.integers(8, 12), m=st.integers(8, 12), warm_start=st.booleans(), seed=seeds)
def test_S10_5_a_mean_of_low_rank_is_exact_though_no_rank_s_gradient_is(nodes, rank, n, m, warm_start, seed):
    ranks = sum(nodes)
    generator = torch.Generator().manual_seed(seed)
    problem = Problem(nodes, [torch.zeros(n, m)], 0, 1)
    mean = torch.randn(n, rank, generator=generator) @ torch.randn(rank, m, generator=generator)
    noise = [torch.randn(n, m, generator=generator) for _ in range(ranks)]
    noise = [x - sum(noise) / ranks for x in noise]
    problem.gradients = [[[mean + x] for x in noise]]
    ((found, _, _),) = rounds(problem, matrix_approximation_rank=rank, min_compression_rate=RATE, warm_start=warm_start, seed=seed)[
        0
    ]
    columns = mean.numpy() @ oracle.start(None, (m, rank), np.float32, seed, 0, 0)
    size = oracle.norm([mean.numpy(), *(x.numpy() for x in noise)])
    if oracle.is_tame(columns, size) and oracle.is_tame(mean.numpy()[:, :rank]):
        assert_equal(found[0], mean, ROUNDED, magnitude=size)


@pytest.mark.parametrize("memory", ["local", "averaged", None])
@pytest.mark.parametrize("warm_start", [True, False])
def test_S10_2_a_gradient_of_zero_gives_zero_and_later_ones_are_exact_again(memory, warm_start):
    problem = Problem((2,), [torch.zeros(6, 5)], 3, 4)
    one = torch.outer(torch.arange(1.0, 7), torch.arange(5.0))
    other = torch.outer(torch.arange(6.0), torch.tensor([0.0, 0, 0, 0, 1]))
    problem.gradients = [[[x * (1 + rank)] for rank in range(2)] for x in (0 * one, one, 0 * one, other)]
    results = rounds(problem, min_compression_rate=RATE, memory=memory, warm_start=warm_start)
    for step, exact in zip(results[0], (0 * one, one, 0 * one, other), strict=True):
        assert_equal(step[0][0], exact * 1.5, SUM(100), magnitude=30.0)


@inputs(25)
@given(problem=problems(), options=options, data=st.data())
def test_S10_4_a_gradient_that_overflows_is_nan_everywhere_and_leaves_no_trace(problem, options, data):
    step, rank = data.draw(st.integers(0, STEPS - 1)), data.draw(st.integers(0, sum(problem.nodes) - 1))
    place = data.draw(st.integers(0, len(problem.weights) - 1))
    bad = problem.gradients[step][rank][place]
    if not bad.numel():
        return
    bad.view(-1)[data.draw(st.integers(0, bad.numel() - 1))] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    name = f"weights.{place}"
    for seen in rounds(problem, **options):
        if name in seen[step][2]:
            assert seen[step][0][place].isnan().all()
            for kept in (1, 2):
                before = seen[step - 1][kept] if step else {key: 0 * x for key, x in seen[step][kept].items()}
                if name in seen[step][kept]:
                    assert_equal(seen[step][kept][name], before[name], EXACT)
        for after in range(STEPS):
            for other, gradient in enumerate(seen[after][0]):
                assert (after == step and other == place) or gradient.isfinite().all()


@inputs(15)
@given(problem=problems(), warm_up=st.integers(1, STEPS), options=options, bucket_size=buckets)
def test_the_warm_up_is_gradient_allreduce_to_the_bit(problem, warm_up, options, bucket_size):
    exact = means(problem)
    for algorithm in (PowerSGDAlgorithm(warmup_steps=warm_up, **options), TopKAlgorithm(warmup_steps=warm_up)):
        if isinstance(algorithm, TopKAlgorithm) and any(w.dtype is torch.float64 for w in problem.weights):
            continue
        for seen in problem.train(algorithm, 0, bucket_size, look):
            for step in range(warm_up):
                for mine, wanted in zip(seen[step][1][0], exact[step], strict=True):
                    assert_equal(mine, wanted, EXACT)


@inputs(15)
@given(problem=problems(kinds=single), options=options)
def test_S10_5_bucketing_changes_only_the_order_of_sums(problem, options):
    options["matrix_approximation_rank"] = 1  # where rounding cannot decide which columns are dependent
    alone, together = (rounds(problem, **options, bucket_size=size) for size in (1, 2**20))
    for seen, other in zip(alone, together, strict=True):
        for place, (mine, wanted) in enumerate(zip(seen[0][0], other[0][0], strict=True)):
            given_now = [ranks[place].numpy() for ranks in problem.gradients[0]]
            assert_equal(mine, wanted, SUM(100), magnitude=oracle.norm(given_now))
        assert seen[-1][2].keys() == other[-1][2].keys()


RESTARTED = {
    "local": PowerSGDAlgorithm(2, warmup_steps=2, min_compression_rate=0.1),
    "averaged": PowerSGDAlgorithm(1, warmup_steps=0, min_compression_rate=0.1, memory="averaged", warm_start=False),
    "no memory": PowerSGDAlgorithm(1, warmup_steps=3, min_compression_rate=0.1, memory=None),
    "topk": TopKAlgorithm(0.2),
}


@pytest.mark.parametrize("algorithm", RESTARTED.values(), ids=RESTARTED)
@inputs(3)
@given(seed=st.integers(0, 2**32))
def test_a_restart_at_any_step_equals_an_undisturbed_run_to_the_bit(algorithm, seed):
    def rank(r):
        run = Run(algorithm)
        saved = [run.save()]
        for number in range(6):
            run.step(number)
            saved.append(run.save())
        for at in range(6):
            other = Run(algorithm)
            other.step(99)  # a script may have trained before it loads
            other.load(saved[at])
            for number in range(at, 6):
                other.step(number)
            assert_states_equal(other.save(), saved[-1])

    simulate(3, rank, seed)
