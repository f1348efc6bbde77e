"""Properties of QAdam in simulated worlds: bits equal to the oracle's, and torch's Adam in warm-up (S5.5)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import adversarial, every_backend_in_proof, name_of
from torch import nn

import bagua_ref
from bagua_ref.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.expected.qadam_numpy import QAdam
from bagua_ref.conformance.inputs.strategies import worlds
from bagua_ref.simulation import SimulatedWorld

STEPS = 10

pytestmark = pytest.mark.filterwarnings("ignore:qadam freezes v:UserWarning")


class Given(nn.Module):
    """A module whose gradients are its inputs."""

    def __init__(self, weights):
        super().__init__()
        self.weights = nn.ParameterList(w.clone() for w in weights)

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.5),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
    }
)
shapes = st.sampled_from([(), (0,), (1,), (3, 2), (17,), (2, 1, 5)])


@st.composite
def problems(draw):
    """A world, weights, options of each parameter at every step, and gradients of every step and rank, some zero or overflowing."""
    nodes, sizes = draw(worlds(8)), draw(st.lists(shapes, min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scales = draw(st.lists(st.sampled_from([0.0, 1e-3, 1.0, 100.0]), min_size=1, max_size=5))
    weights = [torch.randn(size, generator=generator) for size in sizes]
    gradients = [
        [
            [torch.randn(size, generator=generator) * scales[(step + rank) % len(scales)] for size in sizes]
            for rank in range(sum(nodes))
        ]
        for step in range(STEPS)
    ]
    if draw(st.booleans()):  # so v stays 0 in a warm-up of so many steps, and later gradients make m of it
        for ranks in gradients[: draw(st.integers(1, STEPS))]:
            for g in (g for rank in ranks for g in rank):
                g.view(-1)[::2] = 0
    if draw(st.integers(0, 9)) == 9:
        victim = draw(st.sampled_from(draw(st.sampled_from(draw(st.sampled_from(gradients))))))
        victim.fill_(math.inf)
    groups = [draw(options) for _ in sizes]
    decay = draw(st.sampled_from([1.0, 0.7]))
    schedule = [[{**group, "lr": group["lr"] * decay**step} for group in groups] for step in range(STEPS)]
    return nodes, weights, schedule, gradients


def layout(weights, bucket_size):
    """Return which parameters share a bucket: in reverse order, closed when full (S2.1)."""
    buckets, filled = [], bucket_size
    for place in reversed(range(len(weights))):
        if filled >= bucket_size:
            buckets.append([])
            filled = 0
        buckets[-1].append(place)
        filled += weights[place].nbytes
    return buckets


def train(problem, warmup_steps, hierarchical, flatten, bucket_size, backend=None, seed=0):
    """Return each rank's weights, m and v of all parameters, after every step."""
    nodes, weights, schedule, gradients = problem

    def rank(comm):
        bagua_ref.init_process_group()
        module = Given(weights)
        groups = [{"params": [w], **group} for w, group in zip(module.weights, schedule[0], strict=True)]
        optimizer = QAdamOptimizer(groups, warmup_steps=warmup_steps)
        algorithm = QAdamAlgorithm(optimizer, hierarchical)
        module.with_bagua([optimizer], algorithm, do_flatten=flatten, backend=backend)
        seen = []
        for given_now, options_now in zip(gradients, schedule, strict=True):
            for group, changed in zip(optimizer.param_groups, options_now, strict=True):
                group.update(changed)
            optimizer.zero_grad()
            module(given_now[comm.rank()]).backward()
            optimizer.step()
            states = [optimizer.state[w] for w in module.weights]
            found = ([*module.weights], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states])
            seen.append([[t.detach().clone() for t in tensors] for tensors in found])
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(bucket_size))
        return SimulatedWorld(sum(nodes), nodes=tuple(nodes), seed=seed).run(rank)


