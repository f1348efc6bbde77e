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
from bagua_ref.conformance.checks.registry import trains
from bagua_ref.conformance.expected import local_updates_numpy as plain
from bagua_ref.conformance.expected.kernels_numpy import stored
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import TrainedAlgorithm, Training

Given = dict[str, Any]
_WIDE = ("float32", "float64")


# local_sgd.


def _follow_local_sgd(training: Training, **changed: Any) -> None:
    """Expect the weights of local_sgd; ``changed`` overrides options of the training."""
    names = ("period", "warmup_steps", "offset", "hierarchical", "momentum")
    options = {name: training.options[name] for name in names if name in training.options}
    given = [training.gradients(step) for step in range(training.steps)]
    for ranks in plain.local_sgd(
        training.start, given, 1.0, training.dtypes, list(training.nodes), **options | changed
    ):
        training.step(ranks, training.nearly())


LOCAL_SGD = TrainedAlgorithm(
    "local_sgd",
    {
        "lr": 1.0,
        "warmup_steps": 0,
        "offset": 0,
        "hierarchical": False,
        "period": st.integers(1, 4),
        "momentum": momenta,
    },
    _follow_local_sgd,
    nodes=multi_rank_worlds,
    steps=lambda options: st.integers(options["warmup_steps"] + 2, options["warmup_steps"] + 7),
)


@trains(LOCAL_SGD, "S9.1.period", 0.15, FLOATS)
def period(lab: Lab) -> Given:
    """After steps divisible by the period, all weights become their mean over ranks; other steps
    and optimizers stay local.
    """
    return {"nodes": sized_worlds(lab.dtype), "kinds": tame}


@trains(LOCAL_SGD, "S9.1.offset", 0.25)
def offset(lab: Lab) -> Given:
    """With an offset, the first averaging follows that step: offset 1 begins with the first, offset
    0 with step period.
    """
    size = lab.integer(2, 4)
    return {
        "warmup_steps": st.integers(0, 2),
        "steps": lambda options: st.integers(size, 2 * size + 1).map(
            lambda more: options["warmup_steps"] + more
        ),
        "period": size,
        "offset": st.integers(0, size - 1),
    }


trains(LOCAL_SGD, "S9.1.inside_nodes", 0.25)(
    {
        "nodes": st.sampled_from([(2, 1), (2, 2), (1, 3), (2,), (1, 1, 2)]),
        "warmup_steps": st.integers(0, 2),
        "hierarchical": True,
    },
    "Hierarchical, each step after the warm-up applies the mean gradient of the node's ranks, and"
    " periods average over all.",
)


# diloco.


def _options_of_diloco(draw: Draw, weights: list[Tensor], **limits: Any) -> Given:
    fixed = {"lr": 1.0, "momentum": 0.0, "warmup_steps": 0, "mix": 0.0, "compression": None}
    return {**fixed, **schedules(draw, len(weights), **limits), "outer_optimizer": outer_optimizers}


def fragments_of(training: Training) -> list[list[int]]:
    """Return the parameter indices of each fragment."""
    fragments = training.options["fragments"]
    if isinstance(fragments, int):
        return plain.places_of([w.nbytes for w in training.weights], fragments)
    return list(fragments)


def _follow_diloco(training: Training) -> None:
    outer = outer_optimizer(training.options["outer_optimizer"])
    options = training.options
    make = partial(
        plain.DiLoCo,
        compression=options["compression"],
        error_feedback=options.get("error_feedback", False),
    )
    follow_model(training, make, outer)


def follow_model(training: Training, make: Callable[..., plain.DiLoCo], outer: plain.Outer) -> Any:
    """Compare the training with the model of all ranks that ``make`` returns; return the model."""
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
            g = [stored(g, dtype) for g, dtype in zip(model.g, dtypes, strict=True)]
            shown = [g] * training.n
        seen = {"global weights": shown, "memories": [*map(list, getattr(model, "errors", ()))]}
        for action in training.looks:
            training.look(action, seen.get(action, given), training.nearly())
    return model


def steps_of_fragments(options: Given) -> st.SearchStrategy[int]:
    """Numbers of steps of a training that applies each fragment."""
    period = options["warmup_steps"] + options["period"]
    return st.integers(period + 1, period + 4)


DILOCO = TrainedAlgorithm(
    "diloco",
    _options_of_diloco,
    _follow_diloco,
    nodes=st.sampled_from([(2,), (1, 1), (1,)]),
    weights=partial(any_weights, most=3),
    steps=steps_of_fragments,
)


trains(DILOCO, "S9.2.outer_optimizer", 0.15, _WIDE)(
    {
        "options": partial(_options_of_diloco, gaps=st.integers(1, 2)),
        "steps": lambda options: 3 * options["period"],
        "exact": False,
        "outer_optimizer": st.sampled_from(
            [
                None,
                None,
                {"class": "SGD", "lr": 0.3, "momentum": 0.9},
                {"class": "Adam", "lr": 0.125},
            ]
        ),
    },
    "The mean of g - x is the gradient of g, and Nesterov's SGD(0.7, 0.9), or any other optimizer,"
    " steps with it.",
)
trains(DILOCO, "S9.2.inner_optimizer", 0.25)(
    {"kinds": tame, "looks": ("gradients",), "momentum": 0.5},
    "Applying a fragment touches neither the state of the inner optimizer nor the gradients.",
)


