"""Plans of the kernels: grids, parts and arguments, from tensors and the card's size, without any CUDA library.

Each function returns the `Plan` of one kernel of the contract. Grids do not depend on the tensors' values, nor results on the
grid.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from bagua_ref.backends.cuda.launch import BLOCK, WORKSPACE, Card, Launch, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from bagua_ref.backends.cuda.launch import Argument

__all__ = ["ON_CHIP", "compress", "decompress", "element_wise", "order_keys", "pointer", "reduce_chunks"]

ON_CHIP = 32768
"""The most bytes of shared memory for a chunk that is compressed in one pass; two blocks of it fit on any multiprocessor."""

_PACK = 16  # bytes that a thread reads or writes at once
_SLACK = 16  # a chunk in shared memory keeps its offset from a 16-byte boundary
_WAVES = 32  # the most blocks per multiprocessor; beyond that, each block loops
_END_PARTS = 4  # parts per multiprocessor of find_ends: one wave, and few ends for quantise to merge
_MIN_PART = 4096  # the fewest elements that are worth a block
_PART_STEP = 128  # parts begin at multiples of this, so that all parts of a chunk have the same alignment


def pointer(x: Tensor) -> ctypes.c_void_p:
    """Return x's address.

    Raises:
        ValueError: x is a lazily negated or conjugated view, or its address is not a multiple of the element size.
    """
    if x.is_neg() or x.is_conj():
        raise ValueError(f"a {x.dtype} tensor is a lazily negated or conjugated view; pass resolve_neg() or resolve_conj() of it")
    address = x.data_ptr()
    if address % min(x.element_size(), 8):
        raise ValueError(f"a {x.dtype} tensor begins at address {address:#x}; it must be a multiple of {x.element_size()}")
    return ctypes.c_void_p(address)


def element_wise(card: Card, name: str, x: Tensor, *operands: Tensor, numbers: tuple[float, ...] = ()) -> Plan:
    """x <- f(x, operands, numbers), one of the kernels in ``elementwise.cu``."""
    if x.numel() == 0:
        return Plan()
    args = (pointer(x), *map(pointer, operands), _size(x.numel()), *(_number(x, value) for value in numbers))
    return _one("elementwise", f"{name}_{_name(x)}", _grid(card, x.numel() * x.element_size(), 2 * _PACK), args)


def reduce_chunks(card: Card, x: Tensor, num_chunks: int, target_chunk: int, average: bool) -> Plan:
    """Sum the chunks in order into one of them (S3.7)."""
    size = x.numel() // num_chunks
    if size == 0:
        return Plan()
    divisor = _number(x, num_chunks if average else 0)
    args = (pointer(x), _size(size), _size(num_chunks), _size(target_chunk), divisor)
    return _one("chunks", f"reduce_chunks_{_name(x)}", _grid(card, size * x.element_size(), _PACK), args)


def compress(card: Card, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> Plan:
    """Write one or all blocks of the payload (S4): in one pass if a chunk fits into shared memory, else in two."""
    size, block_bytes = x.numel() // num_chunks, out.numel() // num_chunks
    source, target = pointer(x).value or 0, pointer(out).value or 0
    if target_chunk is not None:
        source, target, num_chunks = source + target_chunk * size * x.element_size(), target + target_chunk * block_bytes, 1
    start, payload = ctypes.c_void_p(source), ctypes.c_void_p(target)
    chunks = (_size(size), _size(num_chunks))
    if size * x.element_size() + _SLACK <= ON_CHIP:
        grid = min(num_chunks, _WAVES * card.multiprocessors)
        shared = -(-size * x.element_size() // _PACK) * _PACK + _SLACK
        return _one("codec", f"compress_on_chip_{_name(x)}", grid, (start, *chunks, payload), shared)
    many, large = _parts(card, size, num_chunks, _END_PARTS)
    parts, part_size = _parts(card, size, num_chunks, _WAVES)
    ends = Launch(
        "codec",
        f"find_ends_{_name(x)}",
        min(num_chunks * many, _END_PARTS * card.multiprocessors),
        (start, *chunks, _size(many), _size(large), WORKSPACE),
    )
    levels = Launch(
        "codec",
        f"quantise_{_name(x)}",
        min(num_chunks * parts, _WAVES * card.multiprocessors),
        (start, *chunks, _size(many), WORKSPACE, _size(parts), _size(part_size), payload),
    )
    return Plan((ends, levels), workspace=num_chunks * many * 2 * ctypes.sizeof(ctypes.c_float))


def decompress(card: Card, payload: Tensor, num_chunks: int, out: Tensor) -> Plan:
    """Restore all chunks (S4.3)."""
    size = out.numel() // num_chunks
    if size == 0:
        return Plan()
    parts, part_size = _parts(card, size, num_chunks, _WAVES)
    args = (pointer(payload), _size(size), _size(num_chunks), _size(parts), _size(part_size), pointer(out))
    return _one("codec", f"decompress_{_name(out)}", min(num_chunks * parts, _WAVES * card.multiprocessors), args)


def order_keys(card: Card, floats: Tensor, keys: Tensor) -> Plan:
    """keys <- integers of the floats' size that sort as they do (S7.2)."""
    if floats.numel() == 0:
        return Plan()
    args = (pointer(floats), _size(floats.numel()), pointer(keys))
    return _one("movement", f"order_keys_{_name(floats)}", _grid(card, floats.numel(), 1), args)


def _one(source: str, kernel: str, grid: int, args: tuple[Argument, ...], shared: int = 0) -> Plan:
    return Plan((Launch(source, kernel, grid, args, shared),))


def _grid(card: Card, work: int, per_thread: int) -> int:
    return max(1, min(-(-work // (per_thread * BLOCK)), _WAVES * card.multiprocessors))


def _parts(card: Card, size: int, num_chunks: int, per_multiprocessor: int) -> tuple[int, int]:
    """Return the number of parts of a chunk, and the number of elements of each but the last."""
    wanted = -(-per_multiprocessor * card.multiprocessors // num_chunks)
    parts = max(1, min(wanted, -(-size // _MIN_PART)))
    part_size = -(-size // (parts * _PART_STEP)) * _PART_STEP
    return -(-size // part_size), part_size


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _size(value: int) -> ctypes.c_longlong:
    return ctypes.c_longlong(value)


def _number(x: Tensor, value: float) -> ctypes.c_float | ctypes.c_double:
    """Return a number as the C type of x's arithmetic."""
    return ctypes.c_double(value) if x.dtype is torch.float64 else ctypes.c_float(value)
