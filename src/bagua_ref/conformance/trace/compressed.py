"""Replay of powersgd and topk: rounds from the recorded gradients, memories and factors (S10, S11.2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bagua_ref.base.untrusted import NATURAL, check_form, load_json
from bagua_ref.comm_ops.low_rank import Matrix
from bagua_ref.conformance.expected import power_sgd_numpy as plain
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.trace.expectation import Expected, NotReplayable
from bagua_ref.conformance.trace.files import Record
from bagua_ref.conformance.vectors.compressed_rounds import powersgd_round, topk_round

__all__ = ["expected_of_powersgd", "expected_of_topk"]

_SPAN = 400
"""Tolerance, in eps, of projections on columns whose span is known to 100 times the rounding of what was added up for them."""


def expected_of_powersgd(records: list[Record], xs: list[Tensor], options: dict[str, Any]) -> list[Expected]:
    """S10.2 to S10.4: the averaged gradients, e, and Q Q^T, which does not depend on the basis.

    Matrices for which rounding decides what P spans are compared as far as values are finite.
    """
    matrices, k, n = _matrices(records, xs[0].numel()), _number(records, "k"), len(xs)
    wide = torch.float64 if xs[0].dtype is torch.float64 else torch.float32
    remembers, fresh = options["memory"] is not None, k == 0
    qs = _kept(records, "q", [a.m * a.r for a in matrices], wide, fresh or not options["warm_start"])
    es = _kept(records, "e", [a.n * a.m for a in matrices], wide, fresh or not remembers)
    factors = [{a.name: q.view(a.m, a.r) for a, q in zip(matrices, of_rank, strict=True)} for of_rank in qs]
    errors = [{a.name: e.view(a.n, a.m) for a, e in zip(matrices, of_rank, strict=True)} for of_rank in es]
    part = max(n + 1, 4) / _SPAN  # of what is only added up, and of what is rounded to 16 bits
    mass = torch.stack(xs).double().abs().mean(0) * part
    of_errors, of_factors = [], []
    for a in matrices:
        given = [x[a.start : a.end].view(a.n, a.m).to(wide).numpy() for x in xs]
        given += [e[a.name].numpy() for e in errors] if remembers else []
        q, size = factors[0][a.name].numpy(), plain.norm(given)
        columns = plain.start(q if options["warm_start"] else None, (a.m, a.r), q.dtype.type, options["seed"], k, a.place)
        tame = plain.is_tame(q) and plain.is_tame(plain.added(given) @ columns, size)
        size = size if tame else math.inf
        mass[a.start : a.end] = size * (part if xs[0].dtype.itemsize == 2 else 1)
        of_errors.append(torch.full((a.n * a.m,), size, dtype=torch.float64))
        of_factors.append(torch.full((a.m * a.m,), size * size * a.n, dtype=torch.float64))
    settings = {name: options[name] for name in ("memory", "warm_start", "seed")}
    found = [Expected("x", powersgd_round(xs, matrices, factors, errors, k, **settings), SUM(_SPAN), mass)]
    if matrices and remembers and all("e" in record.outputs for record in records):
        left = [torch.cat([e[a.name].reshape(-1) for a in matrices]) for e in errors]
        found.append(Expected("e", left, SUM(_SPAN), torch.cat(of_errors)))
    if matrices and all("q" in record.outputs for record in records):
        for rank, record in enumerate(records):
            parts = _split(record.outputs["q"], [a.m * a.r for a in matrices], "output q", rank)
            record.outputs["factor"] = _grams([q.view(a.m, a.r) for a, q in zip(matrices, parts, strict=True)])
        wanted = [_grams([factor[a.name] for a in matrices]) for factor in factors]
        found.append(Expected("factor", wanted, SUM(_SPAN), torch.cat(of_factors)))
    return found


def expected_of_topk(records: list[Record], xs: list[Tensor], options: dict[str, Any]) -> list[Expected]:
    """S11.2: the averaged gradients, and e, bit for bit. Elements after the first ``elements`` are padding."""
    size = _number(records, "elements", xs[0].numel())
    if size > xs[0].numel():
        raise NotReplayable(f"elements={size} of a bucket of {xs[0].numel()}")
    errors = None
    if options["error_feedback"]:
        errors = [e for (e,) in _kept(records, "e", [size], torch.float32, _number(records, "k", 1) == 0)]
    results = topk_round([x[:size] for x in xs], errors, options["ratio"])
    found = [Expected("x", [torch.cat([result, x[size:]]) for result, x in zip(results, xs, strict=True)])]
    if errors is not None and all("e" in record.outputs for record in records):
        found.append(Expected("e", errors))
    return found


def _grams(factors: list[Tensor]) -> Tensor:
    """Return every Q Q^T, one after the other."""
    return torch.cat([(q.double() @ q.double().T).reshape(-1).to(q.dtype) for q in factors])


def _number(records: list[Record], name: str, default: int | None = None) -> int:
    """Return what all ranks have as info."""
    found = [record.info.get(name, default) for record in records]
    if found[0] is None:
        raise NotReplayable(f"info {name!r} was not recorded")
    if differing := [rank for rank, value in enumerate(found) if value != found[0]]:
        raise NotReplayable(f"rank {differing[0]} recorded {name}={found[differing[0]]}, and rank 0 {name}={found[0]}")
    return int(found[0])


def _matrices(records: list[Record], size: int) -> list[Matrix]:
    """Return what is compressed, which is JSON of a list with [start, n, m, r, i] of each matrix."""
    texts = [record.info.get("matrices") for record in records]
    if texts[0] is None or any(text != texts[0] for text in texts):
        raise NotReplayable("info 'matrices' was not recorded, or differs between ranks")
    try:
        rows = load_json(texts[0].encode())
        check_form(rows, [[NATURAL]], "matrices")
        found = [Matrix(str(place), *row) for place, row in enumerate(rows)]
    except (TypeError, ValueError) as error:
        raise NotReplayable(f"the recorded matrices cannot be used: {error}") from None
    end = 0
    for a in found:
        if a.start < end or a.end > size or not 1 <= a.r <= min(a.n, a.m):
            raise NotReplayable(f"the recorded matrices cannot be used: {a} in a bucket of {size} elements")
        end = a.end
    return found


def _kept(records: list[Record], role: str, sizes: list[int], dtype: torch.dtype, optional: bool) -> list[list[Tensor]]:
    """Return copies of what each rank kept for each matrix, zeros where it may be missing."""
    found = []
    for rank, record in enumerate(records):
        x = record.inputs.get(role)
        if x is None and not optional:
            raise NotReplayable(f"input {role!r} was not recorded on rank {rank}")
        x = torch.zeros(sum(sizes), dtype=dtype) if x is None else x.clone()
        if x.dtype is not dtype:
            raise NotReplayable(f"input {role!r} of rank {rank} is {x.dtype}, and must be {dtype}")
        found.append(_split(x, sizes, f"input {role}", rank))
    return found


def _split(x: Tensor, sizes: list[int], what: str, rank: int) -> list[Tensor]:
    if x.numel() != sum(sizes):
        raise NotReplayable(f"{what} of rank {rank} has {x.numel()} elements, and must have {sum(sizes)}")
    return list(x.split(sizes)) if sizes else []
