"""Format of stored values (S8.5): a frame around a tree of tagged entries; pickle is only a last
resort.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from bagua_ref.contrib.cache.client import of_signal_handler

__all__ = ["DamagedValueError", "TooLargeError", "decode", "encode"]

# First byte of every value. Numbers have the machine's byte order, so the other byte order is another
# version.
VERSION = 1 if sys.byteorder == "little" else 129

_FRAME = struct.Struct("=BIIQ")  # version, total bytes, bytes of the key, xxh3 of the rest
_COUNT = struct.Struct("=I")
_INT = struct.Struct("=q")
_FLOAT = struct.Struct("=d")
_COMPLEX = struct.Struct("=dd")
_LARGEST = 512 * 1024**2  # the longest value of Redis, in bytes
_INSTEAD = (
    "return plain dense tensors on the CPU, arrays of numbers or text, numbers, str, bytes, and tuples, lists and dicts of"
    " them"
)


class DamagedValueError(ValueError):
    """Raised if a stored value was not written by `encode` on a compatible machine, belongs to
    another key, or needs pickle without permission.
    """


class TooLargeError(ValueError):
    """Raised if a value exceeds the size limit of Redis."""


def encode(value: Any, allow_pickle: bool, key: bytes = b"") -> bytes:
    """Encode ``value`` as bytes: a frame with version, lengths and checksum, the key, and a tree of
    tagged entries (S8.5).

    Tensors, arrays, None, bool, numbers, str, bytes, bytearray, and tuples, lists and dicts of them
    need no pickle. Strides are not stored: decoded tensors and arrays are row-major.

    Args:
        value: the value to store.
        allow_pickle: whether other objects may be pickled.
        key: the key under which it is stored.

    Raises:
        TypeError: ``value`` contains a NumPy structured array, an object that needs pickle without
            permission, or one that cannot be pickled.
        TooLargeError: the value is larger than 512 MiB.

    >>> decode(encode({"tokens": torch.tensor([3, 1]), "text": "ja"}, allow_pickle=False), allow_pickle=False)
    {'tokens': tensor([3, 1]), 'text': 'ja'}
    """
    parts: list[Any] = [key]
    try:
        _write(value, parts, allow_pickle)
    except RecursionError:  # nested too deeply, or containing itself, which pickle can store
        parts = [key]
        _write_pickled(value, parts, allow_pickle)
    size = _FRAME.size + sum(map(len, parts))
    if size > _LARGEST:
        raise TooLargeError(
            f"a value of {size} bytes is not cached, as Redis takes at most {_LARGEST}; cache parts"
            " of it"
        )
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join((_FRAME.pack(VERSION, size, len(key), checksum.intdigest()), *parts))


def decode(data: bytes, allow_pickle: bool, key: bytes = b"") -> Any:
    """Decode a value that `encode` encoded. Tensors and arrays are writable and share no memory
    (S8.5).

    Args:
        data: bytes from a store.
        allow_pickle: whether pickled entries may be read, which can run arbitrary code of their
            writer.
        key: the key that `encode` was given.

    Raises:
        DamagedValueError: data are truncated, in another format or version, or stored under another
            key, or need pickle without permission (S8.3).
    """
    if len(data) <= _FRAME.size or data[0] != VERSION:
        raise DamagedValueError(f"{data[:8]!r}... is not a cached value of version {VERSION}")
    view = memoryview(data)
    _, size, length, checksum = _FRAME.unpack_from(view)
    if size != len(data):
        raise DamagedValueError(f"a cached value has {len(data)} bytes instead of {size}")
    if xxhash.xxh3_64_intdigest(view[_FRAME.size :]) != checksum:
        raise DamagedValueError("a cached value does not match its checksum")
    begin = _FRAME.size + length
    if view[_FRAME.size : begin] != key:
        found = bytes(view[_FRAME.size : min(begin, _FRAME.size + 100)])
        raise DamagedValueError(f"a cached value belongs to the key {found!r} instead of {key!r}")
    handled = sys.exc_info()[1]
    try:
        value, end = _read(view, begin, allow_pickle)
    except DamagedValueError:
        raise
    except Exception as error:  # unpickling can raise anything
        if of_signal_handler(error, handled) is not None:
            raise
        raise DamagedValueError(
            f"a cached value cannot be read: {type(error).__name__}: {error}"
        ) from error
    if end != size:
        raise DamagedValueError(f"a cached value ends after {end} of {size} bytes")
    return value


def _write(value: Any, parts: list[Any], allow_pickle: bool) -> None:
    """Append the entry of ``value``: a tag and the content."""
    kind = type(value)
    if kind is torch.Tensor and is_plain_tensor(value):
        parts += [b"t", *tensor_parts(value)]
    elif kind in (np.ndarray, np.memmap) and is_plain_array(value):
        parts += [b"a", *array_parts(value)]
    elif kind in _SCALARS:
        parts.append(_SCALARS[kind](value))
    elif isinstance(value, np.generic) and kind is value.dtype.type and is_plain_array(value):
        parts += [b"g", *array_parts(np.asarray(value))]
    elif kind in (tuple, list):
        parts += [b"(" if kind is tuple else b"[", _COUNT.pack(len(value))]
        for item in value:
            _write(item, parts, allow_pickle)
    elif kind is dict:
        parts += [b"{", _COUNT.pack(len(value))]
        for key, item in value.items():
            _write(key, parts, allow_pickle)
            _write(item, parts, allow_pickle)
    else:
        _write_pickled(value, parts, allow_pickle)


def _write_pickled(value: Any, parts: list[Any], allow_pickle: bool) -> None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if not allow_pickle:
        raise TypeError(
            f"a value of type {kind} cannot be cached without pickle, which is off for hosts="
            " because whoever can write to those servers could run code here; pass"
            f" allow_pickle=True if you trust all of them, or {_INSTEAD}"
        )
    handled = sys.exc_info()[1]
    try:
        pickled = io.BytesIO()
        _Pickler(pickled, pickle.HIGHEST_PROTOCOL).dump(value)
    except RecursionError:
        raise
    except Exception as error:  # the pickling methods of a class can raise anything
        if of_signal_handler(error, handled) is not None:
            raise
        raise TypeError(
            f"a value of type {kind} cannot be cached, as pickle raised {type(error).__name__}:"
            f" {error}; {_INSTEAD}"
        ) from error
    parts.append(_blob(b"p", pickled.getvalue()))


class _Pickler(pickle.Pickler):
    """Pickler that saves only the elements of tensors instead of their whole storages."""

    def reducer_override(self, value: Any) -> Any:
        return reduced_tensor(value) if isinstance(value, torch.Tensor) else NotImplemented


def _blob(tag: bytes, data: bytes | bytearray) -> bytes:
    if len(data) > _LARGEST:
        raise TooLargeError(
            f"a value of {len(data)} bytes is not cached, as Redis takes at most {_LARGEST}; cache"
            " parts of it"
        )
    return tag + _COUNT.pack(len(data)) + data


def _integer(value: int) -> bytes:
    if -(2**63) <= value < 2**63:
        return b"i" + _INT.pack(value)
    return _blob(b"I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: _integer,
    float: lambda value: b"f" + _FLOAT.pack(value),
    complex: lambda value: b"c" + _COMPLEX.pack(value.real, value.imag),
    str: lambda value: _blob(b"s", value.encode("utf-8", "surrogatepass")),
    bytes: lambda value: _blob(b"b", value),
    bytearray: lambda value: _blob(b"B", value),
    # Not as arrays: NumPy strips trailing NULs from the strings of an array.
    np.str_: lambda value: _blob(b"u", value.encode("utf-8", "surrogatepass")),
    np.bytes_: lambda value: _blob(b"y", bytes(value)),
}


def _read(view: memoryview, at: int, allow_pickle: bool) -> tuple[Any, int]:
    """Decode the entry at ``at``; return its value and the position of the next entry."""
    tag = view[at]
    at += 1
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    if tag in _NUMBERS:
        fields, make = _NUMBERS[tag]
        return make(*fields.unpack_from(view, at)), at + fields.size
    if tag in b"ta":
        return read_tensor(view, at) if tag == ord("t") else read_array(view, at)
    if tag == ord("g"):
        array, at = read_array(view, at)
        return array[()], at
    (count,) = _COUNT.unpack_from(view, at)
    at += _COUNT.size
    if tag in _BLOBS:
        end = at + count
        if end > len(view):
            raise DamagedValueError(f"a cached value should have {end} bytes but has {len(view)}")
        if tag == ord("p") and not allow_pickle:
            raise DamagedValueError(
                "a cached value needs pickle; pass allow_pickle=True if you trust all who can write"
                " there"
            )
        return _BLOBS[tag](view[at:end]), end
    items = []
    for _ in range(count * 2 if tag == ord("{") else count):
        item, at = _read(view, at, allow_pickle)
        items.append(item)
    return _CONTAINERS[tag](items), at


_CONSTANTS = {ord("N"): None, ord("T"): True, ord("F"): False}
_NUMBERS: dict[int, tuple[struct.Struct, Callable[..., Any]]] = {
    ord("i"): (_INT, int),
    ord("f"): (_FLOAT, float),
    ord("c"): (_COMPLEX, complex),
}
_BLOBS: dict[int, Callable[[memoryview], Any]] = {
    ord("s"): lambda view: str(view, "utf-8", "surrogatepass"),
    ord("b"): bytes,
    ord("B"): bytearray,
    ord("u"): lambda view: np.str_(str(view, "utf-8", "surrogatepass")),
    ord("y"): lambda view: np.bytes_(bytes(view)),
    ord("I"): lambda view: int.from_bytes(view, "little", signed=True),
    ord("p"): lambda view: pickle.loads(view),  # noqa: S301 # only with permission: see _read
}
_CONTAINERS: dict[int, Callable[[list[Any]], Any]] = {
    ord("("): tuple,
    ord("["): list,
    ord("{"): lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}


# requires_grad, length of the dtype's name, number of dimensions; name and shape follow
_HEAD = struct.Struct("=?BB")
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_TORCH_DTYPES = {
    str(dtype)[6:].encode(): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is fully described by dtype, shape and elements: dense, on the CPU,
    without scales or attributes.
    """
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested or tensor.__dict__)
    )


