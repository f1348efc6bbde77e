"""Every CUDA kernel's share of the card's copy bandwidth, beside plain torch, torch.compile and
CuPy operation by operation.

    python benchmarks/gpu_kernels.py [--quick] [--json PATH]

It needs a CUDA device. Bytes are those that must move: each tensor read once, each result written
once, a compressed one with a byte per element or the codec's share of one; a chunk that is
compressed in two passes and does not fit into the second-level cache is read twice. The copy beside
each kernel moves as many. Times are medians of CUDA events around one call; buffers rotate, and
before each call a read larger than the second-level cache evicts its contents. Each dtype's codec
is compared with torch's and the reference's before it is timed: a level may differ by one where
torch fuses operations. Of MXFP4, torch has no operation to compare with; its casts to the other
formats pack nothing, and OneBit's scale is in float32.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import common  # beside this file
import shapes
import torch
from torch import Tensor

from bagua_ref.backends import get_backend, get_codec

DEVICE = BACKEND = "cuda"
MIB = 2**20
SIZES = (2**18, 25_000_000, 250_000_000)  # elements
COMPILED = (
    25_000_000 - 25_000_000 % 256
    # the size at which float32's codecs are compared with torch.compile, which takes seconds for
    # each
)
AHEAD = 1_000_000  # cycles that the device is kept busy for before each call
# bytes per element
CODECS = {"MXFP8": 33 / 32, "MXFP4": 17 / 32, "MXINT8": 33 / 32, "OneBit": 1 / 8}
EMAX = {"MXFP8": 8, "MXINT8": 0}
TWO_PASSES = ("compress", "compress OneBit")
AIM = 0.9
CHUNKS = 8


@dataclass
class Work:
    """A kernel on rotating buffers; our function and the peers take the number of the buffer
    set.
    """

    bytes_moved: int
    ours: Callable[[int], object]
    peers: dict[str, Callable[[int], object]]
    sets: int


class Clock:
    """Times calls on the device, with a flushed cache before each."""

    def __init__(self) -> None:
        self.flush = torch.zeros(torch.cuda.get_device_properties(0).L2_cache_size, device=DEVICE)

    def medians(
        self, functions: dict[str, Callable[[int], object]], sets: int, rounds: int
    ) -> dict[str, float]:
        """Return each function's median seconds, alternating between them."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            name: [] for name in functions
        }
        for function in functions.values():
            for number in range(sets):
                function(number)
        for round_number in range(rounds):
            for name, function in functions.items():
                # a write would leave lines in the cache whose way back to memory the function would
                # pay for
                self.flush.sum()
                torch.cuda._sleep(AHEAD)  # the host queues everything meanwhile
                start, end = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                start.record()
                function(round_number % sets)
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: statistics.median(s.elapsed_time(e) for s, e in pairs) / 1e3
            for name, pairs in events.items()
        }


def torch_grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.full_like(low, 255.0) / ((high - low) + 1e-7)
    upper = torch.round(high * scale)
    return scale, upper


