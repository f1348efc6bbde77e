"""Expected results of the exchanges of S3, S10 and S11.2, from the inputs that all ranks
recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import get_backend
from bagua_ref.backends.base import FLOATS
from bagua_ref.backends.codec import COMPRESSIBLE
from bagua_ref.base.untrusted import NATURAL, check_form, load_json
from bagua_ref.comm_ops.low_rank import Matrix
from bagua_ref.conformance.expected import compression_numpy, decentralized_numpy
from bagua_ref.conformance.expected.algorithms_numpy import array, wide
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance
from bagua_ref.conformance.formats import name_of
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps
from bagua_ref.conformance.targets.world import run_world
from bagua_ref.conformance.trace.files import Record
from bagua_ref.formulas.graphs import MODES, checked_graph

__all__ = [
    "WIRES",
    "Expected",
    "NotReplayable",
    "async_round",
    "decentralized",
    "full_precision",
    "inputs",
    "low_precision",
    "on_ring",
    "powersgd_round",
    "shared",
    "topk_round",
]

WIRES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Formats of 16 bits that values may have on their way, by name."""

_OPS = ReferenceCommOps("reference")

_SPAN = 400
"""Tolerance, in eps, of projections on columns whose span is known to 100 times the rounding of
what was added up for them.
"""


class NotReplayable(Exception):  # noqa: N818 - not a failure: this execution cannot be checked
    """An execution cannot be replayed from its records; the message says why."""


@dataclass(frozen=True)
class Expected:
    """An expected output.

    Attributes:
        name: name of the output.
        values: expected values, by rank.
        tolerance: the tolerance of the comparison.
        magnitude: for sums, the sum (or mean) of the absolute values.
        cause: returns the likely cause of other values, of which each row belongs to a rank, if it
            is a known one.
    """

    name: str
    values: list[Tensor]
    tolerance: Tolerance = EXACT
    magnitude: Tensor | None = None
    cause: Callable[[Tensor], str | None] | None = None


def inputs(
    records: Sequence[Record], role: str, dtypes: Sequence[torch.dtype] | None = None
) -> list[Tensor]:
    """Return the input ``role`` of all ranks, which must have one size, and one dtype of
    ``dtypes``.
    """
    found = [record.inputs.get(role) for record in records]
    xs = [x for x in found if x is not None]
    if len(xs) < len(found):
        raise NotReplayable(
            f"input {role!r} was not recorded on rank {[x is None for x in found].index(True)}"
        )
    for rank, x in enumerate(xs):
        if x.shape != xs[0].shape or x.dtype != xs[0].dtype:
            raise NotReplayable(
                f"input {role!r} has {x.numel()} elements of {x.dtype} on rank {rank}, but"
                f" {xs[0].numel()} of {xs[0].dtype} on rank 0"
            )
    if dtypes is not None and xs[0].dtype not in dtypes:
        raise NotReplayable(
            f"the algorithm does not support {xs[0].dtype}; it supports"
            f" {', '.join(map(str, dtypes))}"
        )
    return xs


