"""The codecs of S12 compared with a scalar implementation; MinMaxUInt8 is in `codec_minmax`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from bagua_ref.conformance.expected import codecs_scalar
from bagua_ref.conformance.expected.codecs_scalar import BLOCK, FORMATS, payload_size
from bagua_ref.conformance.expected.tolerances import ULP, assert_equal
from bagua_ref.conformance.inputs.codec_inputs import any_payload, near_ties
from bagua_ref.conformance.inputs.strategies import COMPRESSIBLE, Draw, bulk, chunked, seeds, tensors
from bagua_ref.conformance.lab.lab import KernelCall, Lab
from bagua_ref.conformance.lab.violation import Violation
from bagua_ref.conformance.suites.checks import check

MX = tuple(FORMATS)
CODECS = (*MX, "OneBit")
_LAYOUT = {**dict.fromkeys(MX, "S12.1"), "OneBit": "S12.2"}


def for_each(
    codecs: tuple[str, ...], name: str, clause: str = "", *, dtypes: tuple[str, ...] = COMPRESSIBLE, effort: float = 1.0
) -> Callable[[Callable[[Lab, Draw, str], None]], Callable[[Lab, Draw, str], None]]:
    """Return a decorator that enters a property of codecs into the table, once for each; the clause is by default the layout's."""

    def enter(function: Callable[[Lab, Draw, str], None]) -> Callable[[Lab, Draw, str], None]:
        for codec in codecs:

            def run(lab: Lab, draw: Draw, codec: str = codec) -> None:
                function(lab, draw, codec)

            run.__doc__ = f"{codec}: {function.__doc__}"
            check("codec", clause or _LAYOUT[codec], f"{name}_{codec}", dtypes=dtypes, needs=(codec,), effort=effort)(run)
        return function

    return enter


def _compress(lab: Lab, codec: str, x: Tensor, num_chunks: int, target: int | None = None, out: Tensor | None = None) -> KernelCall:
    arguments = {"x": x, "num_chunks": num_chunks, "target_chunk": target, "out": out}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return lab.call(f"{codec}.compress", arguments, ("out",) if out is not None else ())


def _decompress(lab: Lab, codec: str, payload: Tensor, num_chunks: int, count: int) -> KernelCall:
    arguments = {"payload": payload, "num_chunks": num_chunks, "out": torch.full((count,), 7).to(lab.dtype)}
    return lab.call(f"{codec}.decompress", arguments, ("out",))


