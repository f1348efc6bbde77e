"""Operations of training steps and what they cost in time, and the base of plans, which know those
of every step (S3, S5, S14).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import (
    FORWARD,
    LinkCosts,
    Operation,
    Traffic,
    Wire,
    chunk_bytes,
    loads_of,
    overlap,
    round_seconds,
)
from bagua_ref.formulas.graphs import Graph
from bagua_ref.planning.shapes import BucketShape, Cluster, Parameters

__all__ = [
    "Exchange",
    "Machine",
    "Prediction",
    "StepPlan",
    "exchange_seconds",
    "predict",
    "step_seconds",
]

When: TypeAlias = Literal["backward", "pass", "step", "background"]


@dataclass(frozen=True, eq=False)
class Exchange:
    """An operation on one bucket.

    Attributes:
        operation: of all ranks.
        cluster: these ranks.
        nbytes: of the bucket, without padding.
        when: "backward": it begins when the bucket's gradients are ready; "pass": at the start of
            the forward pass; training waits for both at the end of the backward pass. "step": it
            follows the optimizer step. "background": nothing waits for it.
        codec: what computes beside it: the name of a codec, "powersgd" or "topk"; "": nothing.
        elements: those that the busiest rank encodes and decodes.
        delay: steps that may pass until training waits for it.
        turns: rounds of all-to-alls and all-gathers but for the first of each, which could begin
            with it.
    """

    operation: Operation
    cluster: Cluster
    nbytes: int
    when: When = "backward"
    codec: str = ""
    elements: int = 0
    delay: int = 0
    turns: int = 0

    @cached_property
    def rounds(self) -> Counter[tuple[tuple[Wire, int], ...]]:
        """The rounds, counted by what decides their time (S14.2): the heaviest link of each kind,
        and its bytes.
        """
        found: Counter[tuple[tuple[Wire, int], ...]] = Counter()
        for messages in self.operation:
            heaviest: dict[bool, tuple[Wire, int]] = {}
            for wire, nbytes in loads_of(messages, self.cluster.node_of).items():
                known = heaviest.setdefault(wire[0] == "inside", (wire, nbytes))
                heaviest[wire[0] == "inside"] = (known[0], max(known[1], nbytes))
            found[tuple(heaviest.values())] += 1
        return found


class StepPlan:
    """The operations of each step of an algorithm's training, in which every step has one backward
    pass (S5).

    Args:
        algorithm: with its options.
        parameters: of the module.
        cluster: the ranks.

    Attributes:
        buckets: in the order in which they become ready.
        peers: the number of ranks, or of leaders if these alone exchange.
        interval: seconds from the end of a round in the background to the next; None: rounds belong
            to steps.
        graphs: a period of those along which ranks average with some others (S13); empty: they do
            not, or by a user's function.
    """

    interval: float | None = None
    graphs: Sequence[Graph] = ()

    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        self.algorithm, self.parameters, self.cluster = algorithm, parameters, cluster
        self.buckets = parameters.buckets()
        self.hierarchical: bool = getattr(algorithm, "hierarchical", False)
        self.peers = len(cluster.nodes) if self.hierarchical else cluster.n

    @property
    def warmup(self) -> int:
        """The steps, if any, in which gradients are all-reduced first."""
        return getattr(self.algorithm, "warmup_steps", 0)

    @property
    def cycle(self) -> int:
        """The number of steps after which operations repeat."""
        interval: int = getattr(
            self.algorithm, "communication_interval", getattr(self.algorithm, "period", 1)
        )
        return interval * max(len(self.graphs), 1)

    def exchanges(self, step: int) -> list[Exchange]:
        """Return the operations of a step, counted from 1, in the order in which they run."""
        return self.all_reduced() if step <= self.warmup else self.after_warmup(step - self.warmup)

    def after_warmup(self, step: int) -> list[Exchange]:
        """Return the operations of a step after the warm-up, counted from 1; here, those of
        gradient_allreduce.
        """
        return self.all_reduced(hierarchical=self.hierarchical)

    def memory(self) -> tuple[int, int]:
        """Return the bytes on the busiest rank beyond weights, gradients and optimizer state: kept,
        and the most scratch.
        """
        return 0, 0

    def traffic(self, step: int) -> list[dict[str, Traffic]]:
        """Return the traffic of each rank in a step by kind of link, as communicators count it
        (S14.1).

        Agreements on a round, which communicators do not count either, are left out.
        """
        rounds = [messages for exchange in self.exchanges(step) for messages in exchange.operation]
        return costs.traffic(rounds, self.cluster.node_of)

    @cached_property
    def repeated(self) -> Counter[tuple[Exchange, ...]]:
        """The steps of a cycle after the warm-up, counted by their operations."""
        return Counter(tuple(self.after_warmup(step)) for step in range(1, self.cycle + 1))

    @property
    def waits_for_others(self) -> bool:
        """Whether training ever waits for other ranks after the warm-up."""
        return any(
            exchange.when != "background" for exchanges in self.repeated for exchange in exchanges
        )

    @cached_property
    def sent(self) -> tuple[float, float]:
        """Bytes and messages that the busiest rank sends in a step after the warm-up, on average;
        between nodes if it can.
        """
        kind = "between" if len(self.cluster.nodes) > 1 else "inside"
        totals = [[0, 0] for _ in self.cluster.node_of]
        times: Counter[Exchange] = Counter()
        for exchanges, count in self.repeated.items():
            for exchange in exchanges:
                times[exchange] += count
        for exchange, count in times.items():
            for total, own in zip(
                totals, costs.traffic(exchange.operation, self.cluster.node_of), strict=True
            ):
                total[0] += count * own[kind].bytes_sent
                total[1] += count * own[kind].messages_sent
        nbytes, messages = max(totals)
        return nbytes / self.cycle, messages / self.cycle

    def each(
        self, make: Callable[[BucketShape], Operation], buckets: Sequence[BucketShape], **about: Any
    ) -> list[Exchange]:
        """Return an exchange for each bucket, one for all buckets of a shape; ``about`` are
        functions of it, or values.
        """
        made = {}
        for bucket in dict.fromkeys(buckets):
            given = {
                name: value(bucket) if callable(value) else value for name, value in about.items()
            }
            made[bucket] = Exchange(
                make(bucket), self.cluster, bucket.filled * bucket.dtype.itemsize, **given
            )
        return [made[bucket] for bucket in buckets]

    def all_reduced(self, when: When = "backward", hierarchical: bool = False) -> list[Exchange]:
        """Return the all-reduces of all buckets (S3.1), or with ``hierarchical`` those between
        leaders (S3.3).
        """
        n = self.peers if hierarchical else self.cluster.n

        def reduced(bucket: BucketShape) -> Operation:
            operation = costs.all_reduce(chunk_bytes(bucket.numel, bucket.dtype.itemsize, n))
            return self.among(operation, bucket) if hierarchical else operation

        return self.each(reduced, self.buckets, when=when)

    def among(
        self, operation: Operation, bucket: BucketShape, in_rank_order: bool = False
    ) -> Operation:
        """Return an operation of `peers`: that of all ranks as it is, that of leaders between the
        ways to them and back (S3.3).
        """
        if not self.hierarchical:
            return operation
        return (
            self.to_leaders(bucket, in_rank_order)
            + self.cluster.between(operation)
            + self.from_leaders(bucket)
        )

    def to_leaders(self, bucket: BucketShape, in_rank_order: bool) -> Operation:
        """Return the way to the leaders: a gather where sums have an order or 16 bits, else a
        reduce (S3.3).
        """
        if in_rank_order or bucket.dtype.itemsize < 4:
            return self.cluster.inside(lambda k: costs.gather([bucket.nbytes] * k))
        return self.cluster.inside(lambda k: costs.reduce(bucket.nbytes, k))

    def from_leaders(self, bucket: BucketShape) -> Operation:
        """Return the broadcast inside all nodes."""
        return self.cluster.inside(lambda k: costs.broadcast(bucket.nbytes, k))

    def gathered(self) -> int:
        """Return the bytes of the largest bucket's inputs at the busiest leader, where sums have an
        order.
        """
        most = max(self.cluster.nodes)
        return (
            most * max(bucket.nbytes for bucket in self.buckets)
            if self.hierarchical and most > 1
            else 0
        )


class Machine(NamedTuple):
    """Costs of a cluster and a model.

    Attributes:
        links: their alpha and beta (S14.2).
        compute: seconds of a forward and backward pass, a third of which is forward.
        after: seconds of what follows in each step, such as the optimizer.
        codec: seconds for an element that passes through a codec, by its name (S14.3); "" for those
            without an entry.
        operation: seconds of an operation on a bucket beside its links and elements, by its codec;
            "" for those without an entry.
        shared_processor: whether codecs and operations take their seconds from the processor that
            computes, as on CPUs. If not, they run beside compute.
        slowest: the compute of the slowest rank, divided by the mean.
        jitter: the standard deviation of a rank's compute from step to step, divided by the mean.
        at_once: whether a rank sends to all others at once in an all-to-all or all-gather, so that
            latencies do not add up, as communicators do over sockets; if not, in the turns of
            S14.1.
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
    """Return the time of an operation: its rounds (S14.2), then this rank's own work for it
    (S14.3).
    """
    wires = sum(
        count * round_seconds(dict(loads), machine.links)
        for loads, count in exchange.rounds.items()
    )
    if machine.at_once:
        link = machine.links.between if len(exchange.cluster.nodes) > 1 else machine.links.inside
        wires -= exchange.turns * link.alpha
    return wires + own_seconds(exchange, machine)