def follow(problem, warmup_steps, hierarchical, flatten, bucket_size, backend=None, seed=0):
    """Assert that training equals the oracle in every bit, after every step, on every rank."""
    nodes, weights, schedule, gradients = problem
    results = train(problem, warmup_steps, hierarchical, flatten, bucket_size, backend, seed)
    dtype = weights[0].dtype
    flat = [w.reshape(-1).tolist() for w in weights]
    oracle = QAdam(flat, schedule[0], warmup_steps, nodes, layout(weights, bucket_size), hierarchical, name_of(dtype))
    for step, (given_now, options_now) in enumerate(zip(gradients, schedule, strict=True)):
        oracle.step([[g.reshape(-1).tolist() for g in rank] for rank in given_now], options_now)
        for seen in results:
            for tensors, numbers in zip(seen[step], (oracle.weights, oracle.m, oracle.v), strict=True):
                for tensor, expected in zip(tensors, numbers, strict=True):
                    assert_equal(tensor, torch.tensor(expected, dtype=dtype).reshape(tensor.shape), EXACT)


@every_backend_in_proof
@given(
    problem=problems(),
    warmup_steps=st.integers(2, STEPS + 1),
    hierarchical=st.booleans(),
    flatten=st.booleans(),
    bucket_size=st.sampled_from([1, 40, 2**20]),
    seed=st.integers(0, 2**32),
)
def test_S5_5_qadam_follows_the_oracle_across_the_boundary(
    backend, problem, warmup_steps, hierarchical, flatten, bucket_size, seed
):
    follow(problem, warmup_steps, hierarchical, flatten, bucket_size, backend, seed)


@st.composite
def steps_of_one_rank(draw):
    """Weights, options, and arbitrary gradients, some missing."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    sizes = draw(st.lists(st.sampled_from([0, 1, 5, 19]), min_size=1, max_size=3))
    weights = [draw(adversarial(dtype, size, finite=True)) for size in sizes]
    gradients = [[draw(st.none() | adversarial(dtype, size)) for size in sizes] for _ in range(draw(st.integers(1, 5)))]
    return weights, [draw(options) for _ in sizes], gradients


@given(case=steps_of_one_rank())
def test_S5_5_in_warm_up_it_is_torchs_adam_to_the_bit(case):
    weights, groups, gradients = case
    ours, theirs = ([nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    makers = (
        (ours, lambda p: QAdamOptimizer(p, warmup_steps=len(gradients) + 2)),
        (theirs, lambda p: torch.optim.Adam(p, foreach=False)),
    )
    optimizers = [make([{"params": [p], **group} for p, group in zip(ps, groups, strict=True)]) for ps, make in makers]
    for given_now in gradients:
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            for parameter, gradient in zip(parameters, given_now, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            optimizer.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine, other, EXACT)
            for name, value in optimizers[1].state[other].items():
                assert_equal(optimizers[0].state[mine][name], value, EXACT)


@given(
    nodes=worlds(8),
    kinds=st.lists(st.sampled_from([0.0, 1.0]), min_size=STEPS, max_size=STEPS),
    warmup_steps=st.integers(2, STEPS),
    eps=st.sampled_from([1e-8, 1e-3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_S5_5_zero_gradients_never_give_nan_or_move_a_weight(nodes, kinds, warmup_steps, eps, dtype):
    n = sum(nodes)
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.0}
    gradients = [[[torch.full((5,), kind * (r + 1)).to(dtype), torch.zeros(3, dtype=dtype)] for r in range(n)] for kind in kinds]
    problem = nodes, [torch.ones(5, dtype=dtype), torch.ones(3, dtype=dtype)], [[group, group]] * STEPS, gradients
    for seen in train(problem, warmup_steps, True, True, 2**20):
        assert all(tensor.isfinite().all() for tensors in seen for kind in tensors for tensor in kind)
        # Parameters that never had a gradient never move.
        assert all(torch.equal(weights[1], torch.ones(3, dtype=dtype)) for weights, _, _ in seen)
