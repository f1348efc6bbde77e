"""Asynchronous averaging: properties that hold regardless of the timing of its rounds (S3.6,
S5.6).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import strategies as st

from bagua_ref.conformance.cases.strategies import FLOATS, dtype_named, worlds
from bagua_ref.conformance.cases.training_cases import ONE_BUCKET, on_a_grid
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import Training
from bagua_ref.conformance.targets.reference_algorithms import Action

_NEEDS = ("async_model_average",)
_INTERVAL_MS = 100
_INTERVAL = _INTERVAL_MS / 1000
_ROUNDS = SUM(1000)
"""Tolerance of weights changed by some hundred rounds, each with rounding errors."""

Programs = list[list[Action]]
"""The actions of each rank."""


def _train(
    lab: Lab,
    nodes: tuple[int, ...],
    kinds: list[list[Any]],
    warmup_steps: int,
    interval: float = _INTERVAL_MS,
) -> tuple[Training, Programs]:
    """Train with actions of these kinds, by rank; check the weights that do not depend on the
    timing of rounds. A number is a sleep of so many intervals.

    Weights are equal on all ranks, and gradients are quarters: sums are exact in any order.
    """
    seed, number = lab.seed(), itertools.count(100, 100)
    others = map(dtype_named, lab.dtypes(FLOATS))
    dtypes = [lab.dtype, *lab.draw(st.lists(st.sampled_from([lab.dtype, *others]), max_size=3))]
    weights = [
        on_a_grid(seed + place, torch.empty(3, dtype=dtype), 32)
        for place, dtype in enumerate(dtypes)
    ]

    def action(kind: Any) -> Action:
        if not isinstance(kind, str):
            return "sleep", kind * _INTERVAL
        if kind.endswith("step"):
            start = seed + next(number)
            places = reversed([*enumerate(weights)])
            return kind, {p: on_a_grid(start + p, w, 4, sum(nodes)) for p, w in places}
        if kind == "sleep":
            # a few intervals, often a whole number of them: rounds begin while ranks train
            return kind, lab.choice([0.1, 0.2, 0.3, 0.03, 0.17])
        if kind == "long sleep":  # long enough for rounds to make all ranks equal
            return "sleep", 20 * _INTERVAL
        return (kind,)

    programs = [[action(kind) for kind in mine] for mine in kinds]
    options = {
        "lr": 1.0,
        "bucket_bytes": lab.choice([1, 1, ONE_BUCKET]),
        "sync_interval_ms": interval,
        "warmup_steps": warmup_steps,
    }
    training = Training(lab, "async_model_average", nodes, weights, [], options)
    training.run(programs)
    _expect_known(training, programs, interval > 0)
    return training, programs


def _expect_known(training: Training, programs: Programs, rounds: bool) -> None:
    warmup_steps = training.options["warmup_steps"]
    taken = [_steps(program) for program in programs]
    for rank, program in enumerate(programs):
        before, step, aborted = training.weights, 0, False
        for place, action in enumerate(program):
            is_step = action[0].endswith("step")
            may_have_moved = rounds and not aborted and step > warmup_steps + (not is_step)
            want = before
            if is_step:
                along = taken if step < warmup_steps else [taken[rank]]
                # The mean of several ranks' gradients is exact.
                want = [
                    w - torch.stack([steps[step][p] for steps in along]).mean(0)
                    for p, w in enumerate(before)
                ]
                step += 1
            found = training.results[rank][place]
            if not may_have_moved:
                where = f"rank {rank}, action {place} ({action[0]})"
                training.lab.assert_equal(found, want, where=where)
            before = found
            aborted = action[0] == "abort" or (aborted and action[0] != "resume")


def _steps(program: list[Action]) -> list[Any]:
    return [action[1] for action in program if action[0].endswith("step")]


def _expect_nothing_lost(
    training: Training, programs: Programs, places: list[int], agree: bool
) -> None:
    """Expect the mean weights over ranks to follow the mean of all steps; with ``agree``, every
    rank's weights.

    Args:
        training: results of the programs.
        programs: each rank's program.
        places: for each rank, the index of the abort after which this must hold.
        agree: whether there was time for rounds while no rank trained.
    """
    for p, w in enumerate(training.weights):
        taken = [
            torch.stack([w * 0, *(g[p] for g in _steps(program[:place]))]).double()
            for program, place in zip(programs, places, strict=True)
        ]
        size = w.double().abs() + torch.stack([mine.abs().sum(0) for mine in taken]).amax(0)
        want = (w - torch.stack([mine.sum(0) for mine in taken]).mean(0)).to(w.dtype)
        found = [mine[at][p] for mine, at in zip(training.results, places, strict=True)]
        mean = torch.stack(found).double().mean(0).to(w.dtype)
        expect = training.lab.assert_equal
        expect(mean, want, _ROUNDS, magnitude=size, where=f"mean over ranks, parameter {p}")
        if agree:
            every = [want] * len(found)
            expect(found, every, _ROUNDS, magnitude=size, where=f"parameter {p} by rank")


@check("algorithms.S5.6.warmup", needs=_NEEDS, effort=0.35)
def warmup(lab: Lab) -> None:
    """The first warmup_steps steps apply the mean gradient, later ones each rank's own; without
    rounds nothing else changes the weights.
    """
    nodes, warmup_steps = lab.draw(worlds(4)), lab.integer(0, 3)
    interval = lab.choice([0, _INTERVAL_MS])
    alone = 1 if interval else 3  # the first round is at the second forward after the warm-up
    kinds = ["step", "sleep"] * (warmup_steps + alone) + ["abort", "step", "sleep", "abort"]
    _train(lab, nodes, [kinds] * sum(nodes), warmup_steps, interval)


@check("algorithms.S3.6.nothing_lost", dtypes=("float32", "float64"), needs=_NEEDS, effort=0.2)
def nothing_lost(lab: Lab) -> None:
    """Rounds move the ranks towards their mean, however fast each of them trains, and lose no
    rank's steps; they follow each other after the interval, and none moves weights between forward
    and backward.
    """
    nodes = lab.draw(worlds(4).filter(lambda nodes: sum(nodes) > 1))
    warmup_steps, resumes = lab.integer(0, 1), lab.flag()
    # other implementations, and programs, may have a clock of their own
    virtual = lab.has_every_option and lab.target.requests is None
    if virtual and lab.integer(0, 2) == 0:
        _expect_on_time(lab, nodes, warmup_steps)
    else:
        _expect_equal_in_the_end(lab, nodes, warmup_steps, resumes)


def _expect_equal_in_the_end(
    lab: Lab, nodes: tuple[int, ...], warmup_steps: int, resumes: bool
) -> None:
    """Train each rank at a pace of its own."""
    kinds = []
    for _ in range(sum(nodes)):
        mine = ["step"] * warmup_steps
        for part in range(1 + resumes):
            mine += ["abort", "resume"] * part
            for _ in range(lab.integer(2, 5)):
                mine += ["step"] * lab.integer(1, 3) + ["sleep"]
        # Rounds begin by the second of these at the latest; while no rank trains, they make the
        # ranks equal.
        kinds.append([*mine, "step", "step", "long sleep", "abort"])
    trained = _train(lab, nodes, kinds, warmup_steps)
    _expect_nothing_lost(*trained, [len(mine) - 1 for mine in kinds], agree=True)


def _expect_on_time(lab: Lab, nodes: tuple[int, ...], warmup_steps: int) -> None:
    """Train all ranks at the same pace; no action takes place at the time of a round."""
    start = ["step"] * (warmup_steps + 2)  # the last one's forward begins the first round
    after_rounds = [0.5, 20.0, 0.7, 2.25]
    kinds = [*start, 0.5, 20.0, "step", 0.3, 0.7, "step", "slow step", 2.25, "step", "abort", 1.0]
    training, programs = _train(lab, nodes, [kinds] * sum(nodes), warmup_steps)
    for place, kind in enumerate(kinds[len(start) :], len(start)):
        if kind == 0.5:
            _expect_moved(training, programs, place)
        elif kind in after_rounds:  # ranks have been equal since the last one
            _expect_nothing_lost(training, programs, [place] * sum(nodes), agree=True)
        else:  # no round has taken place since the last action
            for rank, found in enumerate(training.results):
                want, action = found[place - 1], programs[rank][place]
                if kind == "step":
                    want = [w - action[1][p] for p, w in enumerate(want)]
                where = f"rank {rank}, action {place} ({kind}), between rounds"
                lab.assert_equal(found[place], want, where=where)


def _expect_moved(training: Training, programs: Programs, place: int) -> None:
    """Expect that the first round has moved ranks; it began with the step before action ``place``.

    The round may average each rank's weights from before or after that step. Only elements are
    looked at for which two ranks differ in either case.
    """
    for p in range(len(training.weights)):
        before = [found[place - 2][p] for found in training.results]
        steps = [program[place - 1][1][p] for program in programs]
        alone = [w - step for w, step in zip(before, steps, strict=True)]
        apart = torch.ones_like(before[0], dtype=torch.bool)
        for one, other in itertools.product((before[0], alone[0]), (before[1], alone[1])):
            apart &= one != other
        if apart.any():
            found = [of_rank[place][p] for of_rank in training.results]
            moved = any(not torch.equal(*both) for both in zip(found, alone, strict=True))
            said = f"parameter {p}: no round within half an interval of the second forward"
            training.lab.assert_that(moved, said)


def _expect_of_actions(lab: Lab, kinds: list[str], warmup_steps: int, agree: bool) -> None:
    """Run the same actions on all ranks, each with its own gradients and pace; then abort, wait,
    and take a step.
    """
    nodes = lab.draw(worlds(3))
    every = [[*kinds, "abort", "sleep", "step", "abort"]] * sum(nodes)
    trained = _train(lab, nodes, every, warmup_steps)
    _expect_nothing_lost(*trained, [len(kinds)] * sum(nodes), agree)


_kinds = ["step", "step", "sleep", "abort", "resume"]


@check("algorithms.S5.6.abort", needs=_NEEDS, effort=0.35)
def abort(lab: Lab) -> None:
    """After any sequence of abort and resume, averaging pauses from an abort to the next resume,
    also if training restarts; training and warm-up continue.
    """
    warmup_steps = lab.integer(0, 3)
    kinds = lab.draw(st.lists(st.sampled_from(_kinds), max_size=9))
    if lab.has_every_option and lab.flag():
        kinds += [*["step"] * (warmup_steps + 2), "sleep", "abort", "restart", "step", "step"]
        kinds += ["sleep", "step", "sleep"]
    # ranks abort at different times, while the others still take part in rounds
    if lab.integer(0, 2):
        kinds += ["resume", *["step"] * (warmup_steps + 2), "sleep", "step", "sleep"]
    _expect_of_actions(lab, kinds, warmup_steps, agree=False)


@check("algorithms.S5.6.resume", needs=_NEEDS, effort=0.3)
def resume(lab: Lab) -> None:
    """After a resume, rounds start again and make the ranks equal while no rank trains."""
    warmup_steps = lab.integer(0, 2)
    kinds = [*lab.draw(st.lists(st.sampled_from(_kinds), max_size=4)), "abort"]
    kinds += [*lab.draw(st.lists(st.sampled_from(["step", "sleep"]), max_size=2)), "resume"]
    kinds += [*["step"] * (warmup_steps + 2), "long sleep"]
    _expect_of_actions(lab, kinds, warmup_steps, agree=True)
