"""Tests of powersgd and topk: small columns, overflows, and ranks that differ (S10, S11.2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.trainings import Given, on_every_rank, train, wrapped

from bagua_ref.algorithms import Algorithm, PowerSGDAlgorithm, TopKAlgorithm
from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.comm_ops import TopK
from bagua_ref.conformance import SUM, assert_equal
from bagua_ref.errors import CommunicationError
from bagua_ref.formulas.low_rank import orthonormalize

POWERSGD = PowerSGDAlgorithm(1, warmup_steps=0, min_compression_rate=0.5)
TOPK = TopKAlgorithm(0.2)


def test_S10_3_columns_of_the_largest_numbers_are_orthonormalized() -> None:
    columns = torch.tensor([[1e300, 1e300], [1e300, -1e300]], dtype=torch.float64)
    orthonormalize([columns])
    assert_equal(columns.T @ columns, torch.eye(2, dtype=torch.float64), SUM(4), magnitude=1.0)


# Training


@on_every_rank(4)
def test_S10_4_a_first_message_that_overflows_is_nan_on_every_rank_and_leaves_no_trace(
    r: int,
) -> None:
    module: Any = Given([torch.zeros(8, 6)])
    module.with_bagua([torch.optim.SGD(module.parameters(), lr=0.0)], POWERSGD)
    for size in (3e38, 1.0):
        module.zero_grad()
        module([torch.full((8, 6), size)]).backward()
        assert module.weights[0].grad.isnan().all() == (size > 1)
    assert_equal(module.weights[0].grad, torch.ones(8, 6), SUM(10))


# Ranks that differ


@pytest.mark.parametrize(
    ("algorithm", "what"),
    [
        (POWERSGD, "steps"),
        (POWERSGD, "rounds"),
        (POWERSGD, "factors"),
        (POWERSGD, "weights"),
        (TOPK, "rounds"),
        (TOPK, "weights"),
    ],
)
@on_every_rank(2)
def test_states_that_differ_between_ranks_are_an_error_on_every_rank(
    r: int, algorithm: Algorithm, what: str
) -> None:
    module, optimizer = wrapped(algorithm)
    train(module, optimizer, r, range(2))
    state = module.bagua_algorithm.state_dict()
    if r and what == "steps":
        state["steps_of_optimizers"] = [7]
    if r and what == "rounds":
        state["rounds"] = 5
    if r and what == "factors":
        state["factors"] = {name: factor + 1 for name, factor in state["factors"].items()}
    module.bagua_algorithm.load_state_dict(state)
    if r and what == "weights":
        module.load_state_dict({name: w + 1 for name, w in module.state_dict().items()})
    with pytest.raises(CommunicationError, match="disagree"):
        train(module, optimizer, r, range(2, 3))


# Bad input


@on_every_rank(1)
def test_S11_2_float64_is_refused_by_name_when_wrapping_and_when_an_operation_is_made(
    r: int,
) -> None:
    with pytest.raises(
        TypeError,
        match=r"parameter '0\.weight' is float64; topk takes float16, bfloat16 or float32",
    ):
        wrapped(TOPK, dtype=torch.float64)
    bucket = BaguaBucket(
        [torch.ones(3, dtype=torch.float64).ensure_bagua_tensor("t")], "b", flatten=True
    )
    with pytest.raises(
        TypeError, match=r"topk takes float16, bfloat16 or float32, not torch\.float64"
    ):
        TopK(None, bucket.kernels, 3, 0.5, None, lambda: True, bucket.dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 2147483647 elements, not 2147483648"):
        TopK(None, bucket.kernels, 2**31, 0.5, None, lambda: True, torch.float32)  # type: ignore[arg-type]
