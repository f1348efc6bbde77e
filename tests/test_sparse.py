"""Chunked sparse exchanges beyond the suite: their parts for any numbers, the bytes that are sent, and
trainings that stop, grow and differ (S15).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.trainings import simulate
from torch import nn

from bagua_ref.algorithms import Algorithm
from bagua_ref.backends import get_backend, get_codec
from bagua_ref.backends.chunks import (
    ChunkCoder,
    Chunks,
    Stat2,
    largest_of_rows,
    pack_indices,
    packed_bytes,
    unpack_indices,
)
from bagua_ref.comm_ops.chunked_sparse import basis, transformed
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.expected import chunked_numpy as oracle
from bagua_ref.conformance.expected.compression_numpy import kept
from bagua_ref.planning import plan_of

SIDES = st.integers(1, 9) | st.sampled_from([0, 13, 60, 64, 65, 67, 96, 128])
SHAPES = st.lists(SIDES, max_size=2) | st.lists(st.integers(1, 5), min_size=3, max_size=4)
BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


def floats(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())


@given(shape=SHAPES.map(tuple), chunk=st.integers(1, 64), axis=st.integers(0, 3))
@settings(max_examples=60)
def test_S15_1_chunks_are_blocks_in_row_major_order_whatever_the_strides(
    shape: tuple[int, ...], chunk: int, axis: int
) -> None:
    places, sides = oracle.chunks(shape, chunk)
    chunks = Chunks(shape, chunk)
    assert (chunks.count, chunks.numel) == places.shape
    assert chunks.sides == sides
    assert all(size % side == 0 for size, side in zip((1, 1, *shape)[-2:], sides, strict=True))
    x = torch.arange(int(np.prod(shape))).view(shape)
    if axis < x.dim():
        x = x.transpose(0, axis).contiguous().transpose(0, axis)
    assert torch.equal(chunks.cut(x), torch.from_numpy(places))
    assert torch.equal(chunks.join(chunks.cut(x)), x)


@given(rows=st.lists(BITS, min_size=1, max_size=4), levels=st.booleans(), data=st.data())
@settings(max_examples=60)
def test_S15_2_the_largest_of_each_row_are_selected_in_ascending_order(
    rows: list[list[int]], levels: bool, data: Any
) -> None:
    m = min(map(len, rows))
    x = torch.stack([floats(row[:m]) for row in rows])
    if levels:  # many ties
        x = (x.view(torch.int32) % 3 - 1).float()
    k = data.draw(st.integers(1, m))
    found = largest_of_rows(x, k)
    assert found.tolist() == [kept(row.numpy(), k) for row in x]


@given(indices=st.lists(st.integers(0, 4095), min_size=1, max_size=30))
@example(indices=[4095])
@settings(max_examples=40)
def test_S15_3_indices_take_12_bits_each(indices: list[int]) -> None:
    packed = pack_indices(torch.tensor(indices))
    assert bytes(packed.tolist()) == oracle.packed(indices)
    assert len(packed) == packed_bytes(len(indices))
    assert unpack_indices(packed, len(indices)).tolist() == indices


@given(bits=BITS, scale=st.sampled_from(["any", "levels", "tiny", "close"]), zeros=st.booleans())
@example(bits=[0x7F7FFFFF, 0xFF7FFFFF, 0xFF7FFFFF], scale="any", zeros=False)  # c overflows
@example(bits=[1, 2, 0x80000001], scale="any", zeros=True)
@example(bits=[0x40490FDB] * 5, scale="any", zeros=True)  # equal values stay as they are
@example(bits=[0, 0], scale="any", zeros=True)
@settings(max_examples=150)
def test_S15_3_stat2_has_the_bytes_of_exact_sums(bits: list[int], scale: str, zeros: bool) -> None:
    x = floats(bits)
    if scale != "any":
        x = (x.view(torch.int32) % 5).float() * {"levels": 0.1, "tiny": 1e-45, "close": 1e-7}[scale]
        x += scale == "close"
    if zeros:
        x[::3] = -0.0
    codec = Stat2(get_backend("reference"))
    payload, decoded = codec.compress(x, 1), torch.empty_like(x)
    codec.decompress(payload, 1, decoded)
    with np.errstate(all="ignore"):
        right, values = oracle.stat2(x.numpy())
    assert bytes(payload.tolist()) == right
    assert_equal(decoded, torch.from_numpy(values), EXACT)
    assert len(payload) == codec.payload_bytes(len(x), torch.float32)


def test_S15_3_stat2_takes_chunks_and_one_of_them_alone_as_other_codecs_do() -> None:
    codec = Stat2(get_backend("reference"))
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    each = torch.cat([codec.compress(row, 1) for row in x])
    assert torch.equal(codec.compress(x.view(-1), 3), each)
    alone = codec.compress(x.view(-1), 3, target_chunk=1).view(3, -1)
    assert torch.equal(alone[1], each.view(3, -1)[1])
    assert not alone[::2].any()
    out = torch.empty(21)
    codec.decompress(each, 3, out)
    whole = torch.empty(7)
    codec.decompress(each.view(3, -1)[2], 1, whole)
    assert torch.equal(out[14:], whole)


@pytest.mark.parametrize("codec", [None, "Stat2", "MXFP4", "OneBit", "MinMaxUInt8"])
@pytest.mark.parametrize("shape", [(0,), (), (67,), (64, 64), (6, 10), (2, 3, 5)])
def test_S15_3_a_message_has_the_bytes_of_the_formula(
    shape: tuple[int, ...], codec: str | None
) -> None:
    kernels = get_backend("reference")
    made: Any = codec and (Stat2(kernels) if codec == "Stat2" else get_codec(codec))
    for k in (1, 7, 4096):
        coder = ChunkCoder(Chunks(shape, 64), k, made)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(k))
        n = coder.count
        values = {None: 4 * n, "Stat2": 16 + 4 * ((n + 15) // 16)}.get(codec)
        values = made.payload_bytes(n, torch.float32) if values is None else values
        head = -(-3 * -(-n // 2) // 4) * 4 if k < coder.chunks.numel else 0
        assert len(coder.encode(coder.chunks.cut(x))) == coder.nbytes == (head + values) * (n > 0)


def test_S15_6_bases_are_orthonormal_and_their_zeros_exact() -> None:
    for c in (1, 2, 3, 16, 63, 64):
        b = basis(c)
        assert (b @ b.T - torch.eye(c)).abs().max() < 1e-14
        i, odd = torch.arange(c)[:, None], 2 * torch.arange(c) + 1
        assert torch.equal(b == 0, i * odd % (2 * c) == c)
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    there = transformed(x, (3, 4))
    assert (transformed(there, (3, 4), inverse=True) - x).abs().max() < 1e-6
    constant = transformed(torch.ones(1, 12), (3, 4))
    assert constant[0, 0] == pytest.approx(12**0.5)
    assert constant[0, 1:].abs().max() < 1e-7


# Trainings


def matrix() -> nn.Module:
    """Return a module whose chunks are larger than what is selected, and one with a single element."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 67), nn.Linear(67, 1))


