"""DiLoCo, action by action, compared with one loop over all ranks (S9.2 to S9.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected import local_updates_numpy as plain
from bagua_ref.conformance.expected.decentralized_numpy import stored
from bagua_ref.conformance.inputs.local_update_cases import (
    PLAIN,
    Schedule,
    given_fragments,
    momenta,
    multi_rank_worlds,
    outer_optimizer,
    outer_optimizers,
    schedules,
    sized_worlds,
    some_weights,
    tame,
    used_parts,
)
from bagua_ref.conformance.inputs.strategies import COMPRESSIBLE, FLOATS, Draw, dtype_named, seeds, worlds
from bagua_ref.conformance.inputs.training_cases import (
    any_gradients,
    exact_gradients,
    grid_weights,
)
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.trial import Trial
from bagua_ref.conformance.suites.checks import check

_DILOCO = ("diloco",)


def _model(trial: Trial) -> plain.DiLoCo:
    options = {name: trial.options[name] for name in ("period", "delay", "mix", "warmup_steps", "compression", "momentum")}
    places = trial.options["fragments"]
    if isinstance(places, int):
        places = plain.places_of([w.nbytes for w in trial.weights], places)
    outer = outer_optimizer(trial.options["outer_optimizer"])
    return plain.DiLoCo(trial.start, trial.n, trial.options["lr"], trial.dtypes, places, outer, **options)


def _options(drawn: Schedule, **given: Any) -> dict[str, Any]:
    return {"outer_optimizer": PLAIN, "mix": 0.0, "compression": None, **drawn._asdict(), **given}


def _advance(trial: Trial, model: plain.DiLoCo, steps: int) -> None:
    """Take steps, after which every rank must have the model's weights."""
    for _ in range(steps):
        model.step(trial.gradients(model.t))
        trial.step(model.ranks)


def _follow(lab: Lab, trial: Trial) -> None:
    """Take all steps."""
    with np.errstate(all="ignore"):
        _advance(trial, _model(trial), trial.steps)
    trial.run(lab, "diloco")


# diloco: what is kept.


@check("algorithms", "S9", "warmup", needs=_DILOCO, effort=0.3)
def warmup(lab: Lab, draw: Draw) -> None:
    """Up to warmup_steps, every step applies the mean gradient; then the global weights are taken, and windows begin."""
    nodes, weights, warmup_steps = draw(multi_rank_worlds), some_weights(draw, lab.dtype, 3), draw(st.integers(1, 4))
    drawn = draw(schedules(len(weights)))._replace(warmup_steps=warmup_steps)
    gradients = exact_gradients(draw, weights, sum(nodes), warmup_steps + drawn.period)
    options = _options(drawn, outer_optimizer=draw(outer_optimizers))
    _follow(lab, Trial(draw, nodes, weights, gradients, options, exact=sum(nodes) <= 2))


@check("algorithms", "S9", "restart", needs=_DILOCO, effort=0.5)
def restart(lab: Lab, draw: Draw) -> None:
    """Training that continues from saved weights and states goes on as if it had never stopped, whatever was in flight."""
    nodes, weights = draw(st.sampled_from([(2,), (1, 1), (1,)])), some_weights(draw, lab.dtype, 3)
    drawn = draw(schedules(len(weights), smallest_gap=2, warmup=2))
    steps = drawn.warmup_steps + drawn.period + draw(st.integers(1, 4))
    gradients = any_gradients(draw, weights, sum(nodes), steps, tame)
    if drawn.warmup_steps:
        gradients = exact_gradients(draw, weights, sum(nodes), steps)
    options = _options(
        drawn, outer_optimizer=draw(outer_optimizers), mix=draw(st.sampled_from([0.0, 0.25, 0.5])), momentum=draw(momenta)
    )
    trial = Trial(draw, nodes, weights, gradients, options)
    model, at = _model(trial), draw(st.integers(1, steps - 1))
    _advance(trial, model, at)
    trial.look("restart", model.ranks)
    _advance(trial, model, steps - at)
    trial.run(lab, "diloco")


