"""Properties shared by several algorithms: one function each, and a table of algorithms and
clauses.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from bagua_ref.conformance.cases.strategies import COMPRESSIBLE, FLOATS, dtype_named, worlds
from bagua_ref.conformance.cases.training_cases import (
    ONE_BUCKET,
    PLAIN,
    ByRank,
    any_weights,
    graph_cases,
    grid_weights,
    momenta,
    multi_rank_worlds,
    outer_optimizers,
    tame,
    used_by_few,
    used_parts,
)
from bagua_ref.conformance.checks.algorithms import (
    BYTEGRAD,
    DECENTRALIZED,
    GRADIENT_ALLREDUCE,
    QADAM,
    RING,
)
from bagua_ref.conformance.checks.algorithms_compressed import TOPK
from bagua_ref.conformance.checks.algorithms_local import DILOCO, LOCAL_SGD, fragments_of
from bagua_ref.conformance.checks.algorithms_powersgd import (
    POWERSGD,
    conserves,
    judge_exactly,
    same_on_all_ranks,
)
from bagua_ref.conformance.checks.algorithms_sparse import DEMO, SPARSELOCO, WITH_COSINE
from bagua_ref.conformance.checks.registry import check, trains
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import LOST, TrainedAlgorithm, Training

Given = dict[str, Any]

_ON_WEIGHTS = (GRADIENT_ALLREDUCE, BYTEGRAD, DECENTRALIZED, RING, QADAM, LOCAL_SGD, DILOCO)
"""Algorithms whose steps return weights."""
_SEVERAL = worlds(4).filter(lambda nodes: sum(nodes) > 1)
_SOME_WARM_UP = {"warmup_steps": st.integers(0, 2)}


def _one_of(lab: Lab, algorithms: tuple[TrainedAlgorithm, ...]) -> TrainedAlgorithm:
    """Draw one of these algorithms that the target provides."""
    own = lab.target.parts.get("algorithms")
    found: TrainedAlgorithm = lab.choice(
        [row for row in algorithms if own is None or hasattr(own, row.method)]
    )
    return found


# Algorithms that are drawn.


@check("algorithms.S5.first_rank", needs=("gradient_allreduce",), effort=0.3)
def first_rank(lab: Lab) -> None:
    """Training starts from the first rank's weights on every rank."""
    algorithm, nodes, count = (
        _one_of(lab, _ON_WEIGHTS),
        lab.draw(_SEVERAL),
        lab.integer(1, 3),
    )
    forms = [(3,)] * count
    starts = [grid_weights(lab.draw, [lab.dtype] * count, forms) for _ in range(sum(nodes))]
    steps = 3 if algorithm is QADAM else 1
    algorithm.train(lab, nodes=nodes, weights=starts[0], starts=starts, kinds=(), steps=steps)


@check("algorithms.S2.4.any_order", needs=("gradient_allreduce",), effort=0.3)
def any_order(lab: Lab) -> None:
    """Ranks whose gradients become ready in different orders exchange the same buckets at every
    step.
    """
    count = lab.integer(2, 5)
    orders = st.permutations(range(count))

    def shuffled(gradients: ByRank) -> ByRank:
        return [
            [{place: given[place] for place in lab.draw(orders)} for given in rank]
            for rank in gradients
        ]

    _one_of(lab, (GRADIENT_ALLREDUCE, BYTEGRAD)).train(
        lab,
        nodes=_SEVERAL,
        change=shuffled,
        steps=st.integers(2, 3),
        shapes=[(2,)] * count,
        bucket_bytes=st.sampled_from([1, 1, 16]),
        hierarchical=False,
        average=True,
    )


# Warm-ups.

_WARM_UP = {"warmup_steps": st.integers(1, 3), "kinds": ()}
_IN_WARM_UP = "Up to warmup_steps, gradients are averaged"

