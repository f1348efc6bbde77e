"""Asynchronous averaging: properties that hold whenever its rounds happen (S3.6, S5.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.strategies import FLOATS, Draw, dtype_named, seeds, worlds
from bagua_ref.conformance.cases.training_cases import ONE_BUCKET, on_a_grid
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.training import Training
from bagua_ref.conformance.targets.reference_algorithms import Action

_INTERVAL_MS = 100
_LONG_SLEEP = ("sleep", 20 * _INTERVAL_MS / 1000)
"""Enough time for rounds to make all ranks equal."""
_ROUNDS = SUM(1000)
"""For weights changed by some hundred rounds, each with rounding errors."""


class _Case:
    """Weights that all ranks start from, and gradients of quarters: sums are exact in any order."""

    def __init__(self, lab: Lab, draw: Draw, nodes: tuple[int, ...], dtype: torch.dtype) -> None:
        self.nodes, self.n, self._seed = nodes, sum(nodes), draw(seeds)
        others = map(dtype_named, lab.dtypes(FLOATS))
        dtypes = [dtype, *draw(st.lists(st.sampled_from([dtype, *others]), max_size=3))]
        self.weights = [
            on_a_grid(self._seed + place, torch.empty(3, dtype=dtype), 32)
            for place, dtype in enumerate(dtypes)
        ]
        self._made = len(dtypes)

    def gradients(self) -> Action:
        """Return a step with new gradients."""
        self._made += 100
        places = reversed([*enumerate(self.weights)])
        return "step", {
            place: on_a_grid(self._seed + self._made + place, w, 4, self.n) for place, w in places
        }

    def train(
        self, lab: Lab, draw: Draw, programs: list[list[Action]], interval: float, warmup_steps: int
    ) -> Training:
        """Run each rank's program."""
        options = {"lr": 1.0, "bucket_bytes": draw(st.sampled_from([1, 1, ONE_BUCKET]))}
        options |= {"sync_interval_ms": interval, "warmup_steps": warmup_steps}
        training = Training(
            lab, draw(seeds), "async_model_average", self.nodes, self.weights, [], options
        )
        training.run(programs)
        return training

    def expect_nothing_lost(
        self, training: Training, programs: list[list[Action]], places: list[int], agree: bool
    ) -> None:
        """Expect that the mean over ranks follows the mean of all steps; if ``agree``, that every
        rank does.

        Args:
            training: results of the programs.
            programs: each rank's program.
            places: place of each rank's abort after which this holds.
            agree: whether there was time for rounds while no rank trained.
        """
        for p, w in enumerate(self.weights):
            taken = [
                [g[p] for g in _steps(program[:place])]
                for program, place in zip(programs, places, strict=True)
            ]
            mass = w.double().abs() + torch.stack(
                [_sum([g.abs() for g in mine], w) for mine in taken]
            ).amax(0)
            want = (w.double() - torch.stack([_sum(mine, w) for mine in taken]).mean(0)).to(w.dtype)
            of_ranks = [mine[at][p] for mine, at in zip(training.results, places, strict=True)]
            found = torch.stack(of_ranks).double().mean(0).to(w.dtype)
            where = f"mean over ranks, parameter {p}"
            training.lab.assert_equal(found, want, _ROUNDS, magnitude=mass, where=where)
            for rank, place in enumerate(places if agree else []):
                training.compare(rank, place, p, want, _ROUNDS, mass, f"action {place} (abort)")


def _steps(program: list[Action]) -> list[Any]:
    return [action[1] for action in program if action[0] == "step"]


def _sum(gradients: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(like), *gradients]).double().sum(0)


def _sleep(draw: Draw) -> Action:
    """Return a wait of a few intervals, often a whole number of them, so that rounds begin while
    ranks train.
    """
    return ("sleep", draw(st.sampled_from([0.1, 0.2, 0.3, 0.03, 0.17])))


def _expect_known(
    case: _Case,
    training: Training,
    programs: list[list[Action]],
    warmup_steps: int,
    rounds: bool,
) -> None:
    """Compare the weights that do not depend on the timing of rounds."""
    taken = [_steps(program) for program in programs]
    for rank, program in enumerate(programs):
        before, step, aborted = case.weights, 0, False
        for place, action in enumerate(program):
            may_have_moved = rounds and not aborted and step > warmup_steps + (action[0] != "step")
            if action[0] == "step":
                along = taken if step < warmup_steps else [taken[rank]]
                # The mean of several ranks' gradients is exact.
                want = [
                    w - torch.stack([steps[step][p] for steps in along]).mean(0)
                    for p, w in enumerate(before)
                ]
                step += 1
            else:
                want = before
            if not may_have_moved:
                for p, expected in enumerate(want):
                    training.compare(
                        rank, place, p, expected, where=f"action {place} ({action[0]})"
                    )
            before = training.results[rank][place]
            aborted = action[0] == "abort" or (aborted and action[0] != "resume")


