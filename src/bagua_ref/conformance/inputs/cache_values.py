"""Cached values: written down to the last bit, drawn as Python source so that a script reproduces
them, and compared (S8.5).
"""

from __future__ import annotations

import copy
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite, prod
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st

__all__ = [
    "ARRAYS",
    "NO_KEYS",
    "PLAIN",
    "TENSORS",
    "Source",
    "Thing",
    "Trap",
    "array",
    "assert_same",
    "double",
    "key_sources",
    "long_sources",
    "objects",
    "spoil",
    "tensor",
    "tensor_sources",
    "value_sources",
    "without_pickle",
]


def tensor(dtype: str, shape: Sequence[int], bits: str) -> torch.Tensor:
    """Return the tensor with these bits, in hexadecimal.

    >>> tensor("float16", (2,), "003c007e")
    tensor([1., nan], dtype=torch.float16)
    """
    of = getattr(torch, dtype)
    return (
        torch.frombuffer(bytearray.fromhex(bits), dtype=of).reshape(shape)
        if bits
        else torch.empty(shape, dtype=of)
    )


def array(dtype: str, shape: Sequence[int], bits: str) -> np.ndarray[Any, Any]:
    """Return the array with these bits, in hexadecimal.

    >>> array(">i2", (1, 2), "00010100").tolist()
    [[1, 256]]
    """
    return (
        np.frombuffer(bytearray.fromhex(bits), np.dtype(dtype)).reshape(shape)
        if bits
        else np.empty(shape, np.dtype(dtype))
    )


def double(bits: str) -> float:
    """Return the float with these bits, most significant first."""
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


def assert_same(found: Any, wanted: Any, what: str = "the value") -> None:
    """Raise AssertionError unless two values have the same type and the same bits, however nested;
    strides may differ.
    """
    if type(found) is not type(wanted):
        raise AssertionError(
            f"{what} is {_short(found)}, of type {type(found).__name__}, instead of"
            f" {_short(wanted)}"
        )
    if isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted), (
            f"{what} has {len(found)} entries instead of {len(wanted)}"
        )
        for place, pair in enumerate(zip(found, wanted, strict=True)):
            assert_same(*pair, f"{what}[{place}]")
    elif isinstance(wanted, dict):
        assert_same(list(found), list(wanted), f"the keys of {what}")
        for key, value in wanted.items():
            assert_same(found[key], value, f"{what}[{key!r}]")
    else:
        assert _bits(found) == _bits(wanted), (
            f"{what} is {_short(found)} instead of {_short(wanted)}"
        )


def spoil(value: Any) -> None:
    """Change a list, dict, tensor or array in place, with all of them inside; arrays that cannot be
    written are left alone.
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if isinstance(value, torch.Tensor) or value.flags.writeable:
            value[...] = 99
        return
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (list, dict, torch.Tensor, np.ndarray)):
            spoil(inner)
    if isinstance(value, dict):
        value["changed"] = True
    else:
        value.append("changed")


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return value.dtype, value.shape, flat.view(torch.uint8).tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return struct.pack(">d", value) if isinstance(value, float) else value


def _short(value: Any) -> str:
    kind = (
        f" ({value.dtype}, shape {tuple(value.shape)})"
        if isinstance(value, (torch.Tensor, np.ndarray))
        else ""
    )
    return repr(value)[:200] + kind


class Source:
    """A ``load_fn`` that records its calls.

    Args:
        values: returns the value of a key; None: a text that differs for each call.

    Attributes:
        calls: keys of all calls.
    """

    def __init__(self, values: Mapping[Any, Any] | None = None) -> None:
        self.values = values
        self.calls: list[Any] = []
        self._count = 0

    def __call__(self, key: Any) -> Any:
        """Return the value of a key."""
        self.calls.append(key)
        self._count += 1
        return (
            f"{key}, made by call {self._count}"
            if self.values is None
            else copy.deepcopy(self.values[key])
        )

    def expect(self, *calls: Any) -> None:
        """Raise AssertionError unless it was called for these keys since the last call of this
        method.
        """
        found, self.calls = self.calls, []
        assert found == list(calls), f"load_fn was called for {found} instead of {list(calls)}"


class Thing:
    """An object that only pickle can store."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self.number == other.number

    __hash__ = None  # type: ignore[assignment]


