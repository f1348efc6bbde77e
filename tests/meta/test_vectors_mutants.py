"""Tests that golden vectors detect single faults, planted in the C client and in the second implementation."""

# ruff: noqa: E501 - a fault is one line, however long

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests import oracle_c
from tests.oracle_c import OPERATIONS, VECTORS

from bagua_ref.conformance.expected import codec_scalar, comm_ops_scalar, decentralized_numpy, kernels_scalar, samplers_plain
from bagua_ref.conformance.expected.rounding import arithmetic, f32, rint, to
from bagua_ref.conformance.vectors import check, check_outputs, independent, read_manifest
from bagua_ref.conformance.vectors.manifest import read_vectors
from bagua_ref.conformance.vectors.safetensors_file import write_safetensors

IN_C = {
    "S1 the scale is used as a reciprocal": ("minmax_uint8.c", "+ g.lower) / g.scale)", "+ g.lower) * (1.0f / g.scale))"),
    "S1 product and rounding in double": ("minmax_uint8.c", "rintf(load(type, x + i * item) * g.scale)", "(float)rint((double)load(type, x + i * item) * g.scale)"),
    "S1 float16 truncated": ("floats.c", "magnitude += 0xFFF + (magnitude >> 13 & 1); ", ""),
    "S1 bfloat16 truncated": ("floats.c", "(bits + 0x7FFF + (bits >> 16 & 1)) >> 16", "bits >> 16"),
    "S1 bfloat16 ties up": ("floats.c", "0x7FFF + (bits >> 16 & 1)", "0x8000"),
    "S1 denormal float16 flushed": ("floats.c", "float value = (float)fraction * 0x1p-24f;", "float value = 0.0f * (float)fraction;"),
    "S4.1 a zero keeps its sign": ("minmax_uint8.c", "    min += 0.0f; /* -0 is written as +0 */\n    max += 0.0f;\n", ""),
    "S4.1 padding is not zero": ("minmax_uint8.c", "memset(block, 0, block_size(count));", "memset(block, 0xAA, block_size(count));"),
    "S4.1 max before min": ("minmax_uint8.c", "    store(type, block, min);\n    store(type, block + item, max);", "    store(type, block, max);\n    store(type, block + item, min);"),
    "S4.1 blocks are not padded": ("minmax_uint8.c", "(count + 31) / 32 * 32", "count"),
    "S4.2 half up": ("minmax_uint8.c", "fminf(rintf(load(type, x + i * item) * g.scale), g.upper)", "fminf(floorf(load(type, x + i * item) * g.scale + 0.5f), g.upper)"),
    "S4.2 half away from zero": ("minmax_uint8.c", "g.upper = rintf(max * g.scale)", "g.upper = roundf(max * g.scale)"),
    "S4.2 eps dropped": ("minmax_uint8.c", "((max - min) + 1e-7f)", "(max - min)"),
    "S4.2 another eps": ("minmax_uint8.c", "1e-7f", "1e-8f"),
    "S4.2 256 levels": ("minmax_uint8.c", "g.scale = 255.0f", "g.scale = 256.0f"),
    "S4.2 lower from the minimum": ("minmax_uint8.c", "g.lower = g.upper - 255.0f", "g.lower = rintf(min * g.scale)"),
    "S4.2 no clamp below": ("minmax_uint8.c", "fminf(fmaxf(level, 0.0f), 255.0f)", "(int)fminf(level, 255.0f)"),
    "S4.3 an infinity instead of the largest": ("minmax_uint8.c", "store_saturated(", "store("),
    "S4.4 NaN is not poison": ("minmax_uint8.c", "isfinite(value)", "!isinf(value)"),
    "S4.4 overflow of the range is not poison": ("minmax_uint8.c", "!finite || !isfinite(max - min) || !isfinite(max * g.scale) || !isfinite(min * g.scale)", "!finite"),
    "S4.4 a negative NaN": ("floats.c", "[FLOAT32] = 0x7FC00000", "[FLOAT32] = 0xFFC00000"),
    "S4.4 one NaN in the header": ("minmax_uint8.c", "        store_nan(type, block + item);\n", ""),
    "S4.5 the first chunk instead of the target": ("main.c", "compress_chunk(type, x + place * count", "compress_chunk(type, x + 0 * place * count"),
    "S4.5 other blocks written": ("main.c", "memcpy(payload, before, bytes);", "(void)before;\n        compress(type, x, chunks, count, payload);"),
    "S3.4 one step ahead at odd steps": ("shift_one.c", "(step + rank) % half", "(step + step % 2 + rank) % half"),
    "S3.4 no involution": ("shift_one.c", "(rank - half - step) % half;", "(rank - half + step) % half;"),
    "S3.4 a remainder below zero": ("shift_one.c", "place < 0 ? place + half : place", "place"),
    "S3.4 steps of 32 bits": ("shift_one.c", "if (rank < half)", "step = (int32_t)step;\n    if (rank < half)"),
}  # fmt: skip
"""Fault -> the file, the text to replace in it, and its replacement."""


