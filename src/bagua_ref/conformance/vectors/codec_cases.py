"""Cases of the codecs: compress, decompress what was compressed and any other bytes (S4, S12)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.conformance.expected.codecs_scalar import FORMATS, MINMAX, payload_size
from bagua_ref.conformance.vectors.case import KINDS, Case, Numbers, numbers_of, tensor_of

__all__ = ["codec_cases", "minmax_cases"]

_INF, _NAN = float("inf"), float("nan")

_Inputs = Iterator[tuple[str, str, Tensor, int]]
"""A name, a flag, the numbers and how many chunks they are."""

_RANGES = (
    (0, 2),
    (1, 1e-3),
    (-5, 0.1),
    (100, 60),
    (0.001, 1e-5),
    (-3000, 6000),
    (0, 1e-6),
    (1e5, 3e4),
    (7, 7),
    (1e-20, 1e-21),
)
"""Middles and widths of ranges of ordinary numbers."""


def _bytes(numbers: Numbers, size: int) -> Tensor:
    return torch.tensor([numbers.below(256) for _ in range(size)], dtype=torch.uint8)


# MinMaxUInt8


def minmax_cases() -> Iterator[Case]:
    """Yield every case of suite ``codec``."""
    for dtype in COMPRESSIBLE:
        for name, flag, x, num_chunks in _minmax_inputs(dtype):
            chunks = {"num_chunks": num_chunks}
            compress = Case(
                "codec",
                "compress_minmax_uint8",
                "S4.2",
                dtype,
                name,
                {"x": x},
                {**chunks, "target_chunk": None},
                (flag,),
            )
            payload = compress.outputs["payload"]
            if payload.view(num_chunks, -1)[:, : dtype.itemsize].clone().view(dtype).isnan().any():
                flag, compress = "poison", replace(compress, clause="S4.4", flags=("poison",))
            yield compress
            yield Case(
                "codec",
                "decompress_minmax_uint8",
                "S4.4" if flag == "poison" else "S4.3",
                dtype,
                name,
                {"payload": payload},
                {**chunks, "num_elements": x.numel()},
                (flag,),
            )
            if name.startswith(("chunks", "edges")):
                yield Case(
                    "codec",
                    "roundtrip_minmax_uint8",
                    "S4.6",
                    dtype,
                    name,
                    {"x": x},
                    chunks,
                    (flag,),
                )
        for num_chunks, target in ((1, 0), (3, 0), (3, 1), (4, 3)):  # the other blocks stay (S4.5)
            name = f"target-{target}-of-{num_chunks}"
            numbers = numbers_of("codec", "compress_minmax_uint8", dtype, name)
            inputs = {
                "x": numbers.uniform(num_chunks * 37, dtype),
                "payload": _bytes(numbers, num_chunks * payload_size(MINMAX, 37)),
            }
            parameters = {"num_chunks": num_chunks, "target_chunk": target}
            yield Case(
                "codec", "compress_minmax_uint8", "S4.5", dtype, name, inputs, parameters, ("edge",)
            )
        yield from _every_level(dtype)


def _minmax_inputs(dtype: torch.dtype) -> _Inputs:
    # they fill a payload's rows of 32 bytes, or do not
    for size in (1, 2, 31, 32, 33, 63, 64, 65, 100, 4097):
        yield (
            f"size-{size}",
            "valid",
            numbers_of("codec", dtype, f"size-{size}").uniform(size, dtype),
            1,
        )
    for kind, flag in KINDS.items():
        yield (
            f"chunks-{kind}",
            flag,
            numbers_of("codec", dtype, f"chunks-{kind}").of(kind, 5 * 37, dtype),
            5,
        )
    for place, (middle, width) in enumerate(_RANGES):
        low, high = middle - width / 2, middle + width / 2
        if max(abs(low), abs(high)) < torch.finfo(dtype).max:
            yield (
                f"range-{place}",
                "valid",
                numbers_of("codec", dtype, f"range-{place}").uniform(48, dtype, low, high),
                1,
            )
            yield (
                f"ties-{place}",
                "edge",
                _near_ties(numbers_of("codec", dtype, f"ties-{place}"), 48, dtype, low, high),
                1,
            )
    for place in range(12):
        name = f"half-a-level-{place}"
        yield name, "edge", _ends_near_half_a_level(numbers_of("codec", dtype, name), dtype), 1
    mixed = numbers_of("codec", dtype, "mixed")
    parts = [
        mixed.uniform(21, dtype),
        tensor_of([_NAN] * 21, dtype),
        mixed.of("denormal", 21, dtype),
        mixed.of("zeros", 21, dtype),
    ]
    yield "chunks-one-poisoned", "poison", torch.cat(parts), 4
    yield "empty", "edge", torch.empty(0, dtype=dtype), 1
    yield "empty-chunks", "edge", torch.empty(0, dtype=dtype), 3
    info = torch.finfo(dtype)
    for name, values in {
        **{
            f"constant{value:g}": [value] * 5
            for value in (0.0, -0.0, 1.0, -1.0, 3.14, -1e-3, 250.0, 65504.0, 1e30, -1e30)
        },
        "constant-largest": [info.max] * 3,
        "constant-smallest-normal": [info.tiny] * 3,
        "constant-denormal": [info.tiny / 4] * 3,
        "signed-zeros": [-0.0, 0.0, -0.0],
        "negative-zero-is-max": [-1.0, -0.0, -0.5],
        "negative-zero-is-min": [-0.0, 1.0, 0.5],
        "half-integer-ends": [-253.5, 1.5, 0.0, 0.5, -0.5, -100.5],  # the clamp below bites (S4.2)
        "steps-of-one": [float(k) for k in range(256)],
        "steps-of-half": [k / 2 for k in range(511)],  # every other one is a tie
        "negative-steps-of-half": [-k / 2 for k in range(511)],
        "steps-around-zero": [k / 2 - 100.5 for k in range(511)],
        "whole-range": [-info.max, info.max, 0.0, 1.0],
        "half-range": [-info.max / 2, info.max / 2, info.max / 4, 0.0],
        "just-too-wide": [-info.max * 0.51, info.max * 0.5, 0.0],
        "largest-constant": [1.33e29] * 3,
        "too-large-a-constant": [1.34e29] * 3,  # max*scale overflows
        "upper-half-range": [info.max / 2, info.max, info.max * 0.75],
        "infinity": [1.0, _INF, 2.0],
        "negative-infinity": [-_INF, 1.0, 2.0],
        "both-infinities": [-_INF, _INF],
        "nan-first": [_NAN, 1.0, 2.0],
        "nan-last": [1.0, 2.0, _NAN],
        "nan-in-the-middle": [-1.0] * 20 + [_NAN] + [5.0] * 20,
        "far-from-zero": [2.0**14 + k for k in range(0, 64, 8)],
        "near-the-end-of-float32": [1e30, 1.5e30, 1.2e30],
        "epsilon-counts": [0.0, 1e-7, 5e-8],
    }.items():
        yield f"edges-{name}", "edge", tensor_of(values, dtype), 1
    if dtype is torch.float32:
        tight = torch.tensor([0x4027C5B4, -0x3FE74EEF], dtype=torch.int32).view(dtype)
        # exceeds a bound with 2^-22 instead of 1.5*2^-22 (S4.6)
        yield "edges-tight-bound", "edge", tight, 1
        for exponent in (17, 20, 23):
            steps = tensor_of([2.0**exponent * (1 + k * 2.0**-23) for k in range(9)], dtype)
            # lower and upper are rounded, too
            yield f"edges-upper-beyond-2-24-{exponent}", "edge", steps, 1


def _near_ties(numbers: Numbers, size: int, dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Return numbers whose products with scale lie within some steps of k + 1/2, where rounding too
    late or too early shows.
    """
    ends = tensor_of([low, high], dtype).to(torch.float32).numpy()
    scale = np.float32(255) / ((ends[1] - ends[0]) + np.float32(1e-7))
    first = float(np.rint(ends[1] * scale)) - 255
    values = [float(ends[0]), float(ends[1])]
    for _ in range(size - 2):
        x = np.float32((first + numbers.below(255) + 0.5) / float(scale))
        moved = np.array([x]).view(np.int32) + np.int32(numbers.below(5) - 2)
        values.append(float(moved.view(np.float32)[0].clip(ends[0], ends[1])))
    return tensor_of(values, dtype)


