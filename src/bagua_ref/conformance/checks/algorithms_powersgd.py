"""PowerSGD, round by round, compared with plain rounds from the target's own error memories and
factors (S10).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import FLOATS, bulk, worlds
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
from bagua_ref.conformance.checks.registry import trains
from bagua_ref.conformance.expected import compression_numpy as plain
from bagua_ref.conformance.expected.kernels_numpy import added, wide
from bagua_ref.conformance.expected.tolerances import EXACT, SUM
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import LOST, SHOWS_GRADIENTS, TrainedAlgorithm, Training

Given = dict[str, Any]

ROUNDED = SUM(400)
"""Tolerance of projections on columns whose span is known to 100 times the rounding errors of their
sums (`is_tame`).
"""


def _rank_of(training: Training, place: int) -> int:
    """Return the compression rank r of a parameter, 0 if it is not compressed."""
    options, shape = training.options, tuple(training.weights[place].shape)
    return plain.compressed_rank(
        shape, options["matrix_approximation_rank"], options["min_compression_rate"]
    )


def _matrices(training: Training, step: int, place: int) -> list[Any]:
    """Return every rank's gradient as a matrix."""
    return [g.reshape(g.shape[0], -1).numpy() for g in training.tensors(step, place)]


def memories_of(training: Training, step: int, place: int) -> list[Tensor]:
    """Return every rank's error memory of a parameter after a step, zeros if there is none."""
    known = range(training.n) if step >= training.options.get("warmup_steps", 0) else ()
    found = [training.seen("memories", rank, step, place) for rank in known]
    zero = torch.zeros_like(training.tensors(0, place)[0])
    return [zero if e is None else e for e in found or [None] * training.n]


def memories_before(training: Training, step: int, place: int) -> list[Tensor]:
    """Return every rank's error memory of a parameter at the start of a step, zeros if there is
    none.
    """
    lost = training.before.get(step) == LOST
    return memories_of(training, -1 if lost else step - 1, place)


def _start(training: Training, step: int, place: int) -> tuple[Any, Given, Any]:
    """Return Q after the last round (None: there is none), the seed arguments of N, and the columns
    at the start of the round.
    """
    k, like = step - training.options["warmup_steps"], _matrices(training, step, place)[0]
    q = None if k == 0 else training.seen("factors", 0, step - 1, place)
    if q is not None:
        said = f"step {step - 1}: Q of parameter {place} is not finite"
        training.lab.assert_that(bool(q.isfinite().all()), said)
        q = q.numpy()
    order = list(itertools.chain(*training.layout()))
    drawn: Given = {"seed": training.options["seed"], "k": k, "i": order.index(place)}
    known = q if training.options["warm_start"] else None
    shape = like.shape[1], _rank_of(training, place)
    return q, drawn, plain.start(known, shape, like.dtype.type, **drawn)


def same_on_all_ranks(training: Training, action: str, step: int, place: int) -> None:
    """Expect identical averaged gradients, or factors, on all ranks, bit for bit."""
    first = training.seen(action, 0, step, place)
    if first is not None:
        training.expect_seen(action, step, place, first, why="compared with rank 0")


def _judge_mean(training: Training, step: int, place: int, exact: bool = False) -> None:
    """Expect the plain mean of the gradients."""
    want, tolerance = training.mean(step, place), EXACT if exact else SUM(training.n + 1)
    size = torch.stack(training.tensors(step, place)).double().abs().mean(0)
    training.expect_seen("step", step, place, want, tolerance, size)


