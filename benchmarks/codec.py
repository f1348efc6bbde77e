"""MinMaxUInt8 of the reference backend on one thread, against a plain copy, plain NumPy and plain torch.

    python benchmarks/codec.py [--quick] [--json PATH]

The copy is `np.copyto` of the same array into a buffer that has been touched. Plain NumPy and plain torch are S4 as whole-array
expressions. All three must give the same bytes before anything is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import common  # beside this file
import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import get_backend, payload_bytes

HEADER = 32


def torch_grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.tensor(255.0) / ((high - low) + 1e-7)  # 255 / tensor would multiply with the reciprocal
    upper = torch.round(high * scale)
    return scale, upper, upper - 255


def torch_compress(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    low, high = torch.aminmax(wide)
    scale, upper, lower = torch_grid(low, high)
    levels = (torch.minimum(torch.round(wide * scale), upper) - lower).clamp(0, 255).to(torch.uint8)
    return torch.stack([low, high]).to(x.dtype), levels


def torch_decompress(ends: Tensor, levels: Tensor) -> Tensor:
    scale, _, lower = torch_grid(*ends.float())
    largest = torch.finfo(ends.dtype).max
    return ((levels.float() + lower) / scale).clamp(-largest, largest).to(ends.dtype)


def numpy_float32(x: Tensor) -> np.ndarray:
    if x.dtype is torch.bfloat16:
        return (x.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    return x.numpy().astype(np.float32, copy=False)


def numpy_stored(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    if dtype is not torch.bfloat16:
        return values.astype(np.float16 if dtype is torch.float16 else np.float32, copy=False)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def numpy_grid(low: np.float32, high: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    scale = np.float32(255) / ((high - low) + np.float32(1e-7))
    upper = np.rint(high * scale)
    return scale, upper, upper - np.float32(255)


def numpy_compress(x: Tensor) -> np.ndarray:
    wide = numpy_float32(x)
    scale, upper, lower = numpy_grid(wide.min(), wide.max())
    return np.clip(np.minimum(np.rint(wide * scale), upper) - lower, 0, 255).astype(np.uint8)


def numpy_decompress(ends: Tensor, levels: np.ndarray) -> np.ndarray:
    low, high = numpy_float32(ends)
    scale, _, lower = numpy_grid(low, high)
    largest = np.float32(torch.finfo(ends.dtype).max)
    return numpy_stored(np.clip((levels + lower) / scale, -largest, largest), ends.dtype)


def rows_for(dtype: torch.dtype, size: int, rounds: int) -> list[common.Row]:
    kernels = get_backend("reference")
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload, out = torch.zeros(payload_bytes(size, 1), dtype=torch.uint8), torch.zeros_like(x)
    integer = torch.int16 if x.element_size() == 2 else torch.int32
    source, copied = x.view(integer).numpy(), np.zeros(size, np.int16 if x.element_size() == 2 else np.int32)
    kernels.compress_minmax_uint8(x, 1, out=payload)
    kernels.decompress_minmax_uint8(payload, 1, out)
    ends, levels = payload[: 2 * x.element_size()].view(dtype), payload[HEADER : HEADER + size]
    assert torch.equal(torch_compress(x)[1], levels)
    assert np.array_equal(numpy_compress(x), levels.numpy())
    assert torch.equal(torch_decompress(ends, levels), out)
    assert np.array_equal(numpy_decompress(ends, levels.numpy()).view(source.dtype), out.view(integer).numpy())

    def row(work: str, limit: common.Limit, **functions: Callable[[], object]) -> common.Row:
        median = common.alternate({"copy": lambda: np.copyto(copied, source), **functions}, rounds)
        peers = {name: 1e3 * seconds for name, seconds in median.items() if name != "ours"}
        name = f"{work} {size / 1e6:g}e6 {str(dtype).removeprefix('torch.')}"
        return common.Row(name, "ms", 1e3 * median["ours"], peers, "copy", limit)

    return [
        row(
            "compress",
            common.at_most(5.0) if dtype is torch.float32 else common.NO_LIMIT,
            ours=lambda: kernels.compress_minmax_uint8(x, 1, out=payload),
            numpy=lambda: numpy_compress(x),
            torch=lambda: torch_compress(x),
        ),
        row(
            "decompress",
            common.NO_LIMIT,
            ours=lambda: kernels.decompress_minmax_uint8(payload, 1, out),
            numpy=lambda: numpy_decompress(ends, levels.numpy()),
            torch=lambda: torch_decompress(ends, levels),
        ),
    ]


def main() -> int:
    args = common.arguments("MinMaxUInt8 on one thread against a plain copy, plain NumPy and plain torch.")
    torch.set_num_threads(1)
    size, rounds = (1_000_000, 3) if args.quick else (25_000_000, 7)
    rows = [row for dtype in (torch.float32, torch.bfloat16, torch.float16) for row in rows_for(dtype, size, rounds)]
    return common.report("codec", rows, args)


if __name__ == "__main__":
    sys.exit(main())
