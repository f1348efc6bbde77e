"""The contract of codecs, which compress equal chunks of a flat tensor to bytes, and the built-in
formats (S4, S12).

The public methods check arguments, so that all codecs raise the same errors. A codec implements the
methods with a leading underscore, and `payload_bytes`; backends implement the built-in formats.
`bagua_ref.backends.get_codec` returns a codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from bagua_ref.base.memory import check_beside, check_flat, chunk_size_of
from bagua_ref.observe.meter import codec_phase, steps_in

__all__ = [
    "ALIGNMENT",
    "COMPRESSIBLE",
    "HEADER_BYTES",
    "MXFP4",
    "MXFP8",
    "MXINT8",
    "NVFP4",
    "Codec",
    "Kernels",
    "Microscaling",
    "MinMaxUInt8",
    "OneBit",
    "with_rules",
]

COMPRESSIBLE = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that codecs support (S4.5, S12)."""

ALIGNMENT = 32
"""The size of each chunk's payload is a multiple of this many bytes (S4.1, S12)."""

HEADER_BYTES = 32
"""Length of the header of a MinMaxUInt8, OneBit or NVFP4 block, in bytes (S4.1, S12.2, S12.7)."""


class Kernels(Protocol):
    """Protocol of the `bagua_ref.backends.KernelBackend` attributes that validation needs."""

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...] | None]


