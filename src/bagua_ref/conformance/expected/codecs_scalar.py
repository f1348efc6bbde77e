"""Every codec, MinMaxUInt8 (S4), the MX formats, NVFP4 and OneBit (S12), computed one number at a
time.

Chunks are lists of Python floats that are numbers of the dtype; payloads are bytes. Of the MX
formats, every product is one with a power of two, and exact in float64; NVFP4 rounds each to
float32.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bagua_ref.conformance.expected.kernels_numpy import stored

MINMAX = "MinMaxUInt8"
HEADER = 32
NAN_OF = {
    "float16": bytes.fromhex("007e"),
    "bfloat16": bytes.fromhex("c07f"),
    "float32": bytes.fromhex("0000c07f"),
}
POISON = 255


LARGEST = (2 - 2.0**-23) * 2.0**127
"""The largest number of float32."""


def f32(value: float) -> float:
    """Round to float32, to nearest-even; numbers beyond the range become infinite."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def divide(a: float, b: float) -> float:
    """Divide by the rules of IEEE 754, which define division by zero."""
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def rint(value: float) -> float:
    """Round to the nearest integer, halves to even; infinities and NaN are unchanged."""
    if not math.isfinite(value):
        return value
    return math.copysign(float(round(value)), value)  # Python's round is half-to-even and exact


def _encoded(dtype: str, value: float) -> bytes:
    """Return a number of dtype as its little-endian bytes."""
    return bytes(
        torch.tensor([value], dtype=torch.float64)
        .to(getattr(torch, dtype))
        .view(torch.uint8)
        .tolist()
    )


def _decoded(dtype: str, data: bytes) -> float:
    """Return the first number of dtype that is stored as little-endian bytes."""
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))[0].item()


EPSILON = f32(1e-7)
SIXTH = f32(1 / 6)


@dataclass(frozen=True)
class Elements:
    """An element format.

    Attributes:
        emax: exponent of the largest power of two (S12.1).
        bits: bits per element.
        numbers: the finite numbers from 0 up, indexed by code.
        even: fraction of a power of two from which the rule EVEN rounds up to the next power
            (S12.6).
        block: number of elements that share a scale.
        header: number of bytes before the scales.
    """

    emax: int
    bits: int
    numbers: tuple[float, ...]
    even: float = 2
    block: int = 32
    header: int = 0

    def nearest(self, x: float) -> int:
        """Return the code of the number nearest to ``x >= 0``, of two the even code; numbers beyond
        the largest get its code.
        """
        above = bisect_right(self.numbers, x)
        below = above - 1
        if above == len(self.numbers):
            return below
        down, up = x - self.numbers[below], self.numbers[above] - x
        if down == up:
            return below if below % 2 == 0 else above
        return below if down < up else above


def _floats(mantissa_bits: int, bias: int, count: int) -> tuple[float, ...]:
    """Return the first ``count`` non-negative numbers of a format with subnormals."""
    numbers = []
    for code in range(count):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        leading = 1 if exponent else 0
        numbers.append((leading + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias))
    return tuple(numbers)


_MX = {
    "MXFP8": Elements(8, 8, _floats(3, 7, 127), even=2 - 2**-4),
    "MXFP4": Elements(2, 4, _floats(1, 1, 8), even=2 - 2**-2),
    "MXINT8": Elements(0, 8, tuple(k / 64 for k in range(128))),
}
RULES = tuple(f"{name}-{rule}" for name in ("MXFP8", "MXFP4") for rule in ("RCEIL", "EVEN", "CEIL"))
"""The MX formats with other scale rules (S12.6)."""
FORMATS = {
    **_MX,
    **{name: _MX[name.partition("-")[0]] for name in RULES},
    "NVFP4": Elements(2, 4, _floats(1, 1, 8), block=16, header=HEADER),
}
"""The formats with a scale for each block, by name."""


def payload_size(codec: str, c: int) -> int:
    """Return the size in bytes of a chunk's payload (S4.1, S12.1, S12.2, S12.7)."""
    if codec == MINMAX:
        return HEADER + _padded(c)
    if c == 0:
        return 0
    if codec == "OneBit":
        return 32 + _padded(math.ceil(c / 8))
    form = FORMATS[codec]
    return form.header + _padded(math.ceil(c / form.block) + math.ceil(c * form.bits / 8))


