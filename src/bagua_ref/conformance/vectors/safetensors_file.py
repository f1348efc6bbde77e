"""Safetensors files, written so that equal tensors give equal bytes, and read so that damage gets a clear sentence."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["CODES", "DamagedFileError", "read_safetensors", "write_safetensors"]

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

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit


class DamagedFileError(ValueError):
    """A file is no safetensors file, or a part of one."""


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> bytes:
    """Write tensors by name, and return what was written.

    The widest elements come first, so that all lie at multiples of their size; then by name.
    """
    entries: dict[str, Any] = {}
    parts: list[bytes] = []
    place = 0
    for name, x in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        part = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
        entries[name] = {"dtype": CODES[x.dtype], "shape": list(x.shape), "data_offsets": [place, place + len(part)]}
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
        DamagedFileError: it is truncated, too long or malformed; the message says how.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    if len(data) < 8:
        raise DamagedFileError(f"truncated: {len(data)} bytes, and a safetensors file begins with 8 bytes of header length")
    length = int.from_bytes(data[:8], "little")
    if length > _LONGEST_HEADER:
        raise DamagedFileError(f"not a safetensors file: its first 8 bytes would be a header of {length} bytes")
    if 8 + length > len(data):
        raise DamagedFileError(f"truncated: a header of {length} bytes is announced, and {len(data) - 8} bytes follow")
    try:
        entries = json.loads(data[8 : 8 + length].decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"not a safetensors file: its header is no JSON: {error}") from None
    if not isinstance(entries, dict):
        raise DamagedFileError("not a safetensors file: its header is no JSON object")
    entries.pop("__metadata__", None)
    parsed = {name: _parsed(name, entry) for name, entry in entries.items()}
    expected = 0
    for name, (_, _, start, end) in sorted(parsed.items(), key=lambda item: item[1][2:]):
        if start != expected:
            raise DamagedFileError(
                f"malformed: tensor {name!r} begins at byte {start} of the data; the one before ends at {expected}"
            )
        expected = end
    if 8 + length + expected != len(data):
        what = "truncated" if 8 + length + expected > len(data) else "malformed"
        raise DamagedFileError(f"{what}: {expected} bytes of data are announced, and {len(data) - 8 - length} bytes follow")
    body = memoryview(data)[8 + length :]
    return {name: _tensor(body[start:end], dtype, shape) for name, (dtype, shape, start, end) in parsed.items()}


def _parsed(name: str, entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise DamagedFileError(f"malformed: tensor {name!r} has no dtype")
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise DamagedFileError(f"tensor {name!r} is {entry['dtype']}; known are {', '.join(_DTYPES)}")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise DamagedFileError(f"malformed: tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    start, end = offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise DamagedFileError(f"malformed: tensor {name!r} of {entry['dtype']}, shape {shape}, has {end - start} bytes")
    return dtype, shape, start, end


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _tensor(data: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if not len(data):
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError:  # 0 times more than 64 bits
            raise DamagedFileError(f"malformed: shape {shape} is out of range") from None
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found
