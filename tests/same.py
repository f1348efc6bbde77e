"""Equality to the last bit."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from typing import Any

import numpy as np
import torch


def assert_same(actual: Any, expected: Any, name: str = "the value") -> None:
    """Raise AssertionError unless both have the same type and the same bits, however nested; strides
    may differ.
    """
    if type(actual) is not type(expected):
        raise AssertionError(
            f"{name} is {actual!r:.200}, a {type(actual).__name__}, instead of {expected!r:.200}, a"
            f" {type(expected).__name__}"
        )
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), (
            f"{name} has {len(actual)} entries, not {len(expected)}"
        )
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{name}[{index}]")
    elif isinstance(expected, dict):
        assert_same(list(actual), list(expected), f"the keys of {name}")
        for key, value in expected.items():
            assert_same(actual[key], value, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(actual), vars(expected), name)
    else:
        assert _bits(actual) == _bits(expected), f"{name} is {actual!r:.200}, not {expected!r:.200}"


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # Elements are read one by one, as some dtypes have no operations.
        plain = value.detach().resolve_conj().resolve_neg()
        width, steps = plain.element_size(), plain.stride()
        places = (
            sum(i * step for i, step in zip(index, steps, strict=True))
            for index in np.ndindex(*plain.shape)
        )
        elements = [ctypes.string_at(plain.data_ptr() + width * place, width) for place in places]
        return value.dtype, value.shape, value.requires_grad, elements
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, complex):
        return struct.pack(">dd", value.real, value.imag)
    return struct.pack(">d", value) if isinstance(value, float) else value
