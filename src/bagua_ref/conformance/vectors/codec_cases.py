"""Cases of MinMaxUInt8: compress, decompress and both in turn (S4)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import get_codec
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.conformance.vectors.case import Case, canonical, case_id, name_of, seed_of
from bagua_ref.conformance.vectors.numbers import KINDS, Numbers, tensor_of

__all__ = ["codec_cases"]

_SIZES = (1, 2, 31, 32, 33, 63, 64, 65, 100, 4097)
"""Of chunks: they fill a payload's rows of 32 bytes, or do not."""

_CLAUSES = {"valid": "S4.2", "edge": "S4.2", "poison": "S4.4"}


def codec_cases() -> Iterator[Case]:
    """Yield every case of suite ``codec``."""
    for dtype in COMPRESSIBLE:
        for name, flag, x, num_chunks in _inputs(dtype):
            x = canonical(x)
            payload = get_codec("MinMaxUInt8", "reference").compress(x, num_chunks)
            flags = (_flag_of(payload, dtype, num_chunks, flag),)
            restored = _restored(payload, num_chunks, x)
            parameters = {"num_chunks": num_chunks}
            clause = _CLAUSES[flags[0]]
            yield Case(
                "codec", "compress_minmax_uint8", clause, name_of(dtype), name,
                {"x": x}, {"payload": payload}, {**parameters, "target_chunk": None}, flags,
            )  # fmt: skip
            yield Case(
                "codec", "decompress_minmax_uint8", "S4.4" if flags == ("poison",) else "S4.3", name_of(dtype), name,
                {"payload": payload}, {"x": restored}, {**parameters, "num_elements": x.numel()}, flags,
            )  # fmt: skip
            if name.startswith(("chunks", "edges")):
                outputs = {"payload": payload, "x": restored}
                yield Case("codec", "roundtrip_minmax_uint8", "S4.6", name_of(dtype), name, {"x": x}, outputs, parameters, flags)
        yield from _single_chunks(dtype)
        yield from _any_levels(dtype)


def _inputs(dtype: torch.dtype) -> Iterator[tuple[str, str, Tensor, int]]:
    """Yield a name, a flag, the numbers and how many chunks they are."""

    def numbers(name: str) -> Numbers:
        return Numbers(seed_of(f"codec/{name_of(dtype)}/{name}"))

    for size in _SIZES:
        name = f"size-{size}"
        yield name, "valid", numbers(name).uniform(size, dtype), 1
    for kind, (flag, draw) in KINDS.items():
        name = f"chunks-{kind}"
        yield name, flag, draw(numbers(name), 5 * 37, dtype), 5
    for place, (middle, width) in enumerate(_RANGES):
        name = f"range-{place}"
        low, high = middle - width / 2, middle + width / 2
        if max(abs(low), abs(high)) < torch.finfo(dtype).max:
            yield name, "valid", numbers(name).uniform(48, dtype, low, high), 1
            name = f"ties-{place}"
            yield name, "edge", _near_ties(numbers(name), 48, dtype, low, high), 1
    for place in range(12):
        name = f"half-a-level-{place}"
        yield name, "edge", _ends_near_half_a_level(numbers(name), dtype), 1
    mixed = numbers("mixed")
    parts = [mixed.uniform(21, dtype), torch.full((21,), float("nan"), dtype=dtype), mixed.denormal(21, dtype)]
    yield "chunks-one-poisoned", "poison", torch.cat([*parts, mixed.zeros(21, dtype)]), 4
    yield "empty", "edge", torch.empty(0, dtype=dtype), 1
    yield "empty-chunks", "edge", torch.empty(0, dtype=dtype), 3
    info = torch.finfo(dtype)
    inf, nan = float("inf"), float("nan")
    for name, values in {
        **{f"constant{value:g}": [value] * 5 for value in (0.0, -0.0, 1.0, -1.0, 3.14, -1e-3, 250.0, 65504.0, 1e30, -1e30)},
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
        "infinity": [1.0, inf, 2.0],
        "negative-infinity": [-inf, 1.0, 2.0],
        "both-infinities": [-inf, inf],
        "nan-first": [nan, 1.0, 2.0],
        "nan-last": [1.0, 2.0, nan],
        "nan-in-the-middle": [-1.0] * 20 + [nan] + [5.0] * 20,
        "far-from-zero": [2.0**14 + k for k in range(0, 64, 8)],
        "near-the-end-of-float32": [1e30, 1.5e30, 1.2e30],
        "epsilon-counts": [0.0, 1e-7, 5e-8],
    }.items():
        yield f"edges-{name}", "edge", tensor_of(values, dtype), 1
    if dtype is torch.float32:
        tight = torch.from_numpy(np.array([0x4027C5B4, 0xC018B111], np.uint32).view(np.float32).copy())
        yield "edges-tight-bound", "edge", tight, 1  # exceeds a bound with 2^-22 instead of 1.5*2^-22 (S4.6)
        for exponent in (17, 20, 23):
            start = 2.0**exponent
            steps = tensor_of([start + k * start * 2.0**-23 for k in range(9)], dtype)
            yield f"edges-upper-beyond-2-24-{exponent}", "edge", steps, 1  # lower and upper are rounded, too


