"""Operations of training steps, and the base of plans, which know those of every step (S3, S5, S14.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import Operation, Traffic, Wire, chunk_bytes, loads_of
from bagua_ref.formulas.graphs import Graph
from bagua_ref.planning.shapes import BucketShape, Cluster, Parameters

__all__ = ["Exchange", "StepPlan"]

When: TypeAlias = Literal["backward", "pass", "step", "background"]


@dataclass(frozen=True, eq=False)
class Exchange:
    """An operation on one bucket.

    Attributes:
        operation: of all ranks.
        cluster: these ranks.
        nbytes: of the bucket, without padding.
        when: "backward": it begins when the bucket's gradients are ready; "pass": at the start of the forward pass; training waits
            for both at the end of the backward pass. "step": it follows the optimizer step. "background": nothing waits for it.
        codec: what computes beside it: the name of a codec, "powersgd" or "topk"; "": nothing.
        elements: those that the busiest rank encodes and decodes.
        delay: steps that may pass until training waits for it.
        turns: rounds of all-to-alls and all-gathers but for the first of each, which could begin with it.
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
        """The rounds, counted by what decides their time (S14.2): the heaviest link of each kind, and its bytes."""
        found: Counter[tuple[tuple[Wire, int], ...]] = Counter()
        for messages in self.operation:
            heaviest: dict[bool, tuple[Wire, int]] = {}
            for wire, nbytes in loads_of(messages, self.cluster.node_of).items():
                known = heaviest.setdefault(wire[0] == "inside", (wire, nbytes))
                heaviest[wire[0] == "inside"] = (known[0], max(known[1], nbytes))
            found[tuple(heaviest.values())] += 1
        return found


class StepPlan:
    """The operations of each step of an algorithm's training, in which every step has one backward pass (S5).

    Args:
        algorithm: with its options.
        parameters: of the module.
        cluster: the ranks.

    Attributes:
        buckets: in the order in which they become ready.
        peers: the number of ranks, or of leaders if these alone exchange.
        interval: seconds from the end of a round in the background to the next; None: rounds belong to steps.
        graphs: a period of those along which ranks average with some others (S13); empty: they do not, or by a user's function.
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
        interval: int = getattr(self.algorithm, "communication_interval", getattr(self.algorithm, "period", 1))
        return interval * max(len(self.graphs), 1)

    def exchanges(self, step: int) -> list[Exchange]:
        """Return the operations of a step, counted from 1, in the order in which they run."""
        return self.all_reduced() if step <= self.warmup else self.after_warmup(step - self.warmup)

    def after_warmup(self, step: int) -> list[Exchange]:
        """Return the operations of a step after the warm-up, counted from 1; here, those of gradient_allreduce."""
        return self.all_reduced(hierarchical=self.hierarchical)

    def memory(self) -> tuple[int, int]:
        """Return the bytes on the busiest rank beyond weights, gradients and optimizer state: kept, and the most scratch."""
        return 0, 0

    def traffic(self, step: int) -> list[dict[str, Traffic]]:
        """Return the traffic of each rank in a step by kind of link, as communicators count it (S14.1).

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
        return any(exchange.when != "background" for exchanges in self.repeated for exchange in exchanges)

    @cached_property
    def sent(self) -> tuple[float, float]:
        """Bytes and messages that the busiest rank sends in a step after the warm-up, on average; between nodes if it can."""
        kind = "between" if len(self.cluster.nodes) > 1 else "inside"
        totals = [[0, 0] for _ in self.cluster.node_of]
        times: Counter[Exchange] = Counter()
        for exchanges, count in self.repeated.items():
            for exchange in exchanges:
                times[exchange] += count
        for exchange, count in times.items():
            for total, own in zip(totals, costs.traffic(exchange.operation, self.cluster.node_of), strict=True):
                total[0] += count * own[kind].bytes_sent
                total[1] += count * own[kind].messages_sent
        nbytes, messages = max(totals)
        return nbytes / self.cycle, messages / self.cycle

    def each(self, make: Callable[[BucketShape], Operation], buckets: Sequence[BucketShape], **about: Any) -> list[Exchange]:
        """Return an exchange for each bucket, one for all buckets of a shape; ``about`` are functions of it, or values."""
        made = {}
        for bucket in dict.fromkeys(buckets):
            given = {name: value(bucket) if callable(value) else value for name, value in about.items()}
            made[bucket] = Exchange(make(bucket), self.cluster, bucket.filled * bucket.dtype.itemsize, **given)
        return [made[bucket] for bucket in buckets]

    def all_reduced(self, when: When = "backward", hierarchical: bool = False) -> list[Exchange]:
        """Return the all-reduces of all buckets (S3.1), or with ``hierarchical`` those between leaders (S3.3)."""
        n = self.peers if hierarchical else self.cluster.n

        def reduced(bucket: BucketShape) -> Operation:
            operation = costs.all_reduce(chunk_bytes(bucket.numel, bucket.dtype.itemsize, n))
            return self.among(operation, bucket) if hierarchical else operation

        return self.each(reduced, self.buckets, when=when)

    def among(self, operation: Operation, bucket: BucketShape, in_rank_order: bool = False) -> Operation:
        """Return an operation of `peers`: that of all ranks as it is, that of leaders between the ways to them and back (S3.3)."""
        if not self.hierarchical:
            return operation
        return self.to_leaders(bucket, in_rank_order) + self.cluster.between(operation) + self.from_leaders(bucket)

    def to_leaders(self, bucket: BucketShape, in_rank_order: bool) -> Operation:
        """Return the way to the leaders: a gather where sums have an order or 16 bits, else a reduce (S3.3)."""
        if in_rank_order or bucket.dtype.itemsize < 4:
            return self.cluster.inside(lambda k: costs.gather([bucket.nbytes] * k))
        return self.cluster.inside(lambda k: costs.reduce(bucket.nbytes, k))

    def from_leaders(self, bucket: BucketShape) -> Operation:
        """Return the broadcast inside all nodes."""
        return self.cluster.inside(lambda k: costs.broadcast(bucket.nbytes, k))

    def gathered(self) -> int:
        """Return the bytes of the largest bucket's inputs at the busiest leader, where sums have an order."""
        most = max(self.cluster.nodes)
        return most * max(bucket.nbytes for bucket in self.buckets) if self.hierarchical and most > 1 else 0
