"""Safetensors files of golden vectors.

Equal tensors give equal files with every version of the package safetensors. Only reading needs
that package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagua_ref.base import memory
from bagua_ref.base.not_provided import install_command
from bagua_ref.base.untrusted import one_line

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
"""dtype -> its name in the format."""


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with this name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def bytes_of(x: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, row-major."""
    return memory.bytes_of(x.cpu().contiguous()).numpy().tobytes()


class DamagedFileError(ValueError):
    """A file is not a safetensors file, or is truncated."""


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> bytes:
    """Write tensors by name; return the number of bytes written.

    The widest elements come first, so that all are aligned to their size; tensors of equal width
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
        DamagedFileError: it is truncated or malformed, or has a dtype that torch lacks.
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
    data = path.read_bytes()
    try:
        return dict(load(data))
    except SafetensorError as error:
        raise DamagedFileError(f"not a complete safetensors file: {one_line(str(error))}") from None
    except KeyError as error:  # safetensors looks the name up among torch's dtypes
        raise DamagedFileError(f"a tensor is of dtype {error}, which this torch lacks") from None
