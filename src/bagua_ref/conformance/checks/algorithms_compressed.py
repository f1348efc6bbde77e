"""Error memory of bytegrad and qadam, round by round (S11.1), and top-k, bit for bit (S11.2)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import COMPRESSIBLE, Draw, seeds, worlds
from bagua_ref.conformance.cases.training_cases import (
    ONE_BUCKET,
    ByRank,
    any_kind,
    each_gradient,
    grid_weights,
    multi_rank_worlds,
    poisoned_at,
)
from bagua_ref.conformance.checks.algorithms import QADAM, follow_qadam
from bagua_ref.conformance.checks.registry import check, check_trainings, nothing
from bagua_ref.conformance.expected.algorithms_numpy import Exchange
from bagua_ref.conformance.expected.compression_numpy import (
    ErrorFeedback,
    kept,
    sent_count,
    topk_round,
)
from bagua_ref.conformance.expected.kernels_numpy import Array
from bagua_ref.conformance.expected.tolerances import EXACT, SUM
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import (
    ANYTHING,
    SHOWS_GRADIENTS,
    TrainedAlgorithm,
    Training,
    of_kinds,
)

__all__ = ["TOPK"]

# Error memory.

_MEMORY = ("bytegrad",)
_FEEDBACK = {"error_feedback": True}
_EXACT = ("MinMaxUInt8", "MXFP8", "MXFP4", "MXINT8", "NVFP4")
"""Codecs whose payloads are known to the bit; OneBit's scale may differ by an ulp."""
_nodes = st.sampled_from([(2,), (3,), (2, 1), (1, 3), (2, 2), (1,), (2, 1, 2), (1, 1)])


def _codec(lab: Lab, draw: Draw, *preferred: str) -> str:
    """Draw one of the preferred codecs that the target has, else of all whose payloads are known to
    the bit.

    It has the codecs of its kernels, or those that its own algorithms say that they have in
    ``codecs``.
    """
    own = lab.target.parts.get("algorithms")
    known = lab.target.kernels.codecs if own is None else getattr(own, "codecs", ("MinMaxUInt8",))
    found: str = draw(
        st.sampled_from([c for c in preferred if c in known] or [c for c in _EXACT if c in known])
    )
    return found


