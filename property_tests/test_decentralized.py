"""Decentralized and low-precision decentralized averaging (S3.4, S3.5, S5.3, S5.4) in simulated worlds, on every backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import COMPRESSIBLE, FLOATS, adversarial, every_backend_in_proof, name_of
from torch import nn

import bagua_ref
from bagua_ref.algorithms import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from bagua_ref.bucket import BaguaBucket
from bagua_ref.comm_ops import shift_one_peer
from bagua_ref.conformance import EXACT, SUM, assert_equal
from bagua_ref.conformance.expected import decentralized_numpy as oracle
from bagua_ref.simulation import SimulatedWorld

LR = 1.0  # torch rounds lr * gradient in float16 in some loops and not in others; this product is exact

hierarchical_or_not = pytest.mark.parametrize("hierarchical", [True, False], ids=["hierarchical", "flat"])
either_mode = pytest.mark.parametrize("mode", ["all", "shift_one"])


@st.composite
def worlds(draw, hierarchical, pairs):
    """Ranks per node: up to 8 ranks on 1 to 4 uneven nodes; with ``pairs`` one more where ``shift_one`` needs it."""
    n = draw(st.integers(1, 8))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
    nodes = [end - start for start, end in zip([0, *cuts], [*cuts, n], strict=True)]
    odd = (len(nodes) if hierarchical else n) % 2 == 1
    return [*nodes, 1] if pairs and odd else nodes


def arrays(tensor):
    """Return a tensor's numbers as the oracle holds them."""
    return tensor.double().numpy() if tensor.dtype is torch.float64 else tensor.float().numpy()


def tensor(array, dtype):
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


# Peers.


@given(half=st.integers(1, 64), step=st.integers(0, 1000))
def test_S3_4_shift_one_is_an_involution_between_the_halves(half, step):
    for rank in range(2 * half):
        peer = shift_one_peer(rank, 2 * half, step)
        assert (peer < half) != (rank < half)
        assert shift_one_peer(peer, 2 * half, step) == rank
        assert peer == oracle.pairs(2 * half, step)[rank]


@given(half=st.integers(1, 64), first=st.integers(0, 1000), data=st.data())
def test_S3_4_shift_one_meets_every_rank_of_the_other_half_in_half_as_many_steps(half, first, data):
    rank = data.draw(st.integers(0, 2 * half - 1))
    met = {shift_one_peer(rank, 2 * half, step) for step in range(first, first + half)}
    assert met == set(range(half, 2 * half) if rank < half else range(half))


# Operations through buckets.


@st.composite
def op_cases(draw, dtypes, hierarchical, pairs, max_rounds=4, finite=False):
    """A world, and what each rank's weights are before each round, cut into tensors alike everywhere."""
    nodes, dtype = draw(worlds(hierarchical, pairs)), draw(st.sampled_from(dtypes))
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    inputs = [
        [draw(adversarial(dtype, sum(sizes), finite=finite)) for _ in range(sum(nodes))]
        for _ in range(draw(st.integers(1, max_rounds)))
    ]
    return nodes, dtype, sizes, inputs


def run(nodes, sizes, inputs, backend, flatten, append):
    """Return what each rank's tensors are after each round, and its bucket.

    ``inputs[round][rank]`` is written into the tensors before the round; None: they stay as the last round left them.
    ``append(bucket)`` appends the operation and returns what to call after its execution.
    """

    def rank(comm):
        bagua_ref.init_process_group()
        parts = [part.clone() for part in inputs[0][comm.rank()].split(sizes)]
        tensors = [part.ensure_bagua_tensor(f"t{place}") for place, part in enumerate(parts)]
        bucket = BaguaBucket(tensors, "0", flatten=flatten, alignment=4, backend=backend)
        afterwards = append(bucket)
        seen = []
        for ranks in inputs:
            if ranks is not None:
                for mine, value in zip(tensors, ranks[comm.rank()].split(sizes), strict=True):
                    mine.copy_(value)
            bucket.execute()
            afterwards(bucket)
            seen.append(torch.cat([t.clone() for t in tensors]))
        return seen, bucket

    return SimulatedWorld(sum(nodes), nodes=tuple(nodes)).run(rank)


