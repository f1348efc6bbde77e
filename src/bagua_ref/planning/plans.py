"""Plans of trainings: the operations of each step, as one rank's training was counted, and what
they cost in time (S3, S5, S14).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import (
    FORWARD,
    LinkCosts,
    Operation,
    Traffic,
    chunk_bytes,
    loads_of,
    overlap,
)
from bagua_ref.formulas.graphs import MODES
from bagua_ref.planning.counting import Call, Counted, Recorded
from bagua_ref.planning.counting import count as count_rank
from bagua_ref.planning.shapes import Cluster, parameters_of

__all__ = [
    "Exchange",
    "Machine",
    "Prediction",
    "StepPlan",
    "exchange_seconds",
    "own_seconds",
    "plan_of",
    "predict",
    "step_seconds",
]

When: TypeAlias = Literal["backward", "pass", "step", "background"]

_MOST_STEPS = 10_000
"""The longest cycle of a plan, whose steps are all counted."""

_MOST_GRAPHS = 16
"""The most graphs of a user's function that are looked through for their cycle."""


def _messages(call: Call, cluster: Cluster, nbytes: float | None = None) -> Operation:
    """Return a call's messages of all ranks, by the formulas of S14.1; ``nbytes``: as if the tensor
    had so many.
    """

    def of(n: int) -> Operation:
        total: Any = call.nbytes if nbytes is None else nbytes
        chunks = chunk_bytes(call.numel, call.itemsize, n) if nbytes is None else [total / n] * n
        if call.collective == "exchange":
            return costs.one_round(call.pairs)
        if call.collective == "allreduce":
            return costs.all_reduce(chunks)
        if call.collective == "reduce_scatter":
            return costs.reduce_scatter(chunks)
        if call.collective == "alltoall":
            return costs.all_to_all([chunks] * n)
        if call.collective == "allgather":
            return costs.all_gather([total] * n)
        if call.collective in ("gather", "scatter"):
            return getattr(costs, call.collective)([total] * n, call.root)  # type: ignore[no-any-return]
        return getattr(costs, call.collective)(total, n, call.root)  # type: ignore[no-any-return]

    if call.among == "intra":
        return cluster.inside(of)
    return of(cluster.n) if call.among == "global" else cluster.between(of(len(cluster.nodes)))


class _Pattern(NamedTuple):
    """A call's messages, summed up.

    Attributes:
        rounds: for each round, the bytes on its heaviest link inside nodes and between them, None
            where there is none; and how often it comes.
        sent: bytes and messages that each rank sends, inside its node and to others.
    """

    rounds: Counter[tuple[float | None, float | None]]
    sent: dict[str, list[list[float]]]


@lru_cache(maxsize=4096)
def _pattern(call: Call, cluster: Cluster) -> _Pattern:
    """Return the pattern of a call of one byte; of an exchange, of its bytes."""
    found = _Pattern(Counter(), {kind: [[0, 0] for _ in cluster.node_of] for kind in _KINDS})
    node_of = cluster.node_of
    for messages, alike in groupby(_messages(call, cluster, 1.0)):
        times = len(list(alike))
        heaviest: dict[bool, float] = {}
        for (kind, *_), nbytes in loads_of(messages, node_of).items():
            heaviest[kind == "inside"] = max(heaviest.get(kind == "inside", 0), nbytes)
        found.rounds[heaviest.get(True), heaviest.get(False)] += times
        for source, destination, nbytes in messages:
            kind = _KINDS[node_of[source] != node_of[destination]]
            total = found.sent[kind][source]
            total[0] += nbytes * times
            total[1] += times
    return found


_KINDS = ("inside", "between")


def _scaled(call: Call, cluster: Cluster) -> tuple[_Pattern, float]:
    """Return the pattern of a call, which calls of other sizes share, and its bytes."""
    if call.pairs:
        return _pattern(call, cluster), 1.0
    return _pattern(call._replace(numel=1, itemsize=1), cluster), call.nbytes


