"""Costs of links, codecs and compute, and the time of a planned step with them (S14.2 to S14.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from bagua_ref.formulas.costs import FORWARD, LinkCost, LinkCosts, overlap
from bagua_ref.planning.exchanges import Exchange, scaled
from bagua_ref.planning.plans import StepPlan

__all__ = [
    "Machine",
    "Prediction",
    "exchange_seconds",
    "fit_link",
    "own_seconds",
    "predict",
    "step_seconds",
]


class Machine(NamedTuple):
    """Costs of a cluster and of a model's computation.

    Attributes:
        links: alpha and beta of the links (S14.2).
        compute: seconds of a forward and backward pass, a third of which is forward.
        after: seconds of the rest of each step, such as the optimizer.
        codec: seconds per element, by codec name (S14.3); "" for codecs without an entry.
        operation: fixed seconds of an operation on a bucket, by codec name, besides its links and
            elements; codecs without an entry cost as much as the most expensive.
        shared_processor: whether codecs and operations use the processor that computes, as on CPUs.
            If not, they run in parallel with compute.
        at_once: whether a rank sends to all others at once in an all-to-all or all-gather, as
            communicators do over sockets, so that latencies do not add up; if not, in the rounds of
            S14.1.
    """

    links: LinkCosts
    compute: float
    after: float = 0.0
    codec: Mapping[str, float] = {}
    operation: Mapping[str, float] = {}
    shared_processor: bool = False
    at_once: bool = False


class Prediction(NamedTuple):
    """Predicted times of a step.

    Attributes:
        seconds: seconds of the whole step.
        exposed: seconds in which training waits for communication.
        communication: seconds in which the links or codecs work, hidden or not.
    """

    seconds: float
    exposed: float
    communication: float


def exchange_seconds(exchange: Exchange, machine: Machine) -> float:
    """Return the time of an operation: its rounds (S14.2) plus this rank's local work (S14.3)."""
    inside, between = machine.links.inside, machine.links.between
    seconds = 0.0
    for call in exchange.calls:
        if call.collective in ("all_reduce", "reduce_scatter"):  # as if all chunks were the largest
            n = exchange.cluster.sizes[call.among]
            call = call._replace(numel=-(-call.numel // n) * n)
        pattern, scale = scaled(call, exchange.cluster)
        for heaviest, times in pattern.rounds.items():
            seconds += times * max(
                link.alpha + nbytes * scale * link.beta
                for link, nbytes in zip((inside, between), heaviest, strict=True)
                if nbytes is not None
            )
    if machine.at_once:
        seconds -= exchange.turns * (between if len(exchange.cluster.nodes) > 1 else inside).alpha
    return seconds + own_seconds(exchange, machine)


def own_seconds(exchange: Exchange, machine: Machine) -> float:
    """Return the time of a rank's local work in an operation: a fixed cost, and the codec's time
    for its elements (S14.3).
    """
    operation, codec = machine.operation, machine.codec
    kind = next((name for name, elements in exchange.work.items() if elements), "")
    return operation.get(kind, max(operation.values(), default=0.0)) + sum(
        elements * codec.get(name, codec.get("", 0.0)) for name, elements in exchange.work.items()
    )


def step_seconds(exchanges: Sequence[Exchange], machine: Machine) -> Prediction:
    """Return the times of a step with these operations (S14.4).

    Operations that begin in backward overlap with it bucket by bucket; those that begin with the
    forward pass overlap with all of it; those after the optimizer step are exposed, except for the
    time of the steps by which they may be delayed.

    With a shared processor, compute takes longer by the seconds of codecs and operations that run
    beside it: in backward those of all buckets but the last one, which is ready when backward has
    ended.

    Args:
        exchanges: operations of the step.
        machine: the costs.

    >>> import torch
    >>> from bagua_ref.planning import plan_of
    >>> from bagua_ref.algorithms import Algorithm
    >>> plan = plan_of(Algorithm.init("gradient_allreduce"), torch.nn.Linear(999, 1000, device="meta"), nodes=(1, 1))
    >>> step = step_seconds(plan.exchanges(1), Machine(LinkCosts.parse("1Gbit,20ms"), compute=0.1))
    >>> round(step.seconds, 9), round(step.exposed, 9)
    (0.172, 0.072)
    """
    forward, backward = machine.compute * FORWARD, machine.compute * (1 - FORWARD)
    timed = [
        (
            exchange,
            exchange_seconds(exchange, machine),
            own_seconds(exchange, machine) * machine.shared_processor,
        )
        for exchange in exchanges
    ]
    seconds, after = machine.compute, machine.after
    hidden = [
        (exchange.nbytes, taken, own)
        for exchange, taken, own in timed
        if exchange.when == "backward"
    ]
    if hidden:
        nbytes, times, owns = zip(*hidden, strict=True)
        seconds, _ = overlap(forward, backward + sum(owns[:-1]), nbytes, times)
    passing = [(taken, own) for exchange, taken, own in timed if exchange.when == "pass"]
    seconds = max(seconds + sum(own for _, own in passing), sum(taken for taken, _ in passing))
    for exchange, taken, own in timed:
        if exchange.when == "step":
            after += max(own, taken - exchange.delay * (machine.compute + machine.after))
    exposed = seconds - machine.compute + after - machine.after
    return Prediction(seconds + after, exposed, sum(taken for _, taken, _ in timed))


def predict(plan: StepPlan, machine: Machine) -> Prediction:
    """Return the predicted time of a step after the warm-up, averaged over the plan's cycle
    (S14).
    """
    steps = [step_seconds(exchanges, machine) for exchanges in plan.cycle]
    return Prediction(*(sum(times) / len(steps) for times in zip(*steps, strict=True)))


def fit_link(
    rounds: Sequence[float], nbytes: Sequence[float], seconds: Sequence[float]
) -> tuple[LinkCost, list[float]]:
    """Fit alpha and beta of ``rounds * alpha + nbytes * beta`` to ``seconds``; return them and the
    relative error of each fitted time (S14.2).

    The fit minimizes the sum of the relative errors, so that short times count as much as long
    ones, and a single outlier does not affect the rest, such as a size that a network sends at once
    after a pause. Neither cost is below 0.

    Args:
        rounds: number of rounds of each operation.
        nbytes: bytes of each operation, the sum over its rounds of the largest bytes on a link.
        seconds: measured time of each operation; at least three, above 0.

    Raises:
        ValueError: alpha and beta cannot be determined from these operations.

    >>> link, residuals = fit_link([2, 2, 2], [0, 1000, 4000], [0.2, 0.3, 0.6])
    >>> round(link.alpha, 9), round(link.beta, 9)
    (0.1, 0.0001)

    Source: Hockney, "The communication challenge for MPP", Parallel Computing 1994, for alpha and
    beta; Bloomfield and Steiger, "Least Absolute Deviations", 1983: a best line passes through two
    of the points.
    """
    times = np.asarray(seconds, dtype=np.float64)
    features = np.stack([rounds, nbytes], axis=1) / times[:, None]
    if len(times) < 3 or np.linalg.matrix_rank(features) < 2:
        raise ValueError(
            f"{len(times)} operations do not tell alpha from beta; use three or more, of different"
            " sizes"
        )
    pairs = [
        np.linalg.lstsq(features[list(two)], np.ones(2), rcond=None)[0]
        for two in combinations(range(len(times)), 2)
    ]
    alone = [np.eye(2)[index] / row[index] for row in features for index in (0, 1) if row[index]]
    lines = np.array([line for line in (*pairs, *alone) if (line >= 0).all()])
    residuals = lines @ features.T - 1
    best = np.abs(residuals).sum(axis=1).argmin()
    return LinkCost(*lines[best].tolist()), residuals[best].tolist()
