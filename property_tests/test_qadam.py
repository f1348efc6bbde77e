"""Properties of QAdam beyond the suite: every step and both moments to the bit, and torch's Adam in
warm-up (S5.5).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import FLOATS, adversarial, every_backend, inputs
from tests.trainings import Given, simulate
from torch import nn

from bagua_ref.algorithms import QAdamAlgorithm, QAdamOptimizer
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.cases.strategies import seeds, worlds
from bagua_ref.conformance.cases.training_cases import any_gradients, grid_weights
from bagua_ref.conformance.expected.algorithms_numpy import QAdam, buckets, one_byte

STEPS = 8


def arrays(tensors):
    """Return each tensor's elements flat."""
    return [x.reshape(-1).numpy() for x in tensors]


options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.5),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
    }
)


@every_backend
@inputs(50)
@given(
    data=st.data(),
    nodes=worlds(8),
    count=st.integers(1, 4),
    warmup_steps=st.integers(2, STEPS + 1),
    hierarchical=st.booleans(),
    flatten=st.booleans(),
    bucket_bytes=st.sampled_from([1, 40, 2**20]),
    seed=seeds,
)
def test_S5_5_every_step_is_that_of_the_second_implementation_to_the_bit(
    backend, data, nodes, count, warmup_steps, hierarchical, flatten, bucket_bytes, seed
):
    weights = grid_weights(data.draw, [torch.float32] * count)
    gradients = any_gradients(data.draw, weights, sum(nodes), STEPS)
    groups = [data.draw(options) for _ in weights]

    def rank(r):
        module = Given(weights)
        grouped = [
            {"params": [w], **group} for w, group in zip(module.weights, groups, strict=True)
        ]
        optimizer = QAdamOptimizer(grouped, warmup_steps=warmup_steps)
        module.with_bagua(
            [optimizer],
            QAdamAlgorithm(optimizer, hierarchical),
            do_flatten=flatten,
            backend=backend,
        )
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            module([gradients[r][step][place] for place in range(count)]).backward()
            optimizer.step()
            of_each = [
                (w, optimizer.state[w]["exp_avg"], optimizer.state[w]["exp_avg_sq"])
                for w in module.weights
            ]
            seen.append([[x.detach().clone() for x in kind] for kind in zip(*of_each, strict=True)])
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(bucket_bytes))
        results = simulate(sum(nodes), rank, nodes, seed)
    layout = buckets([w.numel() for w in weights], ["float32"] * count, bucket_bytes)
    exchange = one_byte(True, list(nodes) if hierarchical else None)
    model = QAdam(arrays(weights), groups, warmup_steps, [(bucket, exchange) for bucket in layout])
    for step in range(STEPS):
        model.step([arrays([rank[step][place] for place in range(count)]) for rank in gradients])
        for seen in results:
            for zero, tensors, numbers in zip(
                (None, 0, 0), seen[step], (model.weights, model.m, model.v), strict=True
            ):
                for tensor, expected in zip(tensors, numbers, strict=True):
                    wanted = torch.from_numpy(expected).view(tensor.shape)
                    # Whether a mean of zeros is -0 is left to the all-reduce (S3.1), which the
                    # moments show.
                    assert_equal(
                        *(x if zero is None else x + zero for x in (tensor, wanted)), EXACT
                    )


@st.composite
def steps_of_one_rank(draw):
    """Weights, options, and arbitrary gradients, some missing."""
    dtype = draw(st.sampled_from(FLOATS))
    sizes = draw(st.lists(st.sampled_from([0, 1, 5, 19]), min_size=1, max_size=3))
    weights = [draw(adversarial(dtype, size, finite=True)) for size in sizes]
    gradients = [
        [draw(st.none() | adversarial(dtype, size)) for size in sizes]
        for _ in range(draw(st.integers(1, 5)))
    ]
    return weights, [draw(options) for _ in sizes], gradients


@given(case=steps_of_one_rank())
def test_S5_5_in_warm_up_it_is_torchs_adam_to_the_bit(case):
    weights, groups, gradients = case
    ours, theirs = ([nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    makers = (
        (ours, lambda p: QAdamOptimizer(p, warmup_steps=len(gradients) + 2)),
        (theirs, lambda p: torch.optim.Adam(p, foreach=False)),
    )
    optimizers = [
        make([{"params": [p], **group} for p, group in zip(ps, groups, strict=True)])
        for ps, make in makers
    ]
    for given_now in gradients:
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            for parameter, gradient in zip(parameters, given_now, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            optimizer.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert_equal(mine, other, EXACT)
            for name, value in optimizers[1].state[other].items():
                assert_equal(optimizers[0].state[mine][name], value, EXACT)
