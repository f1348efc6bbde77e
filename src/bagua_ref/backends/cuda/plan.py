"""Plans of the kernels: grids and arguments, from tensors and the card's size, without any CUDA library.

Each function returns the `Plan` of one kernel of the contract; those of codecs are in `codec_plans`. Grids do not depend on the
tensors' values, nor results on the grid.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from bagua_ref.backends.cuda.launch import BLOCK, Argument, Card, Launch, Plan

__all__ = ["PACK", "WAVES", "element_wise", "long", "name_of", "one_launch", "order_keys", "pointer", "reduce_chunks"]

PACK = 16
"""Bytes that a thread reads or writes at once."""

WAVES = 32
"""The most blocks per multiprocessor; beyond that, each block loops."""


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
    args = (pointer(x), *map(pointer, operands), long(x.numel()), *(_number(x, value) for value in numbers))
    return one_launch("elementwise", f"{name}_{name_of(x)}", _grid(card, x.numel() * x.element_size(), 2 * PACK), args)


def reduce_chunks(card: Card, x: Tensor, num_chunks: int, target_chunk: int, average: bool) -> Plan:
    """Sum the chunks in order into one of them (S3.7)."""
    size = x.numel() // num_chunks
    if size == 0:
        return Plan()
    divisor = _number(x, num_chunks if average else 0)
    args = (pointer(x), long(size), long(num_chunks), long(target_chunk), divisor)
    return one_launch("chunks", f"reduce_chunks_{name_of(x)}", _grid(card, size * x.element_size(), PACK), args)


def order_keys(card: Card, floats: Tensor, keys: Tensor) -> Plan:
    """keys <- integers of the floats' size that sort as they do (S7.2)."""
    if floats.numel() == 0:
        return Plan()
    args = (pointer(floats), long(floats.numel()), pointer(keys))
    return one_launch("movement", f"order_keys_{name_of(floats)}", _grid(card, floats.numel(), 1), args)


def one_launch(source: str, kernel: str, grid: int, args: tuple[Argument, ...], shared: int = 0) -> Plan:
    """Return the plan of a single launch; arguments as of `Launch`."""
    return Plan((Launch(source, kernel, grid, args, shared),))


def _grid(card: Card, work: int, per_thread: int) -> int:
    return max(1, min(-(-work // (per_thread * BLOCK)), WAVES * card.multiprocessors))


def name_of(x: Tensor) -> str:
    """Return x's dtype as kernels name it."""
    return str(x.dtype).removeprefix("torch.")


def long(value: int) -> ctypes.c_longlong:
    """Return a size or an index as the C type that kernels take."""
    return ctypes.c_longlong(value)


def _number(x: Tensor, value: float) -> ctypes.c_float | ctypes.c_double:
    """Return a number as the C type of x's arithmetic."""
    return ctypes.c_double(value) if x.dtype is torch.float64 else ctypes.c_float(value)
