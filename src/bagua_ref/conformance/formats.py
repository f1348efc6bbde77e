"""What golden vectors, traces and records share: safetensors files, and digests of tensors.

Equal tensors give equal files whatever the version of the package safetensors. Writing does without
it, so that a training can be recorded anywhere; reading needs it. A digest has 64 bits, which tell
whether two tensors have the same bits, dtype and shape.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.base.not_provided import install_command
from bagua_ref.base.untrusted import one_line, read_file

__all__ = [
    "CODES",
    "DamagedFileError",
    "bytes_of",
    "digest",
    "digest_of_text",
    "dtype_named",
    "name_of",
    "read_safetensors",
    "read_tensors",
    "write_safetensors",
]

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls each dtype."""
_WORDS = 512  # of 8 bytes in a row; the keys stay in the cache
_KEYS = np.frombuffer(hashlib.shake_128(b"digest").digest(2 * 8 * _WORDS), "<u8").reshape(
    2, -1
) | np.uint64(1)
_BLOCK = 256  # rows at a time, which are read from memory once and from the cache again
_BLOCK_ON_DEVICE = 2**14  # likewise: it bounds temporary memory


def name_of(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def bytes_of(x: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, row-major."""
    # a single element may have any stride
    flat = x.detach().cpu().contiguous().as_strided((x.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if x.numel() else b""


class DamagedFileError(ValueError):
    """A file is not a safetensors file, or only part of one."""


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> bytes:
    """Write tensors by name, and return the bytes written.

    The widest elements come first, so that all lie at multiples of their size; equally wide ones
    are sorted by name.
    """
    entries: dict[str, Any] = {}
    parts: list[bytes] = []
    place = 0
    for name, x in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        part = bytes_of(x)
        entries[name] = {
            "dtype": CODES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [place, place + len(part)],
        }
        parts.append(part)
        place += len(part)
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    header += b" " * (-len(header) % 8)
    data = b"".join([len(header).to_bytes(8, "little"), header, *parts])
    path.write_bytes(data)
    return data


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors by name.

    Raises:
        DamagedFileError: it is truncated or malformed, or has a dtype that is not in `CODES`, for
            which nothing here has a use.
        ModuleNotFoundError: the package safetensors is not installed.
        OSError: it cannot be read.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ModuleNotFoundError:
        command = install_command("conformance")
        raise ModuleNotFoundError(
            f"to read safetensors files, install safetensors: {command}"
        ) from None
    data = read_file(path)
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise DamagedFileError(f"not a complete safetensors file: {one_line(str(error))}") from None
    except (KeyError, RuntimeError, TypeError) as error:
        # a dtype or a shape that safetensors takes, but torch does not
        raise DamagedFileError(
            f"a tensor that torch cannot hold: {str(error).splitlines()[0]}"
        ) from None
    for name, x in tensors.items():
        if x.dtype not in CODES:
            raise DamagedFileError(
                f"tensor {name!r} is of {x.dtype}; known are {', '.join(CODES.values())}"
            )
    return dict(tensors)


def read_tensors(path: Path, error: type[Exception]) -> dict[str, Tensor]:
    """Return a file's tensors by name; raise ``error`` with the path and the reason if that
    fails.
    """
    try:
        return read_safetensors(path)
    except OSError as reason:
        raise error(f"{str(path)!r} cannot be read: {reason.strerror}") from None
    except (DamagedFileError, ModuleNotFoundError) as reason:
        raise error(f"{str(path)!r}: {reason}") from None


def digest(x: Tensor) -> int:
    """Return 64 bits of a tensor's elements in order, its dtype and its shape; equal on every
    little-endian machine and device.

    The bytes are rows of 512 words w of 8 bytes. A row's sums modulo 2^64 are sum_j k_j w_j, and
    sum_j l_j v_j, where v_j is w_j with its bytes reversed; the 1,024 keys, which are odd, are
    SHAKE128 of "digest", each with its lowest bit set. The digest is BLAKE2b of dtype, shape, the
    two sums of each row and the bytes after the last row. As keys are odd, a change of one word of
    a row always changes its sums; other changes leave them with a probability of at most 2^-58:
    what is high in w, and hence weak in its sum, is low in v. It finds accidents, not forgeries.

    Args:
        x: dense, of any strides, dtype and device; unchanged. Strides do not count.

    Returns:
        From 0 to 2^64 - 1.

    >>> a = torch.arange(6.0)
    >>> digest(a) == digest(torch.arange(12.0)[::2] / 2), digest(a) == digest(a.flip(0)), digest(a) == digest(a.reshape(2, 3))
    (True, False, False)
    """
    x = x.detach().resolve_conj().resolve_neg()
    header = f"{x.dtype} {list(x.shape)} ".encode()
    data = x.contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // (8 * _WORDS) * 8 * _WORDS
    sums = b""
    if whole:
        sums = (
            _sums(data[:whole].numpy())
            if data.device.type == "cpu"
            else _sums_on_device(data[:whole])
        )
    return digest_of_text(header + sums + bytes_of(data[whole:]))


def digest_of_text(text: bytes) -> int:
    """Return 64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _sums(data: np.ndarray) -> bytes:
    """Return both sums of each row; threads take equal shares, as NumPy releases the interpreter's
    lock.
    """
    rows = data.view("<u8").reshape(-1, _WORDS)
    sums = np.empty((len(rows), 2), "<u8")

    def add(start: int, stop: int) -> None:
        for first in range(start, stop, _BLOCK):
            part = slice(first, min(first + _BLOCK, stop))
            np.einsum("ij,j->i", rows[part], _KEYS[0], out=sums[part, 0])
            np.einsum("ij,j->i", rows[part].view(">u8"), _KEYS[1], out=sums[part, 1])

    threads = min(torch.get_num_threads(), len(rows) // (2 * _BLOCK))
    if threads < 2:
        add(0, len(rows))
    else:
        edges = [len(rows) * share // threads for share in range(threads + 1)]
        list(_pool(torch.get_num_threads(), os.getpid()).map(add, edges, edges[1:]))
    return sums.tobytes()


@lru_cache(1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return this process's pool; a child process has none of its parent's threads."""
    return ThreadPoolExecutor(threads, "bagua_ref digest")


def _sums_on_device(data: Tensor) -> bytes:
    """Return both sums of each row, computed by torch where the data is."""
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()  # a view of words needs it
    keys = torch.from_numpy(_KEYS.view(np.int64)).to(data.device)
    sums = []
    for part in data.split(_BLOCK_ON_DEVICE * 8 * _WORDS):
        words, reversed_words = (
            x.reshape(-1).view(torch.int64).view(-1, _WORDS)
            for x in (part, part.view(-1, 8).flip(1))
        )
        sums.append(torch.stack([(words * keys[0]).sum(1), (reversed_words * keys[1]).sum(1)], 1))
    return bytes_of(torch.cat(sums))