def run_decentralized(nodes, sizes, inputs, backend, flatten, mode, hierarchical):
    def append(bucket):
        peer_weight = bucket.flattened_tensor().ensure_bagua_tensor("peer")
        return bucket.append_decentralized_synchronous_op(peer_weight, hierarchical, mode).copy_back_peer_weight

    return [seen for seen, _ in run(nodes, sizes, inputs, backend, flatten, append)]


def run_ring(nodes, sizes, inputs, backend, flatten, hierarchical):
    """As `run`; all ranks start from the first one's tensors, as after wrapping."""

    def append(bucket):
        start = torch.nn.functional.pad(inputs[0][0], (0, -inputs[0][0].numel() % 4))
        replicas = [start.clone().ensure_bagua_tensor(name) for name in ("weight", "left", "right")]
        bucket.append_low_precision_decentralized_synchronous_op(*replicas, hierarchical)
        return lambda _: None

    return run(nodes, sizes, inputs, backend, flatten, append)


@every_backend_in_proof
@hierarchical_or_not
@given(data=st.data(), flatten=st.booleans())
def test_S3_4_shift_one_is_what_the_oracle_computes(backend, hierarchical, data, flatten):
    nodes, dtype, sizes, inputs = data.draw(op_cases(FLOATS, hierarchical, pairs=True))
    results = run_decentralized(nodes, sizes, inputs, backend, flatten, "shift_one", hierarchical)
    for step, ranks in enumerate(inputs):
        with np.errstate(all="ignore"):
            wanted = oracle.average([arrays(x) for x in ranks], name_of(dtype), "shift_one", hierarchical, nodes, step)
        for seen, want in zip(results, wanted, strict=True):
            assert_equal(seen[step], tensor(want, dtype), EXACT)


@every_backend_in_proof
@hierarchical_or_not
@given(data=st.data(), flatten=st.booleans())
def test_S3_4_all_is_the_mean_over_all_ranks_also_on_uneven_nodes(backend, hierarchical, data, flatten):
    nodes, dtype, sizes, inputs = data.draw(op_cases(FLOATS, hierarchical, pairs=False, finite=True))
    inputs = [[x / 64 for x in ranks] for ranks in inputs]  # room for the sum
    results = run_decentralized(nodes, sizes, inputs, backend, flatten, "all", hierarchical)
    for step, ranks in enumerate(inputs):
        wanted = oracle.average([arrays(x) for x in ranks], name_of(dtype), "all", hierarchical, nodes, step)
        magnitude = torch.stack([x.double().abs() for x in ranks]).mean(0)
        for seen, want in zip(results, wanted, strict=True):
            assert_equal(seen[step], results[0][step], EXACT)
            assert_equal(seen[step], tensor(want, dtype), SUM(sum(nodes) + 1), magnitude=magnitude)


@every_backend_in_proof
@either_mode
@given(data=st.data(), flatten=st.booleans())
def test_S3_4_averaging_preserves_the_mean_of_the_weights(backend, mode, data, flatten):
    nodes, dtype, sizes, inputs = data.draw(op_cases(FLOATS, False, pairs=mode == "shift_one", max_rounds=1, finite=True))
    n = sum(nodes)
    before = torch.stack([x / 64 for x in inputs[0]])
    after = torch.stack([seen[0] for seen in run_decentralized(nodes, sizes, [list(before)], backend, flatten, mode, False)])
    magnitude = before.double().abs().mean(0)
    assert_equal(after.double().mean(0).to(dtype), before.double().mean(0).to(dtype), SUM(n + 1), magnitude=magnitude)


