"""Every other kernel of every backend against one element at a time (S1, S3, S5.5, S7.2)."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import FLOATS, adversarial, chunked, every_backend, every_float, name_of, numbers, same_sized

from bagua_ref.backends import get_backend
from bagua_ref.conformance.expected import kernels_scalar
from bagua_ref.conformance.tolerances import EXACT, assert_equal

factors = st.one_of(st.sampled_from([1 / 3, -5 / 3, 0.1, 1e-30, 1e30]), numbers(torch.float64, finite=True))


def expected(scalar, dtype: torch.dtype, *tensors: torch.Tensor, args: tuple = ()) -> torch.Tensor:
    """Apply a scalar kernel element by element."""
    values = [scalar(name_of(dtype), *row, *args) for row in zip(*(tensor.tolist() for tensor in tensors), strict=True)]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@every_backend
@every_float
@given(data=st.data())
def test_S1_add_and_subtract_round_once(backend, dtype, data):
    x, y = data.draw(same_sized(dtype, 2))
    added, subtracted, unchanged = x.clone(), x.clone(), y.clone()
    get_backend(backend).add_(added, y)
    get_backend(backend).subtract_(subtracted, y)
    assert_equal(added, expected(kernels_scalar.add, dtype, x, y), EXACT)
    assert_equal(subtracted, expected(kernels_scalar.subtract, dtype, x, y), EXACT)
    assert_equal(y, unchanged, EXACT)


@every_backend
@every_float
@given(data=st.data(), factor=factors)
def test_S1_add_scaled_rounds_product_and_sum(backend, dtype, data, factor):
    x, y = data.draw(same_sized(dtype, 2))
    actual = x.clone()
    get_backend(backend).add_scaled_(actual, y, factor)
    assert_equal(actual, expected(kernels_scalar.add_scaled, dtype, x, y, args=(factor,)), EXACT)


@every_backend
@every_float
@given(data=st.data())
def test_S3_4_average_rounds_the_sum_and_is_the_same_on_both_sides(backend, dtype, data):
    x, y = data.draw(same_sized(dtype, 2))
    mine, theirs = x.clone(), y.clone()
    get_backend(backend).average_(mine, y)
    get_backend(backend).average_(theirs, x)
    assert_equal(mine, expected(kernels_scalar.average, dtype, x, y), EXACT)
    assert_equal(theirs, mine, EXACT)


@every_backend
@every_float
@given(data=st.data(), divisor=st.one_of(st.integers(1, 1025), factors.filter(lambda value: abs(value) > 1e-37)))
def test_S3_3_divide_is_a_true_division(backend, dtype, data, divisor):
    (x,) = data.draw(same_sized(dtype, 1))
    actual = x.clone()
    get_backend(backend).divide_(actual, divisor)
    assert_equal(actual, expected(kernels_scalar.quotient, dtype, x, args=(float(divisor),)), EXACT)


@every_backend
@every_float
@given(data=st.data())
def test_S3_5_combine_ring_stores_after_each_of_three_steps(backend, dtype, data):
    x, left, right, weight = data.draw(same_sized(dtype, 4))
    actual = x.clone()
    get_backend(backend).combine_ring_(actual, left, right, weight)
    assert_equal(actual, expected(kernels_scalar.combine_ring, dtype, x, left, right, weight), EXACT)


@every_backend
@every_float
@given(data=st.data(), nranks=st.integers(1, 1025))
def test_S3_6_async_average_adds_the_change_in_float32(backend, dtype, data, nranks):
    x, snapshot = data.draw(same_sized(dtype, 2))
    reduced = data.draw(adversarial(torch.float64 if dtype is torch.float64 else torch.float32, x.numel()))
    actual = x.clone()
    get_backend(backend).async_average_(actual, reduced, snapshot, nranks)
    assert_equal(actual, expected(kernels_scalar.async_average, dtype, x, reduced, snapshot, args=(nranks,)), EXACT)


@every_backend
@every_float
@given(data=st.data(), beta1=st.one_of(st.sampled_from([0.0, 0.9, 0.99, 1.0]), st.floats(0, 1)))
def test_S5_5_update_momentum_rounds_both_products_and_their_sum(backend, dtype, data, beta1):
    m, grad = data.draw(same_sized(dtype, 2))
    actual = m.clone()
    get_backend(backend).update_momentum_(actual, grad, beta1)
    assert_equal(actual, expected(kernels_scalar.update_momentum, dtype, m, grad, args=(beta1,)), EXACT)


@every_backend
@every_float
@given(data=st.data(), average=st.booleans())
def test_S3_7_reduce_chunks_adds_in_order_and_changes_one_chunk(backend, dtype, data, average):
    x, num_chunks = data.draw(chunked(dtype))
    target, chunks = data.draw(st.integers(0, num_chunks - 1)), x.view(num_chunks, x.numel() // num_chunks)
    wanted = chunks.clone()
    columns = [kernels_scalar.reduce_in_order(name_of(dtype), column, average) for column in chunks.T.tolist()]
    wanted[target] = torch.tensor(columns, dtype=torch.float64).to(dtype)
    actual = x.clone()
    get_backend(backend).reduce_chunks_(actual, num_chunks, target, average)
    assert_equal(actual, wanted.view(-1), EXACT)


@st.composite
def pieces(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors of one dtype, of any shape, some of them transposed or with gaps."""
    dtype, tensors = draw(st.sampled_from([*FLOATS, torch.int64, torch.uint8])), []
    for _ in range(draw(st.integers(0, 4))):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        tensor = torch.arange(math.prod(shape) * 2, dtype=torch.float64).to(dtype).view(*shape, 2)[..., draw(st.integers(0, 1))]
        order = draw(st.permutations(range(len(shape))))
        tensors.append(tensor.permute(order))
    return tensors


@every_backend
@given(tensors=pieces())
def test_S2_3_gather_is_row_major_and_scatter_brings_it_back(backend, tensors):
    dtype = tensors[0].dtype if tensors else torch.float32
    flat = torch.full((sum(tensor.numel() for tensor in tensors),), 3, dtype=dtype)
    get_backend(backend).gather_flat(tensors, flat)
    assert flat.tolist() == [value for tensor in tensors for value in tensor.reshape(-1).tolist()]
    targets = [torch.zeros(2, *tensor.shape, dtype=dtype).movedim(0, -1)[..., 0] for tensor in tensors]
    get_backend(backend).scatter_flat(flat, targets)
    for target, tensor in zip(targets, tensors, strict=True):
        assert_equal(target, tensor, EXACT)


@every_backend
@every_float
@given(data=st.data())
def test_S7_2_order_by_complexity_is_stable_and_puts_nan_last(backend, dtype, data):
    few = st.lists(numbers(dtype), max_size=5).flatmap(lambda values: st.lists(st.sampled_from(values or [0.0]), max_size=40))
    keys = torch.tensor(data.draw(few), dtype=torch.float64).to(dtype)
    order = get_backend(backend).order_by_complexity(keys)
    values = keys.tolist()
    assert order.dtype is torch.int64
    assert order.tolist() == sorted(
        range(len(values)), key=lambda i: (math.isnan(values[i]), 0 if math.isnan(values[i]) else values[i])
    )


@every_backend
@given(keys=st.lists(st.one_of(st.integers(-2, 2), st.integers(-(2**63), 2**63 - 1))))
def test_S7_2_order_by_complexity_takes_integers_as_they_are(backend, keys):
    order = get_backend(backend).order_by_complexity(torch.tensor(keys, dtype=torch.int64))
    assert order.tolist() == sorted(range(len(keys)), key=keys.__getitem__)
