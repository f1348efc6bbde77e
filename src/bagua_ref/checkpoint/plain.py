"""Plain trees: tensors, numbers, strings, None, and lists, tuples and dicts of them; their digests and their files."""

from __future__ import annotations

import hashlib
import pickletools
import zipfile
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bagua_ref.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["digest", "plain", "read_plain"]

_STORAGES = {
    torch.bool: "Bool", torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double",
    torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip
_GLOBALS = {
    "collections Counter",
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    *(f"torch {name}Storage" for name in _STORAGES.values()),
}
"""What the pickle in a file may name. `torch.load` allows more, such as ``bytearray``, which takes any amount of memory."""
_OTHER_WAYS_TO_NAME = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}


def plain(value: Any, where: str, stored: set[int] | None = None) -> Any:
    """Return ``value`` as a plain tree whose tensors are in the host's memory, each with a storage of its own.

    Tensors that are already like this are not copied.

    Args:
        value: the value to save.
        where: its name in messages.
        stored: for recursion: addresses of the storages in the tree so far.

    Raises:
        TypeError: it contains something else.
    """
    stored = set() if stored is None else stored
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
            return container(plain(item, f"{where}[{place}]", stored) for place, item in enumerate(value))
    if isinstance(value, dict):
        items = {plain(key, f"a key of {where}"): plain(item, f"{where}[{key!r}]", stored) for key, item in value.items()}
        return Counter(items) if isinstance(value, Counter) else items
    advice = "; torch.as_tensor makes a tensor of it" if isinstance(value, np.ndarray) else ""
    raise TypeError(
        f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, None, and lists, tuples and dicts of "
        f"them{advice}"
    )


def _plain_tensor(tensor: Tensor, where: str, stored: set[int]) -> Tensor:
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.dtype not in _STORAGES:
        raise TypeError(f"{where} is a {type(tensor).__name__} ({tensor.dtype}, {tensor.layout}), which a checkpoint cannot hold")
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in stored:  # a view of a bucket, for instance, or a tied weight
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
        content.update(value.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, (list, tuple, dict)):
        content.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value if not isinstance(value, dict) else (part for entry in value.items() for part in entry):
            _update(content, item)
    else:
        content.update(f"{type(value).__name__} {value!r};".encode())


def read_plain(path: Path) -> Any:
    """Return the plain tree that ``torch.save`` wrote to ``path``, in memory of at most about the file's size; execute nothing.

    Raises:
        CheckpointError: the file is damaged, or was not written by `bagua_ref.checkpoint.save`.
    """
    try:
        size = path.stat().st_size
        _check_archive(path, size)
        value = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        return _Reader(size).read(value)
    except Exception as error:  # whoever wrote the file chose what goes wrong
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _check_archive(path: Path, size: int) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
            raise ValueError("its entries are compressed or overlap")
        pickled = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError("it is not a file of torch.save")
        for operation, argument, _ in pickletools.genops(archive.read(pickled[0])):
            named = argument if operation.name == "GLOBAL" else operation.name
            if named in _OTHER_WAYS_TO_NAME or (operation.name == "GLOBAL" and named not in _GLOBALS):
                raise ValueError(f"it refers to {named!r}")


class _Reader:
    """Copies a loaded tree, whose tensors are windows into the mapped file.

    Args:
        size: of the file in bytes, which bounds the size of the copy.
    """

    def __init__(self, size: int) -> None:
        self._left = size

    def read(self, value: Any) -> Any:
        """Return the copy."""
        tensor = isinstance(value, torch.Tensor)
        self._left -= value.nbytes if tensor else 1  # each node takes at least a byte of the pickle
        if self._left < 0:
            raise ValueError("its content is larger than the file")
        if tensor:
            if type(value) is not torch.Tensor or value.untyped_storage().nbytes() != value.nbytes:
                raise ValueError("a tensor is not of the size of its storage")
            return value.clone()
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.read, value))
        if isinstance(value, dict):
            return type(value)({self.read(key): self.read(item) for key, item in value.items()})
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise ValueError(f"it contains a {type(value).__name__}")
