"""MXFP4 in NumPy (S12.1)."""

from __future__ import annotations

import numpy as np

from bagua_ref.backends import formats
from bagua_ref.backends.reference.blocks import Array
from bagua_ref.backends.reference.codecs.mxfloat import FloatCodec

__all__ = ["MXFP4"]


class MXFP4(FloatCodec, formats.MXFP4):
    """E2M1: bias 1, 1 bit of mantissa, largest 6; two a byte."""

    bias, mantissa, largest = 1, 1, 0x7

    def store(self, codes: Array, elements: Array, columns: slice) -> None:
        """Put each second code into the high nibble of the one before it."""
        pairs = codes.view(np.uint16)  # little-endian: the first code is the low byte
        packed = np.bitwise_or(pairs, pairs >> 4, out=pairs).astype(np.uint8)
        first, last = columns.start // 2, -(-columns.stop // 2)
        elements[:, first:last] = packed[:, : last - first]

    def load(self, elements: Array, columns: slice) -> Array:
        """Return two codes of each byte, each in the upper half of its own."""
        pairs = elements[:, columns.start // 2 : -(-columns.stop // 2)].astype(np.uint16)
        codes: Array = ((pairs << 4 | pairs << 8) & 0xF0F0).view(np.uint8)
        return codes
