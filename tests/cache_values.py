"""Helpers of the cache's tests: exact equality of values, and objects that need pickle."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch


class Pair(NamedTuple):
    left: int
    right: int


@dataclass
class Sample:
    """An object that only pickle can serialize."""

    pixels: Any
    label: int = 0


def same(a: Any, b: Any) -> bool:
    """Return whether ``a`` and ``b`` have the same type and bits, at every level of nesting."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, a.requires_grad) == (
            b.dtype,
            b.shape,
            b.requires_grad,
        ) and element_bytes(a) == element_bytes(b)
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) for x, y in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, Sample):
        return same(a.pixels, b.pixels) and a.label == b.label
    return a == b


def element_bytes(tensor: torch.Tensor) -> list[bytes]:
    """Return each element's bytes, read one by one from memory without the package's code."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    width, start = plain.element_size(), plain.data_ptr()
    steps = [step * width for step in plain.stride()]
    return [
        ctypes.string_at(start + sum(i * step for i, step in zip(index, steps, strict=True)), width)
        for index in np.ndindex(*plain.shape)
    ]
