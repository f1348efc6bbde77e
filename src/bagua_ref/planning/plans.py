"""Plans of the registered algorithms: the operations of every step, from shapes alone (S3, S5, S9 to S11, S14.1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch

from bagua_ref.algorithms import (
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GlobalAlgorithmRegistry,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    TopKAlgorithm,
)
from bagua_ref.algorithms.fragments import named_fragments
from bagua_ref.backends import get_codec
from bagua_ref.base.memory import by_dtype_and_device
from bagua_ref.comm_ops.top_k import count_of
from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import Operation, Traffic, Wire, chunk_bytes, loads_of, one_round
from bagua_ref.formulas.graphs import MODES
from bagua_ref.formulas.low_rank import matrix_shape
from bagua_ref.planning.shapes import BucketShape, Cluster, Parameters

__all__ = ["Exchange", "StepPlan", "plan_of"]

When: TypeAlias = Literal["backward", "pass", "step", "background"]

_WORD = 4
"""Bytes of a float32, of an index of S11.2, and of the flag of S3.6."""


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
    """

    operation: Operation
    cluster: Cluster
    nbytes: int
    when: When = "backward"
    codec: str = ""
    elements: int = 0
    delay: int = 0

    @cached_property
    def rounds(self) -> Counter[tuple[tuple[Wire, int], ...]]:
        """The rounds, counted by what decides their time (S14.2): the heaviest link of each kind, and its bytes."""
        found: Counter[tuple[tuple[Wire, int], ...]] = Counter()
        for messages in self.operation:
            heaviest: dict[str, tuple[Wire, int]] = {}
            for wire, nbytes in loads_of(messages, self.cluster.node_of).items():
                kind = "inside" if wire[0] == "inside" else "between"
                if kind not in heaviest or nbytes > heaviest[kind][1]:
                    heaviest[kind] = ((wire[0], 0, -1), nbytes)
            found[tuple(heaviest.values())] += 1
        return found