class Codec(ABC):
    """A payload format, as implemented by one backend.

    Tensors are 1-D and contiguous, on one device; they may be empty. Payloads are uint8,
    ``num_chunks`` blocks of equal size. A chunk of c elements has the same block whatever the other
    chunks are, and whatever the payload held before.

    Args:
        kernels: the kernel backend that runs the codec.

    Raises, from compress and decompress:
        TypeError: a dtype other than those of `COMPRESSIBLE`, or a payload that is not uint8; the
            message names them.
        ValueError: device, shape, overlap, contiguity, num_chunks or target_chunk are invalid; the
            message names argument, value and what is allowed. Nothing has been written.

    Attributes:
        name: the codec's name for `bagua_ref.backends.get_codec`.
        biased: whether it is useful only with error memory (S11.1); `compression=` warns without
            one.
    """

    name: ClassVar[str]
    biased: ClassVar[bool] = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for whole, in_steps, at_once in (
            ("compress", "compress_in_steps", Codec._compress_at_once),
            ("decompress", "decompress_in_steps", Codec._decompress_at_once),
            ("_compress", "_compress_in_steps", Codec._compress_in_steps),
            ("_decompress", "_decompress_in_steps", Codec._decompress_in_steps),
        ):
            # inherited steps would not match this class's methods
            if whole in vars(cls) and in_steps not in vars(cls):
                setattr(cls, in_steps, at_once)

    @abstractmethod
    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return the size in bytes of the payload of one chunk, a multiple of `ALIGNMENT`.

        Args:
            c: the number of elements in the chunk, at least 0.
            dtype: their dtype, one of `COMPRESSIBLE`.
        """

    def compress(
        self, x: Tensor, num_chunks: int, target_chunk: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the payload of x: one block of `payload_bytes` bytes for each chunk.

        Args:
            x: num_chunks equal chunks, float16, bfloat16 or float32; unchanged.
            num_chunks: the number of chunks, at least 1.
            target_chunk: write only the block of this chunk and leave the others unchanged (S4.5).
            out: the payload to write; None: a new one, with zeros in the blocks that target_chunk
                excludes.

        >>> from bagua_ref.backends import get_codec
        >>> get_codec("MinMaxUInt8").compress(torch.tensor([0.0, 1.0, 2.0]), num_chunks=1)[32:35].tolist()
        [0, 128, 255]
        """
        size = self._check("x", x, num_chunks, "out", out, target_chunk)
        if out is None:
            out = (torch.empty if target_chunk is None else torch.zeros)(
                size, dtype=torch.uint8, device=x.device
            )
        with codec_phase("compress"):
            self._compress(x, num_chunks, target_chunk, out)
        return out

    def compress_in_steps(
        self, x: Tensor, num_chunks: int, target_chunk: int | None = None, *, out: Tensor
    ) -> Iterator[int]:
        """Run `compress` step by step, so that the first bytes of each block can be sent while
        later ones are being computed.

        Yields:
            The number of leading bytes of each block that are final, never fewer than before; at
            last, all. The elements that `decompress_in_steps` makes of these bytes are not read
            again.

        >>> from bagua_ref.backends import get_codec
        >>> payload = torch.empty(64, dtype=torch.uint8)
        >>> list(get_codec("MinMaxUInt8").compress_in_steps(torch.tensor([0.0, 1.0, 2.0]), num_chunks=1, out=payload))
        [35, 64]
        """
        self._check("x", x, num_chunks, "out", out, target_chunk)
        return steps_in(
            partial(codec_phase, "compress"),
            self._compress_in_steps(x, num_chunks, target_chunk, out),
        )

    def decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        """out <- the decoded values of a payload, saturated at the range of out's dtype (S4.3).

        Args:
            payload: of `compress`, for the same number of elements, dtype and chunks, or of any
                bytes; unchanged.
            num_chunks: the number of chunks, at least 1.
            out: the elements, float16, bfloat16 or float32; written.
        """
        self._check("out", out, num_chunks, "payload", payload)
        with codec_phase("decompress"):
            self._decompress(payload, num_chunks, out)

    def decompress_in_steps(self, payload: Tensor, num_chunks: int, out: Tensor) -> Iterator[int]:
        """Run `decompress` step by step, so that the first bytes of each block can be decompressed
        while later ones are arriving.

        Yields:
            The number of leading bytes of each block that the next step reads, never fewer than
            before.

        >>> from bagua_ref.backends import get_codec
        >>> list(get_codec("MinMaxUInt8").decompress_in_steps(torch.zeros(64, dtype=torch.uint8), 1, out=torch.zeros(3)))
        [32, 35]
        """
        self._check("out", out, num_chunks, "payload", payload)
        return steps_in(
            partial(codec_phase, "decompress"), self._decompress_in_steps(payload, num_chunks, out)
        )

    @abstractmethod
    def _compress(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None:
        """Implement `compress`: fill one block of out, or all, from validated arguments."""

    @abstractmethod
    def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        """Implement `decompress`: fill out, from validated arguments."""

    def _compress_in_steps(
        self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor
    ) -> Iterator[int]:
        """Implement `compress_in_steps` for validated arguments; the default compresses in a single
        step.
        """
        self._compress(x, num_chunks, target_chunk, out)
        yield out.numel() // num_chunks

    def _decompress_in_steps(self, payload: Tensor, num_chunks: int, out: Tensor) -> Iterator[int]:
        """Implement `decompress_in_steps` for validated arguments; the default decompresses in a
        single step.
        """
        yield payload.numel() // num_chunks
        self._decompress(payload, num_chunks, out)

    def _compress_at_once(
        self, x: Tensor, num_chunks: int, target_chunk: int | None = None, *, out: Tensor
    ) -> Iterator[int]:
        self.compress(x, num_chunks, target_chunk, out=out)
        yield out.numel() // num_chunks

    def _decompress_at_once(self, payload: Tensor, num_chunks: int, out: Tensor) -> Iterator[int]:
        yield payload.numel() // num_chunks
        self.decompress(payload, num_chunks, out)

    def _check(
        self,
        x_name: str,
        x: Tensor,
        num_chunks: int,
        payload_name: str,
        payload: Tensor | None,
        target_chunk: int | None = None,
    ) -> int:
        """Validate the elements, the number of chunks and, if there is one, the payload; return the
        payload's size in bytes.
        """
        check_flat(x_name, x, COMPRESSIBLE, self.kernels)
        size = num_chunks * self.payload_bytes(
            chunk_size_of(x.numel(), num_chunks, target_chunk), x.dtype
        )
        if payload is not None:
            check_beside(x_name, x, payload_name, payload, torch.uint8, size)
        return size


class MinMaxUInt8(Codec):
    """One byte per element: 256 levels between the minimum and the maximum of each chunk (S4).

    The payload consists of one block for each chunk of c elements (S4.1)::

        byte 0            min, in x's dtype, little-endian; a zero is +0
        byte 2 or 4       max, likewise
        up to byte 32     zeros
        byte 32           c levels
        up to the next    zeros
        multiple of 32

    In float32, each operation rounded: ``scale = 255 / ((max - min) + 1e-7)``; ``upper =
    rint(max*scale)``; ``lower = upper - 255``; ``level = clamp(min(rint(x*scale), upper) - lower,
    0, 255)`` (S4.2). It decodes to ``(level + lower) / scale``, with scale and lower computed again
    from the block's header (S4.3). A chunk with a value that is not finite, or whose max - min,
    max*scale or min*scale overflows, is poisoned: its header is NaN, NaN, its levels are 0, and it
    decodes to NaN (S4.4). An empty chunk has the header 0, 0.

    Source: MinMaxUInt8 of Gan et al., "BAGUA", VLDB 2022 (arXiv:2107.01499).
    """

    name = "MinMaxUInt8"

    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return ``32 + ceil(c/32)*32``.

        >>> from bagua_ref.backends import get_codec
        >>> import torch
        >>> get_codec("MinMaxUInt8").payload_bytes(50, torch.float32)
        96
        """
        return HEADER_BYTES + _padded(c)


class Microscaling(Codec):
    """Blocks of 32 elements of a chunk, each with a scale of a power of two: OCP Microscaling
    Formats (MX) v1.0 (S12.1).

    The payload of a chunk of c elements::

        byte 0            ceil(c/32) scales, E8M0: exponent + 127
        directly after    the elements
        up to the next    zeros
        multiple of 32

    ``exponent = floor(log2(max |x| of the block)) - emax``, between -127 and 127, -127 for zeros;
    an element is ``x / 2^exponent`` rounded to nearest, ties to even, and no larger than the
    format's largest number. Subnormals of the format are kept, and so are the signs of zeros where
    it has them. A block with a value that is not finite is poisoned: scale byte 255, elements 0; it
    decodes to NaN (S12.3).

    That is the rule FLOOR. MXFP8 and MXFP4 have three more, whose names are appended, as in
    ``"MXFP8-RCEIL"`` (S12.6). With the bits of the block's ``max |x|``, a float32, the scale byte of
    every rule is ``max((bits + r) // 2^23 - emax, 0)``, in integers and so exact:

    ====== ============================================== ========= =========
    rule   what the exponent is                            r, MXFP8  r, MXFP4
    ====== ============================================== ========= =========
    FLOOR  ``floor(log2(max)) - emax``                             0         0
    RCEIL  ``ceil(log2(max / largest))``                    0x1FFFFF  0x3FFFFF
    EVEN   FLOOR's, of max rounded half up to the            0x80000  0x200000
           element's mantissa
    CEIL   ``ceil(log2(max)) - emax``                       0x7FFFFF  0x7FFFFF
    ====== ============================================== ========= =========

    With RCEIL and CEIL no element saturates.

    Attributes:
        emax: exponent of the element format's largest power of two.
        bits: number of bits of an element.
        block: number of elements that share a scale.
        header: number of bytes before the scales.
        rules: the other rules, by name, and the number r that each adds to the bits of ``max |x|``.
        rounding: the number r of this codec.
    """

    emax: int
    bits: int
    block: ClassVar[int] = 32
    header: ClassVar[int] = 0
    rules: ClassVar[dict[str, int]] = {}
    rounding: ClassVar[int] = 0

    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return the size of header, scales and elements, padded to a multiple of 32; 0 for an
        empty chunk.

        >>> from bagua_ref.backends import get_codec
        >>> import torch
        >>> [get_codec(name).payload_bytes(1000, torch.float32) for name in ("MXFP8", "MXFP4", "NVFP4")]
        [1056, 544, 608]
        """
        return self.header * (c > 0) + _padded(-(-c // self.block) + -(-c * self.bits // 8))


AnyMicroscaling = TypeVar("AnyMicroscaling", bound=Microscaling)


def with_rules(codec: type[AnyMicroscaling]) -> dict[str, type[AnyMicroscaling]]:
    """Return a backend's codecs of an MX format, one per scale rule, by name (S12.6).

    Args:
        codec: class of the codec without a rule in its name; the others are subclasses that differ
            in `Microscaling.rounding`.

    >>> from bagua_ref.backends.reference.codecs import MXFP4
    >>> {name: hex(found.rounding) for name, found in with_rules(MXFP4).items()}
    {'MXFP4': '0x0', 'MXFP4-RCEIL': '0x3fffff', 'MXFP4-EVEN': '0x200000', 'MXFP4-CEIL': '0x7fffff'}
    """
    found = {codec.name: codec}
    for rule, rounding in codec.rules.items():
        name = f"{codec.name}-{rule}"
        attributes: dict[str, Any] = {"name": name, "rounding": rounding, "__doc__": codec.__doc__}
        found[name] = type(name, (codec,), attributes)
    return found


class MXFP8(Microscaling):
    """E4M3 elements, one byte each: sign, 4 bits of exponent, 3 of mantissa; emax 8, largest 448
    (S12.1).

    ``|x' - x| <= 2^-4 |x|``, or half the smallest subnormal 2^-9 times the scale where that is
    more; where an element saturates, at most 1/8 of its block's largest, with EVEN less than 3/31
    (S12.3, S12.6). Foreign payloads: 0x7F and 0xFF decode to NaN.

    Source: OCP Microscaling Formats (MX) Specification v1.0, 2023.
    """

    name, emax, bits = "MXFP8", 8, 8
    rules: ClassVar = {"RCEIL": 0x1FFFFF, "EVEN": 0x80000, "CEIL": 0x7FFFFF}


class MXFP4(Microscaling):
    """E2M1 elements, two a byte, the first in the low nibble: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
    negatives; emax 2 (S12.1).

    ``|x' - x| <= 2^-2 |x|``, or a quarter of the scale where that is more; where an element
    saturates, at most 1/4 of its block's largest, with EVEN less than 1/7 (S12.3, S12.6). An odd
    chunk's last high nibble is 0.

    Source: OCP Microscaling Formats (MX) Specification v1.0, 2023.
    """

    name, emax, bits = "MXFP4", 2, 4
    rules: ClassVar = {"RCEIL": 0x3FFFFF, "EVEN": 0x200000, "CEIL": 0x7FFFFF}


class MXINT8(Microscaling):
    """Elements ``int * 2^-6`` with an int from -127 to 127, one byte each in two's complement; emax
    0 (S12.1).

    ``|x' - x| <= 2^(exponent - 7)``; where an element saturates, ``2^(exponent - 6)`` (S12.3).
    Foreign payloads: -128 decodes to
    -2.

    Source: OCP Microscaling Formats (MX) Specification v1.0, 2023.
    """

    name, emax, bits = "MXINT8", 0, 8


class NVFP4(Microscaling):
    """MXFP4's elements in blocks of 16, whose scales are E4M3, with a float32 for the chunk (S12.7).

    The payload of a chunk of c elements::

        byte 0            t, float32, little-endian
        up to byte 32     zeros
        byte 32           ceil(c/16) scales s, E4M3
        directly after    the elements
        up to the next    zeros
        multiple of 32

    In float32, each operation rounded, with the chunk's ``A = max |x|``, a block's ``b = max |x|``
    and F the largest float32: ``S = min(2688/A, F)``, 1 if A is 0; ``t = 1/S``; ``s =
    E4M3(b*(S*float32(1/6)))``, at most 448, perhaps subnormal or 0; ``u = min(1/(s*t), F)``; an
    element is ``x*u`` rounded to nearest, ties to even, at most 6. It decodes to
    ``(element*s)*t``. A chunk with a value that is not finite is poisoned: t = NaN, all others 0;
    it decodes to NaN. An empty chunk has no bytes.

    For ``A >= 2^-100``, ``|x' - x| <= max(|x|, s*t)/4``; where an element saturates, at most b/17,
    or ``6*2^-10*t`` if s is below 2^-6; and roundings to float32, up to ``2^-21 |x|``.

    Source: NVIDIA Transformer Engine, without its stochastic rounding and rotation.
    """

    name, emax, bits, block, header = "NVFP4", 2, 4, 16, HEADER_BYTES


class OneBit(Codec):
    """One bit per element: the sign, and one magnitude s for each chunk (S12.2).

    The payload of a chunk of c elements::

        byte 0            s, float32, little-endian
        up to byte 32     zeros
        byte 32           bits ``x >= 0``, eight a byte, the first element in the highest bit
        up to the next    zeros
        multiple of 32

    ``s = sqrt((sum of x^2 in float64) / c)``, to 1 ulp; an element decodes to s or -s. A chunk with
    a value that is not finite is
    poisoned: s = NaN, bits 0; it decodes to NaN (S12.3). An empty chunk has no bytes. The error of
    a single element has no bound but the data's: train with error memory (S11.1).

    Source: Tang et al., "1-bit Adam", ICML 2021 (arXiv:2102.02888); Seide et al., "1-bit stochastic
    gradient descent", 2014.
    """

    name = "OneBit"
    biased = True

    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return ``32 + ceil(ceil(c/8)/32)*32``, 0 for an empty chunk."""
        return HEADER_BYTES + _padded(-(-c // 8)) if c else 0


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
