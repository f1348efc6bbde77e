"""Inputs that break number formats and codecs, as Hypothesis strategies.

Short tensors are drawn element by element, which shrinks well. Long ones come from a seed and a
kind: thousands of numbers are then cheap to draw, and a check itself narrows a failure down to the
elements that matter.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.cases.numbers import Numbers, bulk, edges
from bagua_ref.conformance.cases.table import COMPRESSIBLE, FLOATS
from bagua_ref.conformance.cases.tensor_files import dtype_named, name_of
from bagua_ref.conformance.expected.codecs_scalar import (
    FORMATS,
    MINMAX,
    Elements,
    payload_size,
    scale_of,
)

__all__ = [
    "COMPRESSIBLE",
    "FLOATS",
    "Draw",
    "adversarial",
    "bulk",
    "chunked",
    "dtype_named",
    "ends_near_half_a_level",
    "mixed",
    "name_of",
    "near_ties",
    "numbers",
    "operands",
    "paired_worlds",
    "payloads",
    "seeds",
    "tensors",
    "worlds",
]

Draw = Callable[[Any], Any]
"""Function that draws from a Hypothesis strategy and returns the value."""

_SINGLE = ("tame", "ties", "near", "tiny", "huge", "edges", "sparse", "bits")
"""Kinds of numbers that are drawn independently of each other."""
_kinds = st.sampled_from([*_SINGLE, "wide", "grid", "halfway", "narrow", "constant", "epsilon"])

_WIDTH = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}


def _edges(dtype: torch.dtype, finite: bool) -> list[float]:
    positive = edges(torch.finfo(dtype))[: -2 if finite else None]
    return [*positive, *(-x for x in positive)]


@functools.lru_cache(256)  # making a strategy takes longer than drawing from it
def numbers(dtype: torch.dtype, *, finite: bool = False) -> st.SearchStrategy[float]:
    """Any number of a dtype, often an edge case."""
    limit, width = torch.finfo(dtype).max, _WIDTH[dtype]
    return st.one_of(
        st.floats(-4, 4, width=width),  # type: ignore[arg-type]
        st.sampled_from(_edges(dtype, finite)),
        st.floats(-limit, limit, width=width)  # type: ignore[arg-type]
        if finite
        else st.floats(width=width),  # type: ignore[arg-type]
    )


@functools.lru_cache(256)
def adversarial(
    dtype: torch.dtype, size: int, *, finite: bool = False
) -> st.SearchStrategy[Tensor]:
    """Tensors of ``size`` elements, each drawn separately."""
    halves = st.integers(-600, 600).map(lambda n: n / 2)
    return st.one_of(
        *(
            st.lists(x, min_size=size, max_size=size)
            for x in (halves, numbers(dtype, finite=finite))
        )
    ).map(lambda values: torch.tensor(values, dtype=torch.float64).to(dtype))


seeds = st.binary(min_size=4, max_size=4).map(lambda drawn: int.from_bytes(drawn, "big"))
"""Any 32-bit number, all equally likely; with an integer strategy, Hypothesis would prefer small
ones.
"""

_sizes = st.sampled_from([1, 2, 3, 7, 31, 33, 64, 256, 257, 500, 1024, 1025, 4096])


@functools.lru_cache(256)
def tensors(dtype: torch.dtype, size: int, *, finite: bool = False) -> st.SearchStrategy[Tensor]:
    """Tensors of ``size`` elements; elements of short ones may be drawn separately."""
    long = st.builds(lambda kind, seed: bulk(dtype, kind, seed, size, finite=finite), _kinds, seeds)
    return long if size > 12 else st.one_of(adversarial(dtype, size, finite=finite), long)


def mixed(
    dtype: torch.dtype, count: int, seed: int, size: int, *, finite: bool = False
) -> list[Tensor]:
    """Return ``count`` tensors with a random kind for each element, which is often equal to,
    opposite to or next to another tensor's.

    The first elements contain every pair of edge cases.
    """
    chosen = Numbers("mixed", str(seed))
    of_kinds = [
        bulk(dtype, kind, seed + place, size * count, finite=finite).view(count, size)
        for place, kind in enumerate(_SINGLE)
    ]
    which = chosen.integers([1, count, size], len(_SINGLE))
    found, relation = torch.stack(of_kinds).gather(0, which)[0], chosen.integers([size], 12)
    neighbour = found[0] * (1 + torch.finfo(dtype).eps)
    for other in found[1:]:
        for number, related in enumerate((found[0], -found[0], neighbour, -neighbour)):
            torch.where(relation == number, related, other, out=other)
    ends = torch.tensor(_edges(dtype, finite), dtype=torch.float64).to(dtype)
    places = torch.arange(min(size, len(ends) ** 2))
    for number, tensor in enumerate(found):
        tensor[: len(places)] = ends[places // len(ends) ** (number % 2) % len(ends)]
    return list(found)


@st.composite
def operands(draw: st.DrawFn, dtype: torch.dtype, count: int) -> list[Tensor]:
    """``count`` flat tensors of one size, possibly empty, mostly long."""
    if draw(st.booleans()):
        size = draw(st.sampled_from([*range(1, 10), *[500, 1025] * 20]))  # few: to shrink
        return mixed(dtype, count, draw(seeds), size)
    size = draw(st.one_of(st.integers(0, 12), _sizes))
    return [draw(tensors(dtype, size)) for _ in range(count)]


_chunk_sizes = st.one_of(
    st.integers(0, 12), st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 100, 255, 300])
)
"""Chunk sizes, including multiples of a payload's rows of 32 bytes, and others."""


