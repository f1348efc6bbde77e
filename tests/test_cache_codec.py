"""Example-based tests of the encoding of cached values (S8.5)."""

from __future__ import annotations

import signal
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.cache_jobs import Sample
from tests.same import assert_same

from bagua_ref.contrib.cache import codec
from bagua_ref.contrib.cache.codec import DamagedValueError, TooLargeError, decode, encode


class Pair(NamedTuple):
    left: Any
    right: Any


def round_trip(value, allow_pickle=False):
    return decode(encode(value, allow_pickle), allow_pickle)


def test_the_other_byte_order_and_other_versions_are_refused():
    data = encode(1, allow_pickle=False)
    for version in {0, 2, 129, 128} - {codec.VERSION}:
        with pytest.raises(DamagedValueError, match="of version"):
            decode(bytes([version]) + data[1:], allow_pickle=True)


def test_an_array_in_a_file_comes_back_as_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "numbers", dtype="<f4", mode="w+", shape=(3,))
    assert_same(round_trip(mapped[1:]), np.zeros(2, "<f4"))


@pytest.mark.parametrize(
    "value",
    [np.zeros(2, [("x", "f4"), ("y", "i8")]), np.zeros((), "i4,f4")[()]],
    ids=["array", "scalar"],
)
@pytest.mark.parametrize("allow_pickle", [True, False])
def test_structured_arrays_are_refused_with_advice(value, allow_pickle):
    with pytest.raises(TypeError, match="dict of its fields"):
        encode([value], allow_pickle)


class _Text(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Sample(1),
        Pair(1, 2),
        {1, 2},
        {frozenset([1]): 2},
        np.array([None, 1]),
        torch.nn.Parameter(torch.ones(2)),
        torch.Size([2]),
        _Text("a"),
        torch.eye(2).to_sparse(),
        range(3),
        torch.float32,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_more_than_it_seems_needs_pickle_and_keeps_its_type(value):
    with pytest.raises(TypeError, match=r"without pickle.*allow_pickle=True"):
        encode(value, allow_pickle=False)
    assert type(round_trip(value, allow_pickle=True)) is type(value)


class _Decibels(np.float32):
    pass


def test_a_scalar_of_a_class_of_its_own_needs_pickle_as_it_would_come_back_as_another():
    with pytest.raises(TypeError, match="_Decibels cannot be cached without pickle"):
        encode(_Decibels(3), allow_pickle=False)


@dataclass
class Row:
    pixels: Any

    __hash__ = object.__hash__


class Image(torch.Tensor):
    pass


def with_attribute(tensor):
    tensor.speaker = 3
    return tensor


OBJECTS = {
    "dataclass": Row,
    "Parameter": lambda row: torch.nn.Parameter(row),
    "tensor with an attribute": with_attribute,
    "subclass with an attribute": lambda row: with_attribute(row.as_subclass(Image)),
    "OrderedDict": lambda row: OrderedDict(pixels=row),
    "set": lambda row: {row},
    "namedtuple": lambda row: Pair(row, 1),
    "module": lambda row: torch.nn.ParameterList([row]),
    "nested": lambda row: [{"a": Row(OrderedDict(b={Row((torch.nn.Parameter(row), 1))}))}],
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize(
    ("view", "dtype"),
    [
        (lambda data: data[7], torch.float32),
        (lambda data: data.T[7], torch.bfloat16),
        (lambda data: data[5:5], torch.float32),
        (lambda data: data[1:2].expand(3, -1), torch.bfloat16),
    ],
    ids=["row", "column", "empty", "expanded"],
)
def test_views_in_objects_are_stored_without_the_rest(make, view, dtype):
    data = torch.arange(40_000).reshape(200, 200).to(dtype)
    value = make(view(data))
    encoded = encode(value, allow_pickle=True)
    assert len(encoded) < view(data).numel() * dtype.itemsize + 2500 < data.numel() * dtype.itemsize
    again = decode(encoded, allow_pickle=True)
    assert type(again) is type(value)
    (found,), (wanted,) = tensors_in(again), tensors_in(value)
    assert_same(*(one.as_subclass(torch.Tensor).detach() for one in (found, wanted)))
    assert (type(found), found.requires_grad, found.__dict__) == (
        type(wanted),
        wanted.requires_grad,
        wanted.__dict__,
    )


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, Row):
        return tensors_in(value.pixels)
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, Iterable) else ()
    )
    return [tensor for one in inner for tensor in tensors_in(one)]


