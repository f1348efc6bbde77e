"""The built-in formats of payloads: layout, rounding and bounds (S4, S12). Backends implement them."""

from __future__ import annotations

import torch

from bagua_ref.backends.codec import ALIGNMENT, Codec

__all__ = ["BLOCK_SIZE", "HEADER_BYTES", "MXFP4", "MXFP8", "MXINT8", "Microscaling", "MinMaxUInt8", "OneBit"]

HEADER_BYTES = 32
"""Length of the header of a MinMaxUInt8 or OneBit block, in bytes (S4.1, S12.2)."""

BLOCK_SIZE = 32
"""Elements that share a scale in the MX formats (S12.1)."""


class MinMaxUInt8(Codec):
    """One byte per element: 256 levels between the minimum and the maximum of each chunk (S4).

    The payload consists of one block for each chunk of c elements (S4.1)::

        byte 0            min, in x's dtype, little-endian; a zero is +0
        byte 2 or 4       max, likewise
        up to byte 32     zeros
        byte 32           c levels
        up to the next    zeros
        multiple of 32

    In float32, each operation rounded: ``scale = 255 / ((max - min) + 1e-7)``; ``upper = rint(max*scale)``;
    ``lower = upper - 255``; ``level = clamp(min(rint(x*scale), upper) - lower, 0, 255)`` (S4.2). It decodes to
    ``(level + lower) / scale``, with scale and lower computed again from the block's header (S4.3). A chunk with a value that is
    not finite, or whose max - min, max*scale or min*scale overflows, is poisoned: its header is NaN, NaN, its levels are 0, and it
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
    """Blocks of 32 elements of a chunk, each with a scale of a power of two: OCP Microscaling Formats (MX) v1.0 (S12.1).

    The payload of a chunk of c elements::

        byte 0            ceil(c/32) scales, E8M0: exponent + 127
        directly after    the elements
        up to the next    zeros
        multiple of 32

    ``exponent = floor(log2(max |x| of the block)) - emax``, between -127 and 127, -127 for zeros; an element is ``x / 2^exponent``
    rounded to nearest, ties to even, and no larger than the format's largest number. Subnormals of the format are kept, and so are
    the signs of zeros where it has them. A block with a value that is not finite is poisoned: scale byte 255, elements 0; it
    decodes to NaN (S12.3).

    Attributes:
        emax: exponent of the element format's largest power of two.
        bits: of an element.
    """

    emax: int
    bits: int

    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return the bytes of scales and elements, padded to a multiple of 32; 0 for an empty chunk."""
        return _padded(-(-c // BLOCK_SIZE) + -(-c * self.bits // 8))


class MXFP8(Microscaling):
    """E4M3 elements, one byte each: sign, 4 bits of exponent, 3 of mantissa; emax 8, largest 448 (S12.1).

    ``|x' - x| <= 2^-4 |x|``, or half the smallest subnormal 2^-9 times the scale where that is more; where an element saturates, at
    most 1/8 of its block's largest (S12.3). Foreign payloads: 0x7F and 0xFF decode to NaN.

    Source: OCP Microscaling Formats (MX) Specification v1.0, 2023.
    """

    name, emax, bits = "MXFP8", 8, 8


class MXFP4(Microscaling):
    """E2M1 elements, two a byte, the first in the low nibble: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; emax 2 (S12.1).

    ``|x' - x| <= 2^-2 |x|``, or a quarter of the scale where that is more; where an element saturates, at most 1/4 of its block's
    largest (S12.3). An odd chunk's last high nibble is 0.

    Source: OCP Microscaling Formats (MX) Specification v1.0, 2023.
    """

    name, emax, bits = "MXFP4", 2, 4


class MXINT8(Microscaling):
    """Elements ``int * 2^-6`` with an int from -127 to 127, one byte each in two's complement; emax 0 (S12.1).

    ``|x' - x| <= 2^(exponent - 7)``; where an element saturates, ``2^(exponent - 6)`` (S12.3). Foreign payloads: -128 decodes to
    -2.

    Source: OCP Microscaling Formats (MX) Specification v1.0, 2023.
    """

    name, emax, bits = "MXINT8", 0, 8


class OneBit(Codec):
    """One bit per element: the sign, and one magnitude s for each chunk (S12.2).

    The payload of a chunk of c elements::

        byte 0            s, float32, little-endian
        up to byte 32     zeros
        byte 32           bits ``x >= 0``, eight a byte, the first element in the highest bit
        up to the next    zeros
        multiple of 32

    ``s = sqrt((sum of x^2 in float64) / c)``, to 1 ulp; an element decodes to s or -s. A chunk with a value that is not finite is
    poisoned: s = NaN, bits 0; it decodes to NaN (S12.3). An empty chunk has no bytes. The error of a single element has no bound
    but the data's: train with error memory (S11.1).

    Source: Tang et al., "1-bit Adam", ICML 2021 (arXiv:2102.02888); Seide et al., "1-bit stochastic gradient descent", 2014.
    """

    name = "OneBit"
    biased = True

    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return ``32 + ceil(ceil(c/8)/32)*32``, 0 for an empty chunk."""
        return HEADER_BYTES + _padded(-(-c // 8)) if c else 0


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