@st.composite
def chunked(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Tensor, int]:
    """A flat tensor of equal chunks, each of its own kind, and the number of chunks: few, many tiny
    ones, or one or two long ones.
    """
    few = st.tuples(st.integers(1, 5) | st.integers(1, 9), _chunk_sizes)
    counts = st.sampled_from([*range(1, 10), *[16, 17, 32, 33, 64, 100, 257] * 4])  # few: to shrink
    many = st.tuples(counts, st.integers(1, 3))
    long = st.tuples(st.integers(1, 2), st.sampled_from([256, 257, 512, 1000, 1024, 4097]))
    num_chunks, size = draw(st.one_of(few, few, few, many, long))
    if draw(st.integers(0, 2)) == 2:
        return torch.cat(mixed(dtype, num_chunks, draw(seeds), size)), num_chunks
    if num_chunks > 9:
        kind = draw(st.sampled_from(_SINGLE[:-1]))  # arbitrary bits: too many NaNs
        return bulk(dtype, kind, draw(seeds), num_chunks * size), num_chunks
    return torch.cat([draw(tensors(dtype, size)) for _ in range(num_chunks)]), num_chunks


@st.composite
def ends_near_half_a_level(draw: st.DrawFn) -> tuple[float, float]:
    """A float32 minimum and maximum with max*scale close to k + 1/2, where S4.6's bound is tight;
    the maximum is moved by up to four float32 steps either way.
    """
    low, high = Numbers(str(draw(seeds))).of("half a level", [2], "float32")
    moved = (high.view(torch.int32) + draw(st.integers(-4, 4))).view(torch.float32)
    return low.item(), max(low, moved).item()


@st.composite
def worlds(draw: st.DrawFn, max_ranks: int = 9, least_nodes: int = 1) -> tuple[int, ...]:
    """Ranks per node: 1 to ``max_ranks`` ranks on 1 to 4 uneven nodes."""
    n = draw(st.integers(least_nodes, max_ranks))
    cuts = (
        sorted(draw(st.sets(st.integers(1, n - 1), min_size=least_nodes - 1, max_size=3)))
        if n > 1
        else []
    )
    return tuple(end - start for start, end in zip([0, *cuts], [*cuts, n], strict=True))


@st.composite
def paired_worlds(draw: st.DrawFn, hierarchical: bool, max_ranks: int = 8) -> tuple[int, ...]:
    """Worlds with an even number of ranks (hierarchical: of leaders); optionally with one more
    rank.
    """
    nodes = draw(worlds(max_ranks))
    return (*nodes, 1) if (len(nodes) if hierarchical else sum(nodes)) % 2 else nodes


_LOWEST = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149}
_HIGHEST = {torch.float16: 15, torch.bfloat16: 127, torch.float32: 127}


