"""Error feedback of bytegrad and qadam, round by round (S11.1), and top-k, bit for bit (S11.2)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import COMPRESSIBLE, worlds
from bagua_ref.conformance.cases.training_cases import (
    ONE_BUCKET,
    ByRank,
    any_kind,
    each_gradient,
    multi_rank_worlds,
    poisoned_at,
)
from bagua_ref.conformance.checks.algorithms import QADAM, any_codec, follow_qadam
from bagua_ref.conformance.checks.algorithms_powersgd import memories_before
from bagua_ref.conformance.checks.registry import trains
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
    LOST,
    SHOWS_GRADIENTS,
    TrainedAlgorithm,
    Training,
)

Given = dict[str, Any]

# Error memory.


def _memory_of(training: Training, dtype: str) -> ErrorFeedback:
    options = training.options
    return ErrorFeedback(
        training.leaders(), options["compression"], dtype, options.get("average", True)
    )


def _follow(training: Training) -> None:
    def average(start: Array, gradients: list[list[Array]], dtype: str) -> list[list[Array]]:
        memory, results = _memory_of(training, dtype), list[list[Array]]()
        for step, ranks in enumerate(gradients):
            if training.before.get(step) == LOST:
                memory = _memory_of(training, dtype)
            results.append([memory.round(ranks)] * training.n)
        return results

    tolerance = SUM(16) if training.options["compression"] == "OneBit" else EXACT
    for results in training.of_buckets(average):
        training.step(results, tolerance)


_BYTEGRAD = TrainedAlgorithm(
    "bytegrad",
    {
        **SHOWS_GRADIENTS,
        "lr": 0.5,
        "error_feedback": True,
        "hierarchical": st.booleans(),
        "average": st.booleans(),
        "compression": "MinMaxUInt8",
    },
    _follow,
    nodes=st.sampled_from([(2,), (3,), (2, 1), (1, 3), (2, 2), (1,), (2, 1, 2), (1, 1)]),
    kinds=any_kind,
)


@trains(_BYTEGRAD, "S11.1.rounds", 0.2, COMPRESSIBLE)
def rounds(lab: Lab) -> Given:
    """The compression errors of a rank's gradients, and of its chunk of the result, are added in
    the next round.
    """
    kinds = lab.choice([any_kind, any_kind, ("huge", "huge", "tame")])
    return {"compression": any_codec(lab), "kinds": kinds}


@trains(_BYTEGRAD, "S11.1.padding", 0.3)
def padding(lab: Lab) -> Given:
    """Padding is data to the codec, but its error is not remembered: neither that of sent chunks
    nor that of the result.
    """
    nodes = lab.choice([(2,), (3,), (5,), (2, 1)])
    size = lab.draw(st.integers(1, 12).filter(lambda size: size % sum(nodes) != 0))
    return {
        "nodes": nodes,
        "shapes": [(size,)],
        "kinds": ("tame",),
        "compression": any_codec(lab, "OneBit"),
        "bucket_bytes": ONE_BUCKET,
    }


@trains(_BYTEGRAD, "S11.1.not_finite", 0.15, COMPRESSIBLE)
def not_finite(lab: Lab) -> Given:
    """Where a result is NaN, error memories of every rank stay as they were before the round;
    elsewhere they are replaced.
    """
    # a chunk has one block of MinMaxUInt8, and several of MXFP8
    codec, size = lab.choice([("MinMaxUInt8", 13), ("MXFP8", 200)])
    return {
        "shapes": [(size,)],
        "change": poisoned_at(lab.draw, lab.integer(0, 1)),
        "kinds": ("tame",),
        "steps": 4,
        "compression": any_codec(lab, codec),
        "bucket_bytes": ONE_BUCKET,
    }


trains(_BYTEGRAD, "S11.1.leaders", 0.25)(
    {
        "nodes": st.sampled_from([(2, 1), (1, 3), (2, 2), (3,), (2, 1, 2)]),
        "hierarchical": True,
    },
    "Hierarchical, memories are those of node leaders, of the node's sum divided by n/L, also on"
    " uneven nodes and on one.",
)


@trains(_BYTEGRAD, "S11.1.new_buckets", 0.15)
def new_buckets(lab: Lab) -> Given:
    """Buckets of the same tensors find their memories again."""
    last = lab.choice(["restart", LOST]) if lab.has_every_option else "restart"
    return {"steps": 4, "before": lambda steps: {1: "new buckets", 3: last}}


def _with_memory(training: Training) -> Exchange:
    memory = _memory_of(training, training.dtypes[0])
    return lambda ranks, dtype: memory.round(ranks)


_QADAM = replace(QADAM, follow=partial(follow_qadam, exchange_of=_with_memory))


@trains(_QADAM, "S11.1.momenta", 0.2)
def momenta(lab: Lab) -> Given:
    """After qadam's warm-up, the compression error of momenta is added to the next momenta."""
    return {
        "nodes": worlds(4),
        "compression": any_codec(lab),
        "error_feedback": True,
        "warmup_steps": 2,
        "before": lambda steps: lab.choice([{}, {1: "restart"}, {4: "restart"}]),
    }


