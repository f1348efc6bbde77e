"""Cases of trainings and of what they consist of: S5.1 to S5.5, local updates (S9), powersgd (S10)
and topk (S11.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bagua_ref.backends.base import FLOATS
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.conformance.expected.algorithms_numpy import wide
from bagua_ref.conformance.expected.compression_numpy import fresh, product
from bagua_ref.conformance.vectors.case import KINDS, Case, numbers_of, tensor_of

__all__ = ["algorithm_cases", "compressed_cases", "local_update_cases", "optimizer_cases"]

_Trainings: TypeAlias = "tuple[tuple[tuple[int, ...], dict[str, Any]], ...]"

_SIZES = (3, 1, 4, 0, 5)
"""Elements of the parameters: 13, so that buckets are padded on every number of ranks but 1."""


def _training(
    suite: str,
    operation: str,
    clause: str,
    dtype: torch.dtype,
    place: int,
    nodes: tuple[int, ...],
    options: dict[str, Any],
    steps: int,
    exact: bool,
) -> Case:
    """Return a training; if ``exact``, sums over ranks are the same in any order."""
    n, name = sum(nodes), f"{place:02}-{'+'.join(map(str, nodes))}"
    numbers, size = numbers_of(suite, operation, dtype, name), sum(_SIZES)
    x, shape = numbers.of("eighths", size, dtype), (steps, n, size)
    gradients = (
        numbers.each(shape, dtype, lambda: (numbers.below(15) - 7) / 8)
        if exact
        else numbers.uniform(shape, dtype, -1, 1)
    )
    inputs = {"x": x, "gradients": gradients}
    parameters = {"nodes": list(nodes), "sizes": list(_SIZES), "lr": 0.5, **options}
    return Case(suite, operation, clause, dtype, name, inputs, parameters)


_FLAT, _HIERARCHICAL = {"hierarchical": False}, {"hierarchical": True}
_EVERY_STEP = {"communication_interval": 1}
_GRADIENT_ALLREDUCE: _Trainings = (
    ((1,), {**_FLAT, "average": True}),
    ((3,), {**_FLAT, "average": False}),
    ((4,), {**_FLAT, "average": True}),
    ((3, 1), {**_HIERARCHICAL, "average": True}),
    ((1, 2), {**_HIERARCHICAL, "average": False}),
)
_BYTEGRAD: _Trainings = (
    ((1,), {**_FLAT, "average": True}),
    ((2,), {**_FLAT, "average": False}),
    ((5,), {**_FLAT, "average": True}),
    ((3, 1), {**_HIERARCHICAL, "average": True}),
    ((1, 3, 2), {**_HIERARCHICAL, "average": False}),
)
_DECENTRALIZED: _Trainings = (
    ((2,), {**_FLAT, "peer_selection_mode": "all", **_EVERY_STEP}),
    ((4,), {**_FLAT, "peer_selection_mode": "shift_one", **_EVERY_STEP}),
    ((6,), {**_FLAT, "peer_selection_mode": "shift_one", "communication_interval": 2}),
    ((3, 1), {**_HIERARCHICAL, "peer_selection_mode": "shift_one", **_EVERY_STEP}),
    (
        (2, 1, 1, 2),
        {**_HIERARCHICAL, "peer_selection_mode": "shift_one", "communication_interval": 3},
    ),
)
_RING: _Trainings = (
    ((1,), {**_FLAT, **_EVERY_STEP}),
    ((2,), {**_FLAT, **_EVERY_STEP}),
    ((3,), {**_FLAT, "communication_interval": 2}),
    ((5,), {**_FLAT, **_EVERY_STEP}),
    ((1, 3, 2), {**_HIERARCHICAL, **_EVERY_STEP}),
)
_ALGORITHMS = (
    (
        FLOATS,
        (
            ("gradient_allreduce", "S5.1", _GRADIENT_ALLREDUCE),
            ("decentralized", "S5.3", _DECENTRALIZED),
        ),
    ),
    (
        COMPRESSIBLE,
        (("bytegrad", "S5.2", _BYTEGRAD), ("low_precision_decentralized", "S5.4", _RING)),
    ),
)


def algorithm_cases() -> Iterator[Case]:
    """Yield every case of suite ``algorithms`` but those of `optimizer_cases`."""
    for dtypes, algorithms in _ALGORITHMS:
        for dtype in dtypes:
            for name, clause, rows in algorithms:
                for place, (nodes, options) in enumerate(rows):
                    yield _training(
                        "algorithms",
                        name,
                        clause,
                        dtype,
                        place,
                        nodes,
                        options,
                        4,
                        name == "gradient_allreduce",
                    )


def optimizer_cases() -> Iterator[Case]:
    """Yield steps along m with frozen v, by a library's operations, so within ULP(4) (S5.5)."""
    for dtype in (torch.float32, torch.float64):
        for place, (s, lr, beta1, beta2, eps) in enumerate(
            (
                (1, 1e-3, 0.9, 0.999, 1e-8),
                (2, 0.05, 0.9, 0.999, 1e-8),
                (100, 1e-2, 0.95, 0.98, 1e-4),
                (5000, 0.1, 0.0, 0.5, 1e-2),
                (100, 1e-2, 0.9, 0.999, 1e-8),
            )
        ):
            still = place == 4
            suite, operation, flag = (
                ("algorithms", "qadam_frozen_step", "edge")
                if still
                else ("qadam", "qadam_step", "valid")
            )
            numbers = numbers_of(suite, operation, dtype, f"s{s}-{place}")
            # The step is no larger than the weight, so that its last bit stays the weight's.
            p, m, v = (
                numbers.uniform(24, dtype, 1, 2),
                numbers.uniform(24, dtype, -0.1, 0.1),
                numbers.uniform(24, dtype, 0.5, 1),
            )
            v[: 24 * still : 3] = 0
            parameters = {"s": s, "lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
            inputs = {"p": p, "m": m, "v": v}
            yield Case(
                suite,
                operation,
                "S5.5",
                dtype,
                f"s{s}-{place}",
                inputs,
                parameters,
                (flag,),
                "ULP(4)",
            )


# Local updates

_LOCAL_SGD: _Trainings = (
    ((2,), {"period": 2, "offset": 0, "warmup_steps": 0, **_FLAT, "momentum": 0.5}),
    ((1, 1), {"period": 3, "offset": 1, "warmup_steps": 2, **_FLAT, "momentum": 0.0}),
    ((4,), {"period": 2, "offset": 1, "warmup_steps": 1, **_FLAT, "momentum": 0.0}),
    ((2, 2), {"period": 3, "offset": 0, "warmup_steps": 1, **_HIERARCHICAL, "momentum": 0.0}),
)
_DEFAULTS: dict[str, Any] = {
    "delay": 0,
    "mix": 0.0,
    "warmup_steps": 0,
    "compression": None,
    "momentum": 0.0,
    "outer_lr": 0.5,
    "outer_momentum": 0.5,
    "outer_nesterov": True,
}
_BYTES = {"compression": "MinMaxUInt8"}
_DILOCO: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("S9.2", (1,), {"period": 2, "fragments": 1, "momentum": 0.5}),
    (
        "S9.2",
        (2,),
        {
            "period": 1,
            "fragments": 1,
            "outer_lr": 1.0,
            "outer_momentum": 0.0,
            "outer_nesterov": False,
        },
    ),
    ("S9.2", (2,), {"period": 3, "fragments": 1, "warmup_steps": 2, "outer_nesterov": False}),
    ("S9.3", (1, 1), {"period": 4, "fragments": 4}),
    ("S9.3", (2,), {"period": 3, "fragments": [[4, 0], [1], [3, 2]]}),
    ("S9.4", (2,), {"period": 4, "fragments": 2, "delay": 1}),
    ("S9.4", (2,), {"period": 6, "fragments": 2, "delay": 2, "mix": 0.3, "warmup_steps": 1}),
    ("S9.4", (1, 1), {"period": 3, "fragments": 1, "delay": 2, "mix": 0.5, "momentum": 0.5}),
    (
        "S9.4",
        (4,),
        {"period": 4, "fragments": 2, "delay": 1, "outer_momentum": 0.0, "outer_nesterov": False},
    ),
    ("S9.5", (2,), {"period": 2, "fragments": 2, **_BYTES}),
    ("S9.5", (3,), {"period": 2, "fragments": 1, **_BYTES, "delay": 1}),
    ("S9.5", (2, 3), {"period": 4, "fragments": [[4, 2], [0, 1, 3]], **_BYTES, "mix": 0.9}),
)