# diloco: fragments.


def _apart(weights: list[Tensor], fragments: int | list[list[int]], count: int) -> Given:
    """Return a training that applies another fragment at each step, so that weights show the
    parameters of each.
    """
    return {
        "nodes": st.sampled_from([(2,), (1, 1)]),
        "weights": weights,
        "steps": count + 1,
        "period": count,
        "fragments": fragments,
        "delay": 0,
    }


@trains(DILOCO, "S9.3.fragments", 0.4)
def fragments(lab: Lab) -> Given:
    """A number of fragments splits the parameters, in order, by the position of their middle byte,
    and leaves none empty.
    """
    generator = np.random.default_rng(lab.seed())
    sizes = generator.choice([0, 1, 1, 2, 3, 8, 30], generator.integers(2, 9)).tolist()
    names = generator.choice(lab.dtypes(FLOATS), len(sizes)).tolist()
    count = int(generator.integers(2, len(sizes) + 1))
    weights = grid_weights(lab.draw, [*map(dtype_named, names)], [(size,) for size in sizes])
    return _apart(weights, count, count)


@trains(DILOCO, "S9.3.lists", 0.3)
def lists_of_names(lab: Lab) -> Given:
    """Lists of names are the fragments, whatever their order."""
    weights = any_weights(lab.draw, lab.dtype, 5, 2)
    lists = lab.draw(given_fragments(len(weights)))
    return _apart(weights, lists, len(lists))


_OUTER = {"class": "SGD", "lr": 0.5, "momentum": 0.5}

trains(DILOCO, "S9.3.own_optimizers", 0.35)(
    {
        "nodes": (2,),
        "weights": partial(any_weights, most=4, fewest=2),
        "options": partial(_options_of_diloco, fewest=2),
        "steps": lambda options: 2 * options["period"],
        "outer_optimizer": st.sampled_from([_OUTER, {**_OUTER, "weight_decay": 0.5}]),
    },
    "Each fragment has an outer optimizer of its own, whose step moves no other fragment.",
)


# diloco: when and how.


@trains(DILOCO, "S9.4.schedule", 0.15, FLOATS)
def schedule(lab: Lab) -> Given:
    """Each fragment is sent and, after the delay, applied at its steps of the period, with the
    weights of the time of sending.
    """
    return {
        "nodes": sized_worlds(lab.dtype),
        "weights": any_weights,
        "steps": lambda options: min(2 * options["period"] + 1, 12),
    }


trains(DILOCO, "S9.4.mix", 0.35, FLOATS)(
    {
        "shapes": [(170,), (3, 2)],
        "kinds": tame,
        "options": partial(_options_of_diloco, gaps=st.integers(1, 2), most=2),
        "steps": lambda options: options["period"] + 1,
        "mix": st.sampled_from([0.25, 0.3, 0.3, 0.5, 0.7, 0.7, 0.9, 1.0]),
    },
    "Applying moves weights to g + mix*(x - g), for mix from 0.5 on to x - (x - g)*(1 - mix), each"
    " operation rounded.",
)


# diloco: the mean.


@trains(DILOCO, "S9.5.one_byte", 0.45)
def one_byte(lab: Lab) -> Given:
    """A fragment's differences are compressed as one float32 tensor, in the order of its names,
    padded with zeros, bit for bit; with error memory, errors are added when it is sent again.
    """
    names, count = st.sampled_from(lab.dtypes(COMPRESSIBLE)), lab.integer(1, 4)
    lab.dtypes(("float32",))
    forms = [lab.choice([(1,), (2,), (3, 2), (17,), (0,)]) for _ in range(count)]
    lists, gap = lab.draw(given_fragments(count, most=2)), lab.integer(1, 2)
    memory = {"error_feedback": True} if lab.has_every_option and lab.flag() else {}

    def apart(gradients: ByRank) -> ByRank:
        """Make most differences large and distinct, so that the assignment of parameters to chunks
        affects the result.
        """
        for given in (given for rank in gradients for given in rank):
            for place in range(count):
                if place % 3 != 2:
                    given[place] = (given[place].abs() / 8 + 1) * 2.0**place
        return gradients

    return {
        "nodes": multi_rank_worlds | worlds(3),
        "weights": grid_weights(lab.draw, [dtype_named(lab.draw(names)) for _ in forms], forms),
        "kinds": tame,
        "change": apart,
        "steps": gap * len(lists) * (1 + len(memory)) + 1,
        "exact": True,
        **memory,
        "period": gap * len(lists),
        "fragments": st.sampled_from([lists, lists, len(lists)]),
        "delay": st.integers(0, gap - 1),
        "outer_optimizer": PLAIN,
        "compression": "MinMaxUInt8",
    }


