"""Tests that golden vectors detect single faults, planted in the C client and in the second implementation."""

# ruff: noqa: E501 - a fault is one line, however long

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests import oracle_c
from tests.oracle_c import OPERATIONS, VECTORS

from bagua_ref.conformance.expected import (
    codec_scalar,
    comm_ops_scalar,
    decentralized_numpy,
    graphs_numpy,
    kernels_scalar,
    local_updates_numpy,
    power_sgd_numpy,
    samplers_plain,
    topk_numpy,
)
from bagua_ref.conformance.expected.rounding import arithmetic, f32, rint, to
from bagua_ref.conformance.formats.safetensors_file import write_safetensors
from bagua_ref.conformance.vectors import VECTORS_VERSION, check, check_outputs, independent, read_manifest
from bagua_ref.conformance.vectors.manifest import read_vectors

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


LATEST = VECTORS.parent / f"v{VECTORS_VERSION}"

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


def swapped(mode: str, changed: Callable[[Any, int], Any]) -> tuple[Any, str, Callable[..., Any]]:
    return graphs_numpy._FORMULAS, mode, changed


def weights_from_the_last(x: Any, graph: Any) -> Any:
    return WEIGHTED(x, [row[::-1] for row in graph])


def weights_without_zero(x: Any, graph: Any) -> Any:
    """Start each sum with its first product: -0 stays -0."""
    return np.stack([functools.reduce(np.add, [x.dtype.type(weight) * x[source] for source, weight in row]) for row in graph])


def fused_weights(x: Any, graph: Any) -> Any:
    total = np.zeros_like(x)
    for rank, row in enumerate(graph):
        for source, weight in row:
            total[rank] = (total[rank].astype(np.longdouble) + np.longdouble(weight) * x[source]).astype(x.dtype)
    return total


def always_the_first(x: Any, mode: Any, t: int) -> Any:
    return AVERAGED(x, mode, t if isinstance(mode, str) else 0)


FORMULAS, WEIGHTED, AVERAGED = dict(graphs_numpy._FORMULAS), graphs_numpy.weighted, graphs_numpy.averaged
third = np.float32(1 / 3)
IN_GRAPHS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "S13.1 the wrong way round": swapped("one_peer_exponential", lambda x, t: FORMULAS["one_peer_exponential"](x[::-1], t)[::-1]),
    "S13.1 t from 1": swapped("one_peer_exponential", lambda x, t: FORMULAS["one_peer_exponential"](x, t + 1)),
    "S13.1 t of 32 bits": swapped("one_peer_exponential", lambda x, t: FORMULAS["one_peer_exponential"](x, t % 2**32)),
    "S13.1 the logarithm rounded down": (graphs_numpy, "doublings", lambda n: max(1, n.bit_length() - 1)),
    "S13.2 shift_one instead": swapped("hypercube", lambda x, t: np.stack(decentralized_numpy.mean_of_pairs(list(x), "", t))),
    "S13.2 from the highest bit": swapped("hypercube", lambda x, t: FORMULAS["hypercube"](x, -1 - t)),
    "S13.3 right before left": swapped("ring", lambda x, t: FORMULAS["ring"](x[::-1], t)[::-1]),
    "S13.3 neighbours first": swapped("ring", lambda x, t: ((np.roll(x, 1, 0) + np.roll(x, -1, 0)) + x) / x.dtype.type(3)),
    "S13.3 the other twice on two": swapped("ring", lambda x, t: (x + x[::-1] + x[::-1]) / x.dtype.type(3) if len(x) == 2 else FORMULAS["ring"](x, t)),
    "S13.3 times a third": swapped("ring", lambda x, t: ((x + np.roll(x, 1, 0)) + np.roll(x, -1, 0)) * x.dtype.type(third)),
    "S13.3 the ring from +0": swapped("ring", lambda x, t: FORMULAS["ring"](x, t) + x.dtype.type(0)),
    "S13.3 exponential without +0": swapped("exponential", lambda x, t: np.where(np.signbit(x).all(0) & (x == 0).all(0), x, FORMULAS["exponential"](x, t))),
    "S13.3 the farthest left out": swapped("exponential", lambda x, t: sum([np.roll(x, 2**k, 0) for k in range(graphs_numpy.doublings(len(x)) - 1)], x) / x.dtype.type(graphs_numpy.doublings(len(x)))),
    "S13.4 from the last to the first": (graphs_numpy, "weighted", weights_from_the_last),
    "S13.4 no +0 in front": (graphs_numpy, "weighted", weights_without_zero),
    "S13.4 fused multiply-add": (graphs_numpy, "weighted", fused_weights),
    "S13.4 always the first graph": (graphs_numpy, "averaged", always_the_first),
    "S13 rounded to 16 bits twice": (decentralized_numpy, "node_mean", lambda node, dtype: sum(node) / node[0].dtype.type(len(node))),
}  # fmt: skip


