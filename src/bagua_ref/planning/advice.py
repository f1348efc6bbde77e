"""Comparison of planned trainings: their order in time, what decides it, and what to do (S14)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from bagua_ref.base.utils import readable_bytes
from bagua_ref.formulas.costs import LinkCost
from bagua_ref.planning.plans import StepPlan
from bagua_ref.planning.pricing import Machine, Prediction, predict

__all__ = [
    "Candidate",
    "Verdict",
    "compare",
    "error_of",
    "learnt",
    "parse_algorithm",
    "verdict_of",
    "warnings_of",
]

_SLOW = 2e8
"""Bits per second up to which links are slow."""
_MEASURED_ERRORS = {True: (0.70, 1.76), False: (0.54, 1.81)}
"""Whether links are slow -> the smallest and largest ratio of measured to predicted time, in 240
trainings of predicted_times.json.
"""
_VALUES = (ast.Constant, ast.Name, ast.UnaryOp)
_SAME = 0.02
"""Gain, as a fraction of a step, below which two algorithms count as equally fast."""


@dataclass
class Candidate:
    """A planned training in a comparison: an algorithm with its times.

    Attributes:
        name: algorithm with its options, as the user wrote it.
        plan: operations of the algorithm.
        prediction: predicted times of a step.
        low: minimal seconds of a step.
        high: maximal seconds of a step.
        reason: sentence on the algorithm's messages and waits.
    """

    name: str
    plan: StepPlan
    prediction: Prediction
    low: float
    high: float
    reason: str = ""

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return self.prediction.seconds

    @property
    def sent(self) -> tuple[float, float]:
        """Bytes and messages of the busiest rank per step; for background rounds, at their rate."""
        interval, rounds = self.plan.interval, 1.0
        if interval:
            rounds = self.seconds / (interval + self.prediction.communication)
        return self.plan.sent[0] * rounds, self.plan.sent[1] * rounds

    def share_of(self, first: Candidate) -> str:
        """Return the bytes as a percentage of another candidate's."""
        return _percent(self.sent[0] / first.sent[0]) if first.sent[0] else "-"

    @property
    def steps(self) -> float | None:
        """Steps to the same loss relative to gradient_allreduce; None: not measured."""
        if type(self.plan.algorithm).__name__ == "GradientAllReduceAlgorithm":
            return 1.0
        counts = re.search(_STEPS, " ".join(learnt(self.plan.algorithm)))
        return int(counts[1]) / int(counts[2]) if counts else None

    def same_loss(self, first: Candidate) -> str:
        """Return the time to the same loss as a percentage of another candidate's, or
        "unknown".
        """
        if self.steps is None:
            return "unknown"
        return _percent(self.steps * self.seconds / first.seconds)

    @property
    def equal_ranks(self) -> bool:
        """Whether all ranks have the same weights after every step."""
        phases: Any = getattr(self.plan.algorithm.implementation, "phases", None)
        return phases is not None and phases[-1].same_replicas is True


_STEPS = r"took (\d+) steps, with gradient_allreduce (\d+)"


def _percent(part: float) -> str:
    return f"{100 * part:,.0f} %" if part >= 1 else f"{100 * part:.3g} %"


def error_of(machine: Machine, part: float | None) -> tuple[float, float]:
    """Return the ratios of the shortest and the longest possible time of a step to the predicted
    time.

    Args:
        machine: costs; the largest measured errors depend on its link's speed.
        part: the relative uncertainty; None: the largest measured errors.
    """
    if part is not None:
        return 1 - part, 1 + part
    return _MEASURED_ERRORS[machine.links.between.beta * _SLOW >= 8]


def compare(
    plans: Mapping[str, StepPlan], machine: Machine, error: tuple[float, float]
) -> list[Candidate]:
    """Return the plans as candidates, fastest first.

    Args:
        plans: plans by name; the bytes of the others are relative to the first one's.
        machine: the costs.
        error: factors from a predicted time to the ends of its interval, as from `error_of`.
    """
    candidates = []
    for name, plan in plans.items():
        prediction = predict(plan, machine)
        low, high = (prediction.seconds * factor for factor in error)
        candidates.append(Candidate(name, plan, prediction, low, high))
    for candidate in candidates:
        candidate.reason = _reason(candidate, candidates[0], machine)
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def _reason(candidate: Candidate, first: Candidate, machine: Machine) -> str:
    own, (nbytes, messages) = candidate.prediction, candidate.sent
    kind = "between nodes" if len(candidate.plan.cluster.nodes) > 1 else "inside the node"
    if not messages:
        return f"sends nothing {kind}."
    part = f" ({candidate.share_of(first)} of {first.name})" if candidate is not first else ""
    number = f"{messages:,.0f}" if messages >= 100 else f"{messages:.3g}"
    text = f"busiest rank: {readable_bytes(nbytes)} per step {kind}{part}, about {number}"
    text += f" message{'s' * (number != '1')}."
    if candidate.plan.interval is not None:
        text += f" One round in {candidate.plan.sent[1] / messages:,.3g} steps."
    if own.exposed < 0.01 * own.seconds:
        return f"{text} Fully hidden behind compute."
    links, free = machine.links, LinkCost(0.0, 0.0)
    without = {
        "latency": links._replace(between=links.between._replace(alpha=0.0)),
        "bandwidth": links._replace(between=links.between._replace(beta=0.0)),
        "links inside nodes": links._replace(inside=free),
    }
    machines = {name: machine._replace(links=changed) for name, changed in without.items()}
    machines["codecs and fixed costs"] = machine._replace(codec={}, operation={})
    cause = min(machines, key=lambda name: predict(candidate.plan, machines[name]).exposed)
    waits = own.exposed / own.seconds
    return f"{text} {waits:.0%} of each step is spent waiting, mostly on {cause}."


