"""PowerSGD, round by round, compared with plain rounds from the target's own memories and factors
(S10).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import FLOATS, Draw, bulk, seeds, worlds
from bagua_ref.conformance.cases.training_cases import (
    BOUNDARY,
    EVERY_MATRIX,
    ONE_BUCKET,
    ByRank,
    each_gradient,
    grid_weights,
    matrices,
    matrix_weights,
    multi_rank_worlds,
    of_rank,
    poisoned_at,
    usual,
)
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import compression_numpy as plain
from bagua_ref.conformance.expected.kernels_numpy import added, wide
from bagua_ref.conformance.expected.tolerances import EXACT, SUM
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import (
    SHOWS_GRADIENTS,
    TrainedAlgorithm,
    Training,
    exactly,
    of_kinds,
)

__all__ = ["POWERSGD", "judge_exactly", "rank_of", "same_on_all_ranks"]

_NEEDS = ("powersgd",)

ROUNDED = SUM(400)
"""For projections on columns whose span is known to 100 times the rounding of what was added up for
them (`is_tame`).
"""


def _options(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    return {
        "lr": 0.5,
        **SHOWS_GRADIENTS,
        "matrix_approximation_rank": draw(st.integers(1, 4)),
        "warmup_steps": 0,
        "min_compression_rate": EVERY_MATRIX,
        "memory": draw(st.sampled_from(["local", "local", "averaged", None])),
        "warm_start": draw(st.sampled_from([True, True, False])),
        "seed": draw(st.sampled_from([0, 1, 7919, 2**32 - 1])),
    }


def rank_of(training: Training, place: int) -> int:
    """Return r, 0 where a gradient is not compressed."""
    options, shape = training.options, tuple(training.weights[place].shape)
    return plain.compressed_rank(
        shape, options["matrix_approximation_rank"], options["min_compression_rate"]
    )


def _matrices(training: Training, step: int, place: int) -> list[Any]:
    """Return every rank's gradient as a matrix."""
    return [g.reshape(g.shape[0], -1).numpy() for g in training.tensors(step, place)]


def _errors(training: Training, step: int, place: int) -> list[Any] | None:
    """Return every rank's e before a round, None without memory."""
    if training.options["memory"] is None:
        return None
    like = _matrices(training, step, place)[0]
    if step == training.options["warmup_steps"]:
        return [np.zeros_like(like)] * training.n
    before = [training.seen("memories", rank, step - 1, place) for rank in range(training.n)]
    return [np.zeros_like(like) if e is None else e.reshape(like.shape).numpy() for e in before]


def _start(training: Training, step: int, place: int) -> tuple[Any, dict[str, Any], Any]:
    """Return Q as the last round left it (None: there is none), what N is drawn from, and the
    columns that begin the round.
    """
    k, like = step - training.options["warmup_steps"], _matrices(training, step, place)[0]
    q = None if k == 0 else training.seen("factors", 0, step - 1, place)
    if q is not None:
        said = f"step {step - 1}: Q of parameter {place} is not finite"
        training.lab.assert_that(bool(q.isfinite().all()), said)
        q = q.numpy()
    order = list(itertools.chain(*training.layout()))
    drawn: dict[str, Any] = {"seed": training.options["seed"], "k": k, "i": order.index(place)}
    known, shape = (
        q if training.options["warm_start"] else None,
        (like.shape[1], rank_of(training, place)),
    )
    return q, drawn, plain.start(known, shape, like.dtype.type, **drawn)


def same_on_all_ranks(training: Training, action: str, step: int, place: int) -> None:
    """Compare the averaged gradients, or the factors, of all ranks, bit for bit."""
    first = training.seen(action, 0, step, place)
    for rank in range(1, training.n if first is not None else 0):
        training.expect_seen(action, rank, step, place, first, why="compared with rank 0")


def judge_mean(training: Training, step: int, place: int, exact: bool = False) -> None:
    """Expect the mean."""
    want, size = (
        training.mean(step, place),
        torch.stack(training.tensors(step, place)).double().abs().mean(0),
    )
    for rank in range(training.n):
        training.expect_seen(
            "step", rank, step, place, want, EXACT if exact else SUM(training.n + 1), size
        )


