"""Check of a trace: each operation is replayed and compared with what the ranks recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_ref.backends import get_backend
from bagua_ref.base.untrusted import one_line
from bagua_ref.conformance.expected.tolerances import EXACT, SUM, places, where_equal
from bagua_ref.conformance.trace.exchanges import WIRES, Expected, NotReplayable
from bagua_ref.conformance.trace.files import MANIFEST, RankTrace, Record, TraceError, read_trace
from bagua_ref.conformance.trace.replay import ALGORITHMS, Replay, merged_options
from bagua_ref.conformance.trace.report import Divergence, Execution, TraceReport
from bagua_ref.formulas.graphs import MODES

__all__ = ["check_trace"]

_PAIRS = ("shift_one", "one_peer_exponential", "hypercube")
"""Modes in which each rank averages with one other."""

_ROUGHLY = 1e-3  # of the largest value: smaller than the distance between a codec's levels


def check_trace(
    directory: str | Path,
    algorithm: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    buckets: Collection[str] = (),
    progress: Callable[[int, int], object] | None = None,
) -> TraceReport:
    """Replay a trace as a training with ``algorithm`` and compare the results.

    Args:
        directory: folder with the folders of all ranks.
        algorithm: a registered name; None: the one named in the trace.
        options: options of the algorithm; those left out are taken from the trace or are the
            algorithm's defaults.
        buckets: names of the buckets to check; empty: all.
        progress: called with the number of steps done and the number of all steps.

    Raises:
        TraceError: the trace cannot be used, or no part of it can be replayed.
        ValueError: the algorithm, an option or a bucket is unknown.
    """
    ranks = read_trace(Path(directory))
    manifest = ranks[0].manifest
    where = repr(str(ranks[0].folder / MANIFEST))
    if algorithm is None:
        algorithm = manifest.get("algorithm")
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"algorithm=None: {where} names {algorithm!r}; pass algorithm=, one of"
                f" {', '.join(ALGORITHMS)}"
            )
    if algorithm in ALGORITHMS:
        try:
            merged_options(algorithm, manifest["options"], {})
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from None
    replay = Replay(
        algorithm,
        merged_options(algorithm, manifest["options"], options or {}),
        tuple(manifest["nodes"]),
    )
    if unknown := sorted(set(buckets) - set(manifest["buckets"])):
        raise ValueError(
            f"buckets: {unknown[0]!r} is not in the trace, which has"
            f" {one_line(', '.join(manifest['buckets']))}"
        )
    common = sorted(set.intersection(*(set(rank.steps) for rank in ranks)))
    report = TraceReport(algorithm, replay.options, replay.nodes, _notes(ranks, common))
    before: dict[str, list[Record]] = {}
    threads = torch.get_num_threads()
    # as the simulated world does; switching at each step would cost more than a second thread gains
    torch.set_num_threads(1)
    try:
        for done, step in enumerate(common):
            by_rank = [rank.records(step) for rank in ranks]
            for bucket in dict.fromkeys(name for records in by_rank for name in records):
                if buckets and bucket not in buckets:
                    continue
                try:
                    if absent := [
                        rank for rank, records in enumerate(by_rank) if bucket not in records
                    ]:
                        raise NotReplayable(
                            f"rank {absent[0]} recorded no bucket {bucket!r} in this step"
                        )
                    records, last = [found[bucket] for found in by_rank], before.get(bucket)
                    before[bucket] = records
                    with np.errstate(all="ignore"):
                        for expected in replay(step, records, last):
                            described = manifest["buckets"].get(bucket, {})
                            report.executions.append(
                                _compare(step, bucket, expected, records, replay, described)
                            )
                except NotReplayable as reason:
                    report.not_checked.append((step, bucket, str(reason)))
            if progress is not None:
                progress(done + 1, len(common))
    finally:
        torch.set_num_threads(threads)
    if not report.executions:
        why = "no step was recorded by all ranks"
        if report.not_checked:
            step, bucket, why = report.not_checked[0]
            why = f"step {step}, bucket {bucket!r}: {why}"
        raise TraceError(f"{str(directory)!r}: nothing could be replayed: {why}")
    return report


def _notes(ranks: Sequence[RankTrace], common: Sequence[int]) -> list[str]:
    """Return notes about the recording for the reader of the report."""
    notes = []
    if partial := sorted(set().union(*(rank.steps for rank in ranks)) - set(common)):
        who = [place for place, rank in enumerate(ranks) if partial[0] in rank.steps]
        notes.append(
            f"{len(partial)} steps, from step {partial[0]} on, were recorded by some ranks only"
            f" (rank {', '.join(map(str, who))}) and are not checked"
        )
    for place, rank in enumerate(ranks):
        if stopped := rank.manifest.get("stopped"):
            notes.append(f"rank {place} stopped recording: {one_line(stopped['reason'])}")
        elif not rank.manifest.get("complete"):
            notes.append(
                f"rank {place} did not finish recording (it failed or was killed); only complete"
                " steps are available"
            )
    return notes


def _compare(
    step: int,
    bucket: str,
    expected: Expected,
    records: list[Record],
    replay: Replay,
    described: Mapping[str, Any],
) -> Execution:
    """Compare one output of an execution on all ranks."""
    got = []
    for rank, record in enumerate(records):
        x, wanted = record.outputs.get(expected.name), expected.values[rank]
        if x is None:
            raise NotReplayable(f"output {expected.name!r} was not recorded on rank {rank}")
        if x.shape != wanted.shape or x.dtype != wanted.dtype:
            raise NotReplayable(
                f"output {expected.name!r} of rank {rank} has {x.numel()} elements of {x.dtype},"
                f" but the operation gives {wanted.numel()} of {wanted.dtype}"
            )
        got.append(x)
    found, wanted = torch.stack(got), torch.stack(expected.values)
    diverging = ~where_equal(found, wanted, expected.tolerance, magnitude=expected.magnitude)
    errors = [_error(x, w) for x, w in zip(found, wanted, strict=True)]
    execution = Execution(step, bucket, [x.numel() for x in got], diverging.sum(1).tolist(), errors)
    if diverging.any():
        rank, element = diverging.nonzero()[0].tolist()
        name, index = _tensor_at(expected.name, element, described)
        x, w = found[rank, element], wanted[rank, element]
        ulps = (
            abs(int(places(x[None]) - places(w[None])))
            if x.is_floating_point() and not (x.isnan() or w.isnan())
            else None
        )
        execution.first = Divergence(
            step,
            rank,
            bucket,
            name,
            index,
            element,
            float(w),
            float(x),
            ulps,
            expected.tolerance.name,
            _chunks(diverging.any(0), replay) if expected.name == "x" else None,
        )
        inputs = [
            record.inputs["x"]
            for record in records
            if expected.name == "x" and "x" in record.inputs
        ]
        execution.kind = _cause(
            expected,
            found,
            wanted,
            torch.stack(inputs) if len(inputs) == len(records) else None,
            replay,
        )
    return execution


def _error(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference relative to the largest value; inf if only one of expected and
    found is finite.
    """
    same = where_equal(got, wanted, EXACT)
    if same.all():
        return 0.0
    got, wanted = got.double(), wanted.double()
    error = torch.where(same, 0.0, (got - wanted).abs()).max().item()
    if not math.isfinite(error):
        return math.inf
    both = torch.cat([got, wanted])
    return (
        error / both[both.isfinite()].abs().max().clamp(min=torch.finfo(torch.float64).tiny).item()
    )


