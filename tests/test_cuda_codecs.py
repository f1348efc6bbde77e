"""Tests of the emulated CUDA codecs beyond the suites: many blocks, alignments, thread orders,
every code, huge indices.

Payloads must equal the reference's to the bit, but for the last bit of OneBit's scales, whose sums
have any order (S12.2).
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math

import pytest
import torch
from tests.cuda_emulation import build
from tests.cuda_emulation.backend import EmulatedBackend
from tests.cuda_emulation.inputs import FAR, assert_payload, numbers, placed, run_ends, sparse
from torch import Tensor

from bagua_ref.backends import get_backend, get_codec
from bagua_ref.backends.cuda import codec_plans
from bagua_ref.backends.cuda.launch import DeviceProperties, KernelLaunch
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.expected.codecs_scalar import RULES

pytestmark = build.proofs

COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
MX = ("MXFP8", "MXFP4", "MXINT8")
reference, emulated = get_backend("reference"), EmulatedBackend()
every_compressible = pytest.mark.parametrize("dtype", COMPRESSIBLE, ids=str)
every_codec = pytest.mark.parametrize("name", ["MinMaxUInt8", *MX, "NVFP4", "OneBit"])
every_mx = pytest.mark.parametrize("name", MX)


def same_payload(
    name: str,
    x: Tensor,
    num_chunks: int,
    payload_skip: int = 0,
    kernels: EmulatedBackend = emulated,
) -> Tensor:
    """Compare the payload of x with the reference's; return the latter."""
    expected = get_codec(name, reference).compress(x, num_chunks)
    payload = placed(torch.full_like(expected, 255), payload_skip)
    get_codec(name, kernels).compress(x, num_chunks, out=payload)
    assert_payload(name, payload, expected, num_chunks)
    return expected


def same_values(
    name: str,
    payload: Tensor,
    num_chunks: int,
    like: Tensor,
    skip: int = 0,
    kernels: EmulatedBackend = emulated,
) -> None:
    """Compare the values of a payload with the reference's."""
    restored, wanted = placed(torch.full_like(like, 7), skip), torch.empty_like(like)
    get_codec(name, kernels).decompress(payload, num_chunks, restored)
    get_codec(name, reference).decompress(payload, num_chunks, wanted)
    assert_equal(restored, wanted, EXACT)


SHAPES = [
    (5, 33),
    (2, 8187),
    (2, 8188),
    (2, 8189),
    (1, 16376),
    (1, 16377),
    (3, 20_001),
    (1, 200_003),
    (300, 1),
]


@every_compressible
@every_codec
@pytest.mark.parametrize(("num_chunks", "size"), SHAPES, ids=str)
def test_any_size_at_every_alignment(name, dtype, num_chunks, size):
    lanes = 128 // torch.finfo(dtype).bits
    many = size > 10_000 or num_chunks > 100  # for which the emulation takes long
    for skip, payload_skip in [(0, 0), (1, 0), (lanes - 1, 1), (2, 4), (0, 15)][: 2 if many else 5]:
        x = placed(numbers(num_chunks * size, dtype), skip)
        x[::9], x[-1] = 0.0, -0.0
        payload = same_payload(name, x, num_chunks, payload_skip)
        same_values(name, placed(payload, payload_skip), num_chunks, x, skip)


