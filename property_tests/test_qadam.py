"""Properties of QAdam beyond the suite: it is torch's Adam in warm-up (S5.5)."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import FLOATS, adversarial
from torch import nn

from bagua_ref.algorithms import QAdamOptimizer
from bagua_ref.conformance import EXACT, assert_equal

options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.5),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
    }
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
