"""Cached values written down to the last bit, and their comparison (S8.5)."""

from __future__ import annotations

import copy
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

__all__ = ["Source", "Thing", "Trap", "array", "assert_same", "double", "spoil", "tensor", "without_pickle"]


def tensor(dtype: str, shape: Sequence[int], bits: str) -> torch.Tensor:
    """Return the tensor with these bits, in hexadecimal.

    >>> tensor("float16", (2,), "003c007e")
    tensor([1., nan], dtype=torch.float16)
    """
    of = getattr(torch, dtype)
    return torch.frombuffer(bytearray.fromhex(bits), dtype=of).reshape(shape) if bits else torch.empty(shape, dtype=of)


def array(dtype: str, shape: Sequence[int], bits: str) -> np.ndarray[Any, Any]:
    """Return the array with these bits, in hexadecimal.

    >>> array(">i2", (1, 2), "00010100").tolist()
    [[1, 256]]
    """
    return np.frombuffer(bytearray.fromhex(bits), np.dtype(dtype)).reshape(shape) if bits else np.empty(shape, np.dtype(dtype))


def double(bits: str) -> float:
    """Return the float with these bits, most significant first."""
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


def assert_same(found: Any, wanted: Any, what: str = "the value") -> None:
    """Raise AssertionError unless two values have the same type and the same bits, however nested; strides may differ."""
    if type(found) is not type(wanted):
        raise AssertionError(f"{what} is {_short(found)}, of type {type(found).__name__}, instead of {_short(wanted)}")
    if isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted), f"{what} has {len(found)} entries instead of {len(wanted)}"
        for place, pair in enumerate(zip(found, wanted, strict=True)):
            assert_same(*pair, f"{what}[{place}]")
    elif isinstance(wanted, dict):
        assert_same(list(found), list(wanted), f"the keys of {what}")
        for key, value in wanted.items():
            assert_same(found[key], value, f"{what}[{key!r}]")
    else:
        assert _bits(found) == _bits(wanted), f"{what} is {_short(found)} instead of {_short(wanted)}"


def spoil(value: Any) -> None:
    """Change a list, dict, tensor or array in place, with all of them inside; arrays that cannot be written are left alone."""
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
    kind = f" ({value.dtype}, shape {tuple(value.shape)})" if isinstance(value, (torch.Tensor, np.ndarray)) else ""
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
        return f"{key}, made by call {self._count}" if self.values is None else copy.deepcopy(self.values[key])

    def expect(self, *calls: Any) -> None:
        """Raise AssertionError unless it was called for these keys since the last call of this method."""
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