def local_update_cases() -> Iterator[Case]:
    """Yield every case of suite ``local_updates``; trainings of more than two ranks have exact sums
    if nothing is compressed.
    """
    yield from _fragments()
    yield from _schedules()
    for dtype in FLOATS:
        yield from _mixes(dtype)
        for place, (nodes, options) in enumerate(_LOCAL_SGD):
            yield _training(
                "local_updates",
                "local_sgd",
                "S9.1",
                dtype,
                place,
                nodes,
                options,
                8,
                sum(nodes) > 2,
            )
        for place, (clause, nodes, options) in enumerate(_DILOCO):
            exact = options.get("compression") is None
            if dtype is not torch.float64 or exact:
                more = {**_DEFAULTS, **options}
                yield _training(
                    "local_updates",
                    "diloco",
                    clause,
                    dtype,
                    place,
                    nodes,
                    more,
                    8,
                    exact and sum(nodes) > 2,
                )


def _fragments() -> Iterator[Case]:
    """Yield the fragment of each parameter, by its bytes."""
    for name, given in {
        "equal": [8] * 12,
        "one-large": [4, 4, 4000, 4, 4, 4],
        "large-first": [4000, 4, 4, 4, 4, 4],
        "large-last": [4, 4, 4, 4, 4, 4000],
        "alternating": [400, 4] * 6,
        "zeros": [0, 0, 0, 0],
        "some-zeros": [0, 6, 0, 0, 2, 4, 0],
        "halves": [1, 1, 2, 2, 4, 4, 8, 8],
        "beyond-32-bits": [2**33, 2**32 + 2, 2**31, 2, 2**33 - 2],
    }.items():
        for count in sorted({1, 2, 3, len(given) - 1, len(given)}):
            yield _whole(
                "local_updates",
                "fragment_of_parameter",
                "S9.3",
                f"{name}-{count}",
                {"bytes": given},
                fragments=count,
            )


