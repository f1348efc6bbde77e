"""Tests of collectives as plain functions, small enough to check by eye (S3.9)."""

from __future__ import annotations

import pytest
import torch

from bagua_ref.communicators import collectives
from bagua_ref.types import ReduceOp


def ranks(*rows, dtype=torch.float32):
    return [torch.tensor(row, dtype=dtype) for row in rows]


def lists(tensors):
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [10, 9]),
        (ReduceOp.PRODUCT, [30, 12]),
        (ReduceOp.MIN, [2, 1]),
        (ReduceOp.MAX, [5, 6]),
        (ReduceOp.BAND, [0, 0]),
        (ReduceOp.BOR, [7, 7]),
        (ReduceOp.BXOR, [4, 5]),
    ],
)
def test_every_op_on_integers(op, expected):
    assert collectives.combine(ranks([2, 6], [3, 1], [5, 2], dtype=torch.int64), op).tolist() == expected


def test_the_average_is_the_sum_divided():
    assert collectives.combine(ranks([1, 4], [2, 4]), ReduceOp.AVG).tolist() == [1.5, 4]


def test_the_inputs_stay_as_they_are():
    tensors = ranks([1.0], [2.0])
    collectives.combine(tensors, ReduceOp.SUM)
    collectives.combine(tensors[:1], ReduceOp.SUM).zero_()
    assert lists(tensors) == [[1.0], [2.0]]


def test_sums_go_in_rank_order():
    """In float32, 2^24 + 1 rounds to 2^24: summed from the left the ones are lost one by one, from the right they are not."""
    assert collectives.combine(ranks([2.0**24], [1], [1]), ReduceOp.SUM).item() == 2**24
    assert collectives.combine(ranks([1], [1], [2.0**24]), ReduceOp.SUM).item() == 2**24 + 2


@pytest.mark.parametrize(("dtype", "first_lost"), [(torch.float16, 2048), (torch.bfloat16, 256)])
def test_16_bit_floats_are_summed_in_float32_and_rounded_once(dtype, first_lost):
    """Rounding after each addition of 1 would never get past ``first_lost``."""
    assert collectives.combine(ranks([first_lost], *[[1]] * 4, dtype=dtype), ReduceOp.SUM).item() == first_lost + 4


def test_a_16_bit_sum_beyond_its_range_may_still_have_an_average():
    assert collectives.combine(ranks([60000], [60000], dtype=torch.float16), ReduceOp.AVG).item() == 60000


def test_integers_wrap_around():
    assert collectives.combine(ranks([200], [100], dtype=torch.uint8), ReduceOp.SUM).item() == 44


def test_movement():
    received = ranks([0, 0], [0, 0])
    collectives.allgather(ranks([1], [2]), received)
    assert lists(received) == [[1, 2], [1, 2]]
    collectives.alltoall(ranks([1, 2], [3, 4]), received)
    assert lists(received) == [[1, 3], [2, 4]]
    collectives.broadcast(received, 1)
    assert lists(received) == [[2, 4], [2, 4]]
    collectives.allgather(ranks([7], [8]), received[:1])
    assert lists(received) == [[7, 8], [2, 4]]
    collectives.scatter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), received)
    assert lists(received) == [[1, 2], [3, 4]]
    collectives.reduce_inplace(received, 1, ReduceOp.SUM)
    assert lists(received) == [[1, 2], [4, 6]]
    collectives.allreduce_inplace(received, ReduceOp.MAX)
    assert lists(received) == [[4, 6], [4, 6]]
    chunks = ranks([0], [0])
    collectives.reduce_scatter(received, chunks, ReduceOp.SUM)
    assert lists(chunks) == [[8], [12]]


def test_a_receiver_keeps_its_shape():
    received = torch.zeros(2, 2)
    collectives.alltoall([torch.arange(4.0)], [received])
    assert received.tolist() == [[0, 1], [2, 3]]


def test_empty_tensors():
    empty = [torch.empty(0), torch.empty(0)]
    collectives.allreduce_inplace(empty, ReduceOp.AVG)
    collectives.alltoall(empty, empty)
    collectives.allgather(empty, empty)
    collectives.scatter(empty[0], empty)
    assert all(tensor.numel() == 0 for tensor in empty)
