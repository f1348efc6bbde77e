"""Whole trainings compared with plain loops over all ranks (S2, S5.1 to S5.5, S13).

`algorithms_async` has S5.6, `algorithms_local` S9, `algorithms_powersgd` S10,
`algorithms_compressed` S11, and `algorithms_properties` the properties shared by all algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import (
    COMPRESSIBLE,
    FLOATS,
    Draw,
    dtype_named,
    paired_worlds,
    worlds,
)
from bagua_ref.conformance.cases.training_cases import (
    ONE_BUCKET,
    any_kind,
    each_gradient,
    graph_cases,
    grid_weights,
    not_finite_in_places,
)
from bagua_ref.conformance.checks.registry import check, trains
from bagua_ref.conformance.expected import algorithms_numpy as plain
from bagua_ref.conformance.expected import decentralized_numpy
from bagua_ref.conformance.expected.codecs_scalar import MINMAX
from bagua_ref.conformance.expected.kernels_numpy import Array
from bagua_ref.conformance.expected.tolerances import EXACT, SUM
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import TrainedAlgorithm, Training

Given = dict[str, Any]
"""Arguments of a training."""


def prepare() -> None:
    """Import the modules that torch imports with the first optimizer, which takes a second."""
    torch.optim.SGD([torch.zeros(1)], lr=1.0)


# Codecs.

_EXACT = (MINMAX, "MXFP8", "MXFP4", "MXINT8", "NVFP4")
"""Codecs whose payloads are specified bit by bit; OneBit's scale may differ by an ulp."""


def any_codec(lab: Lab, *preferred: str) -> st.SearchStrategy[str]:
    """Draw one of the preferred codecs that the target has, else one with payloads specified bit by
    bit.

    A target has the codecs of its kernels, or those in the attribute ``codecs`` of its own
    algorithms.
    """
    own = lab.target.parts.get("algorithms")
    known = lab.target.kernels.codecs if own is None else getattr(own, "codecs", (MINMAX,))
    return st.sampled_from(
        [c for c in preferred if c in known] or [c for c in _EXACT if c in known]
    )


# Gradients.


def _options_of_gradients(draw: Draw, weights: list[Tensor]) -> Given:
    rates = [1.0, 0.5] if all(w.dtype.itemsize > 2 for w in weights) else [1.0]
    return {
        "lr": st.sampled_from(rates),
        "hierarchical": st.booleans(),
        "average": st.booleans(),
    }


def _follow_gradients(training: Training) -> None:
    average, leaders, n = training.options["average"], training.leaders(), training.n
    exchange, tolerance = plain.full_precision(average), EXACT
    if training.method == "bytegrad":
        exchange = plain.one_byte(average, leaders)
    elif leaders and average:
        # n/L may not be a float32 number; then the leaders' inputs are not exact
        tolerance = SUM(2 * (n + 2) * training.steps)

    def train(start: Array, gradients: list[list[Array]], dtype: str) -> list[list[Array]]:
        lr = training.options["lr"]
        history = plain.train_on_gradients(start, gradients, lr, dtype, exchange)
        return [[weights] * n for weights in history]

    for expected in training.of_buckets(train):
        training.step(expected, tolerance)


GRADIENT_ALLREDUCE = TrainedAlgorithm(
    "gradient_allreduce",
    _options_of_gradients,
    _follow_gradients,
    nodes=worlds(5) | st.sampled_from([(6,), (7,), (4, 5)]),
    steps=st.integers(1, 3),
)
BYTEGRAD = replace(
    GRADIENT_ALLREDUCE,
    method="bytegrad",
    nodes=worlds(7) | st.sampled_from([(2, 1), (1, 3), (2, 2), (2, 1, 2)]),
    kinds=any_kind,
)


@check("algorithms.S5.1.gradients", dtypes=FLOATS, needs=("gradient_allreduce",), effort=0.2)
def gradients(lab: Lab) -> None:
    """Every rank updates its weights with the sum or mean of all ranks' gradients."""
    if lab.flag():
        GRADIENT_ALLREDUCE.train(lab)
    else:
        GRADIENT_ALLREDUCE.train(lab, change=not_finite_in_places(lab.draw), steps=1)
    if "algorithms" not in lab.target.parts:  # only here do the package's own call a kernel
        GRADIENT_ALLREDUCE.train(lab, hierarchical=True, average=True)


trains(BYTEGRAD, "S5.2.gradients", 0.2, COMPRESSIBLE)(
    {"hierarchical": st.sampled_from([True, True, False])},
    "Every rank updates its weights with gradients sent as one byte per element, bit for bit.",
)


