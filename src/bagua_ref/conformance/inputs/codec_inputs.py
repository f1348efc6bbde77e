"""Inputs that are hard for codecs: numbers next to the ties of an element format, and payloads of any bytes."""

from __future__ import annotations

import random

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected.codecs_scalar import BLOCK, FORMATS, MINMAX, payload_size
from bagua_ref.conformance.inputs.strategies import bulk, numbers, seeds

__all__ = ["near_ties", "payloads"]

_LOWEST = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149}
_HIGHEST = {torch.float16: 15, torch.bfloat16: 127, torch.float32: 127}


def near_ties(codec: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Return one to four blocks: their largest numbers fix the scales, the others lie at ties, or one step beside them.

    Scales reach both ends of the dtype's range. Some blocks are of zeros of both signs, or of numbers below the last tie.
    """
    drawn = random.Random(seed)  # nosec B311 # reproducible, not secret
    form, values = FORMATS[codec], []
    for _ in range(drawn.randint(1, 4)):
        top = drawn.choice([_LOWEST[dtype], _HIGHEST[dtype], drawn.randint(_LOWEST[dtype], _HIGHEST[dtype]), drawn.randint(-3, 3)])
        largest = 2.0**top * drawn.choice([1, 1.5, 1.75, 2 - 2.0**-7, 2 - 2.0**-8])
        scale = 2.0 ** max(-127, min(127, top - form.emax))
        values.append(drawn.choice([-1, 1]) * largest)
        for _ in range(drawn.choice([0, 1, BLOCK - 1, BLOCK - 1])):
            code = drawn.randrange(drawn.choice([len(form.numbers) - 1, len(form.numbers) - 1, 4]))
            tie = (form.numbers[code] + form.numbers[code + 1]) / 2 * scale
            values.append(drawn.choice([-1, 1]) * drawn.choice([tie, tie, form.numbers[code] * scale, largest, 0.0]))
    x = torch.tensor(values, dtype=torch.float64).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    steps = torch.tensor([drawn.choice([0, 0, 1, -1]) for _ in values])
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
    moved = (bits + steps.to(bits.dtype)).view(dtype)
    # A step from zero, or past the largest number, would change the sign or make an infinity.
    return torch.where(moved.isfinite() & (x != 0), moved, x)


@st.composite
def payloads(draw: st.DrawFn, codec: str, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """Payloads of any bytes, the number of their chunks, and of the elements of each."""
    if codec == MINMAX:
        size = draw(st.one_of(st.integers(0, 40), st.sampled_from([32, 256])))
        blocks = [draw(_levels(dtype, size)) for _ in range(draw(st.integers(1, 4)))]
        return torch.tensor(list(b"".join(blocks)), dtype=torch.uint8), len(blocks), size
    num_chunks, size = draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 2, 31, 32, 33, 70, 257]))
    return _scales_and_elements(codec, num_chunks, size, draw(seeds)), num_chunks, size


@st.composite
def _levels(draw: st.DrawFn, dtype: torch.dtype, size: int) -> bytes:
    """Blocks of MinMaxUInt8 with any levels between any ends; the gaps hold anything, as nobody reads them."""
    kind = draw(st.sampled_from(["any", "tame", "near", "largest"]))
    if kind == "largest":  # one end is, and levels may lie beyond it
        largest = torch.finfo(dtype).max
        end = draw(st.sampled_from([-largest, largest]))
        ends = sorted([end, end * draw(st.floats(-1 if dtype is torch.float16 else 0, 1))])
    elif kind == "any":
        ends = sorted(draw(st.tuples(numbers(dtype, finite=True), numbers(dtype, finite=True))))
    else:
        ends = sorted(bulk(dtype, kind, draw(seeds), 2).tolist())
    header = bytes(torch.tensor(ends, dtype=torch.float64).to(dtype).view(torch.uint8).tolist())
    body = bytes(range(256)) if size == 256 else draw(st.binary(min_size=size, max_size=size))
    if kind == "largest":
        body = (b"\0\xff" + body)[:size]
    filling = draw(st.sampled_from([b"\0", b"\xff"]))
    return (header.ljust(32, filling) + body).ljust(payload_size(MINMAX, size), filling)


def _scales_and_elements(codec: str, num_chunks: int, size: int, seed: int) -> Tensor:
    """Return payloads of any bytes; scales and codes are often at the ends of their range, and OneBit's any float32."""
    generator = torch.Generator().manual_seed(seed)
    block = payload_size(codec, size)
    found = torch.randint(0, 256, (num_chunks, block), dtype=torch.uint8, generator=generator)
    if block and codec == "OneBit":
        scales = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan"), 3e38, 1e-45, 7e4])
        picked = scales[torch.randint(0, 20, (num_chunks,), generator=generator) % len(scales)]
        keep = torch.rand(num_chunks, generator=generator) < 0.3
        found[~keep, :4] = picked.view(-1, 1).view(torch.uint8)[~keep]
    elif block:
        edges = torch.tensor([0, 1, 2, 118, 127, 252, 253, 254, 255], dtype=torch.uint8)
        blocks = -(-size // BLOCK)
        picked = edges[torch.randint(0, len(edges), (num_chunks, blocks), generator=generator)]
        codes = torch.tensor([0, 1, 0x7E, 0x7F, 0x80, 0xFF], dtype=torch.uint8)
        rare = codes[torch.randint(0, len(codes), found.shape, generator=generator)]
        found = torch.where(torch.rand(found.shape, generator=generator) < 0.2, rare, found)
        found[:, :blocks] = torch.where(torch.rand(num_chunks, blocks, generator=generator) < 0.5, picked, found[:, :blocks])
    return found.view(-1)