@check("algorithms", "S9.2", "inner_optimizer", needs=_DILOCO, effort=0.3)
def inner_optimizer(lab: Lab, draw: Draw) -> None:
    """Applying a fragment touches neither the state of the inner optimizer nor the gradients."""
    nodes, weights = draw(st.sampled_from([(2,), (1, 1), (1,)])), some_weights(draw, lab.dtype, 3)
    drawn = draw(schedules(len(weights)))
    gradients = any_gradients(draw, weights, sum(nodes), drawn.period + 2, tame)
    trial = Trial(draw, nodes, weights, gradients, _options(drawn, outer_optimizer=draw(outer_optimizers), momentum=0.5))
    model = _model(trial)
    for step in range(trial.steps):
        _advance(trial, model, 1)
        trial.look("gradients", trial.gradients(step))
    trial.run(lab, "diloco")


@check("algorithms", "S9.2", "outer_optimizer", dtypes=("float32", "float64"), needs=_DILOCO, effort=0.2)
def outer_optimizers_of_torch(lab: Lab, draw: Draw) -> None:
    """The mean of g - x is the gradient of g, and Nesterov's SGD(0.7, 0.9), or any other optimizer, steps with it."""
    nodes, weights = draw(st.sampled_from([(2,), (1, 1), (1,)])), some_weights(draw, lab.dtype, 3)
    drawn = draw(schedules(len(weights), gaps=st.integers(1, 2)))
    outer = draw(st.sampled_from([None, None, {"class": "SGD", "lr": 0.3, "momentum": 0.9}, {"class": "Adam", "lr": 0.125}]))
    gradients = exact_gradients(draw, weights, sum(nodes), 3 * drawn.period)
    _follow(lab, Trial(draw, nodes, weights, gradients, _options(drawn, outer_optimizer=outer), exact=False))


# diloco: fragments.


def _apart(draw: Draw, weights: list[Tensor], fragments: int | list[list[int]], count: int) -> Trial:
    """Return a training in which each step applies the next fragment, so that weights show which parameters it has."""
    gradients = exact_gradients(draw, weights, 2, count + 1)
    options = _options(Schedule(count, fragments, 0, 0), outer_optimizer=draw(outer_optimizers))
    return Trial(draw, draw(st.sampled_from([(2,), (1, 1)])), weights, gradients, options)


@check("algorithms", "S9.3", "fragments", needs=_DILOCO, effort=0.6)
def fragments(lab: Lab, draw: Draw) -> None:
    """A number of fragments cuts the parameters, in their order, where their middles lie by bytes, and leaves none empty."""
    generator = np.random.default_rng(draw(seeds))
    forms = [(int(size),) for size in generator.choice([0, 1, 1, 2, 3, 8, 30], generator.integers(2, 9))]
    names = [name for name in FLOATS if lab.target.dtypes is None or name in lab.target.dtypes]
    dtypes = [dtype_named(str(name)) for name in generator.choice(names, len(forms))]
    count = int(generator.integers(2, len(forms) + 1))
    _follow(lab, _apart(draw, grid_weights(draw, dtypes, forms), count, count))


@check("algorithms", "S9.3", "lists", needs=_DILOCO, effort=0.4)
def lists_of_names(lab: Lab, draw: Draw) -> None:
    """Lists of names are the fragments, whatever their order."""
    weights = grid_weights(draw, [torch.float32] * draw(st.integers(2, 5)))
    lists = draw(given_fragments(len(weights)))
    _follow(lab, _apart(draw, weights, lists, len(lists)))


@check("algorithms", "S9.3", "own_optimizers", needs=_DILOCO, effort=0.5)
def own_optimizers(lab: Lab, draw: Draw) -> None:
    """Each fragment has an outer optimizer of its own, whose step moves no other fragment."""
    weights = grid_weights(draw, [torch.float32] * draw(st.integers(2, 4)))
    outer = {"class": "SGD", "lr": 0.5, "momentum": 0.5, "weight_decay": draw(st.sampled_from([0.0, 0.5]))}
    drawn = draw(schedules(len(weights), fewest=2))
    gradients = exact_gradients(draw, weights, 2, 2 * drawn.period)
    _follow(lab, Trial(draw, (2,), weights, gradients, _options(drawn, outer_optimizer=outer)))


# diloco: when and how.


