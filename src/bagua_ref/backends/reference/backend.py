"""ReferenceBackend: each kernel as a few lines of NumPy that mirror its clause, for tensors on any
device.

Kernels and codecs compute in blocks that fit a processor's cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import Codec
from bagua_ref.observe.meter import steps_in

__all__ = [
    "BLOCK",
    "Array",
    "ReferenceBackend",
    "RowCodec",
    "Scratch",
    "blocks",
    "computed_in",
    "reader",
    "rows_of",
    "scratch",
    "tiles",
    "writer",
]

Array: TypeAlias = npt.NDArray[Any]
Index: TypeAlias = slice | tuple[slice, slice]

BLOCK = 2**18
"""Elements per block: few enough for the processor's cache, enough to make Python's call overhead
negligible.
"""


class ReferenceBackend(KernelBackend):
    """SPEC's kernels in executable form. NumPy has no fused multiply-add, so each operation below
    rounds (S1).
    """

    name = "reference"

    def _add_(self, x: Tensor, y: Tensor) -> None:
        for a, b in blocks(x, y):
            np.add(a, b, out=a)

    def _subtract_(self, x: Tensor, y: Tensor) -> None:
        for a, b in blocks(x, y):
            np.subtract(a, b, out=a)

    def _add_scaled_(self, x: Tensor, y: Tensor, factor: float) -> None:
        for a, b, spare in blocks(x, y, spare=True):
            product = np.multiply(b, a.dtype.type(factor), out=spare)
            np.add(a, product, out=a)

    def _average_(self, x: Tensor, y: Tensor) -> None:
        for a, b in blocks(x, y):
            np.add(a, b, out=a)
            np.divide(a, 2, out=a)

    def _divide_(self, x: Tensor, divisor: float) -> None:
        for (a,) in blocks(x):
            np.divide(a, a.dtype.type(divisor), out=a)

    def _combine_ring_(self, x: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> None:
        terms = ((left, 1 / 3), (right, 1 / 3), (weight, -5 / 3))
        if x.element_size() == 2:  # then each sum is rounded to 16 bits
            for y, factor in terms:
                self.add_scaled_(x, y, factor)
            return
        for a, *others, spare in blocks(x, *(y for y, _ in terms), spare=True):
            for b, (_, factor) in zip(others, terms, strict=True):
                product = np.multiply(b, a.dtype.type(factor), out=spare)
                np.add(a, product, out=a)

    def _async_average_(self, x: Tensor, reduced: Tensor, snapshot: Tensor, nranks: int) -> None:
        for a, total, old, spare in blocks(x, reduced, snapshot, spare=True):
            change = np.divide(total, a.dtype.type(nranks), out=spare)
            np.subtract(change, old, out=change)
            np.add(a, change, out=a)

    def _update_momentum_(
        self, m: Tensor, grad: Tensor, beta1: float, one_minus_beta1: float
    ) -> None:
        for a, g, spare in blocks(m, grad, spare=True):
            np.multiply(a, a.dtype.type(beta1), out=a)
            gain = np.multiply(g, a.dtype.type(one_minus_beta1), out=spare)
            np.add(a, gain, out=a)

    def _reduce_chunks_(self, x: Tensor, num_chunks: int, target_chunk: int, average: bool) -> None:
        chunks = rows_of(x, num_chunks)
        width = max(1, BLOCK // num_chunks)
        with np.errstate(all="ignore"), scratch() as buffers:
            read = reader(chunks, buffers, 0)
            for start in range(0, chunks.shape[1], width):
                columns = slice(start, start + width)
                rows = read((slice(None), columns))
                if rows.shape[1] == 1:
                    # NumPy adds whole rows one after another, but sums pairwise what it can treat
                    # as one dimension.
                    total: Array = np.add.accumulate(rows, axis=0)[-1] + rows.dtype.type(0)
                else:
                    total = np.add.reduce(rows, axis=0, initial=rows.dtype.type(0))
                if average:
                    total /= total.dtype.type(num_chunks)
                chunks[target_chunk, columns].copy_(torch.from_numpy(total))

    def _gather_flat(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        start = 0
        for tensor in tensors:
            out.detach()[start : start + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
            start += tensor.numel()

    def _scatter_flat(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        start = 0
        for tensor in tensors:
            tensor.detach().copy_(flat.detach()[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

    def _order_by_complexity(self, keys: Tensor) -> Tensor:
        values = keys.detach().cpu()
        if values.dtype is torch.bfloat16:
            values = values.float()
        return torch.from_numpy(np.argsort(values.numpy(), kind="stable")).to(keys.device)


class Scratch:
    """Scratch buffers of a running kernel, allocated at first use and reused by later kernels."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def tensor(self, slot: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized buffer of ``size`` elements from slot ``slot``."""
        if size > BLOCK:
            return torch.empty(size, dtype=dtype)
        buffer = self._buffers.get((slot, dtype))
        if buffer is None:
            buffer = self._buffers[slot, dtype] = torch.empty(BLOCK, dtype=dtype)
        return buffer[:size]

    def like(self, slot: int, array: Array) -> Array:
        """Return the buffer of slot ``slot`` with the shape and dtype of a float array."""
        dtype = torch.float64 if array.dtype == np.float64 else torch.float32
        return self.tensor(slot, array.size, dtype).numpy().reshape(array.shape)


