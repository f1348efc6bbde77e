"""Comparison of planned trainings: their rank in time, what decides it, and what to do (S14)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from operator import attrgetter
from typing import Any, NamedTuple

from bagua_ref.base.utils import readable_bytes
from bagua_ref.formulas.costs import LinkCost
from bagua_ref.formulas.mixing import mixing
from bagua_ref.planning.measured import Estimate, MeasuredMachine
from bagua_ref.planning.plans import Machine, Prediction, StepPlan, predict

__all__ = [
    "Candidate",
    "Verdict",
    "compare",
    "error_of",
    "learnt",
    "verdict_of",
    "warnings_of",
    "with_bandwidth",
]

_MATRIX = 256
_MEASURED = ((2e8, (0.70, 1.76)), (float("inf"), (0.54, 1.81)))
"""Measured time divided by the predicted one, at least and at most, over links of up to so many
bits a second: 240 trainings of predicted_times.json.
"""
_SAME = 0.02
"""Gains below this part of a step are none."""


@dataclass
class Candidate:
    """An algorithm of a comparison.

    Attributes:
        name: with its options, as the user gave it.
        plan: its operations.
        prediction: with the likely costs.
        seconds: of a step, with an interval.
        reason: what it sends and waits for, in a sentence.
    """

    name: str
    plan: StepPlan
    prediction: Prediction
    seconds: Estimate
    reason: str = ""

    @property
    def sent(self) -> tuple[float, float]:
        """Bytes and messages of the busiest rank per step; of rounds that go on beside the steps,
        at their rate.
        """
        interval = self.plan.interval
        rounds = (
            1.0
            if not interval
            else self.prediction.seconds / (interval + self.prediction.communication)
        )
        return self.plan.sent[0] * rounds, self.plan.sent[1] * rounds

    def share_of(self, first: Candidate) -> str:
        """Return the bytes as a part of another candidate's."""
        return _percent(self.sent[0] / first.sent[0]) if first.sent[0] else "-"

    @property
    def steps(self) -> float | None:
        """Steps to the same loss, divided by those of gradient_allreduce, as far as this project
        has measured them.
        """
        if type(self.plan.algorithm).__name__ == "GradientAllReduceAlgorithm":
            return 1.0
        found = [re.search(_STEPS, text) for text in learnt(self.plan.algorithm)]
        return next((int(match[1]) / int(match[2]) for match in found if match), None)

    def same_loss(self, first: Candidate) -> str:
        """Return the time to the same loss as a part of another candidate's; "unknown" without
        `steps`.
        """
        if self.steps is None:
            return "unknown"
        return _percent(self.steps * self.seconds.value / first.seconds.value)

    @cached_property
    def halving(self) -> tuple[int, float] | None:
        """Rounds and seconds in which averaging along graphs at least halves ranks' distances from
        their mean (S13).

        The rounding of what is sent is left out. None: there are no graphs, or of more than 256
        ranks, whose matrices take long to multiply; or distances never halve.
        """
        graphs = self.plan.graphs
        rounds = mixing(graphs, 0.5).rounds if graphs and len(graphs[0]) <= _MATRIX else None
        return (
            None
            if rounds is None
            else (rounds, rounds * self.plan.cycle / len(graphs) * self.prediction.seconds)
        )

    @property
    def equal_ranks(self) -> bool:
        """Whether all ranks have the same weights after every step."""
        phases: Any = getattr(self.plan.algorithm.implementation, "phases", None)
        return phases is not None and phases[-1].same_replicas is True


_STEPS = r"took (\d+) steps, with gradient_allreduce (\d+)"


def _percent(part: float) -> str:
    return f"{100 * part:,.0f} %" if part >= 1 else f"{100 * part:.3g} %"


def error_of(costs: MeasuredMachine, part: float | None) -> tuple[float, float]:
    """Return the least and most that a step may take, divided by its prediction.

    Args:
        costs: with the link whose speed the largest measured errors depend on.
        part: by which predictions may be off, either way; None: those errors.
    """
    if part is not None:
        return 1 - part, 1 + part
    beta = costs.between[1].value if costs.between else 0.0
    return next(found for rate, found in _MEASURED if rate * beta >= 8 or rate == float("inf"))


def compare(
    plans: Mapping[str, StepPlan],
    costs: MeasuredMachine,
    error: tuple[float, float],
    **stragglers: float,
) -> list[Candidate]:
    """Return the plans, by name, as candidates, the fastest first.

    Args:
        plans: the first one is what the others' bytes are compared with.
        costs: with their intervals; every step is predicted at both ends.
        error: by which the ends of a step's interval are multiplied, as from `error_of`.
        stragglers: ``slowest`` and ``jitter`` of `Machine`.
    """
    low, likely, high = (
        costs.machine(attrgetter(end), **stragglers) for end in ("low", "value", "high")
    )
    found = []
    for name, plan in plans.items():
        prediction = predict(plan, likely)
        seconds = Estimate(
            predict(plan, low).seconds * error[0],
            prediction.seconds,
            predict(plan, high).seconds * error[1],
        )
        found.append(Candidate(name, plan, prediction, seconds))
    for candidate in found:
        candidate.reason = _reason(candidate, found[0], likely)
    return sorted(found, key=lambda candidate: candidate.seconds.value)


