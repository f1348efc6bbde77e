"""Shapes of a planned training: nodes of ranks, parameters, and the buckets that wrapping would
make of them (S1, S2.1, S2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from bagua_ref.base.memory import by_dtype_and_device
from bagua_ref.data_parallel.guard import TrainedParameters
from bagua_ref.data_parallel.parameters import split_into_buckets
from bagua_ref.env import get_default_bucket_size
from bagua_ref.formulas import costs
from bagua_ref.formulas.costs import Operation

__all__ = ["BucketShape", "Cluster", "Parameters", "module_of"]

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


class BucketShape(NamedTuple):
    """A bucket's tensors by shape, their dtype, and the number of elements with padding (S2.2)."""

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    numel: int

    @classmethod
    def of(cls, tensors: Iterable[Tensor], alignment: int = 1) -> BucketShape:
        """Return the shape of a bucket of ``tensors``, which share a dtype, padded to a multiple of
        ``alignment``.
        """
        found = list(tensors)
        filled = sum(tensor.numel() for tensor in found)
        return cls(
            tuple(tensor.shape for tensor in found), found[0].dtype, filled + -filled % alignment
        )

    @property
    def filled(self) -> int:
        """The number of elements without padding."""
        return sum(map(math.prod, self.shapes))

    @property
    def nbytes(self) -> int:
        """The bytes, padding included."""
        return self.numel * self.dtype.itemsize


class Parameters:
    """The trained parameters of a module, by shape alone: they may be on the device "meta".

    Args:
        module: whose parameters they are; those that DDP or wrapping would ignore do not count.
        bucket_bytes: the size at which a bucket is closed; None:
            `bagua_ref.env.get_default_bucket_size`.

    Raises:
        ValueError: none of its parameters has an element that needs a gradient.
        TypeError, NotImplementedError: it has parameters that cannot be trained.

    >>> parameters = Parameters(torch.nn.Linear(3, 2))
    >>> parameters.buckets(alignment=4)
    [BucketShape(shapes=(torch.Size([2]), torch.Size([2, 3])), dtype=torch.float32, numel=8)]
    """

    def __init__(self, module: torch.nn.Module, bucket_bytes: int | None = None) -> None:
        if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
            raise ValueError(
                f"parameter {lazy[0]!r} has no shape yet; call the module once, or use one that is"
                " not lazy"
            )
        self.named = TrainedParameters(module).named
        self._in_order = [parameter for _, parameter in reversed(self.named)]
        self._bucket_bytes = get_default_bucket_size() if bucket_bytes is None else bucket_bytes
        split_into_buckets(self._in_order, 1)  # refuse what cannot be trained
        if not any(parameter.numel() for _, parameter in self.named):
            raise ValueError(
                f"module={type(module).__name__} has no parameters that need a gradient"
            )

    @property
    def nbytes(self) -> int:
        """The bytes of all of them."""
        return sum(parameter.numel() * parameter.element_size() for _, parameter in self.named)

    def buckets(self, alignment: int = 1) -> list[BucketShape]:
        """Return the buckets in the order in which they become ready in a backward pass (S2.1)."""
        return [
            BucketShape.of(tensors, alignment)
            for tensors in split_into_buckets(self._in_order, self._bucket_bytes)
        ]

    def whole(self) -> list[BucketShape]:
        """Return one bucket for each dtype (S5.3), in the order in which `buckets` first have
        it.
        """
        tensors = [
            tensor
            for bucket in split_into_buckets(self._in_order, self._bucket_bytes)
            for tensor in bucket
        ]
        return [BucketShape.of(alike) for alike in by_dtype_and_device(tensors)]


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
