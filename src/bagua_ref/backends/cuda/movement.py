"""Copies between a flat tensor and tensors of any shape (S2.3): contiguous ones together, others
with one launch each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from torch import Tensor

from bagua_ref.backends.cuda.launch import DeviceProperties, KernelLaunch, Plan, pointer

__all__ = ["PIECE", "SEGMENTS", "Segments", "Strided", "copy", "is_plain"]

SEGMENTS = 128
"""Tensors per launch, as in ``movement.cu``."""

PIECE = 32768
"""Bytes per step of a block."""

_RANK = 8
_WAVES = 32


class Segments(ctypes.Structure):
    """The struct ``Segments`` of ``movement.cu``."""

    _fields_ = (
        ("there", ctypes.c_void_p * SEGMENTS),
        ("start", ctypes.c_longlong * SEGMENTS),
        ("bytes", ctypes.c_longlong * SEGMENTS),
        ("first_piece", ctypes.c_int * SEGMENTS),
        ("count", ctypes.c_int),
        ("pieces", ctypes.c_int),
        ("piece", ctypes.c_longlong),
    )


class Strided(ctypes.Structure):
    """The struct ``Strided`` of ``movement.cu``."""

    _fields_ = (
        ("count", ctypes.c_longlong),
        ("size", ctypes.c_longlong * _RANK),
        ("stride", ctypes.c_longlong * _RANK),
        ("rank", ctypes.c_int),
    )


def is_plain(tensor: Tensor, *, written: bool) -> bool:
    """Return whether the kernels support a tensor; torch copies the others.

    Not supported are lazily negated or conjugated views, tensors with more than eight axes that
    cannot be merged, and outputs with several elements at one address, for which torch raises an
    error.
    """
    if tensor.is_neg() or tensor.is_conj():
        return False
    if tensor.is_contiguous():
        return True
    shape = _merged(tensor)
    return len(shape) <= _RANK and not (written and any(stride == 0 for _, stride in shape))


def copy(
    device: DeviceProperties, flat: Tensor, tensors: Sequence[tuple[Tensor, int]], *, gather: bool
) -> Plan:
    """Plan the copy of tensors into flat, or of flat into tensors.

    Args:
        device: its properties.
        flat: the flat tensor.
        tensors: tensors for which `is_plain` is true, each with its offset in flat, in elements.
        gather: copy into flat; else out of it.
    """
    whole: list[tuple[Tensor, int]] = []
    apart: list[tuple[Tensor, int]] = []
    for tensor, start in tensors:
        if tensor.numel():
            (whole if tensor.is_contiguous() else apart).append((tensor, start))
    way = "gather" if gather else "scatter"
    launches = [
        KernelLaunch(
            "movement",
            f"{way}_segments",
            min(table.pieces, _WAVES * device.multiprocessors),
            (pointer(flat), table),
        )
        for table in _tables(whole)
    ]
    launches += [_strided(device, flat, tensor, start, way) for tensor, start in apart]
    return Plan(tuple(launches))


def _tables(tensors: list[tuple[Tensor, int]]) -> Iterator[Segments]:
    for first in range(0, len(tensors), SEGMENTS):
        table = Segments(piece=PIECE)
        for tensor, start in tensors[first : first + SEGMENTS]:
            number, item = table.count, tensor.element_size()
            table.there[number] = pointer(tensor).value
            table.start[number], table.bytes[number] = start * item, tensor.numel() * item
            table.first_piece[number] = table.pieces
            table.pieces += -(-tensor.numel() * item // PIECE)
            table.count += 1
        yield table


def _strided(
    device: DeviceProperties, flat: Tensor, tensor: Tensor, start: int, way: str
) -> KernelLaunch:
    shape = _merged(tensor)
    table = Strided(count=tensor.numel(), rank=len(shape))
    for axis, (size, stride) in enumerate(shape):
        table.size[axis], table.stride[axis] = size, stride
    here = ctypes.c_void_p((pointer(flat).value or 0) + start * flat.element_size())
    grid = max(1, min(-(-tensor.numel() // 256), _WAVES * device.multiprocessors))
    return KernelLaunch(
        "movement", f"{way}_strided_{flat.element_size()}", grid, (here, pointer(tensor), table)
    )


def _merged(tensor: Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides in row-major order, with axes of size 1 removed and contiguous axes
    merged.
    """
    merged: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged
