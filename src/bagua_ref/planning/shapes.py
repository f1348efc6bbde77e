"""Shapes of a planned training: nodes of ranks, and parameters (S1, S2.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from bagua_ref.data_parallel.guard import TrainedParameters
from bagua_ref.data_parallel.parameters import split_into_buckets
from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import Operation

__all__ = ["Cluster", "module_of", "parameters_of"]

_SIDE = 1024
"""Rows and columns of the matrices of `module_of`."""


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes, numbered node by node (S1).

    Args:
        nodes: the number of ranks on each.

    Raises:
        ValueError: there are none, or a number is below 1.

    >>> Cluster((2, 1)).node_of, Cluster((2, 1)).leaders
    ([0, 0, 1], [0, 2])
    """

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes or not all(isinstance(size, int) and size > 0 for size in self.nodes):
            raise ValueError(f"nodes={self.nodes} must be numbers of ranks, each at least 1")

    @classmethod
    def even(cls, workers: int, nodes: int) -> Cluster:
        """Return ``workers`` ranks on ``nodes`` nodes, the first of which have one more if they are
        not equally many.

        >>> Cluster.even(5, 2)
        Cluster(nodes=(3, 2))
        """
        if not 1 <= nodes <= workers:
            raise ValueError(f"nodes={nodes} must be from 1 to the number of ranks, {workers}")
        return cls(tuple(costs.chunk_bytes(workers, 1, nodes)[::-1]))

    @property
    def n(self) -> int:
        """The number of ranks."""
        return sum(self.nodes)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of all ranks, of leaders, and of the ranks of the largest node."""
        return {"global": self.n, "inter": len(self.nodes), "intra": max(self.nodes)}

    @cached_property
    def places(self) -> list[list[int]]:
        """The ranks of each node."""
        return [
            list(range(end - size, end))
            for size, end in zip(self.nodes, accumulate(self.nodes), strict=True)
        ]

    @cached_property
    def node_of(self) -> list[int]:
        """The node of each rank."""
        return [node for node, ranks in enumerate(self.places) for _ in ranks]

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [ranks[0] for ranks in self.places]

    def between(self, operation: Operation) -> Operation:
        """Return an operation of the leaders, numbered from 0, in the numbers of all ranks."""
        return _among(operation, self.leaders)

    def inside(self, make: Callable[[int], Operation]) -> Operation:
        """Return operations inside all nodes at once; ``make(k)`` returns that of k ranks, numbered
        from 0.
        """
        own = [_among(make(len(ranks)), ranks) for ranks in self.places]
        return [
            [message for messages in rounds for message in messages]
            for rounds in zip_longest(*own, fillvalue=[])
        ]


def _among(operation: Operation, ranks: Sequence[int]) -> Operation:
    return [
        [(ranks[src], ranks[dst], nbytes) for src, dst, nbytes in messages]
        for messages in operation
    ]


def parameters_of(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Return the trained parameters of a module by name; they may be on the device "meta".

    Raises:
        ValueError: none of its parameters has an element that needs a gradient, or one is lazy.
        TypeError, NotImplementedError: it has parameters that cannot be trained.
    """
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            f"parameter {lazy[0]!r} has no shape yet; call the module once, or use one that is"
            " not lazy"
        )
    named: list[tuple[str, Tensor]] = list(TrainedParameters(module).named)
    split_into_buckets([parameter for _, parameter in named], 1)  # refuse what cannot be trained
    if not any(parameter.numel() for _, parameter in named):
        raise ValueError(f"module={type(module).__name__} has no parameters that need a gradient")
    return named


def module_of(elements: int) -> torch.nn.Module:
    """Return a module of so many parameters, without memory: float32 matrices of 1024 x 1024, and a
    vector of what is left.

    >>> [tuple(parameter.shape) for parameter in module_of(2**20 + 3).parameters()]
    [(1024, 1024), (3,)]

    Raises:
        ValueError: ``elements`` is not positive.
    """
    if elements < 1:
        raise ValueError(f"params={elements} must be a positive number of parameters")
    shapes: list[tuple[int, ...]] = [(_SIDE, _SIDE)] * (elements // _SIDE**2)
    shapes += [(elements % _SIDE**2,)] if elements % _SIDE**2 else []
    return torch.nn.ParameterList(
        torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes
    )