def near_ties(codec: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Return one to four blocks: their largest numbers determine the scales, the others are ties or
    one step off a tie.

    Scales reach both ends of the dtype's range. Some blocks consist of zeros of both signs, or of
    numbers below the last tie. The largest number is often one at which a scale rule changes, or
    for which NVFP4's scale is a tie of E4M3; NVFP4's first block contains the chunk's largest
    number.
    """
    drawn = random.Random(seed)  # noqa: S311 # reproducible, not secret
    form, scales, values, chunk = FORMATS[codec], FORMATS["MXFP8"], [], 0.0

    def tie(of: Elements, code: int) -> float:
        return (of.numbers[code] + of.numbers[code + 1]) / 2

    for _ in range(drawn.randint(1, 4)):
        top = drawn.choice(
            [
                _LOWEST[dtype],
                _HIGHEST[dtype],
                drawn.randint(_LOWEST[dtype], _HIGHEST[dtype]),
                drawn.randint(-3, 3),
                max(_LOWEST[dtype], form.emax - 127),
            ]
        )
        largest = 2.0**top * drawn.choice([1, 1.5, 1.75, 2 - 2.0**-4, 2 - 2.0**-7, 2 - 2.0**-8])
        if codec == "NVFP4" and chunk:
            largest = tie(scales, drawn.randrange(126)) * chunk / 448
        chunk = chunk or largest
        scale = scale_of(codec, largest, chunk)
        values.append(drawn.choice([-1, 1]) * largest)
        for _ in range(drawn.choice([0, 1, form.block - 1, form.block - 1])):
            code = drawn.randrange(drawn.choice([len(form.numbers) - 1, len(form.numbers) - 1, 4]))
            between = tie(form, code) * scale
            values.append(
                drawn.choice([-1, 1])
                * drawn.choice([between, between, form.numbers[code] * scale, largest, 0.0])
            )
    x = (
        torch.tensor(values, dtype=torch.float64)
        .clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        .to(dtype)
    )
    steps = torch.tensor([drawn.choice([0, 0, 1, -1]) for _ in values])
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
    moved = (bits + steps.to(bits.dtype)).view(dtype)
    # A step from zero, or past the largest number, would change the sign or make an infinity.
    return torch.where(moved.isfinite() & (x != 0), moved, x)


@st.composite
def payloads(draw: st.DrawFn, codec: str, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """Payloads of arbitrary bytes, the number of chunks, and the number of elements per chunk."""
    if codec == MINMAX:
        size = draw(st.one_of(st.integers(0, 40), st.sampled_from([32, 256])))
        blocks = [draw(_levels(dtype, size)) for _ in range(draw(st.integers(1, 4)))]
        return torch.tensor(list(b"".join(blocks)), dtype=torch.uint8), len(blocks), size
    num_chunks, size = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([0, 1, 2, 31, 32, 33, 70, 257])),
    )
    return _scales_and_elements(codec, num_chunks, size, draw(seeds)), num_chunks, size


@st.composite
def _levels(draw: st.DrawFn, dtype: torch.dtype, size: int) -> bytes:
    """MinMaxUInt8 payloads with arbitrary levels, minima, maxima and gaps; readers must ignore the
    gaps.
    """
    kind = draw(st.sampled_from(["tame", "near", "epsilon", "bits", "edges", "edges"]))
    ends = bulk(dtype, kind, draw(seeds), 2, finite=True).sort().values
    header = bytes(ends.view(torch.uint8).tolist())
    body = draw(st.sampled_from([b"", b"\0\xff"])) + draw(st.binary(min_size=size, max_size=size))
    body = bytes(range(256)) if size == 256 else body[:size]
    filling = draw(st.sampled_from([b"\0", b"\xff"]))
    return (header.ljust(32, filling) + body).ljust(payload_size(MINMAX, size), filling)


def _scales_and_elements(codec: str, num_chunks: int, size: int, seed: int) -> Tensor:
    """Payloads of arbitrary bytes; scales and codes are often extreme, and the float32 of OneBit
    and NVFP4 is arbitrary.
    """
    chosen = Numbers("payloads", str(seed))
    shape = [num_chunks, payload_size(codec, size)]
    found = chosen.integers(shape, 256).to(torch.uint8)
    if size and codec in FORMATS:
        ends = torch.tensor([0, 1, 2, 118, 126, 127, 128, 252, 253, 254, 255], dtype=torch.uint8)
        rare = ends[chosen.integers(shape, len(ends))]
        start, blocks = FORMATS[codec].header, -(-size // FORMATS[codec].block)
        share = torch.full(shape, 0.2)
        share[:, start : start + blocks] = 0.5
        found = torch.where(torch.from_numpy(chosen.unit(*shape)) < share, rare, found)
    if size and codec in ("OneBit", "NVFP4"):
        scales = torch.tensor(
            [0.0, -0.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan"), 3e38, 1e-45, 7e4]
        )
        changed = torch.from_numpy(chosen.unit(num_chunks)) < 0.7
        picked = scales[chosen.integers([num_chunks, 1], len(scales))].view(torch.uint8)
        found[changed, :4] = picked[changed]
    return found.view(-1)
