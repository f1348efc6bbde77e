"""MinMaxUInt8 (S4), one number at a time.

Chunks are lists of Python floats that are numbers of the dtype; blocks are bytes.
"""

from __future__ import annotations

import math

from bagua_ref.conformance.expected.rounding import LARGEST, decode, divide, encode, f32, rint, to

HEADER = 32
EPSILON = f32(1e-7)
POISON = {"float16": bytes.fromhex("007e"), "bfloat16": bytes.fromhex("c07f"), "float32": bytes.fromhex("0000c07f")}


def grid(low: float, high: float) -> tuple[float, float, float]:
    """Return scale, upper and lower (S4.2)."""
    scale = f32(divide(255.0, f32(f32(high - low) + EPSILON)))
    upper = rint(f32(high * scale))
    return scale, upper, f32(upper - 255.0)


def block_size(count: int) -> int:
    """Return the size in bytes of a block of ``count`` elements (S4.1)."""
    padded = 0
    while padded < count:
        padded += 32
    return HEADER + padded


def compress_chunk(chunk: list[float], dtype: str) -> bytes:
    """Return one chunk's block (S4.1, S4.2, S4.4)."""
    low, high = (min(chunk), max(chunk)) if chunk else (0.0, 0.0)
    if any(not math.isfinite(value) for value in chunk) or is_out_of_range(low, high):
        header, levels = POISON[dtype] * 2, [0] * len(chunk)
    else:
        scale, upper, lower = grid(low, high)
        header = encode(dtype, low or 0.0) + encode(dtype, high or 0.0)
        levels = [level_of(value, scale, upper, lower) for value in chunk]
    block = header + bytes(HEADER - len(header)) + bytes(levels)
    return block + bytes(block_size(len(chunk)) - len(block))


def is_out_of_range(low: float, high: float) -> bool:
    """Return whether max - min, max*scale or min*scale overflows (S4.4)."""
    if math.isinf(f32(high - low)):
        return True
    scale = grid(low, high)[0]
    return math.isinf(f32(high * scale)) or math.isinf(f32(low * scale))


def level_of(value: float, scale: float, upper: float, lower: float) -> int:
    """Return the level of one value (S4.2)."""
    level = f32(min(rint(f32(value * scale)), upper) - lower)
    return int(max(0.0, min(255.0, level)))


def decompress_chunk(block: bytes, count: int, dtype: str) -> list[float]:
    """Return the values of one block (S4.3), numbers of dtype."""
    item = 4 if dtype == "float32" else 2
    low, high = decode(dtype, block[:item]), decode(dtype, block[item : 2 * item])
    if math.isnan(low) or math.isnan(high):
        return [math.nan] * count
    scale, _, lower = grid(low, high)
    return [saturate(dtype, f32(divide(f32(level + lower), scale))) for level in block[HEADER : HEADER + count]]


def saturate(dtype: str, value: float) -> float:
    """Round to dtype, with saturation at its largest number (S4.3)."""
    stored = to(dtype, value)
    return math.copysign(LARGEST[dtype], stored) if math.isinf(stored) else stored


def bound(low: float, high: float, restored: float, dtype: str) -> float:
    """Return the bound of the error of a restored value (S4.6), in float64."""
    return 0.5 / grid(low, high)[0] + 1.5 * 2.0**-22 * max(abs(low), abs(high)) + half_ulp(restored, dtype)


def half_ulp(value: float, dtype: str) -> float:
    """Return what rounding to a 16-bit dtype may add to the error of a value; 0 for float32, in which it is computed."""
    if dtype == "float32":
        return 0.0
    digits, smallest = (11, -24) if dtype == "float16" else (8, -133)
    exponent = math.frexp(value)[1] if value else -1000
    return 0.5 * 2.0 ** max(exponent - digits, smallest)
