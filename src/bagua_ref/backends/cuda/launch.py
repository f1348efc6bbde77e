"""Kernel launches (kernel, grid, arguments) and plans, which are sequences of launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

__all__ = ["BLOCK", "KERNELS", "WORKSPACE", "Argument", "Card", "Launch", "Plan", "pack", "source_of"]

BLOCK = 256
"""Threads per block, the same for all kernels and in the sources (``vector.cuh``)."""

_FOLDER = Path(__file__).parent / "kernels"
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_ELEMENTWISE = (
    "add", "subtract", "add_scaled", "average", "divide", "combine_ring", "async_average", "update_momentum",
)  # fmt: skip
_CODECS = {
    "codec": ("find_ends", "quantise", "compress_on_chip", "decompress"),
    "microscaling": tuple(f"{way}_{codec}" for way in ("compress", "decompress") for codec in ("MXFP8", "MXFP4", "MXINT8")),
    "one_bit": ("sum_squares", "write_signs", "restore_signs"),
}

KERNELS: dict[str, tuple[str, ...]] = {
    "elementwise": tuple(f"{name}_{dtype}" for name in _ELEMENTWISE for dtype in _FLOATS),
    "chunks": tuple(f"reduce_chunks_{dtype}" for dtype in _FLOATS),
    **{
        source: tuple(f"{name}_{dtype}" for name in names for dtype in _FLOATS if dtype != "float64")
        for source, names in _CODECS.items()
    },
    "movement": (
        "gather_segments",
        "scatter_segments",
        *(f"{way}_strided_{size}" for way in ("gather", "scatter") for size in (1, 2, 4, 8, 16)),
        *(f"order_keys_{dtype}" for dtype in _FLOATS),
    ),
}
"""The names of the kernels in each source ``kernels/<source>.cu``."""


class _Workspace:
    """A placeholder for the address of a plan's workspace, which only the submitter knows."""

    def __repr__(self) -> str:
        return "WORKSPACE"


WORKSPACE = _Workspace()

Argument: TypeAlias = "ctypes.c_void_p | ctypes.c_longlong | ctypes.c_float | ctypes.c_double | ctypes.Structure | _Workspace"


@dataclass(frozen=True)
class Card:
    """The properties of a device that plans depend on.

    Attributes:
        multiprocessors: their number; large grids are a multiple of it.
    """

    multiprocessors: int


@dataclass(frozen=True)
class Launch:
    """One kernel on one grid.

    Attributes:
        source: the file of the kernel, without suffix.
        kernel: its name, including the dtype.
        grid: the number of blocks, of `BLOCK` threads each.
        shared: bytes of dynamic shared memory per block.
        args: the kernel's arguments in order, with the types that it declares.
    """

    source: str
    kernel: str
    grid: int
    args: tuple[Argument, ...]
    shared: int = 0
    block: int = BLOCK


@dataclass(frozen=True)
class Plan:
    """Launches that run one after another on one stream.

    Attributes:
        launches: the launches in order; empty if there is nothing to do.
        workspace: bytes of scratch memory that they share, uninitialised; nothing else may use it until they are done.
    """

    launches: tuple[Launch, ...] = ()
    workspace: int = 0


def pack(launch: Launch, workspace: int) -> tuple[ctypes.Array[ctypes.c_void_p], tuple[object, ...]]:
    """Return an array of the arguments' addresses, and the values, which must outlive the launch call.

    Args:
        launch: the launch.
        workspace: the address that replaces `WORKSPACE`.
    """
    values = tuple(ctypes.c_void_p(workspace) if isinstance(value, _Workspace) else value for value in launch.args)
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values)), values


def source_of(name: str) -> str:
    """Return the text of ``kernels/<name>.cu`` with our headers inlined, so that the text alone determines what is compiled."""
    text = (_FOLDER / f"{name}.cu").read_text(encoding="utf-8")
    for header in ("codec.cuh", "vector.cuh"):  # which the first one includes
        content = (_FOLDER / header).read_text(encoding="utf-8").replace("#pragma once\n", "")
        text = text.replace(f'#include "{header}"\n', content)
    return text
