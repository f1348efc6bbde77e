"""Checks of kernel arguments, and their error messages."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from bagua_ref.base.memory import memory_span

__all__ = [
    "at_least_one",
    "check_beside",
    "check_device",
    "check_flat",
    "check_parts",
    "check_target_chunk",
    "chunk_size_of",
    "rounded",
]


def check_flat(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] | None = None) -> None:
    """Raise unless x is a 1-D contiguous tensor of one of the dtypes (None: any)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    if dtypes is not None and x.dtype not in dtypes:
        raise TypeError(f"{name} is {x.dtype}; it must be one of {', '.join(map(str, dtypes))}")
    if x.layout is not torch.strided or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} and strides {x.stride() if x.layout is torch.strided else x.layout} must be 1-D "
            f"and contiguous; pass {name}.view(-1) where its elements are contiguous"
        )


def check_device(name: str, x: Tensor, backend: str, device_types: tuple[str, ...] | None) -> None:
    """Raise unless x is on a device of one of the types that a backend supports (None: any)."""
    if device_types is not None and x.device.type not in device_types:
        raise ValueError(f"{name} is on {x.device}; backend {backend!r} works on {', '.join(device_types)} tensors")


def check_beside(
    target_name: str, target: Tensor, name: str, y: Tensor, dtype: torch.dtype | None = None, size: int | None = None
) -> None:
    """Raise unless y is flat, of target's (or the given) dtype and size, on target's device and separate from target."""
    check_flat(name, y)
    dtype, size = dtype or target.dtype, target.numel() if size is None else size
    if y.dtype is not dtype:
        raise TypeError(f"{name} is {y.dtype}; with {target_name} of {target.dtype} it must be {dtype}")
    if y.numel() != size:
        raise ValueError(f"{name} has {y.numel()} elements; with {target_name} of {target.numel()} it must have {size}")
    if y.device != target.device:
        raise ValueError(f"{name} is on {y.device}; it must be on {target_name}'s device {target.device}")
    if _meet(_span(target), _span(y)):
        raise ValueError(f"{name} overlaps {target_name} in memory; they must not overlap")


def check_parts(name: str, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Raise unless tensors have flat's dtype and device, as many elements in total, and do not overlap flat."""
    total, span = 0, _span(flat)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensors[{index}] is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dtype is not flat.dtype:
            raise TypeError(f"tensors[{index}] is {tensor.dtype}; it must be {name}'s dtype {flat.dtype}")
        if tensor.device != flat.device:
            raise ValueError(f"tensors[{index}] is on {tensor.device}; it must be on {name}'s device {flat.device}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"tensors[{index}] has layout {tensor.layout}; it must be a dense (strided) tensor")
        if _meet(span, _span(tensor)):
            raise ValueError(f"tensors[{index}] overlaps {name} in memory; they must not overlap")
        total += tensor.numel()
    if total != flat.numel():
        raise ValueError(f"tensors have {total} elements in total; they must have as many as {name}, which has {flat.numel()}")


def _span(tensor: Tensor) -> tuple[int, int]:
    return memory_span(tensor) if tensor.numel() else (0, 0)


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def at_least_one(name: str, value: int) -> int:
    """Return value; raise unless it is an integer of at least 1."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None
    if number < 1:
        raise ValueError(f"{name}={value!r} must be at least 1")
    return number


def chunk_size_of(num_elements: int, num_chunks: int) -> int:
    """Return the number of elements of a chunk; raise if num_chunks does not divide num_elements."""
    if num_elements % at_least_one("num_chunks", num_chunks):
        raise ValueError(f"num_chunks={num_chunks} must divide the number of elements, which is {num_elements}")
    return num_elements // num_chunks


def check_target_chunk(target_chunk: int, num_chunks: int) -> None:
    """Raise unless target_chunk is the index of a chunk."""
    try:
        fits = 0 <= operator.index(target_chunk) < num_chunks
    except TypeError:
        raise TypeError(f"target_chunk={target_chunk!r} must be an integer") from None
    if not fits:
        raise ValueError(f"target_chunk={target_chunk!r} must be from 0 to num_chunks - 1 = {num_chunks - 1}")


def rounded(name: str, value: float, x: Tensor) -> float:
    """Return value rounded to the type of x's arithmetic (S1)."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r} must be a number") from None
    return number if x.dtype is torch.float64 else ctypes.c_float(number).value
