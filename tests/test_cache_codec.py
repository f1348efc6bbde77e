"""Example-based tests of the encoding of cached values (S8.5)."""

from __future__ import annotations

import os
import pickle
import time

import numpy as np
import pytest
import torch
from tests.cache_values import Pair, Sample, same

from bagua_ref.contrib.cache import codec
from bagua_ref.contrib.cache.codec import DamagedValueError, TooLargeError, decode, encode


def round_trip(value, allow_pickle=False):
    return decode(encode(value, allow_pickle), allow_pickle)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        torch.tensor(3),
        torch.empty(0, 3),
        torch.arange(8, dtype=torch.int16)[1::5][:1],
        torch.arange(8, dtype=torch.bfloat16)[4:4:2],
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(2, requires_grad=True) * 2,
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array("2026-11-21", "M8[D]"),
        np.float64(1.5),
        np.array(7),
        np.str_("a\0"),
        np.str_("\0"),
        np.bytes_(b"a\0\0"),
        np.array(["a\0", "b"]),
        {"a": [1, (2.5, None)], 3: {"nested": (True, b"x", "y")}},
        10**40,
        -(2**63),
        2**63,
        float("nan"),
        "\ud800",
        [],
        (),
        {},
    ],
    ids=repr,
)
def test_what_goes_in_comes_out(value):
    assert same(round_trip(value), value)


def test_the_format_is_what_it_was():
    """Pin the encoded bytes; they may change only together with the version byte."""
    data = encode(b"cached", allow_pickle=False)
    assert data[:4] == b"\1\0\0\0"
    assert int.from_bytes(data[4:8], "little") == len(data) == 27
    assert data[16:] == b"b\6\0\0\0cached"
    assert encode((None, True, 1), allow_pickle=False)[16:] == b"(\3\0\0\0NTi\1" + bytes(7)
    assert encode(torch.tensor([1, 2], dtype=torch.uint8), allow_pickle=False)[16:] == b"t\0\5\1uint8\2" + bytes(7) + b"\1\2"
    assert encode(np.zeros((1, 1), "<i2"), allow_pickle=False)[16:] == b"a\0\3\2<i2" + 2 * (b"\1" + bytes(7)) + b"\0\0"


def test_the_other_byte_order_and_other_versions_are_refused():
    data = encode(1, allow_pickle=False)
    for version in {0, 2, 129, 128} - {codec.VERSION}:
        with pytest.raises(DamagedValueError, match="version 1"):
            decode(bytes([version]) + data[1:], allow_pickle=True)


def test_S8_3_a_change_of_any_bit_is_damage():
    data = encode({"a": torch.ones(2)}, allow_pickle=False)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedValueError):
            decode(bytes(changed), allow_pickle=True)


def test_an_array_in_a_file_comes_back_as_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "numbers", dtype="<f4", mode="w+", shape=(3,))
    assert same(round_trip(mapped[1:]), np.zeros(2, "<f4"))


@pytest.mark.parametrize("value", [np.zeros(2, [("x", "f4"), ("y", "i8")]), np.zeros((), "i4,f4")[()]], ids=["array", "scalar"])
@pytest.mark.parametrize("allow_pickle", [True, False])
def test_structured_arrays_are_refused_with_advice(value, allow_pickle):
    with pytest.raises(TypeError, match="dict of its fields"):
        encode([value], allow_pickle)