@every_backend_in_proof
@given(case=op_cases(FLOATS, hierarchical=True, pairs=True, max_rounds=1, finite=True), flatten=st.booleans())
def test_S3_4_hierarchical_shift_one_preserves_the_mean_of_node_means(backend, case, flatten):
    nodes, dtype, sizes, inputs = case
    inputs = [[x / 64 for x in inputs[0]]]
    seen = [s[0] for s in run_decentralized(nodes, sizes, inputs, backend, flatten, "shift_one", True)]

    def mean_of_node_means(ranks):
        return torch.stack([torch.stack(node).double().mean(0) for node in oracle.split(ranks, nodes)]).mean(0).to(dtype)

    magnitude = mean_of_node_means([x.double().abs() for x in inputs[0]]).double()
    assert_equal(mean_of_node_means(seen), mean_of_node_means(inputs[0]), SUM(sum(nodes) + 2), magnitude=magnitude)


def distance(ranks):
    """The squared distance of the ranks from their mean, summed."""
    stacked = torch.stack([x.double() for x in ranks])
    return (stacked - stacked.mean(0)).square().sum().item()


@every_backend_in_proof
@either_mode
@given(half=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_S3_4_the_distance_from_consensus_contracts(backend, mode, half, seed):
    n = 2 * half
    start = list(torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)))
    results = run_decentralized([n], [5], [start] + [None] * (n - 1), backend, True, mode, False)
    distances = [distance(start)] + [distance([seen[step] for seen in results]) for step in range(n)]
    for before, after in itertools.pairwise(distances):
        assert after <= before + 1e-10 * distances[0]
    assert distances[-1] <= distances[0] / 4  # in exact arithmetic at most 1/128 of it, with 8 ranks


@every_backend_in_proof
@given(n=st.integers(2, 8), seed=st.integers(0, 2**16))
def test_S3_5_the_distance_from_consensus_contracts(backend, n, seed):
    ranks = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
    same = [ranks[0].clone() for _ in range(n)]
    results = run_ring([n], [5], [same, list(ranks)] + [None] * 8, backend, True, False)
    # Ranks move by what they differ from their replicas in: the first of these steps spreads it, the rest mix.
    distances = [distance([seen[step] for seen, _ in results]) for step in range(1, 10)]
    for before, after in itertools.pairwise(distances):
        assert after <= 0.7 * before + 1e-10 * distances[0]  # a ring of 8 mixes by 0.648, of fewer faster


# The ring.


@every_backend_in_proof
@hierarchical_or_not
@given(data=st.data(), flatten=st.booleans())
def test_S3_5_the_ring_is_what_the_oracle_computes_and_replicas_agree(backend, hierarchical, data, flatten):
    nodes, dtype, sizes, inputs = data.draw(op_cases(COMPRESSIBLE, hierarchical, pairs=False))
    name = name_of(dtype)
    padding = -sum(sizes) % 4
    results = run_ring(nodes, sizes, inputs, backend, flatten, hierarchical)
    start = np.pad(arrays(inputs[0][0]), (0, padding))
    ring = oracle.Ring.of([start] * (len(nodes) if hierarchical else sum(nodes)))
    for step, ranks in enumerate(inputs):
        with np.errstate(all="ignore"):
            mine = [np.pad(arrays(x), (0, padding)) for x in ranks]
            if hierarchical:
                leaders = ring.step([oracle.node_mean(node, name) for node in oracle.split(mine, nodes)], name)
                wanted = oracle.on_every_rank(leaders, nodes)
            else:
                wanted = ring.step(mine, name)
        for (seen, _), want in zip(results, wanted, strict=True):
            assert_equal(seen[step], tensor(want, dtype)[: sum(sizes)], EXACT)
    members = [sum(nodes[:place]) for place in range(len(nodes))] if hierarchical else range(sum(nodes))
    buckets = [results[rank][1] for rank in members]
    for place, bucket in enumerate(buckets):
        assert_equal(bucket._weight, tensor(ring.W[place], dtype), EXACT)
        assert_equal(bucket._left_peer_weight, tensor(ring.L[place], dtype), EXACT)
        assert_equal(bucket._right_peer_weight, tensor(ring.R[place], dtype), EXACT)
        assert_equal(bucket._weight, buckets[(place + 1) % len(buckets)]._left_peer_weight, EXACT)
        assert_equal(bucket._weight, buckets[place - 1]._right_peer_weight, EXACT)


# Training.


