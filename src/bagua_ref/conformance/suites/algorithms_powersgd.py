"""PowerSGD, round by round, compared with plain rounds from the target's own memories and factors (S10)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from bagua_ref.conformance.expected import power_sgd_numpy as plain
from bagua_ref.conformance.expected.tolerances import EXACT, SUM
from bagua_ref.conformance.inputs.local_update_cases import multi_rank_worlds, used_parts
from bagua_ref.conformance.inputs.low_rank_cases import (
    BOUNDARY,
    EVERY_MATRIX,
    matrices,
    of_rank,
    powersgd_options,
    powersgd_weights,
    usual,
)
from bagua_ref.conformance.inputs.strategies import FLOATS, Draw, bulk, seeds, worlds
from bagua_ref.conformance.inputs.training_cases import ONE_BUCKET, ByRank, any_gradients, exact_gradients, grid_weights
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.powersgd_rounds import ROUNDED, PowerSGDRounds
from bagua_ref.conformance.suites.checks import check

_NEEDS = ("powersgd",)
_some_worlds = st.sampled_from([(2,), (1, 1), (3,), (2, 2), (1,)])


# S10.1


@check("algorithms", "S10.1", "warmup", needs=_NEEDS, effort=0.3)
def warmup(lab: Lab, draw: Draw) -> None:
    """Up to warmup_steps, gradients are averaged; then rounds are counted from 0, and nothing was remembered."""
    nodes, weights, warmup_steps = draw(_some_worlds), powersgd_weights(draw, torch.float32), draw(st.integers(1, 3))
    gradients = exact_gradients(draw, weights, sum(nodes), warmup_steps + 2)
    PowerSGDRounds(lab, draw, nodes, weights, gradients, powersgd_options(draw, warmup_steps=warmup_steps)).follow(exact=True)


@check("algorithms", "S10.1", "compressed", needs=_NEEDS, effort=0.6)
def compressed(lab: Lab, draw: Draw) -> None:
    """Compressed are matrices with (n + m) * r * min_compression_rate < n * m; all others are averaged, and have no memory."""
    generator = np.random.default_rng(draw(seeds))
    forms = [BOUNDARY[place] for place in generator.permutation(len(BOUNDARY))[:6]]
    weights, nodes = grid_weights(draw, [torch.float32] * 6, forms), draw(multi_rank_worlds)
    options = powersgd_options(
        draw,
        matrix_approximation_rank=draw(st.sampled_from([1, 1, 2, 5])),
        min_compression_rate=draw(st.sampled_from([2.0, 2.0, 1.0, 0.75, 1.5, 0.2])),
        memory=draw(st.sampled_from(["local", "averaged"])),
    )
    PowerSGDRounds(lab, draw, nodes, weights, exact_gradients(draw, weights, sum(nodes), 2), options).follow(exact=True)


@check("algorithms", "S10.1", "new_buckets", needs=_NEEDS, effort=0.3)
def new_buckets(lab: Lab, draw: Draw) -> None:
    """Memories and factors belong to parameters, and outlive new buckets."""
    nodes, weights = draw(_some_worlds), powersgd_weights(draw, torch.float32)
    gradients = any_gradients(draw, weights, sum(nodes), 4, usual)
    PowerSGDRounds(lab, draw, nodes, weights, gradients, powersgd_options(draw), {2: "new buckets"}).follow()


@check("algorithms", "S10.1", "restart", needs=_NEEDS, effort=0.3)
def restart(lab: Lab, draw: Draw) -> None:
    """Training that continues from saved weights and states goes on as if it had never stopped."""
    nodes, weights = draw(_some_worlds), powersgd_weights(draw, torch.float32)
    gradients = any_gradients(draw, weights, sum(nodes), 4, usual)
    options = powersgd_options(draw, warmup_steps=draw(st.integers(0, 2)))
    PowerSGDRounds(lab, draw, nodes, weights, gradients, options, {draw(st.integers(1, 3)): "restart"}).follow()


# S10.2


@check("algorithms", "S10.2", "rounds", dtypes=FLOATS, needs=_NEEDS, effort=0.4)
def rounds(lab: Lab, draw: Draw) -> None:
    """Each round gives P Q^T and leaves e and Q as the formulas say, from the e and Q that the last one left."""
    nodes, weights = draw(_some_worlds), powersgd_weights(draw, lab.dtype)
    gradients = any_gradients(draw, weights, sum(nodes), 3, usual)
    PowerSGDRounds(lab, draw, nodes, weights, gradients, powersgd_options(draw)).follow()


@check("algorithms", "S10.2", "unused_parameters", needs=_NEEDS, effort=0.3)
def unused_parameters(lab: Lab, draw: Draw) -> None:
    """A rank that does not use a parameter contributes a gradient of zero, and its memory."""
    nodes, weights = draw(multi_rank_worlds), powersgd_weights(draw, torch.float32)
    weights += grid_weights(draw, [torch.float32], [draw(matrices)])
    gradients = used_parts(draw, any_gradients(draw, weights, sum(nodes), 3, usual))
    PowerSGDRounds(lab, draw, nodes, weights, gradients, powersgd_options(draw)).follow()


def _follow_exactly(training: PowerSGDRounds, ranks_of_steps: Sequence[int]) -> None:
    """Expect the mean of every step up to rounding, given each one's rank, unless rounding decides what Q spans."""
    for step, rank in enumerate(ranks_of_steps):
        given = torch.stack(training.given(step, 0)).double()
        want, size = given.mean(0).to(training.weights[0].dtype), plain.norm(training.matrices_of(step, 0))
        _, _, columns = training.start(step, 0)
        values = np.linalg.svd(plain.added(training.matrices_of(step, 0)) @ columns, compute_uv=False)
        if rank and values[rank - 1] <= 1e-2 * values[0]:
            continue
        for number in range(training.n):
            training.expect("step", number, step, 0, want, ROUNDED, size)


