"""Backends with a wrong kernel: each is found by a check of the kernel's clause."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.wrong_objects import Faults, assert_found

from bagua_ref.backends.reference import ReferenceBackend

FAULTS = Faults()


def kernel(method, check):
    """Return a decorator of a wrong kernel, which gets the right one and the arguments."""
    return FAULTS.of(ReferenceBackend, method, lambda made: made())(f"kernels.{check}")


def wide(x):
    return x.double() if x.dtype is torch.float64 else x.float()


# S1: arithmetic


@kernel("add_", "S1.add")
def flushes_subnormals(right, x, y):
    right(x, y)
    x[x.abs() < torch.finfo(x.dtype).tiny] = 0


@kernel("add_", "S1.add")
def leaves_the_last_element(right, x, y):
    right(x[:-1], y[:-1])


@kernel("add_", "S1.add")
def saturates_sums(right, x, y):
    right(x, y)
    x.clamp_(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)


@kernel("subtract_", "S1.subtract")
def has_no_negative_zero(right, x, y):
    right(x, y)
    x.add_(0)


@kernel("add_scaled_", "S1.add_scaled[float32]")
def fuses_product_and_sum(right, x, y, factor):
    x.copy_(x.double() + y.double() * torch.tensor(factor, dtype=torch.float32).item())


@kernel("add_scaled_", "S1.add_scaled[float32]")
def rounds_the_factor_to_bfloat16(right, x, y, factor):
    right(x, y, torch.tensor(factor).bfloat16().item())


@kernel("add_scaled_", "S1.add_scaled[float64]")
def scales_float64_in_float32(right, x, y, factor):
    narrow = x.float()
    right(narrow, y.float(), factor)
    x.copy_(narrow)


@kernel("add_", "S1.add[bfloat16]")
def truncates_bfloat16(right, x, y):
    total = x.float() + y.float()
    bits = total.view(torch.int32) & -0x10000
    x.copy_(bits.view(torch.float32) if x.dtype is torch.bfloat16 else total)


@kernel("add_", "S1.long")
def stops_at_65536(right, x, y):
    right(x[: 2**16], y[: 2**16])


@kernel("add_scaled_", "S1.long")
def fuses_long_tensors(right, x, y, factor):
    if x.numel() < 5000:
        right(x, y, factor)
    else:
        x.copy_(wide(x).double() + y.double() * torch.tensor(factor).item())


kept = []


@kernel("add_", "S1.add")
def writes_to_its_last_tensor(right, x, y):
    for last in kept[-1:]:
        last[:1] += 1
    kept.append(y)
    right(x, y)


@kernel("add_", "S1.add")
def is_wrong_once_in_twenty_calls(right, x, y):
    right(x, y)
    if random.random() < 0.05 and np.random.random() < 2:  # noqa: NPY002
        x += 1


# S3.3 to S3.7


@kernel("divide_", "S3.3.divide[float32]")
def multiplies_by_the_reciprocal(right, x, divisor):
    x.copy_(wide(x) * (1 / torch.tensor(divisor, dtype=wide(x).dtype)))


@kernel("average_", "S3.4.average")
def adds_halves(right, x, y):
    x.copy_(wide(x) / 2 + wide(y) / 2)


@kernel("average_", "S3.4.average[float16]")
def stores_the_sum_before_halving_it(right, x, y):
    x.add_(y).div_(2)


@kernel("combine_ring_", "S3.5.combine_ring")
def adds_the_right_neighbour_first(right, x, left, right_one, weight):
    right(x, right_one, left, weight)


@kernel("combine_ring_", "S3.5.combine_ring[float16]")
def rounds_the_ring_once(right, x, *others):
    total = wide(x)
    right(total, *map(wide, others))
    x.copy_(total)


@kernel("async_average_", "S3.6.async_average[float32]")
def adds_the_mean_before_the_snapshot_is_off(right, x, reduced, snapshot, nranks):
    x.copy_(wide(x) + wide(reduced) / nranks - wide(snapshot))


@kernel("async_average_", "S3.6.async_average[float16]")
def rounds_the_asynchronous_mean(right, x, reduced, snapshot, nranks):
    mean = (wide(reduced) / nranks).to(x.dtype)
    x.copy_(wide(x) + (wide(mean) - wide(snapshot)))


@kernel("reduce_chunks_", "S3.7.reduce_chunks")
def adds_from_the_last_chunk(right, x, num_chunks, target_chunk, average):
    backwards = x.view(num_chunks, -1).flip(0).contiguous()
    right(backwards.view(-1), num_chunks, num_chunks - 1 - target_chunk, average)
    x.copy_(backwards.flip(0).view(-1))


@kernel("reduce_chunks_", "S3.7.reduce_chunks")
def starts_the_sum_at_minus_zero(right, x, num_chunks, target_chunk, average):
    both = ((x == 0) & torch.signbit(x)).view(num_chunks, -1).all(0)
    right(x, num_chunks, target_chunk, average)
    x.view(num_chunks, -1)[target_chunk][both] = -0.0


@kernel("reduce_chunks_", "S3.7.reduce_chunks[float16]")
def sums_in_float16(right, x, num_chunks, target_chunk, average):
    chunks = x.view(num_chunks, -1)
    total = torch.zeros_like(chunks[0])
    for chunk in chunks:
        total += chunk
    chunks[target_chunk] = total / num_chunks if average else total


@kernel("reduce_chunks_", "S3.7.reduce_chunks")
def writes_the_next_chunk_too(right, x, num_chunks, target_chunk, average):
    right(x, num_chunks, target_chunk, average)
    chunks = x.view(num_chunks, -1)
    chunks[(target_chunk + 1) % num_chunks] = chunks[target_chunk]


@kernel("reduce_chunks_", "S3.7.many_chunks")
def counts_chunks_in_a_byte(right, x, num_chunks, target_chunk, average):
    right(x, num_chunks, target_chunk, False)
    if average:
        x.view(num_chunks, -1)[target_chunk].div_(num_chunks % 256 or 256)


# S5.5


@kernel("update_momentum_", "S5.5.update_momentum[float32]")
def forms_one_minus_beta_in_float32(right, m, grad, beta1):
    rest = torch.tensor(1.0) - torch.tensor(beta1, dtype=torch.float32)
    m.copy_(wide(m) * beta1 + wide(grad) * rest)


@kernel("update_momentum_", "S5.5.update_momentum[float32]")
def interpolates_the_momentum(right, m, grad, beta1):
    m.copy_(wide(m) + (wide(grad) - wide(m)) * (1 - beta1))


# S2.3: movement


@kernel("gather_flat", "S2.3.gather_flat")
def gathers_in_the_order_of_memory(right, tensors, out):
    right([t.as_strided((t.numel(),), (1,)) if t.numel() else t for t in tensors], out)


@kernel("scatter_flat", "S2.3.scatter_flat")
def leaves_tensors_with_gaps(right, flat, tensors):
    right(flat, [t if t.is_contiguous() else t.clone() for t in tensors])


@kernel("scatter_flat", "S2.3.scatter_flat")
def shifts_by_empty_tensors(right, flat, tensors):
    right(flat.roll(sum(not t.numel() for t in tensors)), tensors)


@kernel("scatter_flat", "S2.3.scatter_flat")
def writes_between_elements(right, flat, tensors):
    for t in tensors:
        t.as_strided((t.numel(),), (1,)).zero_()
    right(flat, tensors)


@kernel("gather_flat", "S2.3.gather_flat")
def forgets_imaginary_parts(right, tensors, out):
    right(tensors, out)
    if out.is_complex():
        out.imag.zero_()


@kernel("gather_flat", "S2.3.gather_flat")
def gathers_integers_as_float64(right, tensors, out):
    right(tensors, out)
    if not out.is_complex():
        out.copy_(out.double())


@kernel("gather_flat", "S2.3.long")
def gathers_zeros_after_65536(right, tensors, out):
    right(tensors, out)
    out[2**16 :] = 0


# S7.2: order


@kernel("order_by_complexity", "S7.2.order_by_complexity")
def sorts_unstably(right, keys):
    return keys.numel() - 1 - right(keys.flip(0))


@kernel("order_by_complexity", "S7.2.order_by_complexity[int64]")
def sorts_integers_as_floats(right, keys):
    return right(keys.double() if keys.dtype is torch.int64 else keys)


@kernel("order_by_complexity", "S7.2.order_by_complexity[int64]")
def negates_keys_that_differ(right, keys):
    if keys.unique().numel() < keys.numel():
        return right(keys)
    return (-keys).sort(descending=True, stable=True).indices


@kernel("order_by_complexity", "S7.2.order_by_complexity[bfloat16]")
def sorts_bfloat16_as_float16(right, keys):
    return right(keys.half() if keys.dtype is torch.bfloat16 else keys)


@kernel("order_by_complexity", "S7.2.order_by_complexity[float32]")
def sorts_negative_nans_first(right, keys):
    return right(keys.masked_fill(keys.isnan() & keys.signbit(), -torch.inf))


@kernel("order_by_complexity", "S7.2.long")
def sorts_by_blocks(right, keys):
    blocks = keys.split(2**16)
    return torch.cat([right(block) + 2**16 * place for place, block in enumerate(blocks)])


@pytest.mark.proof
@pytest.mark.parametrize(("make", "check"), FAULTS)
def test_a_wrong_kernel_is_found(make, check):
    assert_found(make(), check)
