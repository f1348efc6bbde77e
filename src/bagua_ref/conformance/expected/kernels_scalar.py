"""Rounding to float16, bfloat16, float32 and float64, and the kernels of S1, S3 and S5.5, one
number at a time in plain Python.

Arguments and results are Python floats, which are float64; a kernel's are numbers of the dtype
named first. One operation (+ - * /)
on two float32 numbers done in float64 and then rounded to float32 is rounded correctly: 53 bits are
more than 2 * 24 + 2. Nothing here imports what it judges.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

INF, NAN = math.inf, math.nan

LARGEST = {
    "float16": 65504.0,
    "bfloat16": 255 / 128 * 2.0**127,
    "float32": (2 - 2.0**-23) * 2.0**127,
}


def f32(value: float) -> float:
    """Round to float32, to nearest-even, beyond the range to infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(INF, value)


def f16(value: float) -> float:
    """Round to float16, to nearest-even, beyond the range to infinity."""
    try:
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    except OverflowError:
        return math.copysign(INF, value)


def bf16(value: float) -> float:
    """Round a float32 number to bfloat16, its upper 16 bits."""
    if not math.isfinite(value):
        return value
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    low, high = bits & 0xFFFF, bits >> 16
    if low > 0x8000 or (low == 0x8000 and high & 1):
        high += 1  # may carry into the exponent, up to infinity, as rounding requires
    return float32_of_bits(high << 16)


def to(dtype: str, value: float) -> float:
    """Round what was computed in float32 (float64 for float64) to dtype, as it is stored."""
    return _ROUND[dtype](value)


def arithmetic(dtype: str) -> Callable[[float], float]:
    """Return the rounding after each operation on numbers of dtype (S1)."""
    return float if dtype == "float64" else f32


_ROUND: dict[str, Callable[[float], float]] = {
    "float16": f16,
    "bfloat16": bf16,
    "float32": f32,
    "float64": float,
}


def float32_of_bits(bits: int) -> float:
    """Return the float32 number with these bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def divide(a: float, b: float) -> float:
    """Divide as in IEEE 754, also by zero."""
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a):
        return NAN
    return math.copysign(INF, a) * math.copysign(1.0, b)


def rint(value: float) -> float:
    """Round to the nearest integer, halves to even; infinities and NaN stay."""
    if not math.isfinite(value):
        return value
    return math.copysign(float(round(value)), value)  # Python's round is half-to-even and exact


def encode(dtype: str, value: float) -> bytes:
    """Return a number of dtype as its little-endian bytes."""
    if dtype == "float16":
        return struct.pack("<e", value)
    if dtype == "bfloat16":
        return struct.pack("<f", value)[2:]
    return struct.pack("<f", value)


def decode(dtype: str, data: bytes) -> float:
    """Return the number stored as little-endian bytes of dtype."""
    if dtype == "float16":
        return float(struct.unpack("<e", data)[0])
    if dtype == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    return float(struct.unpack("<f", data)[0])


def add(dtype: str, x: float, y: float) -> float:
    """Return x + y (S1)."""
    return to(dtype, arithmetic(dtype)(x + y))


def subtract(dtype: str, x: float, y: float) -> float:
    """Return x - y (S1)."""
    return to(dtype, arithmetic(dtype)(x - y))


def add_scaled(dtype: str, x: float, y: float, factor: float) -> float:
    """Return x + factor * y (S1)."""
    r = arithmetic(dtype)
    return to(dtype, r(x + r(r(factor) * y)))


def average(dtype: str, x: float, y: float) -> float:
    """Return (x + y) / 2 (S3.4)."""
    r = arithmetic(dtype)
    return to(dtype, r(r(x + y) / 2))


def quotient(dtype: str, x: float, divisor: float) -> float:
    """Return x / divisor (S3.3)."""
    r = arithmetic(dtype)
    return to(dtype, r(divide(x, r(divisor))))


def combine_ring(dtype: str, x: float, left: float, right: float, weight: float) -> float:
    """Return the first line of S3.5."""
    x = add_scaled(dtype, x, left, 1 / 3)
    x = add_scaled(dtype, x, right, 1 / 3)
    return add_scaled(dtype, x, weight, -5 / 3)


def async_average(dtype: str, x: float, reduced: float, snapshot: float, nranks: int) -> float:
    """Return x + (reduced / nranks - snapshot) (S3.6)."""
    r = arithmetic(dtype)
    return to(dtype, r(x + r(r(reduced / nranks) - snapshot)))


def update_momentum(dtype: str, m: float, grad: float, beta1: float) -> float:
    """Return beta1*m + (1-beta1)*grad (S5.5)."""
    r = arithmetic(dtype)
    return to(dtype, r(r(r(beta1) * m) + r(r(1.0 - beta1) * grad)))


def reduce_in_order(dtype: str, values: list[float], average: bool) -> float:
    """Return the sum from +0 on in order, or the mean (S3.7)."""
    r = arithmetic(dtype)
    total = 0.0
    for value in values:
        total = r(total + value)
    return to(dtype, r(total / len(values)) if average else total)


def ascending(keys: list[float]) -> list[int]:
    """Return the stable order of the keys; NaNs come last (S7.2)."""
    return sorted(
        range(len(keys)), key=lambda i: (True, 0.0) if math.isnan(keys[i]) else (False, keys[i])
    )
