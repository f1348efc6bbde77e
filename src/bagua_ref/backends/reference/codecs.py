"""Codecs in tiled NumPy: MinMaxUInt8 (S4), blocks of elements that share a scale (S12.1, S12.6,
S12.7), and OneBit (S12.2).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import codec
from bagua_ref.backends.codec import HEADER_BYTES, Codec, Microscaling, with_rules
from bagua_ref.backends.reference.backend import Array, RowCodec, Scratch, reader, tiles, writer

__all__ = [
    "CODECS",
    "MXFP4",
    "MXFP8",
    "MXINT8",
    "NVFP4",
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
    """MinMaxUInt8 (S4), with one matrix row per chunk."""

    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Encode x's rows into payload's rows (S4.1, S4.2, S4.4); yield the number of final bytes
        in each row.
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
        """Decode payload's rows into out's rows (S4.3); yield the number of bytes needed next from
        each row.
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
    """Return scale and lower bound of the grids between minima and maxima, computed in float32
    (S4.2).
    """
    scale = np.float32(255) / ((high - low) + np.float32(1e-7))
    upper = np.rint(high * scale)
    return scale, upper - np.float32(255)


def _ends(x: Tensor) -> tuple[Array, Array]:
    """Return each row's minimum and maximum as float32 columns: NaN for a row with a NaN, +0 for a
    zero, 0 for rows without elements.
    """
    if x.shape[1] == 0:
        return np.zeros((x.shape[0], 1), np.float32), np.zeros((x.shape[0], 1), np.float32)
    low, high = (
        end(x, dim=1, keepdim=True).float().cpu().numpy() for end in (torch.amin, torch.amax)
    )
    zero = np.float32(0)
    return low + zero, high + zero


