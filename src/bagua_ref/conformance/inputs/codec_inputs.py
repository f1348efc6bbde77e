"""Inputs that are hard for the codecs of S12: numbers next to the ties of an element format, and payloads of any bytes."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from bagua_ref.conformance.expected.codecs_scalar import BLOCK, FORMATS, payload_size

__all__ = ["any_payload", "near_ties"]

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


def any_payload(codec: str, num_chunks: int, size: int, seed: int) -> Tensor:
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
