"""Tests of the codecs of S4 and S12 and of the registry: pinned vectors, `ml_dtypes`, tiles,
operations, refusals.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.launch import run_script
from tests.scripts import ROOT
from tests.trainings import by_name, network, on_every_rank, simulate, train, weights

import bagua_ref
import bagua_ref.backends as registry
from bagua_ref.backends import Codec, get_codec, register_backend, use_backend
from bagua_ref.backends.codec import MXFP4, MXFP8
from bagua_ref.backends.reference import ReferenceBackend
from bagua_ref.buckets.bucket import BaguaBucket, check_compression
from bagua_ref.conformance import EXACT, assert_equal
from bagua_ref.conformance.expected import codecs_scalar
from bagua_ref.conformance.expected.codecs_scalar import MINMAX
from bagua_ref.errors import BackendUnavailableError

MX = ("MXFP8", "MXFP4", "MXINT8")
S12 = (*MX, "OneBit")
minmax = get_codec(MINMAX, "reference")


def codec(name: str) -> Codec:
    return get_codec(name, "reference")


def round_trip(name: str, x: torch.Tensor, num_chunks: int = 1) -> torch.Tensor:
    out = torch.full_like(x, 7)
    codec(name).decompress(codec(name).compress(x, num_chunks), num_chunks, out)
    return out


# Layout and rounding


@pytest.mark.parametrize(
    ("name", "values", "payload"),
    [
        ("MXFP8", [1.0], [119, 0x78]),  # exponent 0 - 8; 1 / 2^-8 = 256
        ("MXFP8", [-0.0], [0, 0x80]),
        ("MXFP8", [0.0, -1e-45], [0, 0, 0x80]),  # 2^-149 / 2^-127 rounds to -0
        ("MXFP8", [1.875], [119, 0x7E]),  # 480 saturates at 448
        ("MXFP8", [1.0, 1 + 2**-4, 1 + 3 * 2**-4], [119, 0x78, 0x78, 0x7A]),  # ties to even
        ("MXFP8", [1.0, 1.5 * 2**-17, 0.5 * 2**-17], [119, 0x78, 2, 0]),  # ties between subnormals
        ("MXFP8", [1.0, math.inf], [255, 0, 0]),
        # the tie between 0 and 0.5; the odd tail's high nibble
        ("MXFP4", [6.0, -6.0, 0.25], [127, 0xF7, 0x00]),
        ("MXFP4", [4.0, -0.75, -0.0], [127, 0xA6, 0x08]),
        ("MXFP4", [7.0, 2.5, 3.5], [127, 0x47, 0x06]),  # 7 saturates; 2.5 -> 2, 3.5 -> 4
        ("MXFP4", [math.nan], [255, 0]),
        ("MXINT8", [1.0, -1.0, 0.5 / 64, 1.5 / 64, -0.0], [127, 64, 192, 0, 2, 0]),
        ("MXINT8", [1.999, -1.999], [127, 127, 129]),  # never -128
        ("MXINT8", [2.0**-149], [0, 0]),
    ],
)
def test_S12_1_pinned_payloads(name, values, payload):
    assert_payload(name, values, payload)


def assert_payload(name, values, payload):
    wanted = bytes(payload).ljust(32, b"\0")
    assert bytes(codec(name).compress(torch.tensor(values), 1).tolist()) == wanted
    assert codecs_scalar.compress_chunk(name, torch.tensor(values).tolist(), "float32") == wanted


@pytest.mark.parametrize(
    ("name", "values", "payload"),
    [
        # the largest number times a power of two is exact, what is just above gets the next power
        ("MXFP8-RCEIL", [1.75], [119, 0x7E]),
        ("MXFP8-RCEIL", [1.75 + 2**-23], [120, 0x76]),
        ("MXFP4-RCEIL", [1.5, 1.5 + 2**-23], [126, 0x55]),
        ("MXFP4-RCEIL", [6.0, -6.0, 0.25], [127, 0xF7, 0x00]),
        # 1.9375 is halfway to 2, and as large as 2; what is just below saturates
        ("MXFP8-EVEN", [1.9375], [120, 0x78]),
        ("MXFP8-EVEN", [1.9375 - 2**-23], [119, 0x7E]),
        ("MXFP4-EVEN", [7.0, 3.5], [128, 0x46]),
        ("MXFP4-EVEN", [7 - 2**-21], [127, 0x07]),
        ("MXFP8-CEIL", [1.0], [119, 0x78]),
        ("MXFP8-CEIL", [1 + 2**-23], [120, 0x70]),
        ("MXFP4-CEIL", [-4.0, 5.0], [128, 0x4C]),
        ("MXFP4-CEIL", [2.0**127 * 1.5], [253, 0x05]),
        # the one number at which dividing in float32 first is wrong
        ("MXFP8-RCEIL", [448 * 2.0**-127 + 2.0**-142], [1, 0x76]),
        ("MXFP4-RCEIL", [6 * 2.0**-127 + 2.0**-148], [1, 0x05]),
        ("MXFP8-RCEIL", [0.0, -1e-45], [0, 0, 0x80]),
        ("MXFP8-CEIL", [1.0, math.nan], [255, 0, 0]),
    ],
)
def test_S12_6_pinned_payloads(name, values, payload):
    assert_payload(name, values, payload)


ELEMENTS = {  # emax, the largest number, bits of mantissa
    "E4M3": (8, Fraction(448), 3),
    "E2M1": (2, Fraction(6), 1),
    "E5M2": (15, Fraction(57344), 2),
    "E2M3": (2, Fraction(15, 2), 3),
    "E3M2": (4, Fraction(28), 2),
}


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", ["RCEIL", "EVEN", "CEIL"])
def test_S12_6_one_addition_is_the_rule_in_rational_numbers(element, rule):
    emax, largest, width = ELEMENTS[element]
    fraction = int(largest / 2**emax * 2**23) - 2**23
    number = {
        "RCEIL": 2**23 - 1 - fraction,
        "EVEN": 2 ** (22 - width),
        "CEIL": 2**23 - 1,
    }[rule]
    edges = {1, 2**22, fraction, 2**23 - 2 ** (22 - width)}
    mantissas = sorted({(m + step) % 2**23 for m in edges for step in (-2, -1, 0, 1, 2)})
    bits = np.array([e << 23 | m for e in range(255) for m in mantissas], np.int32)
    codecs = {"E4M3": MXFP8, "E2M1": MXFP4}
    found = np.maximum((bits + np.int32(number) >> 23) - emax, 0)
    if element in codecs:  # the first bytes of their payloads are the scales
        assert codecs[element].rules[rule] == number
        each = get_codec(f"{codecs[element].name}-{rule}", "reference")
        payload = each.compress(torch.from_numpy(bits).view(torch.float32), len(bits))
        assert payload.view(len(bits), -1)[:, 0].tolist() == found.tolist()
    for x, byte in zip(bits.view(np.float32).tolist(), found.tolist(), strict=True):
        top, scale = Fraction(x), Fraction(2) ** (byte - 127)
        if rule == "EVEN" and top:
            floor = math.frexp(x)[1] - 1
            place = Fraction(2) ** (floor - width)
            rounded = (top / place + Fraction(1, 2)).__floor__() * place
            exact = Fraction(2) ** (floor - emax) * (
                2 if rounded >= 2 * Fraction(2) ** floor else 1
            )
            assert scale == max(exact, Fraction(2) ** -127)
            if element in codecs:
                assert top - largest * scale < top * (
                    Fraction(3, 31) if width == 3 else Fraction(1, 7)
                )
        else:  # the smallest power of two for which this holds
            limit = largest if rule == "RCEIL" else 2**emax
            assert top <= limit * scale
            assert byte == 0 or top > limit * scale / 2


def test_S12_6_the_other_rules_decode_alike():
    payload = torch.randint(0, 256, (5 * 96,), dtype=torch.uint8)
    for base in (MXFP8, MXFP4):
        size = 64 if base is MXFP8 else 128
        wanted = torch.empty(5 * size)
        codec(base.name).decompress(payload, 5, wanted)
        for rule in base.rules:
            out = torch.empty(5 * size)
            codec(f"{base.name}-{rule}").decompress(payload, 5, out)
            assert_equal(out, wanted, EXACT)


def nvfp4(t: float, scales: list[int], elements: list[int]) -> bytes:
    data = np.float32(t).tobytes().ljust(32, b"\0") + bytes([*scales, *elements])
    return data.ljust(32 + -(-(len(data) - 32) // 32) * 32, b"\0")


@pytest.mark.parametrize(
    ("values", "payload"),
    [
        ([], b""),
        ([0.0, -0.0], nvfp4(1, [0], [0x80])),  # S is 1, and u the largest number
        ([2688.0], nvfp4(1, [0x7E], [7])),  # 448 and 6
        ([-2688.0, 224.0, 672.0], nvfp4(1, [0x7E], [0x1F, 3])),  # 0.5 and 1.5 times 448
        # in a block of 6 and a scale of 1; the tie between 0 and 0.5
        ([2688.0, *[0.0] * 15, 6.0, 0.25, -5.0], nvfp4(1, [0x7E, 0x38], [7, *[0] * 7, 7, 0x0E])),
        # scales of 2^-9, the smallest, and of 0, with which all saturate or are 0
        (
            [2688.0, *[0.0] * 15, 6 * 2.0**-9, *[0.0] * 15, 2.0**-9, -(2.0**-9)],
            nvfp4(1, [0x7E, 1, 0], [7, *[0] * 7, 7, *[0] * 7, 0xF7]),
        ),
        # S is the largest number, not infinite, 1/S a subnormal
        ([2.0**-149], nvfp4(1 / np.finfo(np.float32).max, [0], [0])),
        ([2.0**-120], nvfp4(1 / np.finfo(np.float32).max, [0x63], [7])),
        ([1.0, math.inf], np.uint32(0x7FC00000).tobytes().ljust(64, b"\0")),
        ([math.nan] + [0.0] * 100, np.uint32(0x7FC00000).tobytes().ljust(96, b"\0")),
    ],
)
def test_S12_7_pinned_payloads(values, payload):
    x = torch.tensor(values)
    assert bytes(codec("NVFP4").compress(x, 1).tolist()) == payload
    assert codecs_scalar.compress_chunk("NVFP4", x.tolist(), "float32") == payload


def test_S12_7_in_rational_numbers():
    """Each operation of the clause, exact and then rounded to float32, on random chunks and blocks
    of any magnitude.
    """
    generator, limit = np.random.default_rng(7), Fraction(float(np.finfo(np.float32).max))
    e4m3, e2m1 = (list(map(Fraction, codecs_scalar.FORMATS[f].numbers)) for f in ("MXFP8", "NVFP4"))

    def rounded(x: Fraction) -> Fraction:
        """Return the nearest float32, ties to even, not beyond the largest."""
        if x >= limit:
            return limit
        place = Fraction(2) ** max(-149, math.floor(math.log2(x)) - 23 if x else -149)
        while x >= place * 2**24:  # log2 may be one too small
            place *= 2
        return round(x / place) * place

    def nearest(numbers: list[Fraction], x: Fraction) -> Fraction:
        return min(numbers, key=lambda n: (abs(n - x), numbers.index(n) % 2))

    for power in (-140, -120, -60, 0, 3, 60, 127):
        sizes = 2.0 ** np.array([[0], [-3], [-11], [-22]])
        x = (generator.uniform(-1, 1, (4, 16)) * sizes).astype(np.float32)
        x = torch.from_numpy(x * np.float32(2.0**power)).view(-1)
        exact = [Fraction(v) for v in x.tolist()]
        largest = max(map(abs, exact))
        whole = rounded(2688 / largest)
        t = rounded(1 / whole)
        payload, signs = codec("NVFP4").compress(x, 1), x.signbit().view(4, 16).tolist()
        restored = round_trip("NVFP4", x).view(4, 16).tolist()
        assert payload[:4].view(torch.float32).item() == float(t)
        sixth = rounded(whole * Fraction(float(np.float32(1 / 6))))
        for block in range(4):
            part = exact[16 * block : 16 * block + 16]
            s = nearest(e4m3, rounded(max(map(abs, part)) * sixth))
            assert e4m3[int(payload[32 + block])] == s
            product = rounded(s * t)
            u = rounded(1 / product) if product else limit
            codes = payload[36 + 8 * block : 44 + 8 * block]
            found = torch.stack([codes & 15, codes >> 4], 1).view(-1).tolist()
            for v, code, sign, back in zip(part, found, signs[block], restored[block], strict=True):
                element = nearest(e2m1, rounded(abs(v) * u))
                assert (e2m1[code & 7], code >> 3) == (element, sign)
                assert abs(back) == float(rounded(element * s * t))


@pytest.mark.parametrize("chunks", [1, 3])
def test_S12_7_a_scale_belongs_to_a_chunk(chunks):
    x = torch.randn(chunks, 50) * 10.0 ** torch.arange(chunks).view(-1, 1)
    whole = codec("NVFP4").compress(x.view(-1), chunks).view(chunks, -1)
    for row, payload in zip(x, whole, strict=True):
        assert payload.tolist() == codec("NVFP4").compress(row.clone(), 1).tolist()


def test_S12_2_pinned_payload():
    found = codec("OneBit").compress(
        torch.tensor([3.0, -4.0, -0.0, 0.0, -5.0, 0.0, 0.0, 0.0, -0.0]), 1
    )
    assert found[:4].view(torch.float32).item() == pytest.approx(math.sqrt(50 / 9), rel=1e-7)
    assert found[4:].tolist() == [0] * 28 + [0b10110111, 0b10000000] + [0] * 30


@pytest.mark.parametrize(
    ("name", "counts", "sizes"),
    [
        ("MXFP8", (1, 32, 33), [32, 64, 64]),
        ("MXFP4", (1, 32, 33), [32, 32, 32]),
        ("MXINT8", (1, 32, 33), [32, 64, 64]),
        ("MXFP8-RCEIL", (0, 1, 32, 33), [0, 32, 64, 64]),
        ("MXFP4-EVEN", (0, 1, 32, 33), [0, 32, 32, 32]),
        ("NVFP4", (0, 1, 16, 56, 57, 113), [0, 64, 64, 64, 96, 128]),
        ("OneBit", (1, 256, 257), [64, 64, 96]),
        ("MinMaxUInt8", (0, 1, 32, 33), [32, 64, 64, 96]),
    ],
)
def test_S4_S12_payload_bytes(name, counts, sizes):
    assert [codec(name).payload_bytes(c, torch.float16) for c in counts] == sizes
    assert [codecs_scalar.payload_size(name, c) for c in counts] == sizes


# MinMaxUInt8 (S4)


def minmax_block(header: str, levels: list[int]) -> bytes:
    return (bytes.fromhex(header).ljust(32, b"\0") + bytes(levels)).ljust(
        minmax.payload_bytes(len(levels), torch.float32), b"\0"
    )


@pytest.mark.parametrize(
    ("values", "dtype", "header", "levels"),
    [
        ([0.0, 1.0, 2.0], torch.float32, "00000000 00000040", [0, 128, 255]),
        # S4.2: the lower clamp, -1 without it
        ([-253.5, 1.5], torch.float32, "00807dc3 0000c03f", [0, 255]),
        # S4.2: the upper clamp, 256 without it
        ([1.0, 1.0], torch.float32, "0000803f 0000803f", [255, 255]),
        # S4.1: a zero is written +0
        ([-0.0, -0.0], torch.float32, "00000000 00000000", [255, 255]),
        ([-1.0, -0.0], torch.float16, "00bc 0000", [0, 255]),
        ([-1.0, 3.0], torch.bfloat16, "80bf 4040", [0, 255]),
        ([1e30, 1e30], torch.float32, "0000c07f 0000c07f", [0, 0]),  # S4.4: max*scale overflows
        ([-3e38, 3e38], torch.float32, "0000c07f 0000c07f", [0, 0]),  # S4.4: max - min overflows
        ([1.0, math.nan], torch.float32, "0000c07f 0000c07f", [0, 0]),
        ([1.0, -math.inf], torch.float16, "007e 007e", [0, 0]),
        ([math.nan, 2.0], torch.bfloat16, "c07f c07f", [0, 0]),
        ([], torch.float32, "00000000 00000000", []),  # S4.4
    ],
)
def test_S4_pinned_vectors(values, dtype, header, levels):
    x = torch.tensor(values, dtype=dtype)
    assert bytes(minmax.compress(x, 1).tolist()) == minmax_block(header, levels)
    assert codecs_scalar.compress_minmax(
        x.tolist(), str(dtype).removeprefix("torch.")
    ) == minmax_block(header, levels)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"num_chunks": 3},
            ValueError,
            "num_chunks=3 must divide the number of elements, which is 4",
        ),
        ({"num_chunks": -2}, ValueError, "num_chunks=-2 must be at least 1"),
        ({"num_chunks": 2.0}, TypeError, "num_chunks=2.0 must be an integer"),
        (
            {"num_chunks": 2, "target_chunk": 2},
            ValueError,
            "target_chunk=2 must be from 0 to num_chunks - 1 = 1",
        ),
        ({"num_chunks": 2, "target_chunk": "a"}, TypeError, "target_chunk='a' must be an integer"),
        (
            {"num_chunks": 1, "out": torch.zeros(63, dtype=torch.uint8)},
            ValueError,
            "out has 63 elements; .* must have 64",
        ),
        (
            {"num_chunks": 1, "out": torch.zeros(64)},
            TypeError,
            "out is torch.float32; .* must be torch.uint8",
        ),
        (
            {"num_chunks": 1, "out": torch.zeros(128, dtype=torch.uint8)[::2]},
            ValueError,
            "out .* must be 1-D and contiguous",
        ),
        (
            {"num_chunks": 1, "out": torch.zeros(64, dtype=torch.uint8, device="meta")},
            ValueError,
            "out is on meta",
        ),
    ],
)
def test_compress_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        minmax.compress(torch.zeros(4), **arguments)


@pytest.mark.slow
def test_the_benchmark_runs_and_its_three_forms_of_S4_agree(tmp_path):
    folder, table = ROOT / "benchmarks", tmp_path / "codec.json"
    run = f"runpy.run_path({str(folder / 'codec.py')!r}, run_name='__main__')"
    ended = run_script(
        f"import runpy, sys; sys.path.insert(0, {str(folder)!r}); sys.argv[1:] = ['--quick',"
        f" '--json', {str(table)!r}]; {run}"
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(table.read_text())
    limits = [row["limit"] for row in result["rows"]]
    assert limits == [
        "at most 5",
        *["-"] * 5,
        *["at most 5"] * 2,
        *["at most 8"] * 2,
        *["at most 5"] * 2,
        *["at most 10"] * 2,
        *["at most 5"] * 2,
    ]
    assert all(row["ratio"] > 0 for row in result["rows"])
    assert {"machine", "versions", "date"} <= set(result)


# A second opinion (S12.4)


@pytest.mark.parametrize(
    ("name", "dtype"), [("MXFP8", "float8_e4m3fn"), ("MXFP4", "float4_e2m1fn")]
)
def test_S12_4_ml_dtypes_rounds_alike_at_every_code_and_decodes_every_scale(name, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind, form = getattr(ml_dtypes, dtype), codecs_scalar.FORMATS[name]
    numbers = np.array(form.numbers)
    ties = (numbers[:-1] + numbers[1:]) / 2
    around = np.concatenate([numbers, ties]).astype(np.float32)
    around = np.concatenate(
        [around, np.nextafter(around, np.float32(0)), np.nextafter(around, np.float32(1e9))]
    )
    around = (
        np.minimum(np.concatenate([around, -around]), numbers[-1])
        .clip(-numbers[-1])
        .astype(np.float32)
    )
    for block in np.array_split(around, -(-len(around) // 31)):
        # which fixes the scale at 1
        x = torch.from_numpy(np.append(np.float32(2**form.emax), block))
        wanted = x.numpy().astype(kind)
        found = codec(name).compress(x, 1)[1:].numpy()
        codes = found if form.bits == 8 else np.stack([found & 15, found >> 4], 1).reshape(-1)
        assert codes[: len(x)].tolist() == wanted.view(np.uint8).tolist()
        assert_equal(round_trip(name, x), torch.from_numpy(wanted.astype(np.float32)), EXACT)
    bits = 2**form.bits
    every = np.arange(bits, dtype=np.uint8)
    packed = every if form.bits == 8 else (every[::2] | every[1::2] << 4).astype(np.uint8)
    for scale in range(256):
        payload = torch.zeros(codec(name).payload_bytes(bits, torch.float32), dtype=torch.uint8)
        blocks = -(-bits // 32)
        payload[:blocks], payload[blocks : blocks + len(packed)] = scale, torch.from_numpy(packed)
        out = torch.zeros(bits)
        codec(name).decompress(payload, 1, out)
        power = np.uint8(scale).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        with np.errstate(over="ignore"):
            wanted = every.view(kind).astype(np.float64) * power
        largest = float(np.finfo(np.float32).max)
        assert_equal(out, torch.from_numpy(np.clip(wanted, -largest, largest)).float(), EXACT)


# Bounds are attained (S12.3)


def test_S12_3_bounds_are_attained():
    for name, values, error in [
        ("MXFP8", [1.0, 1 + 2**-3 / 2], 2**-4),
        ("MXFP8", [1.0, 2.0**-18], 2.0**-18),  # half the smallest subnormal, times 2^-8
        ("MXFP8", [2 - 2.0**-23], 0.25),
        ("MXFP4", [4.0, 1.25], 0.25),
        ("MXFP4", [4.0, 0.25], 0.25),
        ("MXFP4", [8 - 2.0**-20], 2.0),
        ("MXINT8", [1.0, 0.5 / 64], 2.0**-7),
        ("MXINT8", [2 - 2.0**-23], 2.0**-6),
        ("MXFP8-EVEN", [1.9375 - 2.0**-23], 1.9375 * 3 / 31),
        ("MXFP4-EVEN", [7 - 2.0**-21], 1.0),
        ("MXFP8-RCEIL", [1.0, 1 + 2**-3 / 2], 2**-4),
        ("NVFP4", [2688.0, 112.0], 112.0),
    ]:
        x = torch.tensor(values)
        errors = (round_trip(name, x).double() - x.double()).abs()
        assert errors[-1].item() == pytest.approx(error, rel=1e-5)
        for value, got in zip(x.tolist(), errors.tolist(), strict=True):
            assert got <= codecs_scalar.error_bound(
                name, value, x.tolist(), 0.0, "float32", x.tolist()
            )


# Operations and algorithms


@pytest.mark.filterwarnings("ignore:compression='OneBit' without error memory")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("MXFP8", "bytegrad"),
        ("OneBit", "qadam"),
        ("MXINT8", "low_precision_decentralized"),
        ("MXFP4", "diloco"),
        ("NVFP4", "bytegrad"),
        ("MXFP8-RCEIL", "qadam"),
        (MINMAX, "diloco"),
    ],
)
def test_every_algorithm_trains_alike_on_all_ranks_with_every_codec(name, kind):
    def rank(r: int) -> torch.Tensor:
        module = network()
        options = {"period": 2} if kind == "diloco" else {"hierarchical": False}
        optimizer, algorithm = by_name(kind, module, compression=name, **options)
        module.with_bagua([optimizer], algorithm)  # type: ignore[operator]
        before = [p.detach().clone() for p in module.parameters()]
        train(module, optimizer, r, range(4))
        assert not any(map(torch.equal, module.parameters(), before))
        return weights(module)

    first, second = simulate(2, rank)
    if kind != "low_precision_decentralized":
        assert_equal(first, second, EXACT)


@on_every_rank(2)
def test_compression_chooses_what_is_sent(r: int):
    found = []
    for compression in ("MinMaxUInt8", "MXFP4"):
        tensor = torch.linspace(-1, 1, 64).ensure_bagua_tensor(compression)  # type: ignore[attr-defined]
        bucket = BaguaBucket([tensor], compression, flatten=True, alignment=2)
        bucket.append_centralized_synchronous_op(scattergather=True, compression=compression)
        bucket.execute()
        found.append(len(set(tensor.tolist())))
    many, few = found
    assert many > 50
    assert few < 32


# Bad input


@on_every_rank(2)
def test_one_bit_without_error_memory_warns(r: int):
    bucket = BaguaBucket([torch.ones(4).ensure_bagua_tensor("t")], "0", flatten=True)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="compression='OneBit' without error memory"):
        bucket.append_centralized_synchronous_op(scattergather=True, compression="OneBit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bucket.append_centralized_synchronous_op(scattergather=True, compression="MXFP4")


@pytest.mark.parametrize("name", [*S12, MINMAX])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_S4_5_S12_other_dtypes_are_refused_by_name_when_appended(name, dtype):
    x = torch.zeros(4, dtype=dtype)
    with pytest.raises(
        TypeError,
        match=f"x is {dtype}; it must be one of torch.float16, torch.bfloat16, torch.float32",
    ):
        codec(name).compress(x, 1)
    with pytest.raises(TypeError, match=f"out is {dtype}"):
        codec(name).decompress(torch.zeros(64, dtype=torch.uint8), 1, x)

    def rank(r: int) -> None:
        bucket = BaguaBucket([x.clone().ensure_bagua_tensor("t")], "0", flatten=True)  # type: ignore[attr-defined]
        with pytest.raises(
            TypeError,
            match=(
                f"compression='{name}' takes float16, bfloat16 or float32, not bucket '0''s {dtype}"
            ),
        ):
            bucket.append_centralized_synchronous_op(
                average=False, scattergather=True, compression=name
            )

    simulate(2, rank)


# The registry


class Halves(Codec):
    """A foreign codec: float16."""

    name = "Halves"

    def payload_bytes(self, c, dtype):
        return -(-2 * c // 32) * 32

    def _compress(self, x, num_chunks, target_chunk, out):
        rows, payload = x.detach().view(num_chunks, -1), out.view(num_chunks, -1)
        for row in range(num_chunks) if target_chunk is None else [target_chunk]:
            payload[row].zero_()
            payload[row][: 2 * rows.shape[1]] = rows[row].half().view(torch.uint8)

    def _decompress(self, payload, num_chunks, out):
        rows = out.detach().view(num_chunks, -1)
        rows.copy_(payload.view(num_chunks, -1)[:, : 2 * rows.shape[1]].clone().view(torch.float16))


class WithHalves(ReferenceBackend):
    codecs: ClassVar = {**ReferenceBackend.codecs, "Halves": Halves}


def test_a_backend_may_have_a_codec_of_its_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_codecs", sys.modules[__name__])
    for table in ("_registered", "_instances"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    register_backend("with_halves", "my_codecs:WithHalves")
    found = get_codec("Halves", "with_halves")
    out = torch.zeros(3)
    found.decompress(found.compress(torch.tensor([1.0, 1 + 2**-12, 70.0]), 3), 3, out)
    assert out.tolist() == [1.0, 1.0, 70.0]
    with use_backend("with_halves"):
        check_compression("Halves")
        test_every_algorithm_trains_alike_on_all_ranks_with_every_codec("Halves", "bytegrad")


def test_get_codec_lists_what_there_is():
    with pytest.raises(
        ValueError,
        match=(
            r"name='zip' is not a known codec; there are 'MXFP4', 'MXFP4-CEIL', .*'NVFP4', 'OneBit'"
        ),
    ):
        get_codec("zip")

    class Bare(ReferenceBackend):
        name = "bare"
        codecs = {"MinMaxUInt8": ReferenceBackend.codecs["MinMaxUInt8"]}

    with pytest.raises(
        BackendUnavailableError,
        match="codec 'OneBit' cannot run: backend 'bare' does not have it; it has 'MinMaxUInt8'",
    ):
        get_codec("OneBit", Bare())


@pytest.mark.parametrize("method", ["compress", "_compress", "decompress", "_decompress"])
def test_operations_use_the_methods_that_a_class_replaces(method: str) -> None:
    calls = []

    def replaced(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(method)
        return getattr(super(Own, self), method)(*args, **options)

    Own = type("Own", (get_codec("MinMaxUInt8", "reference").__class__,), {method: replaced})
    backend = type("Backend", (ReferenceBackend,), {"codecs": {"MinMaxUInt8": Own}})()
    bagua_ref.init_process_group()
    try:
        bucket = BaguaBucket(
            [torch.ones(4).ensure_bagua_tensor("t")], "b", flatten=True, backend=backend
        )  # type: ignore[attr-defined]
        bucket.append_centralized_synchronous_op(scattergather=True, compression="MinMaxUInt8")
        bucket.execute()
    finally:
        bagua_ref.destroy_process_group()
    assert calls == [method] * 2