# Top-k.


def _layout(training: Training) -> list[list[int]]:
    """Return the parameter indices of each non-empty bucket."""
    return [
        bucket
        for bucket in training.layout()
        if sum(training.weights[place].numel() for place in bucket)
    ]


def _follow_topk(training: Training) -> None:
    options, places = training.options, range(len(training.weights))
    warmup_steps = options["warmup_steps"]
    errors: dict[int, Any] = {}
    for step in range(training.steps):
        if training.before.get(step) == LOST:
            errors.clear()
        results: list[list[Any]] = [[ANYTHING] * len(places) for _ in range(training.n)]
        memories: list[list[Any]] = [[ANYTHING] * len(places) for _ in range(training.n)]
        if step < warmup_steps:
            results = [[training.mean(step, place) for place in places]] * training.n
        for number, bucket in enumerate(_layout(training) if step >= warmup_steps else []):
            given = training.flat(step, bucket)
            if options["error_feedback"] and number not in errors:
                errors[number] = [np.zeros_like(x) for x in given]
            dtype = training.dtypes[bucket[0]]
            result, left = topk_round(given, errors.get(number), options["ratio"], dtype)
            errors[number] = left
            for rank in range(training.n):
                for place, mine in training.by_place(result, bucket).items():
                    results[rank][place] = mine
                    memories[rank][place] = None
                if left is not None:
                    for place, mine in training.by_place(left[rank], bucket).items():
                        memories[rank][place] = mine
        training.step(results)
        training.look("memories", memories)


TOPK = TrainedAlgorithm(
    "topk",
    {
        **SHOWS_GRADIENTS,
        "lr": 0.5,
        "ratio": st.sampled_from([0.01, 0.1, 0.3, 0.5, 1.0]),
        "error_feedback": st.sampled_from([True, True, False]),
        "warmup_steps": 0,
    },
    _follow_topk,
    kinds=any_kind,
    steps=lambda options: options["warmup_steps"] + 3,
)

trains(TOPK, "S11.2.rounds", 0.2, COMPRESSIBLE)(
    {"steps": st.sampled_from([3, 3, 3, 9])},
    "Each round applies the sum of what was sent in rank order, divided by n; what was not sent is"
    " added next.",
)
trains(TOPK, "S11.2.huge", 0.2, COMPRESSIBLE)(
    {"kinds": ("huge", "edges", "tiny", "halfway", "bits")},
    "Memories are float32 whatever the gradients are, sums overflow in rank order only, and results"
    " are rounded once.",
)


@trains(TOPK, "S11.2.count", 0.45)
def count(lab: Lab) -> Given:
    """Each bucket of m elements sends max(1, ceil(ratio * m)) of them, the product in float64;
    padding does not count.
    """
    ratios = st.sampled_from([0.07, 0.14, 0.28, 0.29, 0.55, 0.57, 0.01, 1e-9, 1.0])
    return {
        "nodes": st.sampled_from([(1,), (2,), (3,)]),
        "shapes": [(lab.choice([100, 100, 100, 7, 1, 30, 33]),), (3,)],
        "kinds": ("tame",),
        "steps": 2,
        "ratio": ratios | st.floats(0.01, 1),
    }