_free: list[Scratch] = []


@contextmanager
def scratch() -> Iterator[Scratch]:
    """Lend a set of scratch buffers in this context: one per concurrently running kernel, not per
    thread, since a simulated world has thousands of threads.
    """
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
    """Return the dtype in which x is computed (S1)."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def reader(
    x: Tensor, buffers: Scratch, slot: int, *, fill: bool = True
) -> Callable[[Index], Array]:
    """Return ``read(index)``, which converts a part of x to the dtype of its arithmetic, without a
    copy if possible.

    Otherwise it is a copy in buffer number ``slot``, valid until the next one. ``fill=False`` skips
    the copying, for parts that are only written.
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
    """Return ``write(index, values)``, which rounds values of a `reader` to x's dtype and stores
    them; a no-op where they are x's own memory.
    """
    return (
        (lambda index, values: None)
        if _usable(x)
        else (lambda index, values: x[index].copy_(torch.from_numpy(values)))
    )


def _usable(x: Tensor) -> bool:
    return x.dtype is computed_in(x) and x.device.type == "cpu"


def blocks(x: Tensor, *sources: Tensor, spare: bool = False) -> Iterator[list[Array]]:
    """Yield arrays of x and the sources block by block; after each block, round the array of x once
    and store it in x.

    Infinities and NaN are valid results: while the caller computes, NumPy does not warn of them.
    With ``spare``, a buffer like x's array comes last.
    """
    tensors = [tensor.detach() for tensor in (x, *sources)]
    with np.errstate(all="ignore"), scratch() as buffers:
        readers, write = (
            [reader(tensor, buffers, slot) for slot, tensor in enumerate(tensors)],
            writer(tensors[0]),
        )
        for start in range(0, x.numel(), BLOCK):
            block = slice(start, min(start + BLOCK, x.numel()))
            arrays = [read(block) for read in readers]
            yield [*arrays, buffers.like(len(arrays), arrays[0])] if spare else arrays
            write(block, arrays[0])


def tiles(num_rows: int, num_columns: int) -> Iterator[tuple[slice, slice]]:
    """Split a matrix into tiles of at most BLOCK elements: several whole rows if they are short,
    else parts of one row.

    The first columns of all rows come before the next ones.
    """
    if num_columns == 0:
        return
    rows, columns = max(1, BLOCK // num_columns), min(BLOCK, num_columns)
    for column in range(0, num_columns, columns):
        for row in range(0, num_rows, rows):
            yield (
                slice(row, min(row + rows, num_rows)),
                slice(column, min(column + columns, num_columns)),
            )


class RowCodec(Codec):
    """Base of codecs on matrices: row r of the payload encodes row r of x. Payloads are on the CPU,
    x on any device.
    """

    @abstractmethod
    def encode(self, x: Tensor, payload: Tensor, buffers: Scratch) -> Iterator[int]:
        """Encode x's rows into payload's rows; yield, at intervals, the number of final bytes in
        each row.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, buffers: Scratch) -> Iterator[int]:
        """Decode payload's rows into out's rows; before reading, yield the number of bytes needed
        from each row.
        """

    def _compress(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None:
        # self's may call this
        for _ in RowCodec._compress_in_steps(self, x, num_chunks, target_chunk, out):
            pass

    def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        for _ in RowCodec._decompress_in_steps(self, payload, num_chunks, out):
            pass

    def _compress_in_steps(
        self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor
    ) -> Iterator[int]:
        chunks, payload = rows_of(x, num_chunks), rows_of(out, num_chunks)
        if target_chunk is not None:
            chunks, payload = (
                chunks[target_chunk : target_chunk + 1],
                payload[target_chunk : target_chunk + 1],
            )
        on_cpu = (
            payload if payload.device.type == "cpu" else torch.empty_like(payload, device="cpu")
        )
        with scratch() as buffers:
            for final in steps_in(
                partial(np.errstate, all="ignore"), self.encode(chunks, on_cpu, buffers)
            ):
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
            yield from steps_in(
                partial(np.errstate, all="ignore"),
                self.decode(rows.cpu(), rows_of(out, num_chunks), buffers),
            )
