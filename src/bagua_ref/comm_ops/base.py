"""The base class of bucket operations, which work on a bucket's flat tensor together with the other ranks (S3)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.communicators.base import Communicator

__all__ = ["CommOp"]


class CommOp(ABC):
    """One operation of S3: ``kernels`` compute, ``comm`` moves data. It knows nothing of buckets.

    Args:
        comm: the communicator of the ranks that take part; all of them run the operation.
        kernels: the kernel backend.
    """

    def __init__(self, comm: Communicator, kernels: KernelBackend) -> None:
        self.comm, self.kernels = comm, kernels

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.comm!r})"

    @abstractmethod
    def __call__(self, x: Tensor) -> None:
        """Run on ``x``, the flat contiguous tensor of a bucket, padding included."""