def judge_round(training: Training, step: int, place: int, exact: bool = False) -> None:
    """Compare a round of one parameter with a plain one from equal e and Q."""
    r, w, everywhere = rank_of(training, place), training.weights[place], range(training.n)
    if r == 0:
        judge_mean(training, step, place, exact)
        for rank, action in itertools.product(everywhere, ("memories", "factors")):
            training.expect_seen(action, rank, step, place, None, why="which is not compressed")
        return
    same_on_all_ranks(training, "step", step, place)
    same_on_all_ranks(training, "factors", step, place)
    sent, errors, (q, drawn, _) = (
        _matrices(training, step, place),
        _errors(training, step, place),
        _start(training, step, place),
    )
    drawn["warm_start"] = training.options["warm_start"]
    size = plain.reach(sent, errors, q, r, **drawn)
    if size == math.inf:
        _judge_conservation(training, step, place, [*sent, *(errors or [])])
        return
    wanted = plain.power_sgd_round(sent, errors, q, r, memory=training.options["memory"], **drawn)
    result, kind = torch.from_numpy(wanted.result).to(w.dtype).view(w.shape), wide(w.dtype)
    for rank in everywhere:
        training.expect_seen(
            "step", rank, step, place, result, SUM(4) if w.dtype.itemsize == 2 else ROUNDED, size
        )
        left = (
            None if wanted.errors is None else torch.from_numpy(wanted.errors[rank]).view(w.shape)
        )
        training.expect_seen(
            "memories",
            rank,
            step,
            place,
            left,
            ROUNDED,
            size,
            "though memory=None" * (left is None),
        )
        if wanted.q is not None:
            found = training.seen("factors", rank, step, place).double()
            mass = (
                size
                * size
                * sent[0].shape[0]
                * torch.finfo(kind).eps
                / torch.finfo(torch.float64).eps
            )
            training.lab.assert_equal(
                found @ found.T,
                torch.from_numpy(plain.gram(wanted.q)),
                ROUNDED,
                magnitude=mass,
                where=f"Q Q^T: rank {rank}, step {step}, parameter {place}",
            )


def _judge_conservation(training: Training, step: int, place: int, every: list[Any]) -> None:
    """Expect that what is applied and the mean of the new memories is the mean of the gradients and
    the old ones.
    """
    w = training.weights[place]
    if training.options["memory"] is not None and w.dtype.itemsize > 2:
        want = (
            torch.from_numpy(added(every).astype(np.float64) / training.n).view(w.shape).to(w.dtype)
        )
        memories = [training.seen("memories", rank, step, place) for rank in range(training.n)]
        found = training.seen("step", 0, step, place).double()
        found = found + sum(memory.double() for memory in memories) / training.n
        training.lab.assert_equal(
            found.to(w.dtype),
            want,
            SUM(60 * training.n),
            magnitude=plain.norm(every),
            where=f"conservation: step {step}, parameter {place}",
        )


def _follow(training: Training) -> None:
    for _ in range(training.steps):
        training.step()
        training.look("memories")
        training.look("factors")


def judge(training: Training, exact: bool = False) -> None:
    """Compare every step."""
    for step, place in itertools.product(range(training.steps), range(len(training.weights))):
        if step < training.options["warmup_steps"]:
            judge_mean(training, step, place, exact)
        else:
            judge_round(training, step, place, exact)


judge_exactly = partial(judge, exact=True)
"""Means of tensors that are not compressed do not depend on the order of sums."""

POWERSGD = TrainedAlgorithm(
    "powersgd",
    _options,
    _follow,
    judge,
    worlds=lambda dtype: st.sampled_from([(2,), (1, 1), (3,), (2, 2), (1,)]),
    weights=matrix_weights,
    gradients=of_kinds(usual),
    steps=lambda draw, options: options["warmup_steps"] + 3,
)


# S10.1