def test_a_tensor_that_is_twice_in_an_object_is_stored_once_and_comes_back_as_one():
    row = torch.arange(10_000.0)
    encoded = encode(Row([row, row]), allow_pickle=True)
    assert len(encoded) < 50_000
    first, second = decode(encoded, allow_pickle=True).pixels
    assert first is second
    first[0] = 7  # and is writable


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.ones(2, device="meta"),
        torch.nn.Parameter(torch.ones(2)),
        with_attribute(torch.ones(2)),
        np.array([1, None]),
        {1, 2},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_says_what_to_return_instead(value):
    for nested in (value, [value], {"a": (1, value)}):
        with pytest.raises(TypeError, match=r"allow_pickle=True .*, or return plain dense tensors"):
            encode(nested, allow_pickle=False)


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_quantised_tensors_are_pickled_without_the_rest_of_their_storage():
    value = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match="return plain dense tensors"):
        encode(value, allow_pickle=False)
    rows = torch.quantize_per_tensor(torch.ones(100, 100), 0.1, 0, torch.quint8)
    encoded = encode(Row(rows[3]), allow_pickle=True)
    assert len(encoded) < 2000
    assert torch.equal(decode(encoded, allow_pickle=True).pixels.dequantize(), rows[3].dequantize())


def test_a_list_inside_itself_needs_pickle():
    loop: list = [1]
    loop.append(loop)
    with pytest.raises(TypeError, match="allow_pickle"):
        encode(loop, allow_pickle=False)
    again = round_trip(loop, allow_pickle=True)
    assert again[1] is again


def test_more_than_redis_takes_is_refused_before_it_is_sent(monkeypatch):
    monkeypatch.setattr(codec, "_LARGEST", 100)
    assert round_trip(bytes(78)) == bytes(78)
    for value in (bytes(79), bytes(200), [bytes(40), bytes(40)], torch.zeros(100)):
        with pytest.raises(TooLargeError, match="at most 100"):
            encode(value, allow_pickle=True)


def test_what_pickle_refuses_is_named_with_what_to_return_instead():
    with pytest.raises(
        TypeError, match=r"builtins\.function cannot be cached, as pickle raised .*; return plain"
    ):
        encode([lambda: 1], allow_pickle=True)


class Vanished:
    pass


def test_a_pickle_that_cannot_be_read_is_damage(monkeypatch):
    data = encode(Vanished(), allow_pickle=True)
    monkeypatch.delattr(f"{__name__}.Vanished")
    with pytest.raises(DamagedValueError, match="AttributeError"):
        decode(data, allow_pickle=True)


class Rings:
    """An object that receives a signal when it is pickled, or unpickled."""

    def __init__(self, number: int, at: str) -> None:
        self.number, self.at = number, at

    def __getstate__(self):
        if self.at == "encode":
            signal.raise_signal(self.number)
        return self.__dict__

    def __setstate__(self, state):
        signal.raise_signal(state["number"])


@pytest.mark.parametrize("at", ["encode", "decode"])
@pytest.mark.parametrize(
    "error", [KeyError("now"), TimeoutError("now"), KeyboardInterrupt()], ids=repr
)
def test_what_a_signal_handler_raises_is_no_damage(at, error):
    class Handler:
        def __call__(self, *_: object) -> None:
            raise error

    before = signal.signal(signal.SIGUSR1, Handler())
    try:
        with pytest.raises(type(error)) as raised:
            round_trip([Rings(signal.SIGUSR1, at)], allow_pickle=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert raised.value is error
