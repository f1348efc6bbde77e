"""MXFP8 in NumPy (S12.1)."""

from __future__ import annotations

import numpy as np

from bagua_ref.backends import formats
from bagua_ref.backends.reference.blocks import Array, Scratch
from bagua_ref.backends.reference.codecs.mxfloat import FloatCodec

__all__ = ["MXFP8"]

_NAN = 0x7F


class MXFP8(FloatCodec, formats.MXFP8):
    """E4M3: bias 7, 3 bits of mantissa, largest 448."""

    bias, mantissa, largest = 7, 3, 0x7E

    def restore(self, codes: Array, exponent: Array, out: Array, buffers: Scratch) -> None:
        """Restore also the NaN of foreign payloads."""
        super().restore(codes, exponent, out, buffers)
        is_nan = (codes & _NAN) == _NAN
        if is_nan.any():
            out[is_nan] = np.nan
