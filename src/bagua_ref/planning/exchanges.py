"""Operations on buckets: the calls of one rank, and the messages of all ranks derived from them
(S3, S14.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby, zip_longest
from typing import Any, NamedTuple

from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import Operation, chunk_bytes, loads_of

__all__ = ["KINDS", "Call", "Cluster", "Exchange", "scaled"]

KINDS = ("inside", "between")
"""Kinds of links: inside nodes and between them."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, numbered node by node (S1).

    Args:
        nodes: the number of ranks on each node.

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
        """Return ``ranks`` distributed over ``nodes`` nodes; if uneven, the first nodes have one
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
        """The numbers of all ranks, of leaders, and of ranks on the largest node."""
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
        """Return an operation in global ranks; within nodes, it runs on all nodes at once.

        Args:
            among: see `Call`.
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


class Call(NamedTuple):
    """A call of a collective.

    Attributes:
        collective: the name of its formula in `bagua_ref.formulas.costs`, such as "all_reduce".
        among: "global": all ranks; "inter": the leaders; "intra": the ranks of each node.
        numel: number of elements of a rank's tensor; for all-gather and scatter, of a rank's chunk.
        itemsize: bytes of an element.
        root: root of broadcast, reduce, gather and scatter.
        pairs: for an exchange, (source, destination, bytes) of all ranks.
    """

    collective: str
    among: str
    numel: int = 0
    itemsize: int = 1
    root: int = 0
    pairs: tuple[tuple[int, int, int], ...] = ()


def _messages(call: Call, cluster: Cluster) -> Operation:
    """Return the messages of all ranks in a call (S14.1)."""

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
    """Summary of the messages in a call.

    Attributes:
        rounds: mapping from the bytes on a round's heaviest link inside nodes and between them
            (None if unused) to the number of such rounds.
        sent: bytes and messages sent by each rank, inside its node and to others.
    """

    rounds: Counter[tuple[float | None, float | None]]
    sent: dict[str, list[list[float]]]


@lru_cache(maxsize=4096)
def _pattern(call: Call, cluster: Cluster) -> _Pattern:
    """Return the summary of a call's messages."""
    node_of = cluster.node_of
    pattern = _Pattern(Counter(), {kind: [[0, 0] for _ in node_of] for kind in KINDS})
    for messages, alike in groupby(_messages(call, cluster)):
        times = len(list(alike))
        heaviest: dict[str, float] = {}
        for (kind, *_), nbytes in loads_of(messages, node_of).items():
            kind = "inside" if kind == "inside" else "between"
            heaviest[kind] = max(heaviest.get(kind, 0), nbytes)
        pattern.rounds[heaviest.get("inside"), heaviest.get("between")] += times
        for source, destination, nbytes in messages:
            sent = pattern.sent[KINDS[node_of[source] != node_of[destination]]][source]
            sent[0] += nbytes * times
            sent[1] += times
    return pattern


def scaled(call: Call, cluster: Cluster) -> tuple[_Pattern, float]:
    """Return a pattern shared with calls of other sizes, if chunks are equal, and the factor of its
    bytes.
    """
    if call.pairs:
        return _pattern(call, cluster), 1.0
    numel = math.lcm(cluster.n, *cluster.sizes.values(), *cluster.nodes)
    pattern = _pattern(call._replace(numel=numel, itemsize=1), cluster)
    return pattern, call.numel * call.itemsize / numel


@dataclass(eq=False)
class Exchange:
    """An operation on a bucket, as one rank ran it.

    Attributes:
        key: the run of the bucket and its operation; None: communication outside of buckets.
        began: step from 0, and part of the step: "forward", "backward" or "step".
        cluster: the ranks.
        nbytes: bytes of the bucket, without padding.
        waited: time at which training waited for the end, in the form of ``began``; None: never.
        calls: communication calls.
        work: number of elements that this rank processes with each codec, or with a substitute's
            computation, by name.
        in_background: whether it belongs to a thread that nothing waits for.
    """

    key: Any
    began: tuple[int, str]
    cluster: Cluster
    nbytes: int
    waited: tuple[int, str] | None
    calls: list[Call] = field(default_factory=list)
    work: Counter[str] = field(default_factory=Counter)
    in_background: bool = False

    @property
    def delay(self) -> int:
        """Number of steps until training waits for the result."""
        return 0 if self.waited is None else self.waited[0] - self.began[0]

    @property
    def when(self) -> str:
        """Time at which the operation runs. "backward": from the readiness of the bucket's
        gradients; "pass": from the start of the forward pass; training waits for both at the end of
        the backward pass. "step": after the optimizer step, or synchronously. "background": nothing
        waits for it.
        """
        part = self.began[1]
        if self.waited is None:
            return "background"
        if self.delay or self.key is None or self.waited[1] == part != "backward":
            return "step"
        return {"forward": "pass"}.get(part, part)

    @property
    def operation(self) -> Operation:
        """The messages of all ranks, in rounds."""
        return [turn for call in self.calls for turn in _messages(call, self.cluster)]

    @property
    def turns(self) -> int:
        """Number of rounds after the first in all-to-alls and all-gathers; all of them could start
        together with the first.
        """
        return sum(
            max(0, self.cluster.sizes[call.among] - 2)
            for call in self.calls
            if call.collective in ("all_to_all", "all_gather")
        )
