"""Matrices of chunks in tiles, and the base class of the reference backend's codecs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bagua_ref.backends.codec import Codec
from bagua_ref.observe.meter import steps_in

__all__ = ["BLOCK", "Array", "RowCodec", "Scratch", "blocks", "computed_in", "reader", "rows_of", "scratch", "tiles", "writer"]

Array: TypeAlias = npt.NDArray[Any]
Index: TypeAlias = slice | tuple[slice, slice]

BLOCK = 2**18
"""Elements per block: few enough for a processor's cache, enough to make the time of calls from Python negligible."""


class Scratch:
    """The buffers of one running kernel, allocated at their first use and kept for the next kernel."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def tensor(self, slot: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return ``size`` elements of buffer number ``slot``, uninitialised."""
        if size > BLOCK:
            return torch.empty(size, dtype=dtype)
        buffer = self._buffers.get((slot, dtype))
        if buffer is None:
            buffer = self._buffers[slot, dtype] = torch.empty(BLOCK, dtype=dtype)
        return buffer[:size]

    def like(self, slot: int, array: Array) -> Array:
        """Return buffer number ``slot`` with the shape and dtype of a float array."""
        dtype = torch.float64 if array.dtype == np.float64 else torch.float32
        return self.tensor(slot, array.size, dtype).numpy().reshape(array.shape)


_free: list[Scratch] = []


@contextmanager
def scratch() -> Iterator[Scratch]:
    """Lend buffers: one set per kernel that runs concurrently, not per thread, as a simulated world has thousands of threads."""
    try:
        lent = _free.pop()
    except IndexError:
        lent = Scratch()
    try:
        yield lent
    finally:
        _free.append(lent)


def rows_of(flat: Tensor, num_rows: int) -> Tensor:
    """Return a flat tensor as a matrix of ``num_rows`` rows."""
    return flat.detach().view(num_rows, flat.numel() // num_rows)


def computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype of x's arithmetic (S1)."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def reader(x: Tensor, buffers: Scratch, slot: int, *, fill: bool = True) -> Callable[[Index], Array]:
    """Return ``read(index)``, which returns a part of x in the dtype of its arithmetic, as x's own memory if possible.

    Otherwise it is a copy in buffer number ``slot``, valid until the next one. ``fill=False`` skips the copying, for parts that
    are only written.
    """
    if _usable(x):
        return x.numpy().__getitem__

    def convert(index: Index) -> Array:
        part = x[index]
        # torch converts 16-bit floats several times as fast as NumPy, which has no bfloat16 at all.
        buffer = buffers.tensor(slot, part.numel(), computed_in(x)).view(part.shape)
        return (buffer.copy_(part) if fill else buffer).numpy()

    return convert


def writer(x: Tensor) -> Callable[[Index, Array], object]:
    """Return ``write(index, values)``, which rounds a `reader`'s values to x's dtype and stores them, if they are a copy."""
    return (lambda index, values: None) if _usable(x) else (lambda index, values: x[index].copy_(torch.from_numpy(values)))


def _usable(x: Tensor) -> bool:
    return x.dtype is computed_in(x) and x.device.type == "cpu"


def blocks(x: Tensor, *sources: Tensor, spare: bool = False) -> Iterator[list[Array]]:
    """Yield x and the sources block by block, and store the values that the caller leaves in x's array in x, rounded once.

    Infinities and NaN are valid results: while the caller computes, NumPy does not warn of them. With ``spare``, a buffer like x's
    array comes last.
    """
    tensors = [tensor.detach() for tensor in (x, *sources)]
    with np.errstate(all="ignore"), scratch() as buffers:
        readers, write = [reader(tensor, buffers, slot) for slot, tensor in enumerate(tensors)], writer(tensors[0])
        for start in range(0, x.numel(), BLOCK):
            block = slice(start, min(start + BLOCK, x.numel()))
            arrays = [read(block) for read in readers]
            yield [*arrays, buffers.like(len(arrays), arrays[0])] if spare else arrays
            write(block, arrays[0])


def tiles(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    """Cut a matrix into tiles of at most BLOCK elements: several whole rows if they are short, else parts of one row.

    The first columns of all rows come before the next ones.
    """
    if num_columns == 0:
        return
    rows, columns = max(1, BLOCK // num_columns), min(BLOCK, num_columns)
    for column in range(0, num_columns, columns):
        for row in range(0, num_rows, rows):
            yield slice(row, min(row + rows, num_rows)), slice(column, min(column + columns, num_columns))


class RowCodec(Codec):
    """A codec in terms of matrices: row r of the payload belongs to row r of x. Payloads are on the CPU, x may be anywhere."""

    @abstractmethod
    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the blocks of x's rows to payload's rows; yield, now and then, the number of final bytes of each row."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, buffers: Scratch) -> Iterator[int]:
        """Write the values of payload's rows to out's rows; yield the bytes of each row that are needed before reading them."""

    def _compress(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None:
        for _ in RowCodec._compress_in_steps(self, x, num_chunks, target_chunk, out):  # self's may call this
            pass

    def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        for _ in RowCodec._decompress_in_steps(self, payload, num_chunks, out):
            pass

    def _compress_in_steps(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> Iterator[int]:
        chunks, payload = rows_of(x, num_chunks), rows_of(out, num_chunks)
        if target_chunk is not None:
            chunks, payload = chunks[target_chunk : target_chunk + 1], payload[target_chunk : target_chunk + 1]
        on_cpu = payload if payload.device.type == "cpu" else torch.empty_like(payload, device="cpu")
        with scratch() as buffers:
            for final in steps_in(partial(np.errstate, all="ignore"), self.encode(chunks, on_cpu, buffers)):
                if on_cpu is payload:
                    yield final
        if on_cpu is not payload:
            payload.copy_(on_cpu)
        yield payload.shape[1]

    def _decompress_in_steps(self, payload: Tensor, num_chunks: int, out: Tensor) -> Iterator[int]:
        rows = rows_of(payload, num_chunks)
        if rows.device.type != "cpu":
            yield rows.shape[1]
        with scratch() as buffers:
            yield from steps_in(partial(np.errstate, all="ignore"), self.decode(rows.cpu(), rows_of(out, num_chunks), buffers))