class Trap:
    """An object whose pickle runs code when it is read: the code appends to `Trap.ran`."""

    ran: list[str] = []  # noqa: RUF012 - meant to be shared

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _spring, ("code from the store",)

    @classmethod
    def assert_unsprung(cls) -> None:
        """Raise AssertionError if the code ran."""
        ran = list(cls.ran)
        cls.ran.clear()
        assert not ran, f"reading a value ran {ran[0]}"


def _spring(what: str) -> None:
    Trap.ran.append(what)


@contextmanager
def without_pickle() -> Iterator[None]:
    """Turn any use of pickle into an error."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle was used")

    names = ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(pickle, name, refuse))
        yield


TENSORS = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)
"""Dtypes of torch."""

_NUMPY = [">f8", "<f4", ">i4", "<f2", "?", ">u2", "|u1", "<i8", "<c8", "<U2", "|S3", "<M8[s]"]
_shapes = st.one_of(
    st.sampled_from([(), (2, 3), (4,)]),
    st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
)
_matrices = st.sampled_from([(2, 3), (3, 2), (2, 2)])


def _hex(draw: Any, count: int, size: int, is_bool: bool) -> str:
    """Draw any bits; for bool, 0 and 1."""
    if is_bool:
        return "".join(
            f"{bit:02x}"
            for bit in draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
        )
    edges = [
        b"\x00" * size,
        b"\xff" * size,
        b"\x80" + b"\x00" * (size - 1),
        b"\x01" + b"\xfe" * (size - 1),
    ]
    item = st.one_of(st.sampled_from(edges), st.binary(min_size=size, max_size=size))
    return "".join(data.hex() for data in draw(st.lists(item, min_size=count, max_size=count)))


@st.composite
def tensor_sources(draw: st.DrawFn, name: str) -> str:
    """Source of tensors of a dtype."""
    shape = draw(_shapes)
    bits = _hex(draw, prod(shape), getattr(torch, name).itemsize, name == "bool")
    source = f"tensor({name!r}, {shape}, {bits!r})"
    if len(shape) > 1:
        source += draw(
            st.sampled_from(["", f".transpose(0, {len(shape) - 1})", "[::2]", "[:, 1:]"])
        )
    return source


@st.composite
def _array_sources(draw: st.DrawFn, turned: str) -> str:
    dtype, shape = (
        np.dtype(draw(st.sampled_from(_NUMPY))),
        draw(_matrices if turned == ".T" else _shapes),
    )
    bits = _hex(draw, prod(shape), dtype.itemsize, dtype.kind == "b")
    if dtype.kind == "U":  # not every code point is a character
        bits = "".join(
            draw(st.sampled_from(["41000000", "00000000", "e4000000"]))
            for _ in range(2 * prod(shape))
        )
    return f"array({dtype.str!r}, {shape}, {bits!r}){turned if shape else ''}"


ARRAYS = tuple(map(_array_sources, ("", ".T", "[::-1]")))
"""Sources of arrays: in order, transposed, and from the end."""


def _float(number: float) -> str:
    return repr(number) if isfinite(number) else f"float({str(number)!r})"


def _around_powers(sign: int) -> st.SearchStrategy[str]:
    powers, more = st.sampled_from([31, 53, 63, 64, 99]), st.integers(-2, 2)
    return st.builds(lambda power, more: repr(sign * (2**power + more)), powers, more)


_CONSTANTS = (
    "None",
    "True",
    "False",
    "0",
    "1",
    "0.0",
    "-0.0",
    "''",
    "b''",
    r"'\ud800'",
    r"'a\udfff\U0001f600'",
)
_DRAWN = (
    st.integers(-(2**70), 2**70).map(repr),
    *map(_around_powers, (1, -1)),
    st.floats().map(_float),
    # NaNs of other bits
    st.sampled_from(["double('7ff8000000000001')", "double('fff0000000000001')"]),
    st.text(max_size=6).map(repr),
    st.binary(max_size=6).map(repr),
)
PLAIN = (*map(st.just, _CONSTANTS), *_DRAWN)
"""Sources of None, bool, int, float, str and bytes."""

_labels = st.one_of(
    st.text(max_size=3),
    st.integers(-2, 2),
    st.none(),
    st.binary(max_size=2),
    st.tuples(st.integers(0, 3)),
).map(repr)


def _containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, max_size=3)
    return st.one_of(
        several.map(lambda items: f"[{', '.join(items)}]"),
        several.map(lambda items: f"({', '.join(items)}{',' * (len(items) == 1)})"),
        st.dictionaries(_labels, inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"{key}: {item}" for key, item in items.items()) + "}"
        ),
    )


def value_sources(dtypes: Sequence[str] = TENSORS) -> st.SearchStrategy[str]:
    """Source of values that need no pickle: tensors of these dtypes, arrays, None, bool, numbers,
    str, bytes and containers.
    """
    tensors = st.sampled_from(dtypes).flatmap(tensor_sources)
    return st.recursive(
        st.one_of(st.sampled_from(_CONSTANTS), *_DRAWN, tensors, *ARRAYS), _containers, max_leaves=4
    )


def _of_many(kind: str) -> st.SearchStrategy[str]:
    return st.sampled_from([127, 128, 129, 300, 40_000]).map(
        lambda count: kind.format(*[count] * kind.count("{}"))
    )


def long_sources(dtypes: Sequence[str]) -> tuple[st.SearchStrategy[str], ...]:
    """Sources of values, one a tensor of these dtypes, that are longer than a length of one or two
    bytes can say.
    """
    tensors = [
        f"tensor({name!r}, ({{}},), '{'01' * getattr(torch, name).itemsize}' * {{}})"
        for name in dtypes
    ]
    return (
        *map(
            _of_many,
            ("b'ab' * {}", "'xy' * {}", "'\\udce9' * {}", "array('<i2', ({},), '0102' * {})"),
        ),
        st.sampled_from(tensors).flatmap(_of_many),
        st.sampled_from(["[*range(300)]", "dict.fromkeys(range(300))", "(None,) * 70_000"]),
    )


def objects() -> st.SearchStrategy[str]:
    """Source of values that need pickle, alone or inside others."""
    lonely = st.sampled_from(
        [
            "Thing(3)",
            "{1, 2}",
            "range(3)",
            "__import__('numpy').array([{}, None], dtype=object)",
            "Thing",
        ]
    )
    return st.one_of(
        lonely,
        st.tuples(lonely, st.sampled_from(["[{}]", "(1, {})", "{{'key': {}}}"])).map(
            lambda two: two[1].format(two[0])
        ),
    )


NO_KEYS = (
    "object()",
    "{1}",
    "{'a': 1}",
    "1j",
    "range(3)",
    "slice(2)",
    "bytearray(b'a')",
    "numpy.zeros(3)",
    "torch.zeros(3)",
    "torch.tensor(0.5)",
    "numpy.datetime64('2026')",
)
"""Sources of objects that are no keys."""


def key_sources() -> st.SearchStrategy[tuple[str, Any]]:
    """Source of keys of every kind, each with the key in Python's own types, whose text names the
    value.
    """
    plain = st.one_of(
        st.integers(0, 11),
        st.text(max_size=5),
        st.booleans(),
        st.none(),
        st.binary(max_size=3),
        st.integers(),
        _finite(),
    )
    single = st.one_of(
        plain.map(lambda key: (repr(key), key)),
        st.integers(-(2**63), 2**63 - 1).map(lambda key: (f"numpy.int64({key})", key)),
        _finite(width=32).map(lambda key: (f"numpy.float32({key!r})", key)),
        st.sampled_from(
            [("pathlib.PurePosixPath('a/b')", "a/b"), ("torch.tensor(7)", 7), ("numpy.array(7)", 7)]
        ),
    )
    return st.recursive(
        single,
        lambda inner: st.tuples(st.sampled_from([tuple, list]), st.lists(inner, max_size=3)).map(
            lambda two: (
                f"{two[0].__name__}([{', '.join(source for source, _ in two[1])}])",
                two[0](key for _, key in two[1]),
            )
        ),
        max_leaves=4,
    )


def _finite(**options: Any) -> st.SearchStrategy[float]:
    return st.floats(allow_nan=False, allow_infinity=False, **options)