class Verdict(NamedTuple):
    """The advice on which algorithm to use.

    Attributes:
        winner: the name of the candidate to use; None: intervals overlap.
        text: the verdict in a sentence.
        line: the line to paste into a training script.
        then: recommended next measurement.
    """

    winner: str | None
    text: str
    line: str
    then: str


def verdict_of(ranked: Sequence[Candidate], first: Candidate) -> Verdict:
    """Return the advice: the candidate with the soonest time to the same loss, if known, whose
    interval ends before the first one's begins; else the first one.

    Args:
        ranked: the candidates, fastest first.
        first: the default choice, such as gradient_allreduce.
    """
    apart = [other for other in ranked if other.high < first.low]
    known = {other.name: other.steps for other in ranked if other.steps is not None}
    sure = [
        other for other in apart if known.get(other.name, float("inf")) * other.high < first.low
    ]
    then = "Next: bagua-ref measure, on these ranks, then advise --measured FILE"
    if sure:
        chosen = min(sure, key=lambda other: known[other.name] * other.seconds)
        text = (
            f"{chosen.name}: the same loss in {chosen.same_loss(first)} of the time of {first.name},"
            " if your task learns like the one that was measured."
        )
        faster = [c.name for c in apart if c.seconds < chosen.seconds and c.name not in known]
        text += f" Faster steps, of unknown quality: {', '.join(faster)}." if faster else ""
    elif apart:
        chosen = apart[0]
        text = (
            f"{chosen.name}: {chosen.seconds / first.seconds:.0%} of the time of a step of"
            f" {first.name}. Whether it learns as well is unknown."
        )
    else:
        chosen, best = first, ranked[0]
        gain = 1 - best.seconds / first.seconds
        gains = f"at most {gain:.0%} to gain, by {best.name}, whose interval overlaps"
        text = f"Keep {first.name}: {gains if gain >= _SAME else 'nothing to gain'}."
    if chosen is not first:
        then += f"; and the loss of {chosen.name} on your own task"
    return Verdict(None if chosen is first else chosen.name, text, _line(chosen.name), f"{then}.")


def parse_algorithm(text: str) -> tuple[str, dict[str, Any]]:
    """Parse an algorithm of ``bagua-ref advise``; return its name and options.

    Raises:
        ValueError: the text has another form.

    >>> parse_algorithm("decentralized:hierarchical=False,peer_selection_mode=ring")
    ('decentralized', {'hierarchical': False, 'peer_selection_mode': 'ring'})
    """
    name, _, options = text.partition(":")
    try:
        call: Any = ast.parse(f"f({options})", mode="eval").body
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        right = not call.args and all(isinstance(value, _VALUES) for value in given.values())
    except (SyntaxError, AttributeError):
        right = False
    if not right or None in given:
        raise ValueError(
            f"{text} must be of the form NAME:OPTION=VALUE,..., where a value is a number, a word,"
            " True, False or None"
        )
    return name, {
        option: value.id if isinstance(value, ast.Name) else ast.literal_eval(value)
        for option, value in given.items()
    }


def _line(text: str) -> str:
    """Return the line of code that selects an algorithm of ``bagua-ref advise``."""
    name, options = parse_algorithm(text)
    more = "".join(f", {option}={value!r}" for option, value in options.items())
    if name == "qadam":
        return f"model.with_bagua(optimizer, QAdamAlgorithm(optimizer{more}))  # a QAdamOptimizer"
    algorithm = f'Algorithm.init("{name}"{more})' if more else f'"{name}"'
    return f"model.with_bagua(optimizer, {algorithm})"


def learnt(algorithm: Any) -> list[str]:
    """Return this project's benchmark findings on learning with these options, in sentences with
    their source.

    The findings hold for those tasks; they permit no conclusions about others.
    """
    rows = json.loads(files("bagua_ref.planning").joinpath("learnt.json").read_text("utf-8"))
    kind = type(algorithm).__name__
    return [
        row["text"]
        for row in rows
        if row["algorithm"] == kind
        and all(getattr(algorithm, name) == value for name, value in row["options"].items())
    ]


def warnings_of(candidates: Sequence[Candidate]) -> list[str]:
    """Return warnings about the candidates: differing ranks, memory, warm-ups."""
    memory = {c.name: sum(c.plan.memory) / c.plan.nbytes for c in candidates}
    named = {
        "these let weights differ between ranks; check the loss on your task": [
            c.name for c in candidates if not c.equal_ranks
        ],
        "extra memory is larger than the weights": [
            f"{name} ({copies:.2g}x)" for name, copies in memory.items() if copies > 1.05
        ],
        "warm-up steps run plain gradient_allreduce and are not included above": [
            f"{c.name} ({c.plan.warmup} steps)" for c in candidates if c.plan.warmup
        ],
    }
    return [f"{text}: {', '.join(names)}" for text, names in named.items() if names]