def _whole(
    suite: str,
    operation: str,
    clause: str,
    name: str,
    inputs: dict[str, list[int]],
    **parameters: Any,
) -> Case:
    """Return a case of integers."""
    tensors = {key: torch.tensor(values) for key, values in inputs.items()}
    return Case(suite, operation, clause, torch.int64, name, tensors, parameters, ("valid", "edge"))


def _schedules() -> Iterator[Case]:
    """Yield what is averaged, sent or applied after steps, the last of them beyond 32 bits."""
    for operation, clause, names, rows in (
        (
            "local_sgd_schedule",
            "S9.1",
            ("period", "offset", "warmup_steps"),
            ((1, 0, 0), (4, 0, 0), (4, 1, 0), (4, 3, 2), (5, 0, 3), (7, 2, 1)),
        ),
        (
            "diloco_schedule",
            "S9.4",
            ("period", "fragments", "delay", "warmup_steps"),
            (
                (1, 1, 0, 0),
                (6, 1, 0, 0),
                (6, 1, 5, 0),
                (6, 3, 0, 0),
                (6, 3, 1, 0),
                (12, 4, 2, 3),
                (20, 2, 9, 1),
                (5, 5, 0, 2),
            ),
        ),
    ):
        for row in rows:
            steps = {"step": [*range(1, 2 * row[0] + row[-1] + 2), 2**40 + 1, 2**40 + 2, 2**40 + 3]}
            parameters = dict(zip(names, row, strict=True))
            yield _whole(
                "local_updates", operation, clause, "-".join(map(str, row)), steps, **parameters
            )


def _mixes(dtype: torch.dtype) -> Iterator[Case]:
    """Yield weights after mixing with g, which is float32 (float64 for float64)."""
    for kind in ("plain", "wide", "denormal", "huge", "special", "zeros"):
        for mix in (0.0, 0.3, 0.5, 0.9, 1.0):
            numbers = numbers_of("local_updates", "mix", dtype, f"{kind}-{mix:g}")
            x, g = numbers.of(kind, 33, dtype), numbers.of(kind, 33, dtype).to(wide(dtype))
            if kind in ("plain", "wide"):  # bits that x has no room for
                g = g + g * numbers.uniform(33, wide(dtype), -1e-3, 1e-3)
            yield Case(
                "local_updates",
                "mix",
                "S9.4",
                dtype,
                f"{kind}-{mix:g}",
                {"x": x, "g": g},
                {"mix": mix},
                (KINDS[kind],),
            )


# Compressed gradients

