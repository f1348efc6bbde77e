"""Plans of trainings: the operations of each step, counted from one rank's run, and their messages
(S3, S5, S14.1).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from bagua_ref.data_parallel.guard import TrainedParameters
from bagua_ref.data_parallel.parameters import split_into_buckets
from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import Traffic
from bagua_ref.formulas.graphs import MODES
from bagua_ref.planning.counting import count
from bagua_ref.planning.exchanges import KINDS, Call, Cluster, Exchange, scaled

__all__ = ["StepPlan", "check_trainable", "module_of", "plan_of"]

_MAX_STEPS = 10_000
"""Maximal length of a plan's cycle, whose steps are all counted."""

_MAX_GRAPHS = 16
"""Number of graphs of a user's function in which its cycle is searched for."""

_SIDE = 1024
"""Number of rows and columns of the matrices of `module_of`."""


@dataclass
class StepPlan:
    """The operations of each step of a training in which every step has one backward pass (S5).

    Attributes:
        algorithm: the algorithm with its options.
        cluster: the ranks.
        nbytes: bytes of the parameters.
        warmup: the number of warm-up steps, all equal to the first step.
        first: the operations of the first step.
        cycle: the operations of the steps after the warm-up, until they repeat.
        interval: seconds from the end of a background round to the next; None: rounds belong to
            steps.
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
        """Return the operations of a step, counted from 1, in execution order; with an `interval`,
        those of a round.
        """
        if step <= self.warmup:
            return self.first
        return self.cycle[(step - self.warmup - 1) % len(self.cycle)]

    def traffic(self, step: int) -> list[dict[str, Traffic]]:
        """Return each rank's traffic in a step by kind of link, counted as by communicators
        (S14.1).

        Agreements on a round are not counted, as communicators do not count them either.
        """
        rounds = [messages for exchange in self.exchanges(step) for messages in exchange.operation]
        return costs.traffic(rounds, self.cluster.node_of)

    @cached_property
    def sent(self) -> tuple[float, float]:
        """Average bytes and messages per step of the busiest rank after the warm-up; between nodes
        if there are several.
        """
        kind = KINDS[len(self.cluster.nodes) > 1]
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
    """Return the plan of training ``module`` by ``algorithm``; nothing is sent, and large tensors
    are not allocated (S14.1).

    The real algorithm runs its first step, if it has a warm-up, and its steps until operations
    repeat: ``algorithm.period`` or ``communication_interval``, if there are such options, times the
    number of graphs of a ``peer_selection_mode``. For a graph function that does not repeat itself
    within 16 averages, only the first graph counts. One rank runs the steps. For a custom algorithm
    the last rank runs them, too, and must make the same calls: the others are assumed to do the
    same.

    Args:
        algorithm: with its options, one of this package or your own.
        module: its parameters may be on the device "meta".
        nodes: the number of ranks on each node.
        bucket_bytes: the size at which a bucket is closed; None:
            `bagua_ref.env.get_default_bucket_size`.

    Raises:
        ValueError: the algorithm repeats after more than 10,000 steps, does not support this number of ranks,
            or its ranks differ; or the module has nothing to train.
        TypeError: the algorithm does not support a parameter's dtype.

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
    counting = partial(count, algorithm, module, cluster, bucket_bytes, warm, cycle)
    steps, interval, memory = counting(busiest)
    if not type(algorithm).__module__.startswith("bagua_ref."):
        _check_alike(type(algorithm).__name__, steps, counting(cluster.n - 1)[0], cluster)
    repeated = steps[warm:] if interval is None else steps[-1:]
    return StepPlan(algorithm, cluster, nbytes, warmup, steps[0], repeated, interval, memory)


def _cycle_of(algorithm: Any, cluster: Cluster) -> int:
    """Return the period, in steps, of an algorithm's operations."""
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


def _check_alike(
    name: str, leader: list[list[Exchange]], last: list[list[Exchange]], cluster: Cluster
) -> None:
    """Raise ValueError unless the last rank and the leader make the same calls in the groups that
    both belong to.
    """
    both = {"global", "inter" if cluster.nodes[-1] == 1 else "intra"}

    def calls(steps: list[list[Exchange]]) -> list[list[Call]]:
        return [
            [call for exchange in step for call in exchange.calls if call.among in both]
            for step in steps
        ]

    if calls(leader) != calls(last):
        raise ValueError(
            f"{name} has no plan: its ranks do not all communicate alike, so the first and the last"
            " one do not tell what the others send"
        )


def check_trainable(module: torch.nn.Module) -> int:
    """Return the size of the trainable parameters in bytes; they may be on the device "meta".

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
    split_into_buckets(parameters, 1)  # raises for parameters that cannot be trained
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
