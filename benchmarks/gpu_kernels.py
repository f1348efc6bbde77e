"""Every CUDA kernel's share of the card's copy bandwidth, beside plain torch, torch.compile and CuPy operation by operation.

    python benchmarks/gpu_kernels.py [--quick] [--json PATH]

UNTRIED: no GPU was available when this was written. It has never run on a card, and there are no figures.

It needs a CUDA device. Bytes are those that must move (each tensor read once, each result written once, a compressed one with a
byte per element or the codec's share of one), so a kernel with two passes cannot reach the copy's bandwidth. Times are medians
of CUDA events around one call; buffers rotate, and before each call a write larger than the second-level cache evicts its
contents. Each dtype's codec is compared with torch's and the reference's before it is timed: a level may differ by one where
torch fuses operations. Of MXFP4, torch has no operation to compare with; its casts to the other formats pack nothing, and
OneBit's scale is in float32.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import common  # beside this file
import torch
from torch import Tensor

from bagua_ref.backends import get_backend, get_codec

DEVICE = BACKEND = "cuda"
MIB = 2**20
SECONDS = 420  # of the eight minutes that the whole may take; what does not fit is left out and listed
CODECS = {"MXFP8": 33 / 32, "MXFP4": 17 / 32, "MXINT8": 33 / 32, "OneBit": 1 / 8}  # bytes per element
EMAX = {"MXFP8": 8, "MXINT8": 0}
AIM = {
    "compress": 0.85, "decompress": 0.85, "compress OneBit": 0.45,  # which reads twice
    **{f"{way} {name}": 0.85 for way in ("compress", "decompress") for name in ("MXFP8", "MXFP4", "MXINT8")},
}  # fmt: skip
CHUNKS = 8


@dataclass
class Work:
    """A kernel on rotating buffers; our function and the peers take the number of the buffer set."""

    bytes_moved: int
    ours: Callable[[int], object]
    peers: dict[str, Callable[[int], object]]
    sets: int


class Clock:
    """Times calls on the device, with a flushed cache before each."""

    def __init__(self) -> None:
        self.flush = torch.empty(4 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device=DEVICE)

    def medians(self, functions: dict[str, Callable[[int], object]], sets: int, rounds: int) -> dict[str, float]:
        """Return each function's median seconds, alternating between them."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in functions}
        for function in functions.values():
            for number in range(sets):
                function(number)
        for round_number in range(rounds):
            for name, function in functions.items():
                self.flush.zero_()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                function(round_number % sets)
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {name: statistics.median(s.elapsed_time(e) for s, e in pairs) / 1e3 for name, pairs in events.items()}


def torch_grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.full_like(low, 255.0) / ((high - low) + 1e-7)
    upper = torch.round(high * scale)
    return scale, upper


