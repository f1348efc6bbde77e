"""torchao's block formats in eager mode: scales and elements of MX with each scale rule, and of
NVFP4.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from findings.common import DIFFERS, Row, judged

from bagua_ref.conformance.expected.codecs_scalar import compress_chunk, payload_size
from bagua_ref.conformance.expected.tolerances import EXACT, assert_equal

PEER = "torchao==0.18.0"
BLOCKS = {"MXFP8": 32, "MXFP4": 32, "NVFP4": 16}
EDGES = {"MXFP8": (1.0, 1.75, 1.9375), "MXFP4": (1.0, 1.5, 1.75)}


def of_largest(tops: torch.Tensor, size: int) -> torch.Tensor:
    """Return a block for each largest number: it, and others from -0.9 to 0.9 of it."""
    return torch.outer(tops, torch.cat([torch.ones(1), torch.linspace(-0.9, 0.9, size - 1)]))


def at_edges(codec: str) -> torch.Tensor:
    """Return blocks whose largest numbers are the edges of the scale rules times powers of two, or
    beside them.
    """
    exponents = range(-100, 101)
    steps = [0.0, *(sign * 2.0**-k for k in range(4, 24) for sign in (1, -1))]
    edges = EDGES[codec.partition("-")[0]]
    tops = [edge * (1 + step) * 2.0**e for edge in edges for e in exponents for step in steps]
    return of_largest(torch.tensor(tops), 32)


def beside_ties(low: float) -> torch.Tensor:
    """Return blocks of which the first has the chunk's largest number, and the others those of
    which scales are nearly ties of E4M3, times ``low``.
    """
    numbers = torch.arange(9, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2 * (LARGEST / 448) * low
    tops = torch.cat([ties * (1 + step * 2.0**-23) for step in range(-3, 4)])
    return of_largest(torch.cat([torch.tensor([LARGEST]), tops]), 16)


LARGEST = 2.7182817


def complaint(codec: str, x: torch.Tensor) -> str | None:
    """Return how torchao's scales of these blocks differ from the specification's, or elements of
    blocks with the same scale do.
    """
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    name, _, rule = codec.partition("-")
    count, size = len(x), BLOCKS[name]
    if name == "NVFP4":
        factor = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
        scales, elements = nvfp4_tensor.nvfp4_quantize(x.view(1, -1), per_tensor_scale=factor)
        payload = compress_chunk(codec, x.view(-1).tolist(), "float32")[32:]
        wanted = payload[:count], payload[count : count + count * size // 2]
    else:
        mode = ScaleCalculationMode[rule or "FLOOR"]
        kind = torch.float8_e4m3fn if name == "MXFP8" else torch.float4_e2m1fn_x2
        scales, elements = mx_tensor.to_mx(x, kind, size, mode)
        of_blocks = [compress_chunk(codec, block, "float32") for block in x.tolist()]
        used = payload_size(codec, size) - 31 if name == "MXFP8" else 1 + size // 2
        wanted = (
            b"".join(block[:1] for block in of_blocks),
            b"".join(block[1:used] for block in of_blocks),
        )
    found = (t.contiguous().view(torch.uint8).view(count, -1) for t in (scales, elements))
    expected = (torch.tensor(list(data), dtype=torch.uint8).view(count, -1) for data in wanted)
    same: Any = slice(None)
    for what, got, right in zip(("scales", "elements"), found, expected, strict=True):
        try:
            assert_equal(got[same], right[same], EXACT)
        except AssertionError as error:
            return f"{what}: {error}"
        same = (got == right).all(1)
    return None


def of_both(rule: str) -> str | None:
    """Return the complaint about MXFP8, or else about MXFP4, with a scale rule."""
    for codec in (f"MXFP8{rule}", f"MXFP4{rule}"):
        if (found := complaint(codec, at_edges(codec))) is not None:
            return f"{codec}: {found}"
    return None


GIVEN = "Blocks of 32 float32: a largest number, and 31 from -0.9 to 0.9 of it"
RCEIL = {
    "why": (
        "The exponent is ceil(log2(max / largest)) with log2 in float32, which rounds a logarithm"
        " just above an integer to it: the scale is then half of what it should be, and the largest"
        " element saturates. Compiled for Blackwell, an instruction rounds up."
    ),
    "promise": (
        "The scale is NVIDIA's, the ratio of largest and maximum rounded up; the compiled code's is."
    ),
    "given": f"{GIVEN}, from 2^-100 to 2^100",
    "effect": "A few millionths of a block's largest number, and rarely: none on training.",
}
SMALLEST = {
    "why": (
        "Scale byte 0 is 2^-127 when a block is decoded, but elements are divided by 2^-126, or"
        " with RCEIL by 1."
    ),
    "promise": "What is decoded is what was compressed, up to rounding.",
    "given": f"{GIVEN}, 1.25 times a power of two from 2^-140 to 2^-120",
    "effect": (
        "Numbers of such blocks come back as half of them, with RCEIL as 0. Gradients are seldom so"
        " small."
    ),
}
NVFP4 = {
    "low": {
        "why": "Scales of blocks are at least 2^-6; those of the specification go down to 2^-9 and 0.",
        "promise": "Nothing is said of it.",
        "effect": "Blocks 28,672 times smaller than the largest number, or more, are coarser.",
    },
    "order": {
        "why": "(b/6)/t is formed instead of b*(S/6), and each rounds at other places.",
        "promise": "Nothing is said of the order of operations.",
        "effect": "None: scales at ties of E4M3 are rounded to the other side.",
    },
}


def find() -> Iterator[Row]:
    mx = partial(judged, f"torchao to_mx, eager ({PEER})")
    for rule in ("", "-EVEN", "-CEIL", "-RCEIL"):
        clause, name = ("S12.6", rule[1:]) if rule else ("S12.1", "FLOOR")
        words = RCEIL if rule == "-RCEIL" else {"given": RCEIL["given"]}
        yield mx(clause, f"scale rule {name}", of_both(rule), **words)
    small = of_largest(torch.tensor([1.25 * 2.0**e for e in range(-140, -119)]), 32)
    for rule, clause in (("", "S12.1"), ("-RCEIL", "S12.6")):
        case = f"the smallest scale, {rule[1:] or 'FLOOR'}"
        yield mx(clause, case, complaint(f"MXFP8{rule}", small), **SMALLEST)
    for case, words, low in (
        ("scales beside ties", NVFP4["order"], 1.0),
        ("blocks far below the largest", NVFP4["low"], 2.0**-9),
    ):
        yield judged(
            f"torchao nvfp4_quantize ({PEER})",
            "S12.7",
            case,
            complaint("NVFP4", beside_ties(low)),
            DIFFERS,
            given=f"Blocks of 16 float32 with a factor of the largest, {LARGEST} / 2688",
            **words,
        )
