"""Inputs of the CUDA tests: numbers, tensors at any alignment, huge ones, and the comparison of
payloads.
"""

from __future__ import annotations

import dataclasses
import mmap

import torch
from tests.cuda_emulation.backend import emulator
from torch import Tensor

from bagua_ref.backends.cuda.launch import KernelLaunch
from bagua_ref.conformance.expected.tolerances import ULP, assert_equal

FAR = 2**31 + 12_345
"""A size whose indices need 64 bits."""


def placed(x: Tensor, skip: int) -> Tensor:
    """Return a copy of x that begins ``skip`` elements after a boundary of 16 (and 64) bytes."""
    room = torch.zeros(x.numel() + skip + 64, dtype=x.dtype)
    copy = room[skip : skip + x.numel()]
    copy.copy_(x)
    assert copy.data_ptr() % 64 == skip * x.element_size() % 64
    return copy


def numbers(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random numbers."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def sparse(size: int, dtype: torch.dtype) -> Tensor:
    """Return zeros in memory that is reserved, and taken when it is touched."""
    item = torch.empty(0, dtype=dtype).element_size()
    # Linux's constant; Python names it from 3.13 on
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    room = mmap.mmap(-1, size * item, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(room, dtype=dtype)


def run_ends(launch: KernelLaunch, grid: int, workspace: int = 0) -> None:
    """Run the first block and the last three, on a grid large enough that no block loops.

    The first block also handles the elements that do not fill a pack.
    """
    launch = dataclasses.replace(launch, grid=grid)
    emulator().run(launch, workspace, blocks=range(grid - 3, grid))
    emulator().run(launch, workspace, blocks=range(1))


def assert_payload(codec: str, actual: Tensor, expected: Tensor, num_chunks: int) -> None:
    """Raise unless payloads have the same bytes; the scales of OneBit may differ by 1 ulp, but not
    in the bits of a NaN (S12.2).
    """
    assert actual.shape == expected.shape
    rows, wanted = (payload.cpu().view(num_chunks, -1) for payload in (actual, expected))
    if codec == "OneBit" and expected.numel():
        scales, others = (
            t[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
            for t in (rows, wanted)
        )
        assert_equal(scales, others, ULP(1))
        assert torch.equal(
            scales.view(torch.int32)[others.isnan()], others.view(torch.int32)[others.isnan()]
        )
        rows, wanted = rows[:, 4:], wanted[:, 4:]
    assert torch.equal(rows, wanted)
