"""SparseLoCo and DeMo, bit for bit; with the cosine transform, round by round (S15)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import COMPRESSIBLE, Draw, worlds
from bagua_ref.conformance.cases.training_cases import (
    PLAIN,
    any_kind,
    any_weights,
    outer_optimizer,
    outer_optimizers,
    schedules,
    tame,
)
from bagua_ref.conformance.checks.algorithms_compressed import TOPK, ties
from bagua_ref.conformance.checks.algorithms_local import (
    DILOCO,
    follow_model,
    refuse,
    steps_of_fragments,
)
from bagua_ref.conformance.checks.algorithms_powersgd import memories_before
from bagua_ref.conformance.checks.registry import trains
from bagua_ref.conformance.expected.chunked_numpy import (
    Round,
    SparseDiLoCo,
    chunks,
    cosine,
    sparse_round,
)
from bagua_ref.conformance.expected.kernels_numpy import Array, added, stored
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import LOST, SHOWS_GRADIENTS, TrainedAlgorithm, Training

Given = dict[str, Any]

_SHAPE = st.sampled_from(
    [(67,), (6, 7), (130,), (65, 3), (), (0,), (3, 0), (2, 3, 4), (2, 4, 6, 5), (1, 96)]
)
_SPARSE = {
    "lr": 1.0,
    "warmup_steps": 0,
    "top_k": st.sampled_from([1, 2, 3, 7, 32]),
    "chunk": st.sampled_from([1, 2, 3, 4, 64]),
    "mean": st.sampled_from(["all", "contributors"]),
    "compression": st.sampled_from([None, "Stat2", "Stat2", "MinMaxUInt8"]),
}
"""Options of both algorithms."""


# SparseLoCo.


def _options_of_sparseloco(draw: Draw, weights: list[Tensor], **limits: Any) -> Given:
    drawn = {**_SPARSE, **schedules(draw, len(weights), **limits), "momentum": 0.0, "mix": 0.0}
    drawn["outer_optimizer"] = outer_optimizers | st.none()
    return {**drawn, "error_decay": st.sampled_from([0.95, 0.95, 0.5, 1.0, 0.0])}


def _follow_sparseloco(training: Training) -> SparseDiLoCo:
    """Compare a training with the model of S15.5; return the model of all ranks."""
    options, weights = training.options, training.weights
    training.exact = training.exact or not options["warmup_steps"]
    named = {name: options[name] for name in ("top_k", "chunk", "mean", "compression")}
    orders = [
        training.ravel(place, torch.arange(w.numel()).view(w.shape))
        for place, w in enumerate(weights)
    ]
    make = partial(
        SparseDiLoCo,
        shapes=[tuple(w.shape) for w in weights],
        orders=[order.astype(int) for order in orders],
        sparse={**named, "decay": options["error_decay"]},
    )
    outer = outer_optimizer(options["outer_optimizer"] or PLAIN)
    model: SparseDiLoCo = follow_model(training, make, outer)
    return model


SPARSELOCO = TrainedAlgorithm(
    "diloco",
    _options_of_sparseloco,
    _follow_sparseloco,
    weights=partial(any_weights, most=3),
    kinds=tame,
    steps=steps_of_fragments,
)


@trains(SPARSELOCO, "S15.3.messages", 0.3)
def messages(lab: Lab) -> Given:
    """Each fragment is one all-gather of bytes: of its tensors in order, the indices of 12 bits, and
    the values.
    """
    wanted: list[list[bytes]] = []

    def judge(training: Training) -> None:
        sent = [sends for what, sends in lab.messages if what == "allgather()"]
        sent = [[*x] for x in sent if x[0].dtype is torch.uint8 and x[0].numel()]
        expected = [
            [torch.tensor([*data], dtype=torch.uint8) for data in ranks]
            for ranks in wanted
            if ranks[0]
        ]
        lab.assert_equal(sent, expected, where="all-gathers, by rank: sent")

    return {
        "nodes": st.sampled_from([(2,), (1, 1), (2, 1)]),
        "follow": lambda training: wanted.extend(_follow_sparseloco(training).messages),
        "looks": ("memories",),  # waits for the fragments in flight
        "record": True,
        "judge": judge,
    }


trains(SPARSELOCO, "S15.1.chunks", 0.35)(
    {
        "shapes": st.lists(_SHAPE, min_size=3, max_size=3),
        "nodes": worlds(2),
        "chunk": st.integers(1, 64),
    },
    "Chunks are blocks whose sides are the largest divisors up to chunk of a tensor's last two"
    " dimensions, whatever its strides.",
)
trains(SPARSELOCO, "S15.5.rounds", 0.2, COMPRESSIBLE)(
    {"looks": ("memories",)},
    "Each fragment's error memory decays, the difference is added, and what was sent leaves it.",
)
trains(SPARSELOCO, "S15.5.not_finite", 0.25, of=refuse)(
    {"compression": "Stat2"},
    "Where differences of one rank overflow, the step raises an error on every rank, and the"
    " fragment and its error memories stay as they were.",
)
trains(SPARSELOCO, "S15.5.plain", 0.2, COMPRESSIBLE)(
    {
        "top_k": 4096,
        "compression": None,
        "mean": "all",
        "follow": DILOCO.follow,
        "exact": True,
        "outer_optimizer": outer_optimizers,
        "mix": st.sampled_from([0.0, 0.3, 0.7]),
    },
    "With every element of each chunk selected and no codec, it is diloco, bit for bit.",
)


# DeMo.


def _round(training: Training, step: int, place: int, errors: list[Array], **other: Any) -> Round:
    names = ("top_k", "chunk", "decay", "mean", "compression", "transform", "sign")
    given = [x.numpy().ravel() for x in training.tensors(step, place)]
    shape = tuple(training.weights[place].shape)
    options = {name: training.options[name] for name in names} | other
    return sparse_round(given, errors, shape, **options)


def _shaped(training: Training, place: int, found: Array) -> Tensor:
    """Return an array of row-major numbers as a tensor with a parameter's shape and dtype."""
    w = training.weights[place]
    return torch.from_numpy(stored(found, training.dtypes[place]).copy()).view(w.shape).to(w.dtype)