def judge_round(training: Training, step: int, place: int, exact: bool = False) -> None:
    """Compare a round of one parameter with a plain round that starts from the same e and Q."""
    r, w, options = _rank_of(training, place), training.weights[place], training.options
    see = partial(training.expect_seen, step=step, place=place)
    if r == 0:
        _judge_mean(training, step, place, exact)
        for action in ("memories", "factors"):
            see(action, want=None, why="which is not compressed")
        return
    same_on_all_ranks(training, "step", step, place)
    same_on_all_ranks(training, "factors", step, place)
    sent, (q, drawn, _) = _matrices(training, step, place), _start(training, step, place)
    drawn["warm_start"] = options["warm_start"]
    errors = None
    if options["memory"] is not None:
        before = memories_before(training, step, place)
        errors = [e.reshape(sent[0].shape).numpy() for e in before]
    size = plain.reach(sent, errors, q, r, **drawn)
    if size == math.inf:
        if options["memory"] is not None and w.dtype.itemsize > 2:
            conserves(training, step, place)
        return
    wanted = plain.power_sgd_round(sent, errors, q, r, memory=options["memory"], **drawn)
    result = torch.from_numpy(wanted.result).to(w.dtype).view(w.shape)
    see("step", want=result, tolerance=SUM(4) if w.dtype.itemsize == 2 else ROUNDED, magnitude=size)
    if wanted.errors is None:
        see("memories", want=None, why="though memory=None")
    else:
        left = [torch.from_numpy(e).view(w.shape) for e in wanted.errors]
        see("memories", want=left, tolerance=ROUNDED, magnitude=size)
    if wanted.q is not None:
        found = training.seen("factors", 0, step, place).double()  # the same on all ranks
        epsilons = torch.finfo(wide(w.dtype)).eps / torch.finfo(torch.float64).eps
        training.lab.assert_equal(
            found @ found.T,
            torch.from_numpy(plain.gram(wanted.q)),
            ROUNDED,
            magnitude=size * size * sent[0].shape[0] * epsilons,
            where=f"Q Q^T: step {step}, parameter {place}",
        )


def conserves(training: Training, step: int, place: int) -> None:
    """Expect the applied gradient plus the mean of the new error memories to equal the mean of
    gradients plus old memories.
    """
    w, n, given = training.weights[place], training.n, training.tensors(step, place)
    before, after = memories_before(training, step, place), memories_of(training, step, place)
    every = torch.stack([*given, *before]).double()
    want, left = every.sum(0) / n, torch.stack(after).double().sum(0) / n
    found = training.seen("step", 0, step, place).double() + left
    training.lab.assert_equal(
        found.to(w.dtype),
        want.to(w.dtype),
        SUM(60 * n),
        magnitude=plain.norm([x.reshape(1, -1).numpy() for x in [*every, *after]]),
        where=f"conservation: step {step}, parameter {place}",
    )


def _follow(training: Training) -> None:
    for _ in range(training.steps):
        training.step()
        training.look("memories")
        training.look("factors")


def judge(training: Training, exact: bool = False) -> None:
    """Compare every step with a plain round."""
    for step, place in itertools.product(range(training.steps), range(len(training.weights))):
        warms_up = step < training.options["warmup_steps"]
        (_judge_mean if warms_up else judge_round)(training, step, place, exact)


judge_exactly = partial(judge, exact=True)
"""`judge` for tensors that are not compressed and whose means do not depend on the order of
sums.
"""

POWERSGD = TrainedAlgorithm(
    "powersgd",
    {
        **SHOWS_GRADIENTS,
        "lr": 0.5,
        "matrix_approximation_rank": st.integers(1, 4),
        "warmup_steps": 0,
        "min_compression_rate": EVERY_MATRIX,
        "memory": st.sampled_from(["local", "local", "averaged", None]),
        "warm_start": st.sampled_from([True, True, False]),
        "seed": st.sampled_from([0, 1, 7919, 2**32 - 1]),
    },
    _follow,
    judge,
    nodes=st.sampled_from([(2,), (1, 1), (3,), (2, 2), (1,)]),
    weights=matrix_weights,
    kinds=usual,
    steps=lambda options: options["warmup_steps"] + 3,
)
_BOTH_MEMORIES = st.sampled_from(["local", "averaged"])

