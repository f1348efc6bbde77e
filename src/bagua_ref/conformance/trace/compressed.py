"""Expected results of rounds of powersgd and topk, from the recorded gradients, memories and factors (S10, S11.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends.base import FLOATS
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.base.untrusted import NATURAL, check_form, load_json
from bagua_ref.comm_ops.low_rank import Matrix
from bagua_ref.conformance.expected import compression_numpy
from bagua_ref.conformance.expected.tolerances import SUM
from bagua_ref.conformance.formats.safetensors_file import name_of
from bagua_ref.conformance.trace.exchanges import Expected, NotReplayable, inputs, refuse_divided, shared_number
from bagua_ref.conformance.trace.files import Record

__all__ = ["powersgd_round", "topk_round"]

_SPAN = 400
"""Tolerance, in eps, of projections on columns whose span is known to 100 times the rounding of what was added up for them."""


def powersgd_round(records: Sequence[Record], options: Mapping[str, Any]) -> list[Expected]:
    """Return the averaged gradients, e, and Q Q^T, which does not depend on the basis (S10.2 to S10.4).

    Matrices for which rounding decides what P spans are compared as far as values are finite.
    """
    refuse_divided(records)
    xs = inputs(records, "x", FLOATS)
    matrices, k, n, dtype = _matrices(records, xs[0].numel()), shared_number(records, "k"), len(xs), xs[0].dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    remembers, fresh = options["memory"] is not None, k == 0
    qs = _kept(records, "q", [(a.m, a.r) for a in matrices], wide, fresh or not options["warm_start"])[0]
    es = _kept(records, "e", [(a.n, a.m) for a in matrices], wide, fresh or not remembers)
    part = max(n + 1, 4) / _SPAN  # of what is only added up, and of what is rounded to 16 bits
    arrays = [x.to(wide).numpy() for x in xs]
    mean, mass = compression_numpy.added(arrays) / arrays[0].dtype.type(n), np.abs(np.stack(arrays).astype(float)).mean(0) * part
    left: list[list[Any]] = [[] for _ in xs]
    factors, of_errors, of_factors = [], [], []
    for place, (a, q) in enumerate(zip(matrices, qs, strict=True)):
        gradients = [x[a.start : a.end].reshape(a.n, a.m) for x in arrays]
        errors = [e[place] for e in es] if remembers else None
        done = compression_numpy.power_sgd_round(gradients, errors, q, a.r, k=k, i=a.place, **options)
        mean[a.start : a.end], bound = done.result.ravel(), _bound(gradients, errors, q, k, a, options)
        mass[a.start : a.end] = bound * (part if dtype.itemsize == 2 else 1)
        for e, of_rank in zip(done.errors or [], left, strict=remembers):
            of_rank.append(e)
        factors.append(q if done.q is None else done.q)
        of_errors.append(np.full(a.n * a.m, bound))
        of_factors.append(np.full(a.m * a.m, bound * bound * a.n))
    found = [Expected("x", [torch.from_numpy(mean).to(dtype)] * n, SUM(_SPAN), torch.from_numpy(mass))]
    if matrices and remembers and all("e" in record.outputs for record in records):
        found.append(Expected("e", [_joined(of_rank) for of_rank in left], SUM(_SPAN), _joined(of_errors)))
    if matrices and all("q" in record.outputs for record in records):
        for rank, record in enumerate(records):
            parts = _split(record.outputs["q"], [(a.m, a.r) for a in matrices], "output q", rank)
            record.outputs["factor"] = _products(parts)
        found.append(Expected("factor", [_products(factors)] * n, SUM(_SPAN), _joined(of_factors)))
    return found


def topk_round(records: Sequence[Record], options: Mapping[str, Any]) -> list[Expected]:
    """Return the averaged gradients, and e, bit for bit (S11.2). Elements after the first ``elements`` are padding."""
    refuse_divided(records)
    xs = inputs(records, "x", COMPRESSIBLE)
    size = shared_number(records, "elements", xs[0].numel())
    if size > xs[0].numel():
        raise NotReplayable(f"elements={size} of a bucket of {xs[0].numel()}")
    errors = None
    if options["error_feedback"]:
        errors = [e for (e,) in _kept(records, "e", [(size,)], torch.float32, shared_number(records, "k", 1) == 0)]
    gradients = [x[:size].float().numpy() for x in xs]
    result, left = compression_numpy.topk_round(gradients, errors, options["ratio"], name_of(xs[0].dtype))
    mean = torch.from_numpy(result).to(xs[0].dtype)
    found = [Expected("x", [torch.cat([mean, x[size:]]) for x in xs])]
    if left is not None and all("e" in record.outputs for record in records):
        found.append(Expected("e", [torch.from_numpy(e) for e in left]))
    return found


def _bound(gradients: list[Any], errors: list[Any] | None, q: Any, k: int, a: Matrix, options: Mapping[str, Any]) -> float:
    """Return what a projection can gather in one element; inf if rounding decides on what it projects."""
    given = gradients + (errors or [])
    size = compression_numpy.norm(given)
    start = compression_numpy.start(q if options["warm_start"] else None, (a.m, a.r), q.dtype.type, options["seed"], k, a.place)
    summed = compression_numpy.added(given) @ start
    return size if compression_numpy.is_tame(q) and compression_numpy.is_tame(summed, size) else math.inf


def _products(factors: Sequence[Any]) -> Tensor:
    """Return every Q Q^T, one after the other."""
    return _joined([(wide @ wide.T).astype(q.dtype) for q in factors for wide in [q.astype(np.float64)]])


def _joined(arrays: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate([x.ravel() for x in arrays]))


def _matrices(records: Sequence[Record], size: int) -> list[Matrix]:
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


def _kept(records: Sequence[Record], role: str, shapes: list[Any], dtype: torch.dtype, optional: bool) -> list[list[Any]]:
    """Return arrays of what each rank kept for each matrix, zeros where it may be missing."""
    found = []
    for rank, record in enumerate(records):
        x = record.inputs.get(role)
        if x is None and not optional:
            raise NotReplayable(f"input {role!r} was not recorded on rank {rank}")
        x = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype) if x is None else x
        if x.dtype is not dtype:
            raise NotReplayable(f"input {role!r} of rank {rank} is {x.dtype}, and must be {dtype}")
        found.append(_split(x, shapes, f"input {role}", rank))
    return found


def _split(x: Tensor, shapes: list[Any], what: str, rank: int) -> list[Any]:
    sizes = [math.prod(shape) for shape in shapes]
    if x.numel() != sum(sizes):
        raise NotReplayable(f"{what} of rank {rank} has {x.numel()} elements, and must have {sum(sizes)}")
    return [part.view(shape).numpy() for part, shape in zip(x.split(sizes) if sizes else [], shapes, strict=True)]