_RANGES = ((0, 2), (1, 1e-3), (-5, 0.1), (100, 60), (0.001, 1e-5), (-3000, 6000), (0, 1e-6), (1e5, 3e4), (7, 7), (1e-20, 1e-21))
"""Middles and widths of ranges of ordinary numbers."""


def _near_ties(numbers: Numbers, size: int, dtype: torch.dtype, low: float, high: float) -> Tensor:
    """Return numbers whose products with scale lie within some steps of k + 1/2, where rounding too late or too early shows."""
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
    """Return ends with max*scale close to k + 1/2, where S4.6's bound is tight, and numbers between them."""
    half = numbers.below(254) + 0.5
    low = -(1 + numbers.unit()) * 2.0 ** (numbers.below(16) - 8)
    high = -half * low / (255 - half)
    values = [low, high] + [numbers.between(low, high) for _ in range(14)]
    return tensor_of(values, dtype)


def _single_chunks(dtype: torch.dtype) -> Iterator[Case]:
    """Yield compressions of one chunk into a payload whose other blocks stay (S4.5)."""
    for num_chunks, target in ((1, 0), (3, 0), (3, 1), (4, 3)):
        name = f"target-{target}-of-{num_chunks}"
        numbers = Numbers(seed_of(case_id("codec", "compress_minmax_uint8", name_of(dtype), name)))
        x = numbers.uniform(num_chunks * 37, dtype)
        size = num_chunks * get_codec("MinMaxUInt8", "reference").payload_bytes(x.numel() // num_chunks, dtype)
        before = torch.tensor([numbers.below(256) for _ in range(size)], dtype=torch.uint8)
        after = get_codec("MinMaxUInt8", "reference").compress(x, num_chunks, target, before.clone())
        parameters = {"num_chunks": num_chunks, "target_chunk": target}
        yield Case(
            "codec", "compress_minmax_uint8", "S4.5", name_of(dtype), name,
            {"x": x, "payload": before}, {"payload": after}, parameters, ("edge",),
        )  # fmt: skip


def _any_levels(dtype: torch.dtype) -> Iterator[Case]:
    """Yield payloads with every level, between many ends: what some input could have been compressed to (S4.3)."""
    ends = [(middle - width / 2, middle + width / 2) for middle, width in _RANGES]
    # Scale is 1 here and every other value above 256 is a tie when stored as bfloat16, above 2048 as float16.
    ends += [(45, 300), (-300, -45), (1901, 2156), (-2156, -1901)]
    for place, (low, high) in enumerate(ends):
        if max(abs(low), abs(high)) >= torch.finfo(dtype).max:
            continue
        payload = get_codec("MinMaxUInt8", "reference").compress(tensor_of([low, high] * 128, dtype), 1)
        payload[32:288] = torch.arange(256, dtype=torch.uint8)
        restored = _restored(payload, 1, torch.empty(256, dtype=dtype))
        parameters = {"num_chunks": 1, "num_elements": 256}
        yield Case(
            "codec", "decompress_minmax_uint8", "S4.3", name_of(dtype), f"every-level-{place}",
            {"payload": payload}, {"x": restored}, parameters,
        )  # fmt: skip


def _restored(payload: Tensor, num_chunks: int, like: Tensor) -> Tensor:
    restored = torch.empty_like(like)
    get_codec("MinMaxUInt8", "reference").decompress(payload, num_chunks, restored)
    return canonical(restored)


def _flag_of(payload: Tensor, dtype: torch.dtype, num_chunks: int, flag: str) -> str:
    """Return ``"poison"`` where a chunk was poisoned."""
    headers = payload.view(num_chunks, -1)[:, : dtype.itemsize].clone().view(dtype)
    return "poison" if headers.isnan().any() else flag
