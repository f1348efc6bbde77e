"""MinMaxUInt8 compared with a scalar implementation (S4)."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected import codec_scalar
from bagua_ref.conformance.inputs.strategies import (
    COMPRESSIBLE,
    Draw,
    bulk,
    chunked,
    dtype_named,
    ends_near_half_a_level,
    numbers,
    seeds,
    tensors,
)
from bagua_ref.conformance.lab.lab import KernelCall, Lab
from bagua_ref.conformance.lab.violation import Violation, literal
from bagua_ref.conformance.suites.checks import check

_NEEDS = ("MinMaxUInt8",)


def _compress(lab: Lab, x: Tensor, num_chunks: int, target: int | None = None, out: Tensor | None = None) -> KernelCall:
    arguments = {"x": x, "num_chunks": num_chunks, "target_chunk": target, "out": out}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return lab.call("MinMaxUInt8.compress", arguments, ("out",) if out is not None else ())


def _decompress(lab: Lab, payload: Tensor, num_chunks: int, count: int) -> KernelCall:
    arguments = {"payload": payload, "num_chunks": num_chunks, "out": torch.full((count,), 7).to(lab.dtype)}
    return lab.call("MinMaxUInt8.decompress", arguments, ("out",))


def _blocks(lab: Lab, x: Tensor, num_chunks: int) -> list[bytes]:
    """Return the expected block of each chunk."""
    rows = x.view(num_chunks, x.numel() // num_chunks).tolist()
    return [codec_scalar.compress_chunk(row, lab.dtype_name) for row in rows]


def _bytes(blocks: list[bytes]) -> Tensor:
    return torch.tensor(list(b"".join(blocks)), dtype=torch.uint8)


def _values(lab: Lab, blocks: list[bytes], size: int) -> Tensor:
    """Return the expected decompressed values of blocks."""
    found = [value for block in blocks for value in codec_scalar.decompress_chunk(block, size, lab.dtype_name)]
    return torch.tensor(found, dtype=torch.float64).to(lab.dtype)


def _check_payload(lab: Lab, x: Tensor, num_chunks: int, out: Tensor | None) -> None:
    """Compare a payload byte by byte; show a failure on one chunk, or a few of its elements, if these fail, too."""
    wanted = _bytes(_blocks(lab, x, num_chunks))
    call = _compress(lab, x, num_chunks, out=out)
    name = "result" if out is None else "out"
    try:
        lab.compare(call, name, wanted)
        if out is not None and call.results.get("result is out") is False:
            raise Violation(
                "MinMaxUInt8.compress: the result is not the tensor that was given as out",
                lab.script(call, "assert result is out"),
            )
    except Violation:
        actual = call.results[name]
        if isinstance(actual, Tensor) and actual.shape == wanted.shape and actual.dtype is torch.uint8:
            wrong = (actual != wanted).view(num_chunks, -1)
            bad = int(wrong.any(dim=1).int().argmax())
            chunk = x.view(num_chunks, -1)[bad]
            if num_chunks > 1:
                _check_payload(lab, chunk.clone(), 1, None)
            elif chunk.numel() > 3:
                place = max(0, int(wrong[0].int().argmax()) - codec_scalar.HEADER)
                ends = [int(chunk.double().argmin()), int(chunk.double().argmax()), min(place, chunk.numel() - 1)]
                _check_payload(lab, chunk[ends].clone(), 1, None)
        raise


@check("codec", "S4.2", "levels", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=2)
def levels(lab: Lab, draw: Draw) -> None:
    """Every byte of the payload is as specified."""
    x, num_chunks = draw(chunked(lab.dtype))
    _check_payload(lab, x, num_chunks, None)


@check("codec", "S4.2", "halfway", dtypes=COMPRESSIBLE, needs=_NEEDS)
def halfway_levels(lab: Lab, draw: Draw) -> None:
    """Levels are correct where x*scale is as close to k + 1/2 as possible."""
    _check_payload(lab, bulk(lab.dtype, "halfway", draw(seeds), 300), 1, None)


@check("codec", "S4.1", "gaps", dtypes=COMPRESSIBLE, needs=_NEEDS)
def gaps(lab: Lab, draw: Draw) -> None:
    """A payload passed as out is filled completely, with zeros in its gaps."""
    x, num_chunks = draw(chunked(lab.dtype))
    garbage = draw(st.sampled_from([255, 1, 127]))
    _check_payload(
        lab, x, num_chunks, torch.full((num_chunks * codec_scalar.block_size(x.numel() // num_chunks),), garbage, dtype=torch.uint8)
    )


@check("codec", "S4.1", "header", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=0.5)
def header(lab: Lab, draw: Draw) -> None:
    """The header holds the minimum and maximum, with -0 as +0."""
    zeros = st.lists(st.sampled_from([0.0, -0.0]), min_size=1, max_size=4)
    others = draw(st.sampled_from([[], [1.0], [-1.0]]))
    x = torch.tensor(draw(zeros) + others + draw(zeros), dtype=lab.dtype)
    _check_payload(lab, x, 1, None)


@check("codec", "S4.1", "fresh", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=0.3)
def fresh(lab: Lab, draw: Draw) -> None:
    """A payload does not change when others are made: its buffer is not reused."""
    size, num_chunks = draw(st.sampled_from([1, 5, 40])), draw(st.integers(1, 3))
    inputs = [bulk(lab.dtype, "tame", draw(seeds), size * num_chunks) for _ in range(2)]
    first = _compress(lab, inputs[0], num_chunks)
    _compress(lab, inputs[1], num_chunks)
    lab.compare(first, "result", _bytes(_blocks(lab, inputs[0], num_chunks)))


@check("codec", "S4.3", "round_trip", dtypes=COMPRESSIBLE, needs=_NEEDS)
def round_trip(lab: Lab, draw: Draw) -> None:
    """A compressed tensor decompresses to the specified values."""
    x, num_chunks = draw(chunked(lab.dtype))
    payload = _compress(lab, x, num_chunks).results["result"]
    wanted = _values(lab, _blocks(lab, x, num_chunks), x.numel() // num_chunks)
    if (
        not isinstance(payload, Tensor)
        or payload.shape != (num_chunks * codec_scalar.block_size(x.numel() // num_chunks),)
        or payload.dtype != torch.uint8
    ):
        raise Violation(f"MinMaxUInt8.compress: {literal(payload)[:80]} instead of a payload", "")
    lab.compare(_decompress(lab, payload, num_chunks, x.numel()), "out", wanted)


@st.composite
def _payloads(draw: st.DrawFn, dtype: torch.dtype) -> tuple[list[bytes], int]:
    """Blocks of any levels between any ends; the gaps hold anything, as nobody reads them."""
    size = draw(st.one_of(st.integers(0, 40), st.sampled_from([32, 256])))
    blocks = []
    for _ in range(draw(st.integers(1, 4))):
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
        blocks.append((header.ljust(32, filling) + body).ljust(codec_scalar.block_size(size), filling))
    return blocks, size


@check("codec", "S4.3", "any_levels", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=1.5)
def any_levels(lab: Lab, draw: Draw) -> None:
    """Any levels with any minimum and maximum decompress as specified."""
    blocks, size = draw(_payloads(lab.dtype))
    _check_values(lab, blocks, size)


def _check_values(lab: Lab, blocks: list[bytes], size: int) -> None:
    wanted = _values(lab, blocks, size)
    call = _decompress(lab, _bytes(blocks), len(blocks), size * len(blocks))
    try:
        lab.compare(call, "out", wanted)
    except Violation:
        for block in blocks if len(blocks) > 1 else []:
            _check_values(lab, [block], size)
        raise


@check("codec", "S4.4", "poison", dtypes=COMPRESSIBLE, needs=_NEEDS)
def poison(lab: Lab, draw: Draw) -> None:
    """A chunk that is not finite, or overflows, is poisoned and decompresses to NaN; other chunks are not affected."""
    size, num_chunks = draw(st.sampled_from([1, 2, 5, 33, 100])), draw(st.integers(1, 4))
    x = torch.cat([draw(tensors(lab.dtype, size, finite=True)) for _ in range(num_chunks)])
    bad, place = draw(st.integers(0, num_chunks - 1)), draw(st.one_of(st.integers(0, size - 1), st.sampled_from([0, size - 1])))
    x[bad * size + place] = draw(st.sampled_from([math.inf, -math.inf, math.nan]))
    _check_payload(lab, x, num_chunks, None)
    call = _decompress(lab, _bytes(_blocks(lab, x, num_chunks)), num_chunks, x.numel())
    lab.compare(call, "out", _values(lab, _blocks(lab, x, num_chunks), size))


@check("codec", "S4.4", "overflow", dtypes=COMPRESSIBLE, needs=_NEEDS)
def overflow(lab: Lab, draw: Draw) -> None:
    """A chunk is poisoned exactly when its range, or its minimum or maximum times scale, overflows."""
    largest = torch.finfo(lab.dtype).max
    ends = st.one_of(
        st.floats(-1, 1).map(lambda place: place * largest),
        st.sampled_from([largest, -largest, largest / 2, -largest / 2, 0.0]),
        st.floats(28, 30).map(lambda power: min(10.0**power, largest)),
    )
    low, high = draw(ends), draw(ends)
    kind = draw(st.sampled_from(["pair", "constant", "one"]))
    values = {"pair": [low, high, low], "constant": [high] * 3, "one": [high]}[kind]
    _check_payload(lab, torch.tensor(values, dtype=torch.float64).to(lab.dtype), 1, None)


@check("codec", "S4.5", "target_chunk", dtypes=COMPRESSIBLE, needs=_NEEDS)
def target_chunk(lab: Lab, draw: Draw) -> None:
    """With a target chunk, only its block is written; the others do not change."""
    x, num_chunks = draw(chunked(lab.dtype))
    target = draw(st.integers(0, num_chunks - 1))
    whole = _bytes(_blocks(lab, x, num_chunks)).view(num_chunks, -1)
    before = torch.full((whole.numel(),), draw(st.integers(0, 255)), dtype=torch.uint8)
    wanted = before.clone().view(num_chunks, -1)
    wanted[target] = whole[target]
    lab.compare(_compress(lab, x, num_chunks, target, before), "out", wanted.view(-1))
    wanted.zero_()[target] = whole[target]
    lab.compare(_compress(lab, x, num_chunks, target), "result", wanted.view(-1))


@check("codec", "S4.5", "refuses", dtypes=("float64", "int32", "uint8"), needs=_NEEDS, effort=0.2)
def refuses(lab: Lab, draw: Draw) -> None:
    """Float64 and integers raise a TypeError that names the dtype."""
    size = draw(st.integers(0, 5))
    _refused(lab, "MinMaxUInt8.compress", {"x": torch.ones(size).to(lab.dtype), "num_chunks": 1})
    payload = torch.zeros(codec_scalar.block_size(size), dtype=torch.uint8)
    arguments = {"payload": payload, "num_chunks": 1, "out": torch.ones(size).to(lab.dtype)}
    _refused(lab, "MinMaxUInt8.decompress", arguments)


def _refused(lab: Lab, method: str, arguments: dict[str, object]) -> None:
    name = lab.dtype_name
    try:
        call = lab.call(method, arguments, ("out",) if "out" in arguments else ())
    except Violation as violation:
        if isinstance(violation.__cause__, TypeError) and name in str(violation.__cause__):
            return
        raise
    raise Violation(f"{method} accepted {name}; it must raise a TypeError that names it", lab.script(call))


@check("codec", "S4.6", "bound", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=0.5)
def bound(lab: Lab, draw: Draw) -> None:
    """The error of a round trip is within the bound."""
    x = draw(tensors(lab.dtype, draw(st.integers(1, 12)), finite=True))
    _check_bound(lab, x)


@check("codec", "S4.6", "halfway", dtypes=("float32",), needs=_NEEDS)
def halfway(lab: Lab, draw: Draw) -> None:
    """The bound holds where the minimum or maximum is halfway between two levels."""
    low, high = draw(ends_near_half_a_level())
    places = draw(st.lists(st.floats(0, 1), max_size=12))
    between = [low + (high - low) * place for place in places]
    exactly = [low + (high - low) * (round(place * 254) + 0.5) / 255 for place in places]
    x = torch.tensor([low, high, *between, *exactly], dtype=torch.float64).clamp(low, high).float()
    _check_payload(lab, x, 1, None)
    _check_bound(lab, x)


def _check_bound(lab: Lab, x: Tensor) -> None:
    payload = _compress(lab, x, 1).results["result"]
    call = _decompress(lab, payload, 1, x.numel())
    restored = call.results["out"]
    low, high = x.min().item(), x.max().item()
    if codec_scalar.is_out_of_range(low, high):
        lab.compare(call, "out", torch.full_like(x, math.nan))
        return
    for value, back in zip(x.tolist(), restored.tolist(), strict=True):
        limit = codec_scalar.bound(low, high, back, lab.dtype_name)
        if not abs(back - value) <= limit:
            text = (
                f"{value!r} between {low!r} and {high!r} comes back as {back!r}: the error {abs(back - value)!r} exceeds {limit!r}"
            )
            raise Violation(text, lab.script(call, f"# {text}"))


@check("codec", "S4.2", "long", dtypes=COMPRESSIBLE, needs=_NEEDS, effort=0.1)
def long(lab: Lab, draw: Draw) -> None:
    """Long chunks follow the same rules as short ones, element by element.

    Past every block, warp and vector: levels depend on a chunk's ends alone, so pieces with these ends have the same levels.
    """
    size, num_chunks, piece = draw(st.sampled_from(lab.long_sizes)), draw(st.integers(1, 2)), 9_973
    x = torch.stack([bulk(lab.dtype, "tame", draw(seeds), size) for _ in range(num_chunks)])
    x[:, draw(st.integers(0, size - 1))] = 5.0  # an end anywhere, also in the last part of the last block
    x[:, draw(st.integers(0, size - 1))] = -6.0
    payload = _compress(lab, x.view(-1), num_chunks)
    pieces: list[list[Tensor]] = [[] for _ in range(num_chunks)]
    restored: list[list[Tensor]] = [[] for _ in range(num_chunks)]
    for number, chunk in enumerate(x):
        ends = torch.stack([chunk.min(), chunk.max()])
        for start in range(0, size, piece):
            part = torch.cat([ends, chunk[start : start + piece]])
            block = _compress(lab, part, 1).results["result"]
            pieces[number].append(block[34 : 32 + part.numel()])
            restored[number].append(_decompress(lab, block, 1, part.numel()).results["out"][2:])
    wanted = []
    for number, chunk in enumerate(x):
        block = torch.zeros(codec_scalar.block_size(size), dtype=torch.uint8)
        ends = torch.stack([chunk.min(), chunk.max()]).view(torch.uint8)
        block[: ends.numel()], block[32 : 32 + size] = ends, torch.cat(pieces[number])
        wanted.append(block)
    lab.compare(payload, "result", torch.cat(wanted))
    call = _decompress(lab, payload.results["result"], num_chunks, x.numel())
    lab.compare(call, "out", torch.cat([part for row in restored for part in row]))
    x[0, draw(st.sampled_from([0, size // 2, size - 1]))] = draw(st.sampled_from([math.inf, math.nan]))
    wanted[0] = _bytes([codec_scalar.compress_chunk([math.nan], lab.dtype_name)[:32]])
    wanted[0] = torch.cat([wanted[0], torch.zeros(codec_scalar.block_size(size) - 32, dtype=torch.uint8)])
    lab.compare(_compress(lab, x.view(-1), num_chunks), "result", torch.cat(wanted))


assert all(dtype_named(name).is_floating_point for name in COMPRESSIBLE)
