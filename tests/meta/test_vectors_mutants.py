"""Tests that golden vectors detect single faults, planted in the C client and in the second
implementation.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import oracle_c
from tests.meta import edit
from tests.meta.planted import WRONG_ANSWERS, WrongAnswer
from tests.oracle_c import OPERATIONS, VECTORS
from tests.test_vectors import wrong_answers

from bagua_ref.conformance.vectors import check_outputs, read_manifest
from bagua_ref.conformance.vectors.files import read_vectors

IN_C = {
    "S1 the scale is used as a reciprocal": (
        "minmax_uint8.c",
        "+ g.lower) / g.scale)",
        "+ g.lower) * (1.0f / g.scale))",
    ),
    "S1 product and rounding in double": (
        "minmax_uint8.c",
        "rintf(load(type, x + i * item) * g.scale)",
        "(float)rint((double)load(type, x + i * item) * g.scale)",
    ),
    "S1 float16 truncated": ("floats.c", "magnitude += 0xFFF + (magnitude >> 13 & 1); ", ""),
    "S1 bfloat16 truncated": ("floats.c", "(bits + 0x7FFF + (bits >> 16 & 1)) >> 16", "bits >> 16"),
    "S1 bfloat16 ties up": ("floats.c", "0x7FFF + (bits >> 16 & 1)", "0x8000"),
    "S1 denormal float16 flushed": (
        "floats.c",
        "float value = (float)fraction * 0x1p-24f;",
        "float value = 0.0f * (float)fraction;",
    ),
    "S4.1 a zero keeps its sign": (
        "minmax_uint8.c",
        "    min += 0.0f; /* -0 is written as +0 */\n    max += 0.0f;\n",
        "",
    ),
    "S4.1 padding is not zero": (
        "minmax_uint8.c",
        "memset(block, 0, block_size(count));",
        "memset(block, 0xAA, block_size(count));",
    ),
    "S4.1 max before min": (
        "minmax_uint8.c",
        "    store(type, block, min);\n    store(type, block + item, max);",
        "    store(type, block, max);\n    store(type, block + item, min);",
    ),
    "S4.1 blocks are not padded": ("minmax_uint8.c", "(count + 31) / 32 * 32", "count"),
    "S4.2 half up": (
        "minmax_uint8.c",
        "fminf(rintf(load(type, x + i * item) * g.scale), g.upper)",
        "fminf(floorf(load(type, x + i * item) * g.scale + 0.5f), g.upper)",
    ),
    "S4.2 half away from zero": (
        "minmax_uint8.c",
        "g.upper = rintf(max * g.scale)",
        "g.upper = roundf(max * g.scale)",
    ),
    "S4.2 eps dropped": ("minmax_uint8.c", "((max - min) + 1e-7f)", "(max - min)"),
    "S4.2 another eps": ("minmax_uint8.c", "1e-7f", "1e-8f"),
    "S4.2 256 levels": ("minmax_uint8.c", "g.scale = 255.0f", "g.scale = 256.0f"),
    "S4.2 lower from the minimum": (
        "minmax_uint8.c",
        "g.lower = g.upper - 255.0f",
        "g.lower = rintf(min * g.scale)",
    ),
    "S4.2 no clamp below": (
        "minmax_uint8.c",
        "fminf(fmaxf(level, 0.0f), 255.0f)",
        "(int)fminf(level, 255.0f)",
    ),
    "S4.3 an infinity instead of the largest": ("minmax_uint8.c", "store_saturated(", "store("),
    "S4.4 NaN is not poison": ("minmax_uint8.c", "isfinite(value)", "!isinf(value)"),
    "S4.4 overflow of the range is not poison": (
        "minmax_uint8.c",
        "!finite || !isfinite(max - min) || !isfinite(max * g.scale) || !isfinite(min * g.scale)",
        "!finite",
    ),
    "S4.4 a negative NaN": ("floats.c", "[FLOAT32] = 0x7FC00000", "[FLOAT32] = 0xFFC00000"),
    "S4.4 one NaN in the header": (
        "minmax_uint8.c",
        "        store_nan(type, block + item);\n",
        "",
    ),
    "S4.5 the first chunk instead of the target": (
        "main.c",
        "compress_chunk(type, x + place * count",
        "compress_chunk(type, x + 0 * place * count",
    ),
    "S4.5 other blocks written": (
        "main.c",
        "memcpy(payload, before, bytes);",
        "(void)before;\n        compress(type, x, chunks, count, payload);",
    ),
    "S3.4 one step ahead at odd steps": (
        "shift_one.c",
        "(step + rank) % half",
        "(step + step % 2 + rank) % half",
    ),
    "S3.4 no involution": (
        "shift_one.c",
        "(rank - half - step) % half;",
        "(rank - half + step) % half;",
    ),
    "S3.4 a remainder below zero": ("shift_one.c", "place < 0 ? place + half : place", "place"),
    "S3.4 steps of 32 bits": (
        "shift_one.c",
        "if (rank < half)",
        "step = (int32_t)step;\n    if (rank < half)",
    ),
}
"""Fault -> the file, the text to replace in it, and its replacement."""


@pytest.mark.parametrize("fault", IN_C.values(), ids=IN_C)
def test_a_fault_in_the_client_in_c_is_found(fault: tuple[str, str, str], tmp_path: Path) -> None:
    oracle_c.need_compiler()
    ended = oracle_c.run(oracle_c.build(tmp_path, fault), VECTORS, tmp_path / "outputs")
    refused = ended.returncode == 2  # payloads of another kind
    assert refused or ended.returncode == 0, ended
    report = check_outputs(VECTORS, tmp_path / "outputs", operations=OPERATIONS)
    assert not report.passed
    assert refused or report.count("missing") == 0


@pytest.fixture(scope="module")
def golden() -> tuple[dict[str, Any], dict[str, Any]]:
    manifest = read_manifest(VECTORS)
    return manifest, read_vectors(VECTORS, manifest)


def plant(fault: WrongAnswer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the changed module's functions in the place of the original's, wherever they were
    imported.
    """
    module = importlib.import_module(f"bagua_ref.{fault.where.partition(':')[0].replace('/', '.')}")
    changed = dict(vars(module))
    exec(compile(edit.planted(fault.where, *fault.edit), str(module.__file__), "exec"), changed)
    own = {
        id(value): changed[name]
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    for name, other in list(sys.modules.items()):
        if name.startswith(
            ("bagua_ref.conformance.expected.", "bagua_ref.conformance.vectors.answers")
        ):
            for attribute, value in list(vars(other).items()):
                if id(value) in own:
                    monkeypatch.setattr(other, attribute, own[id(value)])


@pytest.mark.parametrize("fault", WRONG_ANSWERS, ids=[fault.name for fault in WRONG_ANSWERS])
def test_a_fault_in_the_second_implementation_is_found(
    fault: WrongAnswer, golden: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(fault, monkeypatch)
    assert next(wrong_answers(fault.vectors, *golden), None) is not None