@every_compressible
@every_codec
def test_one_bad_value_anywhere_poisons_its_chunk_or_block_alone(name, dtype):
    size = 20_000
    positions, values = (
        (0, size - 1, size, size + size // 2, 2 * size - 1),
        itertools.cycle([math.inf, math.nan, -math.inf]),
    )
    for position, value in zip(positions, values, strict=False):
        x = numbers(3 * size, dtype)
        x[position] = value
        same_values(name, same_payload(name, x, 3), 3, x)


@every_compressible
@every_codec
def test_a_target_chunk_is_written_alone(name, dtype):
    size = 9000
    x = placed(numbers(3 * size, dtype), 1)
    for target in range(3):
        payload, expected = (
            torch.full((3 * get_codec(name).payload_bytes(size, dtype),), 255, dtype=torch.uint8)
            for _ in range(2)
        )
        get_codec(name, emulated).compress(x, 3, target, payload)
        get_codec(name, reference).compress(x, 3, target, expected)
        assert_payload(name, payload, expected, 3)


@every_codec
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
@pytest.mark.parametrize("order", [0, 1, 7])
def test_neither_the_card_nor_the_order_of_threads_changes_a_bit(name, multiprocessors, order):
    kernels = EmulatedBackend(multiprocessors, order)
    for num_chunks, size in [(3, 20_001), (5, 999), (2, 70_000)]:
        x = numbers(num_chunks * size, torch.float32)
        payload = same_payload(name, x, num_chunks, kernels=kernels)
        assert torch.equal(
            get_codec(name, kernels).compress(x, num_chunks),
            get_codec(name, emulated).compress(x, num_chunks),
        )
        same_values(name, payload, num_chunks, x, kernels=kernels)


@every_compressible
@pytest.mark.parametrize("name", ["MinMaxUInt8", *MX, *RULES, "NVFP4", "OneBit"])
def test_every_16_bit_pattern_in_blocks_of_any_magnitude(name, dtype):
    """Neighbours of one magnitude, then of all: subnormals, zeros of both signs and what saturates,
    in their blocks.
    """
    patterns = torch.arange(65536, dtype=torch.int32)
    for order in (
        patterns,
        patterns.view(32, 2048).t().reshape(-1),
        patterns.view(1024, 64).t().reshape(-1),
    ):
        x = (
            (order << 16 | order).view(torch.float32)
            if dtype is torch.float32
            else order.to(torch.int16).view(dtype)
        )
        same_values(name, same_payload(name, x, 64), 64, x)


@every_compressible
@every_mx
@pytest.mark.parametrize("skip", [0, 3])
def test_S12_1_every_code_with_every_scale(name, dtype, skip):
    codes = torch.arange(256, dtype=torch.uint8)
    size = 256 * 256 * 8 // get_codec(name).bits  # all codes of a byte for each scale
    scales = codes.repeat_interleave(size // 256 // 32)
    payload = torch.cat([scales, codes.repeat(256)])
    same_values(name, payload, 1, torch.empty(size, dtype=dtype), skip)


@pytest.mark.parametrize("name", RULES)
def test_S12_6_every_exponent_where_the_rule_changes(name):
    exponents = torch.arange(256, dtype=torch.int32).view(-1, 1) << 23
    edges = torch.tensor([0, 0x400000, 0x600000, 0x780000, 0x7FFFFF], dtype=torch.int32).view(-1, 1)
    mantissas = (edges + torch.arange(-2, 3)).view(-1) & 0x7FFFFF
    largest = (exponents | mantissas.int()).view(-1)
    x = torch.stack([largest.view(torch.float32)] * 32, 1)
    x[:, 1:] *= torch.linspace(-1, 1, 31)
    same_values(name, same_payload(name, x.view(-1), 1), 1, x.view(-1))


@every_compressible
@pytest.mark.parametrize("skip", [0, 3])
def test_S12_7_every_code_with_every_scale(dtype, skip):
    codes = torch.arange(256, dtype=torch.uint8)
    for t in (1.0, 1e-40, -3e38, math.inf, math.nan):
        header = torch.zeros(32, dtype=torch.uint8)
        header[:4] = torch.tensor([t]).view(torch.uint8)
        payload = torch.cat([header, codes.repeat_interleave(32), codes.repeat(256)])
        same_values("NVFP4", payload, 1, torch.empty(256 * 512, dtype=dtype), skip)


@every_compressible
def test_S12_7_scales_where_they_change_and_those_of_any_magnitude(dtype):
    """Largest numbers of blocks at the ties of E4M3, one step beside them, and far below."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([(numbers[1:] + numbers[:-1]) / 2, numbers[-1:]])
    for largest in (448.0, 3.0, 1e-3, 2.0**-13):
        scales = ties * (largest / 448)
        steps = torch.stack([scales * (1 + step * 2.0**-23) for step in range(-3, 4)]).view(-1)
        x = torch.zeros(len(steps) + 1, 16)
        x[:-1, 0], x[:-1, 5], x[-1, 0] = steps, -steps / 3, largest
        same_values(
            "NVFP4", same_payload("NVFP4", x.view(-1).to(dtype), 1), 1, x.view(-1).to(dtype)
        )
    tiny = torch.finfo(dtype).tiny
    for largest in (tiny, tiny / 64, torch.finfo(dtype).max):
        x = torch.linspace(-1, 1, 480).to(dtype) * largest
        same_values("NVFP4", same_payload("NVFP4", x, 1), 1, x)


def test_S12_2_small_numbers_beside_a_large_one_count():
    x = torch.full((2**17 + 3,), 2.0**-7)
    x[0] = 2.0**9  # 2**18 + 2**17 * 2**-14: float32 would lose most of them
    same_payload("OneBit", x, 1)


def with_parts(launch: KernelLaunch, parts: int) -> KernelLaunch:
    """Return a launch of a codec's kernel, with its last two numbers, parts and their size,
    replaced.
    """
    places = [
        place for place, value in enumerate(launch.args) if isinstance(value, ctypes.c_longlong)
    ][-2:]
    args = list(launch.args)
    for place, value in zip(places, (parts, 2**18), strict=True):
        args[place] = ctypes.c_longlong(value)
    if launch.kernel.startswith(("quantise", "write_signs", "compress_NVFP4")):
        args[2] = ctypes.c_longlong(parts)  # as many results of the launch before
    return dataclasses.replace(launch, args=tuple(args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@every_codec
def test_indices_beyond_2_to_the_31(name, dtype):
    x, y = sparse(FAR, dtype), sparse(FAR, dtype)
    x[-9:] = 6
    codec = get_codec(name, emulated)
    payload = sparse(codec.payload_bytes(FAR, dtype), torch.uint8)
    parts = -(-FAR // 2**18)  # of which only four are run
    workspace = sparse(parts * 8, torch.uint8)
    for launch in codec.plan_compress(DeviceProperties(2), x, 1, None, payload).launches:
        run_ends(with_parts(launch, parts), parts, workspace.data_ptr())
    (back,) = codec_plans.decompress(
        DeviceProperties(2), y, payload, 1, *codec.decompressing
    ).launches
    run_ends(with_parts(back, parts), parts)
    if name == "OneBit":
        s = torch.tensor(9 * 36 / FAR, dtype=torch.float64).sqrt().float().to(dtype)
        assert_equal(y[-10:], s.expand(10), EXACT)
    else:
        assert y[-10:].tolist() == [0.0] + [pytest.approx(6.0)] * 9
