"""Time of planned steps: what links, codecs and compute cost, and which communication training waits for (S14.2 to S14.5)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bagua_ref.formulas.costs import FORWARD, LinkCosts, overlap, round_seconds
from bagua_ref.planning.steps import Exchange, StepPlan

__all__ = ["Machine", "Prediction", "exchange_seconds", "predict", "step_seconds"]


class Machine(NamedTuple):
    """Costs of a cluster and a model.

    Attributes:
        links: their alpha and beta (S14.2).
        compute: seconds of a forward and backward pass, a third of which is forward.
        after: seconds of what follows in each step, such as the optimizer.
        codec: seconds for an element that passes through a codec, by its name (S14.3); "" for those without an entry.
        operation: seconds of an operation on a bucket beside its links and elements, by its codec; "" for those without an entry.
        shared_processor: whether codecs and operations take their seconds from the processor that computes, as on CPUs. If not,
            they run beside compute.
        slowest: the compute of the slowest rank, divided by the mean.
        jitter: the standard deviation of a rank's compute from step to step, divided by the mean.
        at_once: whether a rank sends to all others at once in an all-to-all or all-gather, so that latencies do not add up, as
            communicators do over sockets; if not, in the turns of S14.1.
    """

    links: LinkCosts
    compute: float
    after: float = 0.0
    codec: Mapping[str, float] = {}
    operation: Mapping[str, float] = {}
    shared_processor: bool = False
    slowest: float = 1.0
    jitter: float = 0.0
    at_once: bool = False


class Prediction(NamedTuple):
    """A step of a training after its warm-up, a mean over the steps of the plan's cycle.

    Attributes:
        seconds: of a step.
        exposed: those in which training waits for communication or for slower ranks.
        communication: seconds in which the links or codecs work, hidden or not.
    """

    seconds: float
    exposed: float
    communication: float


def exchange_seconds(exchange: Exchange, machine: Machine) -> float:
    """Return the time of an operation: its rounds (S14.2), then this rank's own work for it (S14.3)."""
    wires = sum(count * round_seconds(dict(loads), machine.links) for loads, count in exchange.rounds.items())
    if machine.at_once:
        link = machine.links.between if len(exchange.cluster.nodes) > 1 else machine.links.inside
        wires -= exchange.turns * link.alpha
    return wires + own_seconds(exchange, machine)


def own_seconds(exchange: Exchange, machine: Machine) -> float:
    """Return a rank's own time for an operation: a fixed cost, and its elements' way through the codec (S14.3)."""
    rate = machine.codec.get(exchange.codec, machine.codec.get("", 0.0)) if exchange.codec else 0.0
    return machine.operation.get(exchange.codec, machine.operation.get("", 0.0)) + rate * exchange.elements


def step_seconds(exchanges: Sequence[Exchange], machine: Machine) -> tuple[float, float]:
    """Return the seconds of a step, and how many of them are exposed communication (S14.4).

    What begins in backward overlaps with it bucket by bucket; what begins with the forward pass overlaps with all of it; what
    follows the optimizer step is exposed, except for the time of the steps by which it may be delayed.

    With a shared processor, compute takes longer by the seconds of codecs and operations that run beside it: in backward those of
    all buckets but the last one, which is ready when backward has ended.

    Args:
        exchanges: of the step.
        machine: the costs; stragglers are left out.

    >>> from bagua_ref.planning import plan_of
    >>> from bagua_ref.algorithms import Algorithm
    >>> plan = plan_of(Algorithm.init("gradient_allreduce"), torch.nn.Linear(999, 1000, device="meta"), nodes=(1, 1))
    >>> seconds, exposed = step_seconds(plan.exchanges(1), Machine(LinkCosts.parse("1Gbit,20ms"), compute=0.1))
    >>> round(seconds, 9), round(exposed, 9)
    (0.172, 0.072)
    """
    forward, backward = machine.compute * FORWARD, machine.compute * (1 - FORWARD)
    costs = {
        exchange: (exchange_seconds(exchange, machine), own_seconds(exchange, machine) * machine.shared_processor)
        for exchange in dict.fromkeys(exchanges)
    }
    timed = [(exchange, *costs[exchange]) for exchange in exchanges]
    seconds, after = machine.compute, machine.after
    hidden = [(exchange.nbytes, taken, own) for exchange, taken, own in timed if exchange.when == "backward"]
    if hidden:
        nbytes, times, owns = zip(*hidden, strict=True)
        seconds, _ = overlap(forward, backward + sum(owns[:-1]), nbytes, times)
    passing = [(taken, own) for exchange, taken, own in timed if exchange.when == "pass"]
    seconds = max(seconds + sum(own for _, own in passing), sum(taken for taken, _ in passing))
    for exchange, taken, own in timed:
        if exchange.when == "step":
            after += max(own, taken - exchange.delay * (machine.compute + machine.after))
    return seconds + after, seconds - machine.compute + after - machine.after


def predict(plan: StepPlan, machine: Machine) -> Prediction:
    """Return the prediction of a step after the warm-up, a mean over the plan's cycle, stragglers included.

    Ranks that wait for each other take the slowest rank's compute. In addition, of n ranks whose compute varies with standard
    deviation s, the last one of each k steps comes ``s sqrt(k) sqrt(2 ln n)`` after the mean, the usual bound of the largest of n
    normal values; k are the steps from one exchange to the next. Ranks that do not wait for each other take the mean compute.

    Source: costs and overlap: S14; the bound: Boucheron, Lugosi and Massart, "Concentration Inequalities", 2013, section 2.5.
    """
    seconds = exposed = communication = 0.0
    meetings = 0
    slowed = machine._replace(compute=machine.compute * machine.slowest)
    for exchanges, count in plan.repeated.items():
        own = step_seconds(exchanges, slowed if plan.waits_for_others else machine)
        seconds, exposed = seconds + own[0] * count, exposed + own[1] * count
        distinct = Counter(exchanges)
        communication += count * sum(times * exchange_seconds(exchange, machine) for exchange, times in distinct.items())
        meetings += count * any(exchange.when != "background" for exchange in exchanges)
    late = machine.jitter * machine.compute * math.sqrt(2 * math.log(plan.cluster.n) * meetings / plan.cycle)
    waits = late + (slowed.compute - machine.compute) * plan.waits_for_others
    return Prediction(seconds / plan.cycle + late, exposed / plan.cycle + waits, communication / plan.cycle)