@check("algorithms", "S10.2", "dead_columns", needs=_NEEDS, effort=0.5)
def dead_columns(lab: Lab, draw: Draw) -> None:
    """A gradient of zero gives zero, never NaN; columns of Q that became 0 are replaced, and later gradients come through."""
    nodes, (n, m), r = draw(_some_worlds), draw(st.sampled_from([(6, 5), (4, 8), (9, 6)])), draw(st.integers(1, 3))
    weights, seed = grid_weights(draw, [torch.float32], [(n, m)]), draw(seeds)
    ranks_of_steps = draw(st.sampled_from([(0, 1, 0, 1), (1, 0, 0, 1), (1, r, 1, r), (0, 0, r), (1, 1, 0, r)]))
    full = min(n, m)
    gradients: ByRank = [[] for _ in range(sum(nodes))]
    for step, rank in enumerate((*ranks_of_steps, full)):
        left, right = (
            bulk(torch.float32, "tame", seed + 7 * step + p, size * rank).view(size, rank) for p, size in enumerate((n, m))
        )
        for number, mine in enumerate(gradients):
            mine.append({0: left @ right.T * (1 + number)})
    # A memory would bring back what a dependent column has left of earlier gradients.
    options = powersgd_options(draw, matrix_approximation_rank=r, memory=None)
    training = PowerSGDRounds(lab, draw, nodes, weights, gradients, options)
    _follow_exactly(training, ranks_of_steps)
    training.round(len(ranks_of_steps), 0)


@check("algorithms", "S10.2", "zero_gradients", needs=_NEEDS, effort=0.3)
def zero_gradients(lab: Lab, draw: Draw) -> None:
    """Where all gradients are zero, so are the average and the memory, bit for bit, in every round."""
    nodes, weights = draw(_some_worlds), powersgd_weights(draw, torch.float32)
    gradients: ByRank = [[{p: torch.zeros_like(w) for p, w in enumerate(weights)} for _ in range(3)] for _ in range(sum(nodes))]
    training = PowerSGDRounds(
        lab, draw, nodes, weights, gradients, powersgd_options(draw, memory=draw(st.sampled_from(["local", "averaged"])))
    )
    for step, rank, place in itertools.product(range(3), range(training.n), range(len(weights))):
        zero = torch.zeros(weights[place].shape)
        for action in ("step", "memories") if training.rank_of(place) else ("step",):
            found = training.seen(action, rank, step, place)
            training.expect_that(action, rank, step, place, f"{training.source(action, rank, step, place)}.abs()",
                                 None if found is None else found.abs(), zero, EXACT, None)  # fmt: skip


# S10.3


