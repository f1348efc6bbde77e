"""Whole trainings compared with plain loops over all ranks (S2, S5.1 to S5.5, S13).

`algorithms_async` has S5.6, `algorithms_local` S9, `algorithms_powersgd` S10,
`algorithms_compressed` S11, and `algorithms_properties` what all algorithms have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import (
    COMPRESSIBLE,
    FLOATS,
    Draw,
    dtype_named,
    paired_worlds,
    seeds,
    worlds,
)
from bagua_ref.conformance.cases.training_cases import (
    ONE_BUCKET,
    ByRank,
    any_gradients,
    any_kind,
    each_gradient,
    exact_gradients,
    graph_cases,
    grid_weights,
    not_finite_in_places,
)
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import algorithms_numpy as plain
from bagua_ref.conformance.expected import decentralized_numpy
from bagua_ref.conformance.expected.kernels_numpy import Array
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import TrainedAlgorithm, Training, of_kinds

__all__ = [
    "BYTEGRAD",
    "DECENTRALIZED",
    "GRADIENT_ALLREDUCE",
    "QADAM",
    "RING",
    "follow_qadam",
]


def prepare() -> None:
    """Import what torch imports with the first optimizer, a second's worth."""
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


# Gradients.


def _options_of_gradients(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    lr = draw(st.sampled_from([1.0, 0.5])) if all(w.dtype.itemsize > 2 for w in weights) else 1.0
    return {"lr": lr, "hierarchical": draw(st.booleans()), "average": draw(st.booleans())}


def _follow_gradients(training: Training) -> None:
    average, leaders, compresses = (
        training.options["average"],
        training.leaders(),
        training.method == "bytegrad",
    )
    exchange = plain.one_byte(average, leaders) if compresses else plain.full_precision(average)

    def train(start: Array, gradients: list[list[Array]], dtype: str) -> list[list[Array]]:
        history = plain.train_on_gradients(
            start, gradients, training.options["lr"], dtype, exchange
        )
        return [[weights] * training.n for weights in history]

    tolerance, mass = EXACT, None
    # n/L may not be a float32 number; then the leaders' inputs are not exact
    if not compresses and leaders and average:
        tolerance = SUM((training.n + 2) * training.steps)
        mass = _mass(training, lambda gradients: gradients.sum(0))
    for expected in training.of_buckets(training.layout(), train):
        training.step(expected, tolerance, mass)


def _mass(training: Training, of_ranks: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the absolute values of a parameter and of its gradients in all steps, added up, by
    parameter.
    """
    return [
        sum(
            (
                of_ranks(torch.stack(training.tensors(step, p)).abs().double())
                for step in range(training.steps)
            ),
            w.abs().double(),
        )
        for p, w in enumerate(training.weights)
    ]


GRADIENT_ALLREDUCE = TrainedAlgorithm(
    "gradient_allreduce",
    _options_of_gradients,
    _follow_gradients,
    worlds=lambda dtype: worlds(5) | st.sampled_from([(6,), (7,), (4, 5)]),
    steps=lambda draw, options: draw(st.integers(1, 3)),
)
BYTEGRAD = replace(
    GRADIENT_ALLREDUCE,
    method="bytegrad",
    worlds=lambda dtype: worlds(7) | st.sampled_from([(2, 1), (1, 3), (2, 2), (2, 1, 2)]),
    gradients=of_kinds(any_kind),
)


@check("S5.1", "gradients", dtypes=FLOATS, needs=("gradient_allreduce",), effort=0.2)
def gradients(lab: Lab, draw: Draw) -> None:
    """Every rank updates its weights with the sum or mean of all ranks' gradients."""
    if draw(st.booleans()):
        GRADIENT_ALLREDUCE.train(lab, draw)
    else:
        GRADIENT_ALLREDUCE.train(lab, draw, change=not_finite_in_places(draw), steps=1)


@check("S5.2", "gradients", dtypes=COMPRESSIBLE, needs=("bytegrad",), effort=0.3)
def gradients_in_bytes(lab: Lab, draw: Draw) -> None:
    """Every rank updates its weights with gradients sent as one byte per element, bit for bit."""
    BYTEGRAD.train(lab, draw, hierarchical=draw(st.sampled_from([True, True, False])))


@check("S2.1", "buckets", needs=("bytegrad",), effort=0.7)
def buckets(lab: Lab, draw: Draw) -> None:
    """Parameters fill buckets in reverse order, by dtype; a bucket is closed once it holds at least
    the bucket size.
    """
    used = draw(st.lists(st.sampled_from(lab.dtypes(COMPRESSIBLE)), min_size=1, max_size=2))
    weights = grid_weights(
        draw, [dtype_named(draw(st.sampled_from(used))) for _ in range(draw(st.integers(3, 6)))]
    )
    of_one = [w.nbytes for w in reversed(weights) if w.dtype is weights[-1].dtype]
    # a bucket of so many parameters is just full
    filled = sum(of_one[: draw(st.integers(1, len(of_one)))])
    size = max(
        1,
        draw(st.sampled_from([filled, filled, filled + 1, filled - 1, filled - 1, 40, ONE_BUCKET])),
    )
    BYTEGRAD.train(
        lab,
        draw,
        nodes=draw(worlds(3)),
        weights=weights,
        steps=2,
        hierarchical=False,
        average=True,
        bucket_bytes=size,
    )


@check("S2.1", "order", needs=("buckets",), effort=0.5)
def order_of_buckets(lab: Lab, draw: Draw) -> None:
    """Buckets come by dtype, bf16, f16, f32, f64, and parameters in reverse order; one that has the
    bucket size is closed.
    """
    used = draw(st.lists(st.sampled_from(lab.dtypes(FLOATS)), min_size=2, max_size=8))
    weights = [torch.zeros(draw(st.integers(1, 7)), dtype=dtype_named(name)) for name in used]
    size = draw(st.sampled_from([1, 16, 24, 40, ONE_BUCKET]))
    nodes = draw(st.sampled_from([(1,), (2,)]))
    given = {"weights": [weights] * sum(nodes)}
    options = {"bucket_bytes": size}
    results = lab.on_ranks("algorithms", "buckets", nodes, draw(seeds), given, options)
    wanted = plain.buckets([w.numel() for w in weights], used, size)
    for rank, found in enumerate(results):
        lab.assert_equal(found, wanted, where=f"rank {rank}")


@check("S2.2", "padding", dtypes=COMPRESSIBLE, needs=("bytegrad",), effort=0.15)
def padding(lab: Lab, draw: Draw) -> None:
    """Padding is zero at every step and belongs to the last chunk."""
    nodes = draw(worlds(5).filter(lambda nodes: sum(nodes) > 1))
    size = draw(st.integers(1, 30).filter(lambda size: size % sum(nodes) != 0))
    weights = grid_weights(draw, [lab.dtype] * 2, [(size - size // 2,), (size // 2,)])
    far_from_zero = each_gradient(lambda g: g.abs() / 8 + 1)  # so that zeros beside them matter
    BYTEGRAD.train(
        lab,
        draw,
        nodes=nodes,
        weights=weights,
        change=far_from_zero,
        steps=2,
        bucket_bytes=ONE_BUCKET,
    )


# Weights.


def _options_of_weights(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    return {
        "lr": 1.0,
        "hierarchical": draw(st.booleans()),
        "communication_interval": draw(st.integers(1, 3)),
    }


def _weights_after_steps(
    training: Training,
) -> Iterator[tuple[list[list[Any]], Tolerance, Any]]:
    """Yield the expected weights after each step, by rank and parameter, the tolerance, and the
    magnitudes.
    """
    options, leaders = training.options, training.leaders()
    mode = options.get("peer_selection_mode")

    def train(start: Array, gradients: list[list[Array]], dtype: str) -> list[list[Array]]:
        interval = options["communication_interval"]
        return decentralized_numpy.train_decentralized(
            start, gradients, 1.0, dtype, leaders, mode, interval
        )

    mass = _mass(training, lambda gradients: gradients.amax(0)) if mode == "all" else None
    for step, expected in enumerate(training.of_buckets(training.layout(), train)):
        # Each mean may be rounded in another order, and the difference stays in the weights.
        yield expected, SUM((step + 1) * (training.n + 2)) if mode == "all" else EXACT, mass


def _follow_weights(training: Training) -> None:
    for expected in _weights_after_steps(training):
        training.step(*expected)


def _follow_forwards(training: Training) -> None:
    """Expect each forward to leave the weights as the step before has left them."""
    training.step([training.start] * training.n, how="slow step")
    for expected in [*_weights_after_steps(training)][:-1]:
        training.step(*expected, how="slow step")


DECENTRALIZED = TrainedAlgorithm(
    "decentralized",
    lambda draw, weights: {**_options_of_weights(draw, weights), "peer_selection_mode": "all"},
    _follow_weights,
    worlds=lambda dtype: worlds(5),
    gradients=of_kinds(any_kind),
    steps=lambda draw, options: draw(st.integers(2, 6)),
)
RING = replace(DECENTRALIZED, method="low_precision_decentralized", options=_options_of_weights)
_FORWARDS = replace(
    DECENTRALIZED,
    follow=_follow_forwards,
    steps=lambda draw, options: draw(st.integers(2, 4)),
)


def _two_pairs(between: bool) -> st.SearchStrategy[tuple[int, ...]]:
    """Worlds in which consecutive steps have different peers."""
    return st.sampled_from([(1, 1, 1, 1), (2, 1, 1, 1)] if between else [(4,), (3, 1)])


def _in_pairs(algorithm: TrainedAlgorithm, lab: Lab, draw: Draw, most: int) -> None:
    between = draw(st.booleans())
    nodes = draw(_two_pairs(between) | paired_worlds(between, most))
    algorithm.train(lab, draw, nodes=nodes, hierarchical=between, peer_selection_mode="shift_one")


@check("S5.3", "shift_one", dtypes=FLOATS, needs=("decentralized",), effort=0.2)
def shift_one(lab: Lab, draw: Draw) -> None:
    """At steps divisible by the interval, weights are averaged with the next peer; then each rank
    applies its own gradient.
    """
    _in_pairs(DECENTRALIZED, lab, draw, 6)


@check("S5.3", "in_forward", dtypes=FLOATS, needs=("decentralized",), effort=0.1)
def in_forward(lab: Lab, draw: Draw) -> None:
    """While weights are averaged in the background, forward and backward use the old ones: they are
    replaced after the backward.
    """
    _in_pairs(_FORWARDS, lab, draw, 4)


@check("S5.3", "all", dtypes=FLOATS, needs=("decentralized",), effort=0.2)
def all_ranks(lab: Lab, draw: Draw) -> None:
    """At steps divisible by the interval, weights are averaged over all ranks; then each rank
    applies its own gradient.
    """
    DECENTRALIZED.train(lab, draw)


@check("S13.5", "interval", dtypes=FLOATS, needs=("decentralized",), effort=0.2)
def interval_on_graphs(lab: Lab, draw: Draw) -> None:
    """At steps divisible by the interval, weights are averaged along the next graph; then each rank
    applies its own gradient.
    """
    graph, nodes, between = draw(graph_cases(6, changing=draw(st.booleans())))
    DECENTRALIZED.train(lab, draw, nodes=nodes, peer_selection_mode=graph, hierarchical=between)


@check("S5.4", "ring", dtypes=COMPRESSIBLE, needs=("low_precision_decentralized",), effort=0.3)
def ring(lab: Lab, draw: Draw) -> None:
    """After optimizer steps divisible by the interval, weights are averaged on the ring, bucket by
    bucket, bit for bit.
    """
    RING.train(lab, draw, steps=draw(st.integers(1, 5)))


@check("S5.3", "several_dtypes", needs=("decentralized",), effort=0.3)
def several_dtypes(lab: Lab, draw: Draw) -> None:
    """Weights of each dtype are averaged in every round, all with the same peer."""
    used = draw(st.permutations(lab.dtypes(FLOATS)))[:2]
    weights = grid_weights(
        draw,
        [dtype_named(name) for name in [*used, *draw(st.lists(st.sampled_from(used), max_size=2))]],
    )
    nodes = draw(_two_pairs(False))
    DECENTRALIZED.train(
        lab, draw, nodes=nodes, weights=weights, hierarchical=False, peer_selection_mode="shift_one"
    )


# QAdam.

_groups = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.01, 0.3]),
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.8, 0.99), (0.0, 0.5)]),
        "eps": st.sampled_from([1e-8, 1e-3, 0.5]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
    }
)