def _undivided(records: Sequence[Record], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return the inputs x; refuse those that were divided by n on their way in, where the exchange
    does not expect it.
    """
    if (divided := records[0].info.get("divided_by", 1)) != 1:
        raise NotReplayable(
            f"the recorded values are already divided by {divided}, as in gradient_allreduce, but"
            " this algorithm does not divide them"
        )
    return inputs(records, "x", dtypes)


def shared(records: Sequence[Record], name: str, default: float | None = None) -> Any:
    """Return info that all ranks must have recorded alike."""
    found = [record.info.get(name, default) for record in records]
    if None in found:
        raise NotReplayable(f"info {name!r} was not recorded on rank {found.index(None)}")
    if differing := [rank for rank, value in enumerate(found) if value != found[0]]:
        mine, first = found[differing[0]], found[0]
        raise NotReplayable(
            f"rank {differing[0]} recorded {name}={mine!r:.40}, and rank 0 {name}={first!r:.40}"
        )
    return found[0]


def _shared_json(records: Sequence[Record], name: str, parse: Callable[[Any], Any]) -> Any:
    """Return what all ranks have recorded as JSON; what ``parse`` refuses cannot be used."""
    text = shared(records, name)
    try:
        return parse(load_json(text.encode()))
    except (TypeError, ValueError) as error:
        raise NotReplayable(f"the recorded {name} cannot be used: {error}") from None


def full_precision(
    records: Sequence[Record],
    nodes: Sequence[int],
    average: bool = True,
    hierarchical: bool = False,
    wire: str | None = None,
) -> Expected:
    """Return the sum or mean of S3.1 and S3.3; of inputs that were divided by n on their way in,
    the sum.
    """
    xs = inputs(records, "x", FLOATS if average else None)
    n, divided = len(xs), records[0].info.get("divided_by", 1)
    if divided != 1 and not (average and divided == n):
        raise NotReplayable(
            f"the recorded values are already divided by {divided}, which fits a mean over"
            f" {divided} ranks only"
        )
    average = average and divided == 1
    results = _centralized(xs, nodes, hierarchical, average)
    if not xs[0].dtype.is_floating_point:
        return Expected("x", results)
    expected = Expected("x", results, SUM(n + hierarchical), _magnitude(xs, n if average else 1))
    return expected if wire is None else _on_wire(expected, records, wire)


def _on_wire(expected: Expected, records: Sequence[Record], wire: str) -> Expected:
    """Return the mean or sum of S3.1 with the bound of a wire format.

    A value is rounded n + 1 times: when it is cast, divided, and in n - 1 sums; each time by at
    most eps/2 of what is rounded, or of the smallest normal number. The bound, (n + 2)/2 * eps, has
    room for products of these. Where the sum of absolute values may exceed the format's range, a
    result that is not finite is accepted.

    Args:
        expected: in full precision, with the mean (for a sum: the sum) of the absolute values as
            magnitude.
        records: of all ranks.
        wire: a name of `WIRES`.

    Raises:
        NotReplayable: the recorded values have no more digits than the format.
    """
    dtype, n, format_ = expected.values[0].dtype, len(records), torch.finfo(WIRES[wire])
    if dtype not in (torch.float32, torch.float64):
        raise NotReplayable(
            f"wire={wire} is for values of float32 and float64, and these are {dtype}"
        )
    assert expected.magnitude is not None
    overflows = ~(expected.magnitude * n <= format_.max)
    values = []
    for record, value in zip(records, expected.values, strict=True):
        got = record.outputs.get("x")
        fits = got is not None and got.shape == value.shape and got.dtype == value.dtype
        values.append(
            torch.where(overflows & ~got.isfinite(), got, value)
            if got is not None and fits
            else value
        )
    tolerance = Tolerance(
        f"SUM({n}) in {wire}", epsilons=round((n + 2) / 2 * format_.eps / torch.finfo(dtype).eps)
    )
    return replace(
        expected,
        values=values,
        tolerance=tolerance,
        magnitude=expected.magnitude + format_.smallest_normal,
    )


def low_precision(
    records: Sequence[Record],
    nodes: Sequence[int],
    compression: str | None,
    average: bool = True,
    hierarchical: bool = False,
) -> Expected:
    """Return the result of S3.2 and S3.3, or of S3.1 by scatter-gather, of inputs padded with zeros
    for whole chunks (S2.2).
    """
    if any(record.info.get("operation") == "CentralizedErrorFeedback" for record in records):
        raise NotReplayable("error memories, which the result depends on, are not recorded")
    xs = _undivided(records, COMPRESSIBLE if compression else FLOATS)
    size = xs[0].numel()
    padding = -size % (math.lcm(len(xs), len(nodes)) if hierarchical else len(xs))
    padded = [torch.nn.functional.pad(x, (0, padding)) for x in xs]
    results = _centralized(
        padded, nodes, hierarchical, average, scattergather=True, compression=compression
    )
    return Expected("x", [result[:size] for result in results])


def decentralized(
    records: Sequence[Record], nodes: Sequence[int], mode: str, hierarchical: bool
) -> Expected:
    """Return the averages of S3.4 and S13; the graph of ``mode="function"`` is JSON of a list per
    receiver of [source, weight].
    """
    xs, t = _undivided(records, FLOATS), records[0].info.get("execution", records[0].execution)
    members, what = (len(nodes), "nodes") if hierarchical else (len(xs), "ranks")
    if mode != "function" and not MODES[mode].takes(members):
        raise NotReplayable(f"{mode} needs {MODES[mode].sizes} of {what}, and there are {members}")
    graph = (
        [_shared_json(records, "graph", lambda rows: checked_graph(rows, members))]
        if mode == "function"
        else mode
    )
    dtype = xs[0].dtype
    results = decentralized_numpy.average(
        [*map(array, xs)], name_of(dtype), graph, list(nodes) if hierarchical else None, t
    )
    values = [torch.from_numpy(result).to(dtype) for result in results]
    return Expected(
        "x",
        values,
        *((SUM(len(xs) + hierarchical), _magnitude(xs, len(xs))) if mode == "all" else ()),
    )


def on_ring(
    records: Sequence[Record],
    before: Sequence[Record] | None,
    nodes: Sequence[int],
    compression: str,
    hierarchical: bool,
) -> Expected:
    """Return the result of S3.5. Replicas are recorded, or are the results of the execution
    ``before`` here and on both sides.
    """
    xs, n = _undivided(records, COMPRESSIBLE), len(nodes) if hierarchical else len(records)
    members = [sum(nodes[:node]) for node in range(n)] if hierarchical else list(range(n))
    roles = ("weight", "left", "right")
    replicas = {rank: [x] * 3 for rank, x in enumerate(xs)}  # not used on ranks that lead no node
    if all(role in records[member].inputs for member in members for role in roles):
        replicas |= {member: [records[member].inputs[role] for role in roles] for member in members}
    elif before is not None and before[0].execution == records[0].execution - 1:
        results = [before[member].outputs["x"] for member in members]
        replicas |= {
            members[i]: [results[i], results[i - 1], results[(i + 1) % n]] for i in range(n)
        }
    else:
        raise NotReplayable(
            "neither the replicas (weight, left, right) nor the previous execution were recorded"
        )
    if any(
        replica.shape != xs[0].shape or replica.dtype != xs[0].dtype
        for three in replicas.values()
        for replica in three
    ):
        raise NotReplayable("replicas differ from x in size or dtype")

    ops = ReferenceCommOps("reference", ring_codec=compression)

    def rank(world: Any) -> Tensor:
        return ops.low_precision_decentralized(
            world, [replicas[world.rank], xs[world.rank]], hierarchical=hierarchical
        )[0]

    return Expected("x", _on_ranks(nodes, rank))


def async_round(records: Sequence[Record]) -> list[Expected]:
    """Return the sum of the snapshots (S3.6); and where x was recorded before and after, x with the
    round's change added.
    """
    snapshots = inputs(records, "snapshot", FLOATS)
    total, n = torch.stack(snapshots).to(wide(snapshots[0].dtype)).sum(0), len(snapshots)
    found = []
    if all("reduced" in record.outputs for record in records):
        found.append(Expected("reduced", [total] * n, SUM(n), _magnitude(snapshots, 1)))
    if all(
        "before" in r.inputs | r.outputs and {"reduced", "x"} <= r.outputs.keys() for r in records
    ):
        results = [(record.inputs | record.outputs)["before"].clone() for record in records]
        for x, record, snapshot in zip(results, records, snapshots, strict=True):
            get_backend("reference").async_average_(x, record.outputs["reduced"], snapshot, n)
        found.append(Expected("x", results))
    if not found:
        raise NotReplayable("a round needs at least the input snapshot and the output reduced")
    return found


def powersgd_round(records: Sequence[Record], options: Mapping[str, Any]) -> list[Expected]:
    """Return the averaged gradients, e, and Q Q^T, which does not depend on the basis (S10.2 to
    S10.4).

    Matrices for which rounding decides what P spans are compared as far as values are finite.
    """
    xs, k = _undivided(records, FLOATS), shared(records, "k")
    matrices = _shared_json(records, "matrices", lambda rows: _matrices(rows, xs[0].numel()))
    n, dtype, kind = len(xs), xs[0].dtype, wide(xs[0].dtype)
    remembers, fresh = options["memory"] is not None, k == 0
    qs = _kept(
        records, "q", [(a.m, a.r) for a in matrices], kind, fresh or not options["warm_start"]
    )[0]
    es = _kept(records, "e", [(a.n, a.m) for a in matrices], kind, fresh or not remembers)
    part = max(n + 1, 4) / _SPAN  # of what is only added up, and of what is rounded to 16 bits
    arrays = [*map(array, xs)]
    mean, mass = (
        compression_numpy.added(arrays) / arrays[0].dtype.type(n),
        np.abs(np.stack(arrays).astype(float)).mean(0) * part,
    )
    left: list[list[Any]] = [[] for _ in xs]
    factors, of_errors, of_factors = [], [], []
    for place, (a, q) in enumerate(zip(matrices, qs, strict=True)):
        gradients = [x[a.start : a.end].reshape(a.n, a.m) for x in arrays]
        errors = [e[place] for e in es] if remembers else None
        done = compression_numpy.power_sgd_round(
            gradients, errors, q, a.r, k=k, i=a.place, **options
        )
        rule = {name: options[name] for name in ("warm_start", "seed")}
        mean[a.start : a.end], bound = (
            done.result.ravel(),
            compression_numpy.reach(gradients, errors, q, a.r, k=k, i=a.place, **rule),
        )
        mass[a.start : a.end] = bound * (part if dtype.itemsize == 2 else 1)
        for e, of_rank in zip(done.errors or [], left, strict=remembers):
            of_rank.append(e)
        factors.append(q if done.q is None else done.q)
        of_errors.append(np.full(a.n * a.m, bound))
        of_factors.append(np.full(a.m * a.m, bound * bound * a.n))
    found = [
        Expected("x", [torch.from_numpy(mean).to(dtype)] * n, SUM(_SPAN), torch.from_numpy(mass))
    ]
    if matrices and remembers and all("e" in record.outputs for record in records):
        found.append(
            Expected("e", [_joined(of_rank) for of_rank in left], SUM(_SPAN), _joined(of_errors))
        )
    if matrices and all("q" in record.outputs for record in records):
        for rank, record in enumerate(records):
            parts = _split(record.outputs["q"], [(a.m, a.r) for a in matrices], "output q", rank)
            record.outputs["factor"] = _joined(
                [compression_numpy.gram(q).astype(q.dtype) for q in parts]
            )
        factor = _joined([compression_numpy.gram(q).astype(q.dtype) for q in factors])
        found.append(Expected("factor", [factor] * n, SUM(_SPAN), _joined(of_factors)))
    return found


def topk_round(records: Sequence[Record], options: Mapping[str, Any]) -> list[Expected]:
    """Return the averaged gradients, and e, bit for bit (S11.2). Elements after the first
    ``elements`` are padding.
    """
    xs = _undivided(records, COMPRESSIBLE)
    size = shared(records, "elements", xs[0].numel())
    if size > xs[0].numel():
        raise NotReplayable(f"elements={size} of a bucket of {xs[0].numel()}")
    errors = None
    if options["error_feedback"]:
        errors = [
            e
            for (e,) in _kept(records, "e", [(size,)], torch.float32, shared(records, "k", 1) == 0)
        ]
    gradients = [array(x[:size]) for x in xs]
    result, left = compression_numpy.topk_round(
        gradients, errors, options["ratio"], name_of(xs[0].dtype)
    )
    mean = torch.from_numpy(result).to(xs[0].dtype)
    found = [Expected("x", [torch.cat([mean, x[size:]]) for x in xs])]
    if left is not None and all("e" in record.outputs for record in records):
        found.append(Expected("e", [torch.from_numpy(e) for e in left]))
    return found


def _centralized(
    xs: Sequence[Tensor],
    nodes: Sequence[int],
    hierarchical: bool,
    average: bool,
    scattergather: bool = False,
    compression: str | None = None,
) -> list[Tensor]:
    options: Any = {
        "hierarchical": hierarchical,
        "average": average,
        "scattergather": scattergather,
        "compression": compression,
    }
    return _on_ranks(nodes, lambda world: _OPS.centralized(world, xs[world.rank], **options))


def _on_ranks(nodes: Sequence[int], program: Callable[[Any], Tensor]) -> list[Tensor]:
    return run_world(lambda world: world, tuple(nodes), program)


def _magnitude(xs: Sequence[Tensor], divisor: int) -> Tensor:
    return torch.stack(list(xs)).double().abs().sum(0) / divisor


def _joined(arrays: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate([x.ravel() for x in arrays]))


def _matrices(rows: Any, size: int) -> list[Matrix]:
    """Return what is compressed: [start, n, m, r, i] of each matrix."""
    check_form(rows, [[NATURAL]], "matrices")
    found, end = [Matrix(str(place), *row) for place, row in enumerate(rows)], 0
    for a in found:
        if a.start < end or a.end > size or not 1 <= a.r <= min(a.n, a.m):
            raise ValueError(f"{a} in a bucket of {size} elements")
        end = a.end
    return found


def _kept(
    records: Sequence[Record], role: str, shapes: list[Any], dtype: torch.dtype, optional: bool
) -> list[list[Any]]:
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
        raise NotReplayable(
            f"{what} of rank {rank} has {x.numel()} elements, and must have {sum(sizes)}"
        )
    return [
        part.view(shape).numpy()
        for part, shape in zip(x.split(sizes) if sizes else [], shapes, strict=True)
    ]