@check("algorithms", "S10.3", "dependent_columns", needs=_NEEDS, effort=0.5)
def dependent_columns(lab: Lab, draw: Draw) -> None:
    """What rounding leaves of a dependent column is no direction: gradients of a lower rank than r are averaged exactly."""
    nodes, (n, m), rank = draw(_some_worlds), draw(st.sampled_from([(24, 16), (12, 9), (9, 30)])), draw(st.integers(1, 2))
    weights, seed = grid_weights(draw, [torch.float32], [(n, m)]), draw(seeds)
    left, right = (bulk(torch.float32, "tame", seed + p, size * rank).view(size, rank) for p, size in enumerate((n, m)))
    gradients: ByRank = [[{0: left @ right.T * 2.0**number}] * 3 for number in range(sum(nodes))]
    options = powersgd_options(draw, matrix_approximation_rank=draw(st.integers(rank + 1, 6)), memory=None)
    _follow_exactly(PowerSGDRounds(lab, draw, nodes, weights, gradients, options), [rank] * 3)


@check("algorithms", "S10.3", "scales", dtypes=("float32", "float64"), needs=_NEEDS, effort=0.4)
def scales(lab: Lab, draw: Draw) -> None:
    """Columns are compared with their own size: gradients of any magnitude are compressed alike."""
    nodes, weights = draw(_some_worlds), powersgd_weights(draw, lab.dtype)
    factor = 2.0 ** draw(st.sampled_from([-45, -30, 40, 50] if lab.dtype is torch.float32 else [-300, -60, 60, 300]))
    gradients = any_gradients(draw, weights, sum(nodes), 3, st.just("tame"))
    scaled = [[{place: g * factor for place, g in given.items()} for given in rank] for rank in gradients]
    PowerSGDRounds(lab, draw, nodes, weights, scaled, powersgd_options(draw)).follow()


# S10.4


@check("algorithms", "S10.4", "not_finite", needs=_NEEDS, effort=0.6)
def not_finite(lab: Lab, draw: Draw) -> None:
    """A gradient that is not finite on one rank becomes NaN on every rank, and its memories and its factor stay; others go on."""
    nodes, weights = (
        draw(_some_worlds),
        [*grid_weights(draw, [torch.float32], [draw(matrices)]), *powersgd_weights(draw, torch.float32)],
    )
    n, bad_step = sum(nodes), draw(st.integers(0, 2))
    gradients = any_gradients(draw, weights, n, 4, usual)
    culprit = gradients[draw(st.integers(0, n - 1))][bad_step][0].view(-1)
    culprit[draw(st.integers(0, culprit.numel() - 1))] = draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    training = PowerSGDRounds(lab, draw, nodes, weights, gradients, powersgd_options(draw))
    for step, place in itertools.product(range(4), range(len(weights))):
        if step == bad_step and place == 0:
            _refused(training, step, place)
        else:
            training.round(step, place)