trains(POWERSGD, "S10.1.compressed", 0.4)(
    {
        "nodes": multi_rank_worlds,
        "shapes": st.permutations(BOUNDARY).map(lambda forms: forms[:6]),
        "kinds": (),
        "steps": 2,
        "judge": judge_exactly,
        "matrix_approximation_rank": st.sampled_from([1, 2, 5, 5]),
        "min_compression_rate": st.sampled_from([2.0, 1.5, 1.0, 0.75, 0.5, 0.2]),
        "memory": _BOTH_MEMORIES,
    },
    "Compressed are matrices with (n + m) * r * min_compression_rate < n * m; all others are"
    " averaged, and have no memory.",
)
trains(POWERSGD, "S10.2.rounds", 0.15, FLOATS)(
    {"steps": st.sampled_from([3, 3, 3, 9])},
    "Each round gives P Q^T and leaves e and Q as the formulas say, from the e and Q that the last"
    " one left.",
)


def _judge_as_mean(training: Training, ranks_of_steps: Sequence[int]) -> None:
    """Expect the exact mean at each step up to rounding; skip steps in which rounding decides the
    span of Q.
    """
    for step, rank in enumerate(ranks_of_steps):
        given, (_, _, columns) = _matrices(training, step, 0), _start(training, step, 0)
        values = np.linalg.svd(added(given) @ columns, compute_uv=False)
        if not rank or values[rank - 1] > 1e-2 * values[0]:
            mean, size = training.mean(step, 0), plain.norm(given)
            training.expect_seen("step", step, 0, mean, ROUNDED, size)


def _products(
    shape: tuple[int, int], ranks_of_steps: Sequence[int], seed: int
) -> Callable[[ByRank], ByRank]:
    """Return a function that replaces the gradients by matrices of a given rank for each step;
    those of rank i of the world are 1 + i times as large as the first one's.
    """

    def replaced(gradients: ByRank) -> ByRank:
        steps = []
        for step, rank in enumerate(ranks_of_steps):
            sides = [
                bulk(torch.float32, "tame", seed + 7 * step + p, size * rank).view(size, rank)
                for p, size in enumerate(shape)
            ]
            steps.append(sides[0] @ sides[1].T)
        return [[{0: g * (1 + rank)} for g in steps] for rank in range(len(gradients))]

    return replaced


@trains(POWERSGD, "S10.2.dead_columns", 0.35)
def dead_columns(lab: Lab) -> Given:
    """A gradient of zero gives zero, never NaN; columns of Q that became 0 are replaced, so that
    later gradients are transmitted.
    """
    shape, r = lab.choice([(6, 5), (4, 8), (9, 6)]), lab.choice([1, 2, 3, 3])
    sequences = [(0, 1, 0, 1), (1, 0, 0, 1), (1, r, 1, r), (0, 0, r), (1, 1, 0, r)]
    ranks_of_steps = lab.choice(sequences)

    def judge_all(training: Training) -> None:
        _judge_as_mean(training, ranks_of_steps)
        judge_round(training, len(ranks_of_steps), 0)

    return {
        "shapes": [shape],
        "steps": len(ranks_of_steps) + 1,
        "change": _products(shape, (*ranks_of_steps, min(shape)), lab.seed()),
        "judge": judge_all,
        "matrix_approximation_rank": r,
        # it would restore residuals of a dependent column from earlier gradients
        "memory": None,
    }


def _judge_zero(training: Training) -> None:
    for step, (place, w) in itertools.product(range(3), enumerate(training.weights)):
        for action in ("step", "memories") if _rank_of(training, place) else ("step",):
            found = [training.seen(action, rank, step, place).abs() for rank in range(training.n)]
            where = f"step {step}, {action} of parameter {place}, by rank"
            training.lab.assert_equal(found, [torch.zeros(w.shape)] * training.n, where=where)


trains(POWERSGD, "S10.2.zero_gradients", 0.25)(
    {
        "change": each_gradient(torch.zeros_like),
        "judge": _judge_zero,
        "memory": _BOTH_MEMORIES,
    },
    "Where all gradients are zero, so are the average and the memory, bit for bit, in every round.",
)