def refuse(algorithm: TrainedAlgorithm, lab: Lab, compression: str | None) -> None:
    """Make differences of one rank overflow, in one of two parameters of a fragment, and later
    become finite again.
    """
    nodes = lab.choice([(1,), (1,), (2,), (1, 1), (3,)])
    n, count = sum(nodes), lab.integer(1, 2)
    culprit, victim, huge = lab.integer(0, n - 1), lab.integer(0, 2 * count - 1), 2.0**127
    weights = grid_weights(lab.draw, [torch.float32] * 2 * count, [(3,)] * 2 * count)
    weights[victim][1] = huge
    delay = lab.integer(0, 1)
    gap, before = 2 + delay, lab.integer(0, 1)
    # After the step ``failing``, the fragment is applied, for the first or second time; its g - x
    # had overflowed when it was sent.
    failing = gap * (victim // 2 + 1) + before * gap * count
    steps = failing + (gap * count if n == 1 else 0)
    remembers = compression == "MinMaxUInt8" and lab.has_every_option and lab.flag()
    memory = {"error_feedback": True} if remembers else {}

    def overflow(gradients: ByRank) -> ByRank:
        for given in (given for rank in gradients for given in rank):
            given[victim][1] = 0.0
        for step in range(2):
            gradients[culprit][failing - gap + step][victim][1] = huge
            if failing + step < steps:  # moves the weight back
                gradients[culprit][failing + step][victim][1] = -huge
        return gradients

    training = algorithm.train(
        lab,
        nodes=nodes,
        weights=weights,
        kinds=(),
        change=overflow,
        steps=steps,
        looks=("global weights",),
        exact=True,
        period=gap * count,
        fragments=[[2 * place, 2 * place + 1] for place in range(count)],
        delay=delay,
        compression=compression,
        **memory,
        outer_optimizer=_OUTER,
    )
    assert ("failing step", failing - 1) in training.index, "the differences are finite"


trains(DILOCO, "S9.5.not_finite", 0.3, of=refuse)(
    {"compression": None},
    "Where differences of one rank overflow, the step raises an error on every rank, and the"
    " fragment stays as it was.",
)
trains(DILOCO, "S9.5.not_finite_bytes", 0.2, of=refuse)(
    {"compression": "MinMaxUInt8"}, "So it is where differences are compressed."
)


# Identities.


def _count(options: Given) -> int:
    fragments = options["fragments"]
    return fragments if isinstance(fragments, int) else len(fragments)


trains(DILOCO, "S9.6.alone", 0.1, FLOATS)(
    {
        "nodes": worlds(3),
        "kinds": any_kind,
        "exact": True,
        "options": partial(_options_of_diloco, smallest_gap=2),
        "steps": lambda options: options["period"] // _count(options) - 1,
        "follow": lambda training: _follow_local_sgd(
            training, period=training.options["period"] // _count(training.options)
        ),
        "momentum": momenta,
        "outer_optimizer": None,
    },
    "Before the first apply, every rank trains as it would alone, bit for bit, whatever its"
    " gradients are.",
)
_ONE_FRAGMENT = {
    "nodes": worlds(5),
    "kinds": tame,
    "exact": False,
    "fragments": 1,
    "delay": 0,
    "outer_optimizer": PLAIN,
}

trains(DILOCO, "S9.6.averaged_gradients", 0.15, _WIDE)(
    {
        **_ONE_FRAGMENT,
        "steps": 4,
        "follow": partial(_follow_local_sgd, warmup_steps=4),
        "period": 1,
    },
    "A period of one step with SGD(1) outside is gradient averaging.",
)
trains(DILOCO, "S9.6.local_sgd", 0.15, _WIDE)(
    {
        **_ONE_FRAGMENT,
        "steps": lambda options: 2 * options["period"],
        "follow": _follow_local_sgd,
        "period": st.integers(1, 4),
        "momentum": momenta,
    },
    "With one fragment, no delay, mix 0 and SGD(1) outside, it is local_sgd with the same period.",
)
trains(DILOCO, "S9.6.one_rank", 0.15, _WIDE)(
    {
        "nodes": (1,),
        "weights": any_weights,
        "kinds": tame,
        "steps": lambda options: min(options["period"] + 2, 10),
        "exact": False,
        "follow": _follow_local_sgd,
        "delay": 0,
        "mix": st.sampled_from([0.0, 0.3, 0.5, 0.9]),
        "momentum": momenta,
        "outer_optimizer": PLAIN,
    },
    "Without a delay and with SGD(1) outside, one rank trains plainly, whatever the fragments and"
    " the mix are.",
)


trains(DILOCO, "S9.6.global_weights", 0.15, FLOATS)(
    {
        "looks": ("global weights",),
        "options": partial(_options_of_diloco, gaps=st.integers(1, 2)),
        "warmup_steps": st.integers(0, 2),
        "mix": st.sampled_from([0.0, 0.5, 1.0]),
    },
    "An evaluation sees g, in the warm-up the weights; afterwards the local weights are back, and"
    " training goes on.",
)
