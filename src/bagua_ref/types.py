"""Types shared by all layers: reduction operators, and protocols through which lower layers use
higher ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

__all__ = ["BackendTensor", "Group", "ReadinessSink", "ReduceOp", "Transport"]


class ReduceOp(IntEnum):
    """Reduction operator of a collective (S3.9), with the numbers of the original Bagua.

    AVG is SUM divided by the number of ranks and needs floating-point tensors; BAND, BOR and BXOR
    need integers.

    >>> ReduceOp.AVG
    <ReduceOp.AVG: 10>
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


class BackendTensor(ABC):
    """An object that represents a tensor in the collectives of a communicator (S3.9)."""

    @abstractmethod
    def effective_tensor(self) -> Tensor:
        """Return the tensor that communication works on."""


class Transport(Protocol):
    """The connections between the ranks of a world: torch.distributed, or the scheduler of a
    simulation.
    """

    node_of: tuple[int, ...]
    """The node of each global rank."""

    has_streams: bool
    """Whether a rank may use its own CUDA streams."""

    def connect(self, name: str, ranks: Sequence[int], timeout: float) -> Any:
        """Return this rank's Communicator for the global ``ranks``.

        Exactly these ranks call it, with the same ``name``, which no other group has; it returns
        when all have called it.
        """
        ...

    def close(self) -> None:
        """Release every connection."""
        ...


@runtime_checkable
class Group(Protocol):
    """The interface of process groups for bucket operations;
    `bagua_ref.communication.BaguaProcessGroup` implements it.
    """

    ranks: tuple[int, ...]

    timeout: float
    """Seconds without progress after which communication raises."""

    @property
    def bytes_sent(self) -> int:
        """The bytes sent by this rank in this group and its background groups, by formula."""
        ...

    @property
    def unrounded_bytes(self) -> float:
        """`bytes_sent` without rounding, for use in sums."""
        ...

    @property
    def nodes(self) -> dict[int, list[int]]:
        """The group's ranks by node, in group order."""
        ...

    def get_global_communicator(self) -> Any:
        """Return the communicator of all ranks of the group (S1)."""
        ...

    def get_inter_node_communicator(self) -> Any:
        """Return the communicator of the leaders (S1)."""
        ...

    def get_intra_node_communicator(self) -> Any:
        """Return the communicator of the group's ranks on this node (S1)."""
        ...

    def side_stream(self, device: Any) -> Any:
        """Return the CUDA stream of background operations; None: the caller's stream."""
        ...

    def for_background(self) -> Group:
        """Return a group of the same ranks for background threads."""
        ...

    def sibling(self) -> Group:
        """Return a background group of the same ranks with separate connections; all ranks call
        this in the same order.
        """
        ...

    def refuse_in_child(self) -> None:
        """Raise CommunicationError if this process was forked after the group was made."""
        ...

    def abort(self, why: str) -> None:
        """Abort all connections; operations on them raise, on other ranks with the reason."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


class ReadinessSink(Protocol):
    """The receiver of tensors' readiness, such as the scheduling engine."""

    def mark_ready(self, tensor: Tensor) -> None:
        """Mark ``tensor`` as ready in its bucket (S2.4)."""
        ...