trains(LOCAL_SGD, "S9.1.warmup", 0.25)(
    _WARM_UP,
    "Up to warmup_steps, every step applies the mean gradient; steps of periods are counted from"
    " there.",
)
trains(DILOCO, "S9.warmup", 0.25)(
    {**_WARM_UP, "nodes": multi_rank_worlds},
    "Up to warmup_steps, every step applies the mean gradient; then the global weights are taken,"
    " and windows begin.",
)
trains(POWERSGD, "S10.1.warmup", 0.25)(
    {**_WARM_UP, "judge": judge_exactly},
    f"{_IN_WARM_UP}; then rounds are counted from 0, and nothing was remembered.",
)
trains(TOPK, "S11.2.warmup", 0.25)(_WARM_UP, f"{_IN_WARM_UP}, and nothing is remembered.")
trains(DEMO, "S15.6.warmup", 0.2)(_WARM_UP, f"{_IN_WARM_UP}, and M stays 0.")


# Restarts, and new buckets.


def restart(algorithm: TrainedAlgorithm, lab: Lab, loses: bool = False, **given: Any) -> None:
    """Save weights and states at some step of a training; load them into a new training and
    continue; ``loses``: also without error memories.
    """

    def before(steps: int) -> dict[int, str]:
        if loses and lab.has_every_option and lab.flag():
            return {lab.integer(1, steps - 1): LOST}
        one = lab.flag()
        return dict.fromkeys([lab.integer(1, steps - 1)] if one else range(1, steps), "restart")

    algorithm.train(lab, before=before, **given)


_IN_FLIGHT: Given = {
    "warmup_steps": st.integers(0, 2),
    # so fragments are applied twice
    "steps": lambda options: st.integers(2, 5).map(
        lambda more: options["warmup_steps"] + options["period"] + more
    ),
    "mix": st.sampled_from([0.0, 0.25, 0.5]),
    "momentum": momenta,
    "kinds": tame,
    "outer_optimizer": outer_optimizers.filter(lambda outer: outer is not PLAIN),
}
"""A training in which a fragment may be in flight when it is saved."""


def _on_graphs(lab: Lab) -> Given:
    graph, nodes, between = lab.draw(graph_cases(6, changing=True))
    names = lab.draw(st.lists(st.sampled_from(lab.dtypes(FLOATS)), min_size=1, max_size=3))
    return {
        "weights": grid_weights(lab.draw, [*map(dtype_named, names)]),
        "peer_selection_mode": graph,
        "nodes": nodes,
        "hierarchical": between,
    }


def _in_flight(lab: Lab) -> Given:
    remembers = lab.has_every_option and lab.flag()
    memory = {"compression": "MinMaxUInt8", "error_feedback": True} if remembers else {}
    return {**_IN_FLIGHT, **memory, "options": partial(DILOCO.options, smallest_gap=2)}


_AS_IF = "Training that continues from saved weights and states goes on as if it had never stopped"
_restarts = partial(trains, of=restart)
_memory = st.sampled_from(["local", "averaged"])
_LOSES = {**_SOME_WARM_UP, "loses": True}

_restarts(DECENTRALIZED, "S13.restart", 0.35)(
    _on_graphs,
    "Training that continues from a saved state goes on with the next graph, as if it had never"
    " stopped.",
)
_restarts(RING, "S5.4.restart", 0.15)({}, f"{_AS_IF}, with the same replicas.")
_restarts(QADAM, "S5.5.restart", 0.25)({}, f"{_AS_IF}, in the warm-up and after it.")
_restarts(LOCAL_SGD, "S9.restart_of_local_sgd", 0.25)(
    _SOME_WARM_UP,
    "Training that continues from saved weights and states averages at the steps at which it would"
    " have.",
)
_restarts(DILOCO, "S9.restart", 0.4)(
    _in_flight, f"{_AS_IF}, whatever was in flight, and with the same memories."
)
_restarts(POWERSGD, "S10.1.restart", 0.4)({**_LOSES, "memory": _memory}, f"{_AS_IF}.")
_restarts(TOPK, "S11.2.restart", 0.25)({**_LOSES, "kinds": ()}, f"{_AS_IF}.")
_restarts(SPARSELOCO, "S15.5.restart", 0.25)(
    {**_IN_FLIGHT, "options": partial(SPARSELOCO.options, smallest_gap=2)}, f"{_AS_IF}."
)
_restarts(DEMO, "S15.6.restart", 0.25)({**_LOSES, "kinds": ()}, f"{_AS_IF}.")

