"""Codecs of the reference backend on one thread, against a plain copy, plain torch and torchao.

    python benchmarks/codec.py [--quick] [--json PATH]

The copy is `np.copyto` of the same array into a buffer that has been touched. Plain torch is
S4 as whole-array expressions. Both must give the same bytes before anything is timed. For the MX
codecs of S12, peers are torchao's tensors, if it is installed (eager: torch 2.13
does not compile them for CPUs), which must give the same values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import common  # beside this file
import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import get_codec

HEADER = 32


def torch_grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # 255 / tensor would multiply with the reciprocal
    scale = torch.tensor(255.0) / ((high - low) + 1e-7)
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


def rows_for(dtype: torch.dtype, size: int, rounds: int) -> list[common.Row]:
    codec = get_codec("MinMaxUInt8", "reference")
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload, out = (
        torch.zeros(codec.payload_bytes(size, dtype), dtype=torch.uint8),
        torch.zeros_like(x),
    )
    integer = torch.int16 if x.element_size() == 2 else torch.int32
    source, copied = (
        x.view(integer).numpy(),
        np.zeros(size, np.int16 if x.element_size() == 2 else np.int32),
    )
    codec.compress(x, 1, out=payload)
    codec.decompress(payload, 1, out)
    ends, levels = payload[: 2 * x.element_size()].view(dtype), payload[HEADER : HEADER + size]
    assert torch.equal(torch_compress(x)[1], levels)
    assert torch.equal(torch_decompress(ends, levels), out)

    def row(work: str, limit: common.Limit, **functions: Callable[[], object]) -> common.Row:
        median = common.alternate({"copy": lambda: np.copyto(copied, source), **functions}, rounds)
        peers = {name: 1e3 * seconds for name, seconds in median.items() if name != "ours"}
        name = f"{work} {size / 1e6:g}e6 {str(dtype).removeprefix('torch.')}"
        return common.Row(name, "ms", 1e3 * median["ours"], peers, "copy", limit)

    return [
        row(
            "compress",
            common.at_most(5.0) if dtype is torch.float32 else common.NO_LIMIT,
            ours=lambda: codec.compress(x, 1, out=payload),
            torch=lambda: torch_compress(x),
        ),
        row(
            "decompress",
            common.NO_LIMIT,
            ours=lambda: codec.decompress(payload, 1, out),
            torch=lambda: torch_decompress(ends, levels),
        ),
    ]


Work = dict[str, Callable[[], object]]


def torchao_tensors(name: str, x: Tensor) -> tuple[Work, Work]:
    """Return torchao's compression to blocks of 32 values and its decompression."""
    if name not in ("MXFP8", "MXFP4"):
        return {}, {}
    try:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
    except ImportError:
        return {}, {}
    kind = torch.float8_e4m3fn if name == "MXFP8" else torch.float4_e2m1fn_x2
    compressed, codec, ours = (
        MXTensor.to_mx(x, kind, 32),
        get_codec(name, "reference"),
        torch.zeros_like(x),
    )
    codec.decompress(codec.compress(x, 1), 1, ours)
    assert torch.equal(compressed.dequantize(torch.float32), ours)
    return {"torchao": lambda: to_mx(x, kind, 32)}, {
        "torchao": lambda: compressed.dequantize(torch.float32)
    }


def rows_of_codec(name: str, limit: float, size: int, rounds: int) -> list[common.Row]:
    codec = get_codec(name, "reference")
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    payload, out = codec.compress(x, 1), torch.zeros_like(x)
    source, copied = x.numpy(), np.zeros(size, np.float32)
    ours = (lambda: codec.compress(x, 1, out=payload), lambda: codec.decompress(payload, 1, out))
    rows = []
    for work, function, peers in zip(
        ("compress", "decompress"), ours, torchao_tensors(name, x), strict=True
    ):
        median = common.alternate(
            {"ours": function, "copy": lambda: np.copyto(copied, source), **peers}, rounds
        )
        others = {peer: 1e3 * seconds for peer, seconds in median.items() if peer != "ours"}
        label = f"{work} {name} {size / 1e6:g}e6 float32"
        rows.append(
            common.Row(label, "ms", 1e3 * median["ours"], others, "copy", common.at_most(limit))
        )
    return rows


def main() -> int:
    args = common.arguments("Codecs on one thread against a plain copy, plain torch and torchao.")
    torch.set_num_threads(1)
    size, rounds = (1_000_000, 3) if args.quick else (25_000_000, 7)
    rows = [
        row
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for row in rows_for(dtype, size, rounds)
    ]
    for name, limit in (
        ("MXFP8", 5.0),
        ("MXFP4", 8.0),
        ("MXINT8", 5.0),
        ("NVFP4", 10.0),
        ("OneBit", 5.0),
    ):
        rows += rows_of_codec(name, limit, size, rounds)
    return common.report("codec", rows, args)


if __name__ == "__main__":
    sys.exit(main())
