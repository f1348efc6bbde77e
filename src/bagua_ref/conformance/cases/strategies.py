"""Inputs that break number formats and codecs, as Hypothesis strategies.

Short tensors are drawn number by number, as those shrink well. Long ones come from a seed and a
kind: thousands of numbers cost little then, and a check narrows a failure down to the elements that
matter by itself.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

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
    "KINDS",
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
"""Takes a Hypothesis strategy and returns a value."""

KINDS = (
    "tame",
    "ties",
    "bits",
    "near",
    "grid",
    "halfway",
    "narrow",
    "tiny",
    "huge",
    "edges",
    "constant",
    "zeros",
    "epsilon",
)
"""What `bulk` makes: numbers from -4 to 4; few bits, so that sums end in ties; any bits at all;
neighbours; multiples of half a level; as close to half a level as the dtype allows; a small range
far from zero; below the normal numbers; near the largest; edges; all alike; zeros of both signs; a
range and a distance from zero beside which 1e-7 is not small.
"""

_WIDTH = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _edges(dtype: torch.dtype, finite: bool) -> list[float]:
    info = torch.finfo(dtype)
    edges = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        info.max,
        -info.max,
        info.tiny,
        -info.tiny,
        info.tiny / 4,
        -info.tiny / 4,
        1 + info.eps,
    ]
    return edges if finite else [*edges, float("inf"), float("-inf"), float("nan")]


@functools.lru_cache(256)  # making a strategy takes longer than drawing from it
def numbers(dtype: torch.dtype, *, finite: bool = False) -> st.SearchStrategy[float]:
    """Any number of a dtype, with frequent edge cases."""
    limit = torch.finfo(dtype).max
    width = _WIDTH[dtype]
    anything = (
        st.floats(-limit, limit, width=width)  # type: ignore[arg-type]
        if finite
        else st.floats(width=width, allow_nan=True, allow_infinity=True)  # type: ignore[arg-type]
    )
    return st.one_of(
        st.floats(-4, 4, width=width),  # type: ignore[arg-type]
        st.sampled_from(_edges(dtype, finite)),
        anything,
    )


@functools.lru_cache(256)
def adversarial(
    dtype: torch.dtype, size: int, *, finite: bool = False
) -> st.SearchStrategy[Tensor]:
    """Tensors of ``size`` elements, number by number: tame, halves, constant, denormal, huge, or
    anything.
    """
    info = torch.finfo(dtype)

    def make(number: st.SearchStrategy[float]) -> st.SearchStrategy[Tensor]:
        return st.lists(number, min_size=size, max_size=size).map(
            lambda values: torch.tensor(values, dtype=torch.float64).to(dtype)
        )

    return st.one_of(
        make(st.floats(-4, 4)),
        make(st.integers(-600, 600).map(lambda n: n / 2)),
        make(st.integers(-8, 8).map(lambda n: n * info.tiny / 16)),
        make(st.integers(-8, 8).map(lambda n: n / 8 * info.max)),
        make(numbers(dtype, finite=finite)),
        numbers(dtype, finite=finite).map(
            lambda value: torch.full((size,), value, dtype=torch.float64).to(dtype)
        ),
    )


def bulk(dtype: torch.dtype, kind: str, seed: int, size: int, *, finite: bool = False) -> Tensor:
    """Return ``size`` numbers of a kind, the same ones for the same seed."""
    info, generator = torch.finfo(dtype), np.random.default_rng([seed, KINDS.index(kind)])
    digits = round(-np.log2(info.eps)) + 1
    if kind == "bits":
        integer = _BITS[torch.empty((), dtype=dtype).element_size()]
        limits = torch.iinfo(integer)
        drawn = (
            torch.from_numpy(generator.integers(limits.min, limits.max, size, endpoint=True))
            .to(integer)
            .view(dtype)
        )
        return torch.where(drawn.isfinite(), drawn, 1) if finite else drawn
    powers = generator.integers(-8, 4 if digits == 11 else 9)
    makers: dict[str, Callable[[], Any]] = {
        "tame": lambda: generator.uniform(-4, 4, size),
        "ties": lambda: (
            generator.integers(-(2**digits), 2**digits, size)
            * 2.0 ** -generator.integers(0, digits + 1, size)
        ),
        "near": lambda: (
            generator.uniform(1, 4) * (1 + info.eps * generator.integers(-32, 33, size))
        ),
        "grid": lambda: _on_a_grid(generator, size),
        "halfway": lambda: _halfway(generator, size, dtype),
        "narrow": lambda: (
            generator.uniform(-2, 2) * 10.0 ** (powers / 3) + generator.uniform(-1, 1, size) * 1e-6
        ),
        "tiny": lambda: (
            generator.integers(-64, 65, size)
            * (info.tiny * info.eps * 2.0 ** generator.integers(0, digits))
        ),
        "huge": lambda: generator.uniform(-1, 1, size) * info.max,
        "edges": lambda: generator.choice(_edges(dtype, finite), size),
        "constant": lambda: np.full(size, generator.uniform(-4, 4) * 10.0**powers),
        "zeros": lambda: generator.choice([0.0, -0.0, -1.0 if seed % 2 else 1.0], size),
        "epsilon": lambda: (
            generator.choice([-1, 1])
            * (10.0 ** generator.uniform(-9, -5, 2) @ [np.ones(size), generator.random(size)])
        ),
    }
    drawn = torch.from_numpy(np.asarray(makers[kind](), dtype=np.float64)).to(dtype)
    return _with_signs(drawn, generator) if kind == "edges" else drawn


def _with_signs(x: Tensor, generator: np.random.Generator) -> Tensor:
    """Set the sign of half of the NaNs, as x86's invalid operations do; return ``x``."""
    integer = _BITS[x.element_size()]
    some = torch.from_numpy(generator.integers(0, 2, x.shape, dtype=bool))
    x.view(integer)[x.isnan() & some] |= torch.iinfo(integer).min
    return x


