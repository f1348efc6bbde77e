"""MinMaxUInt8 (S4) of every backend against one number at a time."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import (
    adversarial,
    chunked,
    ends_near_half_a_level,
    every_backend,
    every_compressible,
    name_of,
    numbers,
)

from bagua_ref.backends import get_backend, payload_bytes
from bagua_ref.conformance.expected import codec_scalar
from bagua_ref.conformance.tolerances import EXACT, assert_equal


def expected_blocks(x: torch.Tensor, num_chunks: int) -> list[bytes]:
    return [codec_scalar.compress_chunk(chunk.tolist(), name_of(x.dtype)) for chunk in x.view(num_chunks, x.numel() // num_chunks)]


@every_backend
@every_compressible
@given(data=st.data())
def test_S4_2_every_byte_of_the_payload_is_as_specified(backend, dtype, data):
    x, num_chunks = data.draw(chunked(dtype))
    payload = get_backend(backend).compress_minmax_uint8(x, num_chunks)
    assert bytes(payload.tolist()) == b"".join(expected_blocks(x, num_chunks))


@every_backend
@every_compressible
@given(data=st.data())
def test_S4_1_payload_bytes_tells_the_size_and_every_gap_is_zero(backend, dtype, data):
    x, num_chunks = data.draw(chunked(dtype))
    payload = torch.full((payload_bytes(x.numel(), num_chunks),), 255, dtype=torch.uint8)
    assert get_backend(backend).compress_minmax_uint8(x, num_chunks, out=payload) is payload
    assert payload.numel() == sum(map(len, expected_blocks(x, num_chunks)))
    blocks, chunk_size = payload.view(num_chunks, -1), x.numel() // num_chunks
    assert not blocks[:, 2 * x.element_size() : 32].any()
    assert not blocks[:, 32 + chunk_size :].any()


@every_backend
@every_compressible
@given(data=st.data())
def test_S4_3_decompression_is_as_specified(backend, dtype, data):
    x, num_chunks = data.draw(chunked(dtype))
    kernels, restored = get_backend(backend), torch.full_like(x, 7)
    kernels.decompress_minmax_uint8(kernels.compress_minmax_uint8(x, num_chunks), num_chunks, restored)
    size = x.numel() // num_chunks
    values = [
        value for block in expected_blocks(x, num_chunks) for value in codec_scalar.decompress_chunk(block, size, name_of(dtype))
    ]
    assert_equal(restored, torch.tensor(values, dtype=torch.float64).to(dtype), EXACT)


@every_backend
@every_compressible
@given(data=st.data())
def test_S4_3_any_levels_between_any_ends_decompress_as_specified(backend, dtype, data):
    levels = data.draw(st.binary(max_size=40))
    low, high = sorted(data.draw(st.tuples(numbers(dtype, finite=True), numbers(dtype, finite=True))))
    ends = torch.tensor([low, high], dtype=torch.float64).to(dtype).view(torch.uint8).tolist()
    block = bytes(ends).ljust(32, b"\0") + levels
    block = block.ljust(payload_bytes(len(levels), 1), b"\0")
    restored = torch.empty(len(levels), dtype=dtype)
    get_backend(backend).decompress_minmax_uint8(torch.tensor(list(block), dtype=torch.uint8), 1, restored)
    values = codec_scalar.decompress_chunk(block, len(levels), name_of(dtype))
    assert_equal(restored, torch.tensor(values, dtype=torch.float64).to(dtype), EXACT)


@every_backend
@every_compressible
@given(data=st.data())
def test_S4_4_a_chunk_is_poisoned_alone_and_decompresses_to_nan(backend, dtype, data):
    x, num_chunks = data.draw(chunked(dtype, finite=True))
    size, kernels = x.numel() // num_chunks, get_backend(backend)
    bad = data.draw(st.integers(0, num_chunks - 1))
    clean, poisoned = kernels.compress_minmax_uint8(x, num_chunks), x.clone()
    if size:
        poisoned[bad * size + data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([math.inf, -math.inf, math.nan]))
    payload = kernels.compress_minmax_uint8(poisoned, num_chunks)
    restored = torch.zeros_like(x)
    kernels.decompress_minmax_uint8(payload, num_chunks, restored)
    assert restored.view(num_chunks, size)[bad].isnan().all()
    others = [chunk for chunk in range(num_chunks) if chunk != bad]
    assert_equal(payload.view(num_chunks, -1)[others], clean.view(num_chunks, -1)[others], EXACT)


@every_backend
@every_compressible
@given(data=st.data())
def test_S4_5_a_target_chunk_writes_its_block_alone(backend, dtype, data):
    x, num_chunks = data.draw(chunked(dtype))
    target, kernels = data.draw(st.integers(0, num_chunks - 1)), get_backend(backend)
    whole = kernels.compress_minmax_uint8(x, num_chunks).view(num_chunks, -1)
    before = torch.full_like(whole.view(-1), data.draw(st.integers(0, 255)))
    after = before.clone()
    kernels.compress_minmax_uint8(x, num_chunks, target_chunk=target, out=after)
    expected = before.view(num_chunks, -1).clone()
    expected[target] = whole[target]
    assert_equal(after.view(num_chunks, -1), expected, EXACT)
    fresh = kernels.compress_minmax_uint8(x, num_chunks, target_chunk=target)
    expected.zero_()[target] = whole[target]
    assert_equal(fresh.view(num_chunks, -1), expected, EXACT)


def assert_within_bound(kernels, x: torch.Tensor) -> None:
    restored = torch.empty_like(x)
    kernels.decompress_minmax_uint8(kernels.compress_minmax_uint8(x, 1), 1, restored)
    low, high = x.min().item(), x.max().item()
    if codec_scalar.is_out_of_range(low, high):
        assert restored.isnan().all()
        return
    for value, back in zip(x.tolist(), restored.tolist(), strict=True):
        assert abs(back - value) <= codec_scalar.bound(low, high, back, name_of(x.dtype)), (value, back)


@every_backend
@every_compressible
@given(data=st.data())
def test_S4_6_what_comes_back_is_within_the_bound(backend, dtype, data):
    assert_within_bound(get_backend(backend), data.draw(adversarial(dtype, data.draw(st.integers(1, 20)), finite=True)))


@every_backend
@given(ends=ends_near_half_a_level(), places=st.lists(st.floats(0, 1), max_size=30))
def test_S4_6_the_bound_holds_where_an_end_lies_halfway_between_levels(backend, ends, places):
    low, high = ends
    between = [low + (high - low) * place for place in places]
    halfway = [low + (high - low) * (round(place * 254) + 0.5) / 255 for place in places]
    x = torch.tensor([low, high, *between, *halfway], dtype=torch.float64).clamp(low, high).float()
    assert_within_bound(get_backend(backend), x)
