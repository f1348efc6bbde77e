"""The contract of a kernel backend: a dozen kernels on flat tensors, each with its exact rounding
(S1, S3, S5.5), and its codecs.

The public methods check arguments (with `bagua_ref.base.memory`), so that all backends raise the
same errors. A backend implements the methods with a leading underscore, which get valid arguments
and rounded numbers. `bagua_ref.backends.get_backend` returns a backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bagua_ref.backends.chunks import ChunkCoder
from bagua_ref.backends.codec import COMPRESSIBLE, Codec
from bagua_ref.base.memory import (
    check_beside,
    check_flat,
    check_parts,
    chunk_size_of,
    integer_in,
    rounded,
)

__all__ = ["FLOATS", "KernelBackend"]

FLOATS = (*COMPRESSIBLE, torch.float64)
"""The dtypes of all other arithmetic (S1)."""

_SORTABLE = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class KernelBackend(ABC):
    """Kernels on flat tensors.

    All kernels have in common:

    - Tensors are 1-D and contiguous, all on one device; they may be empty. Autograd does not record
      the kernels.
    - float16 and bfloat16 are computed in float32 and rounded once, when stored; float32 is
      computed in float32, float64 in float64. Each operation rounds to nearest-even: no fused
      multiply-add (S1).
    - Overflow gives an infinity and infinities may give NaN, silently.
    - Outputs must not overlap inputs.

    Raises, from every kernel:
        TypeError: the kernel does not support a dtype, or two dtypes should be equal and are not;
            the message names them.
        ValueError: device, shape, overlap, contiguity, num_chunks or target_chunk are invalid; the
            message names argument, value and what is allowed. Nothing has been written.

    Attributes:
        name: the backend's name for `bagua_ref.backends.get_backend`.
        device_types: the supported types of devices, such as ``("cuda",)``; None: any.
        codecs: classes of codecs by name, instantiated by `bagua_ref.backends.get_codec`.
        chunk_coder: class of the encoder of chunks' largest elements (S15.3).
    """

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...] | None] = None
    codecs: ClassVar[Mapping[str, type[Codec]]] = {}
    chunk_coder: ClassVar[type[ChunkCoder]] = ChunkCoder

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return the reason why this backend cannot run on this machine, or None."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # Element by element.

    def add_(self, x: Tensor, y: Tensor) -> None:
        """x <- x + y (S1).

        Args:
            x: m elements, float16, bfloat16, float32 or float64; changed in place.
            y: m elements of x's dtype; unchanged.

        >>> from bagua_ref.backends import get_backend
        >>> x = torch.ones(2); get_backend("reference").add_(x, torch.ones(2)); x
        tensor([2., 2.])
        """
        check_flat("x", x, FLOATS, self)
        check_beside("x", x, "y", y)
        self._add_(x, y)

    def subtract_(self, x: Tensor, y: Tensor) -> None:
        """x <- x - y (S1); arguments as for `add_`."""
        check_flat("x", x, FLOATS, self)
        check_beside("x", x, "y", y)
        self._subtract_(x, y)

    def add_scaled_(self, x: Tensor, y: Tensor, factor: float) -> None:
        """x <- x + factor * y, the product and then the sum rounded to float32, stored in x's dtype
        (S1, S3.5).

        Args:
            x: m elements, float16, bfloat16, float32 or float64; changed in place.
            y: m elements of x's dtype; unchanged.
            factor: converted to float32 (float64 if x is float64).

        >>> from bagua_ref.backends import get_backend
        >>> x = torch.ones(3); get_backend("reference").add_scaled_(x, torch.ones(3), 0.5); x
        tensor([1.5000, 1.5000, 1.5000])
        """
        check_flat("x", x, FLOATS, self)
        check_beside("x", x, "y", y)
        self._add_scaled_(x, y, rounded("factor", factor, x))

    def average_(self, x: Tensor, y: Tensor) -> None:
        """x <- (x + y) / 2, the sum rounded to float32, then halved, stored in x's dtype (S3.4).

        The sum may overflow where the mean would not; both ranks of a pair get the same bits, as
        the sum is commutative. Arguments as for `add_`.
        """
        check_flat("x", x, FLOATS, self)
        check_beside("x", x, "y", y)
        self._average_(x, y)

    def divide_(self, x: Tensor, divisor: float) -> None:
        """x <- x / divisor: a true division, not a product with the reciprocal (S3.3).

        Args:
            x: m elements, float16, bfloat16, float32 or float64; changed in place.
            divisor: converted to float32 (float64 if x is float64); not 0.
        """
        check_flat("x", x, FLOATS, self)
        number = rounded("divisor", divisor, x)
        if number == 0:
            raise ValueError(
                f"divisor={divisor!r} is 0 in {x.dtype} arithmetic; it must be another number"
            )
        self._divide_(x, number)

    def combine_ring_(self, x: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> None:
        """x += f32(1/3)*left; x += f32(1/3)*right; x += f32(-5/3)*weight: the first line of S3.5.

        Three times `add_scaled_`: x is stored in its dtype after each of them.

        Args:
            x: m elements, float16, bfloat16, float32 or float64; changed in place.
            left: m elements of x's dtype; unchanged.
            right: likewise; may overlap left.
            weight: likewise; may overlap left and right.
        """
        check_flat("x", x, FLOATS, self)
        check_beside("x", x, "left", left)
        check_beside("x", x, "right", right)
        check_beside("x", x, "weight", weight)
        self._combine_ring_(x, left, right, weight)

    def async_average_(self, x: Tensor, reduced: Tensor, snapshot: Tensor, nranks: int) -> None:
        """x <- x + (reduced / nranks - snapshot), each operation rounded to float32, stored once in
        x's dtype (S3.6).

        Args:
            x: m elements, float16, bfloat16, float32 or float64; changed in place.
            reduced: m elements, float32 (float64 if x is float64): the sum of all ranks' snapshots;
                unchanged.
            snapshot: m elements of x's dtype: this rank's snapshot; unchanged.
            nranks: the number of ranks in the sum, at least 1.
        """
        check_flat("x", x, FLOATS, self)
        check_beside(
            "x", x, "reduced", reduced, torch.float64 if x.dtype is torch.float64 else torch.float32
        )
        check_beside("x", x, "snapshot", snapshot)
        self._async_average_(x, reduced, snapshot, integer_in("nranks", nranks))

    def update_momentum_(self, m: Tensor, grad: Tensor, beta1: float) -> None:
        """m <- beta1*m + (1-beta1)*grad: both products rounded to float32, then their sum, stored
        in m's dtype (S5.5).

        Args:
            m: elements of float16, bfloat16, float32 or float64; changed in place.
            grad: the same number of elements, of m's dtype; unchanged.
            beta1: from 0 to 1. The factors are f32(beta1) and f32(1 - beta1), where 1 - beta1 is
                computed in double precision from the given beta1 (both stay double if m is
                float64).
        """
        check_flat("m", m, FLOATS, self)
        check_beside("m", m, "grad", grad)
        keep = rounded("beta1", beta1, m)
        if not 0 <= beta1 <= 1:
            raise ValueError(f"beta1={beta1!r} must be from 0 to 1")
        self._update_momentum_(m, grad, keep, rounded("beta1", 1.0 - beta1, m))

    # Chunks.

    def reduce_chunks_(self, x: Tensor, num_chunks: int, target_chunk: int, average: bool) -> None:
        """Chunk t <- (((+0 + chunk 0) + chunk 1) + ...), divided by num_chunks for the mean (S3.7).

        The sum, in this order, and the division are computed in float32 and rounded once. Only the
        target chunk changes.

        Args:
            x: num_chunks equal chunks, float16, bfloat16, float32 or float64.
            num_chunks: the number of chunks, at least 1.
            target_chunk: t, from 0 to num_chunks - 1; it is one of the summands, too.
            average: compute the mean instead of the sum.

        >>> from bagua_ref.backends import get_backend
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> get_backend("reference").reduce_chunks_(x, num_chunks=2, target_chunk=1, average=False); x
        tensor([1., 2., 4., 6.])
        """
        check_flat("x", x, FLOATS, self)
        chunk_size_of(x.numel(), num_chunks, target_chunk)
        self._reduce_chunks_(x, num_chunks, target_chunk, average)

    # Movement and order.

    def gather_flat(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Copy tensors of any shape and strides one after another into out, each in row-major order
        (S2.3).

        Args:
            tensors: tensors of out's dtype and device, whose total number of elements is out's.
            out: a tensor of any dtype; written.
        """
        check_flat("out", out, None, self)
        check_parts("out", out, tensors)
        self._gather_flat(tensors, out)

    def scatter_flat(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the elements of flat into the tensors: the inverse of `gather_flat` (S2.3).

        Args:
            flat: a tensor of any dtype; unchanged.
            tensors: tensors of flat's dtype and device, whose total number of elements is flat's;
                written.
        """
        check_flat("flat", flat, None, self)
        check_parts("flat", flat, tensors)
        self._scatter_flat(flat, tensors)

    def order_by_complexity(self, keys: Tensor) -> Tensor:
        """Return the int64 indices that sort keys in ascending order; the sort is stable and puts
        NaN last (S7.2).

        Args:
            keys: float or integer elements; unchanged.

        >>> from bagua_ref.backends import get_backend
        >>> get_backend("reference").order_by_complexity(torch.tensor([2, 1, 2, 0]))
        tensor([3, 1, 0, 2])
        """
        check_flat("keys", keys, _SORTABLE, self)
        return self._order_by_complexity(keys)

    # For a backend to implement: arguments are valid, numbers rounded.

    @abstractmethod
    def _add_(self, x: Tensor, y: Tensor) -> None: ...

    @abstractmethod
    def _subtract_(self, x: Tensor, y: Tensor) -> None: ...

    @abstractmethod
    def _add_scaled_(self, x: Tensor, y: Tensor, factor: float) -> None: ...

    @abstractmethod
    def _average_(self, x: Tensor, y: Tensor) -> None: ...

    @abstractmethod
    def _divide_(self, x: Tensor, divisor: float) -> None: ...

    @abstractmethod
    def _combine_ring_(self, x: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> None: ...

    @abstractmethod
    def _async_average_(
        self, x: Tensor, reduced: Tensor, snapshot: Tensor, nranks: int
    ) -> None: ...

    @abstractmethod
    def _update_momentum_(
        self, m: Tensor, grad: Tensor, beta1: float, one_minus_beta1: float
    ) -> None: ...

    @abstractmethod
    def _reduce_chunks_(
        self, x: Tensor, num_chunks: int, target_chunk: int, average: bool
    ) -> None: ...

    @abstractmethod
    def _gather_flat(self, tensors: Sequence[Tensor], out: Tensor) -> None: ...

    @abstractmethod
    def _scatter_flat(self, flat: Tensor, tensors: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def _order_by_complexity(self, keys: Tensor) -> Tensor: ...