@trains(BYTEGRAD, "S2.1.buckets", 0.45)
def buckets(lab: Lab) -> Given:
    """Parameters fill buckets in reverse order, by dtype; a bucket is closed once it holds at least
    the bucket size.
    """
    used = lab.draw(st.lists(st.sampled_from(lab.dtypes(COMPRESSIBLE)), min_size=1, max_size=2))
    dtypes = lab.draw(st.lists(st.sampled_from(used), min_size=3, max_size=6))
    weights = grid_weights(lab.draw, [*map(dtype_named, dtypes)])
    of_one = [w.nbytes for w in reversed(weights) if w.dtype is weights[-1].dtype]
    # a bucket of these parameters is exactly full
    filled = sum(of_one[: lab.integer(1, len(of_one))])
    sizes = [filled, filled, filled + 1, max(1, filled - 1), max(1, filled - 1), 40, ONE_BUCKET]
    return {
        "nodes": worlds(3),
        "weights": weights,
        "steps": 2,
        "hierarchical": False,
        "average": True,
        "bucket_bytes": st.sampled_from(sizes).map(lambda size: max(1, size)),
    }


@check("algorithms.S2.1.order", needs=("buckets",), effort=0.35)
def order_of_buckets(lab: Lab) -> None:
    """Buckets come by dtype, bf16, f16, f32, f64, and parameters in reverse order; one that has the
    bucket size is closed.
    """
    used = lab.draw(st.lists(st.sampled_from(lab.dtypes(FLOATS)), min_size=2, max_size=8))
    weights = [torch.zeros(lab.integer(1, 7), dtype=dtype_named(name)) for name in used]
    size = lab.choice([1, 16, 24, 40, ONE_BUCKET])
    nodes = lab.choice([(1,), (2,)])
    given = {"weights": [weights] * sum(nodes)}
    options = {"bucket_bytes": size}
    results = lab.on_ranks("algorithms", "buckets", nodes, given, options)
    wanted = plain.buckets([w.numel() for w in weights], used, size)
    lab.assert_equal(results, [wanted] * sum(nodes))


@trains(BYTEGRAD, "S2.2.padding", 0.1, COMPRESSIBLE)
def padding(lab: Lab) -> Given:
    """Padding is zero at every step and belongs to the last chunk."""
    nodes = lab.draw(worlds(5).filter(lambda nodes: sum(nodes) > 1))
    size = lab.draw(st.integers(1, 30).filter(lambda size: size % sum(nodes) != 0))
    return {
        "nodes": nodes,
        "shapes": [(size - size // 2,), (size // 2,)],
        # so that zeros beside them matter
        "change": each_gradient(lambda g: g.abs() / 8 + 1),
        "steps": 2,
        "bucket_bytes": ONE_BUCKET,
    }


# Weights.


def _follow_weights(training: Training, how: str = "step") -> None:
    options, leaders, n = training.options, training.leaders(), training.n
    mode = options.get("peer_selection_mode")

    def train(start: Array, gradients: list[list[Array]], dtype: str) -> list[list[Array]]:
        interval, codec = options["communication_interval"], options.get("compression", MINMAX)
        return decentralized_numpy.train_decentralized(
            start, gradients, 1.0, dtype, leaders, mode, interval, codec
        )

    history = training.of_buckets(train)
    if how == "slow step":  # returns the weights after its forward: those of the previous step
        history = [[training.start] * n, *history[:-1]]
    for step, expected in enumerate(history):
        # Each mean may be rounded in another order, and the difference stays in the weights.
        tolerance = SUM((step + 1) * (n + 2)) if mode == "all" else EXACT
        training.step(expected, tolerance, how)


_ON_WEIGHTS = {
    "lr": 1.0,
    "hierarchical": st.booleans(),
    "communication_interval": st.integers(1, 3),
}
DECENTRALIZED = TrainedAlgorithm(
    "decentralized",
    {**_ON_WEIGHTS, "peer_selection_mode": "all"},
    _follow_weights,
    nodes=worlds(5),
    kinds=any_kind,
    steps=st.integers(2, 6),
)
RING = replace(DECENTRALIZED, method="low_precision_decentralized", options=_ON_WEIGHTS)
_FORWARDS = replace(
    DECENTRALIZED, follow=partial(_follow_weights, how="slow step"), steps=st.integers(2, 4)
)


def _two_pairs(between: bool) -> st.SearchStrategy[tuple[int, ...]]:
    """Worlds in which consecutive steps have different peers."""
    return st.sampled_from([(1, 1, 1, 1), (2, 1, 1, 1)] if between else [(4,), (3, 1)])


def _in_pairs(lab: Lab, most: int = 6) -> Given:
    between = lab.flag()
    return {
        "nodes": _two_pairs(between) | paired_worlds(between, most),
        "hierarchical": between,
        "peer_selection_mode": "shift_one",
    }


trains(DECENTRALIZED, "S5.3.shift_one", 0.15, FLOATS)(
    _in_pairs,
    "At steps divisible by the interval, weights are averaged with the next peer; then each rank"
    " applies its own gradient.",
)
trains(_FORWARDS, "S5.3.in_forward", 0.1, FLOATS)(
    partial(_in_pairs, most=4),
    "While weights are averaged in the background, forward and backward use the old ones: they are"
    " replaced after the backward.",
)
trains(DECENTRALIZED, "S5.3.all", 0.15, FLOATS)(
    {},
    "At steps divisible by the interval, weights are averaged over all ranks; then each rank"
    " applies its own gradient.",
)


@trains(DECENTRALIZED, "S13.5.interval", 0.1, FLOATS)
def interval_on_graphs(lab: Lab) -> Given:
    """At steps divisible by the interval, weights are averaged along the next graph; then each rank
    applies its own gradient.
    """
    graph, nodes, between = lab.draw(graph_cases(6, changing=lab.flag()))
    return {"nodes": nodes, "peer_selection_mode": graph, "hierarchical": between}


@trains(RING, "S5.4.ring", 0.2, COMPRESSIBLE)
def ring(lab: Lab) -> Given:
    """After optimizer steps divisible by the interval, weights are averaged on the ring, bucket by
    bucket, bit for bit.
    """
    codec = lab.draw(any_codec(lab))
    return {"steps": st.integers(1, 5), **({} if codec == MINMAX else {"compression": codec})}


@trains(DECENTRALIZED, "S5.3.several_dtypes", 0.25)
def several_dtypes(lab: Lab) -> Given:
    """Weights of each dtype are averaged in every round, all with the same peer."""
    used = lab.draw(st.permutations(lab.dtypes(FLOATS)))[:2]
    names = [*used, *lab.draw(st.lists(st.sampled_from(used), max_size=2))]
    return {
        "nodes": _two_pairs(False),
        "weights": grid_weights(lab.draw, [*map(dtype_named, names)]),
        "hierarchical": False,
        "peer_selection_mode": "shift_one",
    }


# QAdam.

_groups = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.01, 0.3]),
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.8, 0.99), (0.0, 0.5)]),
        "eps": st.sampled_from([1e-8, 1e-3, 0.5]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
    }
)


