"""Tests of the emulated CUDA sources beyond the properties: many blocks, alignments, thread orders, huge indices.

Results must equal the reference's to the bit; properties test the reference.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap

import pytest
import torch
from tests.cuda_emulation import build
from tests.cuda_emulation.backend import EmulatedBackend, emulator
from tests.cuda_emulation.copies import CudaOnCopies
from torch import Tensor

from bagua_ref.backends import get_backend, payload_bytes
from bagua_ref.backends.cuda import movement, plan
from bagua_ref.backends.cuda.launch import BLOCK, Card, Launch
from bagua_ref.conformance import EXACT, assert_equal

if build.compiler() is None:
    pytest.skip("there is no g++", allow_module_level=True)

COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)
FLOATS = (*COMPRESSIBLE, torch.float64)
reference, emulated = get_backend("reference"), EmulatedBackend()
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_compressible = pytest.mark.parametrize("dtype", COMPRESSIBLE, ids=str)


def placed(x: Tensor, skip: int) -> Tensor:
    """Return a copy of x that begins ``skip`` elements after a boundary of 16 (and 64) bytes."""
    room = torch.zeros(x.numel() + skip + 64, dtype=x.dtype)
    copy = room[skip : skip + x.numel()]
    copy.copy_(x)
    assert copy.data_ptr() % 64 == skip * x.element_size() % 64
    return copy


def numbers(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def element_wise(kernels, x: Tensor, y: Tensor, z: Tensor, w: Tensor, wide: Tensor) -> list[Tensor]:
    results = []
    for update in (
        lambda t: kernels.add_(t, y),
        lambda t: kernels.subtract_(t, y),
        lambda t: kernels.add_scaled_(t, y, 0.3),
        lambda t: kernels.average_(t, z),
        lambda t: kernels.divide_(t, 3),
        lambda t: kernels.combine_ring_(t, y, z, w),
        lambda t: kernels.async_average_(t, wide, z, 3),
        lambda t: kernels.update_momentum_(t, y, 0.9),
    ):
        target = placed(x, x.storage_offset())
        update(target)
        results.append(target)
    return results


@every_float
@pytest.mark.parametrize("size", [1, 7, 8, 9, 4099, 300_001])
def test_element_wise_kernels_at_every_alignment(dtype, size):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    lanes = 128 // torch.finfo(dtype).bits
    for skips in [(0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 2, 3), (lanes - 1, lanes // 2, 0, 1), (0, 1, lanes - 1, 2)]:
        x, y, z, w = (placed(numbers(size, dtype, seed), skip) for seed, skip in enumerate(skips))
        reduced = placed(numbers(size, wide, 9), skips[3])
        for actual, expected in zip(
            element_wise(emulated, x, y, z, w, reduced), element_wise(reference, x, y, z, w, reduced), strict=True
        ):
            assert_equal(actual, expected, EXACT)
        if size > 5000:
            break


def test_what_lies_around_a_tensor_is_left_alone():
    room = numbers(100, torch.float16)
    for start, end in [(0, 1), (1, 2), (3, 50), (7, 100), (8, 24), (5, 9)]:
        touched = room.clone()
        emulated.add_(touched[start:end], numbers(end - start, torch.float16, 1))
        assert_equal(torch.cat([touched[:start], touched[end:]]), torch.cat([room[:start], room[end:]]), EXACT)


SHAPES = [
    (1, 1), (1, 31), (5, 33), (3, 1000), (2, 8187), (2, 8188), (2, 8189), (1, 16376), (1, 16377), (3, 20_001), (1, 200_003),
    (70, 3), (300, 1), (0, 4),
]  # fmt: skip


@every_compressible
@pytest.mark.parametrize(("num_chunks", "size"), [shape for shape in SHAPES if shape[0]], ids=str)
def test_codec_on_and_off_chip_at_every_alignment(dtype, num_chunks, size):
    lanes = 128 // torch.finfo(dtype).bits
    for skip, payload_skip in [(0, 0), (1, 0), (lanes - 1, 1), (2, 4), (0, 15)][: 2 if size > 10_000 else 5]:
        x = placed(numbers(num_chunks * size, dtype), skip)
        expected = reference.compress_minmax_uint8(x, num_chunks)
        payload = placed(torch.full_like(expected, 255), payload_skip)
        emulated.compress_minmax_uint8(x, num_chunks, out=payload)
        assert torch.equal(payload, expected)
        restored, wanted = placed(torch.full_like(x, 7), skip), torch.empty_like(x)
        emulated.decompress_minmax_uint8(payload, num_chunks, restored)
        reference.decompress_minmax_uint8(expected, num_chunks, wanted)
        assert_equal(restored, wanted, EXACT)


@every_compressible
@pytest.mark.parametrize("size", [100, 20_000])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_one_bad_value_anywhere_poisons_its_chunk_alone(dtype, size, value):
    for position in (0, size - 1, size, size + size // 2, 2 * size - 1):
        x = numbers(3 * size, dtype)
        x[position] = value
        payload = emulated.compress_minmax_uint8(x, 3)
        assert torch.equal(payload, reference.compress_minmax_uint8(x, 3))
        restored, wanted = torch.empty_like(x), torch.empty_like(x)
        emulated.decompress_minmax_uint8(payload, 3, restored)
        reference.decompress_minmax_uint8(payload, 3, wanted)
        assert_equal(restored, wanted, EXACT)


@every_compressible
@pytest.mark.parametrize("size", [100, 9000, 20_000])
def test_a_target_chunk_is_written_alone(dtype, size):
    x = placed(numbers(3 * size, dtype), 1)
    for target in range(3):
        payload, expected = (torch.full((payload_bytes(3 * size, 3),), 255, dtype=torch.uint8) for _ in range(2))
        emulated.compress_minmax_uint8(x, 3, target, payload)
        reference.compress_minmax_uint8(x, 3, target, expected)
        assert torch.equal(payload, expected)


@every_float
@pytest.mark.parametrize(("num_chunks", "size"), [(1, 5), (2, 9), (3, 4096), (4, 8191), (9, 1), (513, 3), (7, 10_001)])
def test_chunks_are_added_in_order_at_every_alignment(dtype, num_chunks, size):
    for skip, target, average in [(0, 0, True), (1, num_chunks - 1, False), (3, num_chunks // 2, True)]:
        x = placed(numbers(num_chunks * size, dtype), skip)
        expected = x.clone()
        emulated.reduce_chunks_(x, num_chunks, target, average)
        reference.reduce_chunks_(expected, num_chunks, target, average)
        assert_equal(x, expected, EXACT)


@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
@pytest.mark.parametrize("order", [0, 1, 7])
def test_neither_the_card_nor_the_order_of_threads_changes_a_bit(multiprocessors, order):
    kernels = EmulatedBackend(multiprocessors, order)
    for num_chunks, size in [(3, 20_001), (5, 999), (2, 70_000)]:
        x = numbers(num_chunks * size, torch.float32)
        payload = reference.compress_minmax_uint8(x, num_chunks)
        assert torch.equal(kernels.compress_minmax_uint8(x, num_chunks), payload)
        restored, wanted = torch.empty_like(x), torch.empty_like(x)
        kernels.decompress_minmax_uint8(payload, num_chunks, restored)
        reference.decompress_minmax_uint8(payload, num_chunks, wanted)
        assert_equal(restored, wanted, EXACT)
        kernels.reduce_chunks_(x, num_chunks, 1, True)
        kernels.add_(x, restored)
        total = numbers(num_chunks * size, torch.float32)
        reference.reduce_chunks_(total, num_chunks, 1, True)
        reference.add_(total, restored)
        assert_equal(x, total, EXACT)


def pieces(dtype: torch.dtype) -> list[Tensor]:
    base = torch.arange(40_000, dtype=torch.float64).to(dtype)
    few = base[:5040]
    two_each = few[:512].view(*(2,) * 9)
    return [
        base[1:9], base[3:3], base[7:17_000], base[5], base[100:200:3], few.view(70, 72).t(),
        few.view(2, 3, 4, 5, 6, 7).permute(5, 3, 1, 0, 2, 4), few.view(1, 7, 720)[:, 1:5, ::2],
        base[:6].view(2, 3).expand(4, 2, 3), two_each.permute(*range(8, -1, -1)),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str)
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_gather_and_scatter_move_any_shape_and_any_dtype(dtype, skip):
    tensors = pieces(dtype)
    expected = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = placed(torch.zeros_like(expected), skip)
    emulated.gather_flat(tensors, flat)
    assert torch.equal(flat, expected)
    targets = [torch.zeros_like(tensor) for tensor in tensors]  # zeros_like keeps the order of axes where it can
    emulated.scatter_flat(flat, targets)
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(target, tensor)


def test_more_tensors_than_fit_into_a_launch():
    tensors = [torch.full((number % 5,), float(number)) for number in range(3 * movement.SEGMENTS + 5)]
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors))
    emulated.gather_flat(tensors, flat)
    assert torch.equal(flat, torch.cat(tensors))
    assert len(movement.copy(Card(2), flat, list(zip(tensors, [0] * len(tensors), strict=True)), gather=True).launches) == 3


def test_lazy_views_are_copied_as_what_they_stand_for():
    x = torch.tensor([1 + 2j, 3 - 4j])
    flat = torch.zeros(2, dtype=torch.complex64)
    emulated.gather_flat([x.conj()], flat)
    assert flat.tolist() == [1 - 2j, 3 + 4j]
    emulated.scatter_flat(flat, [x.conj()])
    assert x.tolist() == [1 + 2j, 3 - 4j]
    negated = torch._neg_view(torch.ones(3))
    with pytest.raises(ValueError, match=r"lazily negated .* resolve_neg\(\)"):
        emulated.add_(torch.zeros(3), negated)


def test_many_elements_in_one_place_are_not_written():
    with pytest.raises(RuntimeError, match="single memory location"):
        emulated.scatter_flat(torch.ones(4), [torch.zeros(1).expand(4)])


def test_memory_between_two_elements_is_refused():
    odd = torch.frombuffer(bytearray(64), dtype=torch.float32, count=4, offset=2)
    with pytest.raises(ValueError, match=r"begins at address 0x[0-9a-f]+; it must be a multiple of 4"):
        emulated.add_(odd, torch.zeros(4))


@every_float
def test_order_puts_zeros_together_and_every_nan_last(dtype):
    values = [0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1.0, -1.0, 0.0, torch.finfo(dtype).tiny / 2]
    keys = torch.tensor(values * 30, dtype=torch.float64).to(dtype)
    keys[3::10] = -keys[2::10].abs()  # NaN with a sign
    assert torch.equal(emulated.order_by_complexity(keys), reference.order_by_complexity(keys))


# Sizes beyond 2**31: reserved memory that is mostly never touched; only the last blocks of a grid are run.

FAR = 2**31 + 12_345


def sparse(size: int, dtype: torch.dtype) -> Tensor:
    item = torch.empty(0, dtype=dtype).element_size()
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's constant; Python names it from 3.13 on
    room = mmap.mmap(-1, size * item, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(room, dtype=dtype)


def run_ends(launch: Launch, grid: int, workspace: int = 0) -> None:
    """Run the first block and the last three, on a grid large enough that no block loops.

    The first block also handles the elements that do not fill a pack.
    """
    launch = dataclasses.replace(launch, grid=grid)
    emulator().run(launch, workspace, blocks=range(grid - 3, grid))
    emulator().run(launch, workspace, blocks=range(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_indices_beyond_2_to_the_31(dtype):
    x, y = sparse(FAR, dtype), sparse(FAR, dtype)
    per_block = 16 // x.element_size() * BLOCK
    x[-9:], y[-9:] = 3, 4
    (launch,) = plan.element_wise(Card(2), "add", x, y).launches
    run_ends(launch, -(-FAR // per_block))
    assert x[-10:].tolist() == [0.0] + [7.0] * 9
    payload = sparse(payload_bytes(FAR, 1), torch.uint8)
    ends, levels = plan.compress(Card(2), x, 1, None, payload).launches
    # The last part of each pass, in parts of 2**20 elements, of which only four are run.
    parts = -(-FAR // 2**20)
    workspace = sparse(parts * 8, torch.uint8)
    cut = (ctypes.c_longlong(parts), ctypes.c_longlong(2**20))
    ends = dataclasses.replace(ends, args=(*ends.args[:3], *cut, ends.args[5]))
    run_ends(ends, parts, workspace.data_ptr())
    levels = dataclasses.replace(
        levels, args=(*levels.args[:3], cut[0], levels.args[4], *cut, levels.args[7])
    )  # fmt: skip
    run_ends(levels, parts, workspace.data_ptr())
    assert payload[32 + FAR - 10 : 32 + FAR + 1].tolist() == [0] + [255] * 9 + [0]
    assert payload[: 2 * x.element_size()].view(dtype).tolist() == [0.0, 7.0]
    (back,) = plan.decompress(Card(2), payload, 1, y).launches
    run_ends(dataclasses.replace(back, args=(*back.args[:3], *cut, back.args[5])), parts)
    assert y[-10:].tolist() == [0.0] + [pytest.approx(7.0)] * 9


def test_chunks_and_copies_beyond_2_to_the_31():
    x = sparse(3 * 2**30, torch.float16)
    x[2**30 - 1], x[2**31 - 1], x[-1] = 1, 2, 4
    (launch,) = plan.reduce_chunks(Card(2), x, 3, 2, average=False).launches
    run_ends(launch, 2**30 // (8 * BLOCK))
    assert x[-2:].tolist() == [0.0, 7.0]
    flat = sparse(2 * x.numel(), torch.uint8)
    (launch,) = movement.copy(Card(2), flat, [(x.view(torch.uint8), 0)], gather=True).launches
    run_ends(launch, 2 * x.numel() // movement.PIECE)
    assert flat[-2:].view(torch.float16).item() == 7.0
    # Every other pair, at element offsets beyond 2**31.
    apart = x.view(-1, 4)[:, :2]
    (launch,) = movement.copy(Card(2), flat.view(torch.float16), [(apart, 0)], gather=True).launches
    apart[-1] = 9
    run_ends(launch, apart.numel() // BLOCK)
    assert flat.view(torch.float16)[apart.numel() - 2 : apart.numel()].tolist() == [9.0, 9.0]


class EmulatedCopies(CudaOnCopies):
    """The copies through which properties run on a card, tried without one."""

    inner, device = "cuda-emulated", "cpu"


@pytest.mark.usefixtures("_registered")
@every_float
def test_the_way_properties_reach_a_card_changes_nothing(dtype):
    kernels = EmulatedCopies()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x, y, z, w = (placed(numbers(99, dtype, seed), seed) for seed in range(4))
    reduced = numbers(99, wide, 5)
    for actual, expected in zip(
        element_wise(kernels, x, y, z, w, reduced), element_wise(reference, x, y, z, w, reduced), strict=True
    ):
        assert_equal(actual, expected, EXACT)
    kernels.reduce_chunks_(x, 3, 1, average=True)
    assert_equal(kernels.order_by_complexity(x), reference.order_by_complexity(x), EXACT)
    if dtype is not torch.float64:
        payload = kernels.compress_minmax_uint8(x, 3, target_chunk=1)
        assert torch.equal(payload, reference.compress_minmax_uint8(x, 3, target_chunk=1))
        kernels.decompress_minmax_uint8(payload, 3, y)
        reference.decompress_minmax_uint8(payload, 3, z)
        assert_equal(y, z, EXACT)
    tensors = pieces(dtype)
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    kernels.gather_flat(tensors, flat)
    assert torch.equal(flat, torch.cat([tensor.reshape(-1) for tensor in tensors]))
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    kernels.scatter_flat(flat, targets)
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(target, tensor)


@pytest.fixture
def _registered(monkeypatch):
    import bagua_ref.backends as registry

    known = {"cuda-emulated": registry._Registration("tests.cuda_emulation.backend:EmulatedBackend", "")}
    monkeypatch.setattr(registry, "_registered", {**registry._registered, **known})
