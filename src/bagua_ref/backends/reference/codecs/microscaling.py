"""Blocks of 32 elements that share a power of two: what the MX codecs have in common (S12.1)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends.formats import BLOCK_SIZE, Microscaling
from bagua_ref.backends.reference.blocks import Array, Scratch, reader, tiles, writer
from bagua_ref.backends.reference.codecs.rows import RowCodec

__all__ = ["BlockCodec", "scaled"]

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
    """Yield rows, columns and blocks of tiles that are small enough even when their last blocks are whole."""
    for rows, whole in tiles(num_rows, -(-num_columns // BLOCK_SIZE) * BLOCK_SIZE):
        yield rows, slice(whole.start, min(whole.stop, num_columns)), slice(whole.start // BLOCK_SIZE, whole.stop // BLOCK_SIZE)


def _in_blocks(values: Array, buffers: Scratch, *, fill: bool) -> Array:
    """Return values as rows of 32, their own memory if each row consists of whole blocks, else a buffer; fill: a padded copy."""
    count, width = values.shape
    whole = -(-width // BLOCK_SIZE) * BLOCK_SIZE
    if whole == width:
        return values.reshape(-1, BLOCK_SIZE)
    padded: Array = buffers.tensor(1, count * whole, torch.float32).numpy().reshape(count, whole)
    if fill:
        padded[:, :width], padded[:, width:] = values, 0
    return padded.reshape(-1, BLOCK_SIZE)
