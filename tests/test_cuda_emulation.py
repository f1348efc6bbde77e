"""Tests of the CUDA emulation: barriers, warps, atomics, conversions, and unsupported
operations.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from tests.cuda_emulation import build
from tests.cuda_emulation.backend import EmulatedBackend, Emulator

from bagua_ref.backends import get_backend, get_codec
from bagua_ref.backends.cuda.launch import KernelLaunch
from bagua_ref.conformance import EXACT, assert_equal

pytestmark = build.proofs

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void reverse_block(int* x) {
    __shared__ int kept[256];
    kept[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    x[blockIdx.x * blockDim.x + threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void reverse_dynamic(int* x) {
    DYNAMIC_SHARED(room);
    int* kept = reinterpret_cast<int*>(room);
    kept[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void warps(float* x, int* any) {
    float value = x[threadIdx.x];
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    const long long from_three = __shfl_sync(0xFFFFFFFFu, static_cast<long long>(threadIdx.x) << 40, 3);
    __syncwarp();
    x[threadIdx.x] = value + static_cast<float>(from_three >> 40);
    any[threadIdx.x] = __syncthreads_or(threadIdx.x == 77) + 10 * __syncthreads_or(0);
}

extern "C" __global__ void atomics(int* sum, float* total, unsigned* most) {
    atomicAdd(sum, 1);
    atomicAdd(total, 0.5f);
    atomicMax(most, blockIdx.x * 1000 + threadIdx.x);
}

extern "C" __global__ void half_there(const float* x, __half* half, __nv_bfloat16* brain, long long count) {
    for (long long i = threadIdx.x; i < count; i += blockDim.x) {
        half[i] = __float2half_rn(x[i]);
        brain[i] = __float2bfloat16_rn(x[i]);
    }
}

extern "C" __global__ void half_back(const __half* half, const __nv_bfloat16* brain, float* x, float* y, long long count) {
    for (long long i = threadIdx.x; i < count; i += blockDim.x) x[i] = __half2float(half[i]), y[i] = __bfloat162float(brain[i]);
}

extern "C" __global__ void half_of_the_block_waits(int* x) {
    if (threadIdx.x < blockDim.x / 2) {
        __syncthreads();
        x[threadIdx.x] = 1;
    }
}

extern "C" __global__ void at_two_barriers(int* x) {
    if (threadIdx.x % 2) {
        __syncthreads();
    } else {
        x[threadIdx.x] = 1;
        __syncthreads();
    }
}

extern "C" __global__ void a_lane_is_missing(int* x) {
    if (threadIdx.x != 40) x[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x), 1);
}

extern "C" __global__ void no_barrier(int* x) {
    __shared__ int kept[256];
    kept[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}
"""
NAMES = (
    "reverse_block",
    "reverse_dynamic",
    "warps",
    "atomics",
    "half_there",
    "half_back",
    "half_of_the_block_waits",
    "at_two_barriers",
    "a_lane_is_missing",
    "no_barrier",
)


@pytest.fixture(scope="module", params=["switch", "ucontext"])
def emulator(request):
    """The emulator in each of its two switching modes."""
    flags = ("-O2", "-DEMULATION_UCONTEXT") if request.param == "ucontext" else ("-O2",)
    return Emulator(build.build("selftest.so", {"selftest": (SOURCE, NAMES)}, flags))


def run(
    emulator: Emulator,
    kernel: str,
    *args: torch.Tensor | int,
    grid: int = 1,
    block: int = 256,
    shared: int = 0,
    order: int = 0,
):
    values = tuple(
        ctypes.c_longlong(a) if isinstance(a, int) else ctypes.c_void_p(a.data_ptr()) for a in args
    )
    emulator.run(KernelLaunch("selftest", kernel, grid, values, shared, block), order=order)


orders = pytest.mark.parametrize("order", [0, 1, 5])


@orders
def test_a_barrier_holds_all_threads_and_blocks_have_their_own_place(emulator, order):
    x = torch.arange(512, dtype=torch.int32)
    run(emulator, "reverse_block", x, grid=2, order=order)
    assert x.tolist() == [*range(255, -1, -1), *range(511, 255, -1)]


@orders
def test_dynamic_shared_memory_is_the_launch_s(emulator, order):
    x = torch.arange(64, dtype=torch.int32)
    run(emulator, "reverse_dynamic", x, block=64, shared=256, order=order)
    assert x.tolist() == [*range(63, -1, -1)]