def _options_of_qadam(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    groups = [draw(_groups) for _ in weights]
    return {
        "groups": groups,
        "warmup_steps": draw(st.integers(2, 5)),
        "hierarchical": draw(st.booleans()),
    }


def _gradients_of_qadam(
    draw: Draw, weights: list[Tensor], ranks: int, steps: int, options: dict[str, Any]
) -> ByRank:
    """Return gradients that add up exactly in the warm-up, where some may be 0, and others
    afterwards.
    """
    exact, warmup_steps = exact_gradients(draw, weights, ranks, steps), options["warmup_steps"]
    late = draw(st.sampled_from([None, 1, 2, 3]))
    for g in (g for mine in exact for step in mine for g in step.values() if late is not None):
        g.view(-1)[::late] = 0  # so v stays 0, and later gradients make m of it
    own = any_gradients(draw, weights, ranks, steps)
    return [
        mine[:warmup_steps] + others[warmup_steps:] for mine, others in zip(exact, own, strict=True)
    ]


def follow_qadam(
    training: Training,
    exchange_of: Callable[[Training], plain.Exchange] = lambda training: plain.one_byte(
        True, training.leaders()
    ),
) -> None:
    """Take steps and expect qadam's weights; ``exchange_of`` returns that of a bucket's momenta, by
    default S5.2's.
    """
    groups, warmup_steps = training.options["groups"], training.options["warmup_steps"]
    exchanges = [(bucket, exchange_of(training)) for bucket in training.layout()]
    model = plain.QAdam(training.start, groups, warmup_steps, exchanges, training.dtypes[0])
    # S1 leaves it to optimizers how they round, in Adam's steps all take torch's. Weights have no
    # say in the momenta.
    rounded, before = [np.zeros(w.size) for w in training.start], training.start
    for step in range(training.steps):
        model.step(training.gradients(step))
        after = list(model.weights)
        if step + 1 >= warmup_steps:
            rounded = [
                mass + np.abs(old) + np.abs(new - old)
                for mass, old, new in zip(rounded, before, after, strict=True)
            ]
        before = after
        mass = [*map(torch.from_numpy, rounded)]
        training.step([after] * training.n, SUM(4), mass)


QADAM = TrainedAlgorithm(
    "qadam",
    _options_of_qadam,
    follow_qadam,
    gradients=_gradients_of_qadam,
    steps=lambda draw, options: 6,
)


@check("S5.5", "steps", dtypes=COMPRESSIBLE, needs=("qadam",), effort=0.25)
def steps_of_qadam(lab: Lab, draw: Draw) -> None:
    """Steps are Adam's up to warmup_steps; later ones use momenta in bytes, bit for bit, and move
    nothing whose frozen v is 0.
    """
    QADAM.train(lab, draw)
