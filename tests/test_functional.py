"""Tests of all_reduce as a differentiable function: closed forms, in the simulated world and over
gloo.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.launch import launch
from tests.trainings import on_every_rank, simulate

import bagua_ref
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.data_parallel.functional import ReduceOp, all_reduce, torch_reduce_op_to_bagua
from bagua_ref.errors import NotInitializedError
from bagua_ref.simulation import SimulatedWorld


def x_of(rank: int) -> torch.Tensor:
    return torch.tensor([[1.0, -2.0], [0.5, float(rank)]], dtype=torch.float64)


OPS: dict[str, Any] = {
    "SUM": lambda stacked: stacked.sum(dim=0),
    "AVG": lambda stacked: stacked.mean(dim=0),
    "MIN": lambda stacked: stacked.amin(dim=0),
    "MAX": lambda stacked: stacked.amax(dim=0),
    "PRODUCT": lambda stacked: stacked.prod(dim=0),
}


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", OPS)
def test_the_result_is_the_reduction_and_the_input_stays(name: str, ranks: int) -> None:
    def rank(r: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = x_of(bagua_ref.get_rank())
        return all_reduce(x, op=getattr(dist.ReduceOp, name)), x

    expected = OPS[name](torch.stack([x_of(r) for r in range(ranks)]))
    for r, (y, x) in enumerate(simulate(ranks, rank)):
        assert_equal(y, expected, EXACT)
        assert_equal(x, x_of(r), EXACT)


def loss_and_gradients(name: str) -> tuple[float, torch.Tensor, torch.Tensor]:
    """With L_r = c_r |y|^2 and y the sum or mean of a_r x_r, return the loss, its gradient by x_r,
    and that gradient's by c_r.
    """
    r = bagua_ref.get_rank()
    x = x_of(r).requires_grad_()
    c = torch.tensor(1.0 + r, dtype=torch.float64, requires_grad=True)
    y = all_reduce((2.0 + r) * x, op=getattr(dist.ReduceOp, name))
    loss = c * y.square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    # Twice differentiable: |gradient|^2 depends on every rank's c, as the gradient does.
    (second,) = torch.autograd.grad(gradient.square().sum(), c)
    return loss.item(), gradient.detach(), second


def check_gradients(name: str, results: list[Any]) -> None:
    n = len(results)
    share = 1.0 if name == "SUM" else 1 / n
    y = share * sum((2.0 + r) * x_of(r) for r in range(n))
    all_c = sum(1.0 + r for r in range(n))
    # dL/dx_r = a_r share sum_s 2 c_s y, and d(sum over ranks of |dL/dx_r|^2)/dc_s = sum_r 2 (a_r
    # share)^2 4 all_c |y|^2.
    second = sum(8 * ((2.0 + r) * share) ** 2 * all_c for r in range(n)) * y.square().sum()
    for r, (loss, gradient, by_c) in enumerate(results):
        assert math.isclose(loss, (1.0 + r) * y.square().sum().item(), rel_tol=1e-12)
        torch.testing.assert_close(gradient, (2.0 + r) * share * 2 * all_c * y, rtol=1e-12, atol=0)
        torch.testing.assert_close(by_c, second, rtol=1e-12, atol=0)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("name", ["SUM", "AVG"])
def test_gradients_have_their_closed_form_also_the_second(name: str, ranks: int) -> None:
    check_gradients(name, simulate(ranks, lambda r: loss_and_gradients(name)))


def on_gloo() -> Any:
    sums, means = loss_and_gradients("SUM"), loss_and_gradients("AVG")
    in_torchs_group = all_reduce(torch.ones(3), group=dist.group.WORLD)
    pair = dist.new_group([0, 1])
    alone = all_reduce(x_of(bagua_ref.get_rank()), group=pair) if bagua_ref.get_rank() < 2 else None
    return sums, means, in_torchs_group, alone


@pytest.mark.slow
def test_over_gloo_it_is_the_same_in_torchs_groups_too() -> None:
    sums, means, in_torchs_group, alone = zip(*launch(on_gloo, 3), strict=True)
    check_gradients("SUM", list(sums))
    check_gradients("AVG", list(means))
    assert all(t.tolist() == [3.0] * 3 for t in in_torchs_group)
    for result in alone[:2]:
        assert_equal(result, x_of(0) + x_of(1), EXACT)


@on_every_rank(2)
def test_any_layout_and_dtype(r: int) -> None:
    x = torch.arange(6.0).view(2, 3).t().requires_grad_()
    y = all_reduce(x)
    (y * torch.arange(6.0).view(3, 2)).sum().backward()
    assert all_reduce(torch.tensor([3]), op=dist.ReduceOp.BAND).tolist() == [3]
    y, grad = y.detach(), x.grad
    assert torch.equal(y, 2 * torch.arange(6.0).view(2, 3).t())
    assert torch.equal(grad, 2 * torch.arange(6.0).view(3, 2))


def test_every_operator_of_baguas_has_its_number() -> None:
    for op in ReduceOp:
        assert torch_reduce_op_to_bagua(getattr(dist.ReduceOp, op.name)) is op
        assert torch_reduce_op_to_bagua(dist.ReduceOp(getattr(dist.ReduceOp, op.name))) is op
        assert torch_reduce_op_to_bagua(op) is op


@pytest.mark.parametrize("op", [dist.ReduceOp.PREMUL_SUM, 1, "sum", None])
def test_an_operator_that_bagua_has_not_is_named(op: Any) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"must be one of torch\.distributed\.ReduceOp's SUM, PRODUCT, MIN, MAX, BOR, BAND,"
            r" BXOR, AVG"
        ),
    ):
        all_reduce(torch.ones(1), op=op)


@pytest.mark.parametrize("name", ["MIN", "MAX", "PRODUCT"])
@on_every_rank(2)
def test_an_operator_without_gradient_is_refused_where_one_is_needed(r: int, name: str) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"op={name} has no gradient"):
        all_reduce(x, op=getattr(dist.ReduceOp, name))
    with torch.no_grad():
        assert all_reduce(x, op=getattr(dist.ReduceOp, name)).tolist() == [1, 1]


@on_every_rank(1)
def test_wrong_arguments_are_named(r: int) -> None:
    with pytest.raises(TypeError, match="tensor=3 must be"):
        all_reduce(3)
    with pytest.raises(TypeError, match="process_group=3 must be"):
        all_reduce(torch.ones(1), group=3)
    with pytest.raises(TypeError, match="AVG needs a floating-point"):
        all_reduce(torch.ones(1, dtype=torch.int64), op=dist.ReduceOp.AVG)


def test_before_init_process_group_it_is_an_error() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(NotInitializedError, match="init_process_group"):
            all_reduce(torch.ones(1))

    SimulatedWorld(1).run(rank)


@on_every_rank(3)
def test_a_rank_outside_the_group_gets_its_own_back(r: int) -> None:
    group = bagua_ref.new_group([0, 1])
    assert all_reduce(torch.tensor([1.0 + bagua_ref.get_rank()]), group=group).tolist() == [3.0]