@check("S10.1", "compressed", needs=_NEEDS, effort=0.6)
def compressed(lab: Lab, draw: Draw) -> None:
    """Compressed are matrices with (n + m) * r * min_compression_rate < n * m; all others are
    averaged, and have no memory.
    """
    generator = np.random.default_rng(draw(seeds))
    forms = [BOUNDARY[place] for place in generator.permutation(len(BOUNDARY))[:6]]
    POWERSGD.train(
        lab,
        draw,
        nodes=draw(multi_rank_worlds),
        weights=grid_weights(draw, [torch.float32] * 6, forms),
        gradients=exactly,
        steps=2,
        judge=judge_exactly,
        matrix_approximation_rank=draw(st.sampled_from([1, 2, 5, 5])),
        min_compression_rate=draw(st.sampled_from([2.0, 1.5, 1.0, 0.75, 0.5, 0.2])),
        memory=draw(st.sampled_from(["local", "averaged"])),
    )


# S10.2


@check("S10.2", "rounds", dtypes=FLOATS, needs=_NEEDS, effort=0.4)
def rounds(lab: Lab, draw: Draw) -> None:
    """Each round gives P Q^T and leaves e and Q as the formulas say, from the e and Q that the last
    one left.
    """
    POWERSGD.train(lab, draw)


def _judge_as_mean(training: Training, ranks_of_steps: Sequence[int]) -> None:
    """Expect the mean of every step up to rounding, given each one's rank, unless rounding decides
    the span of Q.
    """
    for step, rank in enumerate(ranks_of_steps):
        given, (_, _, columns) = _matrices(training, step, 0), _start(training, step, 0)
        values = np.linalg.svd(added(given) @ columns, compute_uv=False)
        if not rank or values[rank - 1] > 1e-2 * values[0]:
            for number in range(training.n):
                training.expect_seen(
                    "step", number, step, 0, training.mean(step, 0), ROUNDED, plain.norm(given)
                )


def _products(ranks_of_steps: Sequence[int], seed: int, factors: Sequence[float]) -> Any:
    """Return what makes gradients of these ranks, one for each step; rank i of the world has them
    times ``factors[i]``.
    """

    def gradients(
        draw: Draw, weights: list[Tensor], ranks: int, steps: int, options: dict[str, Any]
    ) -> ByRank:
        found: ByRank = [[] for _ in range(ranks)]
        for step, rank in enumerate(ranks_of_steps):
            sides = [
                bulk(torch.float32, "tame", seed + 7 * step + p, size * rank).view(size, rank)
                for p, size in enumerate(weights[0].shape)
            ]
            for number, mine in enumerate(found):
                mine.append({0: sides[0] @ sides[1].T * factors[number]})
        return found

    return gradients


@check("S10.2", "dead_columns", needs=_NEEDS)
def dead_columns(lab: Lab, draw: Draw) -> None:
    """A gradient of zero gives zero, never NaN; columns of Q that became 0 are replaced, and later
    gradients come through.
    """
    shape, r = (
        draw(st.sampled_from([(6, 5), (4, 8), (9, 6)])),
        draw(st.sampled_from([1, 2, 3, 2, 3])),
    )
    ranks_of_steps = draw(
        st.sampled_from([(0, 1, 0, 1), (1, 0, 0, 1), (1, r, 1, r), (0, 0, r), (1, 1, 0, r)])
    )

    def judge_all(training: Training) -> None:
        _judge_as_mean(training, ranks_of_steps)
        judge_round(training, len(ranks_of_steps), 0)

    # A memory would bring back what a dependent column has left of earlier gradients.
    POWERSGD.train(
        lab,
        draw,
        weights=grid_weights(draw, [torch.float32], [shape]),
        judge=judge_all,
        matrix_approximation_rank=r,
        memory=None,
        gradients=_products((*ranks_of_steps, min(shape)), draw(seeds), range(1, 5)),
    )


