"""Tests of the emulated CUDA sources beyond the suites: many blocks, alignments, thread orders,
huge indices.

Results must equal the reference's to the bit; suites test the reference.
"""

from __future__ import annotations

import pytest
import torch
from tests.cuda_emulation import build
from tests.cuda_emulation.backend import EmulatedBackend
from tests.cuda_emulation.copies import CudaOnCopies
from tests.cuda_emulation.inputs import FAR, numbers, placed, run_ends, sparse
from torch import Tensor

from bagua_ref.backends import get_backend, get_codec
from bagua_ref.backends.cuda import launch as plans
from bagua_ref.backends.cuda import movement
from bagua_ref.backends.cuda.launch import BLOCK, DeviceProperties
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.conformance import EXACT, assert_equal

pytestmark = build.proofs

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
reference, emulated = get_backend("reference"), EmulatedBackend()
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


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
@pytest.mark.parametrize("size", [9, 4099, 300_001])
def test_element_wise_kernels_at_every_alignment(dtype, size):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    lanes = 128 // torch.finfo(dtype).bits
    for skips in [
        (0, 0, 0, 0),
        (1, 1, 1, 1),
        (1, 0, 2, 3),
        (lanes - 1, lanes // 2, 0, 1),
        (0, 1, lanes - 1, 2),
    ]:
        x, y, z, w = (placed(numbers(size, dtype, seed), skip) for seed, skip in enumerate(skips))
        reduced = placed(numbers(size, wide, 9), skips[3])
        for actual, expected in zip(
            element_wise(emulated, x, y, z, w, reduced),
            element_wise(reference, x, y, z, w, reduced),
            strict=True,
        ):
            assert_equal(actual, expected, EXACT)
        if size > 5000:
            break


@every_float
@pytest.mark.parametrize(("num_chunks", "size"), [(3, 4096), (4, 8191), (513, 3), (7, 10_001)])
def test_chunks_are_added_in_order_at_every_alignment(dtype, num_chunks, size):
    for skip, target, average in [
        (0, 0, True),
        (1, num_chunks - 1, False),
        (3, num_chunks // 2, True),
    ]:
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
        x, total, y = (numbers(num_chunks * size, torch.float32, seed) for seed in (0, 0, 1))
        for backend, changed in ((kernels, x), (reference, total)):
            backend.reduce_chunks_(changed, num_chunks, 1, True)
            backend.add_(changed, y)
        assert_equal(x, total, EXACT)


def pieces(dtype: torch.dtype) -> list[Tensor]:
    base = torch.arange(40_000, dtype=torch.float64).to(dtype)
    few = base[:5040]
    two_each = few[:512].view(*(2,) * 9)
    return [
        base[1:9],
        base[3:3],
        base[7:17_000],
        base[5],
        base[100:200:3],
        few.view(70, 72).t(),
        few.view(2, 3, 4, 5, 6, 7).permute(5, 3, 1, 0, 2, 4),
        few.view(1, 7, 720)[:, 1:5, ::2],
        base[:6].view(2, 3).expand(4, 2, 3),
        two_each.permute(*range(8, -1, -1)),
    ]


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128],
    ids=str,
)
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_gather_and_scatter_move_any_shape_and_any_dtype(dtype, skip):
    tensors = pieces(dtype)
    expected = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = placed(torch.zeros_like(expected), skip)
    emulated.gather_flat(tensors, flat)
    assert torch.equal(flat, expected)
    # zeros_like keeps the order of axes where it can
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    emulated.scatter_flat(flat, targets)
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(target, tensor)


def test_more_tensors_than_fit_into_a_launch():
    tensors = [
        torch.full((number % 5,), float(number)) for number in range(3 * movement.SEGMENTS + 5)
    ]
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors))
    emulated.gather_flat(tensors, flat)
    assert torch.equal(flat, torch.cat(tensors))
    assert (
        len(
            movement.copy(
                DeviceProperties(2),
                flat,
                list(zip(tensors, [0] * len(tensors), strict=True)),
                gather=True,
            ).launches
        )
        == 3
    )


