"""MXFP8 and MXFP4: rounding in float32, decoding by way of float16, which holds every number of both formats (S12.1)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from bagua_ref.backends.reference.blocks import Array, Scratch
from bagua_ref.backends.reference.codecs.microscaling import BlockCodec, scaled

__all__ = ["FloatCodec"]

_BIAS, _MANTISSA, _EXPONENT_BITS = 127, 23, 0x7F800000  # of float32
_HALF_BIAS, _HALF_MANTISSA = 15, 10


class FloatCodec(BlockCodec):
    """Elements with an exponent.

    Attributes:
        bias: of the element's exponent.
        mantissa: bits of it.
        largest: the code of the largest finite number.
    """

    bias: ClassVar[int]
    mantissa: ClassVar[int]
    largest: ClassVar[int]

    def quantise(self, tile: Array, magnitude: Array, exponent: Array, buffers: Scratch) -> Array:
        """Let the addition of an anchor round: 1.5 * 2^23 times the element's last place, so that the sum's low bits count places.

        A number of q last places with exponent E has the code ``q + 2^mantissa * (E - smallest E)``, subnormals included.
        """
        scaled(magnitude, -exponent, out=magnitude)
        anchor = buffers.like(3, tile)
        bits = np.bitwise_and(magnitude.view(np.int32), _EXPONENT_BITS, out=anchor.view(np.int32))
        smallest = 1 - self.bias + _BIAS
        torch.from_numpy(bits).clamp_(min=smallest << _MANTISSA)  # NumPy's maximum of an array and a number is slow
        shift = _MANTISSA - self.mantissa
        np.add(bits, np.int32(shift << _MANTISSA | 1 << _MANTISSA - 1), out=bits)
        np.add(magnitude, anchor, out=magnitude)
        np.right_shift(bits, shift, out=bits)
        np.add(bits, magnitude.view(np.int32), out=bits)
        code: Array = buffers.tensor(4, tile.size, torch.uint8).numpy().reshape(tile.shape)
        np.copyto(code, bits, casting="unsafe")
        exponents_of_the_anchor = (smallest + shift << self.mantissa) + (1 << self.mantissa - 1)
        np.subtract(code, np.uint8(exponents_of_the_anchor % 256), out=code)
        sign = np.signbit(tile)
        torch.from_numpy(code).clamp_(max=self.largest).add_(torch.from_numpy(sign), alpha=1 << self.bits - 1)
        return code

    def restore(self, codes: Array, exponent: Array, out: Array, buffers: Scratch) -> None:
        """Shift the codes, whose signs are in the highest bit of their bytes, into float16s, and scale these."""
        half = buffers.tensor(4, out.size, torch.float16).view(out.shape)
        shifted = half.view(torch.int16).numpy()
        np.copyto(shifted, codes.view(np.int8))  # which extends the sign to the left
        shift = _HALF_MANTISSA - self.mantissa + self.bits - 8
        np.left_shift(shifted, shift, out=shifted)
        np.bitwise_and(shifted, np.int16(-0x8000 | 0x7F << shift), out=shifted)
        torch.from_numpy(out).copy_(half)
        exponent = exponent + (_HALF_BIAS - self.bias)
        scaled(out, np.minimum(exponent, 127), out=out)
        if exponent.max() > 127:  # 2**exponent is no float32, but the product may be
            scaled(out, np.maximum(exponent - 127, 0), out=out)