def trained(r: int, name: str, steps: int, module: Any = None, **options: Any) -> Any:
    module = matrix() if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.with_bagua([optimizer], Algorithm.init(name, **options))
    generator = torch.Generator().manual_seed(r)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(2, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return module


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("demo", {"top_k": 5}),
    ("demo", {"top_k": 5, "compression": "Stat2", "mean": "contributors"}),
    ("diloco", {"period": 1, "top_k": 9, "compression": "MXFP8"}),
    ("diloco", {"period": 2, "fragments": 2, "top_k": 9, "chunk": 7, "compression": "Stat2"}),
]


@pytest.mark.parametrize(("name", "options"), RUNS)
def test_what_is_sent_is_the_formula_and_the_plan(name: str, options: dict[str, Any]) -> None:
    n, steps = 3, 4

    def rank(r: int) -> int:
        module = trained(r, name, steps, **options)
        sent: int = module.bagua_metrics()["bytes_sent"]
        return sent

    codec: Any = options.get("compression")
    if codec is not None:
        codec = Stat2(get_backend("reference")) if codec == "Stat2" else get_codec(codec)
    formula = (n - 1) * sum(
        ChunkCoder(Chunks(p.shape, options.get("chunk", 64)), options["top_k"], codec).nbytes
        for p in matrix().parameters()
    )
    plan = plan_of(Algorithm.init(name, **options), matrix(), (1,) * n)
    planned = [plan.traffic(step)[0]["between"].bytes_sent for step in range(1, steps + 1)]
    assert sum(planned) == formula * steps // options.get("period", 1)
    # beside the messages, ranks send each other weights when they wrap
    plain = simulate(n, lambda r: trained(r, name, 0, **options).bagua_metrics()["bytes_sent"])
    assert [a - b for a, b in zip(simulate(n, rank), plain, strict=True)] == [sum(planned)] * n


@pytest.mark.parametrize("name", ["demo", "diloco"])
def test_memories_belong_to_their_rank_and_the_rest_loads_at_any_number_of_ranks(name: str) -> None:
    options: dict[str, Any] = {"top_k": 3} | ({"period": 2} if name == "diloco" else {})

    def saved(r: int) -> Any:
        module = trained(r, name, 4, **options)
        return module.bagua_algorithm.state_dict()

    states = simulate(2, saved)
    assert all(any(e.any() for e in state["memories"].values()) for state in states)

    def grown(r: int) -> None:
        module = trained(r, name, 0, **options)
        algorithm = module.bagua_algorithm
        with pytest.raises(
            ValueError, match=r"state has memories of rank 0 of 2, and this is rank"
        ):
            algorithm.load_state_dict(states[0])
        algorithm.load_state_dict(states[0], drop_local=True)
        assert not any(e.any() for e in algorithm.state_dict()["memories"].values())

    simulate(3, grown)
