"""Every CUDA kernel's share of the card's copy bandwidth, beside plain torch and torch.compile.

    python benchmarks/gpu_kernels.py [--quick] [--json PATH]

It needs a CUDA device. Bytes are those that must move: each tensor read once, each result written
once, a compressed one with a byte per element or the codec's share of one; a chunk that is
compressed in two passes and does not fit into the second-level cache is read twice. The copy beside
each kernel moves as many. Times are medians of CUDA events around one call; buffers rotate, and
before each call a read larger than the second-level cache evicts its contents. Each dtype's codec
is compared with torch's and the reference's before it is timed: a level may differ by one where
torch fuses operations."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import common  # beside this file
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


def codec_works(name: str, x: list[Tensor], out: list[Tensor], sets: int) -> dict[str, Work]:
    """Return both ways of a codec of `CODECS`."""
    codec = get_codec(name, BACKEND)
    payloads = [codec.compress(t, CHUNKS) for t in x]
    moved = round(x[0].numel() * (x[0].element_size() + CODECS[name]))
    return {
        f"compress {name}": Work(
            moved, lambda i: codec.compress(x[i], CHUNKS, out=payloads[i]), {}, sets
        ),
        f"decompress {name}": Work(
            moved, lambda i: codec.decompress(payloads[i], CHUNKS, out[i]), {}, sets
        ),
    }


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
    clock, rows = Clock(), []
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
    return common.report("gpu_kernels", rows, args)


if __name__ == "__main__":
    sys.exit(main())
