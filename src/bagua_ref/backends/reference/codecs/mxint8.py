"""MXINT8 in NumPy (S12.1)."""

from __future__ import annotations

import numpy as np
import torch

from bagua_ref.backends import formats
from bagua_ref.backends.reference.blocks import Array, Scratch
from bagua_ref.backends.reference.codecs.microscaling import BlockCodec, scaled

__all__ = ["MXINT8"]

_FRACTION = 6  # bits after the binary point


class MXINT8(BlockCodec, formats.MXINT8):
    """Integers from -127 to 127, in units of 2^-6."""

    def quantise(self, tile: Array, magnitude: Array, exponent: Array, buffers: Scratch) -> Array:
        """Round to integers."""
        level, exponent = magnitude, _FRACTION - exponent
        scaled(tile, np.minimum(exponent, 127), out=level)
        if exponent.max() > 127:  # 2**exponent is no float32
            scaled(level, np.maximum(exponent - 127, 0), out=level)
        np.rint(level, out=level)
        codes: Array = torch.from_numpy(level).clamp_(-127, 127).to(torch.int8).view(torch.uint8).numpy()
        return codes

    def restore(self, codes: Array, exponent: Array, out: Array, buffers: Scratch) -> None:
        """Scale the integers."""
        np.copyto(out, codes.view(np.int8))
        scaled(out, exponent - _FRACTION, out=out)