@trains(POWERSGD, "S10.3.dependent_columns", 0.35)
def dependent_columns(lab: Lab) -> Given:
    """Rounding errors of a dependent column are not used as a direction: gradients of a lower rank
    than r are averaged exactly.
    """
    shape, rank = lab.choice([(24, 16), (12, 9), (9, 30)]), lab.integer(1, 2)
    product = _products(shape, [rank], lab.seed())
    return {
        "shapes": [shape],
        "change": lambda gradients: [mine * 3 for mine in product(gradients)],
        "judge": lambda training: _judge_as_mean(training, [rank] * 3),
        "memory": None,
        "matrix_approximation_rank": st.integers(rank + 1, 6),
    }


def _near_the_threshold(lab: Lab) -> Given:
    """Return a round in which projections leave half or twice 1e-6 of P's second column."""
    shape, seed, size = lab.choice([(6, 5), (5, 8)]), lab.integer(0, 99), 0.0
    while size < 0.1:
        seed += 1
        q = plain.start(None, (shape[1], 2), np.float64, seed, 0, 0)
        size = abs(q[0, 1] / (q[1, 1] - q[1, 0] * q[0, 1] / q[0, 0]))
    matrix = np.eye(*shape)
    matrix[2:], matrix[1, 1] = 0, 1e-6 * lab.choice([0.5, 2.0]) * size
    wanted = plain.power_sgd_round([matrix], None, None, 2, memory=None, seed=seed).result
    return {
        "weights": [torch.zeros(shape, dtype=torch.float64)],
        "steps": 1,
        "change": lambda gradients: [[{0: torch.from_numpy(matrix)}] for _ in gradients],
        "judge": lambda training: training.expect_seen(
            "step",
            0,
            0,
            torch.from_numpy(wanted),
            ROUNDED,
            1e4,  # as 1e-6 of P remains
        ),
        "matrix_approximation_rank": 2,
        "memory": None,
        "seed": seed,
    }


@trains(POWERSGD, "S10.3.small_columns", 0.25)
def small_columns(lab: Lab) -> Given:
    """A column is compared with 1e-6 of its own norm, not with another's: one that is 1e-7 times as
    long is a direction, too.
    """
    return _near_the_threshold(lab) if lab.flag() else _of_two_sizes(lab)


def _of_two_sizes(lab: Lab) -> Given:
    matrix = torch.zeros(*lab.choice([(6, 5), (5, 8)]), dtype=torch.float64)
    matrix[0, 0], matrix[1, 1] = 1.0, lab.choice([1e-7, 2.0**-26, 1e-9])

    def judge_late(training: Training) -> None:
        for step in (2, 3):  # by then, the columns of Q have converged
            training.expect_seen("step", step, 0, matrix, ROUNDED, 1.0)

    return {
        "weights": [torch.zeros_like(matrix)],
        "steps": 4,
        "change": lambda gradients: [[{0: matrix}] * 4 for _ in gradients],
        "judge": judge_late,
        "matrix_approximation_rank": 2,
        "memory": None,
        "warm_start": True,
    }


@trains(POWERSGD, "S10.3.scales", 0.3, ("float32", "float64"))
def scales(lab: Lab) -> Given:
    """Columns are compared with their own size: compression does not depend on the magnitude of
    gradients.
    """
    powers = [-45, -30, 40, 50] if lab.dtype is torch.float32 else [-560, -300, 100, 300]
    factor = 2.0 ** lab.choice(powers)
    return {"kinds": ("tame",), "change": each_gradient(lambda g: g * factor)}