@dataclass(frozen=True)
class Exchange:
    """An operation on one bucket.

    Attributes:
        calls: of a rank that takes part in all of them.
        cluster: the ranks.
        nbytes: of the bucket, without padding.
        when: "backward": it begins when the bucket's gradients are ready; "pass": at the start of
            the forward pass; training waits for both at the end of the backward pass. "step": it
            follows the optimizer step, or training waits for it at once. "background": nothing
            waits for it.
        work: the name of each codec, or of what computes in its place, and the elements that the
            busiest rank passes through it.
        delay: steps that may pass until training waits for it.
    """

    calls: tuple[Call, ...]
    cluster: Cluster
    nbytes: int
    when: When = "backward"
    work: tuple[tuple[str, int], ...] = ()
    delay: int = 0

    @property
    def operation(self) -> Operation:
        """The messages of all ranks, in rounds."""
        return [turn for call in self.calls for turn in _messages(call, self.cluster)]

    @property
    def turns(self) -> int:
        """Rounds of all-to-alls and all-gathers but for the first of each, which could begin with
        it.
        """
        return sum(
            max(0, self.cluster.sizes[call.among] - 2)
            for call in self.calls
            if call.collective in ("alltoall", "allgather")
        )


class StepPlan:
    """The operations of each step of a training in which every step has one backward pass (S5).

    Attributes:
        algorithm: with its options.
        module: what is trained.
        cluster: the ranks.
        nbytes: of the parameters.
        warmup: the steps, if any, in which it does what its first step does.
        cycle: the steps after which operations repeat, after the warm-up.
        interval: seconds from the end of a round in the background to the next; None: rounds belong
            to steps.
        graphs: those of a cycle along which ranks average with some others (S13).
        memory: the bytes on the busiest rank beyond weights, gradients and optimizer state: kept,
            and the most scratch.
    """

    def __init__(
        self,
        algorithm: Any,
        module: torch.nn.Module,
        cluster: Cluster,
        bucket_bytes: int | None = None,
    ) -> None:
        self.algorithm, self.module, self.cluster = algorithm, module, cluster
        named = parameters_of(module)
        self.nbytes = sum(parameter.nbytes for _, parameter in named)
        self.warmup = max(
            getattr(options, "warmup_steps", 0)
            for options in (algorithm, *vars(algorithm).values())
        )
        peers = len(cluster.nodes) if getattr(algorithm, "hierarchical", False) else cluster.n
        mode = getattr(algorithm, "peer_selection_mode", None)
        self.cycle: int = getattr(
            algorithm, "communication_interval", getattr(algorithm, "period", 1)
        )
        if isinstance(mode, str) and mode in MODES and MODES[mode].takes(peers):
            self.cycle *= len(MODES[mode].graphs(peers))
        elif callable(mode):
            graphs = [mode(number, peers) for number in range(2 * _MOST_GRAPHS)]
            lengths = range(1, _MOST_GRAPHS + 1)
            self.cycle *= next((p for p in lengths if graphs[p:] == graphs[:-p]), 1)
        if self.cycle > _MOST_STEPS:
            raise ValueError(
                f"{type(algorithm).__name__} repeats after {self.cycle:,} steps; plans have up to"
                f" {_MOST_STEPS:,}"
            )
        warm = int(self.warmup > 0)
        # the leader of the largest node takes part in everything
        busiest = cluster.leaders[cluster.nodes.index(max(cluster.nodes))]
        counting = partial(count_rank, algorithm, module, cluster.node_of)
        leader = counting(busiest, warm, self.cycle, bucket_bytes)
        if not type(algorithm).__module__.startswith("bagua_ref."):
            last = counting(cluster.n - 1, warm, self.cycle, bucket_bytes)
            _check_alike(type(algorithm).__name__, leader, last, cluster)
        self.interval, self.graphs, self.memory = leader.interval, leader.graphs, leader.memory
        counted = [[self._exchange(known) for known in step] for step in leader.steps]
        self._first, self._cycle = counted[0], counted[warm:]
        if self.interval is not None:
            self._cycle = counted[-1:]

    def _exchange(self, known: Recorded) -> Exchange:
        (step, part), when, delay = known.began, "background", 0
        if known.waited is not None:
            delay = known.waited[0] - step
            if delay or known.waited[1] == part != "backward":
                when = "step"
            else:
                when = {"forward": "pass"}.get(part, part)
            if known.key is None and not delay:
                when = "step"
        work = tuple((name, elements) for name, elements in known.elements.items() if elements)
        return Exchange(tuple(known.calls), self.cluster, known.nbytes, when, work, delay)  # type: ignore[arg-type]

    def exchanges(self, step: int) -> list[Exchange]:
        """Return the operations of a step, counted from 1, in the order in which they run; with an
        `interval`, those of a round.
        """
        return self._first if step <= self.warmup else self.after_warmup(step - self.warmup)

    def after_warmup(self, step: int) -> list[Exchange]:
        """Return the operations of a step after the warm-up, counted from 1."""
        return self._cycle[(step - 1) % len(self._cycle)]

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
        return Counter(map(tuple, self._cycle))

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
        kind = _KINDS[len(self.cluster.nodes) > 1]
        totals = [[0.0, 0.0] for _ in self.cluster.node_of]
        calls = Counter(
            call for exchanges in self._cycle for exchange in exchanges for call in exchange.calls
        )
        for call, times in calls.items():
            pattern, scale = _scaled(call, self.cluster)
            for total, (nbytes, messages) in zip(totals, pattern.sent[kind], strict=True):
                total[0] += times * scale * nbytes
                total[1] += times * messages
        nbytes, messages = max(totals)
        return nbytes / len(self._cycle), messages / len(self._cycle)