@check("S10.2", "zero_gradients", needs=_NEEDS, effort=0.3)
def zero_gradients(lab: Lab, draw: Draw) -> None:
    """Where all gradients are zero, so are the average and the memory, bit for bit, in every
    round.
    """

    def judge_zero(training: Training) -> None:
        for step, rank, place in itertools.product(
            range(3), range(training.n), range(len(training.weights))
        ):
            for action in ("step", "memories") if rank_of(training, place) else ("step",):
                zero = torch.zeros(training.weights[place].shape)
                where = f"rank {rank}, step {step}, {action} of parameter {place}"
                lab.assert_equal(training.seen(action, rank, step, place).abs(), zero, where=where)

    zeros = each_gradient(torch.zeros_like)
    POWERSGD.train(
        lab,
        draw,
        change=zeros,
        judge=judge_zero,
        memory=draw(st.sampled_from(["local", "averaged"])),
    )


# S10.3


@check("S10.3", "dependent_columns", needs=_NEEDS, effort=0.5)
def dependent_columns(lab: Lab, draw: Draw) -> None:
    """What rounding leaves of a dependent column is no direction: gradients of a lower rank than r
    are averaged exactly.
    """
    shape, rank, seed = (
        draw(st.sampled_from([(24, 16), (12, 9), (9, 30)])),
        draw(st.integers(1, 2)),
        draw(seeds),
    )
    POWERSGD.train(
        lab,
        draw,
        weights=grid_weights(draw, [torch.float32], [shape]),
        gradients=_products([rank], seed, (1, 2, 4, 8)),
        change=lambda gradients: [mine * 3 for mine in gradients],
        judge=lambda training: _judge_as_mean(training, [rank] * 3),
        memory=None,
        matrix_approximation_rank=draw(st.integers(rank + 1, 6)),
    )


@check("S10.3", "small_columns", needs=_NEEDS, effort=0.2)
def small_columns(lab: Lab, draw: Draw) -> None:
    """A column is compared with its own norm, not with another's: one that is 1e-7 as long is a
    direction, too.
    """
    matrix = torch.zeros(*draw(st.sampled_from([(6, 5), (5, 8)])), dtype=torch.float64)
    matrix[0, 0], matrix[1, 1] = 1.0, draw(st.sampled_from([1e-7, 2.0**-26, 1e-9]))

    def judge_late(training: Training) -> None:
        # by then, each column of Q has found its own
        for step, rank in itertools.product((2, 3), range(training.n)):
            training.expect_seen("step", rank, step, 0, matrix, ROUNDED, 1.0)

    POWERSGD.train(
        lab,
        draw,
        weights=[torch.zeros_like(matrix)],
        steps=4,
        judge=judge_late,
        matrix_approximation_rank=2,
        memory=None,
        gradients=lambda draw, weights, ranks, steps, options: [
            [{0: matrix}] * steps for _ in range(ranks)
        ],
        warm_start=True,
    )


@check("S10.3", "scales", dtypes=("float32", "float64"), needs=_NEEDS, effort=0.4)
def scales(lab: Lab, draw: Draw) -> None:
    """Columns are compared with their own size: gradients of any magnitude are compressed alike."""
    factor = 2.0 ** draw(
        st.sampled_from(
            [-45, -30, 40, 50] if lab.dtype is torch.float32 else [-300, -100, 100, 300]
        )
    )
    POWERSGD.train(
        lab, draw, gradients=of_kinds(st.just("tame")), change=each_gradient(lambda g: g * factor)
    )


# S10.4


