"""Tensors and arrays as bytes: the dtype's name, the shape, and the elements in row-major order (S8.5)."""

from __future__ import annotations

import math
import pickle
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["array_parts", "is_plain_array", "is_plain_tensor", "read_array", "read_tensor", "reduced_tensor", "tensor_parts"]

_HEAD = struct.Struct("=?BB")  # requires_grad, length of the dtype's name, number of dimensions; name and shape follow
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_TORCH_DTYPES = {str(dtype)[6:].encode(): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether dtype, shape and elements describe it fully: dense, on the CPU, without scales or attributes."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested or tensor.__dict__)
    )


def tensor_parts(tensor: Tensor) -> list[Any]:
    """Return header and elements of a plain tensor, to be joined."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Some dtypes support no operation; integers of the same width can be copied.
    integers = plain.view(_SAME_WIDTH[plain.element_size()]).contiguous().numpy().reshape(-1)
    name = str(tensor.dtype)[6:].encode()
    return [*_head(tensor.requires_grad, name, tuple(tensor.shape)), integers.view(np.uint8).data]


def read_tensor(view: memoryview, at: int) -> tuple[Tensor, int]:
    """Return the tensor whose header begins at ``at``, in its own memory, and its end."""
    requires_grad, name, shape, at = _read_head(view, at)
    dtype = _TORCH_DTYPES[name]
    end = at + _count(shape) * dtype.itemsize
    if end == at:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad), at
    # The bytes are Redis's reply, which is read-only, so they are copied.
    tensor = torch.frombuffer(bytearray(_slice(view, at, end)), dtype=dtype).reshape(shape)
    return (tensor.requires_grad_() if requires_grad else tensor), end


def reduced_tensor(tensor: Tensor) -> Any:
    """Return a reduction of a tensor without the rest of its storage, of which torch pickles all: 8 MB for a row of 4 kB."""
    if type(tensor) is torch.Tensor and is_plain_tensor(tensor):
        return _tensor_of, (b"".join(tensor_parts(tensor)),)
    by_storage = type(tensor).__reduce_ex__ is torch.Tensor.__reduce_ex__ and tensor.layout is torch.strided
    if not by_storage or tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        alone = tensor.detach().clone(memory_format=torch.contiguous_format).as_subclass(type(tensor))
    alone.requires_grad_(tensor.requires_grad).__dict__.update(tensor.__dict__)
    return alone.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _tensor_of(parts: bytes) -> Tensor:
    return read_tensor(memoryview(parts), 0)[0]


def is_plain_array(array: np.ndarray[Any, Any] | np.generic) -> bool:
    """Return whether dtype, shape and elements describe it fully.

    Raises:
        TypeError: the array is structured.
    """
    if array.dtype.names is not None:
        raise TypeError(
            f"a NumPy structured array (dtype {array.dtype}) cannot be cached; return a dict of its fields instead: "
            "{name: array[name] for name in array.dtype.names}"
        )
    if array.dtype.hasobject:
        return False
    try:
        return bool(np.dtype(array.dtype.str) == array.dtype)  # dtypes of other packages may have the name of plain bytes
    except TypeError:
        return False


def array_parts(array: np.ndarray[Any, Any]) -> list[Any]:
    """Return header and elements of a plain array, to be joined."""
    return [*_head(False, array.dtype.str.encode(), array.shape), array.tobytes()]


def read_array(view: memoryview, at: int) -> tuple[np.ndarray[Any, Any], int]:
    """Return the array whose header begins at ``at``, in its own memory, and its end."""
    _, name, shape, at = _read_head(view, at)
    dtype = np.dtype(name.decode())
    end = at + _count(shape) * dtype.itemsize
    if end == at:  # not np.empty: for each element of a dtype of no bytes it takes memory
        return np.ndarray(shape, dtype, bytearray()), at
    return np.frombuffer(bytearray(_slice(view, at, end)), dtype).reshape(shape), end


def _head(requires_grad: bool, name: bytes, shape: tuple[int, ...]) -> list[bytes]:
    return [_HEAD.pack(requires_grad, len(name), len(shape)), name, struct.pack(f"={len(shape)}q", *shape)]


def _read_head(view: memoryview, at: int) -> tuple[bool, bytes, tuple[int, ...], int]:
    requires_grad, length, dimensions = _HEAD.unpack_from(view, at)
    at += _HEAD.size
    name = bytes(view[at : at + length])
    at += length
    return requires_grad, name, struct.unpack_from(f"={dimensions}q", view, at), at + 8 * dimensions


def _count(shape: tuple[int, ...]) -> int:
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape} has a negative size")
    return math.prod(shape)


def _slice(view: memoryview, at: int, end: int) -> memoryview:
    if end > len(view):
        raise ValueError(f"elements end at {end}, but the value ends at {len(view)}")
    return view[at:end]