@check("algorithms", "S9.4", "schedule", dtypes=FLOATS, needs=_DILOCO, effort=0.25)
def schedule(lab: Lab, draw: Draw) -> None:
    """Each fragment is sent and, after the delay, applied at its steps of the period: the weights of the send, not of the apply."""
    nodes, weights = draw(sized_worlds(lab.dtype)), some_weights(draw, lab.dtype)
    drawn = draw(schedules(len(weights)))
    gradients = exact_gradients(draw, weights, sum(nodes), min(2 * drawn.period + 1, 12))
    options = _options(drawn, outer_optimizer=draw(outer_optimizers))
    _follow(lab, Trial(draw, nodes, weights, gradients, options, exact=sum(nodes) <= 2))


@check("algorithms", "S9.4", "mix", dtypes=FLOATS, needs=_DILOCO)
def mix(lab: Lab, draw: Draw) -> None:
    """Applying moves weights to g + mix*(x - g), for mix from 0.5 on to x - (x - g)*(1 - mix), each operation rounded."""
    nodes, weights = draw(st.sampled_from([(2,), (1, 1), (1,)])), grid_weights(draw, [lab.dtype] * 2, [(170,), (3, 2)])
    drawn = draw(schedules(len(weights), gaps=st.integers(1, 2), most=2))
    share = draw(st.sampled_from([0.25, 0.3, 0.5, 0.5, 0.7, 0.9, 1.0]))
    gradients = any_gradients(draw, weights, sum(nodes), drawn.period + 1, tame)
    _follow(lab, Trial(draw, nodes, weights, gradients, _options(drawn, mix=share, outer_optimizer=draw(outer_optimizers))))


@check("algorithms", "S9.4", "unused_parameters", needs=_DILOCO, effort=0.3)
def unused_by_diloco(lab: Lab, draw: Draw) -> None:
    """Parameters that a rank has not used, or never uses, are sent and applied all the same."""
    nodes, weights = draw(st.sampled_from([(2,), (1, 1)])), grid_weights(draw, [torch.float32] * draw(st.integers(2, 4)))
    drawn = draw(schedules(len(weights)))
    gradients = used_parts(draw, exact_gradients(draw, weights, sum(nodes), min(drawn.period + 2, 10)))
    _follow(lab, Trial(draw, nodes, weights, gradients, _options(drawn)))


# diloco: the mean.


@check("algorithms", "S9.5", "one_byte", needs=_DILOCO, effort=0.7)
def one_byte(lab: Lab, draw: Draw) -> None:
    """Compressed, a fragment's differences are one float32 tensor in the order of its names, padded with zeros, bit for bit."""
    names = [name for name in COMPRESSIBLE if lab.target.dtypes is None or name in lab.target.dtypes]
    if not names:
        return
    nodes, count = draw(multi_rank_worlds | worlds(3)), draw(st.integers(1, 4))
    forms = [draw(st.sampled_from([(1,), (2,), (3, 2), (17,), (0,)])) for _ in range(count)]
    weights = grid_weights(draw, [dtype_named(draw(st.sampled_from(names))) for _ in forms], forms)
    lists, gap = draw(given_fragments(count, most=2)), draw(st.integers(1, 2))
    drawn = Schedule(gap * len(lists), draw(st.sampled_from([lists, lists, len(lists)])), draw(st.integers(0, gap - 1)), 0)
    gradients = any_gradients(draw, weights, sum(nodes), drawn.period + 1, tame)
    for rank in gradients:  # most differences far from zero and from each other, so that it matters what shares a chunk
        for given in rank:
            given.update({place: (g.abs() / 8 + 1) * 2.0**place for place, g in given.items() if place % 3 != 2})
    _follow(lab, Trial(draw, nodes, weights, gradients, _options(drawn, compression="MinMaxUInt8")))


@check("algorithms", "S9.5", "same_bits", needs=_DILOCO, effort=0.3)
def same_bits(lab: Lab, draw: Draw) -> None:
    """After every apply, all ranks have the same global weights, bit for bit, and with mix 0 the same weights of the fragment."""
    nodes, weights = draw(multi_rank_worlds), grid_weights(draw, [torch.float32] * draw(st.integers(1, 3)))
    drawn = draw(schedules(len(weights), gaps=st.integers(1, 2)))
    options = _options(drawn, outer_optimizer=draw(outer_optimizers | st.none()))
    gradients = any_gradients(draw, weights, sum(nodes), drawn.period + 1, st.sampled_from(["tame", "near"]))
    trial = Trial(draw, nodes, weights, gradients, options, exact=False)
    model, seen, applied = _model(trial), [x.tobytes() for x in trial.start], []
    for _ in range(trial.steps):
        _advance(trial, model, 1)
        assert model.g is not None
        trial.look("global weights", [list(model.g)] * trial.n)
        before, seen = seen, [x.tobytes() for x in model.g]
        applied.append([place for place, old in enumerate(before) if old != seen[place]])
    training = trial.run(lab, "diloco")
    for step in range(trial.steps):
        for index, places in ((2 * step + 1, range(len(weights))), (2 * step, applied[step])):
            for rank in range(1, trial.n):
                for place in places:
                    want = training.results[0][index][place]
                    training.expect(rank, index, place, want, why=f"step {step + 1}, compared with rank 0")


def _refuse(lab: Lab, draw: Draw, compression: str | None) -> None:
    """Let differences of one rank overflow, and then come back."""
    nodes = draw(st.sampled_from([(1,), (1,), (2,), (1, 1), (3,)]))
    n, count = sum(nodes), draw(st.integers(1, 2))
    culprit, victim, huge = draw(st.integers(0, n - 1)), draw(st.integers(0, count - 1)), 2.0**127
    weights = grid_weights(draw, [torch.float32] * count, [(3,)] * count)
    weights[victim][1] = huge
    delay = draw(st.integers(0, 1))
    # The fragment is first applied after step gap * (victim + 1); its g - x has overflowed when it was sent.
    gap, failing = 2 + delay, (2 + delay) * (victim + 1)
    steps = failing + (gap * count if n == 1 else 0)
    gradients = exact_gradients(draw, weights, n, steps)
    for rank in gradients:
        for given in rank:
            given[victim][1] = 0.0
    for step in range(2):
        gradients[culprit][step][victim][1] = huge
        if failing + step < steps:  # back to where it came from
            gradients[culprit][failing + step][victim][1] = -huge
    outer = {"class": "SGD", "lr": 0.5, "momentum": 0.5}
    places = [[place] for place in range(count)]
    options = _options(Schedule(gap * count, places, delay, 0), compression=compression, outer_optimizer=outer, mix=0.0)
    trial = Trial(draw, nodes, weights, gradients, options)
    with np.errstate(all="ignore"):
        model = _model(trial)
        _advance(trial, model, failing - 1)
        try:
            model.step(trial.gradients(model.t))
        except ArithmeticError:
            pass
        else:
            raise AssertionError("the differences are finite")
        trial.step(model.ranks, "failing step")
        assert model.g is not None
        trial.look("global weights", [list(model.g)] * n)
        _advance(trial, model, steps - failing)
    trial.run(lab, "diloco")


@check("algorithms", "S9.5", "not_finite", needs=_DILOCO, effort=0.4)
def not_finite(lab: Lab, draw: Draw) -> None:
    """Where differences of one rank overflow, the step raises an error on every rank, and the fragment stays as it was."""
    _refuse(lab, draw, None)


@check("algorithms", "S9.5", "not_finite_bytes", needs=_DILOCO, effort=0.2)
def not_finite_bytes(lab: Lab, draw: Draw) -> None:
    """So it is where differences are compressed."""
    _refuse(lab, draw, "MinMaxUInt8")


# Identities.


@check("algorithms", "S9.6", "alone", dtypes=FLOATS, needs=_DILOCO, effort=0.15)
def alone(lab: Lab, draw: Draw) -> None:
    """Before the first apply, every rank trains as it would alone, bit for bit, whatever its gradients are."""
    nodes, weights = draw(worlds(3)), some_weights(draw, lab.dtype, 3)
    drawn = draw(schedules(len(weights), smallest_gap=2))
    gap = drawn.period // (drawn.fragments if isinstance(drawn.fragments, int) else len(drawn.fragments))
    gradients = any_gradients(draw, weights, sum(nodes), gap - 1)
    trial = Trial(draw, nodes, weights, gradients, _options(drawn, momentum=draw(momenta), outer_optimizer=None))
    inner, ranks = plain.InnerSGD(1.0, trial.options["momentum"], trial.dtypes), [trial.start] * trial.n
    with np.errstate(all="ignore"):
        for step in range(trial.steps):
            trial.step(ranks := inner.step(ranks, trial.gradients(step)))
    trial.run(lab, "diloco")


