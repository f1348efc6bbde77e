"""Plain trees: tensors, numbers, strings, None, and lists, tuples and dicts of them; their digests
and their files.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickletools
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from bagua_ref.base.memory import bytes_of
from bagua_ref.base.untrusted import check_hash_collisions, one_line, open_file
from bagua_ref.errors import CheckpointError

__all__ = ["digest", "plain", "read_plain"]

_STORAGES = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
_DTYPES = {f"torch {name}Storage": dtype for dtype, name in _STORAGES.items()}
_REBUILD, _COUNTER, _HOOKS = (
    "torch._utils _rebuild_tensor_v2",
    "collections Counter",
    "collections OrderedDict",
)
_NAMES = {*_DTYPES, _REBUILD, _COUNTER, _HOOKS}
"""Names that the pickle in a file may use."""
_SIMPLE = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TAKEN = {
    "TUPLE": None,
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "APPENDS": None,
    "APPEND": 1,
    "SETITEMS": None,
    "SETITEM": 2,
}
"""Number of items that each takes from the stack; None: all since the last mark."""
_DEEPEST = 100
_MOST_DIMENSIONS = 64  # as in torch


def plain(value: Any, where: str, stored: set[int] | None = None, depth: int = 0) -> Any:
    """Return ``value`` as a plain tree whose tensors are in the host's memory, each with a storage
    of its own.

    Tensors that are already like this are not copied.

    Args:
        value: the value to save.
        where: its name in messages.
        stored: for recursion: addresses of the storages in the tree so far.
        depth: for recursion: the containers around the value.

    Raises:
        TypeError: it contains something else.
        ValueError: it is nested more than 100 deep.
    """
    stored = set() if stored is None else stored
    if depth > _DEEPEST:
        raise ValueError(
            f"{where.partition('[')[0]} is nested more than {_DEEPEST} deep, which a checkpoint"
            " cannot hold"
        )
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, where, stored)
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    for container in (list, tuple):
        if isinstance(value, container):
            return container(
                plain(item, f"{where}[{place}]", stored, depth + 1)
                for place, item in enumerate(value)
            )
    if isinstance(value, dict):
        items = {
            plain(key, f"a key of {where}", None, depth + 1): plain(
                item, f"{where}[{key!r}]", stored, depth + 1
            )
            for key, item in value.items()
        }
        return Counter(items) if isinstance(value, Counter) else items
    advice = "; torch.as_tensor makes a tensor of it" if isinstance(value, np.ndarray) else ""
    raise TypeError(
        f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, None,"
        f" and lists, tuples and dicts of them{advice}"
    )


def _plain_tensor(tensor: Tensor, where: str, stored: set[int]) -> Tensor:
    tensor = tensor.detach()
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or tensor.dtype not in _STORAGES
    ):
        raise TypeError(
            f"{where} is a {type(tensor).__name__} ({tensor.dtype}, {tensor.layout}), which a"
            " checkpoint cannot hold"
        )
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    storage = tensor.untyped_storage()
    # a view of a bucket, for instance, or a tied weight
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in stored:
        tensor = tensor.clone()  # keeps the strides
    stored.add(tensor.untyped_storage().data_ptr())
    return tensor


def digest(value: Any) -> bytes:
    """Return a digest of the content of a plain tree."""
    content = hashlib.sha256()
    _update(content, value)
    return content.digest()


def _update(content: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        content.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        content.update(bytes_of(value.contiguous()).numpy())
    elif isinstance(value, (list, tuple, dict)):
        content.update(f"{type(value).__name__} {len(value)};".encode())
        for item in (
            value
            if not isinstance(value, dict)
            else (part for entry in value.items() for part in entry)
        ):
            _update(content, item)
    else:
        content.update(f"{type(value).__name__} {value!r};".encode())


def read_plain(path: Path, size: int | None = None) -> Any:
    """Return the plain tree that ``torch.save`` wrote to ``path``, in memory of at most about the
    file's size.

    Nothing in the file is executed or looked up by name: of the operations of pickles, this takes
    those that build plain trees.

    Args:
        path: the file.
        size: that it must have; None: any.

    Raises:
        CheckpointError: the file is damaged, or was not written by `bagua_ref.checkpoint.save`.
    """
    try:
        with open_file(path) as file:
            found = os.fstat(file.fileno()).st_size
            if size not in (None, found):
                raise ValueError(f"it has {found} bytes instead of {size}")
            with zipfile.ZipFile(file) as archive:
                return _Reader(archive, found).read()
    except Exception as error:  # whoever wrote the file chose what goes wrong
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {one_line(str(error))}"
        ) from error


class _Name(str):
    """One of `_NAMES` in a pickle, which is not a string of the tree."""


class _Storage(NamedTuple):
    """The elements of a tensor, which is not a tuple of the tree."""

    flat: Tensor


class _Pairs(list[tuple[Any, Any]]):
    """A dict to be, as it must be whole when the hashes of its keys are checked."""


class _Counts(_Pairs):
    """A Counter to be."""


class _Reader:
    """Reads an archive that ``torch.save`` wrote.

    Args:
        archive: the archive.
        size: of the file in bytes, which bounds the size of the tree.
    """

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        entries = archive.infolist()
        if (
            any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            or sum(e.file_size for e in entries) > size
        ):
            raise ValueError("its entries are compressed or overlap")
        pickled = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError("it is not a file of torch.save")
        self._archive, self._pickled = archive, pickled[0]
        folder = self._pickled.filename.removesuffix("data.pkl")
        self._entries = {entry.filename.removeprefix(folder): entry for entry in entries}
        order = self._entries.get("byteorder")
        if order is not None and archive.read(order) != sys.byteorder.encode():
            raise ValueError(
                "its numbers have another byte order than this machine's, which is"
                f" {sys.byteorder}-endian"
            )

    def read(self) -> Any:
        """Return the tree."""
        stack: list[Any] = []
        marked: list[list[Any]] = []
        memo: dict[int, Any] = {}
        for operation, argument, _ in pickletools.genops(self._archive.read(self._pickled)):
            name = operation.name
            if name == "STOP":
                return _finished(stack.pop())
            if name in _SIMPLE:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name == "GLOBAL":
                if argument not in _NAMES:
                    raise ValueError(f"it refers to {argument!r}")
                stack.append(_Name(argument))
            elif name in ("EMPTY_LIST", "EMPTY_DICT"):
                stack.append([] if name == "EMPTY_LIST" else _Pairs())
            elif name == "MARK":
                marked.append(stack)
                stack = []
            elif name in _TAKEN:
                count = _TAKEN[name]
                if count is None:
                    inside, stack = stack, marked.pop()
                else:
                    inside = [stack.pop() for _ in range(count)][::-1]
                if name.startswith("TUPLE"):
                    stack.append(tuple(inside))
                else:
                    _extend(stack[-1], inside, _Pairs if name.startswith("SETITEM") else list)
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[cast("int", argument)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                known = memo[cast("int", argument)]
                if not isinstance(known, str):
                    raise ValueError("it contains a value in several places")
                stack.append(known)
            elif name == "BINPERSID":
                stack.append(self._storage(*stack.pop()))
            elif name == "REDUCE":
                arguments = stack.pop()
                stack.append(_made(stack.pop(), arguments))
            elif name != "PROTO":
                raise ValueError(f"it contains the operation {name!r}")
        raise ValueError("it has no end")

    def _storage(self, kind: str, dtype: str, key: str, location: str, numel: int) -> _Storage:
        """Return the elements of an entry, each of which belongs to one tensor."""
        if kind != "storage" or not isinstance(dtype, _Name):
            raise ValueError("it contains something else than the storage of a tensor")
        entry = self._entries.pop(f"data/{key}", None)
        if entry is None:
            raise ValueError(f"the storage {key!r} is missing, or that of several tensors")
        data = bytearray(self._archive.read(entry))
        flat = (
            torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        )
        if len(data) != numel * _DTYPES[dtype].itemsize:
            raise ValueError(
                f"the storage {key!r} has {len(data)} bytes, which are not {numel} elements of"
                f" {_DTYPES[dtype]}"
            )
        # A bool that is neither 0 nor 1 would be undefined behaviour.
        return _Storage(flat != 0 if _DTYPES[dtype] is torch.bool else flat.view(_DTYPES[dtype]))


def _extend(container: Any, inside: list[Any], kind: type[list[Any]]) -> None:
    """Add items to a list, or pairs of keys and values to a dict to be."""
    if type(container) is not kind:
        raise ValueError("it adds to something else than a list or a dict")
    container.extend(zip(inside[::2], inside[1::2], strict=True) if kind is _Pairs else inside)


def _made(name: Any, arguments: Any) -> Any:
    """Return the result of a call in a pickle: a Counter, or a tensor and the empty dict of its
    hooks.
    """
    if name == _HOOKS and isinstance(name, _Name) and arguments == ():
        return name
    if name == _COUNTER and isinstance(name, _Name):
        (counts,) = arguments
        if type(counts) is _Pairs:
            return _Counts(counts)
    if name == _REBUILD and isinstance(name, _Name):
        return _tensor(*arguments)
    raise ValueError("it contains a call that makes no tensor")


def _finished(value: Any, depth: int = 0) -> Any:
    """Return a value of the tree, with dicts made; raise if it is none, or nested too deep."""
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    if isinstance(value, (_Name, _Storage)):
        raise ValueError("it contains a part of a tensor in another place")
    if isinstance(value, _Pairs):
        pairs = [(_finished(key, depth + 1), _finished(item, depth + 1)) for key, item in value]
        check_hash_collisions(key for key, _ in pairs)
        return Counter(dict(pairs)) if isinstance(value, _Counts) else dict(pairs)
    return (
        type(value)(_finished(item, depth + 1) for item in value)
        if type(value) in (list, tuple)
        else value
    )


def _tensor(
    storage: Any,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: str,
) -> Tensor:
    """Return the tensor of a storage, whose elements it has all."""
    if not isinstance(storage, _Storage) or hooks != _HOOKS:
        raise ValueError("it contains a call that makes no tensor")
    if (
        not all(type(number) is int and number >= 0 for number in (offset, *size, *stride))
        or len(size) > _MOST_DIMENSIONS
    ):
        raise ValueError(
            f"a tensor has more than {_MOST_DIMENSIONS} dimensions, or something else than natural"
            " numbers for sizes"
        )
    if offset != 0 or math.prod(size) != storage.flat.numel():
        raise ValueError("a tensor is not of the size of its storage")
    return (
        storage.flat.as_strided(size, stride).clone()
        if storage.flat.numel()
        else storage.flat.reshape(size)
    )
