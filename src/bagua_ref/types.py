"""Types shared by all layers: reduction operators and the protocols through which lower rooms see higher ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["BackendTensor", "BucketObserver", "Group", "ReadinessSink", "ReduceOp", "Transport"]


class ReduceOp(IntEnum):
    """How a reducing collective combines ranks (S3.9), with the numbers of the original Bagua.

    AVG is SUM divided by the number of ranks and needs floating-point tensors; BAND, BOR and BXOR need integers.

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
    """What stands for a tensor in the collectives of a communicator (S3.9)."""

    @abstractmethod
    def effective_tensor(self) -> Tensor:
        """Return the tensor that communication works on."""


class Transport(Protocol):
    """How a world connects ranks: torch.distributed in real life, the scheduler in a simulation."""

    node_of: tuple[int, ...]
    """The node of each global rank, by rank."""

    has_streams: bool
    """Whether a rank may work on CUDA streams of its own."""

    def connect(self, name: str, ranks: Sequence[int], timeout: float) -> Any:
        """Return this rank's Communicator for the global ``ranks``.

        Called by exactly these ranks, each with the same ``name``, which no other group has; blocks until all have called.
        """
        ...

    def close(self) -> None:
        """Release every connection."""
        ...


@runtime_checkable
class Group(Protocol):
    """What bucket operations need of a process group; `bagua_ref.communication.BaguaProcessGroup` is one."""

    ranks: tuple[int, ...]

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
        """Return the CUDA stream on which background operations run; None: the caller's."""
        ...

    def for_background(self) -> Group:
        """Return a group of the same ranks that no caller's thread uses."""
        ...

    def sibling(self) -> Group:
        """Return a background group of the same ranks with connections of its own; all ranks call this in the same order."""
        ...

    def close(self) -> None:
        """Give up all connections."""
        ...


class ReadinessSink(Protocol):
    """Where a tensor reports that it is ready; the scheduling engine is one."""

    def mark_ready(self, tensor: Tensor) -> None:
        """Tick ``tensor`` off in its bucket (S2.4)."""
        ...


class BucketObserver(Protocol):
    """Sees what goes into the operations of a world's buckets, and what comes out; it changes nothing and does not raise."""

    def before_op(self, bucket: Any, op: Any, flat: Tensor, divisor: int) -> None:
        """``op`` is about to run on ``flat``, whose elements have been divided by ``divisor`` on their way in."""
        ...

    def after_op(self, bucket: Any, op: Any, flat: Tensor) -> None:
        """``op`` has run on ``flat``."""
        ...

    def after_copy(self, bucket: Any, flat: Tensor) -> None:
        """``flat`` has been copied into the bucket's tensors, as a decentralized operation's result is."""
        ...