class StepPlan:
    """The operations of each step of an algorithm's training, in which every step has one backward pass (S5).

    Args:
        algorithm: with its options.
        parameters: of the module.
        cluster: the ranks.

    Attributes:
        warmup: the steps after which the operations repeat.
        cycle: after how many steps they do.
        interval: seconds from the end of a round in the background to the next; None: rounds belong to steps.
    """

    warmup = 0
    cycle = 1
    interval: float | None = None

    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        self.algorithm, self.parameters, self.cluster = algorithm, parameters, cluster
        self.buckets = parameters.buckets()
        self._made: dict[Hashable, Exchange] = {}

    def exchanges(self, step: int) -> list[Exchange]:
        """Return the operations of a step, counted from 1, in the order in which they run."""
        raise NotImplementedError

    def memory(self) -> int:
        """Return the bytes on the busiest rank beyond weights, gradients and optimizer state: what is kept, and the most scratch."""
        return 0

    def traffic(self, step: int) -> list[dict[str, Traffic]]:
        """Return what each rank sends and receives in a step by kind of link, as communicators count it (S14.1).

        Agreements on a round, which communicators do not count either, are left out.
        """
        rounds = chain.from_iterable(exchange.operation for exchange in self.exchanges(step))
        return costs.traffic(list(rounds), self.cluster.node_of)

    @cached_property
    def repeated(self) -> Counter[tuple[Exchange, ...]]:
        """The steps of a cycle after the warm-up, counted by their operations."""
        first = self.warmup + 1
        return Counter(tuple(self.exchanges(step)) for step in range(first, first + self.cycle))

    @property
    def waits_for_others(self) -> bool:
        """Whether training ever waits for other ranks after the warm-up."""
        return any(exchange.when != "background" for exchanges in self.repeated for exchange in exchanges)

    @cached_property
    def sent(self) -> tuple[float, float]:
        """Bytes and messages that the busiest rank sends in a step after the warm-up, on average; between nodes if there are any."""
        kind = "between" if len(self.cluster.nodes) > 1 else "inside"
        totals = [[0, 0] for _ in self.cluster.node_of]
        for exchanges, count in self.repeated.items():
            counts = costs.traffic([turn for exchange in exchanges for turn in exchange.operation], self.cluster.node_of)
            for total, own in zip(totals, counts, strict=True):
                total[0] += count * own[kind].bytes_sent
                total[1] += count * own[kind].messages_sent
        nbytes, messages = max(totals)
        return nbytes / self.cycle, messages / self.cycle

    def exchange(self, key: Hashable, bucket: BucketShape, make: Callable[[], Operation], *more: Any) -> Exchange:
        """Return an exchange, made once for each key and shape of bucket, as the formulas of large worlds take time."""
        key = (key, bucket.numel, bucket.filled, bucket.dtype, more)
        if key not in self._made:
            self._made[key] = Exchange(make(), self.cluster, bucket.filled * bucket.dtype.itemsize, *more)
        return self._made[key]

    def all_reduced(self, bucket: BucketShape, when: When = "backward", hierarchical: bool = False) -> Exchange:
        """Return an all-reduce between all ranks (S3.1), or with ``hierarchical`` between leaders (S3.3)."""

        def operation(n: int) -> Operation:
            return costs.all_reduce(chunk_bytes(bucket.numel, bucket.dtype.itemsize, n))

        make = lambda: self.through_leaders(bucket, operation) if hierarchical else operation(self.cluster.n)  # noqa: E731
        return self.exchange(("all_reduced", hierarchical), bucket, make, when)

    def to_leaders(self, bucket: BucketShape, in_rank_order: bool = False) -> Operation:
        """Return the way to the leaders: a gather where sums have an order or 16 bits, else a reduce (S3.3)."""
        if in_rank_order or bucket.dtype.itemsize < _WORD:
            return self.cluster.inside(lambda k: costs.gather([bucket.nbytes] * k))
        return self.cluster.inside(lambda k: costs.reduce(bucket.nbytes, k))

    def from_leaders(self, bucket: BucketShape) -> Operation:
        """Return the broadcast inside all nodes."""
        return self.cluster.inside(lambda k: costs.broadcast(bucket.nbytes, k))

    def through_leaders(
        self, bucket: BucketShape, operation: Callable[[int], Operation], in_rank_order: bool = False
    ) -> Operation:
        """Return S3.3: to the leaders, the operation of so many leaders, and back."""
        leaders = self.cluster.between(operation(len(self.cluster.nodes)))
        return self.to_leaders(bucket, in_rank_order) + leaders + self.from_leaders(bucket)

    def gathered(self, hierarchical: bool) -> int:
        """Return the bytes of the largest bucket's inputs at the busiest leader, where sums have an order."""
        most = max(self.cluster.nodes)
        return most * max(bucket.nbytes for bucket in self.buckets) if hierarchical and most > 1 else 0


class _AllReduce(StepPlan):
    def exchanges(self, step: int) -> list[Exchange]:
        return [self.all_reduced(bucket, hierarchical=self.algorithm.hierarchical) for bucket in self.buckets]


def _payload(codec: str, elements: int, dtype: torch.dtype) -> int:
    return get_codec(codec, "reference").payload_bytes(elements, dtype)


def _scattered(bucket: BucketShape, n: int, codec: str | None, has_memory: bool) -> Operation:
    """Return S3.2 or S3.7: an all-to-all of n chunks, and an all-gather of them, compressed unless codec is None."""
    size = bucket.numel // n
    if codec is None:
        chunk = size * bucket.dtype.itemsize
    else:
        chunk = _payload(codec, size, torch.float32 if has_memory else bucket.dtype)
    return costs.all_to_all([[chunk] * n] * n) + costs.all_gather([chunk] * n)


def _passes(bucket: BucketShape, n: int) -> int:
    """Return the elements of S3.2 that pass through a codec: all are encoded and decoded, and then one chunk and all of them."""
    return 3 * bucket.numel + bucket.numel // n