def _follow_demo(training: Training) -> None:
    weights, n = training.weights, training.n
    errors = [[np.zeros(w.numel(), np.float32)] * n for w in weights]
    for step in range(training.steps):
        if training.before.get(step) == LOST:
            errors = [[np.zeros(w.numel(), np.float32)] * n for w in weights]
        results = [training.mean(step, place) for place in range(len(weights))]
        if step >= training.options["warmup_steps"]:
            rounds = [_round(training, step, place, mine) for place, mine in enumerate(errors)]
            errors = [each.errors for each in rounds]
            results = [_shaped(training, place, each.result) for place, each in enumerate(rounds)]
        training.step([results] * n)
        memories = [
            [torch.from_numpy(e).view(w.shape) for e in mine]
            for mine, w in zip(errors, weights, strict=True)
        ]
        training.look("memories", [*zip(*memories, strict=True)])


DEMO = TrainedAlgorithm(
    "demo",
    {
        **_SPARSE,
        **SHOWS_GRADIENTS,
        "decay": st.sampled_from([0.999, 0.5, 1.0, 0.0]),
        "transform": None,
        "sign": st.booleans(),
    },
    _follow_demo,
    kinds=any_kind,
    steps=lambda options: options["warmup_steps"] + 3,
)

trains(DEMO, "S15.2.ties", 0.25)(
    lambda lab: {**ties(lab), "sign": False},
    "Of equal absolute values in a chunk, those of lower row-major index are sent.",
)
trains(DEMO, "S15.3.stat2", 0.35)(
    {
        "kinds": ("huge", "edges", "tiny", "halfway", "bits", "constant", "grid"),
        "compression": "Stat2",
        "sign": False,
        "top_k": 9,
    },
    "Stat2 decodes to three levels from exact sums, 0 stays 0, and what overflows makes the tensor"
    " NaN.",
)
trains(DEMO, "S15.4.contributors", 0.25)(
    {"kinds": ("grid", "sparse", "ties"), "mean": "contributors", "sign": False},
    "Each element is divided by the number of ranks whose decoded value is not 0.",
)
trains(DEMO, "S15.6.rounds", 0.2, COMPRESSIBLE)(
    {"kinds": (*any_kind, "tiny", "huge")},
    "M decays, the gradient is added, the largest elements of each chunk are averaged, or their"
    " signs applied, and leave M.",
)


def _look(training: Training) -> None:
    for _ in range(training.steps):
        training.step()
        training.look("memories")