def torch_compress(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.view(CHUNKS, -1).float()
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    scale, upper = torch_grid(low, high)
    levels = (torch.minimum(torch.round(rows * scale), upper) - (upper - 255)).clamp(0, 255).to(torch.uint8)
    return torch.cat([low, high], 1).to(x.dtype), levels


def torch_decompress(ends: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    scale, upper = torch_grid(ends[:, :1].float(), ends[:, 1:].float())
    largest = torch.finfo(dtype).max
    return ((levels.float() + (upper - 255)) / scale).clamp(-largest, largest).to(dtype)


def torch_blocks(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the exponents and the elements of MXFP8 or MXINT8."""
    blocks = x.view(-1, 32).float()
    exponent = torch.frexp(blocks.abs().amax(1, keepdim=True)).exponent - 1 - EMAX[name]
    values = torch.ldexp(blocks, -exponent)
    if name == "MXFP8":
        return exponent, values.clamp(-448, 448).to(torch.float8_e4m3fn)
    return exponent, (values * 64).round().clamp(-127, 127).to(torch.int8)


def torch_values(exponent: Tensor, elements: Tensor, dtype: torch.dtype) -> Tensor:
    units = 64 if elements.dtype is torch.int8 else 1
    return torch.ldexp(elements.float() / units, exponent).to(dtype)


def torch_signs(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.view(CHUNKS, -1)
    bits = (rows >= 0).view(CHUNKS, -1, 8).to(torch.uint8)
    weights = 1 << torch.arange(7, -1, -1, dtype=torch.uint8, device=x.device)
    return rows.float().square().mean(1, keepdim=True).sqrt(), (bits * weights).sum(2, dtype=torch.uint8)


def torch_unpacked(scale: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    signs = (bits.unsqueeze(2) >> shifts & 1).view(CHUNKS, -1).bool()
    return torch.where(signs, scale, -scale).to(dtype)


def codec_works(name: str, x: list[Tensor], out: list[Tensor], sets: int) -> dict[str, Work]:
    """Return both ways of a codec of `CODECS`, with torch's where it has one."""
    codec, dtype = get_codec(name, BACKEND), x[0].dtype
    payloads = [codec.compress(t, CHUNKS) for t in x]
    there: dict[str, Callable[[int], object]] = {}
    back: dict[str, Callable[[int], object]] = {}
    if name != "MXFP4":
        plain = torch_signs if name == "OneBit" else (lambda t: torch_blocks(t, name))
        restore = torch_unpacked if name == "OneBit" else torch_values
        fast, fast_restore, parts = compiled(plain), compiled(restore), [plain(t) for t in x]
        there = {"torch": lambda i: plain(x[i]), "torch.compile": lambda i: fast(x[i])}
        back = {"torch": lambda i: restore(*parts[i], dtype), "torch.compile": lambda i: fast_restore(*parts[i], dtype)}
    moved = int(x[0].numel() * (x[0].element_size() + CODECS[name]))
    return {
        f"compress {name}": Work(moved, lambda i: codec.compress(x[i], CHUNKS, out=payloads[i]), there, sets),
        f"decompress {name}": Work(moved, lambda i: codec.decompress(payloads[i], CHUNKS, out[i]), back, sets),
    }


def cupy_compress() -> Callable[[Tensor], object] | None:
    """Return S4.2 in CuPy operations, for the dtypes that CuPy supports."""
    if importlib.util.find_spec("cupy") is None:
        return None
    import cupy

    def compress(x: Tensor) -> object:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            rows = cupy.from_dlpack(x).reshape(CHUNKS, -1).astype(cupy.float32)
            low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
            scale = cupy.float32(255) / ((high - low) + cupy.float32(1e-7))
            upper = cupy.rint(high * scale)
            return cupy.clip(cupy.minimum(cupy.rint(rows * scale), upper) - (upper - 255), 0, 255).astype(cupy.uint8)

    return compress


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=False)


def works(dtype: torch.dtype, size: int) -> dict[str, Work]:
    """Return every kernel on tensors of ``size`` elements, with its peers."""
    kernels, item = get_backend(BACKEND), torch.empty(0, dtype=dtype).element_size()
    size -= size % (CHUNKS * 32)
    sets = max(2, min(4, 256 * MIB // (size * item)))
    make = lambda kind=dtype: [torch.randn(size, device=DEVICE).to(kind) for _ in range(sets)]  # noqa: E731
    x, y, z, w, wide = make(), make(), make(), make(), make(torch.float32)
    payloads = [get_codec("MinMaxUInt8", kernels).compress(t, CHUNKS) for t in y]
    block = get_codec("MinMaxUInt8", kernels).payload_bytes(size // CHUNKS, y[0].dtype)
    levels = [p.view(CHUNKS, block)[:, 32 : 32 + size // CHUNKS].contiguous() for p in payloads]
    ends = [p.view(CHUNKS, block)[:, : 2 * item].contiguous().view(dtype) for p in payloads]
    fast_compress, fast_decompress = compiled(torch_compress), compiled(torch_decompress)
    compress_peers: dict[str, Callable[[int], object]] = {
        "torch": lambda i: torch_compress(y[i]), "torch.compile": lambda i: fast_compress(y[i])
    }  # fmt: skip
    by_cupy = cupy_compress() if dtype is not torch.bfloat16 else None
    if by_cupy is not None:
        compress_peers["cupy"] = lambda i: by_cupy(y[i])

    def momentum(m: Tensor, g: Tensor) -> Tensor:
        return 0.9 * m + 0.1 * g

    def ring(a: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
        return a + left / 3 + right / 3 - weight * (5 / 3)

    def average(a: Tensor, total: Tensor, old: Tensor) -> Tensor:
        return (a.float() + (total / 4 - old.float())).to(dtype)

    def in_order(a: Tensor) -> Tensor:
        return a.view(CHUNKS, -1).sum(0, dtype=torch.float32).to(dtype)

    def peers(function: Callable[..., Tensor], *tensors: list[Tensor]) -> dict[str, Callable[[int], object]]:
        fast = compiled(function)
        return {
            "torch": lambda i: function(*(t[i] for t in tensors)),
            "torch.compile": lambda i: fast(*(t[i] for t in tensors)),
        }

    parts = [[part.clone() for part in t.chunk(50)] for t in x]
    made = {
        "add_": (3 * item, lambda i: kernels.add_(x[i], y[i]), peers(torch.add, x, y)),
        "add_scaled_": (
            3 * item, lambda i: kernels.add_scaled_(x[i], y[i], 0.1), peers(lambda a, b: torch.add(a, b, alpha=0.1), x, y)
        ),
        "average_": (3 * item, lambda i: kernels.average_(x[i], y[i]), peers(lambda a, b: (a + b) / 2, x, y)),
        "divide_": (2 * item, lambda i: kernels.divide_(x[i], 1.5), peers(lambda a: a / 1.5, x)),
        "update_momentum_": (3 * item, lambda i: kernels.update_momentum_(x[i], y[i], 0.9), peers(momentum, x, y)),
        "combine_ring_": (5 * item, lambda i: kernels.combine_ring_(x[i], y[i], z[i], w[i]), peers(ring, x, y, z, w)),
        "async_average_": (
            3 * item + 4, lambda i: kernels.async_average_(x[i], wide[i], z[i], 4), peers(average, x, wide, z)
        ),
        "reduce_chunks_": (
            item + item / CHUNKS, lambda i: kernels.reduce_chunks_(x[i], CHUNKS, 0, True), peers(in_order, x)
        ),
        "gather_flat": (
            2 * item, lambda i: kernels.gather_flat(parts[i], x[i]), {"torch": lambda i: torch.cat(parts[i], out=x[i])}
        ),
        "compress": (item + 1, lambda i: get_codec("MinMaxUInt8", kernels).compress(y[i], CHUNKS, out=payloads[i]), compress_peers),
        "decompress": (
            item + 1,
            lambda i: get_codec("MinMaxUInt8", kernels).decompress(payloads[i], CHUNKS, z[i]),
            {
                "torch": lambda i: torch_decompress(ends[i], levels[i], dtype),
                "torch.compile": lambda i: fast_decompress(ends[i], levels[i], dtype),
            },
        ),
    }  # fmt: skip
    found = {name: Work(int(size * moved), ours, others, sets) for name, (moved, ours, others) in made.items()}
    for name in CODECS:
        found |= codec_works(name, y, z, sets)
    return found


def agree(dtype: torch.dtype) -> None:
    """Compare our levels and values with torch's on a small input before anything is timed."""
    kernels, x = get_backend(BACKEND), torch.randn(CHUNKS * 4096, device=DEVICE).to(dtype)
    payload, restored = get_codec("MinMaxUInt8", kernels).compress(x, CHUNKS), torch.empty_like(x)
    get_codec("MinMaxUInt8", kernels).decompress(payload, CHUNKS, restored)
    ends, levels = torch_compress(x)
    ours = payload.view(CHUNKS, -1)[:, 32:]
    assert (ours.int() - levels.int()).abs().max() <= 1
    torch.testing.assert_close(torch_decompress(ends, ours, dtype).view(-1), restored, rtol=1e-2, atol=1e-2)
    assert torch.equal(payload, get_codec("MinMaxUInt8", get_backend("reference")).compress(x, CHUNKS))
    for name in CODECS:
        ours, theirs = (get_codec(name, backend).compress(x, CHUNKS).view(CHUNKS, -1) for backend in (BACKEND, "reference"))
        first = 32 if name == "OneBit" else 0  # whose scale may differ in its last bit
        assert torch.equal(ours[:, first:], theirs[:, first:])
        get_codec(name, BACKEND).decompress(ours.reshape(-1), CHUNKS, restored)
        if name != "MXFP4":
            plain = torch_unpacked(*torch_signs(x), dtype) if name == "OneBit" else torch_values(*torch_blocks(x, name), dtype)
            torch.testing.assert_close(plain.view(-1), restored, rtol=1e-2, atol=1e-6)


def optimizer_row(clock: Clock, rounds: int) -> common.Row:
    """fuse_step against torch's foreach and fused, on 200 parameters of 65,536 elements."""
    from bagua_ref.contrib.fuse import fuse_optimizer  # contrib needs xxhash and redis, which may not be installed here

    steps: dict[str, Callable[[int], object]] = {}
    for name, options in {"ours": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        parameters = [torch.nn.Parameter(torch.randn(65536, device=DEVICE)) for _ in range(200)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.Adam(parameters, **options)
        if name == "ours":
            optimizer = fuse_optimizer(optimizer)
            steps[name] = lambda i, optimizer=optimizer: optimizer.fuse_step()
        else:
            steps[name] = lambda i, optimizer=optimizer: optimizer.step()
    medians = {name: 1e3 * seconds for name, seconds in clock.medians(steps, 3, rounds).items()}
    ours = medians.pop("ours")
    return common.Row("fuse_step, Adam, 200 x 65536", "ms", ours, medians, "fused")


def bytegrad_row(clock: Clock, size: int, rounds: int, copy: float) -> common.Row:
    """Bytegrad's operation for one of 8 ranks, without communication, against the same with torch operations."""
    kernels, x = get_backend(BACKEND), torch.randn(size, device=DEVICE)
    payload = get_codec("MinMaxUInt8", kernels).compress(x, CHUNKS)

    def ours(_: int) -> None:
        get_codec("MinMaxUInt8", kernels).compress(x, CHUNKS, out=payload)
        get_codec("MinMaxUInt8", kernels).decompress(payload, CHUNKS, x)
        kernels.reduce_chunks_(x, CHUNKS, 0, True)
        get_codec("MinMaxUInt8", kernels).compress(x, CHUNKS, target_chunk=0, out=payload)
        get_codec("MinMaxUInt8", kernels).decompress(payload, CHUNKS, x)

    def plain(_: int) -> None:
        y = torch_decompress(*torch_compress(x), torch.float32)
        y[0] = y.mean(0)
        torch_decompress(*torch_compress(y.view(-1)), torch.float32)

    medians = clock.medians({"ours": ours, "torch": plain}, 1, rounds)
    return common.Row(
        f"bytegrad's kernels {4 * size // MIB} MiB", "ms", 1e3 * medians["ours"], {"torch": 1e3 * medians["torch"]}, "torch",
        extra={"copy_gb_per_s": copy},
    )  # fmt: skip


def main() -> int:
    args = common.arguments("Every CUDA kernel against the card's copy bandwidth and its peers. Untried: no GPU was at hand.")
    if not torch.cuda.is_available():
        print("There is no CUDA device here; nothing was measured.")
        return 0
    began, clock, rows, left_out = time.monotonic(), Clock(), [], []
    rounds = 5 if args.quick else 20
    for mib in (1, 16) if args.quick else (1, 16, 256, 1024):
        source = torch.empty(mib * MIB, dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        seconds = clock.medians({"copy": lambda _, t=target, s=source: t.copy_(s)}, 1, rounds)["copy"]
        copy = 2 * mib * MIB / seconds / 1e9
        del source, target
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            agree(dtype)
            if time.monotonic() - began > SECONDS:
                left_out.append(f"{dtype} at {mib} MiB: the time was up")
                continue
            for name, work in works(dtype, mib * MIB // torch.empty(0, dtype=dtype).element_size()).items():
                medians = clock.medians({"ours": work.ours, **work.peers}, work.sets, rounds)
                rates = {peer: work.bytes_moved / value / 1e9 for peer, value in medians.items()}
                ours = rates.pop("ours")
                limit = common.at_least(AIM.get(name, 0.9)) if mib >= 256 else common.NO_LIMIT
                title = f"{name} {str(dtype).removeprefix('torch.')} {mib} MiB"
                rows.append(common.Row(title, "GB/s", ours, {"copy": copy, **rates}, "copy", limit))
            torch.cuda.empty_cache()
        rows.append(bytegrad_row(clock, mib * MIB // 4, rounds, copy))
    try:
        rows.append(optimizer_row(clock, rounds))
    except ModuleNotFoundError as error:
        left_out.append(f"fuse_step: {error}")
    if left_out:
        print(f"Left out: {', '.join(left_out)}")
    return common.report("gpu_kernels", rows, args)


if __name__ == "__main__":
    sys.exit(main())