def expect_refused(training: Training, step: int, place: int) -> None:
    """Expect NaN, and unchanged error memories and factors."""
    w, r = training.weights[place], _rank_of(training, place)
    training.expect_seen("step", step, place, torch.full_like(w, torch.nan))
    for action, like in (("memories", w), ("factors", torch.zeros(w.numel() // w.shape[0], r))):
        for rank in range(training.n):
            if step:
                before = training.seen(action, rank, step - 1, place)
            else:  # there is none, or none yet
                seen = training.seen(action, rank, 0, place)
                before = None if seen is None else torch.zeros_like(like)
            where = f"step {step}, {action}, after a round that was not finite"
            training.compare(rank, training.index[action, step], place, before, where=where)


@trains(POWERSGD, "S10.4.not_finite", 0.4)
def not_finite(lab: Lab) -> Given:
    """A gradient that is not finite on one rank becomes NaN on every rank, and its error memories
    and factor stay; other parameters are unaffected.
    """
    others, bad_step = matrix_weights(lab.draw, lab.dtype), lab.integer(0, 2)

    def judge_all(training: Training) -> None:
        for step, place in itertools.product(range(4), range(len(training.weights))):
            refused = (step, place) == (bad_step, 0)
            (expect_refused if refused else judge_round)(training, step, place)

    return {
        "weights": [*grid_weights(lab.draw, [lab.dtype], [lab.draw(matrices)]), *others],
        "change": poisoned_at(lab.draw, bad_step),
        "steps": 4,
        "judge": judge_all,
    }


@trains(POWERSGD, "S10.4.overflow", 0.25)
def overflow(lab: Lab) -> Given:
    """So does one for which the sum of Q or P overflows, though every rank's gradient is finite; the
    next one comes through.
    """
    of_p = lab.flag()
    ones = torch.ones(64, 1 if of_p else 8)

    def judge_both(training: Training) -> None:
        expect_refused(training, 0, 0)
        training.expect_seen("step", 1, 0, ones, ROUNDED, 10.0)

    return {
        "nodes": multi_rank_worlds,
        "weights": [torch.zeros_like(ones)],
        "change": lambda gradients: [
            [{0: ones * (2e38 if of_p else 1e38 / len(gradients))}, {0: ones}] for _ in gradients
        ],
        "steps": 2,
        "judge": judge_both,
        "matrix_approximation_rank": 1,
    }


@trains(POWERSGD, "S10.5.low_rank", 0.35)
def low_rank(lab: Lab) -> Given:
    """A mean of rank r or less is averaged exactly, though no rank's own gradient has that rank."""
    r, shape = lab.integer(1, 3), lab.choice([(8, 10), (12, 8), (9, 3, 3)])
    nodes, weights = lab.draw(worlds(4)), grid_weights(lab.draw, [lab.dtype], [shape])
    gradients = [[{0: g}] for g in of_rank(lab.draw, weights[0], sum(nodes), r)]
    return {
        "nodes": nodes,
        "weights": weights,
        "change": lambda _: gradients,
        "steps": 1,
        "judge": lambda training: _judge_as_mean(training, [r]),
        "matrix_approximation_rank": r,
    }


def _judge_messages(training: Training) -> None:
    sizes = []
    for bucket in training.layout():
        ranks = [(training.weights[place], _rank_of(training, place)) for place in bucket]
        sizes.append(sum(r * w.shape[0] if r else w.numel() for w, r in ranks))
        sizes.append(sum(r * (w.numel() // w.shape[0]) for w, r in ranks if r))
    sent = [sends[0] for what, sends in training.lab.messages if what.startswith("allreduce")]
    found = [x.numel() for x in sent if x.is_floating_point() and x.numel()]
    wanted = [size for size in sizes if size] * 2
    training.lab.assert_equal(found, wanted, where="elements of all-reduces")


@trains(POWERSGD, "S10.5.messages", 0.25)
def messages(lab: Lab) -> Given:
    """Each bucket sends two all-reduces, of exactly their elements: one for all P and uncompressed
    gradients, and one for all Q.
    """
    weights = matrix_weights(lab.draw, lab.dtype, 3)
    weights.insert(lab.integer(0, len(weights)), torch.zeros(7))
    return {
        "nodes": multi_rank_worlds,
        "weights": weights,
        "steps": 2,
        "judge": _judge_messages,
        "record": True,
        "min_compression_rate": st.sampled_from([EVERY_MATRIX, 1.0]),
        "bucket_bytes": st.sampled_from([40, ONE_BUCKET, ONE_BUCKET]),
    }
