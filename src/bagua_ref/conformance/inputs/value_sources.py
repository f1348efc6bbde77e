"""Cached values as Python source, drawn so that a script reproduces every bit (S8.5)."""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

__all__ = ["NO_KEYS", "TENSORS", "array_sources", "key_sources", "objects", "plain_sources", "tensor_sources", "value_sources"]

TENSORS = (
    "float32", "float16", "bfloat16", "float64", "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""Dtypes of torch."""

_NUMPY = [">f8", "<f4", ">i4", "<f2", "?", ">u2", "|u1", "<i8", "<c8", "<U2", "|S3", "<M8[s]"]
_shapes = st.one_of(st.sampled_from([(), (2, 3), (4,)]), st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple))


def _hex(draw: Any, count: int, size: int, is_bool: bool) -> str:
    """Draw any bits; for bool, 0 and 1."""
    if is_bool:
        return "".join(f"{bit:02x}" for bit in draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    edges = [b"\x00" * size, b"\xff" * size, b"\x80" + b"\x00" * (size - 1), b"\x01" + b"\xfe" * (size - 1)]
    item = st.one_of(st.sampled_from(edges), st.binary(min_size=size, max_size=size))
    return "".join(data.hex() for data in draw(st.lists(item, min_size=count, max_size=count)))


@st.composite
def tensor_sources(draw: st.DrawFn, name: str) -> str:
    """Source of tensors of a dtype."""
    shape = draw(_shapes)
    bits = _hex(draw, prod(shape), getattr(torch, name).itemsize, name == "bool")
    source = f"tensor({name!r}, {shape}, {bits!r})"
    if len(shape) > 1:
        source += draw(st.sampled_from(["", f".transpose(0, {len(shape) - 1})", "[::2]", "[:, 1:]"]))
    return source


@st.composite
def array_sources(draw: st.DrawFn) -> str:
    """Source of arrays."""
    dtype, shape = np.dtype(draw(st.sampled_from(_NUMPY))), draw(_shapes)
    bits = _hex(draw, prod(shape), dtype.itemsize, dtype.kind == "b")
    if dtype.kind == "U":  # not every code point is a character
        bits = "".join(draw(st.sampled_from(["41000000", "00000000", "e4000000"])) for _ in range(2 * prod(shape)))
    turned = draw(st.sampled_from(["", ".T", "[::-1]"])) if shape else ""
    return f"array({dtype.str!r}, {shape}, {bits!r}){turned}"


def _float(number: float) -> str:
    return repr(number) if isfinite(number) else f"float({str(number)!r})"


_plain = st.one_of(
    st.sampled_from(["None", "True", "False", "0", "1", "0.0", "-0.0", "''", "b''"]),
    st.integers(-(2**70), 2**70).map(repr),
    st.builds(
        lambda power, more, sign: repr(sign * (2**power + more)),
        st.sampled_from([31, 53, 63, 64, 99]),
        st.integers(-2, 2),
        st.sampled_from([1, -1]),
    ),
    st.floats().map(_float),
    st.sampled_from(["double('7ff8000000000001')", "double('fff0000000000001')"]),  # NaNs of other bits
    st.text(max_size=6).map(repr),
    st.binary(max_size=6).map(repr),
)
_labels = st.one_of(st.text(max_size=3), st.integers(-2, 2), st.none(), st.binary(max_size=2), st.tuples(st.integers(0, 3))).map(
    repr
)


def _containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, max_size=3)
    return st.one_of(
        several.map(lambda items: f"[{', '.join(items)}]"),
        several.map(lambda items: f"({', '.join(items)}{',' * (len(items) == 1)})"),
        st.dictionaries(_labels, inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"{key}: {item}" for key, item in items.items()) + "}"
        ),
    )


def plain_sources() -> st.SearchStrategy[str]:
    """Source of None, bool, int, float, str and bytes."""
    return _plain


def value_sources() -> st.SearchStrategy[str]:
    """Source of values that need no pickle: tensors, arrays, None, bool, numbers, str, bytes and containers of them."""
    tensors = st.sampled_from(TENSORS).flatmap(tensor_sources)
    return st.recursive(st.one_of(_plain, tensors, array_sources()), _containers, max_leaves=4)


def objects() -> st.SearchStrategy[str]:
    """Source of values that need pickle, alone or inside others."""
    lonely = st.sampled_from(["Thing(3)", "{1, 2}", "range(3)", "__import__('numpy').array([{}, None], dtype=object)", "Thing"])
    return st.one_of(
        lonely, st.tuples(lonely, st.sampled_from(["[{}]", "(1, {})", "{{'key': {}}}"])).map(lambda two: two[1].format(two[0]))
    )


NO_KEYS = (
    "object()", "{1}", "{'a': 1}", "1j", "range(3)", "slice(2)", "bytearray(b'a')", "numpy.zeros(3)", "torch.zeros(3)",
    "torch.tensor(0.5)", "numpy.datetime64('2026')",
)  # fmt: skip
"""Sources of objects that are no keys."""


def key_sources() -> st.SearchStrategy[tuple[str, Any]]:
    """Source of keys of every kind, each with the key in Python's own types, whose text names the value."""
    plain = st.one_of(
        st.integers(0, 11), st.text(max_size=5), st.booleans(), st.none(), st.binary(max_size=3), st.integers(), _finite()
    )
    single = st.one_of(
        plain.map(lambda key: (repr(key), key)),
        st.integers(-(2**63), 2**63 - 1).map(lambda key: (f"numpy.int64({key})", key)),
        _finite(width=32).map(lambda key: (f"numpy.float32({key!r})", key)),
        st.sampled_from([("pathlib.PurePosixPath('a/b')", "a/b"), ("torch.tensor(7)", 7), ("numpy.array(7)", 7)]),
    )
    return st.recursive(
        single,
        lambda inner: st.tuples(st.sampled_from([tuple, list]), st.lists(inner, max_size=3)).map(
            lambda two: (f"{two[0].__name__}([{', '.join(source for source, _ in two[1])}])", two[0](key for _, key in two[1]))
        ),
        max_leaves=4,
    )


def _finite(**options: Any) -> st.SearchStrategy[float]:
    return st.floats(allow_nan=False, allow_infinity=False, **options)