@orders
def test_warps_exchange_and_blocks_vote(emulator, order):
    x, votes = torch.arange(128, dtype=torch.float32), torch.zeros(128, dtype=torch.int32)
    expected = [
        float(sum(range(32 * (i // 32), 32 * (i // 32) + 32)) + 32 * (i // 32) + 3)
        for i in range(128)
    ]
    run(emulator, "warps", x, votes, block=128, order=order)
    assert x.tolist() == expected
    assert votes.tolist() == [1] * 128


def test_atomics_lose_nothing(emulator):
    total, half, most = (
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1),
        torch.zeros(1, dtype=torch.int32),
    )
    run(emulator, "atomics", total, half, most, grid=3)
    assert (total.item(), half.item(), most.item()) == (768, 384.0, 2255)


def test_conversions_are_torch_s_for_every_16_bit_number_and_all_around_them(emulator):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    x, y = torch.empty(65536), torch.empty(65536)
    run(emulator, "half_back", every, every, x, y, 65536)
    assert_equal(x, every.view(torch.float16).float(), EXACT)
    assert_equal(y, every.view(torch.bfloat16).float(), EXACT)
    # Each number, its float32 neighbours, and the midpoint to the next one with its neighbours:
    # where rounding changes.
    for numbers, step in ((x, 0x1000), (y, 0x8000)):
        bits = numbers.view(torch.int32)
        floats = torch.cat([bits + off for off in (-1, 0, 1, step - 1, step, step + 1)]).view(
            torch.float32
        )
        half, brain = (
            torch.empty(len(floats), dtype=torch.float16),
            torch.empty(len(floats), dtype=torch.bfloat16),
        )
        run(emulator, "half_there", floats, half, brain, len(floats))
        assert_equal(half, floats.half(), EXACT)
        assert_equal(brain, floats.bfloat16(), EXACT)


def test_a_nan_becomes_cuda_s_own(emulator):
    half, brain = torch.empty(1, dtype=torch.float16), torch.empty(1, dtype=torch.bfloat16)
    run(emulator, "half_there", torch.tensor([float("nan")]), half, brain, 1)
    assert (half.view(torch.int16).item(), brain.view(torch.int16).item()) == (0x7FFF, 0x7FFF)


@orders
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "half_of_the_block_waits",
            r"divergent block 0: 128 threads at barrier selftest\.cu:\d+; 128 threads at the end",
        ),
        (
            "at_two_barriers",
            (
                r"divergent block 0: 128 threads at barrier selftest\.cu:\d+; 128 threads at"
                r" barrier selftest\.cu:\d+$"
            ),
        ),
        (
            "a_lane_is_missing",
            (
                r"divergent block 0: 224 threads at the end; 31 .* at warp operation|31 threads at"
                r" warp operation"
            ),
        ),
        ("nothing", "nothing: there is no such kernel"),
    ],
)
def test_what_a_card_would_hang_at_is_an_error(emulator, kernel, message, order):
    with pytest.raises(RuntimeError, match=message):
        run(emulator, kernel, torch.zeros(256, dtype=torch.int32), order=order)
    x = torch.arange(256, dtype=torch.int32)
    run(emulator, "reverse_block", x)  # and the next launch works
    assert x[0].item() == 255


def test_the_order_of_threads_shows_a_missing_barrier(emulator):
    results = set()
    for order in (0, 1, 5):
        x = torch.arange(256, dtype=torch.int32)
        run(emulator, "no_barrier", x, order=order)
        results.add(tuple(x.tolist()))
    assert len(results) > 1


def test_the_kernels_are_the_same_with_ucontext():
    codec = {"codec": build.kernel_sources()["codec"]}
    emulated = Emulator(build.build("codec.so", codec, ("-O1", "-DEMULATION_UCONTEXT")))

    class Slow(EmulatedBackend):
        def _submit(self, plan, device):
            workspace = torch.zeros(plan.workspace, dtype=torch.uint8)
            for launch in plan.launches:
                emulated.run(launch, workspace.data_ptr())

    x = torch.randn(3 * 9001, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        get_codec("MinMaxUInt8", Slow()).compress(x, 3),
        get_codec("MinMaxUInt8", get_backend("reference")).compress(x, 3),
    )