def ties(lab: Lab) -> Given:
    """Return a training whose gradients have only a few distinct absolute values."""
    generator = np.random.default_rng(lab.seed())

    def signs(g: Tensor) -> Tensor:
        return torch.from_numpy(generator.choice([-2.0, -1, 1, 2], tuple(g.shape))).float()

    return {"nodes": worlds(3), "change": each_gradient(signs)}


trains(TOPK, "S11.2.ties", 0.3)(
    lambda lab: {**ties(lab), "steps": 2, "ratio": st.floats(0.1, 0.9)},
    "Of equal absolute values, those of lower index in the bucket are sent.",
)


@trains(TOPK, "S11.2.nans", 0.25)
def nans(lab: Lab) -> Given:
    """NaNs are equal whatever their other bits: of several, the one of lowest index is sent."""
    bits = st.sampled_from([0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -0x400000, -0x3FFFFF, -1])

    def poisoned(gradients: ByRank) -> ByRank:
        for rank in gradients:
            for place in sorted(lab.draw(st.sets(st.integers(0, 6), min_size=2, max_size=4))):
                rank[0][0].view(torch.int32)[place] = lab.draw(bits)
        return gradients

    return {
        "nodes": st.sampled_from([(1,), (2,)]),
        "shapes": [(7,)],
        "change": poisoned,
        "ratio": 0.1,
        "kinds": ("tame",),
        "steps": 1,
    }


@trains(TOPK, "S11.2.many", 0.15)
def many(lab: Lab) -> Given:
    """Exactly the largest elements are sent also from large buckets, however they are distributed;
    of equal ones, those of lower index.
    """
    m, seed = lab.choice([5000, 2**15 + 3, 2**17 + 3]), lab.seed()
    levels = lab.choice([3, 1000, 2**20])

    def gradient(rank: int) -> Tensor:
        generator = np.random.default_rng([seed, rank])
        x = torch.from_numpy(generator.integers(-levels, levels, m)).float()
        for stride in (2, 4, 8, 16, 32, 64):  # larger, or not, at sampled elements
            x[seed % 2 :: stride] *= 2
        x[seed % 2 :: 1 + seed % 64] *= 3
        return x

    return {
        "nodes": st.sampled_from([(1,), (2,)]),
        "shapes": [(m,)],
        "kinds": (),
        "steps": 1,
        "change": lambda gradients: [[{0: gradient(rank)}] for rank in range(len(gradients))],
        "ratio": st.sampled_from([0.001, 0.01, 0.01, 0.05]),
        "bucket_bytes": ONE_BUCKET,
    }


def _judge_messages(training: Training) -> None:
    lab, wanted = training.lab, list[list[Tensor]]()
    for step, bucket in itertools.product(range(2), _layout(training)):
        sent = training.flat(step, bucket)
        if training.options["error_feedback"]:
            left = [
                [training.ravel(p, e) for e in memories_before(training, step, p)] for p in bucket
            ]
            known = map(np.concatenate, zip(*left, strict=True))
            sent = [p + e for p, e in zip(sent, known, strict=True)]
        ratio = training.options["ratio"]
        places = [torch.tensor(kept(p, sent_count(p.size, ratio)), dtype=torch.int32) for p in sent]
        values = [torch.from_numpy(p)[at.long()] for p, at in zip(sent, places, strict=True)]
        wanted += [places, values]
    found = [sends for what, sends in lab.messages if what == "allgather()" and sends[0].numel()]
    lab.assert_equal([*map(list, found)], wanted, where="all-gathers, by rank: sent")


trains(TOPK, "S11.2.messages", 0.3)(
    {"nodes": multi_rank_worlds, "steps": 2, "record": True, "judge": _judge_messages},
    "Each rank all-gathers its k int32 indices, ascending, and then their k float32 values.",
)
