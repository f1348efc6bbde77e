"""Plans of trainings: the operations of each step, as one rank's training was counted, and their
messages (S3, S5, S14.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, groupby, zip_longest
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from bagua_ref.data_parallel.guard import TrainedParameters
from bagua_ref.data_parallel.parameters import split_into_buckets
from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import Operation, Traffic, chunk_bytes, loads_of
from bagua_ref.formulas.graphs import MODES
from bagua_ref.planning.counting import Call, Recorded, count

__all__ = ["Cluster", "Exchange", "StepPlan", "check_trainable", "module_of", "plan_of", "scaled"]

When: TypeAlias = Literal["backward", "pass", "step", "background"]

_MAX_STEPS = 10_000
"""The longest cycle of a plan, whose steps are all counted."""

_MAX_GRAPHS = 16
"""Graphs of a user's function among which its cycle is searched for."""

_SIDE = 1024
"""Rows and columns of the matrices of `module_of`."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, numbered node by node (S1).

    Args:
        nodes: the number of ranks on each.

    Raises:
        ValueError: there are none, or a number is below 1.

    >>> Cluster((2, 1)).node_of
    [0, 0, 1]
    """

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes or not all(isinstance(size, int) and size > 0 for size in self.nodes):
            raise ValueError(f"nodes={self.nodes} must be numbers of ranks, each at least 1")

    @classmethod
    def even(cls, ranks: int, nodes: int) -> Cluster:
        """Return ``ranks`` on ``nodes`` nodes; if they cannot be equal, the first ones have one
        more.

        >>> Cluster.even(5, 2)
        Cluster(nodes=(3, 2))
        """
        return cls(tuple(ranks // nodes + (node < ranks % nodes) for node in range(nodes)))

    @property
    def n(self) -> int:
        """The number of ranks."""
        return sum(self.nodes)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of all ranks, of leaders, and of the ranks of the largest node."""
        return {"global": self.n, "inter": len(self.nodes), "intra": max(self.nodes)}

    @cached_property
    def ranks(self) -> list[range]:
        """The ranks of each node; the first one is its leader."""
        return [
            range(end - size, end)
            for size, end in zip(self.nodes, accumulate(self.nodes), strict=True)
        ]

    @cached_property
    def node_of(self) -> list[int]:
        """The node of each rank."""
        return [node for node, ranks in enumerate(self.ranks) for _ in ranks]

    def operation(self, among: str, make: Callable[[int], Operation]) -> Operation:
        """Return an operation in the numbers of all ranks; inside nodes, it runs on all at once.

        Args:
            among: as of a `Call`.
            make: returns the operation of k ranks, numbered from 0.
        """
        if among == "global":
            return make(self.n)
        leaders = [ranks[0] for ranks in self.ranks]
        groups: Any = [leaders] if among == "inter" else self.ranks
        found = [
            [[(ranks[s], ranks[d], nbytes) for s, d, nbytes in turn] for turn in make(len(ranks))]
            for ranks in groups
        ]
        return [list(chain.from_iterable(turns)) for turns in zip_longest(*found, fillvalue=[])]


def _messages(call: Call, cluster: Cluster) -> Operation:
    """Return a call's messages of all ranks (S14.1)."""

    def of(n: int) -> Operation:
        total, chunks = call.numel * call.itemsize, chunk_bytes(call.numel, call.itemsize, n)
        arguments: Any = {
            "one_round": (call.pairs,),
            "all_reduce": (chunks,),
            "reduce_scatter": (chunks,),
            "all_to_all": ([chunks] * n,),
            "all_gather": ([total] * n,),
            "gather": ([total] * n, call.root),
            "scatter": ([total] * n, call.root),
            "broadcast": (total, n, call.root),
            "reduce": (total, n, call.root),
        }
        return getattr(costs, call.collective)(*arguments[call.collective])  # type: ignore[no-any-return]

    return cluster.operation(call.among, of)


class _Pattern(NamedTuple):
    """Summary of a call's messages.

    Attributes:
        rounds: the bytes on a round's heaviest link inside nodes and between them, None where there
            is none -> the number of such rounds.
        sent: bytes and messages that each rank sends, inside its node and to others.
    """

    rounds: Counter[tuple[float | None, float | None]]
    sent: dict[str, list[list[float]]]


_KINDS = ("inside", "between")


@lru_cache(maxsize=4096)
def _pattern(call: Call, cluster: Cluster) -> _Pattern:
    """Return the pattern of a call."""
    node_of = cluster.node_of
    pattern = _Pattern(Counter(), {kind: [[0, 0] for _ in node_of] for kind in _KINDS})
    for messages, alike in groupby(_messages(call, cluster)):
        times = len(list(alike))
        heaviest: dict[str, float] = {}
        for (kind, *_), nbytes in loads_of(messages, node_of).items():
            kind = "inside" if kind == "inside" else "between"
            heaviest[kind] = max(heaviest.get(kind, 0), nbytes)
        pattern.rounds[heaviest.get("inside"), heaviest.get("between")] += times
        for source, destination, nbytes in messages:
            sent = pattern.sent[_KINDS[node_of[source] != node_of[destination]]][source]
            sent[0] += nbytes * times
            sent[1] += times
    return pattern


def scaled(call: Call, cluster: Cluster) -> tuple[_Pattern, float]:
    """Return the pattern that a call shares with those of other sizes, whose chunks are equal, and
    the factor by which its bytes are larger.
    """
    if call.pairs:
        return _pattern(call, cluster), 1.0
    numel = math.lcm(cluster.n, *cluster.sizes.values(), *cluster.nodes)
    pattern = _pattern(call._replace(numel=numel, itemsize=1), cluster)
    return pattern, call.numel * call.itemsize / numel


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
            if call.collective in ("all_to_all", "all_gather")
        )


@dataclass
class StepPlan:
    """The operations of each step of a training in which every step has one backward pass (S5).

    Attributes:
        algorithm: with its options.
        cluster: the ranks.
        nbytes: of the parameters.
        warmup: the number of warm-up steps, which do what the first step does.
        first: the operations of the first step.
        cycle: those of the steps after the warm-up, until they repeat.
        interval: seconds from the end of a round in the background to the next; None: rounds belong
            to steps.
        memory: bytes on the busiest rank beyond weights, gradients and optimizer state: state of
            the algorithm, and scratch at its peak.
    """

    algorithm: Any
    cluster: Cluster
    nbytes: int
    warmup: int
    first: list[Exchange]
    cycle: list[list[Exchange]]
    interval: float | None
    memory: tuple[int, int]

    def exchanges(self, step: int) -> list[Exchange]:
        """Return the operations of a step, counted from 1, in the order in which they run; with an
        `interval`, those of a round.
        """
        if step <= self.warmup:
            return self.first
        return self.cycle[(step - self.warmup - 1) % len(self.cycle)]

    def traffic(self, step: int) -> list[dict[str, Traffic]]:
        """Return the traffic of each rank in a step by kind of link, as communicators count it
        (S14.1).

        Agreements on a round, which communicators do not count either, are left out.
        """
        rounds = [messages for exchange in self.exchanges(step) for messages in exchange.operation]
        return costs.traffic(rounds, self.cluster.node_of)

    @cached_property
    def sent(self) -> tuple[float, float]:
        """Bytes and messages that the busiest rank sends in a step after the warm-up, on average;
        between nodes if there are several.
        """
        kind = _KINDS[len(self.cluster.nodes) > 1]
        totals = [[0.0, 0.0] for _ in self.cluster.node_of]
        calls = Counter(
            call for exchanges in self.cycle for exchange in exchanges for call in exchange.calls
        )
        for call, times in calls.items():
            pattern, scale = scaled(call, self.cluster)
            for total, (nbytes, messages) in zip(totals, pattern.sent[kind], strict=True):
                total[0] += times * scale * nbytes
                total[1] += times * messages
        nbytes, messages = max(totals)
        return nbytes / len(self.cycle), messages / len(self.cycle)


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
    number of graphs of a ``peer_selection_mode``. Of a graph function that does not repeat itself
    within 16 averages, the first graph counts. One rank runs them. For an algorithm of yours the
    last one does, too, and must call the same: the others are taken to be like them.

    Args:
        algorithm: with its options, one of this package or your own.
        module: its parameters may be on the device "meta".
        nodes: the number of ranks on each node.
        bucket_bytes: the size at which a bucket is closed; None:
            `bagua_ref.env.get_default_bucket_size`.

    Raises:
        ValueError: the algorithm repeats after more than 10,000 steps, does not support this number of ranks,
            or its ranks differ; or the module has nothing to train.
        TypeError: a parameter has a dtype that the algorithm does not take.

    >>> from bagua_ref.algorithms import ByteGradAlgorithm
    >>> plan = plan_of(ByteGradAlgorithm(hierarchical=False), torch.nn.Linear(1000, 1000, device="meta"), nodes=(1, 1))
    >>> plan.traffic(step=1)[0]["between"]
    Traffic(bytes_sent=1001088, messages_sent=2, bytes_received=1001088, messages_received=2)
    """
    cluster = nodes if isinstance(nodes, Cluster) else Cluster(nodes)
    nbytes = check_trainable(module)
    options = (algorithm, *vars(algorithm).values())
    warmup = max(getattr(each, "warmup_steps", 0) for each in options)
    cycle = _cycle_of(algorithm, cluster)
    warm = int(warmup > 0)
    # the leader of the largest node takes part in everything
    busiest = cluster.ranks[cluster.nodes.index(max(cluster.nodes))][0]
    counting = partial(count, algorithm, module, cluster.node_of, bucket_bytes, warm, cycle)
    leader = counting(busiest)
    if not type(algorithm).__module__.startswith("bagua_ref."):
        _check_alike(type(algorithm).__name__, leader.steps, counting(cluster.n - 1).steps, cluster)
    steps = [[_exchange(recorded, cluster) for recorded in step] for step in leader.steps]
    repeated = steps[warm:] if leader.interval is None else steps[-1:]
    return StepPlan(
        algorithm, cluster, nbytes, warmup, steps[0], repeated, leader.interval, leader.memory
    )


def _cycle_of(algorithm: Any, cluster: Cluster) -> int:
    """Return the number of steps after which the operations of an algorithm repeat."""
    peers = len(cluster.nodes) if getattr(algorithm, "hierarchical", False) else cluster.n
    mode = getattr(algorithm, "peer_selection_mode", None)
    cycle: int = getattr(algorithm, "communication_interval", getattr(algorithm, "period", 1))
    if isinstance(mode, str) and mode in MODES and MODES[mode].takes(peers):
        cycle *= len(MODES[mode].graphs(peers))
    elif callable(mode):
        graphs = [mode(number, peers) for number in range(2 * _MAX_GRAPHS)]
        lengths = range(1, _MAX_GRAPHS + 1)
        cycle *= next((p for p in lengths if graphs[p:] == graphs[:-p]), 1)
    if cycle > _MAX_STEPS:
        raise ValueError(
            f"{type(algorithm).__name__} repeats after {cycle:,} steps; plans have up to"
            f" {_MAX_STEPS:,}"
        )
    return cycle


def _exchange(recorded: Recorded, cluster: Cluster) -> Exchange:
    (step, part), when, delay = recorded.began, "background", 0
    if recorded.waited is not None:
        delay = recorded.waited[0] - step
        if delay or recorded.key is None or recorded.waited[1] == part != "backward":
            when = "step"
        else:
            when = {"forward": "pass"}.get(part, part)
    work = tuple((name, elements) for name, elements in recorded.elements.items() if elements)
    return Exchange(tuple(recorded.calls), cluster, recorded.nbytes, when, work, delay)  # type: ignore[arg-type]


def _check_alike(
    name: str, leader: list[list[Recorded]], last: list[list[Recorded]], cluster: Cluster
) -> None:
    """Raise ValueError unless the last rank calls what the leader does, where both take part."""
    both = {"global", "inter" if cluster.nodes[-1] == 1 else "intra"}

    def calls(steps: list[list[Recorded]]) -> list[list[Call]]:
        return [
            [call for recorded in step for call in recorded.calls if call.among in both]
            for step in steps
        ]

    if calls(leader) != calls(last):
        raise ValueError(
            f"{name} has no plan: its ranks do not all communicate alike, so the first and the last"
            " one do not tell what the others send"
        )


def check_trainable(module: torch.nn.Module) -> int:
    """Return the bytes of the parameters that are trained; they may be on the device "meta".

    Raises:
        ValueError: none of its parameters has an element that needs a gradient, or one is lazy.
        TypeError, NotImplementedError: it has parameters that cannot be trained.
    """
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            f"parameter {lazy[0]!r} has no shape yet; call the module once, or use one that is"
            " not lazy"
        )
    parameters = [parameter for _, parameter in TrainedParameters(module).named]
    split_into_buckets(parameters, 1)  # raises for those that cannot be trained
    if not any(parameter.numel() for parameter in parameters):
        raise ValueError(f"module={type(module).__name__} has no parameters that need a gradient")
    return sum(parameter.nbytes for parameter in parameters)


def module_of(elements: int) -> torch.nn.Module:
    """Return a module with this number of parameters on the device "meta": float32 matrices of 1024
    x 1024, and a vector of the remainder.

    >>> [tuple(parameter.shape) for parameter in module_of(2**20 + 3).parameters()]
    [(1024, 1024), (3,)]
    """
    rest = elements % _SIDE**2
    shapes = [(_SIDE, _SIDE)] * (elements // _SIDE**2) + [(rest,)] * (rest > 0)
    return torch.nn.ParameterList(torch.empty(shape, device="meta") for shape in shapes)