def _options(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    flags = {name: draw(st.booleans()) for name in ("hierarchical", "average")}
    return {"lr": 0.5, **flags, "compression": "MinMaxUInt8", **_FEEDBACK, **SHOWS_GRADIENTS}


def _memory_of(training: Training, dtype: str) -> ErrorFeedback:
    options = training.options
    return ErrorFeedback(
        training.leaders(), options["compression"], dtype, options.get("average", True)
    )


def _follow(training: Training) -> None:
    def average(start: Array, gradients: list[list[Array]], dtype: str) -> list[list[Array]]:
        memory = _memory_of(training, dtype)
        return [[memory.round(ranks)] * training.n for ranks in gradients]

    tolerance = SUM(16) if training.options["compression"] == "OneBit" else EXACT
    for results in training.of_buckets(training.layout(), average):
        training.step(results, tolerance)


_BYTEGRAD_WITH_MEMORY = TrainedAlgorithm(
    "bytegrad",
    _options,
    _follow,
    worlds=lambda dtype: _nodes,
    gradients=of_kinds(any_kind),
    steps=lambda draw, options: 3,
)


@check("S11.1", "padding", needs=_MEMORY, effort=0.4)
def padding(lab: Lab, draw: Draw) -> None:
    """Padding is data to the codec, but nothing is remembered of it: neither what a rank sends nor
    of the result.
    """
    nodes = draw(st.sampled_from([(2,), (3,), (5,), (2, 1)]))
    size = draw(st.integers(1, 12).filter(lambda size: size % sum(nodes) != 0))
    _BYTEGRAD_WITH_MEMORY.train(
        lab,
        draw,
        nodes=nodes,
        weights=grid_weights(draw, [torch.float32], [(size,)]),
        gradients=of_kinds(st.just("tame")),
        compression=_codec(lab, draw, "OneBit"),
        bucket_bytes=ONE_BUCKET,
    )


@check("S11.1", "not_finite", dtypes=COMPRESSIBLE, needs=_MEMORY, effort=0.2)
def not_finite(lab: Lab, draw: Draw) -> None:
    """Where a result is NaN, memories of every rank stay as they were before the round; elsewhere
    they are replaced.
    """
    weights, poisoned = (
        grid_weights(draw, [lab.dtype], [(13,)]),
        poisoned_at(draw, draw(st.integers(0, 1))),
    )
    _BYTEGRAD_WITH_MEMORY.train(
        lab,
        draw,
        weights=weights,
        change=poisoned,
        gradients=of_kinds(st.just("tame")),
        steps=4,
        compression=_codec(lab, draw, "MinMaxUInt8"),
        bucket_bytes=ONE_BUCKET,
    )


def _with_memory(training: Training) -> Exchange:
    memory = _memory_of(training, training.dtypes[0])
    return lambda ranks, dtype: memory.round(ranks)


_QADAM_WITH_MEMORY = replace(
    QADAM,
    options=lambda draw, weights: {**QADAM.options(draw, weights), **_FEEDBACK},
    follow=partial(follow_qadam, exchange_of=_with_memory),
)


# Top-k.

_TOPK = ("topk",)


def _options_of_topk(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    feedback = draw(st.sampled_from([True, True, False]))
    return {
        "lr": 0.5,
        "ratio": draw(st.sampled_from([0.01, 0.1, 0.3, 0.5, 1.0])),
        "error_feedback": feedback,
        "warmup_steps": 0,
        **SHOWS_GRADIENTS,
    }


def _layout(training: Training) -> list[list[int]]:
    """Return the places of the parameters in each bucket that has elements."""
    return [
        bucket
        for bucket in training.layout()
        if sum(training.weights[place].numel() for place in bucket)
    ]


def _follow_topk(training: Training) -> None:
    layout, options = _layout(training), training.options
    errors: list[list[Any] | None] = [None] * len(layout)
    for step in range(training.steps):
        results: list[list[Any]] = [[ANYTHING] * len(training.weights) for _ in range(training.n)]
        memories: list[list[Any]] = [[ANYTHING] * len(training.weights) for _ in range(training.n)]
        if step < options["warmup_steps"]:
            results = [
                [training.mean(step, place) for place in range(len(training.weights))]
            ] * training.n
        for number, bucket in enumerate(layout if step >= options["warmup_steps"] else []):
            given = training.flat(step, bucket)
            if options["error_feedback"] and errors[number] is None:
                errors[number] = [np.zeros_like(x) for x in given]
            result, left = topk_round(
                given, errors[number], options["ratio"], training.dtypes[bucket[0]]
            )
            errors[number] = left
            for rank in range(training.n):
                kept_here = (
                    dict.fromkeys(bucket) if left is None else training.by_place(left[rank], bucket)
                )
                for place, mine in training.by_place(result, bucket).items():
                    results[rank][place], memories[rank][place] = mine, kept_here[place]
        training.step(results)
        training.look("memories", memories)


TOPK = TrainedAlgorithm(
    "topk",
    _options_of_topk,
    _follow_topk,
    gradients=of_kinds(any_kind),
    steps=lambda draw, options: options["warmup_steps"] + 3,
)


@check("S11.2", "count", needs=_TOPK, effort=0.7)
def count(lab: Lab, draw: Draw) -> None:
    """Of each bucket of m elements max(1, ceil(ratio * m)) are sent, the product in float64;
    padding does not count.
    """
    m = draw(st.sampled_from([100, 100, 100, 7, 1, 30, 33]))
    ratio = draw(
        st.sampled_from([0.07, 0.14, 0.28, 0.29, 0.55, 0.57, 0.01, 1e-9, 1.0]) | st.floats(0.01, 1)
    )
    weights, nodes = (
        grid_weights(draw, [torch.float32] * 2, [(m,), (3,)]),
        draw(st.sampled_from([(1,), (2,), (3,)])),
    )
    TOPK.train(
        lab,
        draw,
        nodes=nodes,
        weights=weights,
        gradients=of_kinds(st.just("tame")),
        steps=2,
        ratio=ratio,
    )


@check("S11.2", "ties", needs=_TOPK, effort=0.4)
def ties(lab: Lab, draw: Draw) -> None:
    """Of equal absolute values, those of lower index in the bucket are sent."""
    generator = np.random.default_rng(draw(seeds))

    def signs(g: Tensor) -> Tensor:
        return torch.from_numpy(generator.choice([-2.0, -1, 1, 2], tuple(g.shape))).float()

    TOPK.train(
        lab,
        draw,
        nodes=draw(worlds(3)),
        change=each_gradient(signs),
        steps=2,
        ratio=draw(st.floats(0.1, 0.9)),
    )


@check("S11.2", "nans", needs=_TOPK, effort=0.3)
def nans(lab: Lab, draw: Draw) -> None:
    """NaNs are equal whatever their other bits: of several, the one of lowest index is sent."""
    bits = st.sampled_from([0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -0x400000, -0x3FFFFF, -1])

    def poisoned(gradients: ByRank) -> ByRank:
        for rank in gradients:
            for place in sorted(draw(st.sets(st.integers(0, 6), min_size=2, max_size=4))):
                rank[0][0].view(torch.int32)[place] = draw(bits)
        return gradients

    TOPK.train(
        lab,
        draw,
        nodes=draw(st.sampled_from([(1,), (2,)])),
        weights=[torch.zeros(7)],
        change=poisoned,
        ratio=0.1,
        gradients=of_kinds(st.just("tame")),
        steps=1,
    )


@check("S11.2", "many", needs=_TOPK, effort=0.15)
def many(lab: Lab, draw: Draw) -> None:
    """Of many elements, too, exactly the largest are sent, however they are spread, and of equal
    ones those of lower index.
    """
    m, seed = draw(st.sampled_from([5000, 2**15 + 3, 2**17 + 3])), draw(seeds)
    levels = draw(st.sampled_from([3, 1000, 2**20]))

    def gradient(rank: int) -> Tensor:
        generator = np.random.default_rng([seed, rank])
        x = torch.from_numpy(generator.integers(-levels, levels, m)).float()
        for stride in (2, 4, 8, 16, 32, 64):  # larger, or not, where one in so many is looked at
            x[seed % 2 :: stride] *= 2
        x[seed % 2 :: 1 + seed % 64] *= 3
        return x

    TOPK.train(
        lab,
        draw,
        nodes=draw(st.sampled_from([(1,), (2,)])),
        weights=[torch.zeros(m)],
        gradients=lambda draw, weights, ranks, steps, options: [
            [{0: gradient(rank)}] for rank in range(ranks)
        ],
        ratio=draw(st.sampled_from([0.001, 0.01, 0.05])),
        bucket_bytes=ONE_BUCKET,
    )


@check("S11.2", "messages", needs=_TOPK, effort=0.4)
def messages(lab: Lab, draw: Draw) -> None:
    """Each rank all-gathers its k int32 indices, ascending, and then their k float32 values."""
    training = TOPK.train(lab, draw, nodes=draw(multi_rank_worlds), steps=2, record=True)
    wanted: list[list[Tensor]] = []
    for step, bucket in itertools.product(range(2), _layout(training)):
        sent = training.flat(step, bucket)
        if training.options["error_feedback"]:
            zeros = [torch.zeros_like(training.weights[place]) for place in bucket]
            known = [
                [training.seen("memories", rank, 0, p) for p in bucket] if step else zeros
                for rank in range(training.n)
            ]
            sent = [
                p + np.concatenate([*map(training.ravel, bucket, mine)])
                for p, mine in zip(sent, known, strict=True)
            ]
        places = [
            torch.tensor(kept(p, sent_count(p.size, training.options["ratio"])), dtype=torch.int32)
            for p in sent
        ]
        wanted += [
            places,
            [torch.from_numpy(p)[place.long()] for p, place in zip(sent, places, strict=True)],
        ]
    sent = [sends for what, sends in lab.messages if what == "allgather()" and sends[0].numel()]
    lab.assert_that(len(sent) == len(wanted), f"{len(sent)} all-gathers, not {len(wanted)}")
    for (number, all_ranks), rank in itertools.product(enumerate(wanted), range(training.n)):
        where = f"rank {rank}, {('indices', 'values')[number % 2]} in all-gather {number}"
        lab.assert_equal(sent[number][rank], all_ranks[rank], where=where)


# Trainings without a function of their own.

check_trainings(
    (
        TrainedAlgorithm.train,
        _BYTEGRAD_WITH_MEMORY,
        0.3,
        "S11.1.rounds",
        COMPRESSIBLE,
        lambda lab, draw: {"compression": _codec(lab, draw)},
        (
            "What compression has left out of a rank's gradients, and out of its chunk of the"
            " result, is added in the next round."
        ),
    ),
    (
        TrainedAlgorithm.train,
        _BYTEGRAD_WITH_MEMORY,
        0.3,
        "S11.1.leaders",
        (),
        lambda lab, draw: {
            "nodes": draw(st.sampled_from([(2, 1), (1, 3), (2, 2), (3,), (2, 1, 2)])),
            "hierarchical": True,
        },
        (
            "Hierarchical, memories are those of node leaders, of the node's sum divided by n/L,"
            " also on uneven nodes and on one."
        ),
    ),
    (
        TrainedAlgorithm.train,
        _BYTEGRAD_WITH_MEMORY,
        0.1,
        "S11.1.new_buckets",
        (),
        lambda lab, draw: {
            "steps": 4,
            "before": lambda steps: {1: "new buckets", 3: "restart"},
        },
        "Buckets of the same tensors find their memories again.",
    ),
    (
        TrainedAlgorithm.train,
        _QADAM_WITH_MEMORY,
        0.2,
        "S11.1.momenta",
        (),
        lambda lab, draw: {
            "nodes": draw(worlds(4)),
            "compression": _codec(lab, draw),
            "warmup_steps": 2,
        },
        (
            "After qadam's warm-up, what compression has left out of momenta is added to the next"
            " ones."
        ),
    ),
    (
        TrainedAlgorithm.train,
        TOPK,
        0.5,
        "S11.2.rounds",
        COMPRESSIBLE,
        nothing,
        (
            "Each round applies the sum of what was sent in rank order, divided by n; what was not"
            " sent is added next."
        ),
    ),
    (
        TrainedAlgorithm.train,
        TOPK,
        0.3,
        "S11.2.huge",
        COMPRESSIBLE,
        lambda *_: {
            "gradients": of_kinds(st.sampled_from(["huge", "edges", "tiny", "halfway", "bits"]))
        },
        (
            "Memories are float32 whatever the gradients are, sums overflow in rank order only, and"
            " results are rounded once."
        ),
    ),
)