def field_at(codec: str, place: int, c: int, dtype: str) -> str:
    """Return the name of the field that contains a byte of a payload of chunks of c elements (S4.1,
    S12.1, S12.2, S12.7).

    >>> field_at("MinMaxUInt8", 64 + 33, 5, "float32"), field_at("MXFP4", 2, 40, "float32")
    ('level of element 1 of chunk 1', 'code of elements 0 and 1 of chunk 0')
    """
    chunk, place = divmod(place, payload_size(codec, c))
    if codec in FORMATS:
        form = FORMATS[codec]
        name, bits = "code", form.bits
        fields = [("factor", 4), ("gap after the factor", 28)] if form.header else []
        fields += [(f"scale of block {block}", 1) for block in range(math.ceil(c / form.block))]
    elif codec == MINMAX:
        name, bits, size = "level", 8, len(NAN_OF[dtype])
        fields = [
            ("minimum", size),
            ("maximum", size),
            ("gap after the maximum", HEADER - 2 * size),
        ]
    else:
        name, bits, fields = "signs", 1, [("scale", 4), ("gap after the scale", 28)]
    for field, size in fields:
        if place < size:
            return f"{field} of chunk {chunk}"
        place -= size
    first, last = place * 8 // bits, min(place * 8 // bits + 8 // bits, c) - 1
    if first >= c:
        return f"padding of chunk {chunk}"
    which = (
        f"element {first}"
        if first == last
        else f"elements {first} {'and' if last == first + 1 else 'to'} {last}"
    )
    return f"{name} of {which} of chunk {chunk}"


def compress_chunk(codec: str, chunk: list[float], dtype: str) -> bytes:
    """Return the payload of one chunk of numbers of dtype."""
    if codec == MINMAX:
        return compress_minmax(chunk, dtype)
    compress = {"OneBit": _one_bit, "NVFP4": _nvfp4}.get(codec, partial(_microscaling, codec))
    payload = compress(chunk)
    return payload.ljust(payload_size(codec, len(chunk)), b"\0")