def begins(sizes: list[int], count: int) -> list[int]:
    return FRAGMENT_OF([0, *[2 * size for size in sizes[:-1]]], count) if sum(sizes[:-1]) else FRAGMENT_OF(sizes, count)


def solving(operation: str, changed: Callable[..., Any]) -> tuple[Any, str, Callable[..., Any]]:
    """Let a solver get other parameters."""
    right = independent._SOLVERS[operation]
    return independent._SOLVERS, operation, lambda dtype, inputs, **given: right(dtype, inputs, **{**given, **changed(given)})


def forgetting(self: Any, p: int, mean: Any) -> None:
    self._optimizers[p].state.clear()
    APPLY(self, p, mean)


def in_one_piece(self: Any, p: int) -> Any:
    """Compress each parameter by itself."""
    found = []
    for place in self.fragments[p]:
        alone = [self.g[place] - x[place] for x in self.ranks]
        found.append(
            alone[0]
            if not alone[0].size
            else local_updates_numpy.compressed_mean([np.pad(d, (0, -d.size % len(alone))) for d in alone])[: alone[0].size]
        )
    return found if self.compression else MEAN(self, p)


def last_parameter_only(self: Any, p: int, mean: Any) -> None:
    before = self.ranks
    APPLY(self, p, mean)
    for old, new in zip(before, self.ranks, strict=True):
        for place in self.fragments[p][:-1]:
            new[place] = old[place]


FRAGMENT_OF, MIXED = local_updates_numpy.fragment_of, local_updates_numpy.mixed
APPLY, MEAN = local_updates_numpy.DiLoCo._apply, local_updates_numpy.DiLoCo._mean_difference
MOVED = local_updates_numpy.InnerSGD._moved
LIBRARY_MEAN = local_updates_numpy.library_mean
IN_LOCAL_UPDATES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "S9.1 offset 1 for 0": solving("local_sgd_schedule", lambda given: {"offset": (given["offset"] + 1) % given["period"]}),
    "S9.1 the warm-up counts": solving("local_sgd", lambda given: {"offset": (given["offset"] - given["warmup_steps"]) % given["period"]}),
    "S9.1 a period more": solving("local_sgd", lambda given: {"period": given["period"] + 1}),
    "S9.1 the sum": (local_updates_numpy, "library_mean", lambda ranks, dtype: LIBRARY_MEAN(ranks, dtype) * ranks[0].dtype.type(len(ranks))),
    "S9.1 gradients over all nodes": solving("local_sgd", lambda given: {"nodes": [sum(given["nodes"])]}),
    "S9.2 no inner momentum": (local_updates_numpy.InnerSGD, "_moved", lambda self, key, x, grad: (self._buffers.clear(), MOVED(self, key, x, grad))[1]),
    "S9.2 no Nesterov": solving("diloco", lambda given: {"outer_nesterov": False}),
    "S9.2 the outer optimizer forgets": (local_updates_numpy.DiLoCo, "_apply", forgetting),
    "S9.3 where it begins": (local_updates_numpy, "fragment_of", begins),
    "S9.3 none is last": (local_updates_numpy, "fragment_of", lambda sizes, count: [min(p, count - 1) for p in FRAGMENT_OF(sizes, count)][::-1]),
    "S9.4 no delay": solving("diloco_schedule", lambda given: {"delay": 0}),
    "S9.4 the difference of the apply": solving("diloco", lambda given: {"delay": 0}),
    "S9.4 the warm-up counts": solving("diloco_schedule", lambda given: {"warmup_steps": 0}),
    "S9.4 the other sign": (local_updates_numpy.DiLoCo, "_mean_difference", lambda self, p: [-d for d in MEAN(self, p)]),
    "S9.4 one formula": (local_updates_numpy, "mixed", lambda x, g, mix, dtype: MIXED(x, g, mix, dtype) if mix < 0.5 else decentralized_numpy.stored(g + x.dtype.type(mix) * (x - g), dtype)),
    "S9.4 the shares swapped": (local_updates_numpy, "mixed", lambda x, g, mix, dtype: MIXED(x, g, 1 - mix, dtype)),
    "S9.4 only the last parameter": (local_updates_numpy.DiLoCo, "_apply", last_parameter_only),
    "S9.5 each parameter by itself": (local_updates_numpy.DiLoCo, "_mean_difference", in_one_piece),
    "S9.5 not compressed": solving("diloco", lambda given: {"compression": None}),
}  # fmt: skip