def _reason(candidate: Candidate, first: Candidate, machine: Machine) -> str:
    own, (nbytes, messages), compared = candidate.prediction, candidate.sent, first.sent[0]
    kind = "between nodes" if len(candidate.plan.cluster.nodes) > 1 else "inside the node"
    if not messages:
        return f"sends nothing {kind}."
    part = (
        f" ({candidate.share_of(first)} of {first.name})"
        if candidate is not first and compared
        else ""
    )
    number = f"{messages:,.0f}" if messages >= 100 else f"{messages:.3g}"
    text = f"busiest rank: {readable_bytes(nbytes)} per step {kind}{part}, about {number}"
    text += f" message{'s' * (number != '1')}."
    if candidate.plan.interval is not None:
        steps = candidate.plan.sent[0] / nbytes if nbytes else 0.0
        text += f" One round in {steps:,.3g} steps."
    if own.exposed < 0.01 * own.seconds:
        return f"{text} Fully hidden behind compute."
    between, without = machine.links.between, dict[str, Machine]()
    for name, link in (
        ("latency", LinkCost(0.0, between.beta)),
        ("bandwidth", LinkCost(between.alpha, 0.0)),
    ):
        without[name] = machine._replace(links=machine.links._replace(between=link))
    nothing = machine.links._replace(inside=LinkCost(0.0, 0.0))
    without["links inside nodes"] = machine._replace(links=nothing)
    without["codecs and fixed costs"] = machine._replace(codec={}, operation={})
    without["slower ranks"] = machine._replace(slowest=1.0, jitter=0.0)
    most = min(without, key=lambda name: predict(candidate.plan, without[name]).exposed)
    waits = own.exposed / own.seconds
    return f"{text} {waits:.0%} of each step is spent waiting, mostly on {most}."


def with_bandwidth(machine: Machine, factor: float) -> Machine:
    """Return a machine with ``factor`` times the bandwidth between nodes; inside a node too, if its
    links are the same.
    """
    alpha, beta = machine.links.between
    link = LinkCost(alpha, beta / factor)
    inside = machine.links.inside if machine.links.inside != machine.links.between else link
    return machine._replace(links=machine.links._replace(between=link, inside=inside))


class Verdict(NamedTuple):
    """What to do.

    Attributes:
        winner: the name of the candidate to use; None: intervals overlap.
        text: the verdict in a sentence.
        line: the line to paste into a training script.
        then: what to measure next.
    """

    winner: str | None
    text: str
    line: str
    then: str


def verdict_of(ranked: Sequence[Candidate], first: Candidate) -> Verdict:
    """Return what to do: use a candidate whose interval ends before that of the first one begins,
    the soonest at the same loss if that is known; else keep the first one.

    Args:
        ranked: the candidates, the fastest first.
        first: what training uses without advice, such as gradient_allreduce.
    """
    best, known = ranked[0], [other for other in ranked if other.steps is not None]
    apart = [other for other in ranked if other.seconds.high < first.seconds.low]
    sure = [other for other in known if other.steps * other.seconds.high < first.seconds.low]  # type: ignore[operator]
    gain = 1 - best.seconds.value / first.seconds.value
    if sure:
        chosen = min(sure, key=lambda other: other.steps * other.seconds.value)  # type: ignore[operator]
        text = (
            f"{chosen.name}: the same loss in {chosen.same_loss(first)} of the time of {first.name},"
            " if your task learns like the one that was measured."
        )
        faster = [
            c.name for c in apart if c.seconds.value < chosen.seconds.value and c.steps is None
        ]
        text += f" Faster steps, of unknown quality: {', '.join(faster)}." if faster else ""
    elif apart:
        chosen = apart[0]
        text = (
            f"{chosen.name}: {chosen.seconds.value / first.seconds.value:.0%} of the time of a step"
            f" of {first.name}. Whether it learns as well is unknown."
        )
    else:
        chosen = first
        gains = f"at most {gain:.0%} to gain, by {best.name}, whose interval overlaps"
        text = f"Keep {first.name}: {gains if gain >= _SAME else 'nothing to gain'}."
    then = "Next: bagua-ref measure, on these ranks, then advise --measured FILE"
    if chosen is not first:
        then += f"; and the loss of {chosen.name} on your own task"
    name, _, options = chosen.name.partition(":")
    given = f", {options.replace(',', ', ')}" if options else ""
    line = f'model.with_bagua(optimizer, Algorithm.init("{name}"{given}))'
    if not given:
        line = f'model.with_bagua(optimizer, "{name}")'
    return Verdict(None if chosen is first else chosen.name, text, line, f"{then}.")


def learnt(algorithm: Any) -> list[str]:
    """Return sentences on learning with these options in this project's benchmarks, with their
    source.

    They hold for those tasks; nothing is concluded from them for another one.
    """
    rows = json.loads(
        files("bagua_ref.planning").joinpath("learnt.json").read_text(encoding="utf-8")
    )
    kind = type(algorithm).__name__
    return [
        row["text"]
        for row in rows
        if row["algorithm"] == kind
        and all(getattr(algorithm, name) == value for name, value in row["options"].items())
    ]


def warnings_of(candidates: Sequence[Candidate]) -> list[str]:
    """Return warnings about the candidates: ranks that differ, memory, warm-ups."""
    differ = [candidate.name for candidate in candidates if not candidate.equal_ranks]
    parts = {
        candidate.name: sum(candidate.plan.memory) / candidate.plan.nbytes
        for candidate in candidates
    }
    large = [f"{name} ({part:.2g}x)" for name, part in parts.items() if part > 1]
    warm = [
        f"{candidate.name} ({candidate.plan.warmup} steps)"
        for candidate in candidates
        if candidate.plan.warmup
    ]
    named = {
        "these let weights differ between ranks; check the loss on your task": differ,
        "extra memory is larger than the weights": large,
        "warm-up steps run plain gradient_allreduce and are not included above": warm,
    }
    return [f"{text}: {', '.join(names)}" for text, names in named.items() if names]