manifest_once = functools.cache(read_manifest)


@pytest.fixture(autouse=True)
def _read_the_manifest_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate against the schema for the first fault only, as that takes half of a check's time."""
    monkeypatch.setattr(check, "read_manifest", manifest_once)


@pytest.mark.parametrize("fault", IN_C.values(), ids=IN_C)
def test_a_fault_in_the_client_in_c_is_found(fault: tuple[str, str, str], tmp_path: Path) -> None:
    oracle_c.need_compiler()
    ended = oracle_c.run(oracle_c.build(tmp_path, fault), VECTORS, tmp_path / "outputs")
    if ended.returncode == 2:  # payloads of another kind are refused
        return
    assert ended.returncode == 0, ended
    report = check_outputs(VECTORS, tmp_path / "outputs", operations=OPERATIONS)
    assert not report.passed
    assert report.count("missing") == 0


def no_double_rounding(dtype: str, x: float, y: float, factor: float) -> float:
    return to(dtype, arithmetic(dtype)(x + arithmetic(dtype)(factor) * y))


def computed_in_16_bits(dtype: str, x: float, left: float, right: float, weight: float) -> float:
    total = x
    for number, factor in ((left, 1 / 3), (right, 1 / 3), (weight, -5 / 3)):
        total = arithmetic(dtype)(total + arithmetic(dtype)(arithmetic(dtype)(factor) * number))
    return to(dtype, total)


def sum_then_round_often(dtype: str, values: list[float], average: bool) -> float:
    total = 0.0
    for value in values:
        total = to(dtype, arithmetic(dtype)(total + value))
    return to(dtype, arithmetic(dtype)(total / len(values))) if average else total


def sum_of_pairs(dtype: str, values: list[float], average: bool) -> float:
    sums = list(values)
    while len(sums) > 1:
        sums = [arithmetic(dtype)(sum(sums[i : i + 2])) for i in range(0, len(sums), 2)]
    return to(dtype, arithmetic(dtype)(sums[0] / len(values)) if average else sums[0])


def sum_from_the_first(dtype: str, values: list[float], average: bool) -> float:
    total = values[0]  # -0 stays -0
    for value in values[1:]:
        total = arithmetic(dtype)(total + value)
    return to(dtype, arithmetic(dtype)(total / len(values))) if average else to(dtype, total)


def mean_of_node_means(node: list[list[float]], dtype: str, divisor: float | None) -> list[float]:
    r = arithmetic(dtype)
    return (
        [kernels_scalar.reduce_in_order(dtype, list(column), divisor is not None) for column in zip(*node, strict=True)]
        if r
        else []
    )


def one_minus_rounded_beta(dtype: str, m: float, grad: float, beta1: float) -> float:
    r = arithmetic(dtype)
    return to(dtype, r(r(r(beta1) * m) + r(r(1.0 - r(beta1)) * grad)))


def one_peer_too_far(n: int, step: int) -> dict[int, int]:
    return PAIRS(n, step + step % 2)


PAIRS = decentralized_numpy.pairs


def ring_the_wrong_way(self: Any, ranks: list[Any], dtype: str) -> list[Any]:
    self.L, self.R = self.R, self.L
    result = RING_STEP(self, ranks, dtype)
    self.L, self.R = self.R, self.L
    return result


RING_STEP = decentralized_numpy.Ring.step


def ring_keeps_what_it_sent(self: Any, ranks: list[Any], dtype: str) -> list[Any]:
    """Keep own weights that did not go through the codec, as the neighbours' replicas of them did."""
    before = [w.copy() for w in self.W]
    RING_STEP(self, ranks, dtype)
    self.W = [decentralized_numpy.stored(x + w - w, dtype) for x, w in zip(ranks, before, strict=True)]
    return self.W