_LOCAL: dict[str, Any] = {"memory": "local", "warm_start": True}
_AVERAGED: dict[str, Any] = {"memory": "averaged", "warm_start": True}
_ROUNDS: tuple[tuple[int, tuple[int, int, int], dict[str, Any], str], ...] = (
    (1, (6, 5, 2), {**_LOCAL, "k": 0}, "first"),
    (2, (4, 9, 1), {**_LOCAL, "k": 0}, "first"),
    (2, (9, 4, 2), {**_AVERAGED, "k": 7}, "later"),
    (3, (5, 8, 2), {**_LOCAL, "k": 1}, "later"),
    (4, (7, 6, 3), {"memory": None, "warm_start": True, "k": 2}, "later"),
    (2, (6, 7, 2), {"memory": "local", "warm_start": False, "k": 3}, "later"),
    (2, (6, 7, 2), {"memory": "averaged", "warm_start": False, "k": 1000}, "first"),
    (2, (5, 6, 2), {**_LOCAL, "k": 4}, "one column zero"),
    (2, (5, 6, 3), {**_AVERAGED, "k": 5}, "all columns zero"),
    (2, (5, 6, 2), {**_LOCAL, "k": 6}, "gradients zero"),
    (3, (6, 5, 2), {**_LOCAL, "k": 1}, "NaN"),
    (2, (6, 5, 1), {**_AVERAGED, "k": 1}, "infinite"),
    (2, (8, 9, 2), {**_LOCAL, "k": 0}, "low rank"),
)
_TOPK: tuple[tuple[int, int, float, bool, str], ...] = (
    (1, 17, 0.1, True, "plain"),
    (4, 12, 0.25, True, "wide"),
    (3, 9, 0.4, False, "plain"),
    (3, 14, 0.5, True, "special"),
    (2, 10, 0.3, True, "huge"),
)


_MEMORIES: tuple[tuple[tuple[int, ...], bool, bool, str, int, str], ...] = (
    ((1,), False, True, "MinMaxUInt8", 9, "plain"),
    ((2,), False, True, "MinMaxUInt8", 13, "wide"),
    ((3,), False, False, "MXFP8", 10, "plain"),
    ((3, 1), True, True, "MinMaxUInt8", 21, "plain"),
    ((1, 3), True, False, "MXFP4", 9, "wide"),
    ((2,), True, True, "MXINT8", 8, "plain"),
    ((2,), False, True, "MinMaxUInt8", 12, "special"),
)


def compressed_cases() -> Iterator[Case]:
    """Yield every case of suite ``compressed_gradients``."""
    sizes = [
        (4, 4),
        (4, 5),
        (5, 4),
        (3, 6),
        (6, 3),
        (3, 7),
        (1, 30),
        (30, 1),
        (0, 3),
        (64, 75),
        (1000, 1000),
        (2**20, 2**20),
    ]
    shapes = {"n": [n for n, _ in sizes], "m": [m for _, m in sizes]}
    for rank, rate in ((1, 2.0), (2, 2.0), (4, 1.0), (1, 0.75), (7, 0.01)):
        options = {"matrix_approximation_rank": rank, "min_compression_rate": rate}
        yield _whole(
            "compressed_gradients", "powersgd_rank", "S10.1", f"{rank}-{rate:g}", shapes, **options
        )
    counts = {
        "m": [
            *range(1, 12),
            25,
            30,
            33,
            50,
            75,
            99,
            100,
            101,
            200,
            1000,
            12345,
            10**6,
            10**9,
            2**31 - 1,
        ]
    }
    for ratio in (0.01, 0.07, 0.55, 1 / 3, 1.0):
        yield _whole(
            "compressed_gradients", "topk_count", "S11.2", f"{ratio:.4g}", counts, ratio=ratio
        )
    for dtype in (torch.float32, torch.float64):
        yield from _columns(dtype)
        for place, (ranks, shape, options, kind) in enumerate(_ROUNDS):
            if dtype is torch.float32 or place % 4 == 0:
                yield _round(dtype, f"{place:02}-{ranks}", ranks, shape, options, kind)
    for kind in ("plain", "special", "ties"):
        numbers = numbers_of("compressed_gradients", "topk_indices", torch.float32, kind)
        p = tensor_of([numbers.below(5) - 2.0 for _ in range(40)], torch.float32)
        p = p if kind == "ties" else numbers.of(kind, 40, torch.float32)
        for k in (1, 9):
            flags = ("valid" if kind == "plain" else "edge",)
            yield Case(
                "compressed_gradients",
                "topk_indices",
                "S11.2",
                torch.float32,
                f"{kind}-{k}",
                {"p": p},
                {"k": k},
                flags,
            )
    for dtype in COMPRESSIBLE:
        for place, (ranks, size, ratio, feedback, kind) in enumerate(_TOPK):
            parameters = {"ratio": ratio, "error_feedback": feedback}
            yield _three_rounds("topk", "S11.2", dtype, place, kind, ranks, size, parameters)
        for place, (nodes, between, average, codec, size, kind) in enumerate(_MEMORIES):
            settings = {
                "nodes": list(nodes),
                "hierarchical": between,
                "average": average,
                "codec": codec,
            }
            yield _three_rounds(
                "error_feedback", "S11.1", dtype, place, kind, sum(nodes), size, settings
            )


