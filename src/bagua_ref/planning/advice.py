"""Comparison of planned trainings: their rank in time, what decides it, and the assumption that
would change it (S14).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from operator import attrgetter
from typing import Any

from bagua_ref.base.utils import readable_bytes
from bagua_ref.formulas.costs import LinkCost
from bagua_ref.formulas.mixing import mixing
from bagua_ref.planning.measured import Estimate, MeasuredMachine
from bagua_ref.planning.steps import Machine, Prediction, StepPlan, predict

__all__ = ["Candidate", "changed", "compare", "first_of", "learnt", "turning_point", "warnings_of"]

_FACTORS = [2 ** (power / 4) for power in range(1, 41)]
"""Factors, up to 1024, by which an assumption is changed."""
_MATRIX = 256


@dataclass
class Candidate:
    """An algorithm of a comparison.

    Attributes:
        name: with its options, as the user gave it.
        plan: its operations.
        prediction: with the likely costs.
        seconds: of a step, with both ends of all costs' intervals.
        reason: what it sends and waits for, in a sentence.
    """

    name: str
    plan: StepPlan
    prediction: Prediction
    seconds: Estimate
    reason: str = ""

    @property
    def sent(self) -> tuple[float, float]:
        """Bytes and messages of the busiest rank per step; of async, whose rounds go on beside the
        steps, at their rate.
        """
        interval = self.plan.interval
        rounds = (
            1.0
            if not interval
            else self.prediction.seconds / (interval + self.prediction.communication)
        )
        return self.plan.sent[0] * rounds, self.plan.sent[1] * rounds

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
        return self.plan.algorithm.implementation.replicas_are_equal is True


def compare(
    plans: Mapping[str, StepPlan], costs: MeasuredMachine, **stragglers: float
) -> list[Candidate]:
    """Return the plans, by name, as candidates, the fastest first.

    Args:
        plans: the first one is what the others' bytes are compared with.
        costs: with their intervals; every step is predicted at both ends, which are its own
            interval.
        stragglers: ``slowest`` and ``jitter`` of `Machine`.
    """
    low, likely, high = (
        costs.machine(attrgetter(end), **stragglers) for end in ("low", "value", "high")
    )
    found = []
    for name, plan in plans.items():
        prediction = predict(plan, likely)
        seconds = Estimate(
            predict(plan, low).seconds, prediction.seconds, predict(plan, high).seconds
        )
        found.append(Candidate(name, plan, prediction, seconds))
    for candidate in found:
        candidate.reason = _reason(candidate, found[0], likely)
    return sorted(found, key=lambda candidate: candidate.seconds.value)


def _reason(candidate: Candidate, first: Candidate, machine: Machine) -> str:
    own, (nbytes, messages), compared = candidate.prediction, candidate.sent, first.sent[0]
    kind = "between nodes" if len(candidate.plan.cluster.nodes) > 1 else "inside the node"
    if not messages:
        return f"Sends nothing {kind}."
    part = (
        f", {nbytes / compared:.3g} times as much as {first.name},"
        if candidate is not first and compared
        else ""
    )
    number = f"{messages:.3g}" if messages < 100 else f"{messages:,.0f}"
    sends = (
        f"The busiest rank sends {readable_bytes(nbytes)}{part} in {number}"
        f" message{'s' * (number != '1')} a step {kind}"
    )
    if own.exposed < 0.01 * own.seconds:
        return f"{sends}; compute hides it."
    without = {
        "latency": machine._replace(
            links=machine.links._replace(between=LinkCost(0.0, machine.links.between.beta))
        ),
        "bandwidth": machine._replace(
            links=machine.links._replace(between=LinkCost(machine.links.between.alpha, 0.0))
        ),
        "links inside nodes": machine._replace(
            links=machine.links._replace(inside=LinkCost(0.0, 0.0))
        ),
        "codecs": machine._replace(codec={}),
        "slower ranks": machine._replace(slowest=1.0, jitter=0.0),
    }
    most = min(without, key=lambda name: predict(candidate.plan, without[name]).exposed)
    return f"{sends}; {own.exposed / own.seconds:.0%} of a step waits, mostly for {most}."


def first_of(ranked: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate if its interval ends before all others begin, else None."""
    best, *others = ranked
    return best if all(best.seconds.high < other.seconds.low for other in others) else None


def changed(machine: Machine, what: str, factor: float) -> Machine:
    """Return a machine of which one assumption, "bandwidth", "latency" or "compute", is ``factor``
    times as large.
    """
    alpha, beta = machine.links.between
    if what == "compute":
        return machine._replace(compute=machine.compute * factor)
    link = LinkCost(alpha * factor, beta) if what == "latency" else LinkCost(alpha, beta / factor)
    inside = machine.links.inside if machine.links.inside != machine.links.between else link
    return machine._replace(links=machine.links._replace(between=link, inside=inside))


def turning_point(ranked: Sequence[Candidate], machine: Machine) -> tuple[str, float, str] | None:
    """Return the smallest change of one assumption with which another candidate is the fastest.

    Returns:
        The assumption, as `changed` names it; the factor, to a quarter of a power of two; and the
        name of the candidate. None: no factor from 1/1024 to 1024 has that effect.
    """
    best, *others = ranked
    for factor in _FACTORS:
        for what in ("bandwidth", "latency", "compute"):
            for change in (factor, 1 / factor):
                other = changed(machine, what, change)
                least = predict(best.plan, other).seconds
                for candidate in others:
                    if predict(candidate.plan, other).seconds < least * (1 - 1e-9):
                        return what, change, candidate.name
    return None


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
        candidate.name: sum(candidate.plan.memory()) / candidate.plan.parameters.nbytes
        for candidate in candidates
    }
    large = [f"{name} ({part:.2g} x)" for name, part in parts.items() if part > 1]
    warm = [
        f"{candidate.name} ({candidate.plan.warmup})"
        for candidate in candidates
        if candidate.plan.warmup
    ]
    named = {
        "weights differ between ranks, so what is learnt must be tried": differ,
        "more memory than the weights is needed in addition": large,
        "the first steps are those of gradient_allreduce, and not in the times above": warm,
    }
    return [f"{text}: {', '.join(names)}" for text, names in named.items() if names]