def _bytes(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _expected(codec: str, x: Tensor, num_chunks: int) -> Tensor:
    """Return the expected payload."""
    rows = x.view(num_chunks, x.numel() // num_chunks).tolist()
    return _bytes(b"".join(codecs_scalar.compress_chunk(codec, row) for row in rows))


def _values(lab: Lab, codec: str, payload: Tensor, num_chunks: int, size: int) -> Tensor:
    """Return the expected numbers of a payload."""
    blocks = payload.view(num_chunks, -1).tolist()
    found = [value for block in blocks for value in codecs_scalar.decompress_chunk(codec, bytes(block), size, lab.dtype_name)]
    return torch.tensor(found, dtype=torch.float64).to(lab.dtype)


def _compare(lab: Lab, codec: str, call: KernelCall, name: str, wanted: Tensor, num_chunks: int) -> None:
    """Compare a payload byte by byte; a scale of OneBit may differ by 1 ulp, as the sum's order is free."""
    actual = call.results[name]
    is_payload = isinstance(actual, Tensor) and actual.dtype is torch.uint8 and actual.shape == wanted.shape
    if codec == "OneBit" and is_payload and wanted.numel():
        theirs, ours = (
            t.view(num_chunks, -1)[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32).view(-1)
            for t in (actual, wanted)
        )
        try:
            assert_equal(theirs, ours, ULP(1))
        except AssertionError as error:
            raise Violation(f"OneBit.compress: s: {error}", lab.script(call)) from None
        same = torch.where(theirs.isnan(), theirs.view(torch.int32) == 0x7FC00000, True)
        wanted = wanted.clone()
        wanted.view(num_chunks, -1)[same, :4] = actual.view(num_chunks, -1)[same, :4]
    lab.compare(call, name, wanted)


def _check_payload(lab: Lab, codec: str, x: Tensor, num_chunks: int, out: Tensor | None = None) -> Tensor:
    """Compare a payload; show a failure on a block of 32 alone, if that fails, too. Return the expected one."""
    wanted = _expected(codec, x, num_chunks)
    call = _compress(lab, codec, x, num_chunks, out=out)
    try:
        _compare(lab, codec, call, "result" if out is None else "out", wanted, num_chunks)
    except Violation:
        if x.numel() > BLOCK:
            for row in x.view(num_chunks, -1):
                for part in row.split(BLOCK):
                    _check_payload(lab, codec, part.clone(), 1)
        raise
    return wanted


def _check_values(lab: Lab, codec: str, payload: Tensor, num_chunks: int, size: int) -> None:
    wanted = _values(lab, codec, payload, num_chunks, size)
    lab.compare(_decompress(lab, codec, payload, num_chunks, size * num_chunks), "out", wanted)


@for_each(CODECS, "payload", effort=0.5)
def payload(lab: Lab, draw: Draw, codec: str) -> None:
    """every byte of the payload is as specified, the padding included; other payloads do not change it."""
    x, num_chunks = draw(chunked(lab.dtype))
    size = num_chunks * payload_size(codec, x.numel() // num_chunks)
    out = torch.full((size,), draw(st.sampled_from([255, 1])), dtype=torch.uint8) if draw(st.booleans()) else None
    _check_payload(lab, codec, x, num_chunks, out)


@for_each(MX, "ties")
def ties(lab: Lab, draw: Draw, codec: str) -> None:
    """elements are rounded to nearest, ties to even, subnormals of the format kept, and saturated beyond its largest number."""
    _check_payload(lab, codec, near_ties(codec, lab.dtype, draw(seeds)), 1)


@for_each(CODECS, "round_trip", effort=0.3)
def round_trip(lab: Lab, draw: Draw, codec: str) -> None:
    """a compressed tensor decompresses to the specified values."""
    x, num_chunks = draw(chunked(lab.dtype))
    size = x.numel() // num_chunks
    _check_values(lab, codec, _expected(codec, x, num_chunks), num_chunks, size)


@for_each(CODECS, "any_payload", effort=0.5)
def any_bytes(lab: Lab, draw: Draw, codec: str) -> None:
    """any payload decompresses as specified: foreign scales, codes, NaNs and padding."""
    num_chunks, size = draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 2, 31, 32, 33, 70, 257]))
    _check_values(lab, codec, any_payload(codec, num_chunks, size, draw(seeds)), num_chunks, size)


@for_each(CODECS, "poison", "S12.3", effort=0.5)
def poison(lab: Lab, draw: Draw, codec: str) -> None:
    """a chunk (MX: a block) with a value that is not finite decodes to NaN, and no other does."""
    size, num_chunks = draw(st.sampled_from([1, 2, 33, 64, 100])), draw(st.integers(1, 3))
    x = torch.cat([draw(tensors(lab.dtype, size, finite=True)) for _ in range(num_chunks)])
    x[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from([math.inf, -math.inf, math.nan]))
    wanted = _check_payload(lab, codec, x, num_chunks)
    _check_values(lab, codec, wanted, num_chunks, size)


@for_each(MX, "bound", "S12.3", effort=0.5)
def bound(lab: Lab, draw: Draw, codec: str) -> None:
    """the error of a round trip is within the bound."""
    size = draw(st.integers(1, 40))
    x = near_ties(codec, lab.dtype, draw(seeds)) if draw(st.booleans()) else draw(tensors(lab.dtype, size, finite=True))
    payload = _compress(lab, codec, x, 1).results["result"]
    call = _decompress(lab, codec, payload, 1, x.numel())
    restored = call.results["out"]
    info = torch.finfo(lab.dtype)
    for start in range(0, x.numel(), BLOCK):
        block = x[start : start + BLOCK].tolist()
        for value, back in zip(block, restored[start : start + BLOCK].tolist(), strict=True):
            limit = codecs_scalar.error_bound(codec, value, block)
            if lab.dtype is not torch.float32:  # half an ulp of the result
                limit += max(abs(back) * info.eps, info.tiny * info.eps) / 2
            if not abs(back - value) <= limit:
                text = f"{value!r} comes back as {back!r}: the error {abs(back - value)!r} exceeds {limit!r}"
                raise Violation(f"{codec}: {text}", lab.script(call, f"# {text}"))


