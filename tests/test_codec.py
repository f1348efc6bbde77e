"""Tests of MinMaxUInt8: pinned vectors, sizes that cross the reference's blocks, bad arguments (S4)."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bagua_ref.backends import get_codec
from bagua_ref.backends.reference.backend import BLOCK
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.expected import codecs_scalar
from bagua_ref.conformance.expected.kernels_scalar import float32_of_bits

COMPRESSIBLE = (torch.float16, torch.bfloat16, torch.float32)
codec = get_codec("MinMaxUInt8", "reference")


def round_trip(x: torch.Tensor, num_chunks: int = 1) -> torch.Tensor:
    out = torch.full_like(x, 5)
    codec.decompress(codec.compress(x, num_chunks), num_chunks, out)
    return out


def block(header: str, levels: list[int]) -> bytes:
    return (bytes.fromhex(header).ljust(32, b"\0") + bytes(levels)).ljust(codec.payload_bytes(len(levels), torch.float32), b"\0")


@pytest.mark.parametrize(
    ("values", "dtype", "header", "levels"),
    [
        ([0.0, 1.0, 2.0], torch.float32, "00000000 00000040", [0, 128, 255]),
        ([-253.5, 1.5], torch.float32, "00807dc3 0000c03f", [0, 255]),  # S4.2: the lower clamp, -1 without it
        ([1.0, 1.0], torch.float32, "0000803f 0000803f", [255, 255]),  # S4.2: the upper clamp, 256 without it
        ([-0.0, -0.0], torch.float32, "00000000 00000000", [255, 255]),  # S4.1: a zero is written +0
        ([-1.0, -0.0], torch.float16, "00bc 0000", [0, 255]),
        ([-1.0, 3.0], torch.bfloat16, "80bf 4040", [0, 255]),
        ([1e30, 1e30], torch.float32, "0000c07f 0000c07f", [0, 0]),  # S4.4: max*scale overflows
        ([-3e38, 3e38], torch.float32, "0000c07f 0000c07f", [0, 0]),  # S4.4: max - min overflows
        ([1.0, math.nan], torch.float32, "0000c07f 0000c07f", [0, 0]),
        ([1.0, -math.inf], torch.float16, "007e 007e", [0, 0]),
        ([math.nan, 2.0], torch.bfloat16, "c07f c07f", [0, 0]),
        ([], torch.float32, "00000000 00000000", []),  # S4.4
    ],
)
def test_S4_pinned_vectors(values, dtype, header, levels):
    x = torch.tensor(values, dtype=dtype)
    assert bytes(codec.compress(x, 1).tolist()) == block(header, levels)
    assert codecs_scalar.compress_minmax(x.tolist(), str(dtype).removeprefix("torch.")) == block(header, levels)


def test_S4_3_what_lies_beyond_float16_is_its_largest_number():
    # Levels 0 and 255 decode to -127 and 128 steps of 513.8; the upper one, 65760, would round to infinity.
    x = torch.tensor([-65504.0, 65504.0], dtype=torch.float16)
    assert_equal(round_trip(x), torch.tensor([-65248.0, 65504.0], dtype=torch.float16), EXACT)


def test_S4_3_what_lies_beyond_float32_is_its_largest_number():
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([-largest / 2, largest / 2])
    restored = round_trip(x)
    assert restored.isfinite().all()
    payload = torch.zeros(64, dtype=torch.uint8)
    payload[:8] = torch.tensor([-largest, largest]).view(torch.uint8)  # no compressor writes this: the difference overflows
    payload[32:34] = torch.tensor([0, 200])
    out = torch.zeros(2)
    codec.decompress(payload, 1, out)
    assert_equal(out, torch.tensor([-largest, -largest]), EXACT)


def test_S4_6_the_pinned_vector_needs_one_and_a_half_steps():
    low, high = float32_of_bits(0xC018B111), float32_of_bits(0x4027C5B4)
    x = torch.tensor([high, low])
    errors = (round_trip(x).double() - x.double()).abs()
    scale = codecs_scalar.grid(low, high)[0]
    assert errors.max() > 0.5 / scale + 2.0**-22 * high
    assert errors.max() <= codecs_scalar.error_bound("MinMaxUInt8", low, [low, high], 0.0, "float32")


@pytest.mark.parametrize("dtype", COMPRESSIBLE, ids=str)
@pytest.mark.parametrize(
    ("num_chunks", "size"), [(1, BLOCK), (1, 2 * BLOCK + 1), (3, BLOCK + 7), (70, 1000), (1024, 64), (1024, 1), (2 * BLOCK, 1)]
)
def test_sizes_that_cross_a_block(num_chunks, size, dtype):
    x = torch.randn(num_chunks * size, generator=torch.Generator().manual_seed(0)).mul_(3).to(dtype)
    chunks = x.view(num_chunks, size).double()
    payload = codec.compress(x, num_chunks)
    blocks, restored = payload.view(num_chunks, -1), round_trip(x, num_chunks).view(num_chunks, size)
    headers = blocks[:, : 2 * x.element_size()].contiguous().view(dtype)
    assert_equal(headers, torch.stack([chunks.amin(1), chunks.amax(1)], 1).to(dtype), EXACT)
    picked = random.Random(0)
    places = [(picked.randrange(num_chunks), picked.randrange(size)) for _ in range(200)]
    for row, column in [*places, (0, 0), (num_chunks - 1, size - 1), (0, min(BLOCK, size) - 1), (0, min(BLOCK, size - 1))]:
        grid = codecs_scalar.grid(*headers[row].tolist())
        assert blocks[row, 32 + column].item() == codecs_scalar.level_of(chunks[row, column].item(), *grid)
        block = bytes(blocks[row, :32].tolist()) + bytes([blocks[row, 32 + column].item()])
        assert restored[row, column].item() == codecs_scalar.decompress_minmax(block, 1, str(dtype).removeprefix("torch."))[0]


def test_payload_bytes_grows_in_steps_of_32():
    assert [codec.payload_bytes(count, torch.float16) for count in (0, 1, 32, 33)] == [32, 64, 64, 96]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8], ids=str)
def test_S4_5_other_dtypes_are_refused_by_name(dtype):
    x, payload = torch.zeros(4, dtype=dtype), torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(TypeError, match=rf"x is {dtype}; it must be one of torch.float16, torch.bfloat16, torch.float32"):
        codec.compress(x, 1)
    with pytest.raises(TypeError, match=f"out is {dtype}"):
        codec.decompress(payload, 1, x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_chunks": 3}, ValueError, "num_chunks=3 must divide the number of elements, which is 4"),
        ({"num_chunks": 0}, ValueError, "num_chunks=0 must be at least 1"),
        ({"num_chunks": -2}, ValueError, "num_chunks=-2 must be at least 1"),
        ({"num_chunks": 2.0}, TypeError, "num_chunks=2.0 must be an integer"),
        ({"num_chunks": 2, "target_chunk": 2}, ValueError, "target_chunk=2 must be from 0 to num_chunks - 1 = 1"),
        ({"num_chunks": 2, "target_chunk": -1}, ValueError, "target_chunk=-1 must be from 0 to num_chunks - 1 = 1"),
        ({"num_chunks": 2, "target_chunk": "a"}, TypeError, "target_chunk='a' must be an integer"),
        ({"num_chunks": 1, "out": torch.zeros(63, dtype=torch.uint8)}, ValueError, "out has 63 elements; .* must have 64"),
        ({"num_chunks": 1, "out": torch.zeros(64)}, TypeError, "out is torch.float32; .* must be torch.uint8"),
        ({"num_chunks": 1, "out": torch.zeros(128, dtype=torch.uint8)[::2]}, ValueError, "out .* must be 1-D and contiguous"),
        ({"num_chunks": 1, "out": torch.zeros(64, dtype=torch.uint8, device="meta")}, ValueError, "out is on meta"),
    ],
)
def test_compress_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        codec.compress(torch.zeros(4), **arguments)


def test_decompress_refuses_a_payload_of_the_wrong_size_and_leaves_out_alone():
    out = torch.ones(4)
    with pytest.raises(ValueError, match="payload has 64 elements; with out of 4 it must have 128"):
        codec.decompress(torch.zeros(64, dtype=torch.uint8), 2, out)
    assert_equal(out, torch.ones(4), EXACT)


@pytest.mark.slow
def test_the_benchmark_runs_and_its_three_forms_of_S4_agree(tmp_path):
    script, table = Path(__file__).parents[1] / "benchmarks" / "codec.py", tmp_path / "codec.json"
    subprocess.run([sys.executable, script, "--quick", "--json", table], check=True, capture_output=True, timeout=200)
    result = json.loads(table.read_text())
    assert [row["limit"] for row in result["rows"]] == [
        "at most 5",
        "-",
        "-",
        "-",
        "-",
        "-",
        *["at most 5"] * 2,
        *["at most 8"] * 2,
        *["at most 5"] * 4,
    ]
    assert all(row["ratio"] > 0 for row in result["rows"])
    assert {"machine", "versions", "date"} <= set(result)


@pytest.mark.parametrize("dtype", COMPRESSIBLE, ids=str)
def test_a_payload_may_begin_at_any_byte(dtype):
    x, memory, out = torch.tensor([1.0, 5.0, 2.0], dtype=dtype), torch.zeros(67, dtype=torch.uint8), torch.zeros(3, dtype=dtype)
    payload = codec.compress(x, 1, out=memory[3:])
    assert_equal(payload, codec.compress(x, 1), EXACT)
    codec.decompress(payload, 1, out)
    assert_equal(out, round_trip(x), EXACT)


def test_payload_and_tensor_must_lie_apart():
    memory = torch.zeros(128, dtype=torch.uint8)
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        codec.compress(memory[:64].view(torch.float32)[:8], 1, out=memory[16:80])