def _three_rounds(
    operation: str,
    clause: str,
    dtype: torch.dtype,
    place: int,
    kind: str,
    ranks: int,
    size: int,
    parameters: dict[str, Any],
) -> Case:
    name = f"{place:02}-{kind}-{ranks}"
    inputs = {
        "gradients": numbers_of("compressed_gradients", operation, dtype, name).of(
            kind, (3, ranks, size), dtype
        )
    }
    return Case(
        "compressed_gradients", operation, clause, dtype, name, inputs, parameters, (KINDS[kind],)
    )


def _columns(dtype: torch.dtype) -> Iterator[Case]:
    """Yield V V^T of orthonormalized columns, which does not depend on how they were."""
    for name, rows, count, factor in (
        ("plain", 9, 3, 1.0),
        ("one", 7, 1, 1.0),
        ("tiny", 8, 3, 2.0**-60),
        ("huge", 8, 3, 2.0**60),
        ("dependent", 9, 4, 1.0),
        ("zero", 6, 3, 1.0),
        ("wide", 3, 5, 1.0),
        ("all-zero", 4, 2, 0.0),
        ("short", 4, 2, 1.0),
    ):
        numbers = numbers_of("compressed_gradients", "orthonormalize", dtype, name)
        x = numbers.uniform((rows, count), dtype) * factor
        if name == "dependent":
            x[:, 1], x[:, 3] = -2 * x[:, 0], x[:, 0] + x[:, 2]
        if name == "zero":
            x[:, 1] = 0
        if name == "short":
            x[:] = torch.eye(rows, count)
            x[:, 1] *= 1e-7
        flags = ("valid" if name in ("plain", "one") else "edge",)
        yield Case(
            "compressed_gradients",
            "orthonormalize",
            "S10.3",
            dtype,
            name,
            {"x": x},
            {},
            flags,
            "SUM(16)",
            {"projection": 1.0},
        )


def _round(
    dtype: torch.dtype,
    name: str,
    ranks: int,
    shape: tuple[int, int, int],
    options: dict[str, Any],
    kind: str,
) -> Case:
    """Return a round of one gradient on all ranks, with the tolerance of spans of columns from a
    matrix of moderate condition.
    """
    (n, m, r), place, seed = shape, 2, 11
    numbers = numbers_of("compressed_gradients", "powersgd_round", dtype, name)
    gradients = numbers.uniform((ranks, n, m), dtype)
    if kind == "low rank":
        left, right = numbers.uniform((n, r), dtype), numbers.uniform((r, m), dtype)
        gradients[:] = torch.from_numpy(product(left.numpy(), right.numpy()))
    if kind == "gradients zero":
        gradients.zero_()
    if kind in ("NaN", "infinite"):
        gradients[1, 2, 3] = torch.nan if kind == "NaN" else torch.inf
    inputs: dict[str, Tensor] = {
        "gradients": gradients,
        "columns": torch.from_numpy(fresh(m, r, seed, options["k"], place)),
    }
    if kind not in ("first", "low rank"):
        inputs["q"] = numbers.uniform((m, r), dtype)
        if kind in ("all columns zero", "one column zero"):
            inputs["q"][:, 0 if kind == "all columns zero" else -1 :] = 0
        if options["memory"] is not None:
            inputs["errors"] = numbers.uniform((ranks, n, m), dtype, -1, 1) * (
                kind != "gradients zero"
            )
    size = 5 * (n + m) ** 0.5
    magnitudes = {"x": size, "qq": size * size * n, "errors": size}
    return Case(
        "compressed_gradients",
        "powersgd_round",
        "S10.4" if kind in ("NaN", "infinite") else "S10.2",
        dtype,
        name,
        inputs,
        {**options, "seed": seed, "i": place},
        ("valid" if kind in ("first", "later", "low rank") else "edge",),
        "SUM(400)",
        magnitudes,
    )
