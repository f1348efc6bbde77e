"""Plans of the registered algorithms: the operations of every step, from shapes alone (S3, S5, S9
to S11, S14.1).

`describe` says of a training that begins what its plan costs.
"""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import replace
from typing import Any

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
from bagua_ref.data_parallel.training import ModuleTraining
from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import Operation, chunk_bytes, one_round
from bagua_ref.formulas.graphs import MODES, Graph, ring
from bagua_ref.formulas.low_rank import matrix_shape
from bagua_ref.planning.shapes import BucketShape, Cluster, Parameters
from bagua_ref.planning.steps import Exchange, StepPlan

__all__ = ["describe", "plan_of"]

# of `describe`; users may have set its level
_logger = logging.getLogger("bagua_ref.planning.wrapped")

_MOST_STEPS = 10_000
"""The longest cycle of a plan, which is added up step by step."""
_WORD = 4
"""Bytes of a float32, of an index of S11.2, and of the flag of S3.6."""


def _payload(codec: str, elements: int, dtype: torch.dtype) -> int:
    return get_codec(codec, "reference").payload_bytes(elements, dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _turns(n: int) -> int:
    """Return the rounds of two all-to-alls or all-gathers of n ranks but for the first of each."""
    return 2 * max(0, n - 2)


class _Scattered(StepPlan):
    """Operations that scatter chunks, reduce them and gather the results, by a codec if the
    algorithm names one.
    """

    def scattered(self, buckets: list[BucketShape], **about: Any) -> list[Exchange]:
        """Return S3.2 or S3.7 of these buckets: an all-to-all of n chunks, and an all-gather of
        them.

        All elements are encoded and decoded, and then one chunk and all of them; ranks with an
        error memory decode what they have sent, too (S11.1).
        """
        codec, memory, n = self.algorithm.compression, self.algorithm.error_feedback, self.peers

        def averaged(bucket: BucketShape) -> Operation:
            size, dtype = bucket.numel // n, torch.float32 if memory else bucket.dtype
            chunk = size * bucket.dtype.itemsize if codec is None else _payload(codec, size, dtype)
            chunks = costs.all_to_all([[chunk] * n] * n) + costs.all_gather([chunk] * n)
            return self.among(chunks, bucket, in_rank_order=True)

        return self.each(
            averaged,
            buckets,
            codec=codec or "",
            elements=lambda bucket: (
                (4 if memory else 3) * bucket.numel + bucket.numel // n if codec else 0
            ),
            turns=_turns(n),
            **about,
        )

    def error_memory(self, buckets: list[BucketShape]) -> int:
        """Return the bytes of e and f (S11.1)."""
        return (
            _WORD * sum(b.numel + b.numel // self.peers for b in buckets)
            if self.algorithm.error_feedback
            else 0
        )


class _ByteGrad(_Scattered):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.buckets = parameters.buckets(math.lcm(cluster.n, self.peers))  # S5.2

    def after_warmup(self, step: int) -> list[Exchange]:
        return self.scattered(self.buckets)

    def memory(self) -> tuple[int, int]:
        n, codec = self.peers, self.algorithm.compression
        scratch = 2 * max(
            n * _payload(codec, bucket.numel // n, bucket.dtype) for bucket in self.buckets
        )
        # those of a round, until it ends
        own = max(self.error_memory([bucket]) for bucket in self.buckets)
        return self.error_memory(self.buckets), scratch + own + self.gathered()


class _QAdam(_ByteGrad):
    @property
    def warmup(self) -> int:
        return int(self.algorithm.q_adam_optimizer.warmup_steps)

    def memory(self) -> tuple[int, int]:
        kept, scratch = super().memory()
        return kept, scratch + max(bucket.nbytes for bucket in self.buckets)  # the momentum


class _Decentralized(StepPlan):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.buckets = parameters.whole()  # S5.3
        self._mode, n = algorithm.peer_selection_mode, self.peers
        named = MODES.get(self._mode) if isinstance(self._mode, str) else None
        if named is not None and not named.takes(n):
            raise ValueError(
                f"peer_selection_mode={self._mode!r} needs {named.sizes} of ranks, not {n}"
            )
        self.graphs = [] if named is None else named.graphs(n)

    def _graph(self, number: int) -> Graph:
        return (
            self.graphs[number % len(self.graphs)]
            if self.graphs
            else self._mode(number, self.peers)
        )

    def after_warmup(self, step: int) -> list[Exchange]:
        number, rest = divmod(step - 1, self.algorithm.communication_interval)
        if rest:
            return []

        def between(bucket: BucketShape) -> Operation:
            if self._mode == "all":
                return costs.all_reduce(
                    chunk_bytes(bucket.numel, bucket.dtype.itemsize, self.peers)
                )
            return one_round(
                [
                    (source, rank, bucket.nbytes)
                    for rank, row in enumerate(self._graph(number))
                    for source, _ in row
                ]
            )

        if not self.hierarchical:
            return self.each(between, self.buckets, when="pass")

        def averaged(bucket: BucketShape) -> Operation:
            return self.to_leaders(bucket, self._mode != "all") + self.cluster.between(
                between(bucket)
            )

        return self.each(averaged, self.buckets, when="pass") + self.each(
            self.from_leaders, self.buckets, when="step"
        )

    def memory(self) -> tuple[int, int]:
        received = 1 if self._mode == "all" else max(len(row) - 1 for row in self._graph(0))
        # a pair's result needs none, a node's mean does
        copies = (received if received > 1 else 0) + int(self.hierarchical)
        gathered = self.gathered() if self._mode != "all" else 0
        return (
            self.parameters.nbytes,
            copies * max(bucket.nbytes for bucket in self.buckets) + gathered,
        )


class _Ring(StepPlan):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.graphs = [ring(0, self.peers)]

    def after_warmup(self, step: int) -> list[Exchange]:
        if (step - 1) % self.cycle:
            return []
        codec, n = self.algorithm.compression, self.peers

        def traded(bucket: BucketShape) -> Operation:
            payload = _payload(codec, bucket.numel, bucket.dtype)
            trade = one_round([(r, peer % n, payload) for r in range(n) for peer in (r - 1, r + 1)])
            return self.among(trade, bucket, in_rank_order=True)

        return self.each(
            traded, self.buckets, when="step", codec=codec, elements=lambda bucket: 4 * bucket.numel
        )

    def memory(self) -> tuple[int, int]:
        payload = max(
            _payload(self.algorithm.compression, bucket.numel, bucket.dtype)
            for bucket in self.buckets
        )
        return 3 * self.parameters.nbytes, 3 * payload + self.gathered()


class _Async(StepPlan):
    """A round of S3.6 in every step: the interval is a time, and ranks may take any number of steps
    in it.
    """

    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self.interval, self._whole = algorithm.sync_interval_ms / 1000, parameters.whole()

    def after_warmup(self, step: int) -> list[Exchange]:
        def averaged(bucket: BucketShape) -> Operation:
            # the agreement on stopping, and the weights
            parts = [(1, _WORD), (bucket.numel, _wide(bucket.dtype).itemsize)]
            return [
                turn
                for part in parts
                for turn in costs.all_reduce(chunk_bytes(*part, self.cluster.n))
            ]

        return self.each(averaged, self._whole if self.interval else [], when="background")

    def memory(self) -> tuple[int, int]:
        return (
            sum(
                bucket.nbytes + bucket.numel * _wide(bucket.dtype).itemsize
                for bucket in self._whole
            ),
            0,
        )


class _LocalSGD(StepPlan):
    def after_warmup(self, step: int) -> list[Exchange]:
        def in_nodes(bucket: BucketShape) -> Operation:
            return self.cluster.inside(
                lambda k: costs.all_reduce(chunk_bytes(bucket.numel, bucket.dtype.itemsize, k))
            )

        found = self.each(in_nodes, self.buckets) if self.hierarchical else []
        return found + (
            self.all_reduced("step") if (step - self.algorithm.offset) % self.cycle == 0 else []
        )

    def memory(self) -> tuple[int, int]:
        return 0, max(bucket.nbytes for bucket in self.buckets)


class _DiLoCo(_Scattered):
    def __init__(self, algorithm: Any, parameters: Parameters, cluster: Cluster) -> None:
        super().__init__(algorithm, parameters, cluster)
        self._schedule, self._fragments, known = (
            algorithm.schedule(),
            list[list[BucketShape]](),
            dict(parameters.named),
        )
        for names in named_fragments(algorithm.fragments, parameters.named):
            copies = [
                torch.empty(known[name].shape, dtype=_wide(known[name].dtype), device="meta")
                for name in names
            ]
            self._fragments.append(
                [BucketShape.of(part, cluster.n) for part in by_dtype_and_device(copies)]
            )

    def after_warmup(self, step: int) -> list[Exchange]:
        place = self._schedule.sent_after(step)
        return self.scattered(
            [] if place is None else self._fragments[place], when="step", delay=self._schedule.delay
        )

    def memory(self) -> tuple[int, int]:
        parts = [part for fragment in self._fragments for part in fragment]
        sent = max(sum(part.nbytes for part in fragment) for fragment in self._fragments)
        # g, and the momentum of the default outer optimizer
        kept = 2 * sum(part.nbytes for part in parts)
        kept += self.error_memory(parts)
        # the differences, and what arrives
        return (kept + sent, sent) if self._schedule.delay else (kept, 2 * sent)


class _PowerSGD(StepPlan):
    def _matrices(self, bucket: BucketShape) -> list[tuple[int, int, int]]:
        options = self.algorithm.matrix_approximation_rank, self.algorithm.min_compression_rate
        return [
            found for shape in bucket.shapes if (found := matrix_shape(shape, *options)) is not None
        ]

    def after_warmup(self, step: int) -> list[Exchange]:
        def approximated(bucket: BucketShape) -> Operation:
            matrices, itemsize = self._matrices(bucket), _wide(bucket.dtype).itemsize
            if not matrices:
                return costs.all_reduce(
                    chunk_bytes(bucket.numel, bucket.dtype.itemsize, self.cluster.n)
                )
            # P, and what is not compressed
            left = bucket.filled + sum(n * r - n * m for n, m, r in matrices)
            sizes = left, sum(m * r for _, m, r in matrices)  # S10.3, S10.4
            return [
                turn
                for size in sizes
                for turn in costs.all_reduce(chunk_bytes(size, itemsize, self.cluster.n))
            ]

        products = lambda bucket: 3 * sum(n * m * r for n, m, r in self._matrices(bucket))  # noqa: E731
        return self.each(approximated, self.buckets, codec="powersgd", elements=products)

    def memory(self) -> tuple[int, int]:
        kept, scratch = 0, [0]
        for bucket in self.buckets:
            itemsize, matrices = _wide(bucket.dtype).itemsize, self._matrices(bucket)
            compressed, right = (
                sum(n * m for n, m, _ in matrices),
                sum(m * r for _, m, r in matrices),
            )
            kept += itemsize * (right + (compressed if self.algorithm.memory is not None else 0))
            copies = bucket.filled if itemsize != bucket.dtype.itemsize else 0
            left = sum(n * r for n, _, r in matrices) + bucket.filled - compressed
            scratch.append(itemsize * (left + right + copies) if matrices else 0)
        return kept, max(scratch)


class _TopK(StepPlan):
    def after_warmup(self, step: int) -> list[Exchange]:
        n = self.cluster.n

        def count(bucket: BucketShape) -> int:
            return count_of(bucket.filled, self.algorithm.ratio)

        return self.each(
            # indices, and then values
            lambda bucket: 2 * costs.all_gather([count(bucket) * _WORD] * n),
            self.buckets,
            codec="topk",
            elements=lambda bucket: bucket.filled + n * count(bucket),
            turns=_turns(n),
        )

    def memory(self) -> tuple[int, int]:
        kept = sum(bucket.filled for bucket in self.buckets) if self.algorithm.error_feedback else 0
        largest = max(bucket.filled for bucket in self.buckets)
        return _WORD * kept, _WORD * (
            largest + 2 * self.cluster.n * count_of(largest, self.algorithm.ratio)
        )


_PLANS: dict[type, type[StepPlan]] = {
    GradientAllReduceAlgorithm: StepPlan,
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


def plan_of(
    algorithm: Any, module: torch.nn.Module | Parameters, nodes: Cluster | tuple[int, ...]
) -> StepPlan:
    """Return the plan of training ``module`` by ``algorithm``; nothing is computed or sent (S14.1).

    Bytes and messages of every step are those that communicators count, on each rank and kind of
    link: exact integers.

    Args:
        algorithm: with its options; one that is registered here, not a subclass, which may send
            something else.
        module: its parameters may be on the device "meta"; or its `Parameters`.
        nodes: the number of ranks on each node.

    Raises:
        ValueError: there is no plan for the algorithm, its period has more than 10,000 steps, it
            does not take so many ranks, or the module has nothing to train.
        TypeError: a parameter has a dtype that the algorithm does not take.

    >>> from bagua_ref.algorithms import ByteGradAlgorithm
    >>> plan = plan_of(ByteGradAlgorithm(hierarchical=False), torch.nn.Linear(1000, 1000, device="meta"), nodes=(1, 1))
    >>> plan.traffic(step=1)[0]["between"]
    Traffic(bytes_sent=1001088, messages_sent=2, bytes_received=1001088, messages_received=2)

    Source: the operations are those of Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499), and of
    each algorithm's own source.
    """
    if type(algorithm) not in _PLANS:
        name = GlobalAlgorithmRegistry.name_of(algorithm)
        raise ValueError(
            f"algorithm={name} has no plan; there are plans for"
            f" {', '.join(kind.__name__ for kind in _PLANS)}"
        )
    parameters = module if isinstance(module, Parameters) else Parameters(module)
    compresses = getattr(algorithm, "compression", None) is not None or isinstance(
        algorithm, TopKAlgorithm
    )
    for name, parameter in parameters.named:
        if compresses and parameter.dtype is torch.float64:
            raise TypeError(
                f"parameter {name!r} is float64, which {type(algorithm).__name__} does not take"
                " here"
            )
    plan = _PLANS[type(algorithm)](
        algorithm, parameters, nodes if isinstance(nodes, Cluster) else Cluster(nodes)
    )
    if plan.cycle > _MOST_STEPS:
        raise ValueError(
            f"{type(algorithm).__name__} repeats after {plan.cycle:,} steps; plans have up to"
            f" {_MOST_STEPS:,}"
        )
    return plan


def describe(training: ModuleTraining) -> None:
    """Warn if ``hierarchical=True`` costs bytes on one node, and log bytes and memory at INFO; on
    the group's first rank alone.

    Bytes are those that the busiest rank sends, after the warm-up by the mean of a period. Left out
    are trainings without a plan and graphs by a user's function, which is called for steps that are
    trained only.

    Args:
        training: of two ranks or more.
    """
    algorithm: Any = training.algorithm
    if training.world.identity.rank != training.given_group.ranks[0]:
        return
    nodes = tuple(len(ranks) for ranks in training.given_group.nodes.values())
    costs_bytes = len(nodes) == 1 and getattr(algorithm, "hierarchical", False)
    asked = costs_bytes or _logger.isEnabledFor(logging.INFO)
    if sum(nodes) < 2 or not asked or callable(getattr(algorithm, "peer_selection_mode", None)):
        return
    try:
        parameters, cluster = Parameters(training.module, training.bucket_bytes), Cluster(nodes)
        plan = plan_of(algorithm, parameters, cluster)
        flat = (
            plan_of(replace(algorithm, hierarchical=False), parameters, cluster)
            if costs_bytes
            else plan
        )
    except (TypeError, ValueError, NotImplementedError):
        # an algorithm of the user's, or an odd number of ranks in pairs
        return
    if plan.sent[0] > flat.sent[0]:
        warnings.warn(
            f"with hierarchical=True, {type(algorithm).__name__} saves no bytes on one node: a rank"
            f" sends up to {plan.sent[0]:,.0f} B per step, and {flat.sent[0]:,.0f} B if you pass"
            " hierarchical=False to it",
            stacklevel=5,
        )
    if _logger.isEnabledFor(logging.INFO):
        _logger.info("%s", _summary(plan, parameters, cluster))


def _summary(plan: StepPlan, parameters: Parameters, cluster: Cluster) -> str:
    """Return the bytes of a step now and after the warm-up, the ratio to gradient_allreduce, and
    the memory.
    """
    dense, (kept, scratch) = (
        plan_of(GradientAllReduceAlgorithm(), parameters, cluster).sent[0],
        plan.memory(),
    )
    several = len(cluster.nodes) > 1
    first = max(sent["between" if several else "inside"].bytes_sent for sent in plan.traffic(1))
    unit = "step" if plan.interval is None else "round"
    now = (
        f"{first:,} B per {unit} now, {plan.sent[0]:,.0f} B after {plan.warmup:,} steps of warm-up"
    )
    return (
        f"{GlobalAlgorithmRegistry.name_of(plan.algorithm)}, {cluster.n} ranks on"
        f" {len(cluster.nodes)} node{'s' * several}: a rank sends {'other nodes ' * several}up to"
        f" {now if plan.warmup else f'{plan.sent[0]:,.0f} B per {unit}'}"
        f" ({plan.sent[0] / dense:.3f} of gradient_allreduce); extra memory: {kept:,} B, and"
        f" {scratch:,} B during communication"
    )
