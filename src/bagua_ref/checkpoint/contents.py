"""Contents of checkpoint files: trees that torch.load(weights_only=True) accepts, and their
digests.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.base.memory import bytes_of


def detached(state: Any) -> Any:
    """Copy a state dict, with separate memory for each tensor.

    Many algorithms keep weights or gradients as views of a flat bucket, and ``torch.save`` writes
    the whole bucket with each view. Call this before saving a part of a model.

    Args:
        state: a state dict, or any tree of dicts, lists and tuples with tensors in it.

    >>> bucket = torch.zeros(1000)
    >>> state = detached({"head.bias": bucket[:2]})
    >>> state["head.bias"].untyped_storage().nbytes()
    8
    """
    return map_leaves(
        lambda leaf, _: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, state, "state"
    )


def plain(value: Any, where: str) -> Any:
    """Copy ``value`` for saving, with tensors on the CPU and in separate storages: ``torch.save``
    writes the whole bucket with a view of it, and rejects a storage that has two dtypes.

    Args:
        value: the value to save.
        where: the value's name in messages.

    Raises:
        TypeError: ``torch.load(weights_only=True)`` would reject an entry; the message names it.
    """
    return map_leaves(_plain_leaf, value, where)


def _plain_leaf(value: Any, where: str) -> Any:
    try:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Tensor):
            value = value.detach().to("cpu", copy=True)  # keeps the strides
        known = _is_ordinary(value) or value is None or type(value) in (bool, float, str)
        if not known and not (type(value) is int and value.bit_length() < 64):
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            _load(file)
    except Exception as error:
        advice = "; torch.as_tensor makes a tensor of it" if isinstance(value, np.ndarray) else ""
        raise TypeError(
            f"{where} is a {type(value).__name__}, which torch.load(weights_only=True) does not take"
            " in this form; a checkpoint holds tensors, numbers, strings, bytes, None, and lists,"
            f" tuples and dicts of them{advice}"
        ) from error
    return value


def digest(value: Any) -> bytes:
    """Return a SHA-256 digest of a tree returned by `plain`, equal in every process."""
    parts: Iterable[bytes | memoryview]
    if _is_ordinary(value):
        parts = (
            f"{value.dtype} {tuple(value.shape)}".encode(),
            bytes_of(value.contiguous()).numpy().data,
        )
    elif isinstance(value, dict):
        parts = (digest(part) for entry in value.items() for part in entry)
    elif isinstance(value, (list, tuple)):
        parts = map(digest, value)
    elif isinstance(value, set):
        parts = sorted(map(digest, value))
    else:
        parts = [pickle.dumps(value)]
    content = hashlib.sha256(type(value).__name__.encode())
    for part in parts:
        content.update(part)
    return content.digest()


def read(path: Path) -> Any:
    """Read the tree in the file at ``path``; its tensors do not depend on the file."""
    # The file may be removed, and on network file systems mapped memory goes with it.
    return detached(_load(path, mmap=True))


def map_leaves(function: Callable[[Any, str], Any], value: Any, where: str) -> Any:
    """Copy a tree, with each leaf replaced by ``function(leaf, name of the leaf)``."""
    if isinstance(value, dict) and not isinstance(value, Counter):
        items = {
            function(key, f"a key of {where}"): map_leaves(function, item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
        if not isinstance(value, OrderedDict):
            return items
        ordered = OrderedDict(items)
        vars(ordered).update(vars(value))  # the _metadata of a module's state
        return ordered
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        mapped = [
            map_leaves(function, item, f"{where}[{index}]") for index, item in enumerate(value)
        ]
        return mapped if isinstance(value, list) else tuple(mapped)
    return function(value, where)


def _is_ordinary(value: Any) -> bool:
    """Return whether a value is a plain strided tensor, neither sparse nor of a subclass."""
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_nested or value.is_meta)
    )


def _load(file: Any, mmap: bool | None = None) -> Any:
    # The extra state of TransformerEngine's modules is a BytesIO, which runs nothing when loaded.
    added = {io.BytesIO} - set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals(list(added)):
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