def _tensor_at(role: str, element: int, described: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return the name of the tensor that holds a flat element, and the element's index in it."""
    start = 0
    for tensor in described.get("tensors", ()) if role == "x" else ():
        size = math.prod(tensor["shape"])
        if element < start + size:
            place, index = element - start, list[int]()
            for length in reversed(tensor["shape"]):
                place, at = divmod(place, length)
                index.insert(0, at)
            return str(tensor["name"]), index
        start += size
    return role, [element]


def _chunks(wrong: Tensor, replay: Replay) -> str | None:
    """Name the chunks of a scattered operation that hold wrong elements."""
    if not (_compresses(replay) or replay.options.get("scattergather")):
        return None
    starts = [sum(replay.nodes[:node]) for node in range(len(replay.nodes))]
    reducers = starts if replay.options.get("hierarchical") else list(range(sum(replay.nodes)))
    count = len(reducers)
    if count == 1:
        return None
    size = (wrong.numel() + -wrong.numel() % math.lcm(sum(replay.nodes), count)) // count
    hit = sorted(set((wrong.nonzero().reshape(-1) // size).tolist()))
    ranks = ", ".join(str(reducers[chunk]) for chunk in hit)
    return (
        f"chunk {', '.join(map(str, hit))} of {count} chunks of {size} elements, reduced by rank"
        f" {ranks}"
    )


def _cause(
    expected: Expected, found: Tensor, wanted: Tensor, inputs: Tensor | None, replay: Replay
) -> str | None:
    """Return the likely cause of a divergence, or None if it matches no known cause; a row of each
    tensor belongs to a rank.
    """
    if expected.cause is not None:
        return expected.cause(found)
    if not found.dtype.is_floating_point:
        return None
    if inputs is not None and _same(found, inputs):
        return "as if nothing had been communicated: the outputs equal the inputs"
    n = len(found)
    if n > 1 and _roughly(found, wanted, n):
        return "as if summed, where a mean was expected"
    if n > 1 and _roughly(found, wanted, 1 / n):
        return "as if averaged, where a sum was expected"
    if (
        inputs is not None
        and _compresses(replay)
        and _is_mean(found, inputs, n if replay.options.get("average", True) else 1)
    ):
        return "as if it had been communicated in full precision, not compressed"
    if narrow := _narrower(found, wanted, expected.magnitude):
        return narrow
    wrong = [rank for rank in range(n) if not _same(found[rank], wanted[rank])]
    if (
        inputs is not None
        and replay.algorithm == "decentralized"
        and not replay.options["hierarchical"]
    ):
        for rank in wrong:
            if peer := _other_peers(
                rank, found[rank], inputs, replay.options["peer_selection_mode"]
            ):
                return f"as if rank {rank} had {peer}"
    sources = [
        next((other for other in range(n) if _same(found[rank], wanted[other])), None)
        for rank in wrong
    ]
    if wrong and None not in sources:
        return f"as if ranks were mixed up: rank {wrong[0]} has the result of rank {sources[0]}"
    if _same(wanted, wanted[:1].expand_as(wanted)) and not _same(found, found[:1].expand_as(found)):
        return "as if ranks had ended with different values, where all must have the same"
    return None


def _compresses(replay: Replay) -> bool:
    return (
        replay.algorithm in ("bytegrad", "qadam") or replay.options.get("compression") is not None
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(where_equal(a, b, EXACT).all())


def _roughly(found: Tensor, wanted: Tensor, factor: float) -> bool:
    scaled = wanted.double() * factor
    largest = scaled.abs().max().item() if scaled.numel() else 0.0
    return 0 < largest < float("inf") and bool(
        ((found.double() - scaled).abs() <= _ROUGHLY * largest).all()
    )


def _is_mean(found: Tensor, xs: Tensor, divisor: int) -> bool:
    """Return whether ``found`` is the sum of ``xs`` over ranks divided by ``divisor``, added in any
    order.
    """
    result, magnitude = (
        (xs.double().sum(0) / divisor).to(found.dtype),
        xs.double().abs().sum(0) / divisor,
    )
    return bool(
        where_equal(
            found, result.expand_as(found).contiguous(), SUM(len(xs)), magnitude=magnitude
        ).all()
    )


def _narrower(found: Tensor, wanted: Tensor, magnitude: Tensor | None) -> str | None:
    """Return the 16-bit format to which inputs and sum seem to have been rounded, or None."""
    if found.dtype not in (torch.float32, torch.float64) or not found.numel():
        return None
    exact_at, close = wanted.double(), where_equal(found, wanted, EXACT)
    magnitude = exact_at.abs() if magnitude is None else magnitude
    matches: list[tuple[int, str]] = []
    for name, dtype in WIRES.items():
        info, rounded = torch.finfo(dtype), wanted.to(dtype).to(found.dtype)
        near = (found.double() - exact_at).abs() <= (len(found) + 1) * info.eps * (
            magnitude + info.smallest_normal
        )
        overflow = ~found.isfinite() & (exact_at.abs() > info.max / len(found))
        if _same(found.to(dtype).to(found.dtype), found) and bool((near | overflow | close).all()):
            exact = int(where_equal(found, rounded, EXACT).sum())
            text = (
                f"all values are numbers of {name}, and {exact} of {found.numel()} are the expected"
                " one rounded"
            )
            matches.append((exact, f"as if rounded to {name}: {text}"))
    return max(matches)[1] if matches else None


def _other_peers(rank: int, found: Tensor, inputs: Tensor, mode: str) -> str | None:
    """Return what a rank seems to have averaged instead, or None."""
    if mode in _PAIRS:
        for other, x in enumerate(inputs):
            mean = x.clone()
            get_backend("reference").average_(mean, inputs[rank])
            if other != rank and _same(mean, found):
                return f"averaged with rank {other}, which is not its peer now"
    if mode in ("ring", "exponential"):
        sources = [source for source, _ in MODES[mode].graph(0, len(inputs))[rank]]
        for left_out in sources:
            rest = inputs[[source for source in sources if source != left_out]]
            if len(rest) and any(
                _is_mean(found, rest, divisor) for divisor in (len(rest), len(sources))
            ):
                return (
                    "left out"
                    f" {'its own values' if left_out == rank else f'those of rank {left_out}'}"
                )
    return None