@np.errstate(all="ignore")
def _judge_cosine(training: Training) -> None:
    options, equal = training.options, list[Tensor]()
    for step, (place, w) in itertools.product(range(training.steps), enumerate(training.weights)):
        cells, sides = chunks(tuple(w.shape), options["chunk"])
        errors = [e.numpy().ravel() for e in memories_before(training, step, place)]
        given = [x.numpy().ravel() for x in training.tensors(step, place)]
        inputs = [np.float32(options["decay"]) * e + g for e, g in zip(errors, given, strict=True)]
        finite = [x for x in inputs if np.isfinite(x).all()]
        clear = (_is_clear(cosine(x, cells, sides), cells, options["top_k"]) for x in finite)
        if len(finite) == len(inputs) and not all(clear):
            continue
        expected = _round(training, step, place, errors)
        result = _shaped(training, place, expected.result)
        if options["sign"]:  # of which rounding decides where the mean is small
            x = np.abs(_round(training, step, place, errors, sign=False).result)
            small = np.zeros(x.shape, bool)
            small[cells] = x[cells] < 2.0**-20 * x[cells].max(axis=1, keepdims=True, initial=0)
            seen = training.seen("step", 0, step, place)
            result = torch.where(torch.from_numpy(small).view(w.shape), seen, result)
        size = max([float(np.abs(x).max()) for x in finite if x.size] + [1e-30])
        left = [torch.from_numpy(e).view(w.shape) for e in expected.errors]
        training.expect_seen("step", step, place, result, SUM(4096), size)
        training.expect_seen("memories", step, place, left, SUM(4096), size)
        for rank, e in enumerate(left):
            equal.append((training.seen("memories", rank, step, place) == e).flatten())
    # sums in float64 that are rounded once are nearly always the same; those in float32 are not
    same = torch.cat([*equal, torch.ones(1, dtype=torch.bool)]).double().mean().item()
    training.lab.assert_that(same > 0.9, f"only {same:.0%} of M are as in float64, rounded once")


def _is_clear(y: Array, cells: Array, k: int) -> bool:
    """Return whether the k largest elements of each chunk are unambiguous despite rounding."""
    if k >= cells.shape[1]:
        return True
    largest = np.sort(np.abs(y[cells]), axis=1)[:, ::-1]
    return bool((largest[:, k - 1] - largest[:, k] > 2e-6 * largest[:, 0]).all())


WITH_COSINE = {
    "kinds": ("tame", "near"),
    "follow": _look,
    "judge": _judge_cosine,
    "transform": "dct",
    "compression": None,
    "chunk": st.sampled_from([4, 7, 64]),
}
"""A training on coefficients of the cosine transform."""

trains(DEMO, "S15.6.cosine", 0.2, COMPRESSIBLE)(
    {
        **WITH_COSINE,
        "nodes": worlds(3),
        "shapes": st.lists(_SHAPE, min_size=2, max_size=2),
    },
    "The largest coefficients of each chunk's discrete cosine transform, of decay*M + g, are"
    " averaged, and leave M.",
)


# Identities.

_PLAIN_SUM = {"transform": None, "sign": False, "mean": "all", "compression": None}


def _like_allreduce(training: Training) -> None:
    for step in range(training.steps):
        results = []
        for place in range(len(training.weights)):
            x = [g.numpy().ravel() for g in training.tensors(step, place)]
            results.append(_shaped(training, place, added(x) / np.float32(training.n)))
        training.step([results] * training.n)
        none = [torch.zeros(w.shape) for w in training.weights]
        training.look("memories", [none] * training.n)


def _like_topk(training: Training) -> None:
    options, m = training.options, training.weights[0].numel()
    ratio = (min(options["top_k"], m) - 0.5) / m
    training.options = {**options, "ratio": ratio, "error_feedback": True}
    TOPK.follow(training)
    training.options = options


trains(DEMO, "S15.6.averaged_gradients", 0.2, COMPRESSIBLE)(
    {**_PLAIN_SUM, "top_k": 4096, "follow": _like_allreduce},
    "Without a transform and signs, and with every element selected, gradients are averaged in rank"
    " order, and M is 0.",
)
trains(DEMO, "S15.6.topk", 0.2, COMPRESSIBLE)(
    {
        **_PLAIN_SUM,
        "follow": _like_topk,
        "decay": 1.0,
        "chunk": 64,
        "weights": lambda draw, dtype: [
            torch.zeros(draw(st.sampled_from([(7,), (5, 9), (64,)])), dtype=dtype)
        ],
    },
    "Without a transform, decay and signs, a bucket of one chunk is topk's, bit for bit.",
)
