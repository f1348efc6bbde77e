"""Tests of buckets: flat storage, padding and bad input (S2.2, S2.3, S2.6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.trainings import on_every_rank

from bagua_ref.buckets.bucket import BaguaBucket
from bagua_ref.errors import NotInitializedError
from bagua_ref.simulation import SimulatedWorld


def named(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.ensure_bagua_tensor(f"t{place}") for place, tensor in enumerate(tensors)]


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    made = []
    for place, shape in enumerate(shapes):
        parameter = torch.nn.Parameter(torch.randn(shape))
        parameter.grad = torch.randn(shape)
        parameter.ensure_bagua_tensor(
            f"p{place}", "", lambda p: p.grad, lambda p, t: setattr(p, "grad", t)
        )
        made.append(parameter)
    return made


def test_S2_3_flatten_keeps_values_shapes_and_identity() -> None:
    tensors = named(torch.randn(2, 3), torch.randn(()), torch.empty(0), torch.randn(4))
    before = [t.clone() for t in tensors]
    bucket = BaguaBucket(tensors, "0", flatten=True)
    assert bucket.check_flatten()
    for tensor, value, kept in zip(tensors, before, bucket.tensors, strict=True):
        assert kept is tensor
        assert torch.equal(tensor, value)
    assert torch.equal(bucket.flattened_tensor(), torch.cat([t.reshape(-1) for t in before]))


def test_S2_3_what_is_contiguous_does_not_move() -> None:
    flat = torch.arange(5.0)
    tensors = named(flat[:2], flat[2:2], flat[2:])
    BaguaBucket(tensors, "0", flatten=True)
    assert [t.data_ptr() for t in tensors if t.numel()] == [flat.data_ptr(), flat[2:].data_ptr()]


def test_S2_3_separate_storages_move_also_when_their_addresses_would_fit() -> None:
    tensors = named(torch.randn(2), torch.randn(2))
    assert not BaguaBucket(tensors, "0", flatten=False).check_flatten()
    assert BaguaBucket(tensors, "0", flatten=True).check_flatten()


def test_S2_2_padding_fills_up_to_the_alignment_and_does_not_count() -> None:
    bucket = BaguaBucket(named(torch.ones(3), torch.ones(2)), "x", flatten=True, alignment=4)
    assert bucket.padding_tensor.numel() == 3
    assert bucket.padding_tensor.bagua_backend_tensor().name == "bagua_padding_tensor_bucket_x"
    assert bucket.bytes() == 20
    assert bucket.flattened_tensor().tolist() == [1] * 5 + [0] * 3
    assert bucket.check_flatten()
    assert BaguaBucket(named(torch.ones(4)), "y", flatten=True, alignment=4).padding_tensor is None


@pytest.mark.parametrize("flatten", [True, False])
def test_S2_2_padding_is_cleared_before_every_execution(flatten: bool) -> None:
    bucket = BaguaBucket(named(torch.ones(3)), "x", flatten=flatten, alignment=2)
    seen = []

    def spoil(x: torch.Tensor) -> None:
        seen.append(x[-1].item())
        x[-1] = float("nan")

    bucket._ops = [spoil, spoil]
    bucket.execute()
    bucket.execute()
    assert seen == [0] * 4


@pytest.mark.parametrize("flatten", [True, False])
def test_S3_8_what_a_python_op_writes_stays(flatten: bool) -> None:
    made = named(torch.ones(2), torch.ones(3))
    bucket = BaguaBucket(made, "b", flatten=flatten, alignment=4)
    bucket.append_python_op(lambda name: made[1].mul_(5))
    bucket.append_python_op(lambda name: made[0].add_(made[1][0]))
    bucket.execute()
    assert [t.tolist() for t in made] == [[6, 6], [5, 5, 5]]


def test_S3_8_a_python_op_may_put_other_tensors_in_place() -> None:
    made = parameters((2,), (3,))
    bucket = BaguaBucket(made, "b", flatten=True)
    names = []

    def replace(name: str) -> None:
        names.append(name)
        made[0].grad = torch.full((2,), 3.0)
        made[1].grad = None

    assert bucket.append_python_op(replace) is bucket
    bucket.execute()
    assert names == ["b"]
    assert bucket.flattened_tensor().tolist() == [3, 3, 0, 0, 0]
    assert bucket.check_flatten()
    assert bucket.clear_ops() is bucket
    bucket.execute()
    assert names == ["b"]


@on_every_rank(3)
def test_a_shadow_is_zeros_and_changes_nothing(r: int) -> None:
    (tensor,) = made = named(torch.full((2,), 1.0 + r))
    bucket = BaguaBucket(made, "b", flatten=True)
    called: list[str] = []
    bucket.append_python_op(called.append)
    bucket.append_centralized_synchronous_op(average=False)
    (bucket.shadow if r == 0 else bucket.execute)()
    assert [tensor.tolist(), called] == [[[1, 1], []], [[5, 5], ["b"]], [[5, 5], ["b"]]][r]


def bad_buckets() -> list[Any]:
    flat = torch.zeros(4)
    return [
        ([], ValueError, "at least one tensor"),
        ([torch.ones(2)], ValueError, "ensure_bagua_tensor"),
        (["no tensor"], TypeError, "not str"),
        (
            named(torch.ones(2), torch.ones(2, dtype=torch.float64)),
            TypeError,
            "different dtypes.*float32.*float64",
        ),
        (named(flat[:3], flat[2:]), ValueError, "'t0' and 't1'.*overlap"),
        (named(torch.ones(1)) + named(torch.ones(1)), ValueError, "each name may appear only once"),
        (
            [torch.nn.Parameter(torch.ones(1)).ensure_bagua_tensor("p", "", lambda p: p.grad)],
            ValueError,
            "'p'.*bagua_ensure_grad",
        ),
        (named(torch.ones(1), torch.ones(1, device="meta")), ValueError, "different devices"),
    ]


@pytest.mark.parametrize(("tensors", "error", "message"), bad_buckets())
def test_S2_6_bad_tensors_are_refused(tensors: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BaguaBucket(tensors, "0", flatten=True)


def test_a_name_or_backend_that_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="name=0 of a bucket must be a string"):
        BaguaBucket(named(torch.ones(2)), 0, flatten=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend='abacus' is not a known kernel backend"):
        BaguaBucket(named(torch.ones(2)), "0", flatten=True, backend="abacus")


@pytest.mark.parametrize("alignment", [0, -1, 1.5, True])
def test_bad_alignment_is_refused(alignment: Any) -> None:
    with pytest.raises(ValueError, match="alignment="):
        BaguaBucket(named(torch.ones(2)), "0", flatten=True, alignment=alignment)


BAD_OPERATIONS = [
    (
        {"compression": "MinMaxUInt8"},
        torch.float32,
        ValueError,
        "compression='MinMaxUInt8' needs scattergather=True",
    ),
    (
        {"compression": "zip", "scattergather": True},
        torch.float32,
        ValueError,
        "compression='zip' is not a known codec; it must be one of 'MXFP4'",
    ),
    ({"scattergather": True}, torch.float32, ValueError, "5 elements.*2 equal chunks.*alignment=2"),
    (
        {"compression": "MinMaxUInt8", "scattergather": True},
        torch.float64,
        TypeError,
        "not bucket '0''s torch.float64",
    ),
    ({"average": True}, torch.int64, TypeError, "torch.int64"),
    ({"group": "everyone"}, torch.float32, TypeError, "group='everyone'"),
]


@pytest.mark.parametrize(("arguments", "dtype", "error", "message"), BAD_OPERATIONS)
@on_every_rank(2)
def test_bad_operations_are_refused_alike_on_every_rank_and_the_bucket_stays_usable(
    r: int, arguments: dict[str, Any], dtype: torch.dtype, error: type[Exception], message: str
) -> None:
    tensor = torch.ones(5, dtype=dtype).ensure_bagua_tensor("t")
    bucket = BaguaBucket([tensor], "0", flatten=True)
    with pytest.raises(error, match=message):
        bucket.append_centralized_synchronous_op(**arguments)
    bucket.append_centralized_synchronous_op(average=False)
    bucket.execute()
    assert (tensor == 2).all()


def test_an_operation_needs_a_process_group() -> None:
    bucket = BaguaBucket(named(torch.ones(2)), "0", flatten=True)

    def rank(comm: Any) -> None:
        with pytest.raises(NotInitializedError, match="init_process_group"):
            bucket.append_centralized_synchronous_op()

    SimulatedWorld(1).run(rank)


def test_a_python_op_must_be_callable() -> None:
    with pytest.raises(TypeError, match="python_function=3"):
        BaguaBucket(named(torch.ones(2)), "0", flatten=True).append_python_op(3)


def test_the_repr_tells_what_is_inside() -> None:
    text = repr(BaguaBucket(named(torch.ones(3)), "7", flatten=True))
    assert "'7'" in text
    assert "1 tensors" in text
    assert "float32" in text


def test_a_gradient_that_is_gone_cannot_come_back_without_a_setter_closure() -> None:
    parameter = torch.nn.Parameter(torch.ones(2)).bagua_ensure_grad()
    bucket = BaguaBucket(
        [parameter.ensure_bagua_tensor("w", getter_closure=lambda p: p.grad)], "b", flatten=True
    )
    bucket.append_python_op(lambda _: None)
    parameter.grad = None
    with pytest.raises(ValueError, match="'w' has no effective tensor, and no setter_closure"):
        bucket.execute()