def _options_of_qadam(draw: Draw, weights: list[Tensor]) -> Given:
    return {
        "groups": [draw(_groups) for _ in weights],
        "warmup_steps": st.integers(2, 5),
        "hierarchical": st.booleans(),
    }


def follow_qadam(
    training: Training,
    exchange_of: Callable[[Training], plain.Exchange] = lambda training: plain.one_byte(
        True, training.leaders()
    ),
) -> None:
    """Take steps and expect qadam's weights; ``exchange_of`` returns the exchange of a bucket's
    momenta, by default that of S5.2.
    """
    groups, warmup_steps = training.options["groups"], training.options["warmup_steps"]
    exchanges = [(bucket, exchange_of(training)) for bucket in training.layout()]
    model = plain.QAdam(training.start, groups, warmup_steps, exchanges, training.dtypes[0])
    for step in range(training.steps):
        model.step(training.gradients(step))
        # S1 leaves it to optimizers how they round, in Adam's steps all take torch's. Weights have
        # no say in the momenta.
        late = step + 1 - warmup_steps
        tolerance = SUM(4 * (late + 1)) if late >= 0 else EXACT
        training.step([list(model.weights)] * training.n, tolerance)


QADAM = TrainedAlgorithm("qadam", _options_of_qadam, follow_qadam, kinds=any_kind, steps=6)


@trains(QADAM, "S5.5.steps", 0.2, COMPRESSIBLE)
def steps_of_qadam(lab: Lab) -> Given:
    """Steps are Adam's up to warmup_steps; later ones use momenta in bytes, bit for bit, and do not
    move weights whose frozen v is 0.
    """
    some, warmup_steps = lab.choice([None, 1, 2, 3]), lab.integer(2, 5)
    size = lab.choice([1.0, 1.0, 2.0**-13])  # whose square, and so v, is 0 in float16

    def zero(gradients: Any) -> Any:
        """Zero some elements during the warm-up: their v stays 0, and only m changes later."""
        for g in (g for rank in gradients for given in rank[:warmup_steps] for g in given.values()):
            g.mul_(size)
            if some is not None:
                g.view(-1)[::some] = 0
        return gradients

    return {"warmup_steps": warmup_steps, "change": zero}