@st.composite
def trainings(draw, dtypes, pairs):
    hierarchical = draw(st.booleans())
    return {
        "nodes": draw(worlds(hierarchical, pairs)),
        "hierarchical": hierarchical,
        "interval": draw(st.integers(1, 3)),
        "flatten": draw(st.booleans()),
        "dtype": draw(st.sampled_from(dtypes)),
        "widths": draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)),
        "seed": draw(st.integers(0, 2**16)),
        "bucket_bytes": draw(st.sampled_from([16, 10 * 2**20])),
    }


def network(widths, dtype):
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def train(algorithm, backend, training, steps=10):
    """Return the starting weights, and by step and rank the gradients and weights, each a list by bucket of flat tensors."""

    def rank(comm):
        bagua_ref.init_process_group()
        torch.manual_seed(training["seed"] + comm.rank())
        module = network(training["widths"], training["dtype"])
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        module.with_bagua([optimizer], algorithm, do_flatten=training["flatten"], backend=backend)
        buckets = [bucket.tensors for bucket in module.bagua_buckets]
        record = {"start": flats(buckets), "gradients": [], "weights": []}
        for _ in range(steps):
            optimizer.zero_grad()
            module(torch.randn(3, training["widths"][0]).to(training["dtype"])).square().mean().div(4).backward()
            record["gradients"].append([torch.cat([p.grad.reshape(-1).clone() for p in bucket]) for bucket in buckets])
            optimizer.step()
            record["weights"].append(flats(buckets))
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", str(training["bucket_bytes"]))
        return SimulatedWorld(sum(training["nodes"]), nodes=tuple(training["nodes"])).run(rank)


def flats(buckets):
    return [torch.cat([p.detach().reshape(-1).clone() for p in bucket]) for bucket in buckets]


def check_follows(records, simulate, training, tolerance):
    """Compare every rank's weights after every step with what the oracle makes of the gradients, bucket by bucket."""
    for record in records[1:]:
        for start, first in zip(record["start"], records[0]["start"], strict=True):
            assert_equal(start, first, EXACT)
    for bucket, start in enumerate(records[0]["start"]):
        gradients = zip(*(record["gradients"] for record in records), strict=True)
        wanted = simulate(arrays(start), [[arrays(grads[bucket]) for grads in ranks] for ranks in gradients])
        for step, ranks in enumerate(wanted):
            magnitude = max(np.abs(x).max(initial=0) for x in ranks) + 1.0
            for record, want in zip(records, ranks, strict=True):
                actual = record["weights"][step][bucket]
                assert_equal(actual, tensor(want, training["dtype"]), tolerance(step), magnitude=float(magnitude))


@every_backend_in_proof
@either_mode
@given(data=st.data())
def test_S5_3_ten_steps_of_decentralized_training_follow_the_oracle(backend, mode, data):
    training = data.draw(trainings(FLOATS, pairs=mode == "shift_one"))
    nodes, n = training["nodes"], sum(training["nodes"])
    options = {"hierarchical": training["hierarchical"]}
    algorithm = DecentralizedAlgorithm(peer_selection_mode=mode, communication_interval=training["interval"], **options)
    records = train(algorithm, backend, training)
    assert len(records[0]["start"]) == 1

    def simulate(start, gradients):
        return oracle.train_decentralized(
            start, gradients, LR, name_of(training["dtype"]), nodes, mode, interval=training["interval"], **options
        )

    # Every step's mean is rounded in an order of its own, and the difference stays in the weights.
    check_follows(records, simulate, training, lambda step: EXACT if mode == "shift_one" else SUM((step + 1) * (n + 2)))


@every_backend_in_proof
@given(training=trainings(COMPRESSIBLE, pairs=False))
def test_S5_4_ten_steps_of_training_on_a_ring_follow_the_oracle(backend, training):
    algorithm = LowPrecisionDecentralizedAlgorithm(training["hierarchical"], training["interval"])
    records = train(algorithm, backend, training)

    def simulate(start, gradients):
        return oracle.train_on_ring(
            start, gradients, LR, name_of(training["dtype"]), training["nodes"], training["hierarchical"], training["interval"]
        )

    check_follows(records, simulate, training, lambda step: EXACT)
