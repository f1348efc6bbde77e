"""Tests of proxy and effective tensors (S1) and of the helpers for lists of tensors (S2.3)."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch

import bagua_ref  # noqa: F401 - puts the methods on torch.Tensor
from bagua_ref.base import utils


def parameter_with_grad() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    parameter.grad = torch.ones(2, 3)
    return parameter


def test_the_effective_tensor_is_the_proxy_unless_a_getter_says_otherwise() -> None:
    parameter = parameter_with_grad()
    assert parameter.ensure_bagua_tensor("w", "m").bagua_getter_closure() is parameter
    parameter.ensure_bagua_tensor("w", "m", getter_closure=lambda p: p.grad)
    assert parameter.bagua_getter_closure() is parameter.grad


def test_the_setter_puts_another_tensor_in_place() -> None:
    parameter = parameter_with_grad()
    parameter.ensure_bagua_tensor("w", "m", lambda p: p.grad, lambda p, t: setattr(p, "grad", t))
    other = torch.zeros(2, 3)
    parameter.bagua_setter_closure(other)
    assert parameter.grad is other


def test_registering_again_keeps_the_name_within_a_module() -> None:
    tensor = torch.ones(2).ensure_bagua_tensor("w", "m")
    assert tensor.ensure_bagua_tensor(module_name="m").bagua_backend_tensor().name == "w"
    with pytest.raises(ValueError, match=r"name='v'.*already registered as 'w'"):
        tensor.ensure_bagua_tensor("v", "m")
    assert tensor.ensure_bagua_tensor("v", "other module").bagua_backend_tensor().name == "v"


def test_names_are_strings() -> None:
    with pytest.raises(TypeError, match=r"^name=5 must be a string or None"):
        torch.ones(2).ensure_bagua_tensor(5)
    with pytest.raises(TypeError, match="module_name=5 must be a string or None"):
        torch.ones(2).to_bagua_tensor("w", 5)


def test_to_bagua_tensor_shares_storage_and_leaves_the_original() -> None:
    tensor = torch.zeros(3)
    other = tensor.to_bagua_tensor("w")
    other[0] = 5
    assert tensor[0] == 5
    assert other.is_bagua_tensor()
    assert not tensor.is_bagua_tensor()


def test_ensure_grad_gives_a_zero_gradient_once() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    assert parameter.bagua_ensure_grad() is parameter
    grad = parameter.grad
    assert torch.equal(grad, torch.zeros(2, 2))
    parameter.bagua_ensure_grad()
    assert parameter.grad is grad


def test_set_storage_moves_the_tensor_and_takes_the_storages_values() -> None:
    storage = torch.arange(10.0)
    tensor = torch.zeros(2, 2)
    tensor.bagua_set_storage(storage.untyped_storage(), 3)
    assert torch.equal(tensor, torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    storage[3] = -1
    assert tensor[0, 0] == -1


def test_set_storage_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"storage_offset=8.*need 48 bytes.*has 40"):
        torch.zeros(2, 2).bagua_set_storage(torch.zeros(10).untyped_storage(), 8)


def test_set_storage_takes_what_fits_exactly() -> None:
    tensor = torch.zeros(2, 2)
    tensor.bagua_set_storage(torch.arange(10.0).untyped_storage(), 6)
    assert tensor.flatten().tolist() == [6, 7, 8, 9]


def test_set_storage_of_a_proxy_moves_its_effective_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.ensure_bagua_tensor(
        "w",
        getter_closure=lambda p: p.grad,
        setter_closure=lambda p, grad: setattr(p, "grad", grad),
    )
    with pytest.raises(ValueError, match="bagua_ensure_grad"):
        parameter.bagua_set_storage(torch.zeros(2).untyped_storage())
    storage = torch.tensor([3.0, 4.0])
    parameter.bagua_ensure_grad().bagua_set_storage(storage.untyped_storage())
    assert parameter.tolist() == [1, 1]
    assert parameter.grad.data_ptr() == storage.data_ptr()


@pytest.mark.parametrize(
    "call",
    [
        "bagua_getter_closure",
        "bagua_backend_tensor",
        "bagua_mark_communication_ready",
        "bagua_mark_communication_ready_without_synchronization",
    ],
)
def test_a_plain_tensor_says_what_to_do(call: str) -> None:
    with pytest.raises(ValueError, match="ensure_bagua_tensor"):
        getattr(torch.ones(2), call)()


def test_marking_a_tensor_in_no_registered_bucket_is_an_error() -> None:
    with pytest.raises(ValueError, match="'w' is in no registered bucket"):
        torch.ones(2).ensure_bagua_tensor("w").bagua_mark_communication_ready()


def test_a_backend_tensor_is_its_effective_tensor_and_keeps_nothing_alive_in_a_cycle() -> None:
    parameter = parameter_with_grad()
    backend_tensor = parameter.ensure_bagua_tensor(
        "w", "m", lambda p: p.grad
    ).bagua_backend_tensor()
    assert (backend_tensor.name, backend_tensor.module_name) == ("w", "m")
    assert backend_tensor.data_ptr() == parameter.grad.data_ptr()
    assert backend_tensor.num_elements() == parameter.grad.numel()
    assert repr(backend_tensor) == "RegisteredTensor('w' of module 'm')"
    died = weakref.ref(parameter)
    gc.disable()
    try:
        del parameter, backend_tensor
        assert died() is None
    finally:
        gc.enable()


def test_closures_must_be_callable() -> None:
    with pytest.raises(TypeError, match="getter_closure=3"):
        torch.ones(2).ensure_bagua_tensor("w", getter_closure=3)


def test_copies_of_a_bagua_tensor_are_plain() -> None:
    tensor = torch.ones(2).ensure_bagua_tensor("w")
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(tensor), torch.load(buffer, weights_only=False)):
        assert torch.equal(other, tensor)
        assert not other.is_bagua_tensor()


def test_S2_3_contiguity_needs_one_storage_order_and_row_major() -> None:
    flat = torch.zeros(12)
    assert utils.check_contiguous([flat[:4].view(2, 2), flat[4:4], flat[4:]])
    assert not utils.check_contiguous([flat[4:], flat[:4]])
    assert not utils.check_contiguous([flat[:4], flat[5:]])
    assert not utils.check_contiguous([flat[:4].view(2, 2).t(), flat[4:]])
    assert not utils.check_contiguous([torch.zeros(4), torch.zeros(4)])


def test_flattened_calls_copy_back_and_sort_by_kind() -> None:
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(1)]
    sizes = []

    def double(flat: torch.Tensor) -> None:
        sizes.append(flat.numel())
        flat.mul_(2)

    utils.apply_flattened_call_all(tensors, double)
    assert sizes == [3, 3]
    assert all((t == 2).all() for t in tensors)
    utils.apply_flattened_call(tensors[::2], lambda flat, factor: flat.mul_(factor), (3,))
    assert (tensors[0] == 6).all()
    assert (tensors[2] == 6).all()


def test_overlap_is_found_wherever_it_lies() -> None:
    flat = torch.zeros(10)
    assert utils.overlapping([flat[:5], torch.zeros(3), flat[4:]]) == (0, 2)
    assert utils.overlapping([flat[:5], flat[5:], flat[3:3]]) is None
