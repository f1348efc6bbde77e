"""Codecs compared with scalar implementations (S4, S12)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from bagua_ref.conformance.cases.answers import answer
from bagua_ref.conformance.cases.case import Case
from bagua_ref.conformance.cases.strategies import (
    COMPRESSIBLE,
    bulk,
    chunked,
    ends_near_half_a_level,
    near_ties,
    payloads,
    tensors,
)
from bagua_ref.conformance.cases.table import rows_of
from bagua_ref.conformance.checks.registry import check
from bagua_ref.conformance.expected import codecs_scalar
from bagua_ref.conformance.expected.codecs_scalar import (
    FORMATS,
    HEADER,
    MINMAX,
    RULES,
    Elements,
    payload_size,
)
from bagua_ref.conformance.expected.tolerances import ULP
from bagua_ref.conformance.lab.lab import KernelCall, Lab, smallest
from bagua_ref.conformance.lab.violation import Violation
from bagua_ref.conformance.targets.target import TAIL

BLOCKS = tuple(FORMATS)
S12 = (*BLOCKS, "OneBit")
_NEW = {**dict.fromkeys(RULES, "S12.6"), "NVFP4": "S12.7"}
_LAYOUT = {**dict.fromkeys(BLOCKS, "S12.1"), **_NEW, "OneBit": "S12.2"}

Property = Callable[..., None]


def for_each(
    name: str,
    codecs: tuple[str, ...] = S12,
    clause: str = "",
    *,
    minmax: tuple[str, float] | None = None,
    dtypes: tuple[str, ...] = COMPRESSIBLE,
    effort: float = 0.4,
    walk: Callable[..., None] | None = None,
) -> Callable[[Property], Property]:
    """Return a decorator that registers a property once for each codec.

    Args:
        name: prefix of the check's name; the codec's name follows.
        codecs: codecs of S12.
        clause: its clause, but for codecs that have one of their own; by default that of the
            codec's layout.
        minmax: clause with name, and effort of the check of MinMaxUInt8, if it has the property, too.
        dtypes: names of dtypes.
        effort: factor of the number of inputs; codecs with another scale rule get a third of them.
        walk: checks the codec's rows of the case table.
    """

    def enter(function: Property) -> Property:
        rows = {MINMAX: minmax} if minmax else {}
        for codec in codecs:
            # a rule differs from its format in one number, whose edges the table has
            share = effort / 3 if codec in RULES else effort
            of = _NEW.get(codec, clause or _LAYOUT[codec])
            rows[codec] = f"{of}.{name}_{codec}", share
        for codec, (of, share) in rows.items():
            check(
                f"codec.{of}",
                dtypes=dtypes,
                needs=(codec,),
                effort=share,
                sentence=f"{codec}: {function.__doc__}",
                walk=walk and partial(walk, codec=codec),
            )(partial(function, codec=codec))
        return function

    return enter


only_minmax = partial(check, dtypes=COMPRESSIBLE, needs=(MINMAX,))


# Calls and comparisons.


def _compress(lab: Lab, codec: str, x: Tensor, num_chunks: int, **options: Any) -> KernelCall:
    arguments = {"x": x, "num_chunks": num_chunks, **options}
    return lab.call(f"{codec}.compress", arguments, ("out",) if "out" in options else ())


def _decompress(lab: Lab, codec: str, payload: Tensor, num_chunks: int, count: int) -> KernelCall:
    arguments = {
        "payload": payload,
        "num_chunks": num_chunks,
        "out": torch.full((count,), 7).to(lab.dtype),
    }
    return lab.call(f"{codec}.decompress", arguments, ("out",))


def _filled(size: int, value: int) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def _expected(lab: Lab, codec: str, x: Tensor, num_chunks: int, **options: Any) -> Tensor:
    """Return the expected payload; ``options`` are parameters of a case."""
    given = {"codec": codec, "num_chunks": num_chunks, **options}
    return answer("codecs/compress", lab.dtype_name, {"x": x}, given)["payload"]


def _compare_payload(
    lab: Lab, codec: str, call: KernelCall, name: str, wanted: Tensor, num_chunks: int
) -> None:
    """Compare a payload; messages name the differing field. A scale of OneBit may differ by 1 ulp,
    as the order of its sum is not specified.
    """
    actual, field = call.results[name], ""
    if isinstance(actual, Tensor) and (actual.dtype, actual.shape) == (torch.uint8, wanted.shape):
        if codec == "OneBit" and wanted.numel():
            theirs, ours = (
                t.view(num_chunks, -1)[:, :4].reshape(-1).view(torch.float32)
                for t in (actual, wanted)
            )
            scales = f"{name}.view({num_chunks}, -1)[:, :4].reshape(-1).view(torch.float32)"
            call.results[scales] = theirs
            lab.compare(call, scales, ours, ULP(1), field="scales")
            wanted = wanted.clone()
            numbers = ~ours.isnan()  # a NaN has the bits of S4.4
            wanted.view(num_chunks, -1)[numbers, :4] = actual.view(num_chunks, -1)[numbers, :4]
        if (wrong := (actual != wanted).nonzero()).numel():
            size = call.arguments["x"].numel() // num_chunks
            field = codecs_scalar.field_at(codec, int(wrong[0]), size, lab.dtype_name)
    lab.compare(call, name, wanted, field=field)


def _check_payload(lab: Lab, codec: str, x: Tensor, num_chunks: int, **out: Tensor) -> Tensor:
    """Compare a payload, and return the expected one; on failure, report the smallest part of a
    chunk that also fails alone.
    """
    wanted = _expected(lab, codec, x, num_chunks)
    call = _compress(lab, codec, x, num_chunks, **out)
    try:
        _compare_payload(lab, codec, call, "out" if out else "result", wanted, num_chunks)
    except Violation:

        def judge(start: int, end: int) -> None:
            part = row[start:end].clone()
            encoded = _expected(lab, codec, part, 1)
            _compare_payload(lab, codec, _compress(lab, codec, part, 1), "result", encoded, 1)

        for row in x.view(num_chunks, x.numel() // num_chunks):
            smallest(judge, row.numel())
        raise
    if out and call.results.get("result is out") is False:
        said = f"{codec}.compress: the result is not the tensor that was given as out"
        raise Violation(said, lab.script(call, "assert result is out"))
    return wanted


def _check_values(lab: Lab, codec: str, payload: Tensor, num_chunks: int, size: int) -> None:
    """Compare the decompressed values of a payload; on failure, report a single chunk if it also
    fails alone.
    """
    count = size * num_chunks
    given = {"codec": codec, "num_chunks": num_chunks, "num_elements": count}
    wanted = answer("codecs/decompress", lab.dtype_name, {"payload": payload}, given)["x"]
    try:
        lab.compare(_decompress(lab, codec, payload, num_chunks, count), "out", wanted)
    except Violation:
        for block in payload.view(num_chunks, -1) if num_chunks > 1 else ():
            _check_values(lab, codec, block.clone(), 1, size)
        raise


# Properties of all codecs, and of MinMaxUInt8.


def _rows(lab: Lab, codec: str, verb: str) -> list[Case]:
    """Return a codec's fixed cases from the case table."""
    cases = [case for case in rows_of("codecs", lab.dtype_name) if case.operation.endswith(verb)]
    return [case for case in cases if case.parameters["codec"] == codec]


