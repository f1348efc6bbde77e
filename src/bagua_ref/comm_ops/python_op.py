"""A Python function as a bucket operation (S3.8)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["PythonOp"]


class PythonOp:
    """``function(bucket_name)``, called on the background worker; it may read and write the bucket's tensors (S3.8)."""

    def __init__(self, function: Callable[[str], object], bucket_name: str) -> None:
        self.function, self.bucket_name = function, bucket_name

    def __repr__(self) -> str:
        return f"PythonOp({getattr(self.function, '__qualname__', self.function)})"

    def __call__(self, x: Tensor) -> None:
        """Call the function. It does not get ``x``, the bucket's flat tensor: it accesses the bucket itself."""
        self.function(self.bucket_name)
