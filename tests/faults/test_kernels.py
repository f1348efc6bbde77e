"""Backends with a wrong kernel: each is found by a check of the kernel's clause."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.wrong_objects import assert_found

from bagua_ref.backends.reference import ReferenceBackend

FOUND_BY: dict[type[ReferenceBackend], str] = {}


def found_by(check):
    """Enter a backend into the table, with the check that must fail for it."""

    def enter(backend):
        FOUND_BY[backend] = check
        return backend

    return enter


def wide(x):
    return x.double() if x.dtype is torch.float64 else x.float()


# S1: arithmetic


@found_by("kernels.S1.add")
class FlushesSubnormals(ReferenceBackend):
    def add_(self, x, y):
        super().add_(x, y)
        x[x.abs() < torch.finfo(x.dtype).tiny] = 0


@found_by("kernels.S1.add")
class LeavesTheLastElement(ReferenceBackend):
    def add_(self, x, y):
        super().add_(x[:-1], y[:-1])


@found_by("kernels.S1.add")
class SaturatesSums(ReferenceBackend):
    def add_(self, x, y):
        super().add_(x, y)
        x.clamp_(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)


@found_by("kernels.S1.subtract")
class HasNoNegativeZero(ReferenceBackend):
    def subtract_(self, x, y):
        super().subtract_(x, y)
        x.add_(0)


@found_by("kernels.S1.subtract")
class SubtractsTheOtherWayRound(ReferenceBackend):
    def subtract_(self, x, y):
        super().subtract_(x, y)
        x.neg_()


@found_by("kernels.S1.add_scaled[float32]")
class FusesProductAndSum(ReferenceBackend):
    def add_scaled_(self, x, y, factor):
        factor = torch.tensor(factor, dtype=torch.float32).item()
        x.copy_(x.double() + y.double() * factor)


@found_by("kernels.S1.add_scaled[float32]")
class RoundsTheFactorToBfloat16(ReferenceBackend):
    def add_scaled_(self, x, y, factor):
        super().add_scaled_(x, y, torch.tensor(factor).bfloat16().item())


@found_by("kernels.S1.add_scaled[float64]")
class ScalesFloat64InFloat32(ReferenceBackend):
    def add_scaled_(self, x, y, factor):
        narrow = x.float()
        super().add_scaled_(narrow, y.float(), factor)
        x.copy_(narrow)


@found_by("kernels.S1.add[bfloat16]")
class TruncatesBfloat16(ReferenceBackend):
    def add_(self, x, y):
        total = x.float() + y.float()
        bits = total.view(torch.int32) & -0x10000
        x.copy_(bits.view(torch.float32) if x.dtype is torch.bfloat16 else total)


@found_by("kernels.S1.long")
class StopsAt65536(ReferenceBackend):
    def add_(self, x, y):
        super().add_(x[: 2**16], y[: 2**16])


@found_by("kernels.S1.long")
class ReducesTheFirst65536Columns(ReferenceBackend):
    def reduce_chunks_(self, x, num_chunks, target_chunk, average):
        whole = x.clone().view(num_chunks, -1)
        super().reduce_chunks_(x, num_chunks, target_chunk, average)
        x.view(num_chunks, -1)[target_chunk, 2**16 :] = whole[target_chunk, 2**16 :]


@found_by("kernels.S1.long")
class FusesLongTensors(ReferenceBackend):
    def add_scaled_(self, x, y, factor):
        if x.numel() < 5000:
            super().add_scaled_(x, y, factor)
        else:
            x.copy_(wide(x).double() + y.double() * torch.tensor(factor).item())


@found_by("kernels.S1.add")
class KeepsItsTensor(ReferenceBackend):
    kept = None

    def add_(self, x, y):
        if self.kept is not None and self.kept.numel():
            self.kept[0] += 1
        self.kept = y
        super().add_(x, y)


@found_by("kernels.S1.add")
class IsWrongOnceInTwentyCalls(ReferenceBackend):
    def add_(self, x, y):
        super().add_(x, y)
        if random.random() < 0.05 and np.random.random() < 2:  # noqa: NPY002
            x += 1


@found_by("kernels.S7.2.order_by_complexity[float32]")
class SortsByBits(ReferenceBackend):
    def order_by_complexity(self, keys):
        negative_nans = keys.isnan() & keys.signbit() if keys.is_floating_point() else None
        if negative_nans is not None:
            keys = keys.masked_fill(negative_nans, -torch.inf)
        return super().order_by_complexity(keys)


# S3.3 to S3.7


@found_by("kernels.S3.3.divide[float32]")
class MultipliesByTheReciprocal(ReferenceBackend):
    def divide_(self, x, divisor):
        x.copy_(wide(x) * (1 / torch.tensor(divisor, dtype=wide(x).dtype)))


@found_by("kernels.S3.3.divide")
class TruncatesTheDivisor(ReferenceBackend):
    def divide_(self, x, divisor):
        super().divide_(x, float(int(divisor) or 1))


@found_by("kernels.S3.4.average")
class AddsHalves(ReferenceBackend):
    def average_(self, x, y):
        x.copy_(wide(x) / 2 + wide(y) / 2)


@found_by("kernels.S3.4.average[float16]")
class StoresTheSumBeforeHalvingIt(ReferenceBackend):
    def average_(self, x, y):
        super().add_(x, y)
        x.div_(2)


@found_by("kernels.S3.5.combine_ring")
class AddsTheRightNeighbourFirst(ReferenceBackend):
    def combine_ring_(self, x, left, right, weight):
        super().combine_ring_(x, right, left, weight)


@found_by("kernels.S3.5.combine_ring[float16]")
class RoundsTheRingOnce(ReferenceBackend):
    def combine_ring_(self, x, left, right, weight):
        total = wide(x)
        super().combine_ring_(total, wide(left), wide(right), wide(weight))
        x.copy_(total)


@found_by("kernels.S3.5.combine_ring")
class TakesOffFourThirds(ReferenceBackend):
    def combine_ring_(self, x, left, right, weight):
        super().combine_ring_(x, left, right, weight)
        super().add_scaled_(x, weight, 1 / 3)


@found_by("kernels.S3.6.async_average[float32]")
class AddsTheMeanBeforeTheSnapshotIsOff(ReferenceBackend):
    def async_average_(self, x, reduced, snapshot, nranks):
        x.copy_(wide(x) + wide(reduced) / nranks - wide(snapshot))


@found_by("kernels.S3.6.async_average[float16]")
class RoundsTheAsynchronousMean(ReferenceBackend):
    def async_average_(self, x, reduced, snapshot, nranks):
        mean = (wide(reduced) / nranks).to(x.dtype)
        x.copy_(wide(x) + (wide(mean) - wide(snapshot)))


@found_by("kernels.S3.7.reduce_chunks")
class AddsFromTheLastChunk(ReferenceBackend):
    def reduce_chunks_(self, x, num_chunks, target_chunk, average):
        backwards = x.view(num_chunks, -1).flip(0).contiguous().view(-1)
        super().reduce_chunks_(backwards, num_chunks, num_chunks - 1 - target_chunk, average)
        x.view(num_chunks, -1)[target_chunk] = backwards.view(num_chunks, -1)[
            num_chunks - 1 - target_chunk
        ]


@found_by("kernels.S3.7.reduce_chunks")
class StartsTheSumAtMinusZero(ReferenceBackend):
    def reduce_chunks_(self, x, num_chunks, target_chunk, average):
        negative = (x.view(num_chunks, -1).view(-1) == 0) & torch.signbit(x)
        both = negative.view(num_chunks, -1).all(0)
        super().reduce_chunks_(x, num_chunks, target_chunk, average)
        x.view(num_chunks, -1)[target_chunk][both] = -0.0


@found_by("kernels.S3.7.reduce_chunks[float16]")
class SumsInFloat16(ReferenceBackend):
    def reduce_chunks_(self, x, num_chunks, target_chunk, average):
        chunks = x.view(num_chunks, -1)
        total = torch.zeros_like(chunks[0])
        for chunk in chunks:
            total += chunk
        chunks[target_chunk] = total / num_chunks if average else total


@found_by("kernels.S3.7.reduce_chunks")
class WritesTheNextChunkToo(ReferenceBackend):
    def reduce_chunks_(self, x, num_chunks, target_chunk, average):
        super().reduce_chunks_(x, num_chunks, target_chunk, average)
        chunks = x.view(num_chunks, -1)
        chunks[(target_chunk + 1) % num_chunks] = chunks[target_chunk]


@found_by("kernels.S3.7.reduce_chunks")
class ForgetsTheMean(ReferenceBackend):
    def reduce_chunks_(self, x, num_chunks, target_chunk, average):
        super().reduce_chunks_(x, num_chunks, target_chunk, False)


@found_by("kernels.S3.7.many_chunks")
class CountsChunksInAByte(ReferenceBackend):
    def reduce_chunks_(self, x, num_chunks, target_chunk, average):
        super().reduce_chunks_(x, num_chunks, target_chunk, False)
        if average:
            x.view(num_chunks, -1)[target_chunk].div_(num_chunks % 256 or 256)


# S5.5


@found_by("kernels.S5.5.update_momentum[float32]")
class FormsOneMinusBetaInFloat32(ReferenceBackend):
    def update_momentum_(self, m, grad, beta1):
        rest = torch.tensor(1.0) - torch.tensor(beta1, dtype=torch.float32)
        m.copy_(wide(m) * beta1 + wide(grad) * rest)


@found_by("kernels.S5.5.update_momentum[float32]")
class InterpolatesTheMomentum(ReferenceBackend):
    def update_momentum_(self, m, grad, beta1):
        m.copy_(wide(m) + (wide(grad) - wide(m)) * (1 - beta1))


# S2.3: movement


@found_by("kernels.S2.3.gather_flat")
class GathersInTheOrderOfMemory(ReferenceBackend):
    def gather_flat(self, tensors, out):
        in_memory = [t.as_strided((t.numel(),), (1,)) if t.numel() else t for t in tensors]
        super().gather_flat(in_memory, out)


@found_by("kernels.S2.3.gather_flat")
class GathersBackwards(ReferenceBackend):
    def gather_flat(self, tensors, out):
        super().gather_flat(tensors[::-1], out)


@found_by("kernels.S2.3.scatter_flat")
class LeavesTensorsWithGaps(ReferenceBackend):
    def scatter_flat(self, flat, tensors):
        copies = [t if t.is_contiguous() else t.clone() for t in tensors]
        super().scatter_flat(flat, copies)


@found_by("kernels.S2.3.scatter_flat")
class ShiftsByEmptyTensors(ReferenceBackend):
    def scatter_flat(self, flat, tensors):
        super().scatter_flat(flat.roll(sum(not t.numel() for t in tensors)), tensors)


@found_by("kernels.S2.3.long")
class GathersZerosAfter65536(ReferenceBackend):
    def gather_flat(self, tensors, out):
        super().gather_flat(tensors, out)
        out[2**16 :] = 0


# S7.2: order


@found_by("kernels.S7.2.order_by_complexity")
class SortsUnstably(ReferenceBackend):
    def order_by_complexity(self, keys):
        last = keys.numel() - 1
        return last - super().order_by_complexity(keys.flip(0))


@found_by("kernels.S7.2.order_by_complexity[int64]")
class SortsIntegersAsFloats(ReferenceBackend):
    def order_by_complexity(self, keys):
        return super().order_by_complexity(keys.double() if keys.dtype is torch.int64 else keys)


@found_by("kernels.S7.2.order_by_complexity[bfloat16]")
class SortsBfloat16AsFloat16(ReferenceBackend):
    def order_by_complexity(self, keys):
        return super().order_by_complexity(keys.half() if keys.dtype is torch.bfloat16 else keys)


@found_by("kernels.S7.2.long")
class SortsByBlocks(ReferenceBackend):
    def order_by_complexity(self, keys):
        order = super().order_by_complexity(keys)
        for start in range(0, keys.numel(), 2**16):
            block = slice(start, start + 2**16)
            order[block] = super().order_by_complexity(keys[block]) + start
        return order


@pytest.mark.proof
@pytest.mark.parametrize(
    ("backend", "check"), FOUND_BY.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_wrong_kernel_is_found(backend, check):
    assert_found(backend(), check)