def torch_compress(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.view(CHUNKS, -1).float()
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    scale, upper = torch_grid(low, high)
    levels = (
        (torch.minimum(torch.round(rows * scale), upper) - (upper - 255))
        .clamp(0, 255)
        .to(torch.uint8)
    )
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
    return rows.float().square().mean(1, keepdim=True).sqrt(), (bits * weights).sum(
        2, dtype=torch.uint8
    )


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
        back = {
            "torch": lambda i: restore(*parts[i], dtype),
            "torch.compile": lambda i: fast_restore(*parts[i], dtype),
        }
        there, back = (
            peers if is_compiled(x[0]) else {"torch": peers["torch"]} for peers in (there, back)
        )
    moved = round(x[0].numel() * (x[0].element_size() + CODECS[name]))
    return {
        f"compress {name}": Work(
            moved, lambda i: codec.compress(x[i], CHUNKS, out=payloads[i]), there, sets
        ),
        f"decompress {name}": Work(
            moved, lambda i: codec.decompress(payloads[i], CHUNKS, out[i]), back, sets
        ),
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
            return cupy.clip(
                cupy.minimum(cupy.rint(rows * scale), upper) - (upper - 255), 0, 255
            ).astype(cupy.uint8)

    return compress


def is_compiled(x: Tensor) -> bool:
    return x.numel() == COMPILED and x.dtype is torch.float32


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=False)


def works(dtype: torch.dtype, size: int) -> dict[str, Work]:
    """Return every kernel on tensors of ``size`` elements, with its peers."""
    kernels, item = get_backend(BACKEND), dtype.itemsize
    sets = max(2, min(4, 256 * MIB // (size * item)))
    make = lambda kind=dtype: [torch.randn(size, device=DEVICE).to(kind) for _ in range(sets)]  # noqa: E731
    x, y, z, w, wide = make(), make(), make(), make(), make(torch.float32)
    payloads = [get_codec("MinMaxUInt8", kernels).compress(t, CHUNKS) for t in y]
    block = get_codec("MinMaxUInt8", kernels).payload_bytes(size // CHUNKS, y[0].dtype)
    levels = [p.view(CHUNKS, block)[:, 32 : 32 + size // CHUNKS].contiguous() for p in payloads]
    ends = [p.view(CHUNKS, block)[:, : 2 * item].contiguous().view(dtype) for p in payloads]
    compress_peers: dict[str, Callable[[int], object]] = {"torch": lambda i: torch_compress(y[i])}
    decompress_peers: dict[str, Callable[[int], object]] = {
        "torch": lambda i: torch_decompress(ends[i], levels[i], dtype)
    }
    if is_compiled(x[0]):
        fast_compress, fast_decompress = compiled(torch_compress), compiled(torch_decompress)
        compress_peers["torch.compile"] = lambda i: fast_compress(y[i])
        decompress_peers["torch.compile"] = lambda i: fast_decompress(ends[i], levels[i], dtype)
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

    def peers(
        function: Callable[..., Tensor], *tensors: list[Tensor]
    ) -> dict[str, Callable[[int], object]]:
        return {"torch": lambda i: function(*(t[i] for t in tensors))}

    parts = [[part.clone() for part in t.chunk(50)] for t in x]
    made = {
        "add_": (3 * item, lambda i: kernels.add_(x[i], y[i]), peers(torch.add, x, y)),
        "add_scaled_": (
            3 * item,
            lambda i: kernels.add_scaled_(x[i], y[i], 0.1),
            peers(lambda a, b: torch.add(a, b, alpha=0.1), x, y),
        ),
        "average_": (
            3 * item,
            lambda i: kernels.average_(x[i], y[i]),
            peers(lambda a, b: (a + b) / 2, x, y),
        ),
        "divide_": (2 * item, lambda i: kernels.divide_(x[i], 1.5), peers(lambda a: a / 1.5, x)),
        "update_momentum_": (
            3 * item,
            lambda i: kernels.update_momentum_(x[i], y[i], 0.9),
            peers(momentum, x, y),
        ),
        "combine_ring_": (
            5 * item,
            lambda i: kernels.combine_ring_(x[i], y[i], z[i], w[i]),
            peers(ring, x, y, z, w),
        ),
        "async_average_": (
            3 * item + 4,
            lambda i: kernels.async_average_(x[i], wide[i], z[i], 4),
            peers(average, x, wide, z),
        ),
        "reduce_chunks_": (
            item + item / CHUNKS,
            lambda i: kernels.reduce_chunks_(x[i], CHUNKS, 0, True),
            peers(in_order, x),
        ),
        "gather_flat": (
            2 * item,
            lambda i: kernels.gather_flat(parts[i], x[i]),
            {"torch": lambda i: torch.cat(parts[i], out=x[i])},
        ),
        "compress": (
            item + 1,
            lambda i: get_codec("MinMaxUInt8", kernels).compress(y[i], CHUNKS, out=payloads[i]),
            compress_peers,
        ),
        "decompress": (
            item + 1,
            lambda i: get_codec("MinMaxUInt8", kernels).decompress(payloads[i], CHUNKS, z[i]),
            decompress_peers,
        ),
    }
    found = {
        name: Work(round(size * moved), ours, others, sets)
        for name, (moved, ours, others) in made.items()
    }
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
    torch.testing.assert_close(
        torch_decompress(ends, ours, dtype).view(-1), restored, rtol=1e-2, atol=1e-2
    )
    assert torch.equal(
        payload, get_codec("MinMaxUInt8", get_backend("reference")).compress(x, CHUNKS)
    )
    for name in CODECS:
        ours, theirs = (
            get_codec(name, backend).compress(x, CHUNKS).view(CHUNKS, -1)
            for backend in (BACKEND, "reference")
        )
        first = 32 if name == "OneBit" else 0  # whose scale may differ in its last bit
        assert torch.equal(ours[:, first:], theirs[:, first:])
        get_codec(name, BACKEND).decompress(ours.reshape(-1), CHUNKS, restored)
        if name != "MXFP4":
            plain = (
                torch_unpacked(*torch_signs(x), dtype)
                if name == "OneBit"
                else torch_values(*torch_blocks(x, name), dtype)
            )
            torch.testing.assert_close(plain.view(-1), restored, rtol=1e-2, atol=1e-6)


def optimizer_rows(clock: Clock, rounds: int) -> list[common.Row]:
    """fuse_step against torch's foreach and fused."""
    # contrib needs xxhash and redis, which may not be installed here
    from bagua_ref.contrib.fuse import fuse_optimizer

    rows = []
    sizes = {
        "200 x 65,536": [(65536,)] * 200,
        "ResNet-50": shapes.resnet50(),
        "GPT-2": shapes.gpt2(),
    }
    for (work, made), kind in itertools.product(sizes.items(), (torch.optim.Adam, torch.optim.SGD)):
        steps: dict[str, Callable[[int], object]] = {}
        for name, options in {
            "ours": {"foreach": False},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
        }.items():
            parameters = [torch.nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in made]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer = kind(parameters, lr=1e-3, **options)
            steps[name] = fuse_optimizer(optimizer).fuse_step if name == "ours" else optimizer.step
        calls = {name: lambda _, step=step: step() for name, step in steps.items()}
        medians = {name: 1e3 * seconds for name, seconds in clock.medians(calls, 3, rounds).items()}
        ours = medians.pop("ours")
        rows.append(common.Row(f"fuse_step, {kind.__name__}, {work}", "ms", ours, medians, "fused"))
    return rows


def bytegrad_row(clock: Clock, size: int, rounds: int) -> common.Row:
    """Bytegrad's operation for one of 8 ranks, without communication, against the same with torch
    operations.
    """
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
    title, peers = f"bytegrad's kernels {size:,}", {"torch": 1e3 * medians["torch"]}
    return common.Row(title, "ms", 1e3 * medians["ours"], peers, "torch")


def kernel_row(
    clock: Clock,
    name: str,
    work: Work,
    size: int,
    dtype: torch.dtype,
    buffers: tuple[Tensor, Tensor],
    rounds: int,
) -> common.Row:
    """Return a kernel's bytes per second beside those of its peers, and of a copy of as many bytes
    between two buffers.
    """
    fits = size * dtype.itemsize <= CHUNKS * torch.cuda.get_device_properties(0).L2_cache_size
    moved = work.bytes_moved + (0 if fits or name not in TWO_PASSES else size * dtype.itemsize)
    source, target = (buffer[: moved // 2] for buffer in buffers)
    calls = {"ours": work.ours, "copy": lambda _: target.copy_(source), **work.peers}
    rates = {
        peer: moved / value / 1e9 for peer, value in clock.medians(calls, work.sets, rounds).items()
    }
    ours, limit = rates.pop("ours"), common.at_least(AIM) if size >= 2**20 else common.NO_LIMIT
    return common.Row(
        f"{name} {str(dtype).removeprefix('torch.')} {size:,}", "GB/s", ours, rates, "copy", limit
    )


def main() -> int:
    args = common.arguments("Every CUDA kernel against the card's copy bandwidth and its peers.")
    if not torch.cuda.is_available():
        print("There is no CUDA device here; nothing was measured.")
        return 0
    clock, rows, left_out = Clock(), [], []
    rounds = 5 if args.quick else 20
    for size in SIZES[:1] if args.quick else SIZES:
        size -= size % (CHUNKS * 32)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            agree(dtype)
            source = torch.ones(4 * size * dtype.itemsize, dtype=torch.uint8, device=DEVICE)
            buffers = source, torch.empty_like(source)
            rows += [
                kernel_row(clock, name, work, size, dtype, buffers, rounds)
                for name, work in works(dtype, size).items()
            ]
            del source, buffers
            torch.cuda.empty_cache()
        rows.append(bytegrad_row(clock, size, rounds))
    try:
        rows += optimizer_rows(clock, rounds)
    except ModuleNotFoundError as error:
        left_out.append(f"fuse_step: {error}")
    if left_out:
        print(f"Left out: {', '.join(left_out)}")
    return common.report("gpu_kernels", rows, args)


if __name__ == "__main__":
    sys.exit(main())
