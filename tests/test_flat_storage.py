"""Tensors on their way into flat storage, divided or not (S2.3, S2.4)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bagua_ref.backends import get_backend
from bagua_ref.flat_storage import FlatStorage


def test_S2_3_a_tensor_that_is_its_own_effective_one_is_divided_once() -> None:
    tensor = torch.ones(4).ensure_bagua_tensor("t")
    storage = FlatStorage("0", [tensor], [tensor], flatten=True, alignment=1)
    for _ in range(2):
        tensor.data = torch.full((4,), 6.0)
        storage.take_in(0, 3)
        storage.settle()
        assert storage.load(get_backend("reference"), 3).tolist() == [2] * 4
        assert tensor.tolist() == [2] * 4


Change = Callable[[torch.nn.Parameter, FlatStorage, int], None]


def parameter_in_storage(flatten: bool) -> tuple[torch.nn.Parameter, FlatStorage]:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    parameter.bagua_ensure_grad().ensure_bagua_tensor(
        "p", getter_closure=lambda p: p.grad, setter_closure=lambda p, grad: setattr(p, "grad", grad)
    )
    return parameter, FlatStorage("0", [parameter], [parameter.grad], flatten, alignment=4)


def mark(parameter: torch.nn.Parameter, storage: FlatStorage, divisor: int) -> None:
    storage.take_in(0, divisor)


def fresh(parameter: torch.nn.Parameter, storage: FlatStorage, divisor: int) -> None:
    parameter.grad = torch.full((2, 3), 5.0)


def add(parameter: torch.nn.Parameter, storage: FlatStorage, divisor: int) -> None:
    parameter.grad.add_(7)


def remove(parameter: torch.nn.Parameter, storage: FlatStorage, divisor: int) -> None:
    parameter.grad = None


def transpose(parameter: torch.nn.Parameter, storage: FlatStorage, divisor: int) -> None:
    parameter.grad = parameter.grad.t().contiguous().t()


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("divisor", [1, 3, 4])
@pytest.mark.parametrize(
    "changes",
    [
        (),
        (mark,),
        (add, mark),
        (fresh, mark),
        (fresh, mark, mark),
        (fresh, mark, add, mark),
        (fresh, mark, add),
        (fresh, mark, fresh, add, mark),
        (fresh, mark, fresh, add),
        (fresh, mark, remove),
        (remove,),
        (remove, mark),
        (fresh, transpose, mark),
        (fresh, transpose, mark, add),
    ],
    ids=lambda changes: "-".join(change.__name__ for change in changes),
)
def test_S2_4_each_value_is_loaded_as_it_is_now_and_divided_once(changes: tuple[Change, ...], divisor: int, flatten: bool) -> None:
    parameter, storage = parameter_in_storage(flatten)
    for round_ in range(2):  # the second one begins with the gradient inside
        for change in changes:
            change(parameter, storage, divisor)
        expected = torch.zeros(6) if parameter.grad is None else parameter.grad.reshape(-1) / divisor
        if mark in changes:
            storage.settle()
        flat = storage.load(get_backend("reference"), divisor)
        assert torch.equal(flat, torch.cat([expected, torch.zeros(2)])), round_
        if flatten:
            assert parameter.grad.data_ptr() == flat.data_ptr()
            assert torch.equal(parameter.grad.reshape(-1), expected)