def _refused(training: PowerSGDRounds, step: int, place: int) -> None:
    """Expect NaN, and that nothing else has changed."""
    w, r = training.weights[place], training.rank_of(place)
    for rank in range(training.n):
        training.expect("step", rank, step, place, torch.full_like(w, torch.nan))
        for action, like in (("memories", w), ("factors", torch.zeros(w.numel() // w.shape[0], r))):
            if action == "memories" and training.options["memory"] is None:
                continue
            before = training.seen(action, rank, step - 1, place) if step else torch.zeros_like(like)
            found = training.seen(action, rank, step, place)
            if step == 0 and found is None:  # there is none yet
                continue
            training.expect(action, rank, step, place, before, why="after a round that was not finite")


@check("algorithms", "S10.4", "overflow", needs=_NEEDS, effort=0.2)
def overflow(lab: Lab, draw: Draw) -> None:
    """So does one whose Q overflows in the sum, though every rank's gradient and P are finite; the next one comes through."""
    nodes = draw(_some_worlds)
    weights = grid_weights(draw, [torch.float32], [(64, 8)])
    large = torch.full((64, 8), 1e38 / sum(nodes))
    gradients: ByRank = [[{0: large}, {0: torch.ones(64, 8)}] for _ in range(sum(nodes))]
    training = PowerSGDRounds(lab, draw, nodes, weights, gradients, powersgd_options(draw, matrix_approximation_rank=1))
    _refused(training, 0, 0)
    for rank in range(training.n):
        training.expect("step", rank, 1, 0, torch.ones(64, 8), ROUNDED, 10.0)


# S10.5


@check("algorithms", "S10.5", "conservation", dtypes=("float32", "float64"), needs=_NEEDS, effort=0.3)
def conservation(lab: Lab, draw: Draw) -> None:
    """What was applied in all rounds, and the mean of the memories, is the sum of the mean gradients."""
    nodes, weights = draw(_some_worlds), powersgd_weights(draw, lab.dtype)
    gradients = any_gradients(draw, weights, sum(nodes), 5, usual)
    options = powersgd_options(draw, memory=draw(st.sampled_from(["local", "averaged"])), warmup_steps=draw(st.integers(0, 2)))
    training = PowerSGDRounds(lab, draw, nodes, weights, gradients, options)
    for place in range(len(weights)):
        every = [x for step in range(5) for x in training.given(step, place)]
        want = torch.stack(every).double().sum(0) / training.n
        found = torch.stack([training.seen("step", 0, step, place) for step in range(5)]).double().sum(0)
        left = [training.seen("memories", rank, 4, place) for rank in range(training.n)] if training.rank_of(place) else []
        source = f"sum(results[0][i][{place}].double() for i in range(0, 15, 3))"
        if left and all(x is not None for x in left):
            found = found + torch.stack(left).double().mean(0)
            source += f" + torch.stack([r[-2][{place}] for r in results]).double().mean(0)"
        size = plain.norm([x.reshape(1, -1).numpy() for x in [*every, *left] if x is not None])
        kind = lab.dtype
        tolerance = SUM(100 * training.n)
        training.expect_that(
            "step", 0, 4, place, f"({source}).to({kind})", found.to(kind), want.to(kind), tolerance, size, "the sum"
        )


@check("algorithms", "S10.5", "low_rank", needs=_NEEDS, effort=0.5)
def low_rank(lab: Lab, draw: Draw) -> None:
    """A mean of rank r or less is averaged exactly, though no rank's own gradient has that rank."""
    nodes, r = draw(worlds(4)), draw(st.integers(1, 3))
    weights = grid_weights(draw, [torch.float32], [draw(st.sampled_from([(8, 10), (12, 8), (9, 3, 3)]))])
    by_rank = of_rank(draw, weights[0], sum(nodes), r)
    options = powersgd_options(draw, matrix_approximation_rank=r)
    _follow_exactly(PowerSGDRounds(lab, draw, nodes, weights, [[{0: g}] for g in by_rank], options), [r])


@check("algorithms", "S10.5", "same_bits", dtypes=FLOATS, needs=_NEEDS, effort=0.2)
def same_bits(lab: Lab, draw: Draw) -> None:
    """All ranks have the same averaged gradients and factors, bit for bit, whatever the gradients are."""
    nodes, weights = draw(multi_rank_worlds), powersgd_weights(draw, lab.dtype)
    gradients = any_gradients(draw, weights, sum(nodes), 3, st.sampled_from(["tame", "near", "ties", "constant", "tiny"]))
    training = PowerSGDRounds(lab, draw, nodes, weights, gradients, powersgd_options(draw))
    for step, place in itertools.product(range(3), range(len(weights))):
        training.same_on_all_ranks(step, place)
        training.same_on_all_ranks(step, place, "factors")


@check("algorithms", "S10.5", "messages", needs=_NEEDS, effort=0.3)
def messages(lab: Lab, draw: Draw) -> None:
    """Each bucket sends one all-reduce for all P and what is not compressed, and one for all Q, of exactly their elements."""
    nodes, weights = draw(multi_rank_worlds), powersgd_weights(draw, torch.float32, 3)
    weights.insert(draw(st.integers(0, len(weights))), torch.zeros(7))
    options = powersgd_options(draw, min_compression_rate=draw(st.sampled_from([EVERY_MATRIX, 1.0])))
    options["bucket_bytes"] = draw(st.sampled_from([40, ONE_BUCKET, ONE_BUCKET]))
    training = PowerSGDRounds(lab, draw, nodes, weights, any_gradients(draw, weights, sum(nodes), 2, usual), options, record=True)
    sizes = []
    for bucket in training.layout:
        ranks = [(weights[place], training.rank_of(place)) for place in bucket]
        first = sum(r * w.shape[0] if r else w.numel() for w, r in ranks)
        sizes += [first, *([sum(r * (w.numel() // w.shape[0]) for w, r in ranks if r)] if any(r for _, r in ranks) else [])]
    floats = "[x for x in (sends[0] for what, sends in messages if what.startswith('allreduce')) if x.is_floating_point()]"
    source = f"[x.numel() for x in {floats} if x.numel()]"
    sent = [sends[0] for what, sends in training.training.messages if what.startswith("allreduce")]
    found = [x.numel() for x in sent if x.is_floating_point() and x.numel()]
    wanted = [size for size in sizes if size] * 2
    training.training.expect_true(f"{source} == {wanted}", found == wanted, f"all-reduces have {found} elements, not {wanted}")