class BlockCodec(RowCodec, Microscaling):
    """Base of block formats, which process tiles: contiguous matrices with one row per block of
    elements that share a scale.

    Attributes:
        shift: the numbers that `restore` returns must be multiplied by 2^shift.
        poison: the scale byte of a poisoned block.
    """

    shift: ClassVar[int]
    poison: ClassVar[int] = _NAN_SCALE

    @abstractmethod
    def quantise(self, tile: Array, magnitude: Array, factor: Array, buffers: Scratch) -> Array:
        """Quantize a tile to bytes: ``tile * factor``, rounded and saturated.

        Args:
            tile: blocks of float32 numbers; unchanged. Results for poisoned blocks are ignored.
            magnitude: their absolute values; may be changed.
            factor: the factor of each block, as a column.
            buffers: scratch buffers, of which slots 3 and up are free.
        """

    @abstractmethod
    def restore(self, codes: Array, out: Array, buffers: Scratch) -> None:
        """out <- the values of the codes, times ``2^-shift``; arguments as for `quantise`."""

    def begin(self, x: Tensor, payload: Tensor) -> Array:
        """Write the headers of payload's rows; return one number per row, as a column for
        `scales`.
        """
        return np.ones((len(x), 1), np.float32)

    def scales(self, largest: Array, chunk: Array) -> tuple[Array, Array]:
        """Return each block's scale byte and element factor, as columns; the factor is NaN for a
        poisoned block (S12.1, S12.6).

        Args:
            largest: the bits of each block's max |x|.
            chunk: the result of `begin` for the block's chunk.
        """
        # The exponent's field of float32 has E8M0's bias, and is 0 for subnormals and zeros.
        scale = np.maximum((largest + np.int32(self.rounding) >> _MANTISSA) - self.emax, 0)
        factor = np.ldexp(np.float32(1), _BIAS - scale)
        factor[largest >= _INFINITY_BITS] = np.nan  # as integers, NaN is above infinity
        return scale, factor

    def factors(self, scale: Array, payload: Array) -> list[Array]:
        """Return the columns to multiply restored blocks with, one after another.

        Args:
            scale: the blocks' scale bytes, as rows of their chunks.
            payload: payload of these chunks.
        """
        exponent = scale.reshape(-1, 1).astype(np.int32) - _BIAS + self.shift
        first = np.ldexp(np.float32(1), np.minimum(exponent, 127))
        first[scale.reshape(-1) == _NAN_SCALE] = np.nan
        if exponent.max() <= 127:
            return [first]
        # 2**exponent is no float32, but the product may be
        return [first, np.ldexp(np.float32(1), np.maximum(exponent - 127, 0))]

    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Encode x's rows into payload's rows."""
        if not x.shape[1]:
            return
        scales, elements = self._parts(payload, x.shape[1])
        read, of_rows = reader(x, buffers, 0), self.begin(x, payload)
        for rows, columns, blocks in self._tiles(*x.shape):
            tile = self._in_blocks(read((rows, columns)), buffers, fill=True)
            magnitude = buffers.like(2, tile)
            np.bitwise_and(tile.view(np.int32), 0x7FFFFFFF, out=magnitude.view(np.int32))
            # torch finds maxima of short rows several times as fast as NumPy
            largest = torch.from_numpy(magnitude.view(np.int32)).amax(1, keepdim=True).numpy()
            per_row = blocks.stop - blocks.start
            scale, factor = self.scales(largest, np.repeat(of_rows[rows], per_row, axis=0))
            codes = self.quantise(tile, magnitude, factor, buffers)
            poisoned = np.isnan(factor)
            if poisoned.any():
                scale[poisoned], codes[poisoned[:, 0]] = self.poison, 0
            scales[rows, blocks] = scale.reshape(-1, per_row)
            self.store(codes.reshape(rows.stop - rows.start, -1), elements[rows], columns)
        payload.numpy()[:, self.header + scales.shape[1] + elements.shape[1] :] = 0
        yield payload.shape[1]  # not before, as all scales come first

    def decode(self, payload: Tensor, out: Tensor, buffers: Scratch) -> Iterator[int]:
        """Decode payload's rows into out's rows."""
        scales, elements = self._parts(payload, out.shape[1])
        target, write = reader(out, buffers, 0, fill=False), writer(out)
        largest = np.float32(torch.finfo(out.dtype).max)
        for rows, columns, blocks in self._tiles(*out.shape):
            yield self.header + scales.shape[1] + -(-columns.stop * self.bits // 8)
            value = target((rows, columns))
            tile = self._in_blocks(value, buffers, fill=False)
            codes = self.load(elements[rows], columns)
            if codes.size != tile.size:
                codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % self.block)))
            self.restore(codes.reshape(tile.shape), tile, buffers)
            bound = np.float32(2.0 ** (self.emax + 1 - self.shift))
            for factor in self.factors(scales[rows, blocks], payload.numpy()[rows]):
                scaled(tile, factor, out=tile)
                bound = bound * np.abs(factor).max()
            if not bound <= largest:  # or it is NaN
                np.clip(tile, -largest, largest, out=tile)
            if tile.size != value.size:
                value[:] = tile.reshape(len(value), -1)[:, : value.shape[1]]
            write((rows, columns), value)

    def store(self, codes: Array, elements: Array, columns: slice) -> None:
        """Store the codes of some columns, zero-padded to whole blocks, as element bytes."""
        elements[:, columns] = codes[:, : columns.stop - columns.start]

    def load(self, elements: Array, columns: slice) -> Array:
        """Load the codes of some columns from element bytes."""
        return elements[:, columns]

    def _parts(self, payload: Tensor, c: int) -> tuple[Array, Array]:
        """Return views of the scales and the elements in a payload's rows."""
        array, start = payload.numpy(), self.header + -(-c // self.block)
        return array[:, self.header : start], array[:, start : start + -(-c * self.bits // 8)]

    def _tiles(self, num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice, slice]]:
        """Yield rows, columns and blocks of tiles that stay small even with padded last blocks."""
        for rows, whole in tiles(num_rows, -(-num_columns // self.block) * self.block):
            yield (
                rows,
                slice(whole.start, min(whole.stop, num_columns)),
                slice(whole.start // self.block, whole.stop // self.block),
            )

    def _in_blocks(self, values: Array, buffers: Scratch, *, fill: bool) -> Array:
        """Reshape values to one block per row: a view if rows consist of whole blocks, else a
        buffer, filled and padded if ``fill``.
        """
        count, width = values.shape
        whole = -(-width // self.block) * self.block
        if whole == width:
            return values.reshape(-1, self.block)
        padded: Array = (
            buffers.tensor(1, count * whole, torch.float32).numpy().reshape(count, whole)
        )
        if fill:
            padded[:, :width], padded[:, width:] = values, 0
        return padded.reshape(-1, self.block)


def scaled(x: Array, factor: Array, out: Array) -> None:
    """out <- x * factor, for a column of factors."""
    # torch multiplies a short row with one number twice as fast as NumPy.
    torch.mul(torch.from_numpy(x), torch.from_numpy(factor), out=torch.from_numpy(out))


_MANTISSA, _EXPONENT_BITS = 23, 0x7F800000  # of float32
_HALF_BIAS, _HALF_MANTISSA = 15, 10


class FloatCodec(BlockCodec):
    """Base of block formats with floating-point elements.

    Attributes:
        bias: bias of the element's exponent.
        mantissa: number of mantissa bits.
        largest: the largest finite number.
    """

    bias: ClassVar[int]
    mantissa: ClassVar[int]
    largest: ClassVar[float]

    def quantise(self, tile: Array, magnitude: Array, factor: Array, buffers: Scratch) -> Array:
        """Quantize by adding an anchor, 1.5 * 2^23 units in the last place of the element, so that
        the sum's low bits count these units.

        A number of q last places with exponent E has the code ``q + 2^mantissa * (E - smallest
        E)``, subnormals included.
        """
        scaled(magnitude, factor, out=magnitude)
        # NumPy's minimum and maximum of an array and a number are slow
        torch.from_numpy(magnitude).clamp_(max=self.largest)
        anchor = buffers.like(3, tile)
        bits = np.bitwise_and(magnitude.view(np.int32), _EXPONENT_BITS, out=anchor.view(np.int32))
        smallest = 1 - self.bias + _BIAS
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
        sign = torch.from_numpy(np.signbit(tile))
        torch.from_numpy(code).add_(sign, alpha=1 << self.bits - 1)
        return code

    def restore(self, codes: Array, out: Array, buffers: Scratch) -> None:
        """Decode element codes (sign in the top bit) by shifting them into float16."""
        half = buffers.tensor(4, out.size, torch.float16).view(out.shape)
        shifted = half.view(torch.int16).numpy()
        np.copyto(shifted, codes.view(np.int8))  # which extends the sign to the left
        shift = _HALF_MANTISSA - self.mantissa + self.bits - 8
        np.left_shift(shifted, shift, out=shifted)
        np.bitwise_and(shifted, np.int16(-0x8000 | 0x7F << shift), out=shifted)
        torch.from_numpy(out).copy_(half)


_NAN_CODE = 0x7F


class MXFP8(FloatCodec, codec.MXFP8):
    """MXFP8: E4M3 elements with bias 7, 3 bits of mantissa, largest 448."""

    bias, mantissa, largest, shift = 7, 3, 448.0, _HALF_BIAS - 7

    def restore(self, codes: Array, out: Array, buffers: Scratch) -> None:
        """Decode element codes, including the NaN of payloads from other implementations."""
        super().restore(codes, out, buffers)
        is_nan = (codes & _NAN_CODE) == _NAN_CODE
        if is_nan.any():
            out[is_nan] = np.nan


class E2M1(FloatCodec):
    """Base of formats with E2M1 elements: bias 1, 1 bit of mantissa, largest 6; two per byte."""

    bias, mantissa, largest, shift = 1, 1, 6.0, _HALF_BIAS - 1

    def store(self, codes: Array, elements: Array, columns: slice) -> None:
        """Pack two codes per byte, the second into the high nibble."""
        pairs = codes.view(np.uint16)  # little-endian: the first code is the low byte
        packed = np.bitwise_or(pairs, pairs >> 4, out=pairs).astype(np.uint8)
        first, last = columns.start // 2, -(-columns.stop // 2)
        elements[:, first:last] = packed[:, : last - first]

    def load(self, elements: Array, columns: slice) -> Array:
        """Unpack two codes per byte, each in the upper half of its own byte."""
        pairs = elements[:, columns.start // 2 : -(-columns.stop // 2)].astype(np.uint16)
        codes: Array = ((pairs << 4 | pairs << 8) & 0xF0F0).view(np.uint8)
        return codes


class MXFP4(E2M1, codec.MXFP4):
    """MXFP4: E2M1 elements with power-of-two scales."""


class NVFP4(E2M1, codec.NVFP4):
    """NVFP4: E2M1 elements with an E4M3 scale per block and a float32 scale per chunk (S12.7)."""

    poison = 0

    def begin(self, x: Tensor, payload: Tensor) -> Array:
        """Write the headers; return S of each row, NaN for a poisoned row."""
        low, high = _ends(x)
        largest = np.maximum(-low, high)
        scale = np.where(largest == 0, np.float32(1), _limited(np.float32(2688) / largest))
        scale[~np.isfinite(largest)] = np.nan
        _write_headers(payload, 1 / scale)
        return scale

    def scales(self, largest: Array, chunk: Array) -> tuple[Array, Array]:
        """Round b*(S*float32(1/6)), which exceeds 448 only slightly, to E4M3; return also u."""
        quotient = largest.view(np.float32) * (chunk * np.float32(1 / 6))
        # torch makes NaN of what is beyond 464
        scale = torch.from_numpy(quotient).clamp(max=448).to(torch.float8_e4m3fn)
        factor = _limited(1 / (scale.float().numpy() * (1 / chunk)))
        return scale.view(torch.uint8).numpy(), factor

    def factors(self, scale: Array, payload: Array) -> list[Array]:
        """Return s and t of each block."""
        s = torch.from_numpy(scale.reshape(-1, 1)).view(torch.float8_e4m3fn).float().numpy()
        t = np.ascontiguousarray(payload[:, :_SCALE_BYTES]).view("<f4")
        return [s * np.float32(2.0**self.shift), np.repeat(t, scale.shape[1], axis=0)]


def _limited(x: Array) -> Array:
    """Clip numbers at the largest float32; NaN stays."""
    limited: Array = np.minimum(x, np.finfo(np.float32).max)
    return limited


def _write_headers(payload: Tensor, values: Array) -> None:
    """Write the headers of payload's rows: a float32 column, with the NaN bits that S12 prescribes,
    and zeros.
    """
    array, bits = payload.numpy(), np.where(np.isnan(values), _NAN, values.view(np.uint32))
    array[:, :HEADER_BYTES] = 0
    array[:, :_SCALE_BYTES] = bits.astype("<u4").view(np.uint8)


class MXINT8(BlockCodec, codec.MXINT8):
    """MXINT8: integers from -127 to 127, in units of 2^-6."""

    shift = -6

    def quantise(self, tile: Array, magnitude: Array, factor: Array, buffers: Scratch) -> Array:
        """Round to multiples of 2^-6 by adding 1.5 * 2^17; the low bits of the sum are the
        integer.
        """
        scaled(tile, factor, out=magnitude)
        largest = 127 * 2.0**self.shift
        torch.from_numpy(magnitude).clamp_(-largest, largest)
        np.add(magnitude, np.float32(1.5 * 2.0 ** (_MANTISSA + self.shift)), out=magnitude)
        codes: Array = magnitude.view(np.int32).astype(np.uint8)
        return codes

    def restore(self, codes: Array, out: Array, buffers: Scratch) -> None:
        """Convert the integer codes."""
        np.copyto(out, codes.view(np.int8))


class OneBit(RowCodec, codec.OneBit):
    """OneBit: signs, and the root mean square of each chunk."""

    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Encode x's rows into payload's rows."""
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
        scale = np.where(poisoned, np.nan, np.sqrt(squares / c)).astype(np.float32)
        _write_headers(payload, scale.reshape(-1, 1))
        array[:, HEADER_BYTES + bits.shape[1] :] = 0
        bits[poisoned] = 0
        yield payload.shape[1]

    def decode(self, payload: Tensor, out: Tensor, buffers: Scratch) -> Iterator[int]:
        """Decode payload's rows into out's rows."""
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


CODECS: dict[str, type[Codec]] = {
    **{each.name: each for each in (MinMaxUInt8, MXINT8, NVFP4, OneBit)},
    **with_rules(MXFP8),
    **with_rules(MXFP4),
}
"""The codecs of the reference backend by name."""