def expect_refused(training: Training, step: int, place: int) -> None:
    """Expect NaN, and that nothing else has changed."""
    w, r = training.weights[place], rank_of(training, place)
    for rank in range(training.n):
        training.expect_seen("step", rank, step, place, torch.full_like(w, torch.nan))
        for action, like in (("memories", w), ("factors", torch.zeros(w.numel() // w.shape[0], r))):
            found = training.seen(action, rank, step, place)
            if (action == "memories" and training.options["memory"] is None) or (
                step == 0 and found is None
            ):
                continue  # there is none, or none yet
            before = (
                training.seen(action, rank, step - 1, place) if step else torch.zeros_like(like)
            )
            training.expect_seen(
                action, rank, step, place, before, why="after a round that was not finite"
            )


@check("S10.4", "not_finite", needs=_NEEDS, effort=0.6)
def not_finite(lab: Lab, draw: Draw) -> None:
    """A gradient that is not finite on one rank becomes NaN on every rank, and its memories and its
    factor stay; others go on.
    """
    weights = [
        *grid_weights(draw, [torch.float32], [draw(matrices)]),
        *matrix_weights(draw, torch.float32),
    ]
    bad_step = draw(st.integers(0, 2))

    def judge_all(training: Training) -> None:
        for step, place in itertools.product(range(4), range(len(weights))):
            (expect_refused if (step, place) == (bad_step, 0) else judge_round)(
                training, step, place
            )

    POWERSGD.train(
        lab, draw, weights=weights, change=poisoned_at(draw, bad_step), steps=4, judge=judge_all
    )


@check("S10.4", "overflow", needs=_NEEDS, effort=0.2)
def overflow(lab: Lab, draw: Draw) -> None:
    """So does one whose Q overflows in the sum, though every rank's gradient and P are finite; the
    next one comes through.
    """

    def gradients(
        draw: Draw, weights: list[Tensor], ranks: int, steps: int, options: dict[str, Any]
    ) -> ByRank:
        return [
            [{0: torch.full((64, 8), 1e38 / ranks)}, {0: torch.ones(64, 8)}] for _ in range(ranks)
        ]

    def judge_both(training: Training) -> None:
        expect_refused(training, 0, 0)
        for rank in range(training.n):
            training.expect_seen("step", rank, 1, 0, torch.ones(64, 8), ROUNDED, 10.0)

    weights = grid_weights(draw, [torch.float32], [(64, 8)])
    POWERSGD.train(
        lab,
        draw,
        weights=weights,
        gradients=gradients,
        judge=judge_both,
        matrix_approximation_rank=1,
    )


# S10.5


@check("S10.5", "low_rank", needs=_NEEDS, effort=0.5)
def low_rank(lab: Lab, draw: Draw) -> None:
    """A mean of rank r or less is averaged exactly, though no rank's own gradient has that rank."""
    r, shape = draw(st.integers(1, 3)), draw(st.sampled_from([(8, 10), (12, 8), (9, 3, 3)]))
    POWERSGD.train(
        lab,
        draw,
        nodes=draw(worlds(4)),
        weights=grid_weights(draw, [torch.float32], [shape]),
        matrix_approximation_rank=r,
        gradients=lambda draw, weights, ranks, steps, options: [
            [{0: g}] for g in of_rank(draw, weights[0], ranks, r)
        ],
        judge=lambda training: _judge_as_mean(training, [r]),
    )


@check("S10.5", "messages", needs=_NEEDS, effort=0.3)
def messages(lab: Lab, draw: Draw) -> None:
    """Each bucket sends one all-reduce for all P and what is not compressed, and one for all Q, of
    exactly their elements.
    """
    weights = matrix_weights(draw, torch.float32, 3)
    weights.insert(draw(st.integers(0, len(weights))), torch.zeros(7))

    def judge_messages(training: Training) -> None:
        sizes = []
        for bucket in training.layout():
            ranks = [(training.weights[place], rank_of(training, place)) for place in bucket]
            sizes.append(sum(r * w.shape[0] if r else w.numel() for w, r in ranks))
            sizes += (
                [sum(r * (w.numel() // w.shape[0]) for w, r in ranks if r)]
                if any(r for _, r in ranks)
                else []
            )
        sent = [sends[0] for what, sends in lab.messages if what.startswith("allreduce")]
        found = [x.numel() for x in sent if x.is_floating_point() and x.numel()]
        wanted = [size for size in sizes if size] * 2
        lab.assert_equal(found, wanted, where="elements of all-reduces")

    POWERSGD.train(
        lab,
        draw,
        nodes=draw(multi_rank_worlds),
        weights=weights,
        steps=2,
        judge=judge_messages,
        record=True,
        min_compression_rate=draw(st.sampled_from([EVERY_MATRIX, 1.0])),
        bucket_bytes=draw(st.sampled_from([40, ONE_BUCKET, ONE_BUCKET])),
    )