def level_half_up(value: float, scale: float, upper: float, lower: float) -> int:
    return int(max(0.0, min(255.0, f32(min(float(np.floor(f32(value * scale) + 0.5)), upper) - lower))))


def grid_in_double(low: float, high: float) -> tuple[float, float, float]:
    scale = 255.0 / (high - low + 1e-7)
    upper = rint(high * scale)
    return f32(scale), upper, upper - 255


def rounds_up_always(length: int, replicas: int, drop_last: bool) -> int:
    return -(-length // replicas)


def last_batch_again(batches: list[list[list[int]]], drop_last: bool) -> list[list[list[int]]]:
    counts = [len(of_replica) for of_replica in batches]
    if drop_last:
        return [of_replica[: min(counts)] for of_replica in batches]
    return [of_replica + [of_replica[-1]] * (max(counts) - len(of_replica)) for of_replica in batches]


IN_PYTHON: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "S1 fused multiply-add": (kernels_scalar, "add_scaled", no_double_rounding),
    "S3.5 rounded to 16 bits once, not thrice": (independent._ELEMENTWISE, "combine_ring", computed_in_16_bits),
    "S3.7 rounded to 16 bits after each chunk": (kernels_scalar, "reduce_in_order", sum_then_round_often),
    "S3.7 added in a tree": (kernels_scalar, "reduce_in_order", sum_of_pairs),
    "S3.7 no +0 in front": (kernels_scalar, "reduce_in_order", sum_from_the_first),
    "S3.3 mean of node means": (comm_ops_scalar, "node_sum", mean_of_node_means),
    "S5.5 1 - beta1 in float32": (independent._ELEMENTWISE, "update_momentum", one_minus_rounded_beta),
    "S3.4 the next peer at odd steps": (decentralized_numpy, "pairs", one_peer_too_far),
    "S3.5 left and right swapped": (decentralized_numpy.Ring, "step", ring_the_wrong_way),
    "S3.5 own change not decompressed": (decentralized_numpy.Ring, "step", ring_keeps_what_it_sent),
    "S4.2 half up": (codec_scalar, "level_of", level_half_up),
    "S4.2 the grid in double": (codec_scalar, "grid", grid_in_double),
    "S7.1 drop_last ignored": (samplers_plain, "num_samples", rounds_up_always),
    "S7.4 the last batch again": (samplers_plain, "equal_batches", last_batch_again),
    "S8.1 a hash of 32 bits": (independent.xxhash, "xxh64_intdigest", xxhash.xxh32_intdigest),
}
"""Fault -> the module, the name in it, and the faulty replacement."""


def client(outputs: Path) -> None:
    """Answer all cases with the second implementation, with whatever fault is planted."""
    manifest = manifest_once(VECTORS)
    tensors, found = read_vectors(VECTORS, manifest), {}
    for case in manifest["cases"]:
        inputs = {entry["name"]: tensors[f"{case['suite']}.inputs.safetensors"][entry["tensor"]] for entry in case["inputs"]}
        answers = independent.solve(case["suite"], case["operation"], case["dtype"], case["parameters"], inputs)
        found |= {f"{case['id']}:{name}": x for name, x in answers.items()}
    outputs.mkdir()
    write_safetensors(outputs / "outputs.safetensors", found)


def test_without_a_fault_the_second_opinion_passes(tmp_path: Path) -> None:
    client(tmp_path / "outputs")
    report = check_outputs(VECTORS, tmp_path / "outputs")
    assert report.passed, [verdict.message for verdict in report.verdicts if verdict.message][:5]


@pytest.mark.parametrize("fault", IN_PYTHON.values(), ids=IN_PYTHON)
def test_a_fault_in_the_second_opinion_is_found(
    fault: tuple[Any, str, Callable[..., Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, replacement = fault
    if isinstance(where, dict):
        monkeypatch.setitem(where, name, replacement)
    else:
        monkeypatch.setattr(where, name, replacement)
        for module in (comm_ops_scalar, kernels_scalar, independent):  # modules that imported the name
            if getattr(module, name, None) is not None:
                monkeypatch.setattr(module, name, replacement)
    with np.errstate(all="ignore"):
        client(tmp_path / "outputs")
    report = check_outputs(VECTORS, tmp_path / "outputs")
    assert report.count("failed") > 0
    assert report.count("missing") == 0