def _ends_near_half_a_level(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    """Return ends with max*scale close to k + 1/2, where S4.6's bound is tight, and numbers between
    them.
    """
    half = numbers.below(254) + 0.5
    low = -(1 + numbers.unit()) * 2.0 ** (numbers.below(16) - 8)
    high = -half * low / (255 - half)
    return tensor_of([low, high] + [numbers.between(low, high) for _ in range(14)], dtype)


def _every_level(dtype: torch.dtype) -> Iterator[Case]:
    """Yield payloads with every level, between many ends: what some input could have been
    compressed to (S4.3).
    """
    ends = [(middle - width / 2, middle + width / 2) for middle, width in _RANGES]
    # Scale is 1 here and every other value above 256 is a tie when stored as bfloat16, above 2048
    # as float16.
    ends += [(45, 300), (-300, -45), (1901, 2156), (-2156, -1901)]
    for place, (low, high) in enumerate(ends):
        if max(abs(low), abs(high)) < torch.finfo(dtype).max:
            payload = torch.zeros(payload_size(MINMAX, 256), dtype=torch.uint8)
            payload[: 2 * dtype.itemsize] = (tensor_of([low, high], dtype) + 0.0).view(torch.uint8)
            payload[32:288] = torch.arange(256, dtype=torch.uint8)
            yield Case(
                "codec",
                "decompress_minmax_uint8",
                "S4.3",
                dtype,
                f"every-level-{place}",
                {"payload": payload},
                {"num_chunks": 1, "num_elements": 256},
            )


# The codecs of S12


def codec_cases() -> Iterator[Case]:
    """Yield every case of suite ``codecs``."""
    for codec in (*FORMATS, "OneBit"):
        clause = "S12.2" if codec == "OneBit" else "S12.1"
        for dtype in COMPRESSIBLE:
            for name, flag, x, num_chunks in (
                _one_bit(dtype) if codec == "OneBit" else _microscaling(codec, dtype)
            ):
                common = {"codec": codec, "num_chunks": num_chunks}
                compress = Case(
                    "codecs",
                    "codec_compress",
                    "S12.3" if flag == "poison" else clause,
                    dtype,
                    f"{codec}-{name}",
                    {"x": x},
                    {**common, "target_chunk": None},
                    (flag,),
                )
                yield compress
                inputs, parameters = compress.outputs, {**common, "num_elements": x.numel()}
                yield replace(
                    compress, operation="codec_decompress", inputs=inputs, parameters=parameters
                )
            before = _bytes(
                numbers_of("codecs", codec, dtype, "target"), 3 * payload_size(codec, 40)
            )
            yield Case(
                "codecs",
                "codec_compress",
                clause,
                dtype,
                f"{codec}-target-1-of-3",
                {"x": tensor_of([2.5, -2.5] * 60, dtype), "payload": before},
                {"codec": codec, "num_chunks": 3, "target_chunk": 1},
                ("edge",),
            )
            for name, payload, size in _any_bytes(codec, dtype):
                parameters = {"codec": codec, "num_chunks": 1, "num_elements": size}
                yield Case(
                    "codecs",
                    "codec_decompress",
                    clause,
                    dtype,
                    name,
                    {"payload": payload},
                    parameters,
                    ("edge",),
                )


_SIZES = (0, 1, 2, 31, 32, 33, 65, 300)


def _microscaling(codec: str, dtype: torch.dtype) -> _Inputs:
    for size in _SIZES:
        x = numbers_of("codecs", codec, dtype, f"size-{size}").uniform(2 * size, dtype)
        yield f"size-{size}", "valid" if size else "edge", x, 2
    for kind, flag in KINDS.items():
        x = numbers_of("codecs", codec, dtype, kind).of(kind, 3 * 70, dtype)
        yield f"chunks-{kind}", "poison" if not x.isfinite().all() else flag, x, 3
    form = FORMATS[codec]
    for power in (-20, -14, -3, 0, 3, 8, 15):
        scale = 2.0 ** (power - form.emax)
        ties = [
            (a + b) / 2 * scale
            for a, b in zip(form.numbers[-40:], form.numbers[-39:], strict=False)
        ]
        low = [
            (a + b) / 2 * scale for a, b in zip(form.numbers[:8], form.numbers[1:9], strict=False)
        ]
        values = [value * sign for value in (*low, *ties) for sign in (1, -1)]
        blocks = [values[start : start + 31] for start in range(0, len(values), 31)]
        yield (
            f"ties-{power}",
            "edge",
            tensor_of([v for block in blocks for v in (2.0**power, *block)], dtype),
            1,
        )


def _one_bit(dtype: torch.dtype) -> _Inputs:
    """Yield inputs whose mean squares are squares: s has no error of its own to 1 ulp."""
    for size in _SIZES:
        signs = numbers_of("codecs/OneBit", dtype, str(size))
        x = tensor_of([(1.5, -1.5)[signs.below(2)] for _ in range(3 * size)], dtype)
        yield f"size-{size}", "valid" if size else "edge", x, 3
    yield "seven-and-one", "valid", tensor_of([7.0, -1.0, 1.0, -7.0] * 11, dtype), 2
    yield "zeros", "edge", tensor_of([0.0, -0.0, -0.0, 0.0, 0.0], dtype), 1
    for place, bad in enumerate((_NAN, _INF, -_INF)):
        yield f"poisoned-{place}", "poison", tensor_of([2.0] * 40 + [-2.0] * 39 + [bad], dtype), 2


def _any_bytes(codec: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, int]]:
    """Yield payloads with every code, at many scales, as another compressor may have made, and
    their elements.
    """
    if codec == "OneBit":
        numbers = numbers_of("codecs", codec, dtype, "any")
        for place, scale in enumerate((0.0, -2.0, 7e4, 3.4e38, _INF, 2.0**-149)):
            payload = _bytes(numbers, payload_size(codec, 70))
            payload[:4] = torch.tensor([scale]).view(torch.uint8)
            yield f"{codec}-scale-{place}", payload, 70
        return
    size = 2 ** FORMATS[codec].bits
    codes, blocks = torch.arange(size, dtype=torch.uint8), -(-size // 32)
    codes = codes if size == 256 else codes[::2] | codes[1::2] << 4
    for scale in (0, 1, 100, 127, 135, 142, 247, 250, 254, 255):
        payload = torch.zeros(payload_size(codec, size), dtype=torch.uint8)
        payload[:blocks], payload[blocks : blocks + len(codes)] = scale, codes
        yield f"{codec}-every-code-{scale}", payload, size