def _walk_payloads(lab: Lab, codec: str) -> None:
    for case in _rows(lab, codec, "/compress"):
        given = {**case.inputs, **case.parameters}
        if "payload" in given:
            given["out"] = given.pop("payload")
        call = _compress(lab, **given)
        _compare_payload(lab, codec, call, "result", case.outputs["payload"], given["num_chunks"])


def _walk_values(lab: Lab, codec: str) -> None:
    for case in _rows(lab, codec, "/decompress"):
        chunks, count = case.parameters["num_chunks"], case.parameters["num_elements"]
        call = _decompress(lab, codec, case.inputs["payload"], chunks, count)
        lab.compare(call, "out", case.outputs["x"])


@for_each("payload", effort=0.35, minmax=("S4.2.levels", 1), walk=_walk_payloads)
def payload(lab: Lab, codec: str) -> None:
    """every byte of the payload is as specified, the padding included; other payloads do not change
    it.
    """
    x, num_chunks = lab.draw(chunked(lab.dtype))
    size = num_chunks * payload_size(codec, x.numel() // num_chunks)
    with_out = codec != MINMAX and lab.flag()
    out = {"out": _filled(size, lab.choice([255, 1]))} if with_out else {}
    _check_payload(lab, codec, x, num_chunks, **out)


@for_each("ties", BLOCKS)
def ties(lab: Lab, codec: str) -> None:
    """elements are rounded to nearest, ties to even, subnormals of the format kept, and saturated
    beyond its largest number.
    """
    _check_payload(lab, codec, near_ties(codec, lab.dtype, lab.seed()), 1)


@only_minmax("codec.S4.2.halfway")
def halfway_levels(lab: Lab) -> None:
    """Levels are correct where x*scale is as close to k + 1/2 as possible."""
    _check_payload(lab, MINMAX, bulk(lab.dtype, "halfway", lab.seed(), 300), 1)


@only_minmax("codec.S4.2.epsilon", effort=0.35)
def levels_beside_epsilon(lab: Lab) -> None:
    """Levels and values are correct where 1e-7 is not small beside the range."""
    x = bulk(lab.dtype, "epsilon", lab.seed(), lab.choice([2, 3, 100]))
    _check_values(lab, MINMAX, _check_payload(lab, MINMAX, x, 1), 1, x.numel())


@only_minmax("codec.S4.1.gaps")
def gaps(lab: Lab) -> None:
    """A payload passed as out is filled completely, with zeros in its gaps."""
    x, num_chunks = lab.draw(chunked(lab.dtype))
    size = num_chunks * payload_size(MINMAX, x.numel() // num_chunks)
    out = _filled(size, lab.choice([255, 1, 127]))
    _check_payload(lab, MINMAX, x, num_chunks, out=out)


@only_minmax("codec.S4.1.header", effort=0.35)
def header(lab: Lab) -> None:
    """The header holds the minimum and maximum, with -0 as +0."""
    edges = lab.choice([[0.0, -0.0], [0.0, -0.0, 1.0], [0.0, -0.0, -1.0]])
    x = lab.draw(st.lists(st.sampled_from(edges), min_size=1, max_size=9))
    _check_payload(lab, MINMAX, torch.tensor(x, dtype=lab.dtype), 1)


@only_minmax("codec.S4.1.fresh", effort=0.25)
def fresh(lab: Lab) -> None:
    """A payload does not change when others are made: its buffer is not reused."""
    x, num_chunks = lab.draw(chunked(lab.dtype))
    first = _compress(lab, MINMAX, x, num_chunks)
    _compress(lab, MINMAX, x + 1, num_chunks)
    lab.compare(first, "result", _expected(lab, MINMAX, x, num_chunks))


@for_each("round_trip", effort=0.25, minmax=("S4.3.round_trip", 0.55))
def round_trip(lab: Lab, codec: str) -> None:
    """A payload is not changed by later calls: its buffer is not reused."""
    x, num_chunks = lab.draw(chunked(lab.dtype))
    encoded = _expected(lab, codec, x, num_chunks)
    _check_values(lab, codec, encoded, num_chunks, x.numel() // num_chunks)


@for_each("any_payload", effort=0.35, minmax=("S4.3.any_levels", 0.55), walk=_walk_values)
def any_bytes(lab: Lab, codec: str) -> None:
    """any payload decompresses as specified: foreign scales, codes, ends, NaNs and padding."""
    _check_values(lab, codec, *lab.draw(payloads(codec, lab.dtype)))


@for_each("poison", clause="S12.3", effort=0.35, minmax=("S4.4.poison", 0.55))
def poison(lab: Lab, codec: str) -> None:
    """a chunk (MX formats: a block) with a value that is not finite decodes to NaN, and no other
    does.
    """
    x, num_chunks = lab.draw(chunked(lab.dtype))
    x = x.nan_to_num(1.0, 2.0, -2.0)
    size = x.numel() // num_chunks
    if size:
        chunk, place = lab.integer(0, num_chunks - 1), lab.integer(0, size - 1)
        bad = lab.choice([math.inf, -math.inf, math.nan])
        x[chunk * size + lab.choice([place, 0, size - 1])] = bad
    _check_values(lab, codec, _check_payload(lab, codec, x, num_chunks), num_chunks, size)


@only_minmax("codec.S4.4.overflow")
def overflow(lab: Lab) -> None:
    """A chunk is poisoned exactly when its range, or its minimum or maximum times scale,
    overflows.
    """
    largest = torch.finfo(lab.dtype).max
    ends = st.one_of(
        st.floats(-1, 1).map(lambda place: place * largest),
        st.sampled_from([largest, -largest, largest / 2, -largest / 2, 0.0]),
        st.floats(28, 30).map(lambda power: min(10.0**power, largest)),
    )
    low, high = lab.draw(ends), lab.draw(ends)
    values = lab.choice([[low, high, low], [high] * 3, [high]])
    _check_payload(lab, MINMAX, torch.tensor(values, dtype=torch.float64).to(lab.dtype), 1)


@for_each("bound", BLOCKS, "S12.3", effort=0.35, minmax=("S4.6.bound", 0.35))
def bound(lab: Lab, codec: str) -> None:
    """the error of a round trip is within the bound."""
    if codec != MINMAX and lab.flag():
        _check_bound(lab, codec, near_ties(codec, lab.dtype, lab.seed()))
    else:
        size = lab.integer(1, 12 if codec == MINMAX else 40)
        _check_bound(lab, codec, lab.draw(tensors(lab.dtype, size, finite=True)))


@check("codec.S4.6.halfway", dtypes=("float32",), needs=(MINMAX,))
def halfway(lab: Lab) -> None:
    """The bound holds where the minimum or maximum is halfway between two levels."""
    low, high = lab.draw(ends_near_half_a_level())
    places = lab.draw(st.lists(st.floats(0, 1), max_size=12))
    between = [low + (high - low) * place for place in places]
    exactly = [low + (high - low) * (round(place * 254) + 0.5) / 255 for place in places]
    x = torch.tensor([low, high, *between, *exactly], dtype=torch.float64).clamp(low, high).float()
    _check_payload(lab, MINMAX, x, 1)
    _check_bound(lab, MINMAX, x)


def _check_bound(lab: Lab, codec: str, x: Tensor) -> None:
    """Compare the errors of a round trip with the codec's bound; expect NaN from poisoned
    chunks.
    """
    compressed = _compress(lab, codec, x, 1)
    call = _decompress(lab, codec, compressed.results["result"], 1, x.numel())
    if codec == MINMAX and codecs_scalar.is_out_of_range(x.min().item(), x.max().item()):
        lab.compare(call, "out", torch.full_like(x, math.nan))
        return
    restored = call.results["out"].tolist()
    chunk, size = x.tolist(), x.numel() if codec == MINMAX else FORMATS[codec].block
    for place, (value, back) in enumerate(zip(chunk, restored, strict=True)):
        start = place - place % size
        block = chunk[start : start + size]
        limit = codecs_scalar.error_bound(codec, value, block, back, lab.dtype_name, chunk)
        lab.comparisons += 1
        if not abs(back - value) <= limit:
            script = lab.script(
                compressed,
                "from bagua_ref.conformance.expected.codecs_scalar import error_bound",
                f"out = torch.zeros({x.numel()}, dtype={lab.dtype})",
                "codec.decompress(result, 1, out=out)",
                f"value, block, back = {value!r}, {block!r}, out[{place}].item()",
                f"limit = error_bound({codec!r}, value, block, back, {lab.dtype_name!r}, {chunk})",
                "assert abs(back - value) <= limit, back",
            )
            error = f"the error {abs(back - value)!r} exceeds {limit!r}"
            raise Violation(f"{codec}: {value!r} comes back as {back!r}: {error}", script)


@for_each("target_chunk", effort=0.2, minmax=("S4.5.target_chunk", 0.55))
def target_chunk(lab: Lab, codec: str) -> None:
    """with a target chunk, only its payload is written; other chunks of ``out`` are unchanged, and
    zeros in a new payload.
    """
    x, num_chunks = lab.draw(chunked(lab.dtype))
    target = lab.integer(0, num_chunks - 1)
    size = num_chunks * payload_size(codec, x.numel() // num_chunks)
    before = _filled(size, lab.integer(0, 255))
    for out, unchanged in (({"out": before}, before), ({}, torch.zeros_like(before))):
        given = {"target_chunk": target, "payload": unchanged} if size else {}
        wanted = _expected(lab, codec, x, num_chunks, **given)
        call = _compress(lab, codec, x, num_chunks, target_chunk=target, **out)
        _compare_payload(lab, codec, call, "out" if out else "result", wanted, num_chunks)


@for_each("refuses", dtypes=("float64", "int32", "uint8"), effort=0.2, minmax=("S4.5.refuses", 0.2))
def refuses(lab: Lab, codec: str) -> None:
    """float64 and integers raise a TypeError that names the dtype."""
    x = torch.ones(lab.integer(0, 5)).to(lab.dtype)
    encoded = _filled(payload_size(codec, x.numel()), 0)
    calls: dict[str, dict[str, Any]] = {
        "compress": {"x": x, "num_chunks": 1},
        "decompress": {"payload": encoded, "num_chunks": 1, "out": x},
    }
    for verb, arguments in calls.items():
        method, name, cause = f"{codec}.{verb}", lab.dtype_name, None
        message = f"{method} accepted {name}; it must raise a TypeError that names it"
        lab.comparisons += 1
        try:
            lab.call(method, arguments, ("out",))
        except Violation as violation:
            message, cause = str(violation), violation.__cause__
            if isinstance(cause, TypeError) and name in str(cause):
                continue
        *before, made = lab.script(KernelCall(method, arguments)).splitlines()
        refused = f"with unittest.TestCase().assertRaisesRegex(TypeError, {name!r}):"
        script = "\n".join(["import unittest", *before, refused, f"    {made}", ""])
        raise Violation(message, script) from cause


@for_each(
    "long", tuple(x for x in S12 if x not in RULES), effort=0.025, minmax=("S4.2.long", 0.025)
)
def long(lab: Lab, codec: str) -> None:
    """long chunks follow the same rules as short ones, past every block, warp and vector."""
    for size in lab.long_sizes:
        _check_long(lab, codec, size)


def _check_long(lab: Lab, codec: str, size: int) -> None:
    num_chunks, places = (2 if codec == MINMAX else 1), st.sampled_from([0, size // 2, size - 1])
    period = 31 * 32  # few distinct numbers, so that expected values are cheap
    rows = [bulk(lab.dtype, "tame", lab.seed(), period) for _ in range(num_chunks)]
    x = torch.stack([row.repeat(-(-size // period))[:size] for row in rows])
    x[:, lab.draw(places)] = -0.0
    for row, end in zip(x, (5.0, -5.0), strict=False):  # one extremum anywhere, one at the end
        row[lab.integer(0, size - TAIL - 1)] = end
        row[lab.integer(size - TAIL, size - 1)] = -end
    of_chunk = _long_signs if codec == "OneBit" else _long_blocks
    encoded, values = zip(*(of_chunk(lab, codec, row) for row in x), strict=True)
    call = _compress(lab, codec, x.view(-1), num_chunks)
    _compare_payload(lab, codec, call, "result", torch.cat(encoded), num_chunks)
    restored = _decompress(lab, codec, call.results["result"], num_chunks, x.numel())
    lab.compare(restored, "out", torch.cat(values))
    if codec == MINMAX:
        x[0, lab.draw(places)] = lab.choice([math.inf, math.nan])
        poisoned = _expected(lab, codec, x.new_full((1,), math.nan), 1)[:HEADER]
        poisoned = pad(poisoned, (0, payload_size(codec, size) - HEADER))
        wanted = torch.cat([poisoned, *encoded[1:]])
        lab.compare(_compress(lab, codec, x.view(-1), num_chunks), "result", wanted)


def _long_blocks(lab: Lab, codec: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a chunk's expected payload and values, computing each distinct block once, behind a
    block with the chunk's minimum and maximum.
    """
    form = FORMATS.get(codec) or Elements(0, 8, (), header=HEADER)
    header, scales = form.header, int(codec in FORMATS)
    front = [x.min().item(), x.max().item(), *[0.0] * (form.block - 2)]
    start = header + 2 * scales
    middle = start + form.block * form.bits // 8

    @functools.cache
    def made(*block: float) -> tuple[bytes, bytes, bytes, list[float]]:
        chunk = [*front, *block]
        payload = codecs_scalar.compress_chunk(codec, chunk, lab.dtype_name)
        back = codecs_scalar.decompress_chunk(codec, payload, len(chunk), lab.dtype_name)
        end = middle + -(-len(block) * form.bits // 8)
        scale = payload[header + scales : start]
        return payload[:header], scale, payload[middle:end], back[form.block :]

    parts = [made(*block.tolist()) for block in x.split(form.block)]
    headers, of_blocks, elements, values = zip(*parts, strict=True)
    data = headers[0] + b"".join(of_blocks) + b"".join(elements)
    restored = torch.tensor([value for back in values for value in back], dtype=torch.float64)
    return _filled_up(codec, data, x), restored.to(lab.dtype)


def _long_signs(lab: Lab, codec: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a chunk's expected payload, and its values computed with the target's scale, which may
    differ by 1 ulp.
    """
    bits = np.packbits((x >= 0).numpy()).tobytes()
    scale = x.double().square().mean().sqrt().float().view(1).view(torch.uint8)
    header = bytes(scale.tolist()).ljust(HEADER, b"\0")
    theirs = _compress(lab, codec, x, 1).results["result"][:4].view(torch.float32).to(lab.dtype)
    return _filled_up(codec, header + bits, x), torch.where(x >= 0, theirs, -theirs)


def _filled_up(codec: str, data: bytes, x: Tensor) -> Tensor:
    data = data.ljust(payload_size(codec, x.numel()), b"\0")
    return torch.tensor([*data], dtype=torch.uint8)