@check("algorithms", "S9.6", "averaged_gradients", dtypes=("float32", "float64"), needs=_DILOCO, effort=0.2)
def averaged_gradients(lab: Lab, draw: Draw) -> None:
    """A period of one step with SGD(1) outside is gradient averaging."""
    nodes, weights = draw(worlds(5)), some_weights(draw, lab.dtype)
    gradients = any_gradients(draw, weights, sum(nodes), 4, tame)
    trial = Trial(draw, nodes, weights, gradients, _options(Schedule(1, 1, 0, 0)), exact=False)
    inner, ranks = plain.InnerSGD(1.0, 0.0, trial.dtypes), [trial.start] * trial.n
    for step in range(trial.steps):
        trial.step(ranks := inner.step(ranks, plain.averaged(trial.gradients(step), trial.dtypes)))
    trial.run(lab, "diloco")


@check("algorithms", "S9.6", "local_sgd", dtypes=("float32", "float64"), needs=_DILOCO, effort=0.2)
def is_local_sgd(lab: Lab, draw: Draw) -> None:
    """With one fragment, no delay, mix 0 and SGD(1) outside, it is local_sgd with the same period."""
    nodes, weights, drawn = draw(worlds(5)), some_weights(draw, lab.dtype), Schedule(draw(st.integers(1, 4)), 1, 0, 0)
    gradients = any_gradients(draw, weights, sum(nodes), 2 * drawn.period, tame)
    trial = Trial(draw, nodes, weights, gradients, _options(drawn, momentum=draw(momenta)), exact=False)
    by_step = [trial.gradients(step) for step in range(trial.steps)]
    momentum = trial.options["momentum"]
    for ranks in plain.local_sgd(trial.start, by_step, 1.0, trial.dtypes, list(nodes), period=drawn.period, momentum=momentum):
        trial.step(ranks)
    trial.run(lab, "diloco")


@check("algorithms", "S9.6", "one_rank", dtypes=("float32", "float64"), needs=_DILOCO, effort=0.2)
def one_rank(lab: Lab, draw: Draw) -> None:
    """Without a delay and with SGD(1) outside, one rank trains plainly, whatever the fragments and the mix are."""
    weights = some_weights(draw, lab.dtype)
    drawn = draw(schedules(len(weights)))._replace(delay=0)
    gradients = any_gradients(draw, weights, 1, min(drawn.period + 2, 10), tame)
    options = _options(drawn, mix=draw(st.sampled_from([0.0, 0.3, 0.5, 0.9])), momentum=draw(momenta))
    trial = Trial(draw, (1,), weights, gradients, options, exact=False)
    inner, ranks = plain.InnerSGD(1.0, options["momentum"], trial.dtypes), [trial.start]
    for step in range(trial.steps):
        trial.step(ranks := inner.step(ranks, trial.gradients(step)))
    trial.run(lab, "diloco")


@check("algorithms", "S9.6", "global_weights", dtypes=FLOATS, needs=_DILOCO, effort=0.2)
def global_weights(lab: Lab, draw: Draw) -> None:
    """An evaluation sees g, in the warm-up the weights; afterwards the local weights are back, and training goes on."""
    nodes, weights = draw(st.sampled_from([(2,), (1, 1), (1,)])), some_weights(draw, lab.dtype, 3)
    drawn = draw(schedules(len(weights), warmup=2, gaps=st.integers(1, 2)))
    steps = drawn.warmup_steps + drawn.period + 1
    options = _options(drawn, outer_optimizer=draw(outer_optimizers), mix=draw(st.sampled_from([0.0, 0.5])))
    trial = Trial(draw, nodes, weights, exact_gradients(draw, weights, sum(nodes), steps), options)
    model = _model(trial)
    for _ in range(steps):
        _advance(trial, model, 1)
        shown = (
            model.ranks
            if model.g is None
            else [[stored(g, dtype) for g, dtype in zip(model.g, trial.dtypes, strict=True)]] * trial.n
        )
        trial.look("global weights", shown)
    trial.run(lab, "diloco")
