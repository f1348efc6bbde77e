"""Codecs of blocks of 32 elements that share a power of two: MXFP8, MXFP4 and MXINT8 in NumPy (S12.1)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import codec
from bagua_ref.backends.codec import BLOCK_SIZE, Microscaling
from bagua_ref.backends.reference.backend import Array, RowCodec, Scratch, reader, tiles, writer

__all__ = ["MXFP4", "MXFP8", "MXINT8", "BlockCodec", "FloatCodec", "scaled"]

_POISON = 255
_BIAS = 127
_INFINITY_BITS = 0x7F800000


class BlockCodec(RowCodec, Microscaling):
    """An MX codec in terms of tiles: contiguous matrices with a row for each block of 32 elements."""

    @abstractmethod
    def quantise(self, tile: Array, magnitude: Array, exponent: Array, buffers: Scratch) -> Array:
        """Return the elements of a tile as bytes: ``tile / 2^exponent``, rounded and saturated.

        Args:
            tile: blocks of float32 numbers; unchanged. The elements of a block that is not finite do not matter.
            magnitude: their absolute values; may be changed.
            exponent: a column of int32, one for each block.
            buffers: of which slots 3 and up are free.
        """

    @abstractmethod
    def restore(self, codes: Array, exponent: Array, out: Array, buffers: Scratch) -> None:
        """out <- the numbers of elements, given as bytes, times ``2^exponent``; arguments as for `quantise`."""

    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the blocks of x's rows to payload's rows."""
        scales, elements = self._parts(payload, x.shape[1])
        read = reader(x, buffers, 0)
        for rows, columns, blocks in _block_tiles(*x.shape):
            tile = _in_blocks(read((rows, columns)), buffers, fill=True)
            magnitude = buffers.like(2, tile)
            np.bitwise_and(tile.view(np.int32), 0x7FFFFFFF, out=magnitude.view(np.int32))
            # torch finds maxima of short rows several times as fast as NumPy. As integers, NaN is above infinity.
            largest = torch.from_numpy(magnitude.view(np.int32)).amax(1, keepdim=True).numpy()
            poisoned = largest >= _INFINITY_BITS
            # The exponent's field of float32 has E8M0's bias, and is 0 for subnormals and zeros.
            scale = np.maximum((largest >> 23) - self.emax, 0)
            codes = self.quantise(tile, magnitude, scale - _BIAS, buffers)
            if poisoned.any():
                scale[poisoned], codes[poisoned[:, 0]] = _POISON, 0
            count = rows.stop - rows.start
            scales[rows, blocks] = scale.reshape(count, -1)
            self.store(codes.reshape(count, -1), elements[rows], columns)
        payload.numpy()[:, scales.shape[1] + elements.shape[1] :] = 0
        yield payload.shape[1]  # not before, as all scales come first

    def decode(self, payload: Tensor, out: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the values of payload's rows to out's rows."""
        scales, elements = self._parts(payload, out.shape[1])
        target, write = reader(out, buffers, 0, fill=False), writer(out)
        largest = torch.finfo(out.dtype).max
        for rows, columns, blocks in _block_tiles(*out.shape):
            yield scales.shape[1] + -(-columns.stop * self.bits // 8)
            value = target((rows, columns))
            tile = _in_blocks(value, buffers, fill=False)
            scale = scales[rows, blocks].reshape(-1, 1)
            exponent = scale.astype(np.int32) - _BIAS
            codes = self.load(elements[rows], columns)
            if codes.size != tile.size:
                codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % BLOCK_SIZE)))
            self.restore(codes.reshape(tile.shape), exponent, tile, buffers)
            if (scale == _POISON).any():
                tile[scale[:, 0] == _POISON] = np.nan
            if exponent.max() + self.emax + 1 >= math.frexp(largest)[1]:
                np.clip(tile, np.float32(-largest), np.float32(largest), out=tile)
            if tile.size != value.size:
                value[:] = tile.reshape(len(value), -1)[:, : value.shape[1]]
            write((rows, columns), value)

    def _parts(self, payload: Tensor, c: int) -> tuple[Array, Array]:
        """Return the scales and the elements of a payload's rows."""
        array, blocks = payload.numpy(), -(-c // BLOCK_SIZE)
        return array[:, :blocks], array[:, blocks : blocks + -(-c * self.bits // 8)]

    def store(self, codes: Array, elements: Array, columns: slice) -> None:
        """Write the codes of some columns, padded to whole blocks with zeros, to the bytes of elements."""
        elements[:, columns] = codes[:, : columns.stop - columns.start]

    def load(self, elements: Array, columns: slice) -> Array:
        """Return the codes of some columns from the bytes of elements."""
        return elements[:, columns]


def scaled(x: Array, exponent: Array, out: Array) -> None:
    """out <- x * 2^exponent, for a column of exponents from -149 to 127."""
    factor = np.ldexp(np.float32(1), exponent)
    # torch multiplies a short row with one number twice as fast as NumPy.
    torch.mul(torch.from_numpy(x), torch.from_numpy(factor), out=torch.from_numpy(out))


def _block_tiles(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield rows, columns and blocks of tiles that are small enough even with padded last blocks."""
    for rows, whole in tiles(num_rows, -(-num_columns // BLOCK_SIZE) * BLOCK_SIZE):
        yield rows, slice(whole.start, min(whole.stop, num_columns)), slice(whole.start // BLOCK_SIZE, whole.stop // BLOCK_SIZE)


def _in_blocks(values: Array, buffers: Scratch, *, fill: bool) -> Array:
    """Return values as rows of 32, their own memory if each row consists of whole blocks, else a buffer, padded if ``fill``."""
    count, width = values.shape
    whole = -(-width // BLOCK_SIZE) * BLOCK_SIZE
    if whole == width:
        return values.reshape(-1, BLOCK_SIZE)
    padded: Array = buffers.tensor(1, count * whole, torch.float32).numpy().reshape(count, whole)
    if fill:
        padded[:, :width], padded[:, width:] = values, 0
    return padded.reshape(-1, BLOCK_SIZE)


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
        """Round by adding an anchor: 1.5 * 2^23 times the element's last place, so that the sum's low bits count last places.

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


_NAN = 0x7F


class MXFP8(FloatCodec, codec.MXFP8):
    """E4M3: bias 7, 3 bits of mantissa, largest 448."""

    bias, mantissa, largest = 7, 3, 0x7E

    def restore(self, codes: Array, exponent: Array, out: Array, buffers: Scratch) -> None:
        """Restore also the NaN of foreign payloads."""
        super().restore(codes, exponent, out, buffers)
        is_nan = (codes & _NAN) == _NAN
        if is_nan.any():
            out[is_nan] = np.nan


class MXFP4(FloatCodec, codec.MXFP4):
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


_FRACTION = 6  # bits after the binary point


class MXINT8(BlockCodec, codec.MXINT8):
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
