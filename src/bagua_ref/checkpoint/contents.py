"""What files of checkpoints hold: trees that torch.load(weights_only=True) takes, and their digests."""

from __future__ import annotations

import hashlib
import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.base.memory import bytes_of
from bagua_ref.errors import CheckpointError


def detached(state: Any) -> Any:
    """Return a copy of a state dict whose tensors have memory of their own.

    Many algorithms keep weights or gradients as views of a flat bucket, and ``torch.save`` writes
    the whole bucket with each view. Call this before saving a part of a model.

    Args:
        state: a state dict, or any tree of dicts, lists and tuples with tensors in it.

    >>> bucket = torch.zeros(1000)
    >>> state = detached({"head.bias": bucket[:2]})
    >>> state["head.bias"].untyped_storage().nbytes()
    8
    """
    return _map_leaves(
        lambda leaf, _: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, state, "state"
    )


def plain(value: Any, where: str, stored: set[int] | None = None) -> Any:
    """Return ``value`` as a tree that can be saved, with tensors in the host's memory.

    Subclasses of containers and numbers become what they extend. Each tensor has a storage of its
    own; one that has this already is not copied.

    Args:
        value: the value to save.
        where: its name in messages.
        stored: addresses of storages that are saved already; those of ``value`` are added.

    Raises:
        TypeError: a tensor cannot be copied to the host.
        ValueError: it is nested too deeply.
    """
    stored = set() if stored is None else stored

    def leaf(value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            try:
                return _own_tensor(value.detach(), stored)
            except Exception as error:
                raise TypeError(
                    f"{where} is a {type(value).__name__} ({value.dtype}, {value.layout}), which"
                    f" a checkpoint cannot hold: {error}"
                ) from error
        if isinstance(value, np.generic):
            return value.item()
        kinds = (kind for kind in (bool, int, float, str) if isinstance(value, kind))
        return next((kind(value) for kind in kinds), value)

    try:
        return _map_leaves(leaf, value, where)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply, or contains itself") from None


def check_loadable(tree: Any, where: str) -> None:
    """Raise TypeError, which names the entry, unless ``torch.load(weights_only=True)`` takes what
    `plain` has returned.
    """
    empty = {}

    def leaf(value: Any, _: str) -> Any:
        # Only the dtype matters, except for sparse tensors and classes of tensors.
        if not isinstance(value, Tensor) or not _is_ordinary(value):
            return value
        if value.dtype not in empty:
            empty[value.dtype] = torch.empty(0, dtype=value.dtype)
        return empty[value.dtype]

    if refused := _refused(_map_leaves(leaf, tree, where), where):
        place, value = refused
        advice = "; torch.as_tensor makes a tensor of it" if isinstance(value, np.ndarray) else ""
        raise TypeError(
            f"{place} is a {type(value).__name__}, which torch.load(weights_only=True) does not take"
            " in this form; a checkpoint holds tensors, numbers, strings, bytes, None, and lists,"
            f" tuples and dicts of them{advice}"
        )


def digest(value: Any) -> bytes:
    """Return a digest of a tree that `plain` has returned, the same in every process."""
    content: Any = hashlib.sha256(f"{type(value).__name__};".encode())
    if isinstance(value, Tensor) and _is_ordinary(value):
        content.update(f"{value.dtype} {tuple(value.shape)};".encode())
        content.update(bytes_of(value.contiguous()).numpy())
    elif isinstance(value, (list, tuple)):
        content.update(b"".join(map(digest, value)))
    elif isinstance(value, set):
        content.update(b"".join(sorted(map(digest, value))))
    elif isinstance(value, dict):
        content.update(b"".join(digest(part) for entry in value.items() for part in entry))
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        content.update(repr(value).encode())
    else:
        content.update(_saved(value))
    digested: bytes = content.digest()
    return digested


def read(path: Path) -> Any:
    """Return the tree in the file at ``path``, whose tensors do not depend on the file.

    Raises:
        CheckpointError: it cannot be read, or holds something else than `plain` returns.
    """
    try:
        tree = _load(path, mmap=True)
    except OSError:  # for lack of permission, for instance
        raise
    except Exception as error:  # RuntimeError, UnpicklingError, EOFError, ... depending on the file
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    # The file may be removed, and on network file systems mapped memory goes with it.
    return detached(tree)


def _map_leaves(function: Callable[[Any, str], Any], value: Any, where: str) -> Any:
    """Return a copy of a tree with ``function(leaf, its name)`` in place of each leaf."""
    if isinstance(value, dict):
        items = {
            key.item() if isinstance(key, np.generic) else key: _map_leaves(
                function, item, f"{where}[{key!r}]"
            )
            for key, item in value.items()
        }
        kind = next(kind for kind in (Counter, OrderedDict, dict) if isinstance(value, kind))
        made = kind(items)
        if type(value) is OrderedDict:  # the _metadata of a module's state
            vars(made).update(vars(value))
        return made
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        listed = [
            _map_leaves(function, item, f"{where}[{index}]") for index, item in enumerate(value)
        ]
        return listed if isinstance(value, list) else tuple(listed)
    return function(value, where)


def _own_tensor(tensor: Tensor, stored: set[int]) -> Tensor:
    """Return ``tensor`` on the CPU with a storage of its own, which is added to ``stored``."""
    if not _is_ordinary(tensor):
        return tensor.cpu().clone()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    storage = tensor.untyped_storage()
    # A view of a bucket, a tied weight, or the same tensor in another part: torch.save would
    # write all of the bucket, and refuse a storage that has two dtypes.
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in stored:
        tensor = tensor.clone()  # keeps the strides
    stored.add(tensor.untyped_storage().data_ptr())
    return tensor


def _is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor is nothing but elements, as opposed to sparse ones and subclasses."""
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_meta
    )


def _refused(tree: Any, where: str) -> tuple[str, Any] | None:
    """Return name and value of the smallest part of ``tree`` that cannot be saved and loaded."""
    try:
        _load(io.BytesIO(_saved(tree)))
    except Exception:
        parts = (found for name, part in _parts(tree, where) if (found := _refused(part, name)))
        return next(parts, (where, tree))
    return None


def _parts(tree: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield f"a key of {where}", key
            yield f"{where}[{key!r}]", value
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield f"{where}[{index}]", value


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _load(file: Any, mmap: bool | None = None) -> Any:
    # The extra state of TransformerEngine's modules is a BytesIO, which runs nothing when loaded.
    added = {io.BytesIO} - set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals(list(added)):
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