_NEW_BUCKETS = {"steps": 4, "before": lambda steps: {2: "new buckets"}}

trains(POWERSGD, "S10.1.new_buckets", 0.25)(
    _NEW_BUCKETS, "Memories and factors belong to parameters, and outlive new buckets."
)
trains(TOPK, "S11.2.new_buckets", 0.2)(
    {**_NEW_BUCKETS, "error_feedback": True}, "Memories outlive new buckets."
)
trains(DEMO, "S15.6.new_buckets", 0.2)(_NEW_BUCKETS, "Memories outlive new buckets.")


# Parameters that some ranks do not use.


def unused_parameters(algorithm: TrainedAlgorithm, lab: Lab, **given: Any) -> None:
    """Train with gradients that are missing for some parameters of each rank."""
    weights = algorithm.weights(lab.draw, lab.dtype) + any_weights(lab.draw, lab.dtype, 2)
    given = {"nodes": multi_rank_worlds, "weights": weights, **given}
    algorithm.train(lab, **given, change=partial(used_parts, lab.draw))


_UNUSED = "Parameters that a rank has not used, or never uses, are averaged all the same."
_ZERO = "A rank that does not use a parameter contributes a gradient of zero"
_lacks = partial(trains, of=unused_parameters)


@check("algorithms.S2.5.unused_parameters", needs=("gradient_allreduce",), effort=0.3)
def of_gradients(lab: Lab) -> None:
    """A rank that does not use a parameter contributes a gradient of zero; one that no rank uses
    gets no gradient.
    """
    # Adam's own step counts tell a gradient of zero from none
    algorithm = _one_of(lab, (GRADIENT_ALLREDUCE, QADAM))
    given: Given = {"hierarchical": False}
    if lab.integer(0, 2):
        unused_parameters(algorithm, lab, **given)
    else:
        given |= {"nodes": st.sampled_from([(2,), (1, 1)]), "bucket_bytes": ONE_BUCKET}
        few = partial(used_by_few, lab.draw)
        algorithm.train(lab, shapes=[(1,)] * 70, change=few, steps=3, **given)


_lacks(BYTEGRAD, "S5.2.unused_parameters", 0.1)({}, f"{_ZERO}, which shares chunks with others.")
_lacks(DECENTRALIZED, "S5.3.unused_parameters", 0.1)({}, _UNUSED)
_lacks(RING, "S5.4.unused_parameters", 0.1)({}, _UNUSED)
_lacks(LOCAL_SGD, "S9.1.unused_parameters", 0.35)(
    {"warmup_steps": st.integers(0, 3), "momentum": 0.5},
    f"{_UNUSED} In the warm-up, one that no rank has used gets no gradient.",
)
_lacks(DILOCO, "S9.4.unused_parameters", 0.25)(
    {"nodes": st.sampled_from([(2,), (1, 1)])},
    "Parameters that a rank has not used, or never uses, are sent and applied all the same.",
)
for _algorithm, _clause in ((POWERSGD, "S10.2"), (TOPK, "S11.2"), (DEMO, "S15.6")):
    _lacks(_algorithm, f"{_clause}.unused_parameters", 0.3)({}, f"{_ZERO}, and its memory.")


# Gradients that are not finite.


def _poisoned(lab: Lab, **given: Any) -> Given:
    """Return a training in which some gradients are NaN or infinite."""
    generator = np.random.default_rng(lab.seed())

    def poisoned(gradients: ByRank) -> ByRank:
        for _ in range(lab.integer(1, 6)):
            step = gradients[generator.integers(len(gradients))][generator.integers(3)]
            x = step[int(generator.integers(2))].view(-1)
            x[generator.integers(x.numel())] = float(generator.choice([np.nan, np.inf, -np.inf]))
        if lab.flag():  # NaNs are equal, whatever their other bits
            x = gradients[0][0][0].view(-1)
            x[0], x[1::3] = np.inf, np.nan
            bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)[1::3]
            bits += torch.from_numpy(generator.integers(4, size=bits.numel())).to(bits.dtype)
        return gradients

    return {"nodes": worlds(3), "shapes": [(17,), (8, 3)], "change": poisoned, "steps": 3, **given}