@check("S5.6", "warmup", needs=("async_model_average",), effort=0.5)
def warmup(lab: Lab, draw: Draw) -> None:
    """The first warmup_steps steps apply the mean gradient, later ones each rank's own; without
    rounds nothing else happens.
    """
    case = _Case(lab, draw, draw(worlds(4)), torch.float32)
    warmup_steps, interval = draw(st.integers(0, 3)), draw(st.sampled_from([0, _INTERVAL_MS]))
    alone = 1 if interval else 3  # the first round is at the second forward after the warm-up
    programs = [
        [action for _ in range(warmup_steps + alone) for action in (case.gradients(), _sleep(draw))]
        + [("abort",), case.gradients(), _sleep(draw), ("abort",)]
        for _ in range(case.n)
    ]
    training = case.train(lab, draw, programs, interval, warmup_steps)
    _expect_known(case, training, programs, warmup_steps, interval > 0)


@check(
    "S3.6",
    "nothing_lost",
    dtypes=("float32", "float64"),
    needs=("async_model_average",),
    effort=0.2,
)
def nothing_lost(lab: Lab, draw: Draw) -> None:
    """Rounds move the ranks towards their mean, however fast each of them trains, and lose no
    rank's steps.
    """
    case = _Case(lab, draw, draw(worlds(4).filter(lambda nodes: sum(nodes) > 1)), lab.dtype)
    warmup_steps, resumes = draw(st.integers(0, 1)), draw(st.booleans())
    programs = []
    for _ in range(case.n):
        program = [case.gradients() for _ in range(warmup_steps)]
        for part in range(1 + resumes):
            program += [("abort",), ("resume",)] if part else []
            for _ in range(draw(st.integers(2, 5))):
                program += [case.gradients() for _ in range(draw(st.integers(1, 3)))] + [
                    _sleep(draw)
                ]
        # Rounds begin by the second of these at the latest; while no rank trains, they make the
        # ranks equal.
        program += [case.gradients(), case.gradients(), _LONG_SLEEP, ("abort",)]
        programs.append(program)
    training = case.train(lab, draw, programs, _INTERVAL_MS, warmup_steps)
    _expect_known(case, training, programs, warmup_steps, True)
    case.expect_nothing_lost(
        training, programs, [len(program) - 1 for program in programs], agree=True
    )


def _expect_of_actions(
    lab: Lab, draw: Draw, kinds: list[str], warmup_steps: int, equal: bool
) -> None:
    """Let all ranks run the same actions with their own gradients and pace, then abort, wait, and
    take a step.
    """
    case = _Case(lab, draw, draw(worlds(3)), torch.float32)
    make: dict[str, Callable[[], Action]] = {
        "step": case.gradients,
        "sleep": lambda: _sleep(draw),
        "long sleep": lambda: _LONG_SLEEP,
        "abort": lambda: ("abort",),
        "resume": lambda: ("resume",),
    }
    programs = [
        [make[kind]() for kind in [*kinds, "abort", "sleep", "step", "abort"]]
        for _ in range(case.n)
    ]
    training = case.train(lab, draw, programs, _INTERVAL_MS, warmup_steps)
    _expect_known(case, training, programs, warmup_steps, True)
    case.expect_nothing_lost(training, programs, [len(kinds)] * case.n, agree=equal)


_kinds = ["step", "step", "sleep", "abort", "resume"]


@check("S5.6", "abort", needs=("async_model_average",), effort=0.5)
def abort(lab: Lab, draw: Draw) -> None:
    """After any sequence of abort and resume, averaging pauses from an abort to the next resume;
    training and warm-up continue.
    """
    warmup_steps = draw(st.integers(0, 3))
    kinds = draw(st.lists(st.sampled_from(_kinds), max_size=9))
    # ranks abort at different times, while the others still take part in rounds
    if draw(st.integers(0, 2)):
        kinds += ["resume", *["step"] * (warmup_steps + 2), "sleep", "step", "sleep"]
    _expect_of_actions(lab, draw, kinds, warmup_steps, equal=False)


@check("S5.6", "resume", needs=("async_model_average",), effort=0.4)
def resume(lab: Lab, draw: Draw) -> None:
    """After a resume, rounds start again and make the ranks equal while no rank trains."""
    warmup_steps = draw(st.integers(0, 2))
    kinds = [*draw(st.lists(st.sampled_from(_kinds), max_size=4)), "abort"]
    kinds += [*draw(st.lists(st.sampled_from(["step", "sleep"]), max_size=2)), "resume"]
    _expect_of_actions(
        lab, draw, [*kinds, *["step"] * (warmup_steps + 2), "long sleep"], warmup_steps, equal=True
    )
