"""What a launch is: kernel, grid, arguments. Plans are made of these, and whoever can run kernels takes them from here."""

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
_CODEC = ("find_ends", "quantise", "compress_on_chip", "decompress")

KERNELS: dict[str, tuple[str, ...]] = {
    "elementwise": tuple(f"{name}_{dtype}" for name in _ELEMENTWISE for dtype in _FLOATS),
    "chunks": tuple(f"reduce_chunks_{dtype}" for dtype in _FLOATS),
    "codec": tuple(f"{name}_{dtype}" for name in _CODEC for dtype in _FLOATS if dtype != "float64"),
    "movement": (
        "gather_segments",
        "scatter_segments",
        *(f"{way}_strided_{size}" for way in ("gather", "scatter") for size in (1, 2, 4, 8, 16)),
        *(f"order_keys_{dtype}" for dtype in _FLOATS),
    ),
}
"""Every kernel by the source that it is in: ``kernels/<source>.cu``."""


class _Workspace:
    """Stands for the address of a plan's workspace, which only the submitter knows."""

    def __repr__(self) -> str:
        return "WORKSPACE"


WORKSPACE = _Workspace()

Argument: TypeAlias = "ctypes.c_void_p | ctypes.c_longlong | ctypes.c_float | ctypes.c_double | ctypes.Structure | _Workspace"


@dataclass(frozen=True)
class Card:
    """What a plan must know of the device.

    Attributes:
        multiprocessors: how many there are; grids are a multiple of it where there is work for more.
    """

    multiprocessors: int


@dataclass(frozen=True)
class Launch:
    """One kernel on one grid.

    Attributes:
        source: the file it is in, without suffix.
        kernel: its name, dtype included.
        grid: blocks, each of `BLOCK` threads.
        shared: bytes of dynamic shared memory per block.
        args: the kernel's parameters in order, in the types that it declares.
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
        launches: in order; none if there is nothing to do.
        workspace: bytes of memory that they share, of any content before and after; nobody else may use it in between.
    """

    launches: tuple[Launch, ...] = ()
    workspace: int = 0


def pack(launch: Launch, workspace: int) -> tuple[ctypes.Array[ctypes.c_void_p], tuple[object, ...]]:
    """Return the addresses of the arguments, as launches take them, and what must outlive the launch call.

    Args:
        launch: whose arguments.
        workspace: the address that `WORKSPACE` stands for.
    """
    values = tuple(ctypes.c_void_p(workspace) if isinstance(value, _Workspace) else value for value in launch.args)
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values)), values


def source_of(name: str) -> str:
    """Return the text of ``kernels/<name>.cu`` with our own header in it, so that it is all that decides what is compiled."""
    header = (_FOLDER / "vector.cuh").read_text(encoding="utf-8").replace("#pragma once\n", "")
    text = (_FOLDER / f"{name}.cu").read_text(encoding="utf-8")
    return text.replace('#include "vector.cuh"\n', header)
