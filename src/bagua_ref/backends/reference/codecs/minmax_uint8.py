"""MinMaxUInt8 in NumPy: S4 line by line, with a matrix row for each chunk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import codec
from bagua_ref.backends.codec import HEADER_BYTES
from bagua_ref.backends.reference.backend import Array, RowCodec, Scratch, reader, tiles, writer

__all__ = ["MinMaxUInt8"]

_POISON = {
    torch.float16: np.frombuffer(bytes.fromhex("007e007e"), np.uint8),
    torch.bfloat16: np.frombuffer(bytes.fromhex("c07fc07f"), np.uint8),
    torch.float32: np.frombuffer(bytes.fromhex("0000c07f0000c07f"), np.uint8),
}
"""The bytes of the header NaN, NaN (S4.4), as the bits of a converted NaN are not specified."""


class MinMaxUInt8(RowCodec, codec.MinMaxUInt8):
    """S4 with a matrix row for each chunk."""

    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the blocks of x's rows to payload's rows (S4.1, S4.2, S4.4); yield the number of final bytes of each."""
        low, high = _ends(x)
        scale, lower = grid_between(low, high)
        poisoned = ~np.isfinite(np.hstack([low, high, high - low, high * scale, low * scale])).all(axis=1, keepdims=True)
        payload_rows = payload.numpy()
        header = torch.from_numpy(np.hstack([low, high])).to(x.dtype).view(torch.uint8).numpy()
        payload_rows[:, :HEADER_BYTES] = 0
        payload_rows[:, : header.shape[1]] = np.where(poisoned, _POISON[x.dtype], header)
        payload_rows[:, HEADER_BYTES + x.shape[1] :] = 0
        levels = payload_rows[:, HEADER_BYTES : HEADER_BYTES + x.shape[1]]
        # Rounding is monotonic: if both ends are on the grid, all values are, and nothing needs to be clipped.
        fits = (np.rint(low * scale) >= lower).all() and (np.rint(high * scale) - lower <= 255).all()
        read = reader(x, buffers, 0)
        for rows, columns in tiles(*x.shape):
            tile = read((rows, columns))
            level = buffers.like(1, tile)
            np.multiply(tile, scale[rows], out=level)
            np.rint(level, out=level)
            # S4.2 takes the minimum with upper here. Rounding is monotonic, so x <= max implies x*scale <= upper.
            np.subtract(level, lower[rows], out=level)
            if not fits:
                np.clip(level, 0, 255, out=level)
            np.copyto(levels[rows, columns], level, casting="unsafe")
            levels[rows, columns][poisoned[rows, 0]] = 0
            if rows.stop == len(levels):
                yield HEADER_BYTES + columns.stop

    def decode(self, payload: Tensor, out: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the values of payload's rows to out's rows (S4.3); yield the number of bytes of each that are needed next."""
        yield HEADER_BYTES
        item = out.element_size()
        header = payload[:, : 2 * item].clone(memory_format=torch.contiguous_format).view(out.dtype).float().numpy()
        scale, lower = grid_between(header[:, :1], header[:, 1:])
        levels = payload.numpy()[:, HEADER_BYTES : HEADER_BYTES + out.shape[1]]
        largest = np.float32(torch.finfo(out.dtype).max)
        fits = (np.abs(lower / scale) <= largest).all() and (np.abs((lower + np.float32(255)) / scale) <= largest).all()
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
    """Return scale and lower of the grids between minima and maxima, each operation in float32 (S4.2)."""
    scale = np.float32(255) / ((high - low) + np.float32(1e-7))
    upper = np.rint(high * scale)
    return scale, upper - np.float32(255)


def _ends(x: Tensor) -> tuple[Array, Array]:
    """Return each row's minimum and maximum as float32 columns, NaN where the row has one; a zero is +0; no columns: 0."""
    if x.shape[1] == 0:
        return np.zeros((x.shape[0], 1), np.float32), np.zeros((x.shape[0], 1), np.float32)
    low, high = (end(x, dim=1, keepdim=True).float().cpu().numpy() for end in (torch.amin, torch.amax))
    zero = np.float32(0)
    return low + zero, high + zero
