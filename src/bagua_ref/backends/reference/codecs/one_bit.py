"""OneBit in NumPy (S12.2)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import codec
from bagua_ref.backends.codec import HEADER_BYTES
from bagua_ref.backends.reference.backend import Array, RowCodec, Scratch, reader, tiles, writer

__all__ = ["OneBit"]

_NAN = np.uint32(0x7FC00000)
_SCALE_BYTES = 4


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
            part = array[rows, HEADER_BYTES + columns.start // 8 : HEADER_BYTES + -(-columns.stop // 8)]
            negative = value.view(np.uint32)
            np.copyto(negative, np.unpackbits(~part, axis=1, count=min(columns.stop, c) - columns.start))
            np.left_shift(negative, 31, out=negative)
            np.bitwise_xor(negative, positive[rows], out=negative)
            write((rows, columns), value)
