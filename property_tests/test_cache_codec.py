"""Properties of the format of cached values (S8.5) and of damaged values (S8.3)."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.same import assert_same

from bagua_ref.contrib.cache import codec
from bagua_ref.contrib.cache.codec import DamagedValueError, decode, encode

DTYPES = sorted(
    {
        d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")
    },
    key=str,
)
ARRAY_DTYPES = [
    "?",
    "i1",
    "<i4",
    ">i8",
    "u1",
    "<u8",
    "<f2",
    "<f4",
    ">f8",
    "<c8",
    "<c16",
    "S3",
    "<U2",
    "<M8[ns]",
    "<m8[s]",
    "V5",
    "longdouble",
]

SCALAR_DTYPES = [
    *(np.dtype(code) for code in np.typecodes["All"] if code not in "OSUVpPqQnN"),
    "<M8",
    ">M8[25s]",
    "V1",
    "V16",
]
"""Without types that only some platforms tell apart, such as ``np.longlong``, which comes back as
``np.int64``.
"""

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    """Tensors of every dtype with arbitrary bits: dense, transposed, sliced, expanded or
    conjugated.
    """
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    count = int(np.prod(shape))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)[::2]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype in (torch.float32, torch.bfloat16) and draw(st.booleans()):
        tensor.requires_grad_()
    return tensor


@st.composite
def arrays(draw):
    dtype, shape = np.dtype(draw(st.sampled_from(ARRAY_DTYPES))), draw(shapes)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype.kind == "?":
        raw = bytes(byte & 1 for byte in raw)
    if dtype.kind == "U":
        raw = bytes(len(raw))
    array = np.frombuffer(raw, dtype).reshape(shape) if count else np.empty(shape, dtype)
    if array.ndim and draw(st.booleans()):
        array = array.T[::-1]
    return array


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**64), 2**64),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(categories=["Cs"]), max_size=2),
    st.binary(),
    st.binary().map(bytearray),
    st.floats(width=32).map(np.float32),
    st.integers(-128, 127).map(np.int8),
    st.booleans().map(np.bool_),
    st.text().map(np.str_),
    st.text("a\0\ud800", max_size=3).map(np.str_),
    st.binary(max_size=3).map(np.bytes_),
)


@st.composite
def numpy_scalars(draw):
    """NumPy scalars of every kind with arbitrary bits, taken from an array or constructed."""
    dtype = np.dtype(draw(st.sampled_from([*SCALAR_DTYPES, *ARRAY_DTYPES])))
    raw = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    if dtype.kind in "?b":
        raw = bytes(byte & 1 for byte in raw)
    if dtype.kind == "U":
        raw = bytes(len(raw))
    if dtype in (np.longdouble, np.clongdouble):
        return dtype.type(draw(st.floats()))
    return np.frombuffer(raw, dtype)[0] if raw else dtype.type()


@given(
    value=numpy_scalars()
    | st.text("a\0\ud800", max_size=3).map(np.str_)
    | st.binary(max_size=3).map(np.bytes_)
)
def test_S8_5_every_numpy_scalar_comes_back_as_it_was(value):
    again = decode(encode(value, allow_pickle=False), allow_pickle=False)
    assert type(again) is type(value)
    assert again.dtype == value.dtype
    if value.dtype in (np.longdouble, np.clongdouble):  # they have padding bytes
        np.testing.assert_array_equal(again, value)
        assert np.signbit(again.real) == np.signbit(value.real)
    else:
        assert again.tobytes() == value.tobytes()


hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(),
    st.binary(),
    st.tuples(st.integers(), st.text()),
)
values = st.recursive(
    st.one_of(scalars, tensors(), arrays()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
    ),
    max_leaves=8,
)


def leaves(value):
    """Yield every tensor and array in ``value``."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    for item in (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, tuple | list)
        else ()
    ):
        yield from leaves(item)


@given(value=values)
def test_S8_5_plain_values_come_back_bit_for_bit_without_pickle(value):
    assert_same(decode(encode(value, allow_pickle=False), allow_pickle=False), value)


@given(value=values)
def test_S8_5_results_are_writable_and_share_no_memory(value):
    data = encode(value, allow_pickle=False)
    first, second = decode(data, allow_pickle=False), decode(data, allow_pickle=False)
    for leaf in leaves(first):
        if isinstance(leaf, torch.Tensor):
            leaf.untyped_storage().fill_(0)  # torch cannot fill tensors of every dtype
        else:
            assert leaf.flags.writeable or leaf.size == 0
            leaf.view("u1" if leaf.itemsize == 1 else leaf.dtype)[...] = np.zeros((), leaf.dtype)
    assert_same(second, value)
    assert_same(decode(data, allow_pickle=False), value)


@given(value=values, data=st.data())
def test_S8_3_a_truncated_or_changed_value_is_never_taken_for_a_value(value, data):
    whole = encode(value, allow_pickle=False)
    cut = data.draw(st.integers(0, len(whole) - 1), label="cut")
    at, change = (
        data.draw(st.integers(0, len(whole) - 1), label="at"),
        data.draw(st.integers(1, 255), label="change"),
    )
    changed = bytearray(whole)
    changed[at] ^= change
    for damaged in (whole[:cut], whole + b"\0", bytes(changed)):
        with pytest.raises(DamagedValueError):
            decode(damaged, allow_pickle=True)


@given(value=values, key=st.binary(max_size=9), other=st.binary(max_size=9))
def test_S8_3_a_value_is_only_that_of_its_key(value, key, other):
    data = encode(value, False, key)
    assert_same(decode(data, False, key), value)
    if other != key:
        with pytest.raises(DamagedValueError, match="belongs to the key"):
            decode(data, False, other)


ran: list[str] = []


class Bomb:
    def __reduce__(self):
        return ran.append, ("bomb",)


BOMB = encode(Bomb(), allow_pickle=True)[codec._FRAME.size :]


@given(body=st.binary(min_size=1, max_size=60), value=values, data=st.data())
def test_S8_5_what_someone_forges_raises_nothing_but_damage_and_runs_no_pickle(body, value, data):
    whole = bytearray(encode(value, allow_pickle=False)[codec._FRAME.size :])
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    nested = b"[\2\0\0\0" + bytes(whole) + BOMB
    for forged in (body, bytes(whole), BOMB, nested):
        checksum = codec.xxhash.xxh3_64_intdigest(forged)
        frame = codec._FRAME.pack(codec.VERSION, len(forged) + codec._FRAME.size, 0, checksum)
        with contextlib.suppress(DamagedValueError):
            decode(frame + forged, allow_pickle=False)
    assert ran == []
