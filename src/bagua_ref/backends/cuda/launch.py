"""Kernel launches (kernel, grid, arguments), and plans, which are sequences of launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "PACK",
    "WAVES",
    "WORKSPACE",
    "Argument",
    "DeviceProperties",
    "KernelLaunch",
    "Plan",
    "element_wise",
    "long",
    "name_of",
    "one_launch",
    "order_keys",
    "pack",
    "pointer",
    "reduce_chunks",
    "source_of",
]

BLOCK = 256
"""Threads per block, the same for all kernels and in the sources (``vector.cuh``)."""

_FOLDER = Path(__file__).parent / "kernels"


class _Workspace:
    """Placeholder for the address of a plan's workspace, filled in at submission."""

    def __repr__(self) -> str:
        return "WORKSPACE"


WORKSPACE = _Workspace()

Argument: TypeAlias = (
    "ctypes.c_void_p | ctypes.c_longlong | ctypes.c_float | ctypes.c_double | ctypes.Structure |"
    " _Workspace"
)


@dataclass(frozen=True)
class DeviceProperties:
    """Device properties needed for planning.

    Attributes:
        multiprocessors: number of multiprocessors; large grids are a multiple of it.
    """

    multiprocessors: int


@dataclass(frozen=True)
class KernelLaunch:
    """A launch of one kernel on one grid.

    Attributes:
        source: source file of the kernel, without suffix.
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
    """A sequence of launches on one stream.

    Attributes:
        launches: the launches in order; empty if there is nothing to do.
        workspace: bytes of uninitialized scratch memory shared by the launches; nothing else may
            use it until they are done.
    """

    launches: tuple[KernelLaunch, ...] = ()
    workspace: int = 0


def pack(
    launch: KernelLaunch, workspace: int
) -> tuple[ctypes.Array[ctypes.c_void_p], tuple[object, ...]]:
    """Return the launch arguments as an array of addresses, and their values, which must stay alive
    during the launch call.

    Args:
        launch: the launch.
        workspace: the address that replaces `WORKSPACE`.
    """
    values = tuple(
        ctypes.c_void_p(workspace) if isinstance(value, _Workspace) else value
        for value in launch.args
    )
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values)), values


def source_of(name: str) -> str:
    """Return the text of ``kernels/<name>.cu`` with our headers inlined, so that it is the complete
    input of the compiler.
    """
    text = (_FOLDER / f"{name}.cu").read_text(encoding="utf-8")
    for header in ("codec.cuh", "vector.cuh"):  # which the first one includes
        content = (_FOLDER / header).read_text(encoding="utf-8").replace("#pragma once\n", "")
        text = text.replace(f'#include "{header}"\n', content)
    return text


PACK = 16
"""Bytes that a thread reads or writes at once."""

WAVES = 32
"""Maximum number of blocks per multiprocessor; larger work is looped over by each block."""


def pointer(x: Tensor) -> ctypes.c_void_p:
    """Return x's address.

    Raises:
        ValueError: x is a lazily negated or conjugated view, or its address is not a multiple of
            the element size.
    """
    if x.is_neg() or x.is_conj():
        raise ValueError(
            f"a {x.dtype} tensor is a lazily negated or conjugated view; pass resolve_neg() or"
            " resolve_conj() of it"
        )
    address = x.data_ptr()
    if address % min(x.element_size(), 8):
        raise ValueError(
            f"a {x.dtype} tensor begins at address {address:#x}; it must be a multiple of"
            f" {x.element_size()}"
        )
    return ctypes.c_void_p(address)


def element_wise(
    device: DeviceProperties,
    x: Tensor,
    *operands: Tensor,
    name: str,
    numbers: tuple[float, ...] = (),
) -> Plan:
    """Plan x <- f(x, operands, numbers) with a kernel of ``elementwise.cu``."""
    if x.numel() == 0:
        return Plan()
    args = (
        pointer(x),
        *map(pointer, operands),
        long(x.numel()),
        *(_number(x, value) for value in numbers),
    )
    return one_launch(
        "elementwise",
        f"{name}_{name_of(x)}",
        _grid(device, x.numel() * x.element_size(), 2 * PACK),
        args,
    )


def reduce_chunks(
    device: DeviceProperties, x: Tensor, num_chunks: int, target_chunk: int, average: bool
) -> Plan:
    """Plan the sum of all chunks, in order, into one of them (S3.7)."""
    size = x.numel() // num_chunks
    if size == 0:
        return Plan()
    divisor = _number(x, num_chunks if average else 0)
    args = (pointer(x), long(size), long(num_chunks), long(target_chunk), divisor)
    return one_launch(
        "chunks", f"reduce_chunks_{name_of(x)}", _grid(device, size * x.element_size(), PACK), args
    )


def order_keys(device: DeviceProperties, floats: Tensor, keys: Tensor) -> Plan:
    """Plan keys <- integers of the same size that sort like the floats (S7.2)."""
    if floats.numel() == 0:
        return Plan()
    args = (pointer(floats), long(floats.numel()), pointer(keys))
    return one_launch(
        "movement", f"order_keys_{name_of(floats)}", _grid(device, floats.numel(), 1), args
    )


def one_launch(
    source: str, kernel: str, grid: int, args: tuple[Argument, ...], shared: int = 0
) -> Plan:
    """Return a plan with a single launch; the arguments are those of `KernelLaunch`."""
    return Plan((KernelLaunch(source, kernel, grid, args, shared),))


def _grid(device: DeviceProperties, work: int, per_thread: int) -> int:
    return max(1, min(-(-work // (per_thread * BLOCK)), WAVES * device.multiprocessors))


def name_of(x: Tensor) -> str:
    """Return x's dtype as in kernel names."""
    return str(x.dtype).removeprefix("torch.")


def long(value: int) -> ctypes.c_longlong:
    """Convert a size or an index to the C type of kernel arguments."""
    return ctypes.c_longlong(value)


def _number(x: Tensor, value: float) -> ctypes.c_float | ctypes.c_double:
    """Convert a number to the C type of x's arithmetic."""
    return ctypes.c_double(value) if x.dtype is torch.float64 else ctypes.c_float(value)