def _on_a_grid(
    generator: np.random.Generator, size: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Halves of levels: from low to low + 255 steps, both ends included where there is room."""
    step = 2.0 ** generator.integers(-3, 4)
    low = generator.integers(-600, 600) / 2
    places = generator.integers(0, 511, size) / 2
    places[: min(size, 2)] = [0, 255][: min(size, 2)]
    return np.asarray((low + places) * step, dtype=np.float64)


def _halfway(
    generator: np.random.Generator, size: int, dtype: torch.dtype
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Between any two ends: numbers x with x*scale as near k + 1/2 as x's bits allow, so that one
    wrong bit of scale shows.
    """
    ends = np.sort(generator.uniform(-4, 4, 2) * 10.0 ** generator.integers(-3, 4))
    low, high = torch.from_numpy(ends).to(dtype).float().numpy()
    with np.errstate(all="ignore"):
        scale = np.float32(255) / ((high - low) + np.float32(1e-7))
        places = np.rint(np.float64(high) * scale) - generator.integers(1, 255, size) + 0.5
        values = np.clip(
            (places / scale) * (1 + 2.0**-24 * generator.integers(-2, 3, size)), low, high
        )
    values[: min(size, 2)] = ends[: min(size, 2)]
    return np.asarray(values, dtype=np.float64)


_kinds = st.sampled_from(KINDS)
seeds = st.binary(min_size=4, max_size=4).map(lambda drawn: int.from_bytes(drawn, "big"))
"""Any 32-bit number, all equally likely; for an integer, Hypothesis would prefer small ones."""

_sizes = st.sampled_from([1, 2, 3, 7, 31, 33, 64, 256, 257, 500, 1024, 1025, 4096])


@functools.lru_cache(256)
def tensors(dtype: torch.dtype, size: int, *, finite: bool = False) -> st.SearchStrategy[Tensor]:
    """Tensors of ``size`` elements; short ones are also drawn number by number."""
    long = st.builds(lambda kind, seed: bulk(dtype, kind, seed, size, finite=finite), _kinds, seeds)
    return long if size > 12 else st.one_of(adversarial(dtype, size, finite=finite), long)


def mixed(
    dtype: torch.dtype, count: int, seed: int, size: int, *, finite: bool = False
) -> list[Tensor]:
    """Return ``count`` tensors in which each element is of its own kind, and often the other's
    equal, opposite or neighbour.

    The first places hold every pair of edges.
    """
    generator = np.random.default_rng([seed, 99])
    drawn = [
        bulk(dtype, kind, seed + place, size * count, finite=finite)
        for place, kind in enumerate(_SINGLE)
    ]
    of_kinds = [tensor.view(count, size) for tensor in drawn]
    which = torch.from_numpy(generator.integers(0, len(_SINGLE), (count, size)))
    found = torch.stack(of_kinds).gather(0, which[None])[0]
    relation = torch.from_numpy(generator.integers(0, 12, size))
    neighbour = found[0] * (1 + torch.finfo(dtype).eps)
    for other in found[1:]:
        for number, related in enumerate((found[0], -found[0], neighbour, -neighbour)):
            torch.where(relation == number, related, other, out=other)
    edges = torch.tensor(_edges(dtype, finite), dtype=torch.float64).to(dtype)
    places = torch.arange(min(size, len(edges) ** 2))
    for number, tensor in enumerate(found):
        tensor[: len(places)] = edges[places // len(edges) ** (number % 2) % len(edges)]
    return list(_with_signs(found, generator))


_SINGLE = ("tame", "ties", "bits", "near", "tiny", "huge", "edges", "zeros")


@st.composite
def operands(draw: st.DrawFn, dtype: torch.dtype, count: int) -> list[Tensor]:
    """``count`` flat tensors of one size, possibly empty, mostly long."""
    if draw(st.booleans()):
        size = draw(st.sampled_from([*range(1, 10), *[500, 1025] * 20]))  # few, to shrink to
        return mixed(dtype, count, draw(seeds), size)
    size = draw(st.one_of(st.integers(0, 12), _sizes))
    return [draw(tensors(dtype, size)) for _ in range(count)]


_chunk_sizes = st.one_of(
    st.integers(0, 12), st.sampled_from([0, 1, 2, 31, 32, 33, 64, 65, 100, 255, 300])
)
"""Also sizes that fill a payload's rows of 32 bytes, and that do not."""


@st.composite
def chunked(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Tensor, int]:
    """A flat tensor of equal chunks, each of its own kind, and how many there are: few, many tiny
    ones, or one or two long ones.
    """
    shape = draw(st.sampled_from(["few", "few", "few", "many", "long"]))
    if shape == "many":
        many = [16, 17, 32, 33, 64, 100, 257]
        # few, to shrink to
        num_chunks, size = (
            draw(st.sampled_from([*range(1, 10), *many * 4])),
            draw(st.integers(1, 3)),
        )
        kind = draw(st.sampled_from([kind for kind in _SINGLE if kind != "bits"]))
        return bulk(dtype, kind, draw(seeds), num_chunks * size), num_chunks
    if shape == "long":
        num_chunks, size = (
            draw(st.integers(1, 2)),
            draw(st.sampled_from([256, 257, 512, 1000, 1024, 4097])),
        )
        return torch.cat(
            [bulk(dtype, draw(_kinds), draw(seeds), size) for _ in range(num_chunks)]
        ), num_chunks
    num_chunks, size = draw(st.one_of(st.integers(1, 5), st.integers(1, 9))), draw(_chunk_sizes)
    if draw(st.integers(0, 2)) == 2:
        return torch.cat(mixed(dtype, num_chunks, draw(seeds), size)), num_chunks
    return torch.cat([draw(tensors(dtype, size)) for _ in range(num_chunks)]), num_chunks


@st.composite
def ends_near_half_a_level(draw: st.DrawFn) -> tuple[float, float]:
    """A float32 minimum and maximum with max*scale close to k + 1/2: where S4.6's bound is tight.

    ``max * 255 / (max - min) = k + 1/2`` solved for max, then moved by up to four float32 steps
    either way.
    """
    half = draw(st.one_of(st.integers(0, 254), st.integers(255, 2**18))) + 0.5
    magnitude = draw(st.floats(1, 2, width=32)) * 2.0 ** draw(st.integers(-10, 60))
    low = -magnitude if half < 255 else magnitude
    high = torch.tensor(-half * low / (255 - half), dtype=torch.float32)
    moved = (high.view(torch.int32) + draw(st.integers(-4, 4))).view(torch.float32).item()
    low = torch.tensor(low, dtype=torch.float32).item()
    sign = draw(st.sampled_from([1, -1])) if half > 255 else 1
    low, high_value = sorted((sign * low, sign * moved))
    return low, high_value


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
    """Worlds with an even number of ranks (hierarchical: of leaders); possibly with one rank
    more.
    """
    nodes = draw(worlds(max_ranks))
    return (*nodes, 1) if (len(nodes) if hierarchical else sum(nodes)) % 2 else nodes


_LOWEST = {torch.float16: -24, torch.bfloat16: -133, torch.float32: -149}
_HIGHEST = {torch.float16: 15, torch.bfloat16: 127, torch.float32: 127}


def near_ties(codec: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Return one to four blocks: their largest numbers fix the scales, the others lie at ties, or
    one step beside them.

    Scales reach both ends of the dtype's range. Some blocks are of zeros of both signs, or of
    numbers below the last tie. The largest numbers are often those at which a scale rule changes,
    or of which NVFP4's scale is a tie of E4M3; NVFP4's first block has the chunk's largest.
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
    """Payloads of any bytes, the number of their chunks, and of the elements of each."""
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
    """Blocks of MinMaxUInt8 with any levels between any ends; the gaps hold anything, as nobody
    reads them.
    """
    kind = draw(st.sampled_from(["any", "tame", "near", "largest", "epsilon"]))
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
    """Return payloads of any bytes; scales and codes are often at the ends of their range, and the
    float32 of OneBit and NVFP4 is any.
    """
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(
        0, 256, (num_chunks, payload_size(codec, size)), dtype=torch.uint8, generator=generator
    )
    if size and codec in FORMATS:
        edges = torch.tensor([0, 1, 2, 118, 127, 252, 253, 254, 255], dtype=torch.uint8)
        start, blocks = FORMATS[codec].header, -(-size // FORMATS[codec].block)
        picked = edges[torch.randint(0, len(edges), (num_chunks, blocks), generator=generator)]
        codes = torch.tensor([0, 1, 0x7E, 0x7F, 0x80, 0xFF], dtype=torch.uint8)
        rare = codes[torch.randint(0, len(codes), found.shape, generator=generator)]
        found = torch.where(torch.rand(found.shape, generator=generator) < 0.2, rare, found)
        scales = found[:, start : start + blocks]
        scales[:] = torch.where(
            torch.rand(num_chunks, blocks, generator=generator) < 0.5, picked, scales
        )
    if size and codec in ("OneBit", "NVFP4"):
        scales = torch.tensor(
            [0.0, -0.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan"), 3e38, 1e-45, 7e4]
        )
        picked = scales[torch.randint(0, 20, (num_chunks,), generator=generator) % len(scales)]
        keep = torch.rand(num_chunks, generator=generator) < 0.3
        found[~keep, :4] = picked.view(-1, 1).view(torch.uint8)[~keep]
    return found.view(-1)
