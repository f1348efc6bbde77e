"""Tests of traces of DiLoCo: outer steps with momentum and the schedule are replayed, faults are
located and named (S9).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_ref.conformance.trace import Recorder, TraceReport, check_trace

RANKS, SIZE, LR = 2, 7, 0.7
OUTER = {"outer_lr": LR, "outer_momentum": 0.9, "outer_nesterov": True}


class Loop:
    """A hand-written DiLoCo on all ranks, recorded through three calls; subclasses have one fault
    each.

    Args:
        period: steps after which every fragment has been sent once.
        fragments: their number; each is a bucket of its own.
        delay: steps from sending to applying.
        mix: of the local weights.
        options: of the outer optimizer, as the trace declares them.
    """

    dtype = torch.float32
    recording: dict[str, Any] = {}

    def __init__(
        self, period: int = 2, fragments: int = 1, delay: int = 0, mix: float = 0.25, **options: Any
    ) -> None:
        self.period, self.fragments, self.delay, self.mix = period, fragments, delay, mix
        self.options = {**OUTER, **options}
        generator = self.generator = torch.Generator().manual_seed(0)
        self.g = [
            torch.randn(SIZE, generator=generator, dtype=self.dtype) for _ in range(fragments)
        ]
        self.xs = [[g.clone() for g in self.g] for _ in range(RANKS)]
        self.outer = [self.optimizer(torch.nn.Parameter(g)) for g in self.g]
        self.means: list[torch.Tensor] = []

    def optimizer(self, g: torch.nn.Parameter) -> torch.optim.Optimizer:
        lr, momentum, nesterov = (
            self.options[f"outer_{name}"] for name in ("lr", "momentum", "nesterov")
        )
        return torch.optim.SGD([g], lr=lr, momentum=momentum, nesterov=nesterov)

    def outer_step(self, place: int, mean: torch.Tensor) -> None:
        optimizer = self.outer[place]
        optimizer.param_groups[0]["params"][0].grad = mean.clone()
        optimizer.step()

    def info(self, t: int, place: int) -> dict[str, Any]:
        return {"t": t, "fragment": place}

    def is_due(self, t: int) -> bool:
        return t % (self.period // self.fragments) == 0

    def train(self, directory: Path, steps: int = 9) -> TraceReport:
        options = {
            "period": self.period,
            "fragments": self.fragments,
            "delay": self.delay,
            "mix": self.mix,
            **self.options,
        }
        with ExitStack() as stack:
            recorders = [
                stack.enter_context(
                    Recorder(
                        directory,
                        rank=rank,
                        world_size=RANKS,
                        algorithm="diloco",
                        options=options,
                        **self.recording,
                    )
                )
                for rank in range(RANKS)
            ]
            self.steps(recorders, steps)
        return check_trace(directory)

    def steps(self, recorders: list[Recorder], steps: int) -> None:
        sent, gap = 0, self.period // self.fragments
        mean = place = None
        for t in range(1, steps + 1):
            for rank, xs in enumerate(self.xs):
                for x in xs:
                    x -= (
                        0.1
                        * (rank + 1)
                        * torch.randn(SIZE, generator=self.generator, dtype=self.dtype)
                    )
            if mean is not None and self.is_due(t):
                self.apply(recorders, place, mean, t)
                mean = None
            if (t + self.delay) % gap == 0:
                place, sent = sent % self.fragments, sent + 1
                mean = self.send(recorders, place, t)
                if self.delay == 0 and self.is_due(t):
                    self.apply(recorders, place, mean, t)
                    mean = None

    def difference(self, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return g - x

    def send(self, recorders: list[Recorder], place: int, t: int) -> torch.Tensor:
        xs = [of_rank[place] for of_rank in self.xs]
        differences = [self.difference(self.g[place], x) for x in xs]
        for recorder, x, d in zip(recorders, xs, differences, strict=True):
            inputs = {"x": d, "g": self.g[place], "weights": x}
            recorder.before_op(f"fragment{place}", inputs, **self.info(t, place))
        return torch.stack(differences).mean(0)

    def apply(self, recorders: list[Recorder], place: int, mean: torch.Tensor, t: int) -> None:
        self.outer_step(place, mean)
        for recorder, of_rank in zip(recorders, self.xs, strict=True):
            before, g = of_rank[place].clone(), self.g[place]
            of_rank[place].copy_(g + self.mix * (before - g) if self.mix else g)
            outputs = {"x": mean, "g": g, "before": before, "weights": of_rank[place]}
            recorder.after_op(f"fragment{place}", outputs, applied=t)
            recorder.step()


ROUND = ["x", "difference", "g after", "g", "weights", "before", "fragment", "applied"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"outer_nesterov": False},
        {"outer_momentum": 0.0, "outer_nesterov": False},
        {"delay": 1, "mix": 0.4},
        {"period": 6, "fragments": 3, "delay": 1},
        {"outer_lr": 1, "outer_momentum": 1.0},
        {"outer_lr": 0.0},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_S9_a_right_loop_does_not_diverge(
    tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    loop = type("OfDtype", (Loop,), {"dtype": dtype})(**settings)
    report = loop.train(tmp_path, steps=31)
    assert report.passed, report
    assert not report.not_checked
    rounds = sum(t % (loop.period // loop.fragments) == 0 for t in range(1, 32))
    followers = rounds - loop.fragments  # to which g before and t are compared, too
    assert len(report.executions) == rounds * (len(ROUND) - bool(loop.delay)) + 2 * followers


class MomentumLost(Loop):
    def outer_step(self, place: int, mean: torch.Tensor) -> None:
        self.outer[place].state.clear()
        super().outer_step(place, mean)


class OneRoundLate(Loop):
    def outer_step(self, place: int, mean: torch.Tensor) -> None:
        self.means.append(mean)
        if len(self.means) > 1:
            super().outer_step(place, self.means[-2])


class NoNesterov(Loop):
    def optimizer(self, g: torch.nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([g], lr=LR, momentum=0.9)


class OtherRate(Loop):
    def optimizer(self, g: torch.nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([g], lr=0.5, momentum=0.9, nesterov=True)


class WrongSign(Loop):
    def outer_step(self, place: int, mean: torch.Tensor) -> None:
        super().outer_step(place, -mean)


class WrongDifference(Loop):
    def difference(self, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x - g


class NoStep(Loop):
    def outer_step(self, place: int, mean: torch.Tensor) -> None:
        pass


class Damped(Loop):
    def optimizer(self, g: torch.nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([g], lr=LR, momentum=0.9, dampening=0.1)


class OneStepLate(Loop):
    def is_due(self, t: int) -> bool:
        return t % self.period == 1


class MovesTheOthers(Loop):
    def outer_step(self, place: int, mean: torch.Tensor) -> None:
        super().outer_step(place, mean)
        self.g[1 - place] -= 0.01


class OtherFragments(Loop):
    def info(self, t: int, place: int) -> dict[str, Any]:
        return {"t": t, "fragment": 1 - place}


class SamePeriod(Loop):
    def info(self, t: int, place: int) -> dict[str, Any]:
        return {"t": min(t, 2), "fragment": place}


@pytest.mark.parametrize(
    ("loop", "step", "tensor", "kind"),
    [
        (MomentumLost(), 1, "g after", "as if the outer momentum had been lost"),
        (
            MomentumLost(outer_nesterov=False),
            1,
            "g after",
            "as if the outer momentum had been lost",
        ),
        (
            MomentumLost(period=4, fragments=2, delay=1),
            2,
            "g after",
            "as if the outer momentum had been lost",
        ),
        (OneRoundLate(), 0, "g after", "as if outer_lr had been 0"),
        (NoNesterov(), 0, "g after", "as if Nesterov momentum had not been used"),
        (NoNesterov(outer_nesterov=False, outer_momentum=0.0), 1, "g after", "like no known cause"),
        (OtherRate(), 0, "g after", "as if outer_lr had been 0.5"),
        (WrongSign(), 0, "g after", "as if outer_lr had been -0.7"),
        (WrongDifference(), 0, "difference", None),
        (NoStep(), 0, "g after", "as if outer_lr had been 0"),
        (Damped(outer_nesterov=False), 1, "g after", "like no known cause"),
        (
            OneStepLate(),
            0,
            "before",
            "as if the fragment had been applied after another step than the delay says",
        ),
        (
            OneStepLate(period=4, delay=1),
            0,
            "applied",
            "as if the fragment had been applied after another step than the delay says",
        ),
        (MovesTheOthers(fragments=2), 2, "g before", "as if g had been changed between rounds"),
        (
            OtherFragments(period=4, fragments=2),
            0,
            "fragment",
            "as if another fragment had been sent after that step than is due",
        ),
        (SamePeriod(), 1, "t", "as if the fragment had been sent again within a period"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Loop) else "",
)
def test_S9_a_fault_is_located_and_named(
    tmp_path: Path, loop: Loop, step: int, tensor: str, kind: str | None
) -> None:
    report = loop.train(tmp_path)
    assert report.first is not None
    assert (report.first.step, report.first.rank, report.first.tensor) == (step, 0, tensor), report
    if kind is not None:
        assert next(iter(report.kinds)).startswith(kind), report


class GrowingRate(Loop):
    rate = 0.5

    def info(self, t: int, place: int) -> dict[str, Any]:
        self.rate = self.outer[place].param_groups[0]["lr"] = 1 / t
        return {**super().info(t, place), "outer_lr": self.rate}


def test_S9_the_rate_of_each_round_may_be_recorded(tmp_path: Path) -> None:
    report = GrowingRate().train(tmp_path)
    assert report.passed, report


class Forgets(Loop):
    def info(self, t: int, place: int) -> dict[str, Any]:
        return {}


class Skips(Loop):
    def send(self, recorders: list[Recorder], place: int, t: int) -> torch.Tensor:
        return super().send(recorders, place, t) if t != 4 else torch.zeros(SIZE)

    def apply(self, recorders: list[Recorder], place: int, mean: torch.Tensor, t: int) -> None:
        if t != 4:
            super().apply(recorders, place, mean, t)


class Sampled(Loop):
    recording = {"every": 2}


class OneBucket(Loop):
    def info(self, t: int, place: int) -> dict[str, Any]:
        return {**super().info(t, place), "execution": t}


@pytest.mark.parametrize(
    ("loop", "reason", "count"),
    [
        (Forgets(), "the schedule is declared, but info 't' was not recorded", 4),
        (Skips(), "1 rounds between steps t=2 and 6 were not sent, or not recorded", 1),
        (
            Sampled(),
            "the outer momentum depends on rounds of this fragment that are not in the trace",
            1,
        ),
        (
            OneBucket(),
            "the outer momentum depends on rounds of this fragment that are not in the trace",
            4,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Loop) else "",
)
def test_S9_what_is_missing_is_named_and_the_rest_compared(
    tmp_path: Path, loop: Loop, reason: str, count: int
) -> None:
    report = loop.train(tmp_path)
    assert report.passed, report
    assert [why.startswith(reason) for _, _, why in report.not_checked] == [True] * count, (
        report.not_checked
    )
    assert len(report.executions) > 8


def test_S9_5_a_mean_that_is_not_finite_is_not_applied(tmp_path: Path) -> None:
    class Overflows(Loop):
        def send(self, recorders: list[Recorder], place: int, t: int) -> torch.Tensor:
            if t == 4:
                self.xs[0][place][0] = torch.inf
            return super().send(recorders, place, t)

        def apply(self, recorders: list[Recorder], place: int, mean: torch.Tensor, t: int) -> None:
            super().apply(recorders, place, mean, t)
            for of_rank in self.xs:
                of_rank[place].copy_(self.g[place])

    class Waits(Overflows):
        def outer_step(self, place: int, mean: torch.Tensor) -> None:
            if mean.isfinite().all():
                super().outer_step(place, mean)

    report = Overflows(mix=0.0).train(tmp_path / "applied")
    assert report.first is not None
    assert (report.first.step, report.first.tensor) == (1, "g after"), report
    report = Waits(mix=0.0).train(tmp_path / "waits")
    assert report.passed, report
