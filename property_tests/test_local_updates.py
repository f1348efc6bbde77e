"""Properties of the parts of DiLoCo beyond the suite: fragments of any sizes, and mixing of any
numbers (S9).
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property_tests.strategies import FLOATS, adversarial, inputs, name_of
from tests.trainings import network, simulate, train, wrap

from bagua_ref.algorithms import DiLoCoAlgorithm
from bagua_ref.algorithms.fragments import Fragment, split_into_fragments
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.expected import local_updates_numpy as oracle


@given(
    sizes=st.lists(st.integers(0, 2**40) | st.integers(0, 9), min_size=1, max_size=40),
    data=st.data(),
)
@example(sizes=[0, 0, 0], data=None)
def test_S9_3_fragments_are_in_order_and_none_is_empty(sizes, data):
    count = 2 if data is None else data.draw(st.integers(1, len(sizes)))
    found = split_into_fragments(sizes, count)
    assert found == oracle.fragment_of(sizes, count)
    assert found == sorted(found)
    assert set(found) == set(range(count))


@given(
    dtype=st.sampled_from(FLOATS),
    mix=st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1),
    data=st.data(),
)
def test_S9_4_mixing_rounds_each_operation_for_any_numbers(dtype, mix, data):
    x = data.draw(adversarial(dtype, 12, finite=True))
    g = data.draw(adversarial(dtype if dtype is torch.float64 else torch.float32, 12, finite=True))
    fragment = Fragment(
        ["x"], [torch.nn.Parameter(x.clone())], lambda tensors: torch.optim.SGD(tensors, lr=1.0)
    )
    with torch.no_grad():
        fragment.copies[0].copy_(g)
    fragment.mix(mix)
    with np.errstate(all="ignore"):
        wanted = oracle.mixed(x.to(g.dtype).numpy(), g.numpy(), mix, name_of(dtype))
    assert_equal(fragment._parameters[0], torch.as_tensor(wanted).to(dtype), EXACT)


@inputs(3)
@given(nodes=st.sampled_from([(16,), (4, 12), (1, 7, 8)]), seed=st.integers(0, 2**16))
def test_S9_4_many_ranks_agree_on_g_to_the_bit(nodes, seed):
    def rank(r):
        module, optimizer = wrap(
            network(seed), DiLoCoAlgorithm(period=4, fragments=2, delay=1, mix=0.0), lr=0.1
        )
        train(module, optimizer, r, range(7))
        return torch.cat(
            [g.flatten() for g in module.bagua_algorithm.state_dict()["global_weights"].values()]
        )

    first, *others = simulate(16, rank, nodes, seed)
    for other in others:
        assert_equal(other, first, EXACT)