def client(outputs: Path, vectors: Path = VECTORS, suites: tuple[str, ...] = ()) -> None:
    """Answer cases with the second implementation, with whatever fault is planted; all of them, or of some suites."""
    manifest = manifest_once(vectors)
    tensors, found = read_vectors(vectors, manifest), {}
    for case in [case for case in manifest["cases"] if not suites or case["suite"] in suites]:
        inputs = {entry["name"]: tensors[f"{case['suite']}.inputs.safetensors"][entry["tensor"]] for entry in case["inputs"]}
        answers = independent.solve(case["suite"], case["operation"], case["dtype"], case["parameters"], inputs)
        found |= {f"{case['id']}:{name}": x for name, x in answers.items()}
    outputs.mkdir()
    write_safetensors(outputs / "outputs.safetensors", found)


def test_without_a_fault_the_second_opinion_passes(tmp_path: Path) -> None:
    client(tmp_path / "outputs")
    report = check_outputs(VECTORS, tmp_path / "outputs")
    assert report.passed, [verdict.message for verdict in report.verdicts if verdict.message][:5]


def plant(fault: tuple[Any, str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, replacement = fault
    if isinstance(where, dict):
        monkeypatch.setitem(where, name, replacement)
        return
    monkeypatch.setattr(where, name, replacement)
    for module in (comm_ops_scalar, decentralized_numpy, kernels_scalar, independent):  # modules that imported the name
        if getattr(module, name, None) is not None:
            monkeypatch.setattr(module, name, replacement)


@pytest.mark.parametrize("fault", IN_PYTHON.values(), ids=IN_PYTHON)
def test_a_fault_in_the_second_opinion_is_found(
    fault: tuple[Any, str, Callable[..., Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(fault, monkeypatch)
    with np.errstate(all="ignore"):
        client(tmp_path / "outputs")
    report = check_outputs(VECTORS, tmp_path / "outputs")
    assert report.count("failed") > 0
    assert report.count("missing") == 0


OPERATIONS_OF = {
    "algorithms": ("qadam_frozen_step",),
    "graphs": ("decentralized_on_graph", "graph_sources"),
    "compressed_gradients": ("powersgd_rank", "orthonormalize", "powersgd_round", "topk_count", "topk_indices", "topk"),
    "local_updates": ("fragment_of_parameter", "local_sgd_schedule", "diloco_schedule", "mix", "local_sgd", "diloco"),
}


def zeroed(round_: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a round of powersgd that leaves zeros in one of its results."""

    def changed(*given: Any, **options: Any) -> Any:
        found = round_(*given, **options)
        value = getattr(found, what)
        setattr(found, what, value if value is None else [0 * x for x in value] if isinstance(value, list) else 0 * value)
        return found

    return changed


def forgetful(gradients: Any, errors: Any, ratio: float, dtype: str) -> Any:
    result, left = TOPK_ROUND(gradients, errors, ratio, dtype)
    return result, None if left is None else [0 * e for e in left]


QADAM_STEP = independent._SOLVERS["qadam_frozen_step"]
POWERSGD_ROUND, ORTHONORMAL, START = power_sgd_numpy.power_sgd_round, power_sgd_numpy.orthonormal, power_sgd_numpy.start
TOPK_ROUND, KEPT, RANK_OF = topk_numpy.topk_round, topk_numpy.kept, power_sgd_numpy.compressed_rank
IN_COMPRESSED_GRADIENTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "S10.1 just the rate": (power_sgd_numpy, "compressed_rank", lambda shape, rank, rate: RANK_OF(shape, rank, rate * (1 - 1e-9))),
    "S10.1 no rate": (power_sgd_numpy, "compressed_rank", lambda shape, rank, rate: RANK_OF(shape, rank, 1.0)),
    "S10.2 the other memory": solving("powersgd_round", lambda given: {"memory": "averaged"} if given["memory"] == "local" else {}),
    "S10.2 Q is kept": solving("powersgd_round", lambda given: {"warm_start": True}),
    "S10.2 no memory after it": (power_sgd_numpy, "power_sgd_round", zeroed(POWERSGD_ROUND, "errors")),
    "S10.2 no Q after it": (power_sgd_numpy, "power_sgd_round", zeroed(POWERSGD_ROUND, "q")),
    "S10.2 another round": solving("powersgd_round", lambda given: {"k": given["k"] + 1}),
    "S10.2 another parameter": solving("powersgd_round", lambda given: {"i": 0}),
    "S10.2 dead columns": (power_sgd_numpy, "start", lambda q, *rest: START(q, *rest) if q is None else ORTHONORMAL(q)),
    "S10.3 not orthonormal": (power_sgd_numpy, "orthonormal", lambda matrix: matrix / (np.linalg.norm(matrix, axis=0) + 1e-30)),
    "S10.4 not finite": (power_sgd_numpy, "power_sgd_round", zeroed(POWERSGD_ROUND, "result")),
    "S11.2 rounded down": (topk_numpy, "sent_count", lambda m, ratio: min(m, max(1, int(ratio * m)))),
    "S11.2 in float32": (topk_numpy, "sent_count", lambda m, ratio: min(m, max(1, math.ceil(np.float32(ratio) * np.float32(m))))),
    "S11.2 the last of equals": (topk_numpy, "kept", lambda p, k: sorted(len(p) - 1 - i for i in KEPT(p[::-1], k))),
    "S11.2 NaN is zero": (topk_numpy, "kept", lambda p, k: KEPT(np.nan_to_num(p, nan=0.0, posinf=np.inf, neginf=-np.inf), k)),
    "S11.2 no memory": (topk_numpy, "topk_round", forgetful),
    "S11.2 twice the ratio": solving("topk", lambda given: {"ratio": min(1.0, given["ratio"] * 2)}),
}
LATER_FAULTS = {name: ("graphs", fault) for name, fault in IN_GRAPHS.items()}
LATER_FAULTS |= {name: ("local_updates", fault) for name, fault in IN_LOCAL_UPDATES.items()}
LATER_FAULTS["S5.5 weights with v = 0 move"] = (
    "algorithms",
    (
        independent._SOLVERS,
        "qadam_frozen_step",
        lambda dtype, given, **s: QADAM_STEP(dtype, {**given, "v": given["v"] + 1e-30}, **s),
    ),
)
LATER_FAULTS |= {name: ("compressed_gradients", fault) for name, fault in IN_COMPRESSED_GRADIENTS.items()}


@pytest.mark.parametrize(("suite", "fault"), LATER_FAULTS.values(), ids=LATER_FAULTS)
def test_a_fault_in_the_second_opinion_on_a_later_suite_is_found(
    suite: str, fault: tuple[Any, str, Callable[..., Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(fault, monkeypatch)
    with np.errstate(all="ignore"):
        client(tmp_path / "outputs", LATEST, (suite,))
    report = check_outputs(LATEST, tmp_path / "outputs", operations=OPERATIONS_OF[suite])
    assert (report.count("failed") > 0, report.count("missing")) == (True, 0)


@pytest.mark.parametrize("suite", OPERATIONS_OF)
def test_without_a_fault_the_second_opinion_on_a_later_suite_passes(suite: str, tmp_path: Path) -> None:
    client(tmp_path / "outputs", LATEST, (suite,))
    report = check_outputs(LATEST, tmp_path / "outputs", operations=OPERATIONS_OF[suite])
    assert report.passed, [verdict.message for verdict in report.verdicts if verdict.message][:5]