trains(BYTEGRAD, "S5.2.not_finite", 0.1, COMPRESSIBLE)(
    _poisoned,
    "A chunk in which a value of any rank is not finite becomes NaN on every rank, and no other"
    " does.",
)
trains(TOPK, "S11.2.not_finite", 0.2, COMPRESSIBLE)(
    partial(_poisoned, ratio=st.sampled_from([0.01, 0.05, 0.1, 0.3])),
    "NaN counts as larger than infinity, and that as larger than numbers; a round with one of them"
    " leaves every rank's memory.",
)


def _overflowing(gradients: ByRank) -> ByRank:
    """Replace gradients of the second step: their coefficients are finite, but the inverse transform
    of the mean of contributors overflows.
    """
    for rank, sign in zip(gradients, (1, -1), strict=True):
        rank[1][0] = torch.tensor([2.2e38, sign * 2.2e38]).to(rank[1][0].dtype)
    return gradients


@trains(DEMO, "S15.6.not_finite", 0.25, COMPRESSIBLE)
def not_finite_in_demo(lab: Lab) -> Given:
    """If the mean or its inverse transform is not finite, the parameter's gradient is NaN
    throughout, and M stays as it was, on every rank.
    """
    case = lab.integer(0, 2)
    given = {**_poisoned(lab), **(WITH_COSINE if case else {})}
    if case == 2:
        given |= {"nodes": (2,), "shapes": [(2,), (3,)], "change": _overflowing}
        given |= {"top_k": 1, "mean": "contributors"}
    return given


# Equal results in all rounds and on all ranks.


def _conserve(training: Training) -> None:
    for step, place in itertools.product(range(training.steps), range(len(training.weights))):
        if step >= training.options["warmup_steps"]:
            conserves(training, step, place)


_CONSERVED = {"steps": 5, "judge": _conserve, "kinds": ("tame", "ties", "near")}
_SUM = (
    "What was applied in all rounds, and the mean of the memories, is the sum of the mean"
    " gradients."
)

trains(POWERSGD, "S10.5.conservation", 0.25, ("float32", "float64"))(
    {**_CONSERVED, **_SOME_WARM_UP, "memory": _memory}, _SUM
)
trains(TOPK, "S11.2.conservation", 0.2)({**_CONSERVED, "error_feedback": True}, _SUM)
trains(DEMO, "S15.6.conservation", 0.2)(
    {**_CONSERVED, "decay": 1.0, "sign": False, "mean": "all"}, _SUM
)


def _same_globals(training: Training) -> None:
    """Expect equal weights on all ranks: the global weights after every step, and those of each
    fragment just applied.
    """
    fragments = fragments_of(training)
    gap = training.options["period"] // len(fragments)
    for step in range(training.steps):
        for place in range(len(training.weights)):
            same_on_all_ranks(training, "global weights", step, place)
        if (step + 1) % gap == 0:
            for place in fragments[(step + 1) // gap % len(fragments) - 1]:
                same_on_all_ranks(training, "step", step, place)


def _same_averages(training: Training) -> None:
    for step, place in itertools.product(range(training.steps), range(len(training.weights))):
        same_on_all_ranks(training, "step", step, place)
        same_on_all_ranks(training, "factors", step, place)


trains(DILOCO, "S9.5.same_bits", 0.25)(
    {
        "nodes": multi_rank_worlds,
        "judge": _same_globals,
        "looks": ("global weights",),
        "exact": False,
        "kinds": ("tame", "near"),
        "outer_optimizer": outer_optimizers | st.none(),
    },
    "After every apply, all ranks have the same global weights, bit for bit, and with mix 0 the same"
    " weights of the fragment.",
)
trains(POWERSGD, "S10.5.same_bits", 0.1, FLOATS)(
    {
        "nodes": multi_rank_worlds,
        "judge": _same_averages,
        "kinds": ("tame", "near", "ties", "constant", "tiny"),
    },
    "All ranks have the same averaged gradients and factors, bit for bit, whatever the gradients"
    " are.",
)
