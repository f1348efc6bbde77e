"""Local SGD and DiLoCo, action by action, compared with one loop over all ranks (S9)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    seeds,
    worlds,
)
from bagua_ref.conformance.cases.training_cases import (
    PLAIN,
    ByRank,
    any_kind,
    any_weights,
    given_fragments,
    grid_weights,
    momenta,
    multi_rank_worlds,
    outer_optimizer,
    outer_optimizers,
    schedules,
    sized_worlds,
    tame,
)
from bagua_ref.conformance.checks.registry import check, check_trainings
from bagua_ref.conformance.expected import local_updates_numpy as plain
from bagua_ref.conformance.expected.kernels_numpy import stored
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import TrainedAlgorithm, Training, exactly, of_kinds

__all__ = ["DILOCO", "LOCAL_SGD", "follow_model", "fragments_of", "refuse", "tame_after_warm_up"]

_LOCAL_SGD, _DILOCO = ("local_sgd",), ("diloco",)


# local_sgd.


def _options_of_local_sgd(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    fixed = {"lr": 1.0, "warmup_steps": 0, "offset": 0, "hierarchical": False}
    return {**fixed, "period": draw(st.integers(1, 4)), "momentum": draw(momenta)}


def _like_local_sgd(**changed: Any) -> Callable[[Training], None]:
    """Return what expects the weights of local_sgd, with the options of the training but for those
    that are given.
    """

    def follow(training: Training) -> None:
        names = ("period", "warmup_steps", "offset", "hierarchical", "momentum")
        options = {
            name: training.options[name] for name in names if name in training.options
        } | changed
        given = [training.gradients(step) for step in range(training.steps)]
        for ranks in plain.local_sgd(
            training.start, given, 1.0, training.dtypes, list(training.nodes), **options
        ):
            training.step(ranks, training.nearly())

    return follow


LOCAL_SGD = TrainedAlgorithm(
    "local_sgd",
    _options_of_local_sgd,
    _like_local_sgd(),
    worlds=lambda dtype: multi_rank_worlds,
    steps=lambda draw, options: options["warmup_steps"] + draw(st.integers(2, 7)),
)


@check("S9.1", "offset", needs=_LOCAL_SGD, effort=0.3)
def offset(lab: Lab, draw: Draw) -> None:
    """With an offset, the first averaging follows that step: offset 1 begins with the first, offset
    0 with step period.
    """
    size = draw(st.integers(2, 4))
    LOCAL_SGD.train(
        lab,
        draw,
        steps=draw(st.integers(size, 2 * size + 1)),
        period=size,
        offset=draw(st.integers(0, size - 1)),
    )


@check("S9.1", "inside_nodes", needs=_LOCAL_SGD, effort=0.3)
def inside_nodes(lab: Lab, draw: Draw) -> None:
    """Hierarchical, each step after the warm-up applies the mean gradient of the node's ranks, and
    periods average over all.
    """
    nodes = draw(st.sampled_from([(2, 1), (2, 2), (1, 3), (2,), (1, 1, 2)]))
    LOCAL_SGD.train(lab, draw, nodes=nodes, warmup_steps=draw(st.integers(0, 2)), hierarchical=True)


# diloco.


def _options_of_diloco(draw: Draw, weights: list[Tensor]) -> dict[str, Any]:
    fixed = {"lr": 1.0, "momentum": 0.0, "warmup_steps": 0, "mix": 0.0, "compression": None}
    return {**fixed, **schedules(draw, len(weights)), "outer_optimizer": draw(outer_optimizers)}


def fragments_of(training: Training) -> list[list[int]]:
    """Return the places of the parameters in each fragment."""
    fragments = training.options["fragments"]
    return (
        plain.places_of([w.nbytes for w in training.weights], fragments)
        if isinstance(fragments, int)
        else fragments
    )


def tame_after_warm_up(
    draw: Draw, weights: list[Tensor], ranks: int, steps: int, options: dict[str, Any]
) -> ByRank:
    """Return gradients of any tame kind, or ones that add up exactly if there is a warm-up."""
    return (exactly if options["warmup_steps"] else of_kinds(tame))(
        draw, weights, ranks, steps, options
    )


def _follow_diloco(training: Training) -> None:
    outer = outer_optimizer(training.options["outer_optimizer"])
    follow_model(
        training, partial(plain.DiLoCo, compression=training.options["compression"]), outer
    )


def follow_model(training: Training, make: Callable[..., plain.DiLoCo], outer: plain.Outer) -> Any:
    """Expect the weights of the model of all ranks that ``make`` returns, which is returned."""
    options, dtypes = training.options, training.dtypes
    named = {name: options[name] for name in ("period", "delay", "mix", "warmup_steps", "momentum")}
    fragments = fragments_of(training)
    model = make(training.start, training.n, options["lr"], dtypes, fragments, outer, **named)
    for step in range(training.steps):
        given, how = training.gradients(step), "step"
        try:
            model.step(given)
        except ArithmeticError:
            how = "failing step"
        training.step(model.ranks, training.nearly(), how=how)
        shown = model.ranks
        if model.g is not None:
            shown = [
                [stored(g, dtype) for g, dtype in zip(model.g, dtypes, strict=True)]
            ] * training.n
        seen = {"global weights": shown, "memories": [*map(list, getattr(model, "errors", ()))]}
        for action in training.looks:
            training.look(action, seen.get(action, given), training.nearly())
    return model


DILOCO = TrainedAlgorithm(
    "diloco",
    _options_of_diloco,
    _follow_diloco,
    worlds=lambda dtype: st.sampled_from([(2,), (1, 1), (1,)]),
    weights=lambda draw, dtype: any_weights(draw, dtype, 3),
    steps=lambda draw, options: (
        options["warmup_steps"] + options["period"] + draw(st.integers(1, 4))
    ),
)


@check(
    "S9.2",
    "outer_optimizer",
    dtypes=("float32", "float64"),
    needs=_DILOCO,
    effort=0.2,
)
def outer_optimizers_of_torch(lab: Lab, draw: Draw) -> None:
    """The mean of g - x is the gradient of g, and Nesterov's SGD(0.7, 0.9), or any other optimizer,
    steps with it.
    """
    weights = any_weights(draw, lab.dtype, 3)
    drawn = schedules(draw, len(weights), gaps=st.integers(1, 2))
    outer = draw(
        st.sampled_from(
            [
                None,
                None,
                {"class": "SGD", "lr": 0.3, "momentum": 0.9},
                {"class": "Adam", "lr": 0.125},
            ]
        )
    )
    DILOCO.train(
        lab,
        draw,
        weights=weights,
        steps=3 * drawn["period"],
        exact=False,
        **drawn,
        outer_optimizer=outer,
    )


# diloco: fragments.


def _apart(
    lab: Lab, draw: Draw, weights: list[Tensor], fragments: int | list[list[int]], count: int
) -> None:
    """Train so that each step applies the next fragment, and weights show which parameters it
    has.
    """
    nodes = draw(st.sampled_from([(2,), (1, 1)]))
    DILOCO.train(
        lab,
        draw,
        nodes=nodes,
        weights=weights,
        steps=count + 1,
        period=count,
        fragments=fragments,
        delay=0,
    )


@check("S9.3", "fragments", needs=_DILOCO)
def fragments(lab: Lab, draw: Draw) -> None:
    """A number of fragments cuts the parameters, in their order, where their middles lie by bytes,
    and leaves none empty.
    """
    generator = np.random.default_rng(draw(seeds))
    forms = [
        (int(size),) for size in generator.choice([0, 1, 1, 2, 3, 8, 30], generator.integers(2, 9))
    ]
    dtypes = [dtype_named(str(name)) for name in generator.choice(lab.dtypes(FLOATS), len(forms))]
    count = int(generator.integers(2, len(forms) + 1))
    _apart(lab, draw, grid_weights(draw, dtypes, forms), count, count)


@check("S9.3", "lists", needs=_DILOCO, effort=0.4)
def lists_of_names(lab: Lab, draw: Draw) -> None:
    """Lists of names are the fragments, whatever their order."""
    weights = any_weights(draw, torch.float32, 5, 2)
    lists = draw(given_fragments(len(weights)))
    _apart(lab, draw, weights, lists, len(lists))


@check("S9.3", "own_optimizers", needs=_DILOCO, effort=0.5)
def own_optimizers(lab: Lab, draw: Draw) -> None:
    """Each fragment has an outer optimizer of its own, whose step moves no other fragment."""
    weights = any_weights(draw, torch.float32, 4, 2)
    outer = {
        "class": "SGD",
        "lr": 0.5,
        "momentum": 0.5,
        "weight_decay": draw(st.sampled_from([0.0, 0.5])),
    }
    drawn = schedules(draw, len(weights), fewest=2)
    DILOCO.train(
        lab,
        draw,
        nodes=(2,),
        weights=weights,
        steps=2 * drawn["period"],
        **drawn,
        outer_optimizer=outer,
    )


# diloco: when and how.


@check("S9.4", "schedule", dtypes=FLOATS, needs=_DILOCO, effort=0.25)
def schedule(lab: Lab, draw: Draw) -> None:
    """Each fragment is sent and, after the delay, applied at its steps of the period: the weights
    of the send, not of the apply.
    """
    weights = any_weights(draw, lab.dtype)
    drawn = schedules(draw, len(weights))
    steps = min(2 * drawn["period"] + 1, 12)
    DILOCO.train(
        lab, draw, nodes=draw(sized_worlds(lab.dtype)), weights=weights, steps=steps, **drawn
    )


@check("S9.4", "mix", dtypes=FLOATS, needs=_DILOCO)
def mix(lab: Lab, draw: Draw) -> None:
    """Applying moves weights to g + mix*(x - g), for mix from 0.5 on to x - (x - g)*(1 - mix), each
    operation rounded.
    """
    weights = grid_weights(draw, [lab.dtype] * 2, [(170,), (3, 2)])
    drawn = schedules(draw, len(weights), gaps=st.integers(1, 2), most=2)
    share = draw(st.sampled_from([0.25, 0.3, 0.3, 0.5, 0.7, 0.7, 0.9, 1.0]))
    DILOCO.train(
        lab,
        draw,
        weights=weights,
        gradients=of_kinds(tame),
        steps=drawn["period"] + 1,
        **drawn,
        mix=share,
    )


# diloco: the mean.


@check("S9.5", "one_byte", needs=_DILOCO, effort=0.7)
def one_byte(lab: Lab, draw: Draw) -> None:
    """Compressed, a fragment's differences are one float32 tensor in the order of its names, padded
    with zeros, bit for bit.
    """
    names, count = lab.dtypes(COMPRESSIBLE), draw(st.integers(1, 4))
    lab.dtypes(("float32",))
    forms = [draw(st.sampled_from([(1,), (2,), (3, 2), (17,), (0,)])) for _ in range(count)]
    weights = grid_weights(draw, [dtype_named(draw(st.sampled_from(names))) for _ in forms], forms)
    lists, gap = draw(given_fragments(count, most=2)), draw(st.integers(1, 2))

    def apart(gradients: ByRank) -> ByRank:
        """Move most differences far from zero and from each other, so that it matters what shares a
        chunk.
        """
        moved = [place for place in range(count) if place % 3 != 2]
        return [
            [
                given | {place: (given[place].abs() / 8 + 1) * 2.0**place for place in moved}
                for given in rank
            ]
            for rank in gradients
        ]

    size, chosen = gap * len(lists), draw(st.sampled_from([lists, lists, len(lists)]))
    DILOCO.train(
        lab,
        draw,
        nodes=draw(multi_rank_worlds | worlds(3)),
        weights=weights,
        gradients=of_kinds(tame),
        change=apart,
        steps=size + 1,
        exact=True,
        period=size,
        fragments=chosen,
        delay=draw(st.integers(0, gap - 1)),
        outer_optimizer=PLAIN,
        compression="MinMaxUInt8",
    )


def refuse(algorithm: TrainedAlgorithm, lab: Lab, draw: Draw, compression: str | None) -> None:
    """Let differences of one rank overflow, and then come back."""
    nodes = draw(st.sampled_from([(1,), (1,), (2,), (1, 1), (3,)]))
    n, count = sum(nodes), draw(st.integers(1, 2))
    culprit, victim, huge = draw(st.integers(0, n - 1)), draw(st.integers(0, count - 1)), 2.0**127
    weights = grid_weights(draw, [torch.float32] * count, [(3,)] * count)
    weights[victim][1] = huge
    delay = draw(st.integers(0, 1))
    # The fragment is first applied after step gap * (victim + 1); its g - x has overflowed when it
    # was sent.
    gap, failing = 2 + delay, (2 + delay) * (victim + 1)
    steps = failing + (gap * count if n == 1 else 0)

    def overflow(gradients: ByRank) -> ByRank:
        for rank in gradients:
            for given in rank:
                given[victim][1] = 0.0
        for step in range(2):
            gradients[culprit][step][victim][1] = huge
            if failing + step < steps:  # back to where it came from
                gradients[culprit][failing + step][victim][1] = -huge
        return gradients

    training = algorithm.train(
        lab,
        draw,
        nodes=nodes,
        weights=weights,
        change=overflow,
        steps=steps,
        looks=("global weights",),
        exact=True,
        period=gap * count,
        fragments=[[place] for place in range(count)],
        delay=delay,
        compression=compression,
        outer_optimizer={"class": "SGD", "lr": 0.5, "momentum": 0.5},
    )
    assert ("failing step", failing - 1) in training.index, "the differences are finite"


# Identities.


@check("S9.6", "alone", dtypes=FLOATS, needs=_DILOCO, effort=0.15)
def alone(lab: Lab, draw: Draw) -> None:
    """Before the first apply, every rank trains as it would alone, bit for bit, whatever its
    gradients are.
    """
    weights = any_weights(draw, lab.dtype, 3)
    drawn = schedules(draw, len(weights), smallest_gap=2)
    gap = drawn["period"] // (
        drawn["fragments"] if isinstance(drawn["fragments"], int) else len(drawn["fragments"])
    )
    DILOCO.train(
        lab,
        draw,
        nodes=draw(worlds(3)),
        weights=weights,
        gradients=of_kinds(any_kind),
        steps=gap - 1,
        exact=True,
        follow=_like_local_sgd(period=gap),
        **drawn,
        momentum=draw(momenta),
        outer_optimizer=None,
    )


@check(
    "S9.6",
    "averaged_gradients",
    dtypes=("float32", "float64"),
    needs=_DILOCO,
    effort=0.2,
)
def averaged_gradients(lab: Lab, draw: Draw) -> None:
    """A period of one step with SGD(1) outside is gradient averaging."""
    DILOCO.train(
        lab,
        draw,
        nodes=draw(worlds(5)),
        gradients=of_kinds(tame),
        steps=4,
        exact=False,
        follow=_like_local_sgd(warmup_steps=4),
        period=1,
        fragments=1,
        delay=0,
        outer_optimizer=PLAIN,
    )


@check("S9.6", "local_sgd", dtypes=("float32", "float64"), needs=_DILOCO, effort=0.2)
def is_local_sgd(lab: Lab, draw: Draw) -> None:
    """With one fragment, no delay, mix 0 and SGD(1) outside, it is local_sgd with the same
    period.
    """
    size = draw(st.integers(1, 4))
    DILOCO.train(
        lab,
        draw,
        nodes=draw(worlds(5)),
        gradients=of_kinds(tame),
        steps=2 * size,
        exact=False,
        follow=LOCAL_SGD.follow,
        period=size,
        fragments=1,
        delay=0,
        momentum=draw(momenta),
        outer_optimizer=PLAIN,
    )


@check("S9.6", "one_rank", dtypes=("float32", "float64"), needs=_DILOCO, effort=0.2)
def one_rank(lab: Lab, draw: Draw) -> None:
    """Without a delay and with SGD(1) outside, one rank trains plainly, whatever the fragments and
    the mix are.
    """
    weights = any_weights(draw, lab.dtype)
    drawn = {**schedules(draw, len(weights)), "delay": 0}
    DILOCO.train(
        lab,
        draw,
        nodes=(1,),
        weights=weights,
        gradients=of_kinds(tame),
        steps=min(drawn["period"] + 2, 10),
        exact=False,
        follow=LOCAL_SGD.follow,
        **drawn,
        mix=draw(st.sampled_from([0.0, 0.3, 0.5, 0.9])),
        momentum=draw(momenta),
        outer_optimizer=PLAIN,
    )


@check("S9.6", "global_weights", dtypes=FLOATS, needs=_DILOCO, effort=0.2)
def global_weights(lab: Lab, draw: Draw) -> None:
    """An evaluation sees g, in the warm-up the weights; afterwards the local weights are back, and
    training goes on.
    """
    weights = any_weights(draw, lab.dtype, 3)
    drawn = schedules(draw, len(weights), gaps=st.integers(1, 2))
    DILOCO.train(
        lab,
        draw,
        weights=weights,
        looks=("global weights",),
        **drawn,
        warmup_steps=draw(st.integers(0, 2)),
        mix=draw(st.sampled_from([0.0, 0.5])),
    )


# Trainings without a function of their own.

check_trainings(
    (
        TrainedAlgorithm.train,
        LOCAL_SGD,
        0.2,
        "S9.1.period",
        FLOATS,
        lambda lab, draw: {"nodes": draw(sized_worlds(lab.dtype)), "gradients": of_kinds(tame)},
        (
            "After steps divisible by the period, all weights become their mean over ranks; other"
            " steps and optimizers stay local."
        ),
    ),
    (
        TrainedAlgorithm.train,
        DILOCO,
        0.3,
        "S9.2.inner_optimizer",
        (),
        lambda *_: {"gradients": of_kinds(tame), "looks": ("gradients",), "momentum": 0.5},
        "Applying a fragment touches neither the state of the inner optimizer nor the gradients.",
    ),
    (
        refuse,
        DILOCO,
        0.4,
        "S9.5.not_finite",
        (),
        lambda *_: {"compression": None},
        (
            "Where differences of one rank overflow, the step raises an error on every rank, and"
            " the fragment stays as it was."
        ),
    ),
    (
        refuse,
        DILOCO,
        0.2,
        "S9.5.not_finite_bytes",
        (),
        lambda *_: {"compression": "MinMaxUInt8"},
        "So it is where differences are compressed.",
    ),
)