@pytest.mark.parametrize("flatten", [True, False])
def test_S2_3_dense_tensors_move_in_the_order_of_memory_and_without_a_launch_of_their_own(flatten):
    tensors = [
        torch.arange(120.0).view(2, 3, 4, 5).permute(order) + 0
        for order in ((0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 0, 1))
    ]
    bucket = BaguaBucket(
        [x.ensure_bagua_tensor(f"{x.shape}") for x in tensors], "0", flatten, backend=emulated
    )
    bucket._ops = [lambda flat: seen.append(flat.clone())]
    seen = []
    bucket.execute()
    assert torch.equal(seen[0], torch.arange(120.0).repeat(3))
    in_order = [layout.in_order(x) for layout, x in zip(bucket.layouts, tensors, strict=True)]
    assert (
        len(
            movement.copy(
                DeviceProperties(2),
                seen[0],
                list(zip(in_order, (0, 120, 240), strict=True)),
                gather=True,
            ).launches
        )
        == 1
    )


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
    with pytest.raises(
        ValueError, match=r"begins at address 0x[0-9a-f]+; it must be a multiple of 4"
    ):
        emulated.add_(odd, torch.zeros(4))


# Sizes beyond 2**31: reserved memory that is mostly never touched; only the last blocks of a grid
# are run.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_indices_beyond_2_to_the_31(dtype):
    x, y = sparse(FAR, dtype), sparse(FAR, dtype)
    per_block = 16 // x.element_size() * BLOCK
    x[-9:], y[-9:] = 3, 4
    (launch,) = plans.element_wise(DeviceProperties(2), x, y, name="add").launches
    run_ends(launch, -(-FAR // per_block))
    assert x[-10:].tolist() == [0.0] + [7.0] * 9


def test_chunks_and_copies_beyond_2_to_the_31():
    x = sparse(3 * 2**30, torch.float16)
    x[2**30 - 1], x[2**31 - 1], x[-1] = 1, 2, 4
    (launch,) = plans.reduce_chunks(DeviceProperties(2), x, 3, 2, average=False).launches
    run_ends(launch, 2**30 // (8 * BLOCK))
    assert x[-2:].tolist() == [0.0, 7.0]
    flat = sparse(2 * x.numel(), torch.uint8)
    (launch,) = movement.copy(
        DeviceProperties(2), flat, [(x.view(torch.uint8), 0)], gather=True
    ).launches
    run_ends(launch, 2 * x.numel() // movement.PIECE)
    assert flat[-2:].view(torch.float16).item() == 7.0
    # Every other pair, at element offsets beyond 2**31.
    apart = x.view(-1, 4)[:, :2]
    (launch,) = movement.copy(
        DeviceProperties(2), flat.view(torch.float16), [(apart, 0)], gather=True
    ).launches
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
        element_wise(kernels, x, y, z, w, reduced),
        element_wise(reference, x, y, z, w, reduced),
        strict=True,
    ):
        assert_equal(actual, expected, EXACT)
    kernels.reduce_chunks_(x, 3, 1, average=True)
    assert_equal(kernels.order_by_complexity(x), reference.order_by_complexity(x), EXACT)
    if dtype is not torch.float64:
        payload = get_codec("MinMaxUInt8", kernels).compress(x, 3, target_chunk=1)
        assert torch.equal(
            payload, get_codec("MinMaxUInt8", reference).compress(x, 3, target_chunk=1)
        )
        get_codec("MinMaxUInt8", kernels).decompress(payload, 3, y)
        get_codec("MinMaxUInt8", reference).decompress(payload, 3, z)
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

    known = {
        "cuda-emulated": registry._Registration("tests.cuda_emulation.backend:EmulatedBackend", "")
    }
    monkeypatch.setattr(registry, "_registered", {**registry._registered, **known})
