"""A property of diloco's error memory: what compression left out of a fragment is in the next one,
to the bit (S9.5).
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import inputs
from tests.trainings import Given, simulate

from bagua_ref.algorithms import DiLoCoAlgorithm
from bagua_ref.backends import list_codecs
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.cases.strategies import seeds, worlds
from bagua_ref.conformance.expected import compression_numpy as oracle

STEPS = 8


@inputs(20)
@given(
    nodes=worlds(5),
    codec=st.sampled_from(list_codecs("reference")),
    delay=st.integers(0, 1),
    seed=seeds,
)
def test_S9_5_diloco_sends_what_compression_left_out_of_the_fragment_before(
    nodes, codec, delay, seed
):
    weights, n, generator = (
        [torch.zeros(5), torch.zeros(3, 7)],
        sum(nodes),
        torch.Generator().manual_seed(seed),
    )
    gradients = [
        [[torch.randn(w.shape, generator=generator) for w in weights] for _ in range(n)]
        for _ in range(STEPS)
    ]
    outer = torch.optim.SGD
    algorithm = DiLoCoAlgorithm(
        4,
        lambda g: outer(g, lr=1.0),
        fragments=[["weights.0"], ["weights.1"]],
        delay=delay,
        mix=1.0,
        compression=codec,
        error_feedback=True,
    )

    def rank(r):
        module = Given(weights)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        module.with_bagua([optimizer], algorithm)
        seen = []
        for given_now in gradients:
            optimizer.zero_grad()
            module(given_now[r]).backward()
            optimizer.step()
            mine = module.bagua_algorithm
            copies = [g.detach().clone() for fragment in mine._fragments for g in fragment.copies]
            seen.append(([w.detach().clone() for w in module.weights], copies, mine.state_dict()))
        return seen

    results = simulate(n, rank, nodes, seed)
    for place, weight in enumerate(weights):
        m = weight.numel() + -weight.numel() % n
        workers, servers = [np.zeros(m, np.float32)] * n, [np.zeros(m // n, np.float32)] * n
        g = weight.reshape(-1).numpy()
        for period in range(2):
            sent = 4 * period + 2 * (place + 1) - delay - 1  # the step, from 0
            # mix=1: weights are never replaced
            xs = [seen[sent][0][place].reshape(-1).numpy() for seen in results]
            ds = [np.concatenate([g - x, np.zeros(m - g.size, np.float32)]) for x in xs]
            mean, workers, servers = oracle.error_feedback_round(
                ds, workers, servers, codec, "float32", g.size
            )
            g = g - mean[: g.size]
            for r, seen in enumerate(results):
                _, copies, state = seen[sent + delay]
                assert_equal(copies[place].reshape(-1), torch.from_numpy(g), EXACT)
                kept = state["memories"][place]
                assert_equal(kept["worker"], torch.from_numpy(workers[r]), EXACT)
                assert_equal(kept["server"], torch.from_numpy(servers[r]), EXACT)
