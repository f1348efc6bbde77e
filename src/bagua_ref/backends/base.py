"""The contract of a kernel backend: about a dozen kernels on flat tensors, each with its exact rounding (S1, S3, S4, S5.5).

Arguments are checked in front of the backends, once (the checks are in `bagua_ref.backends.checks`), so that all refuse the
same things with the same words. A backend fills in the methods with a leading underscore; they see only arguments that fit
and numbers that are already rounded. How to get a backend is in `bagua_ref.backends`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from bagua_ref.backends.checks import (
    at_least_one,
    check_beside,
    check_flat,
    check_parts,
    check_target_chunk,
    chunk_size_of,
    rounded,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["COMPRESSIBLE", "FLOATS", "HEADER_BYTES", "KernelBackend", "payload_bytes"]

COMPRESSIBLE = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that MinMaxUInt8 knows (S4.5)."""

FLOATS = (*COMPRESSIBLE, torch.float64)
"""The dtypes of all other arithmetic (S1)."""

HEADER_BYTES = 32
"""Length of a payload block's header, and what blocks are aligned to (S4.1)."""

_SORTABLE = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def payload_bytes(num_elements: int, num_chunks: int) -> int:
    """Return the size of the payload that `KernelBackend.compress_minmax_uint8` makes of so many elements (S4.1).

    One block of ``32 + ceil(c/32)*32`` bytes for each of the ``num_chunks`` chunks of c elements, whatever the dtype.

    Raises:
        ValueError: num_chunks is not positive or does not divide num_elements.

    >>> payload_bytes(100, num_chunks=2)
    192
    """
    chunk_size = chunk_size_of(num_elements, num_chunks)
    return num_chunks * (HEADER_BYTES + -(-chunk_size // HEADER_BYTES) * HEADER_BYTES)


class KernelBackend(ABC):
    """Kernels on flat tensors.

    Common to all of them:

    - Tensors are 1-D and contiguous, all on one device; empty ones are legal. Autograd does not see the kernels.
    - float16 and bfloat16 are computed in float32 and rounded once, when stored; float32 is computed in float32, float64 in
      float64. Every operation is rounded to nearest-even by itself: no fused multiply-add (S1).
    - Overflow gives an infinity and infinities may give NaN, silently, except where a clause says otherwise (S4.3, S4.4).
    - What is written must not overlap what is read.

    Raises, from every kernel:
        TypeError: a dtype that the kernel does not take, or two that should be equal and are not; the message names them.
        ValueError: device, shape, overlap, contiguity, num_chunks or target_chunk do not fit; the message names argument,
            value and what is allowed. Nothing has been written then.

    Attributes:
        name: what `bagua_ref.backends.get_backend` knows it by.
        device_types: the kinds of device whose tensors it takes, such as ``("cuda",)``; None: any.
    """

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...] | None] = None

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why this backend cannot run on this machine, None if it can."""
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
        self._check_target("x", x, FLOATS)
        check_beside("x", x, "y", y)
        self._add_(x, y)

    def subtract_(self, x: Tensor, y: Tensor) -> None:
        """x <- x - y (S1); arguments as for `add_`."""
        self._check_target("x", x, FLOATS)
        check_beside("x", x, "y", y)
        self._subtract_(x, y)

    def add_scaled_(self, x: Tensor, y: Tensor, factor: float) -> None:
        """x <- x + factor * y, the product and then the sum rounded to float32, stored in x's dtype (S1, S3.5).

        Args:
            x: m elements, float16, bfloat16, float32 or float64; changed in place.
            y: m elements of x's dtype; unchanged.
            factor: taken as float32 (float64 where x is).

        >>> from bagua_ref.backends import get_backend
        >>> x = torch.ones(3); get_backend("reference").add_scaled_(x, torch.ones(3), 0.5); x
        tensor([1.5000, 1.5000, 1.5000])
        """
        self._check_target("x", x, FLOATS)
        check_beside("x", x, "y", y)
        self._add_scaled_(x, y, rounded("factor", factor, x))

    def average_(self, x: Tensor, y: Tensor) -> None:
        """x <- (x + y) / 2, the sum rounded to float32, then halved, stored in x's dtype (S3.4).

        The sum may overflow where the mean would not; both ranks of a pair get the same bits, as the sum is commutative.
        Arguments as for `add_`.
        """
        self._check_target("x", x, FLOATS)
        check_beside("x", x, "y", y)
        self._average_(x, y)

    def divide_(self, x: Tensor, divisor: float) -> None:
        """x <- x / divisor: a true division, not a product with the reciprocal (S3.3).

        Args:
            x: m elements, float16, bfloat16, float32 or float64; changed in place.
            divisor: taken as float32 (float64 where x is); not 0.
        """
        self._check_target("x", x, FLOATS)
        number = rounded("divisor", divisor, x)
        if number == 0:
            raise ValueError(f"divisor={divisor!r} is 0 in {x.dtype} arithmetic; it must be another number")
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
        self._check_target("x", x, FLOATS)
        check_beside("x", x, "left", left)
        check_beside("x", x, "right", right)
        check_beside("x", x, "weight", weight)
        self._combine_ring_(x, left, right, weight)

    def async_average_(self, x: Tensor, reduced: Tensor, snapshot: Tensor, nranks: int) -> None:
        """x <- x + (reduced / nranks - snapshot), each operation rounded to float32, stored once in x's dtype (S3.6).

        Args:
            x: m elements, float16, bfloat16, float32 or float64; changed in place.
            reduced: m elements, float32 (float64 where x is): the sum of all ranks' snapshots; unchanged.
            snapshot: m elements of x's dtype: what this rank contributed; unchanged.
            nranks: how many ranks contributed, at least 1.
        """
        self._check_target("x", x, FLOATS)
        check_beside("x", x, "reduced", reduced, torch.float64 if x.dtype is torch.float64 else torch.float32)
        check_beside("x", x, "snapshot", snapshot)
        self._async_average_(x, reduced, snapshot, at_least_one("nranks", nranks))

    def update_momentum_(self, m: Tensor, grad: Tensor, beta1: float) -> None:
        """m <- beta1*m + (1-beta1)*grad: both products rounded to float32, then their sum, stored in m's dtype (S5.5).

        Args:
            m: elements of float16, bfloat16, float32 or float64; changed in place.
            grad: as many elements of m's dtype; unchanged.
            beta1: from 0 to 1. The factors are f32(beta1) and f32(1 - beta1), where 1 - beta1 is formed in double precision
                from beta1 as given (both stay double where m is float64).
        """
        self._check_target("m", m, FLOATS)
        check_beside("m", m, "grad", grad)
        keep = rounded("beta1", beta1, m)
        if not 0 <= beta1 <= 1:
            raise ValueError(f"beta1={beta1!r} must be from 0 to 1")
        self._update_momentum_(m, grad, keep, rounded("beta1", 1.0 - beta1, m))

    # Chunks.

    def reduce_chunks_(self, x: Tensor, num_chunks: int, target_chunk: int, average: bool) -> None:
        """Chunk t <- (((+0 + chunk 0) + chunk 1) + ...), divided by num_chunks for the mean (S3.7).

        Summed in this order in float32, divided in float32, rounded once. Only the target chunk changes.

        Args:
            x: num_chunks equal chunks, float16, bfloat16, float32 or float64.
            num_chunks: how many, at least 1.
            target_chunk: t, from 0 to num_chunks - 1; it is one of the summands too.
            average: the mean instead of the sum.

        >>> from bagua_ref.backends import get_backend
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> get_backend("reference").reduce_chunks_(x, num_chunks=2, target_chunk=1, average=False); x
        tensor([1., 2., 4., 6.])
        """
        self._check_target("x", x, FLOATS)
        chunk_size_of(x.numel(), num_chunks)
        check_target_chunk(target_chunk, num_chunks)
        self._reduce_chunks_(x, num_chunks, target_chunk, average)

    def compress_minmax_uint8(
        self, x: Tensor, num_chunks: int, target_chunk: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return x's chunks as one byte per element between each chunk's minimum and maximum (S4).

        The payload is one block after another, one for each chunk of c elements (S4.1)::

            byte 0            min, in x's dtype, little-endian; a zero is +0
            byte 2 or 4       max, likewise
            up to byte 32     zeros
            byte 32           c levels
            up to the next    zeros
            multiple of 32

        In float32, each operation rounded: ``scale = 255 / ((max - min) + 1e-7)``; ``upper = rint(max*scale)``;
        ``lower = upper - 255``; ``level = clamp(min(rint(x*scale), upper) - lower, 0, 255)`` (S4.2). A chunk with a value
        that is not finite, or whose max - min, max*scale or min*scale overflows, is poisoned: its header is NaN, NaN and its
        levels are 0 (S4.4). An empty chunk has the header 0, 0.

        Args:
            x: num_chunks equal chunks, float16, bfloat16 or float32; unchanged.
            num_chunks: how many, at least 1.
            target_chunk: write only this chunk's block and leave the others as they are (S4.5).
            out: the payload to write, ``payload_bytes(x.numel(), num_chunks)`` of uint8; None: a new one, zero where
                target_chunk leaves it untouched.

        >>> from bagua_ref.backends import get_backend
        >>> get_backend("reference").compress_minmax_uint8(torch.tensor([0.0, 1.0, 2.0]), num_chunks=1)[32:35].tolist()
        [0, 128, 255]
        """
        self._check_target("x", x, COMPRESSIBLE)
        size = payload_bytes(x.numel(), num_chunks)
        if target_chunk is not None:
            check_target_chunk(target_chunk, num_chunks)
        if out is None:
            make = torch.empty if target_chunk is None else torch.zeros
            out = make(size, dtype=torch.uint8, device=x.device)
        else:
            check_beside("x", x, "out", out, torch.uint8, size)
        self._compress_minmax_uint8(x, num_chunks, target_chunk, out)
        return out

    def decompress_minmax_uint8(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        """out <- (level + lower) / scale, with scale and lower computed again from each block's header (S4.3).

        What lies beyond the range of out's dtype is stored as its largest finite value, with its sign; a poisoned block gives
        NaN everywhere (S4.4).

        Args:
            payload: what `compress_minmax_uint8` made of as many elements of out's dtype in as many chunks; unchanged.
            num_chunks: how many, at least 1.
            out: the elements, float16, bfloat16 or float32; written.
        """
        self._check_target("out", out, COMPRESSIBLE)
        check_beside("out", out, "payload", payload, torch.uint8, payload_bytes(out.numel(), num_chunks))
        self._decompress_minmax_uint8(payload, num_chunks, out)

    # Movement and order.

    def gather_flat(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Copy tensors of any shape and strides one after another into out, each in row-major order (S2.3).

        Args:
            tensors: of out's dtype, on its device; together as many elements as out.
            out: of any dtype; written.
        """
        self._check_target("out", out)
        check_parts("out", out, tensors)
        self._gather_flat(tensors, out)

    def scatter_flat(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy flat's elements back into the tensors: the reverse of `gather_flat` (S2.3).

        Args:
            flat: of any dtype; unchanged.
            tensors: of flat's dtype, on its device; together as many elements as flat; written.
        """
        self._check_target("flat", flat)
        check_parts("flat", flat, tensors)
        self._scatter_flat(flat, tensors)

    def order_by_complexity(self, keys: Tensor) -> Tensor:
        """Return the int64 indices that sort keys in ascending order, equal ones in their order; NaN last (S7.2).

        Args:
            keys: float or integer elements; unchanged.

        >>> from bagua_ref.backends import get_backend
        >>> get_backend("reference").order_by_complexity(torch.tensor([2, 1, 2, 0]))
        tensor([3, 1, 0, 2])
        """
        self._check_target("keys", keys, _SORTABLE)
        return self._order_by_complexity(keys)

    # What a backend fills in: arguments fit, numbers are rounded.

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
    def _async_average_(self, x: Tensor, reduced: Tensor, snapshot: Tensor, nranks: int) -> None: ...

    @abstractmethod
    def _update_momentum_(self, m: Tensor, grad: Tensor, beta1: float, one_minus_beta1: float) -> None: ...

    @abstractmethod
    def _reduce_chunks_(self, x: Tensor, num_chunks: int, target_chunk: int, average: bool) -> None: ...

    @abstractmethod
    def _compress_minmax_uint8(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None: ...

    @abstractmethod
    def _decompress_minmax_uint8(self, payload: Tensor, num_chunks: int, out: Tensor) -> None: ...

    @abstractmethod
    def _gather_flat(self, tensors: Sequence[Tensor], out: Tensor) -> None: ...

    @abstractmethod
    def _scatter_flat(self, flat: Tensor, tensors: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def _order_by_complexity(self, keys: Tensor) -> Tensor: ...

    def _check_target(self, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] | None = None) -> None:
        check_flat(name, x, dtypes)
        if self.device_types is not None and x.device.type not in self.device_types:
            raise ValueError(f"{name} is on {x.device}; backend {self.name!r} works on {', '.join(self.device_types)} tensors")
