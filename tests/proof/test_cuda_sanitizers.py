"""Tests of every kernel under AddressSanitizer and ThreadSanitizer on small grids, and of planted
faults that they must find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.cuda_emulation import build
from tests.cuda_emulation.build import KERNELS
from tests.cuda_emulation.replay import Recorder, program, replay
from torch import Tensor

from bagua_ref.backends import get_codec
from bagua_ref.backends.cuda import launch
from bagua_ref.backends.cuda.launch import DeviceProperties, KernelLaunch

pytestmark = build.proofs

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
CODEC = (torch.float32, torch.float16, torch.bfloat16)
S12 = ("MXFP8", "MXFP4", "MXINT8", "NVFP4", "OneBit")


def numbers(size: int, dtype: torch.dtype, skip: int = 0) -> Tensor:
    """Random numbers, ``skip`` elements after an alignment boundary."""
    room = torch.randn(
        size + skip, generator=torch.Generator().manual_seed(size + skip), dtype=torch.float64
    )
    return room.to(dtype)[skip:]


def element_wise(
    dtype: torch.dtype, size: int, skips: tuple[int, ...]
) -> tuple[Callable, list[Tensor]]:
    x, y, z, w = (numbers(size, dtype, skip) for skip in skips)
    wide = numbers(size, torch.float64 if dtype is torch.float64 else torch.float32, skips[1])

    def work(kernels) -> None:
        kernels.add_(x, y)
        kernels.subtract_(x, z)
        kernels.add_scaled_(x, w, 0.3)
        kernels.average_(x, y)
        kernels.divide_(x, 3)
        kernels.combine_ring_(x, y, z, w)
        kernels.async_average_(x, wide, z, 3)
        kernels.update_momentum_(x, y, 0.9)

    return work, [x, y, z, w, wide]


def chunks(
    dtype: torch.dtype, num_chunks: int, size: int, skip: int
) -> tuple[Callable, list[Tensor]]:
    x = numbers(num_chunks * size, dtype, skip)

    def work(kernels) -> None:
        kernels.reduce_chunks_(x, num_chunks, num_chunks - 1, average=True)
        kernels.reduce_chunks_(x, num_chunks, 0, average=False)

    return work, [x]


def codec(
    dtype: torch.dtype,
    num_chunks: int,
    size: int,
    skip: int = 0,
    payload_skip: int = 0,
    name: str = "MinMaxUInt8",
) -> tuple[Callable, list[Tensor]]:
    x, restored = (
        numbers(num_chunks * size, dtype, skip),
        torch.zeros(num_chunks * size, dtype=dtype),
    )
    room = num_chunks * get_codec(name).payload_bytes(size, dtype) + payload_skip
    payload = torch.full((room,), 255, dtype=torch.uint8)[payload_skip:]

    def work(kernels) -> None:
        its = get_codec(name, kernels)
        its.compress(x, num_chunks, out=payload)
        its.decompress(payload, num_chunks, restored)
        its.compress(restored, num_chunks, target_chunk=num_chunks - 1, out=payload)

    return work, [x, restored, payload]


def movement(dtype: torch.dtype) -> tuple[Callable, list[Tensor]]:
    tensors = [
        numbers(size, torch.float64, skip).to(dtype) for size, skip in ((5, 0), (33, 1), (9000, 3))
    ]
    parts = [*tensors, numbers(60, torch.float64).to(dtype).view(3, 4, 5).permute(2, 0, 1)]
    flat = torch.zeros(sum(tensor.numel() for tensor in parts), dtype=dtype)

    def work(kernels) -> None:
        kernels.gather_flat(parts, flat)
        kernels.scatter_flat(flat, parts)

    return work, [*parts, flat]


CASES = {
    **{
        f"element-wise {dtype}": [
            element_wise(dtype, 4099, (0, 0, 0, 0)),
            element_wise(dtype, 75, (1, 0, 1, 1)),
        ]
        for dtype in FLOATS
    },
    **{f"chunks {dtype}": [chunks(dtype, 3, 1030, 0), chunks(dtype, 9, 7, 1)] for dtype in FLOATS},
    **{
        f"codec on chip {dtype}": [
            codec(dtype, 35, 33, 1, 3),
            codec(dtype, 2, 5001),
            codec(dtype, 3, 0),
        ]
        for dtype in CODEC
    },
    **{f"codec in parts {dtype}": [codec(dtype, 2, 17_001, 1, 1)] for dtype in CODEC},
    **{
        f"{name} {dtype}": [
            codec(dtype, 3, 33, 1, 3, name),
            codec(dtype, 2, 9001, 0, 1, name),
            codec(dtype, 3, 0, name=name),
        ]
        for name in S12
        for dtype in CODEC
    },
    **{
        f"movement {dtype}": [movement(dtype)]
        for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64)
    },
    "movement of complex128": [movement(torch.complex128)],
}


@pytest.mark.parametrize(
    ("case", "sanitizer"),  # threads share an element's bytes alike, whatever its size
    [
        (case, name)
        for case in CASES
        for name in ("address", "thread")
        if name == "address" or "float16" not in case
    ],
)
def test_no_kernel_touches_what_is_not_its_own(case, sanitizer, tmp_path):
    path = program(sanitizer, build.kernel_sources())
    for work, tensors in CASES[case]:
        run, same = replay(path, tmp_path, work, tensors)
        assert run.returncode == 0, run.stderr[-4000:]
        assert same


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_keys_to_sort_by_are_written_within_their_bounds(dtype, sanitizer, tmp_path):
    floats = numbers(777, dtype)
    keys = torch.zeros(
        777, dtype={2: torch.int16, 4: torch.int32, 8: torch.int64}[floats.element_size()]
    )

    def work(kernels) -> None:
        if hasattr(kernels, "plans"):
            kernels._submit(launch.order_keys(kernels.properties, floats, keys), keys.device)
        else:
            negative = floats.view(keys.dtype) < 0
            keys.copy_(
                torch.where(
                    negative,
                    floats.view(keys.dtype) ^ torch.iinfo(keys.dtype).max,
                    floats.view(keys.dtype),
                )
            )

    run, same = replay(program(sanitizer, build.kernel_sources()), tmp_path, work, [floats, keys])
    assert run.returncode == 0, run.stderr[-4000:]
    assert same


# Planted faults: file, original text, replacement, the work that shows the fault, and the expected
# finding.

ON_CHIP = lambda: codec(torch.float32, 35, 33)  # noqa: E731 - more chunks than blocks
IN_PARTS = lambda: codec(torch.float32, 3, 9001)  # noqa: E731
ELEMENTS = lambda: element_wise(torch.float32, 4099, (0, 0, 0, 0))  # noqa: E731
BLOCKS = lambda: codec(torch.float32, 3, 9001, name="MXFP8")  # noqa: E731
PRODUCTS = lambda: codec(torch.float32, 3, 9001, name="NVFP4")  # noqa: E731
SIGNS = lambda: codec(torch.float32, 3, 9001, name="OneBit")  # noqa: E731
SHORT_SIGNS = lambda: codec(torch.float32, 3, 33, name="OneBit")  # noqa: E731
RACE, HEAP, SHARED, DIVERGENT = (
    "data race",
    "heap-buffer-overflow",
    "global-buffer-overflow",
    "divergent block",
)

PLANTED = {
    "thread": [
        (
            "codec",
            "        __syncthreads();  // before the next chunk overwrites the shared memory\n",
            "",
            ON_CHIP,
            RACE,
        ),
        ("codec", "all.nan = __syncthreads_or(mine.nan);", "all.nan = mine.nan;", ON_CHIP, RACE),
        ("codec", "all.nan = __syncthreads_or(mine.nan);", "all.nan = mine.nan;", IN_PARTS, RACE),
        ("codec", "if (threadIdx.x == 0) ends[blockIdx.x]", "ends[blockIdx.x]", IN_PARTS, RACE),
        ("codec", "if (part.number == 0) write_frame", "write_frame", IN_PARTS, RACE),
        (
            "codec",
            "levels, count, threadIdx.x, blockDim.x,",
            "levels, count, threadIdx.x / 2, blockDim.x,",
            ON_CHIP,
            RACE,
        ),
        (
            "codec",
            "static_cast<unsigned char>(threadIdx.x), grid);\n    __syncthreads();\n",
            "static_cast<unsigned char>(threadIdx.x), grid);\n",
            IN_PARTS,
            RACE,
        ),
        (
            "elementwise",
            "static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x",
            "threadIdx.x",
            ELEMENTS,
            RACE,
        ),
        (
            "chunks",
            "    spread<N, 1>(sums, size, thread_of_grid(), threads_of_grid(), whole, single);",
            "    spread<N, 1>(sums, size, thread_of_grid(), threads_of_grid() / 2, whole, single);",
            lambda: chunks(torch.float32, 3, 4100, 0),
            RACE,
        ),
        ("microscaling", "if (part.number == 0) write_padding", "write_padding", BLOCKS, RACE),
        ("microscaling", "if (left > 0 && i % F::sharing == 0)", "if (left > 0)", BLOCKS, RACE),
        (
            "microscaling",
            "numbers[threadIdx.x / 32] = mine;\n    __syncthreads();\n",
            "numbers[threadIdx.x / 32] = mine;\n",
            PRODUCTS,
            RACE,
        ),
        ("microscaling", "if (part.number == 0) write_frame", "write_frame", PRODUCTS, RACE),
        ("microscaling", "threadIdx.x / 32 * 32 * N", "threadIdx.x / 64 * 64 * N", BLOCKS, RACE),
        (
            "microscaling",
            "size - part.begin < part_size ? size - part.begin : part_size",
            "size - part.begin",
            BLOCKS,
            RACE,
        ),
        (
            "one_bit",
            "    __syncthreads();\n    double all = 0;\n",
            "    double all = 0;\n",
            SHORT_SIGNS,
            RACE,
        ),
        ("one_bit", "if (threadIdx.x == 0) sums[blockIdx.x]", "sums[blockIdx.x]", SIGNS, RACE),
        ("one_bit", "if (part.number == 0) {", "{", SIGNS, RACE),
        ("one_bit", "signs[i / 8] = poisoned", "signs[i / 16] = poisoned", SIGNS, RACE),
        (
            "movement",
            "(piece - segments.first_piece[low]) * segments.piece",
            "0",
            lambda: movement(torch.float64),
            RACE,
        ),
    ],
    "address": [
        (
            "elementwise",
            "packs = (count - head) / N",
            "packs = (count - head + N - 1) / N",
            ELEMENTS,
            HEAP,
        ),
        (
            "elementwise",
            "if (first < count - rest) single",
            "if (first <= count - rest) single",
            ELEMENTS,
            HEAP,
        ),
        (
            "elementwise",
            "before < count ? before : count",
            "before",
            lambda: element_wise(torch.float32, 1, (1, 1, 1, 1)),
            HEAP,
        ),
        ("codec", "if (thread < gap)", "if (thread <= gap)", ON_CHIP, HEAP),
        (
            "codec",
            "size - part.begin < part_size ? size - part.begin : part_size",
            "part_size",
            IN_PARTS,
            HEAP,
        ),
        ("codec", "lows[threadIdx.x / 32] =", "lows[threadIdx.x / 32 + 1] =", ON_CHIP, SHARED),
        (
            "codec",
            "all.merge(lows[warp], highs[warp])",
            "all.merge(lows[warp], highs[warp + 1])",
            ON_CHIP,
            SHARED,
        ),
        (
            "codec",
            "room + (address(from) & 15)",
            "room + (address(from) & 15) + 16",
            lambda: codec(torch.float32, 2, 36, 1),
            HEAP,
        ),
        (
            "chunks",
            "chunk + AHEAD <= num_chunks",
            "chunk < num_chunks",
            lambda: chunks(torch.float32, 3, 4100, 0),
            HEAP,
        ),
        ("microscaling", "if (part.count - i >= N)", "if (part.count - i > 0)", BLOCKS, HEAP),
        (
            "microscaling",
            "if (8 * b < F::bits * left)",
            "if (8 * b <= F::bits * left)",
            lambda: codec(torch.float32, 2, 31, name="MXFP8"),
            HEAP,
        ),
        (
            "microscaling",
            "if (skipped + N * BITS > 8 * BYTES)",
            "if (N > 1)",
            lambda: codec(torch.float32, 2, 60, name="MXFP4"),
            HEAP,
        ),
        (
            "microscaling",
            "first < part.count;",
            "first + threadIdx.x % 32 * N < part.count;",
            BLOCKS,
            DIVERGENT,
        ),
        ("one_bit", "if (count >= 8)", "if (count > 0)", SIGNS, HEAP),
        (
            "one_bit",
            "(i + decltype(lanes)::value - 1) / 8",
            "i / 8 + 1",
            lambda: codec(torch.float32, 2, 256, name="OneBit"),
            HEAP,
        ),
        ("one_bit", "sums[threadIdx.x / 32] =", "sums[threadIdx.x / 32 + 1] =", SIGNS, SHARED),
        ("one_bit", "i < sums_per_chunk", "i <= sums_per_chunk", SHORT_SIGNS, HEAP),
        (
            "one_bit",
            "    sum = sum_of_block(sum);\n    const bool",
            "    if (threadIdx.x < 64) sum = sum_of_block(sum);\n    const bool",
            SIGNS,
            DIVERGENT,
        ),
        (
            "movement",
            "left < segments.piece ? left : segments.piece",
            "segments.piece",
            lambda: movement(torch.float32),
            HEAP,
        ),
        (
            "codec",
            "if (size == 0) range.low",
            "if (threadIdx.x < 9) __syncthreads();\nif (size == 0) range.low",
            ON_CHIP,
            DIVERGENT,
        ),
        (
            "codec",
            "    range = range_of_block(range);\n",
            "    if (threadIdx.x < 64) range = range_of_block(range);\n",
            IN_PARTS,
            DIVERGENT,
        ),
    ],
}
FAULTS = [(sanitizer, *fault) for sanitizer, faults in PLANTED.items() for fault in faults]


@pytest.mark.parametrize(
    ("sanitizer", "source", "there", "planted", "case", "finding"), FAULTS, ids=range(len(FAULTS))
)
def test_a_planted_fault_is_found(sanitizer, source, there, planted, case, finding, tmp_path):
    text, kernels = build.kernel_sources()[source]
    assert there in text
    work, tensors = case()
    recorder = Recorder(DeviceProperties(1))
    work(recorder)
    used = {launched.kernel for plan in recorder.plans for launched in plan.launches}
    path = program(
        sanitizer, {source: (text.replace(there, planted), tuple(sorted(used & set(kernels))))}
    )
    run, _ = replay(path, tmp_path, work, tensors)
    assert run.returncode != 0
    assert finding in run.stderr, run.stderr[-4000:]


def test_too_little_shared_memory_in_the_plan_is_found(tmp_path):
    def change(launch: KernelLaunch) -> KernelLaunch:
        return dataclasses.replace(launch, shared=max(0, launch.shared - 32))

    work, tensors = codec(torch.float32, 2, 500)
    run, _ = replay(
        program("address", build.kernel_sources()), tmp_path, work, tensors, change=change
    )
    assert run.returncode != 0
    assert HEAP in run.stderr


def test_every_kernel_is_run():
    recorder = Recorder(DeviceProperties(1))
    for work, _ in (case for cases in CASES.values() for case in cases):
        work(recorder)
    seen = {launch.kernel for made in recorder.plans for launch in made.launches}
    everything = {
        kernel
        for kernels in KERNELS.values()
        for kernel in kernels
        if not kernel.startswith("order_keys")
    }
    assert seen == everything  # keys have a separate test