class _ByteGrad(StepPlan):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self._chunks = len(cluster.nodes) if algorithm.hierarchical else cluster.n
        self.buckets = parameters.buckets(math.lcm(cluster.n, self._chunks))  # S5.2

    def exchanges(self, step: int) -> list[Exchange]:
        return [self._compressed(bucket) for bucket in self.buckets]

    def _compressed(self, bucket: BucketShape) -> Exchange:
        algorithm = self.algorithm

        def operation(n: int) -> Operation:
            return _scattered(bucket, n, algorithm.compression, algorithm.error_feedback)

        def make() -> Operation:
            return self.through_leaders(bucket, operation, True) if algorithm.hierarchical else operation(self.cluster.n)

        return self.exchange("compressed", bucket, make, "backward", algorithm.compression, _passes(bucket, self._chunks))

    def memory(self) -> int:
        scratch = max(
            2 * self._chunks * _payload(self.algorithm.compression, bucket.numel // self._chunks, bucket.dtype)
            for bucket in self.buckets
        )
        kept = sum(bucket.numel + bucket.numel // self._chunks for bucket in self.buckets) * _WORD
        return scratch + self.gathered(self.algorithm.hierarchical) + kept * self.algorithm.error_feedback


class _QAdam(_ByteGrad):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.warmup = algorithm.q_adam_optimizer.warmup_steps

    def exchanges(self, step: int) -> list[Exchange]:
        return super().exchanges(step) if step > self.warmup else [self.all_reduced(bucket) for bucket in self.buckets]


class _Decentralized(StepPlan):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.buckets = parameters.whole()  # S5.3
        self._mode, self._n = algorithm.peer_selection_mode, len(cluster.nodes) if algorithm.hierarchical else cluster.n
        if isinstance(self._mode, str):
            mode = MODES[self._mode]
            if not mode.takes(self._n):
                raise ValueError(f"peer_selection_mode={self._mode!r} needs {mode.sizes} of ranks, not {self._n}")
            self._graph, self._period = mode.graph, mode.period(self._n)
        else:
            self._graph, self._period = self._mode, 1
        self.cycle = algorithm.communication_interval * self._period

    def exchanges(self, step: int) -> list[Exchange]:
        number, rest = divmod(step - 1, self.algorithm.communication_interval)
        return [] if rest else [e for bucket in self.buckets for e in self._averaged(bucket, number)]

    def _averaged(self, bucket: BucketShape, number: int) -> list[Exchange]:
        def between(n: int) -> Operation:
            if self._mode == "all":
                return costs.all_reduce(chunk_bytes(bucket.numel, bucket.dtype.itemsize, n))
            graph = self._graph(number, n)
            return one_round([(src, dst, bucket.nbytes) for dst, row in enumerate(graph) for src, _ in row])

        place = number % self._period if isinstance(self._mode, str) else number
        if not self.algorithm.hierarchical:
            return [self.exchange(place, bucket, lambda: between(self._n), "pass")]

        def averaged() -> Operation:
            return self.to_leaders(bucket, self._mode != "all") + self.cluster.between(between(self._n))

        copied = self.exchange("copied", bucket, lambda: self.from_leaders(bucket), "step")
        return [self.exchange(place, bucket, averaged, "pass"), copied]

    def memory(self) -> int:
        largest = max(bucket.nbytes for bucket in self.buckets)
        rows = [] if self._mode == "all" else self._graph(0, self._n)
        received = max((len(row) - 1 for row in rows), default=0)
        scratch = (received if received > 1 else 0) + self.algorithm.hierarchical  # a pair's result needs none, a node's mean does
        gathered = self.gathered(self.algorithm.hierarchical and self._mode != "all")
        return self.parameters.nbytes + scratch * largest + gathered


class _Ring(StepPlan):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.cycle = algorithm.communication_interval

    def exchanges(self, step: int) -> list[Exchange]:
        due = (step - 1) % self.algorithm.communication_interval == 0
        return [self._traded(bucket) for bucket in self.buckets] if due else []

    def _traded(self, bucket: BucketShape) -> Exchange:
        algorithm = self.algorithm
        payload = _payload(algorithm.compression, bucket.numel, bucket.dtype)

        def ring(n: int) -> Operation:
            return one_round([(r, peer % n, payload) for r in range(n) for peer in (r - 1, r + 1)])

        def make() -> Operation:
            return self.through_leaders(bucket, ring, True) if algorithm.hierarchical else ring(self.cluster.n)

        return self.exchange("traded", bucket, make, "step", algorithm.compression, 4 * bucket.numel)

    def memory(self) -> int:
        payload = max(_payload(self.algorithm.compression, bucket.numel, bucket.dtype) for bucket in self.buckets)
        return 3 * self.parameters.nbytes + 3 * payload + self.gathered(self.algorithm.hierarchical)


class _WarmedUp(StepPlan):
    """All-reduced gradients up to and with step ``warmup``, and `after_warmup` then."""

    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.warmup = algorithm.warmup_steps

    def exchanges(self, step: int) -> list[Exchange]:
        if step > self.warmup:
            return self.after_warmup(step - self.warmup)
        return [self.all_reduced(bucket) for bucket in self.buckets]

    def after_warmup(self, step: int) -> list[Exchange]:
        """Return the operations of a step after the warm-up, counted from 1."""
        raise NotImplementedError


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Async(_WarmedUp):
    """A round of S3.6 in every step: the interval is a time, and ranks may take any number of steps in it."""

    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.interval = algorithm.sync_interval_ms / 1000

    def after_warmup(self, step: int) -> list[Exchange]:
        n = self.cluster.n
        agreement = costs.all_reduce(chunk_bytes(1, _WORD, n))

        def averaged(bucket: BucketShape) -> Operation:
            return agreement + costs.all_reduce(chunk_bytes(bucket.numel, _wide(bucket.dtype).itemsize, n))

        whole = self.parameters.whole() if self.algorithm.sync_interval_ms else []
        return [self.exchange("averaged", bucket, lambda b=bucket: averaged(b), "background") for bucket in whole]  # type: ignore[misc]

    def memory(self) -> int:
        return sum(bucket.nbytes + bucket.numel * _wide(bucket.dtype).itemsize for bucket in self.parameters.whole())


class _LocalSGD(_WarmedUp):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.cycle = algorithm.period

    def after_warmup(self, step: int) -> list[Exchange]:
        found = [self._in_nodes(bucket) for bucket in self.buckets] if self.algorithm.hierarchical else []
        if (step - self.algorithm.offset) % self.algorithm.period == 0:
            found += [self.all_reduced(bucket, "step") for bucket in self.buckets]
        return found

    def _in_nodes(self, bucket: BucketShape) -> Exchange:
        def operation(k: int) -> Operation:
            return costs.all_reduce(chunk_bytes(bucket.numel, bucket.dtype.itemsize, k))

        return self.exchange("in nodes", bucket, lambda: self.cluster.inside(operation))

    def memory(self) -> int:
        return max(bucket.nbytes for bucket in self.buckets)


class _DiLoCo(_WarmedUp):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.cycle, self._schedule, self._fragments = algorithm.period, algorithm.schedule(), list[list[BucketShape]]()
        known = dict(parameters.named)
        for names in named_fragments(algorithm.fragments, parameters.named):
            copies = [torch.empty(known[name].shape, dtype=_wide(known[name].dtype), device="meta") for name in names]
            self._fragments.append([BucketShape.of(part, cluster.n) for part in by_dtype_and_device(copies)])

    def after_warmup(self, step: int) -> list[Exchange]:
        place = self._schedule.sent_after(step)
        return [] if place is None else [self._averaged(part) for part in self._fragments[place]]

    def _averaged(self, part: BucketShape) -> Exchange:
        algorithm, n = self.algorithm, self.cluster.n
        elements = _passes(part, n) if algorithm.compression else 0
        make = lambda: _scattered(part, n, algorithm.compression, algorithm.error_feedback)  # noqa: E731
        return self.exchange("averaged", part, make, "step", algorithm.compression or "", elements, self._schedule.delay)

    def memory(self) -> int:
        parts = [part for fragment in self._fragments for part in fragment]
        flight = max(sum(part.nbytes for part in fragment) for fragment in self._fragments)
        errors = sum(part.numel + part.numel // self.cluster.n for part in parts) * _WORD if self.algorithm.error_feedback else 0
        return 2 * sum(part.nbytes for part in parts) + flight + errors  # g, and the momentum of the default outer optimizer


class _PowerSGD(_WarmedUp):
    def after_warmup(self, step: int) -> list[Exchange]:
        return [self._approximated(bucket) for bucket in self.buckets]

    def _matrices(self, bucket: BucketShape) -> list[tuple[int, int, int]]:
        options = self.algorithm.matrix_approximation_rank, self.algorithm.min_compression_rate
        return [found for shape in bucket.shapes if (found := matrix_shape(shape, *options)) is not None]

    def _approximated(self, bucket: BucketShape) -> Exchange:
        matrices = self._matrices(bucket)
        if not matrices:
            return self.all_reduced(bucket)
        rest = bucket.filled - sum(n * m for n, m, _ in matrices)
        messages = rest + sum(n * r for n, _, r in matrices), sum(m * r for _, m, r in matrices)  # S10.3, S10.4
        itemsize = _wide(bucket.dtype).itemsize

        def make() -> Operation:
            return [turn for size in messages for turn in costs.all_reduce(chunk_bytes(size, itemsize, self.cluster.n))]

        products = 3 * sum(n * m * r for n, m, r in matrices)
        return self.exchange(messages, bucket, make, "backward", "powersgd", products)

    def memory(self) -> int:
        kept, scratch = 0, [0]
        for bucket in self.buckets:
            itemsize, matrices = _wide(bucket.dtype).itemsize, self._matrices(bucket)
            compressed = sum(n * m for n, m, _ in matrices)
            factors = sum((n + m) * r for n, m, r in matrices)
            kept += itemsize * sum(m * r for _, m, r in matrices)
            kept += itemsize * compressed * (self.algorithm.memory is not None)
            wide = bucket.filled * itemsize if itemsize != bucket.dtype.itemsize else 0
            scratch.append((factors + bucket.filled - compressed) * itemsize + wide if matrices else 0)
        return kept + max(scratch)


class _TopK(_WarmedUp):
    def after_warmup(self, step: int) -> list[Exchange]:
        return [self._gathered(bucket) for bucket in self.buckets]

    def _gathered(self, bucket: BucketShape) -> Exchange:
        n, k = self.cluster.n, count_of(bucket.filled, self.algorithm.ratio)
        make = lambda: 2 * costs.all_gather([k * _WORD] * n)  # noqa: E731 # indices, and then values
        return self.exchange("gathered", bucket, make, "backward", "topk", bucket.filled + n * k)

    def memory(self) -> int:
        kept = sum(bucket.filled for bucket in self.buckets) * _WORD * self.algorithm.error_feedback
        sent = {bucket.filled: 2 * self.cluster.n * count_of(bucket.filled, self.algorithm.ratio) for bucket in self.buckets}
        return kept + max((bucket.filled + sent[bucket.filled]) * _WORD for bucket in self.buckets)


_PLANS: dict[type, type[StepPlan]] = {
    GradientAllReduceAlgorithm: _AllReduce,
    ByteGradAlgorithm: _ByteGrad,
    QAdamAlgorithm: _QAdam,
    DecentralizedAlgorithm: _Decentralized,
    LowPrecisionDecentralizedAlgorithm: _Ring,
    AsyncModelAverageAlgorithm: _Async,
    LocalSGDAlgorithm: _LocalSGD,
    DiLoCoAlgorithm: _DiLoCo,
    PowerSGDAlgorithm: _PowerSGD,
    TopKAlgorithm: _TopK,
}


def plan_of(algorithm: Any, module: torch.nn.Module | Parameters, nodes: Cluster | tuple[int, ...]) -> StepPlan:
    """Return the plan of training ``module`` by ``algorithm``; nothing is computed or sent (S14.1).

    Bytes and messages of every step are those that communicators count, on each rank and kind of link: exact integers.

    Args:
        algorithm: with its options; one that is registered here, not a subclass, which may send something else.
        module: its parameters may be on the device "meta"; or its `Parameters`.
        nodes: the number of ranks on each node.

    Raises:
        ValueError: there is no plan for the algorithm, it does not take so many ranks, or the module has nothing to train.
        TypeError: a parameter has a dtype that the algorithm does not take.

    >>> from bagua_ref.algorithms import ByteGradAlgorithm
    >>> plan = plan_of(ByteGradAlgorithm(hierarchical=False), torch.nn.Linear(1000, 1000, device="meta"), nodes=(1, 1))
    >>> plan.traffic(step=1)[0]["between"]
    Traffic(bytes_sent=1001088, messages_sent=2, bytes_received=1001088, messages_received=2)

    Source: the operations are those of Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499), and of each algorithm's own source.
    """
    if type(algorithm) not in _PLANS:
        name = GlobalAlgorithmRegistry.name_of(algorithm)
        raise ValueError(f"algorithm={name} has no plan; there are plans for {', '.join(kind.__name__ for kind in _PLANS)}")
    parameters = module if isinstance(module, Parameters) else Parameters(module)
    compresses = getattr(algorithm, "compression", None) is not None or isinstance(algorithm, TopKAlgorithm)
    for name, parameter in parameters.named:
        if compresses and parameter.dtype is torch.float64:
            raise TypeError(f"parameter {name!r} is float64, which {type(algorithm).__name__} does not take here")
    return _PLANS[type(algorithm)](algorithm, parameters, nodes if isinstance(nodes, Cluster) else Cluster(nodes))