class _Text(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Sample(1), Pair(1, 2), {1, 2}, np.array([None, 1]), torch.nn.Parameter(torch.ones(2)), torch.Size([2]), _Text("a"),
        torch.eye(2).to_sparse(), range(3), torch.float32,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_more_than_it_seems_needs_pickle_and_keeps_its_type(value):
    with pytest.raises(TypeError, match=r"without pickle.*allow_pickle=True"):
        encode(value, allow_pickle=False)
    assert type(round_trip(value, allow_pickle=True)) is type(value)


class _Decibels(np.float32):
    pass


def test_a_scalar_of_a_class_of_its_own_needs_pickle_as_it_would_come_back_as_another():
    with pytest.raises(TypeError, match="_Decibels cannot be cached without pickle"):
        encode(_Decibels(3), allow_pickle=False)


def test_a_tensor_with_attributes_keeps_them_or_needs_permission():
    tensor = torch.ones(2)
    tensor.speaker = 3
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        encode(tensor, allow_pickle=False)
    assert round_trip(tensor, allow_pickle=True).speaker == 3


def test_a_list_inside_itself_needs_pickle():
    loop: list = [1]
    loop.append(loop)
    with pytest.raises(TypeError, match="allow_pickle"):
        encode(loop, allow_pickle=False)
    again = round_trip(loop, allow_pickle=True)
    assert again[1] is again


def test_nesting_deeper_than_python_reads_is_damage():
    deep = b"[\1\0\0\0" * 100_000 + b"N"
    frame = codec._FRAME.pack(codec.VERSION, len(deep) + 16, codec.xxhash.xxh3_64_intdigest(deep))
    with pytest.raises(DamagedValueError, match="RecursionError"):
        decode(frame + deep, allow_pickle=False)


@pytest.mark.parametrize(
    "key",
    [
        lambda number: number * (2**61 - 1),
        lambda number: (None, number * (2**61 - 1)),
        lambda number: complex(-1000003 * number, number),
    ],
    ids=["int", "tuple", "complex"],
)
def test_S8_3_keys_that_all_have_one_hash_are_damage(key):
    """A dict of 100,000 such keys, of about 1 MB, would take more than half a minute."""
    parts: list = [b"{" + (100_000).to_bytes(4, "little")]
    for number in range(100_000):
        codec._write(key(number), parts, allow_pickle=False)
        parts.append(b"N")
    entry = b"".join(parts)
    frame = codec._FRAME.pack(codec.VERSION, len(entry) + 16, codec.xxhash.xxh3_64_intdigest(entry))
    started = time.process_time()
    with pytest.raises(DamagedValueError, match="more than 100 of its keys have the hash"):
        decode(frame + entry, allow_pickle=False)
    assert time.process_time() - started < 10


def test_S8_5_many_numbers_are_keys():
    value = {key: None for number in range(20_000) for key in (number, -number, number / 7, (number, 1.0), number << 40)}
    assert round_trip(value) == value


@pytest.mark.parametrize("tag", [b"a", b"g"])
@pytest.mark.parametrize("name", [b"O", b"(2,)O", b"O,i4"])
def test_pointers_are_never_read_from_a_value(tag, name):
    entry = tag + bytes((0, len(name), 1)) + name + (1).to_bytes(8, "little") + b"\1" * np.dtype(name.decode()).itemsize
    frame = codec._FRAME.pack(codec.VERSION, len(entry) + 16, codec.xxhash.xxh3_64_intdigest(entry))
    with pytest.raises(DamagedValueError, match=r"ValueError: .*(OBJECT|object)"):
        decode(frame + entry, allow_pickle=False)


def test_more_than_redis_takes_is_refused_before_it_is_sent(monkeypatch):
    monkeypatch.setattr(codec, "_LARGEST", 100)
    assert round_trip(bytes(79)) == bytes(79)
    for value in (bytes(80), bytes(200), [bytes(40), bytes(40)], torch.zeros(100)):
        with pytest.raises(TooLargeError, match="at most 100"):
            encode(value, allow_pickle=True)


class Bomb:
    def __reduce__(self):
        return os.putenv, ("BAGUA_REF_TEST_BOMB", "1")


def test_a_pickle_without_permission_never_runs(monkeypatch):
    ran = []
    monkeypatch.setattr(pickle, "loads", lambda data: ran.append(data))
    data = encode([Bomb()], allow_pickle=True)
    with pytest.raises(DamagedValueError):
        decode(data, allow_pickle=False)
    assert ran == []
    decode(data, allow_pickle=True)
    assert len(ran) == 1


def test_what_pickle_refuses_is_named_with_what_to_return_instead():
    with pytest.raises(TypeError, match=r"builtins\.function cannot be cached, as pickle raised .*; return tensors"):
        encode([lambda: 1], allow_pickle=True)


class Vanished:
    pass


def test_a_pickle_that_cannot_be_read_is_damage(monkeypatch):
    data = encode(Vanished(), allow_pickle=True)
    monkeypatch.delattr(f"{__name__}.Vanished")
    with pytest.raises(DamagedValueError, match="AttributeError"):
        decode(data, allow_pickle=True)
