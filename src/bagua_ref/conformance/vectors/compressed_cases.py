"""Cases of powersgd and topk: what is compressed, orthonormal columns, counts, and rounds (S10, S11.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.comm_ops.low_rank import Matrix
from bagua_ref.comm_ops.top_k import count_of, largest
from bagua_ref.conformance.vectors.case import Case, canonical, case_id, name_of, seed_of
from bagua_ref.conformance.vectors.compressed_rounds import powersgd_round, topk_round
from bagua_ref.conformance.vectors.in_order import InOrder
from bagua_ref.conformance.vectors.numbers import KINDS, Numbers, tensor_of
from bagua_ref.formulas.low_rank import matrix_shape, orthonormalize, random_columns

__all__ = ["compressed_cases"]

_SUITE, _SINCE = "compressed_gradients", "2"
_SPAN = "SUM(400)"
"""Of what depends on the span of columns from a matrix of moderate condition."""


def compressed_cases() -> Iterator[Case]:
    """Yield every case of suite ``compressed_gradients``."""
    yield from _ranks()
    yield from _counts()
    for dtype in (torch.float32, torch.float64):
        yield from _columns(dtype)
        for number, (ranks, shape, options, kind) in enumerate(_ROUNDS):
            if dtype is torch.float64 and number % 4:
                continue
            yield _round(dtype, f"{number:02}-{ranks}", ranks, shape, options, kind)
    yield from _indices()
    for dtype in COMPRESSIBLE:
        for number, (ranks, size, ratio, feedback, kind) in enumerate(_TOPK):
            yield _topk(dtype, f"{number:02}-{kind}-{ranks}", ranks, size, ratio, feedback, kind)


def _ranks() -> Iterator[Case]:
    """Yield r of n x m gradients, 0 where they are not compressed."""
    sizes = [(4, 4), (4, 5), (5, 4), (3, 6), (6, 3), (3, 7), (1, 30), (30, 1), (0, 3), (64, 75), (1000, 1000), (2**20, 2**20)]
    for rank, rate in ((1, 2.0), (2, 2.0), (4, 1.0), (1, 0.75), (7, 0.01)):
        found = [matrix_shape(size, rank, rate) for size in sizes]
        yield Case(
            _SUITE, "powersgd_rank", "S10.1", "int64", f"{rank}-{rate:g}",
            {"n": torch.tensor([n for n, _ in sizes]), "m": torch.tensor([m for _, m in sizes])},
            {"r": torch.tensor([0 if shape is None else shape[2] for shape in found])},
            {"matrix_approximation_rank": rank, "min_compression_rate": rate}, ("valid", "edge"), since=_SINCE,
        )  # fmt: skip


def _counts() -> Iterator[Case]:
    """Yield k of m elements."""
    sizes = [*range(1, 12), 25, 30, 33, 50, 75, 99, 100, 101, 200, 1000, 12345, 10**6, 10**9, 2**31 - 1]
    for ratio in (0.01, 0.07, 0.55, 1 / 3, 1.0):
        yield Case(
            _SUITE, "topk_count", "S11.2", "int64", f"{ratio:.4g}",
            {"m": torch.tensor(sizes)}, {"k": torch.tensor([count_of(m, ratio) for m in sizes])}, {"ratio": ratio},
            ("valid", "edge"), since=_SINCE,
        )  # fmt: skip


def _size(output: Tensor, magnitude: float) -> Tensor:
    """Return the magnitude of all elements of an output."""
    return torch.full(output.shape, magnitude, dtype=torch.float32)


def _columns(dtype: torch.dtype) -> Iterator[Case]:
    """Yield V V^T of orthonormalized columns, which does not depend on how they were."""
    for name, rows, count, factor in (
        ("plain", 9, 3, 1.0), ("one", 7, 1, 1.0), ("tiny", 8, 3, 2.0**-60), ("huge", 8, 3, 2.0**60),
        ("dependent", 9, 4, 1.0), ("zero", 6, 3, 1.0), ("wide", 3, 5, 1.0), ("all-zero", 4, 2, 0.0),
    ):  # fmt: skip
        numbers = Numbers(seed_of(case_id(_SUITE, "orthonormalize", name_of(dtype), name)))
        x = numbers.uniform(rows * count, dtype).view(rows, count) * factor
        if name == "dependent":
            x[:, 1], x[:, 3] = -2 * x[:, 0], x[:, 0] + x[:, 2]
        if name == "zero":
            x[:, 1] = 0
        v = x.clone()
        with InOrder():
            orthonormalize([v])
            projection = (v.double() @ v.double().T).to(dtype)
        yield Case(
            _SUITE, "orthonormalize", "S10.3", name_of(dtype), name, {"x": x}, {"projection": projection},
            {}, ("valid" if name in ("plain", "one") else "edge",), "SUM(16)", {"projection": _size(projection, 1.0)}, _SINCE,
        )  # fmt: skip


_ROUNDS: tuple[tuple[int, tuple[int, int, int], dict[str, Any], str], ...] = (
    (1, (6, 5, 2), {"memory": "local", "warm_start": True, "k": 0}, "first"),
    (2, (4, 9, 1), {"memory": "local", "warm_start": True, "k": 0}, "first"),
    (2, (9, 4, 2), {"memory": "averaged", "warm_start": True, "k": 7}, "later"),
    (3, (5, 8, 2), {"memory": "local", "warm_start": True, "k": 1}, "later"),
    (4, (7, 6, 3), {"memory": None, "warm_start": True, "k": 2}, "later"),
    (2, (6, 7, 2), {"memory": "local", "warm_start": False, "k": 3}, "later"),
    (2, (6, 7, 2), {"memory": "averaged", "warm_start": False, "k": 1000}, "first"),
    (2, (5, 6, 2), {"memory": "local", "warm_start": True, "k": 4}, "one column zero"),
    (2, (5, 6, 3), {"memory": "averaged", "warm_start": True, "k": 5}, "all columns zero"),
    (2, (5, 6, 2), {"memory": "local", "warm_start": True, "k": 6}, "gradients zero"),
    (3, (6, 5, 2), {"memory": "local", "warm_start": True, "k": 1}, "NaN"),
    (2, (6, 5, 1), {"memory": "averaged", "warm_start": True, "k": 1}, "infinite"),
    (2, (8, 9, 2), {"memory": "local", "warm_start": True, "k": 0}, "low rank"),
)


def _round(dtype: torch.dtype, name: str, ranks: int, shape: tuple[int, int, int], options: dict[str, Any], kind: str) -> Case:
    """Return a round of one gradient on all ranks."""
    (n, m, r), place, seed = shape, 2, 11
    numbers = Numbers(seed_of(case_id(_SUITE, "powersgd_round", name_of(dtype), name)))
    gradients = numbers.uniform(ranks * n * m, dtype).view(ranks, n, m)
    if kind == "low rank":
        with InOrder():
            gradients[:] = numbers.uniform(n * r, dtype).view(n, r) @ numbers.uniform(r * m, dtype).view(r, m)
    if kind == "gradients zero":
        gradients.zero_()
    if kind in ("NaN", "infinite"):
        gradients[1, 2, 3] = torch.nan if kind == "NaN" else torch.inf
    inputs = {"gradients": canonical(gradients), "columns": random_columns(m, r, seed, options["k"], place)}
    q, errors = torch.zeros(m, r, dtype=dtype), torch.zeros_like(gradients)
    if kind not in ("first", "low rank"):
        q = numbers.uniform(m * r, dtype).view(m, r)
        if kind == "all columns zero":
            q.zero_()
        if kind == "one column zero":
            q[:, -1] = 0
        inputs["q"] = q
        if options["memory"] is not None:
            errors = numbers.uniform(ranks * n * m, dtype, -1, 1).view(ranks, n, m) * (kind != "gradients zero")
            inputs["errors"] = errors
    factors = [{"x": q.clone()} for _ in range(ranks)]
    left = [{"x": e.clone()} for e in errors]
    xs = powersgd_round(
        [g.reshape(-1) for g in gradients], [Matrix("x", 0, n, m, r, place)], factors, left, options["k"],
        memory=options["memory"], warm_start=options["warm_start"], seed=seed,
    )  # fmt: skip
    with InOrder():
        outputs = {"x": xs[0].view(n, m), "qq": (factors[0]["x"].double() @ factors[0]["x"].double().T).to(dtype)}
    if options["memory"] is not None:
        outputs["errors"] = torch.stack([e["x"] for e in left])
    size = 5 * (n + m) ** 0.5
    magnitudes = {out: _size(x, size if out != "qq" else size * size * n) for out, x in outputs.items()}
    flag = "valid" if kind in ("first", "later", "low rank") else "edge"
    clause = "S10.4" if kind in ("NaN", "infinite") else "S10.2"
    return Case(
        _SUITE, "powersgd_round", clause, name_of(dtype), name, inputs,
        {out: canonical(x) for out, x in outputs.items()}, {**options, "seed": seed, "i": place}, (flag,),
        _SPAN, magnitudes, _SINCE,
    )  # fmt: skip


def _indices() -> Iterator[Case]:
    """Yield the indices of the k largest elements, ascending."""
    for kind in ("plain", "special", "ties"):
        numbers = Numbers(seed_of(case_id(_SUITE, "topk_indices", "float32", kind)))
        p = tensor_of([numbers.below(5) - 2.0 for _ in range(40)], torch.float32)
        if kind != "ties":
            p = canonical(KINDS[kind][1](numbers, 40, torch.float32))
        for k in (1, 9):
            yield Case(
                _SUITE, "topk_indices", "S11.2", "float32", f"{kind}-{k}", {"p": p}, {"indices": largest(p, k)}, {"k": k},
                ("valid" if kind == "plain" else "edge",), since=_SINCE,
            )  # fmt: skip


_TOPK: tuple[tuple[int, int, float, bool, str], ...] = (
    (1, 17, 0.1, True, "plain"),
    (4, 12, 0.25, True, "wide"),
    (3, 9, 0.4, False, "plain"),
    (3, 14, 0.5, True, "special"),
    (2, 10, 0.3, True, "huge"),
)


def _topk(dtype: torch.dtype, name: str, ranks: int, size: int, ratio: float, feedback: bool, kind: str) -> Case:
    """Return three rounds of one bucket on all ranks."""
    numbers, steps = Numbers(seed_of(case_id(_SUITE, "topk", name_of(dtype), name))), 3
    gradients = canonical(KINDS[kind][1](numbers, steps * ranks * size, dtype)).view(steps, ranks, size)
    errors = [torch.zeros(size) for _ in range(ranks)]
    xs: list[Tensor] = []
    left: list[Tensor] = []
    for of_ranks in gradients:
        xs.append(topk_round(list(of_ranks), errors if feedback else None, ratio)[0])
        left.append(torch.stack(errors))
    outputs = {"x": canonical(torch.stack(xs))} | ({"errors": canonical(torch.stack(left))} if feedback else {})
    parameters = {"ratio": ratio, "error_feedback": feedback}
    flags = (KINDS[kind][0],)
    return Case(_SUITE, "topk", "S11.2", name_of(dtype), name, {"gradients": gradients}, outputs, parameters, flags, since=_SINCE)