def own_seconds(exchange: Exchange, machine: Machine) -> float:
    """Return a rank's own time for an operation: a fixed cost, and its elements' way through the
    codec (S14.3).
    """
    rate = machine.codec.get(exchange.codec, machine.codec.get("", 0.0)) if exchange.codec else 0.0
    return (
        machine.operation.get(exchange.codec, machine.operation.get("", 0.0))
        + rate * exchange.elements
    )


def step_seconds(exchanges: Sequence[Exchange], machine: Machine) -> tuple[float, float]:
    """Return the seconds of a step, and how many of them are exposed communication (S14.4).

    What begins in backward overlaps with it bucket by bucket; what begins with the forward pass
    overlaps with all of it; what follows the optimizer step is exposed, except for the time of the
    steps by which it may be delayed.

    With a shared processor, compute takes longer by the seconds of codecs and operations that run
    beside it: in backward those of all buckets but the last one, which is ready when backward has
    ended.

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
    times_of = {
        exchange: (
            exchange_seconds(exchange, machine),
            own_seconds(exchange, machine) * machine.shared_processor,
        )
        for exchange in dict.fromkeys(exchanges)
    }
    timed = [(exchange, *times_of[exchange]) for exchange in exchanges]
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
    return seconds + after, seconds - machine.compute + after - machine.after


def predict(plan: StepPlan, machine: Machine) -> Prediction:
    """Return the prediction of a step after the warm-up, a mean over the plan's cycle, stragglers
    included.

    Ranks that wait for each other take the slowest rank's compute. In addition, of n ranks whose
    compute varies with standard deviation s, the last one of each k steps comes ``s sqrt(k) sqrt(2
    ln n)`` after the mean, the usual bound of the largest of n normal values; k are the steps from
    one exchange to the next. Ranks that do not wait for each other take the mean compute.

    Source: costs and overlap: S14; the bound: Boucheron, Lugosi and Massart, "Concentration
    Inequalities", 2013, section 2.5.
    """
    seconds = exposed = communication = 0.0
    meetings = 0
    slowed = machine._replace(compute=machine.compute * machine.slowest)
    for exchanges, count in plan.repeated.items():
        own = step_seconds(exchanges, slowed if plan.waits_for_others else machine)
        seconds, exposed = seconds + own[0] * count, exposed + own[1] * count
        distinct = Counter(exchanges)
        communication += count * sum(
            times * exchange_seconds(exchange, machine) for exchange, times in distinct.items()
        )
        meetings += count * any(exchange.when != "background" for exchange in exchanges)
    late = (
        machine.jitter
        * machine.compute
        * math.sqrt(2 * math.log(plan.cluster.n) * meetings / plan.cycle)
    )
    waits = late + (slowed.compute - machine.compute) * plan.waits_for_others
    return Prediction(
        seconds / plan.cycle + late, exposed / plan.cycle + waits, communication / plan.cycle
    )