def decompress_chunk(codec: str, payload: bytes, count: int, dtype: str) -> list[float]:
    """Return the values of one chunk's payload, numbers of dtype."""
    if not count:
        return []
    if codec == MINMAX:
        values = _from_minmax(payload, count, dtype)
    elif codec == "OneBit":
        values = _from_one_bit(payload, count)
    else:
        form = FORMATS[codec]
        start = form.header + math.ceil(count / form.block)
        scales, elements = payload[form.header : start], payload[start:]
        factor = _decoded("float32", payload)
        values = [
            _element(codec, elements, place, scales[place // form.block], factor)
            for place in range(count)
        ]
    return _saturated(dtype, values)


def error_bound(
    codec: str, x: float, block: list[float], restored: float, dtype: str, chunk: list[float]
) -> float:
    """Return the bound of one element's error in a finite chunk, in float64 (S4.6, S12.3, S12.6,
    S12.7).

    Args:
        codec: one of `FORMATS`, or MinMaxUInt8.
        x: the element.
        block: all elements of its block.
        restored: the element after the round trip.
        dtype: dtype of both.
        chunk: all elements of its chunk.
    """
    if codec == MINMAX:
        low, high = min(chunk), max(chunk)
        return (
            0.5 / grid(low, high)[0]
            + 1.5 * 2.0**-22 * max(abs(low), abs(high))
            + half_ulp(restored, dtype)
        )
    form, largest, rounding = FORMATS[codec], _largest(block), half_ulp(restored, dtype)
    scale = scale_of(codec, largest, _largest(chunk))
    saturates = abs(x) > form.numbers[-1] * scale
    if codec == "NVFP4":
        if _largest(chunk) < 2.0**-100:
            return math.inf
        # six roundings to float32, which the clause does not count
        rounding += 2.0**-21 * abs(x)
        s, t = _nvfp4_scales(largest, _largest(chunk))
        if saturates:
            return (largest / 17 if s >= 2.0**-6 else 6 * 2.0**-10 * t) + rounding
        return max(abs(x), scale) / 4 + rounding
    if codec == "MXINT8":
        return scale / (64 if saturates else 128) + rounding
    wide = codec.startswith("MXFP8")
    if saturates:
        shares = {"": (1 / 8, 1 / 4), "EVEN": (3 / 31, 1 / 7)}
        return largest * shares.get(codec.partition("-")[2], (0, 0))[not wide] + rounding
    return max(abs(x) / (16 if wide else 4), form.numbers[1] * scale / 2) + rounding


def scale_of(codec: str, largest: float, chunk: float) -> float:
    """Return a block's scale, given the largest magnitudes of block and chunk."""
    if codec == "NVFP4":
        return math.prod(_nvfp4_scales(largest, chunk))
    return 2.0 ** exponent_of(codec, largest)


def exponent_of(codec: str, largest: float) -> int:
    """Return the scale exponent for a block's largest magnitude (S12.1,
    S12.6).
    """
    if largest == 0:
        return -127
    form, (half, exponent) = FORMATS[codec], math.frexp(largest)
    fraction, rule = 2 * half, codec.partition("-")[2]
    up = (
        (rule == "RCEIL" and fraction > form.numbers[-1] / 2.0**form.emax)
        or (rule == "EVEN" and fraction >= form.even)
        or (rule == "CEIL" and fraction > 1)
    )
    return max(-127, min(127, exponent - 1 - form.emax + up))


def _largest(numbers: list[float]) -> float:
    return max(map(abs, numbers))


def _microscaling(codec: str, chunk: list[float]) -> bytes:
    form, scales, codes = FORMATS[codec], [], []
    for start in range(0, len(chunk), form.block):
        block = chunk[start : start + form.block]
        if not all(math.isfinite(value) for value in block):
            scales.append(POISON)
            codes += [0] * len(block)
            continue
        exponent = exponent_of(codec, _largest(block))
        scales.append(exponent + 127)
        codes += [_code(codec, form, value, value * 2.0**-exponent) for value in block]
    return bytes(scales) + _packed(form, codes)


def _nvfp4(chunk: list[float]) -> bytes:
    if not chunk:
        return b""
    form, scales, codes = FORMATS["NVFP4"], [], []
    if not all(math.isfinite(value) for value in chunk):
        return NAN_OF["float32"]
    for start in range(0, len(chunk), form.block):
        block = chunk[start : start + form.block]
        s, t = _nvfp4_scales(_largest(block), _largest(chunk))
        scales.append(FORMATS["MXFP8"].nearest(s))
        u = min(f32(divide(1.0, f32(s * t))), LARGEST)
        codes += [_code("NVFP4", form, value, f32(value * u)) for value in block]
    return _encoded("float32", t).ljust(HEADER, b"\0") + bytes(scales) + _packed(form, codes)


def _nvfp4_scales(largest: float, chunk: float) -> tuple[float, float]:
    """Return the scales s and t, given the largest magnitudes of block and chunk (S12.7)."""
    whole = min(f32(divide(2688.0, chunk)), LARGEST) if chunk else 1.0
    of_scales = FORMATS["MXFP8"]
    s = min(f32(largest * f32(whole * SIXTH)), LARGEST)
    return of_scales.numbers[of_scales.nearest(s)], f32(divide(1.0, whole))


def _packed(form: Elements, codes: list[int]) -> bytes:
    if form.bits == 4:
        low, high = codes[::2], [*codes[1::2], 0]
        codes = [first | second << 4 for first, second in zip(low, high, strict=False)]
    return bytes(codes)


def _code(codec: str, form: Elements, value: float, multiple: float) -> int:
    """Return the element code of a value in units of the scale."""
    code = form.nearest(abs(multiple))
    negative = math.copysign(1, value) < 0
    if codec == "MXINT8":
        return -code % 256 if negative else code
    return code | (negative << (form.bits - 1))


def _element(codec: str, elements: bytes, place: int, scale: int, factor: float) -> float:
    form = FORMATS[codec]
    code = elements[place] if form.bits == 8 else elements[place // 2] >> 4 * (place % 2) & 15
    if codec == "NVFP4":
        return f32(f32(_number(form, code) * _number(FORMATS["MXFP8"], scale)) * factor)
    if scale == POISON:
        return math.nan
    power = 2.0 ** (scale - 127)
    if codec == "MXINT8":
        return (code - 256 if code > 127 else code) / 64 * power
    return _number(form, code) * power


def _number(form: Elements, code: int) -> float:
    """Return the number with a code and a sign."""
    negative, magnitude = divmod(code, 2 ** (form.bits - 1))
    if magnitude == len(form.numbers):  # E4M3 has NaN there
        return math.nan
    return math.copysign(form.numbers[magnitude], -1 if negative else 1)


def _saturated(dtype: str, values: list[float]) -> list[float]:
    """Round to float32, then to dtype; numbers beyond the range become the largest number
    (S4.3).
    """
    found = np.array(values)
    for name in ("float32", dtype):
        largest = torch.finfo(getattr(torch, name)).max
        with np.errstate(over="ignore"):
            found = stored(found.astype(np.float32), name).astype(float)
        found = np.where(np.isinf(found), np.copysign(largest, found), found)
    rounded: list[float] = found.tolist()
    return rounded


def _one_bit(chunk: list[float]) -> bytes:
    if not chunk:
        return b""
    size = math.ceil(len(chunk) / 8)
    if not all(math.isfinite(value) for value in chunk):
        return NAN_OF["float32"].ljust(32, b"\0") + bytes(size)
    scale = f32(math.sqrt(math.fsum(value * value for value in chunk) / len(chunk)))
    signs = [0] * size
    for place, value in enumerate(chunk):
        signs[place // 8] |= (value >= 0) << (7 - place % 8)
    return _encoded("float32", scale).ljust(32, b"\0") + bytes(signs)


def _from_one_bit(payload: bytes, count: int) -> list[float]:
    scale = _decoded("float32", payload)
    return [
        scale if payload[32 + place // 8] >> (7 - place % 8) & 1 else -scale
        for place in range(count)
    ]


def _padded(size: int) -> int:
    return math.ceil(size / 32) * 32


def grid(low: float, high: float) -> tuple[float, float, float]:
    """Return scale, upper and lower (S4.2)."""
    scale = f32(divide(255.0, f32(f32(high - low) + EPSILON)))
    upper = rint(f32(high * scale))
    return scale, upper, f32(upper - 255.0)


def compress_minmax(chunk: list[float], dtype: str) -> bytes:
    """Return one chunk's block (S4.1, S4.2, S4.4)."""
    low, high = (min(chunk), max(chunk)) if chunk else (0.0, 0.0)
    if any(not math.isfinite(value) for value in chunk) or is_out_of_range(low, high):
        header, levels = NAN_OF[dtype] * 2, [0] * len(chunk)
    else:
        scale, upper, lower = grid(low, high)
        header = _encoded(dtype, low or 0.0) + _encoded(dtype, high or 0.0)
        levels = [level_of(value, scale, upper, lower) for value in chunk]
    block = header + bytes(HEADER - len(header)) + bytes(levels)
    return block + bytes(payload_size(MINMAX, len(chunk)) - len(block))


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


def _from_minmax(block: bytes, count: int, dtype: str) -> list[float]:
    """Return the values of one block (S4.3)."""
    low, high = (_decoded(dtype, block[place:]) for place in (0, len(NAN_OF[dtype])))
    if math.isnan(low) or math.isnan(high):
        return [math.nan] * count
    scale, _, lower = grid(low, high)
    levels = block[HEADER : HEADER + count]
    return [f32(divide(f32(level + lower), scale)) for level in levels]


def half_ulp(value: float, dtype: str) -> float:
    """Return the maximal error that rounding to a 16-bit dtype adds to a value; 0 for float32, in
    which values are computed.
    """
    if dtype == "float32":
        return 0.0
    digits, smallest = (11, -24) if dtype == "float16" else (8, -133)
    exponent = math.frexp(value)[1] if value else -1000
    return 0.5 * 2.0 ** max(exponent - digits, smallest)