@for_each(CODECS, "target_chunk", effort=0.2)
def target_chunk(lab: Lab, draw: Draw, codec: str) -> None:
    """with a target chunk, only its payload is written; the others do not change, and are zeros in a new one."""
    x, num_chunks = draw(chunked(lab.dtype))
    target = draw(st.integers(0, num_chunks - 1))
    whole = _expected(codec, x, num_chunks).view(num_chunks, -1)
    before = torch.full((whole.numel(),), draw(st.integers(0, 255)), dtype=torch.uint8)
    for out in (before, torch.zeros_like(before)):
        wanted = out.clone().view(num_chunks, -1)
        wanted[target] = whole[target]
        given = out if out is before else None
        call = _compress(lab, codec, x, num_chunks, target, given)
        actual = call.results["result" if given is None else "out"]
        if codec == "OneBit" and isinstance(actual, Tensor) and actual.numel() == wanted.numel() and whole.numel():
            others = torch.arange(num_chunks) != target
            rows = actual.view(num_chunks, -1)
            if not torch.equal(rows[others], wanted[others]):
                raise Violation("OneBit.compress: a chunk other than target_chunk was written", lab.script(call))
            call.results["target"] = rows[target].clone()
            _compare(lab, codec, call, "target", wanted[target], 1)
        else:
            lab.compare(call, "result" if given is None else "out", wanted.view(-1))


@for_each(CODECS, "refuses", dtypes=("float64", "int32", "uint8"), effort=0.2)
def refuses(lab: Lab, draw: Draw, codec: str) -> None:
    """float64 and integers raise a TypeError that names the dtype."""
    size = draw(st.integers(0, 5))
    x = torch.ones(size).to(lab.dtype)
    encoded = torch.zeros(payload_size(codec, size), dtype=torch.uint8)
    calls: list[tuple[str, dict[str, object]]] = [
        ("compress", {"x": x, "num_chunks": 1}),
        ("decompress", {"payload": encoded, "num_chunks": 1, "out": x}),
    ]
    for verb, arguments in calls:
        try:
            call = lab.call(f"{codec}.{verb}", arguments, ("out",) if "out" in arguments else ())
        except Violation as violation:
            if isinstance(violation.__cause__, TypeError) and lab.dtype_name in str(violation.__cause__):
                continue
            raise
        raise Violation(f"{codec}.{verb} accepted {lab.dtype_name}; it must raise a TypeError that names it", lab.script(call))


@for_each(CODECS, "long", effort=0.1)
def long(lab: Lab, draw: Draw, codec: str) -> None:
    """long chunks follow the same rules as short ones, past every block, warp and vector."""
    size = draw(st.sampled_from([70_001, 270_017]))
    x = bulk(lab.dtype, "tame", draw(seeds), size)
    x[draw(st.sampled_from([0, size // 2, size - 1]))] = -0.0
    if codec == "OneBit":
        scale = x.double().square().mean().sqrt().float().view(1)
        signs = torch.nn.functional.pad((x >= 0).to(torch.uint8), (0, -size % 8)).view(-1, 8)
        bits = (signs << torch.arange(7, -1, -1, dtype=torch.uint8)).sum(1).to(torch.uint8)
        wanted = torch.zeros(payload_size(codec, size), dtype=torch.uint8)
        wanted[:4], wanted[32 : 32 + len(bits)] = scale.view(torch.uint8), bits
    else:
        scales, elements = [], []
        for part in x.split(64 * BLOCK):
            found = _compress(lab, codec, part.clone(), 1).results["result"]
            blocks = -(-part.numel() // BLOCK)
            scales.append(found[:blocks])
            elements.append(found[blocks : blocks + -(-part.numel() * FORMATS[codec].bits // 8)])
        wanted = torch.cat([*scales, *elements])
        wanted = torch.nn.functional.pad(wanted, (0, payload_size(codec, size) - wanted.numel()))
    call = _compress(lab, codec, x, 1)
    _compare(lab, codec, call, "result", wanted, 1)
    restored = _decompress(lab, codec, call.results["result"], 1, size)
    if codec == "OneBit":
        s = call.results["result"][:4].view(torch.float32).to(lab.dtype)
        lab.compare(restored, "out", torch.where(x >= 0, s, -s))
    else:
        parts = []
        for number, part in enumerate(x.split(64 * BLOCK)):
            short = torch.cat([scales[number], elements[number]])
            short = torch.nn.functional.pad(short, (0, payload_size(codec, part.numel()) - short.numel()))
            parts.append(_decompress(lab, codec, short, 1, part.numel()).results["out"])
        lab.compare(restored, "out", torch.cat(parts))