def tensor_parts(tensor: Tensor) -> list[Any]:
    """Encode a plain tensor as a list of header and elements."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Some dtypes support no operation; integers of the same width can be copied.
    integers = plain.view(_SAME_WIDTH[plain.element_size()]).contiguous().numpy().reshape(-1)
    name = str(tensor.dtype)[6:].encode()
    return [*_head(tensor.requires_grad, name, tuple(tensor.shape)), integers.view(np.uint8).data]


def read_tensor(view: memoryview, at: int) -> tuple[Tensor, int]:
    """Decode the tensor at ``at`` into new memory; return it and its end position."""
    requires_grad, name, shape, at = _read_head(view, at)
    dtype = _TORCH_DTYPES[name]
    end = at + _count(shape) * dtype.itemsize
    if end == at:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad), at
    # The bytes are Redis's reply, which is read-only, so they are copied.
    tensor = torch.frombuffer(bytearray(_slice(view, at, end)), dtype=dtype).reshape(shape)
    return (tensor.requires_grad_() if requires_grad else tensor), end


def reduced_tensor(tensor: Tensor) -> Any:
    """Return a pickle reduction of a tensor that holds only its own elements; torch would pickle
    all of its storage: 8 MB for a row of 4 kB.
    """
    if type(tensor) is torch.Tensor and is_plain_tensor(tensor):
        return _tensor_of, (b"".join(tensor_parts(tensor)),)
    by_storage = (
        type(tensor).__reduce_ex__ is torch.Tensor.__reduce_ex__ and tensor.layout is torch.strided
    )
    if (
        not by_storage
        or tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    ):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        alone = (
            tensor.detach().clone(memory_format=torch.contiguous_format).as_subclass(type(tensor))
        )
    alone.requires_grad_(tensor.requires_grad).__dict__.update(tensor.__dict__)
    return alone.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _tensor_of(parts: bytes) -> Tensor:
    return read_tensor(memoryview(parts), 0)[0]


def is_plain_array(array: np.ndarray[Any, Any] | np.generic) -> bool:
    """Return whether an array is fully described by dtype, shape and elements.

    Raises:
        TypeError: the array is structured.
    """
    if array.dtype.names is not None:
        raise TypeError(
            f"a NumPy structured array (dtype {array.dtype}) cannot be cached; return a dict of its"
            " fields instead: {name: array[name] for name in array.dtype.names}"
        )
    if array.dtype.hasobject:
        return False
    try:
        # dtypes of other packages may have the name of plain bytes
        return bool(np.dtype(array.dtype.str) == array.dtype)
    except TypeError:
        return False


def array_parts(array: np.ndarray[Any, Any]) -> list[Any]:
    """Encode a plain array as a list of header and elements."""
    return [*_head(False, array.dtype.str.encode(), array.shape), array.tobytes()]


def read_array(view: memoryview, at: int) -> tuple[np.ndarray[Any, Any], int]:
    """Decode the array at ``at`` into new memory; return it and its end position."""
    _, name, shape, at = _read_head(view, at)
    dtype = np.dtype(name.decode())
    end = at + _count(shape) * dtype.itemsize
    if end == at:  # not np.empty: for each element of a dtype of no bytes it takes memory
        return np.ndarray(shape, dtype, bytearray()), at
    return np.frombuffer(bytearray(_slice(view, at, end)), dtype).reshape(shape), end


def _head(requires_grad: bool, name: bytes, shape: tuple[int, ...]) -> list[bytes]:
    return [
        _HEAD.pack(requires_grad, len(name), len(shape)),
        name,
        struct.pack(f"={len(shape)}q", *shape),
    ]


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
