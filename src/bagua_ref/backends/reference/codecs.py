"""Codecs in tiled NumPy: MinMaxUInt8 (S4), blocks of 32 elements that share a power of two (S12.1),
and OneBit (S12.2).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import codec
from bagua_ref.backends.codec import BLOCK_SIZE, HEADER_BYTES, Microscaling
from bagua_ref.backends.reference.backend import Array, RowCodec, Scratch, reader, tiles, writer

__all__ = [
    "CODECS",
    "MXFP4",
    "MXFP8",
    "MXINT8",
    "BlockCodec",
    "FloatCodec",
    "MinMaxUInt8",
    "OneBit",
    "scaled",
]

_POISON = {
    torch.float16: np.frombuffer(bytes.fromhex("007e007e"), np.uint8),
    torch.bfloat16: np.frombuffer(bytes.fromhex("c07fc07f"), np.uint8),
    torch.float32: np.frombuffer(bytes.fromhex("0000c07f0000c07f"), np.uint8),
}
"""The bytes of the header NaN, NaN (S4.4), as the bits of a converted NaN are not specified."""

_NAN_SCALE = 255
_BIAS = 127
_INFINITY_BITS = 0x7F800000
_NAN = np.uint32(0x7FC00000)
_SCALE_BYTES = 4


class MinMaxUInt8(RowCodec, codec.MinMaxUInt8):
    """S4 with a matrix row for each chunk."""

    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the blocks of x's rows to payload's rows (S4.1, S4.2, S4.4); yield the number of
        final bytes of each.
        """
        low, high = _ends(x)
        scale, lower = grid_between(low, high)
        poisoned = ~np.isfinite(np.hstack([low, high, high - low, high * scale, low * scale])).all(
            axis=1, keepdims=True
        )
        payload_rows = payload.numpy()
        header = torch.from_numpy(np.hstack([low, high])).to(x.dtype).view(torch.uint8).numpy()
        payload_rows[:, :HEADER_BYTES] = 0
        payload_rows[:, : header.shape[1]] = np.where(poisoned, _POISON[x.dtype], header)
        payload_rows[:, HEADER_BYTES + x.shape[1] :] = 0
        levels = payload_rows[:, HEADER_BYTES : HEADER_BYTES + x.shape[1]]
        # Rounding is monotonic: if both ends are on the grid, all values are, and nothing needs to
        # be clipped.
        fits = (np.rint(low * scale) >= lower).all() and (
            np.rint(high * scale) - lower <= 255
        ).all()
        read = reader(x, buffers, 0)
        for rows, columns in tiles(*x.shape):
            tile = read((rows, columns))
            level = buffers.like(1, tile)
            np.multiply(tile, scale[rows], out=level)
            np.rint(level, out=level)
            # S4.2 takes the minimum with upper here. Rounding is monotonic, so x <= max implies
            # x*scale <= upper.
            np.subtract(level, lower[rows], out=level)
            if not fits:
                np.clip(level, 0, 255, out=level)
            np.copyto(levels[rows, columns], level, casting="unsafe")
            levels[rows, columns][poisoned[rows, 0]] = 0
            if rows.stop == len(levels):
                yield HEADER_BYTES + columns.stop

    def decode(self, payload: Tensor, out: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the values of payload's rows to out's rows (S4.3); yield the number of bytes of
        each that are needed next.
        """
        yield HEADER_BYTES
        item = out.element_size()
        header = (
            payload[:, : 2 * item]
            .clone(memory_format=torch.contiguous_format)
            .view(out.dtype)
            .float()
            .numpy()
        )
        scale, lower = grid_between(header[:, :1], header[:, 1:])
        levels = payload.numpy()[:, HEADER_BYTES : HEADER_BYTES + out.shape[1]]
        largest = np.float32(torch.finfo(out.dtype).max)
        fits = (np.abs(lower / scale) <= largest).all() and (
            np.abs((lower + np.float32(255)) / scale) <= largest
        ).all()
        target, write = reader(out, buffers, 0, fill=False), writer(out)
        for rows, columns in tiles(*out.shape):
            yield HEADER_BYTES + columns.stop
            value = target((rows, columns))
            np.copyto(value, levels[rows, columns])
            np.add(value, lower[rows], out=value)
            np.divide(value, scale[rows], out=value)
            if not fits:
                np.clip(value, -largest, largest, out=value)
            write((rows, columns), value)


def grid_between(low: Array, high: Array) -> tuple[Array, Array]:
    """Return scale and lower of the grids between minima and maxima, each operation in float32
    (S4.2).
    """
    scale = np.float32(255) / ((high - low) + np.float32(1e-7))
    upper = np.rint(high * scale)
    return scale, upper - np.float32(255)


def _ends(x: Tensor) -> tuple[Array, Array]:
    """Return each row's minimum and maximum as float32 columns, NaN where the row has one; a zero
    is +0; no columns: 0.
    """
    if x.shape[1] == 0:
        return np.zeros((x.shape[0], 1), np.float32), np.zeros((x.shape[0], 1), np.float32)
    low, high = (
        end(x, dim=1, keepdim=True).float().cpu().numpy() for end in (torch.amin, torch.amax)
    )
    zero = np.float32(0)
    return low + zero, high + zero


class BlockCodec(RowCodec, Microscaling):
    """An MX codec in terms of tiles: contiguous matrices with a row for each block of 32
    elements.
    """

    @abstractmethod
    def quantise(self, tile: Array, magnitude: Array, exponent: Array, buffers: Scratch) -> Array:
        """Return the elements of a tile as bytes: ``tile / 2^exponent``, rounded and saturated.

        Args:
            tile: blocks of float32 numbers; unchanged. The elements of a block that is not finite
                do not matter.
            magnitude: their absolute values; may be changed.
            exponent: a column of int32, one for each block.
            buffers: of which slots 3 and up are free.
        """

    @abstractmethod
    def restore(self, codes: Array, exponent: Array, out: Array, buffers: Scratch) -> None:
        """out <- the numbers of elements, given as bytes, times ``2^exponent``; arguments as for
        `quantise`.
        """

    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the blocks of x's rows to payload's rows."""
        scales, elements = self._parts(payload, x.shape[1])
        read = reader(x, buffers, 0)
        for rows, columns, blocks in _block_tiles(*x.shape):
            tile = _in_blocks(read((rows, columns)), buffers, fill=True)
            magnitude = buffers.like(2, tile)
            np.bitwise_and(tile.view(np.int32), 0x7FFFFFFF, out=magnitude.view(np.int32))
            # torch finds maxima of short rows several times as fast as NumPy. As integers, NaN is
            # above infinity.
            largest = torch.from_numpy(magnitude.view(np.int32)).amax(1, keepdim=True).numpy()
            poisoned = largest >= _INFINITY_BITS
            # The exponent's field of float32 has E8M0's bias, and is 0 for subnormals and zeros.
            scale = np.maximum((largest >> 23) - self.emax, 0)
            codes = self.quantise(tile, magnitude, scale - _BIAS, buffers)
            if poisoned.any():
                scale[poisoned], codes[poisoned[:, 0]] = _NAN_SCALE, 0
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
            if (scale == _NAN_SCALE).any():
                tile[scale[:, 0] == _NAN_SCALE] = np.nan
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
        """Write the codes of some columns, padded to whole blocks with zeros, to the bytes of
        elements.
        """
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
    """Yield rows, columns and blocks of tiles that are small enough even with padded last
    blocks.
    """
    for rows, whole in tiles(num_rows, -(-num_columns // BLOCK_SIZE) * BLOCK_SIZE):
        yield (
            rows,
            slice(whole.start, min(whole.stop, num_columns)),
            slice(whole.start // BLOCK_SIZE, whole.stop // BLOCK_SIZE),
        )


def _in_blocks(values: Array, buffers: Scratch, *, fill: bool) -> Array:
    """Return values as rows of 32, their own memory if each row consists of whole blocks, else a
    buffer, padded if ``fill``.
    """
    count, width = values.shape
    whole = -(-width // BLOCK_SIZE) * BLOCK_SIZE
    if whole == width:
        return values.reshape(-1, BLOCK_SIZE)
    padded: Array = buffers.tensor(1, count * whole, torch.float32).numpy().reshape(count, whole)
    if fill:
        padded[:, :width], padded[:, width:] = values, 0
    return padded.reshape(-1, BLOCK_SIZE)


_MANTISSA, _EXPONENT_BITS = 23, 0x7F800000  # of float32
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
        """Round by adding an anchor: 1.5 * 2^23 times the element's last place, so that the sum's
        low bits count last places.

        A number of q last places with exponent E has the code ``q + 2^mantissa * (E - smallest
        E)``, subnormals included.
        """
        scaled(magnitude, -exponent, out=magnitude)
        anchor = buffers.like(3, tile)
        bits = np.bitwise_and(magnitude.view(np.int32), _EXPONENT_BITS, out=anchor.view(np.int32))
        smallest = 1 - self.bias + _BIAS
        # NumPy's maximum of an array and a number is slow
        torch.from_numpy(bits).clamp_(min=smallest << _MANTISSA)
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
        torch.from_numpy(code).clamp_(max=self.largest).add_(
            torch.from_numpy(sign), alpha=1 << self.bits - 1
        )
        return code

    def restore(self, codes: Array, exponent: Array, out: Array, buffers: Scratch) -> None:
        """Shift the codes, whose signs are in the highest bit of their bytes, into float16s, and
        scale these.
        """
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


_NAN_CODE = 0x7F


class MXFP8(FloatCodec, codec.MXFP8):
    """E4M3: bias 7, 3 bits of mantissa, largest 448."""

    bias, mantissa, largest = 7, 3, 0x7E

    def restore(self, codes: Array, exponent: Array, out: Array, buffers: Scratch) -> None:
        """Restore also the NaN of foreign payloads."""
        super().restore(codes, exponent, out, buffers)
        is_nan = (codes & _NAN_CODE) == _NAN_CODE
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
        codes: Array = (
            torch.from_numpy(level).clamp_(-127, 127).to(torch.int8).view(torch.uint8).numpy()
        )
        return codes

    def restore(self, codes: Array, exponent: Array, out: Array, buffers: Scratch) -> None:
        """Scale the integers."""
        np.copyto(out, codes.view(np.int8))
        scaled(out, exponent - _FRACTION, out=out)


class OneBit(RowCodec, codec.OneBit):
    """Signs, and the root of the mean square."""

    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the blocks of x's rows to payload's rows."""
        array, (count, c) = payload.numpy(), x.shape
        squares = np.zeros(count)
        bits = array[:, HEADER_BYTES : HEADER_BYTES + -(-c // 8)]
        read = reader(x, buffers, 0)
        for rows, columns in tiles(count, c):
            tile = read((rows, columns))
            wide: Array = buffers.tensor(1, tile.size, torch.float64).numpy().reshape(tile.shape)
            np.copyto(wide, tile)
            squares[rows] += np.einsum("ij,ij->i", wide, wide)
            bits[rows, columns.start // 8 : -(-columns.stop // 8)] = np.packbits(tile >= 0, axis=1)
        if not c:
            return
        poisoned = ~np.isfinite(squares)  # float64 holds the square of every float32
        scale = np.sqrt(squares / c).astype(np.float32)
        array[:, :HEADER_BYTES], array[:, HEADER_BYTES + bits.shape[1] :] = 0, 0
        header = np.where(poisoned, _NAN, scale.view(np.uint32)).astype("<u4")
        array[:, :_SCALE_BYTES] = header.view(np.uint8).reshape(count, _SCALE_BYTES)
        bits[poisoned] = 0
        yield payload.shape[1]

    def decode(self, payload: Tensor, out: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the values of payload's rows to out's rows."""
        yield payload.shape[1]
        array, c = payload.numpy(), out.shape[1]
        scale = np.ascontiguousarray(array[:, :_SCALE_BYTES]).view("<f4")
        largest = np.float32(torch.finfo(out.dtype).max)
        positive = np.clip(scale, -largest, largest).view(np.uint32)
        target, write = reader(out, buffers, 0, fill=False), writer(out)
        for rows, columns in tiles(*out.shape):
            value = target((rows, columns))
            part = array[
                rows, HEADER_BYTES + columns.start // 8 : HEADER_BYTES + -(-columns.stop // 8)
            ]
            negative = value.view(np.uint32)
            np.copyto(
                negative, np.unpackbits(~part, axis=1, count=min(columns.stop, c) - columns.start)
            )
            np.left_shift(negative, 31, out=negative)
            np.bitwise_xor(negative, positive[rows], out=negative)
            write((rows, columns), value)


CODECS = {each.name: each for each in (MinMaxUInt8, MXFP8, MXFP4, MXINT8, OneBit)}
"""The codecs of the reference backend by name."""
