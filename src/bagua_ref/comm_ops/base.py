"""The base class of bucket operations, which work on a bucket's flat tensor together with the other ranks (S3), and Python's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.communicators.base import Communicator

__all__ = ["CommOp", "PythonOp"]


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


class PythonOp:
    """``function(bucket_name)``, called on the background worker; it may read and write the bucket's tensors (S3.8)."""

    def __init__(self, function: Callable[[str], object], bucket_name: str) -> None:
        self.function, self.bucket_name = function, bucket_name

    def __repr__(self) -> str:
        return f"PythonOp({getattr(self.function, '__qualname__', self.function)})"

    def __call__(self, x: Tensor) -> None:
        """Call the function. It does not get ``x``, the bucket's flat tensor: it accesses the bucket itself."""
        self.function(self.bucket_name)