def _check_alike(name: str, leader: Counted, last: Counted, cluster: Cluster) -> None:
    """Raise ValueError unless the last rank calls what the leader does, where both take part."""
    both = {"global"}
    if cluster.nodes[-1] == 1:
        both.add("inter")
    elif max(cluster.nodes) > 1:
        both.add("intra")

    def calls(counted: Counted) -> list[list[Call]]:
        return [
            [call for known in step for call in known.calls if call.among in both]
            for step in counted.steps
        ]

    if calls(leader) != calls(last):
        raise ValueError(
            f"ranks of {name} do not all communicate alike, so that two of them do not tell what"
            " the others send, and it has no plan"
        )


def plan_of(
    algorithm: Any,
    module: torch.nn.Module,
    nodes: Cluster | tuple[int, ...],
    bucket_bytes: int | None = None,
) -> StepPlan:
    """Return the plan of training ``module`` by ``algorithm``; nothing is sent, and no large tensor
    has memory (S14.1).

    The real algorithm runs its first step, if it has a warm-up, and its steps until operations
    repeat: ``algorithm.period`` or ``communication_interval``, if there are such options, times the
    number of graphs of a named ``peer_selection_mode``. Of a graph
    function that does not repeat itself within 16 averages, the first graph counts.
    One rank runs them, and then the last one, which must do the same: the others are taken to be
    like them.

    Args:
        algorithm: with its options, one of this package or your own.
        module: its parameters may be on the device "meta".
        nodes: the number of ranks on each node.
        bucket_bytes: the size at which a bucket is closed; None:
            `bagua_ref.env.get_default_bucket_size`.

    Raises:
        ValueError: the algorithm repeats after more than 10,000 steps, does not take so many ranks,
            or its ranks differ; or the module has nothing to train.
        TypeError: a parameter has a dtype that the algorithm does not take.

    >>> from bagua_ref.algorithms import ByteGradAlgorithm
    >>> plan = plan_of(ByteGradAlgorithm(hierarchical=False), torch.nn.Linear(1000, 1000, device="meta"), nodes=(1, 1))
    >>> plan.traffic(step=1)[0]["between"]
    Traffic(bytes_sent=1001088, messages_sent=2, bytes_received=1001088, messages_received=2)
    """
    cluster = nodes if isinstance(nodes, Cluster) else Cluster(nodes)
    return StepPlan(algorithm, module, cluster, bucket_bytes)


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
    inside, between = machine.links.inside, machine.links.between
    seconds = 0.0
    for call in exchange.calls:
        pattern, scale = _scaled(call, exchange.cluster)
        if call.collective in ("allreduce", "reduce_scatter"):  # of the largest chunk
            n = exchange.cluster.sizes[call.among]
            scale = -(-call.numel // n) * n * call.itemsize
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
    """Return a rank's own time for an operation: a fixed cost, and its elements' way through the
    codec (S14.3).
    """
    operation, codec = machine.operation, machine.codec
    kind = exchange.work[0][0] if exchange.work else ""
    return operation.get(kind, operation.get("", 0.0)) + sum(
        elements * codec.get(name, codec.get("", 0.0)) for name, elements in exchange.work
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
