"""Check of a trace: each operation is replayed and compared with what the ranks recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagua_ref.base.untrusted import one_line
from bagua_ref.conformance.expected.tolerances import EXACT, places, where_equal
from bagua_ref.conformance.trace.exchanges import Expected, NotReplayable
from bagua_ref.conformance.trace.files import MANIFEST, Record, TraceError, read_trace
from bagua_ref.conformance.trace.recognise import recognise
from bagua_ref.conformance.trace.replay import ALGORITHMS, Replay, merged_options
from bagua_ref.conformance.trace.report import Divergence, Execution, TraceReport

__all__ = ["check_trace"]


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
        options: options of the algorithm; those left out are taken from the trace or are the algorithm's defaults.
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
            raise ValueError(f"algorithm=None: {where} names {algorithm!r}; pass algorithm=, one of {', '.join(ALGORITHMS)}")
    if algorithm in ALGORITHMS:
        try:
            merged_options(algorithm, manifest["options"], {})
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from None
    replay = Replay(algorithm, merged_options(algorithm, manifest["options"], options or {}), tuple(manifest["nodes"]))
    if unknown := sorted(set(buckets) - set(manifest["buckets"])):
        raise ValueError(f"buckets: {unknown[0]!r} is not in the trace, which has {one_line(', '.join(manifest['buckets']))}")
    report = TraceReport(algorithm, replay.options, replay.nodes, _notes(ranks))
    common = sorted(set.intersection(*(set(rank.steps) for rank in ranks)))
    before: dict[str, list[Record]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the simulated world does; switching at each step would cost more than a second thread gains
    try:
        for done, step in enumerate(common):
            by_rank = [rank.records(step) for rank in ranks]
            for bucket in dict.fromkeys(name for records in by_rank for name in records):
                if not buckets or bucket in buckets:
                    _check_execution(step, bucket, by_rank, before, replay, report, manifest["buckets"].get(bucket, {}))
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


def _check_execution(
    step: int,
    bucket: str,
    by_rank: list[dict[str, Record]],
    before: dict[str, list[Record]],
    replay: Replay,
    report: TraceReport,
    described: Mapping[str, Any],
) -> None:
    """Replay one execution and add the result to the report; ``before`` holds each bucket's last records."""
    try:
        records = _of_all_ranks(bucket, by_rank)
        last = before.get(bucket)
        before[bucket] = records
        for expected in replay(step, records, last):
            report.executions.append(_compare(step, bucket, expected, records, replay, described))
    except NotReplayable as reason:
        report.not_checked.append((step, bucket, str(reason)))


def _notes(ranks: Sequence[Any]) -> list[str]:
    """Return notes about the recording for the reader of the report."""
    notes = []
    every = set().union(*(rank.steps for rank in ranks))
    common = set.intersection(*(set(rank.steps) for rank in ranks))
    if lonely := sorted(every - common):
        who = [place for place, rank in enumerate(ranks) if lonely[0] in rank.steps]
        notes.append(
            f"{len(lonely)} steps, from step {lonely[0]} on, were recorded by some ranks only (rank {', '.join(map(str, who))}) "
            "and are not checked"
        )
    for place, rank in enumerate(ranks):
        if stopped := rank.manifest.get("stopped"):
            notes.append(f"rank {place} stopped recording: {one_line(stopped['reason'])}")
        elif not rank.manifest.get("complete"):
            notes.append(f"rank {place} did not finish recording (it failed or was killed); only complete steps are available")
    return notes


def _of_all_ranks(bucket: str, by_rank: list[dict[str, Record]]) -> list[Record]:
    absent = [rank for rank, records in enumerate(by_rank) if bucket not in records]
    if absent:
        raise NotReplayable(f"rank {absent[0]} recorded no bucket {bucket!r} in this step")
    return [records[bucket] for records in by_rank]


def _compare(
    step: int, bucket: str, expected: Expected, records: list[Record], replay: Replay, described: Mapping[str, Any]
) -> Execution:
    """Compare one output of an execution on all ranks."""
    got = []
    for rank, record in enumerate(records):
        x, wanted = record.outputs.get(expected.name), expected.values[rank]
        if x is None:
            raise NotReplayable(f"output {expected.name!r} was not recorded on rank {rank}")
        if x.shape != wanted.shape or x.dtype != wanted.dtype:
            raise NotReplayable(
                f"output {expected.name!r} of rank {rank} has {x.numel()} elements of {x.dtype}, but the operation gives "
                f"{wanted.numel()} of {wanted.dtype}"
            )
        got.append(x)
    equal = [where_equal(x, w, expected.tolerance, magnitude=expected.magnitude) for x, w in zip(got, expected.values, strict=True)]
    wrong = [int((~same).sum()) for same in equal]
    execution = Execution(
        step,
        bucket,
        [x.numel() for x in got],
        wrong,
        [_error(x, w) for x, w in zip(got, expected.values, strict=True)],
    )
    if any(wrong):
        rank = next(rank for rank, count in enumerate(wrong) if count)
        element = int((~equal[rank]).nonzero()[0])
        name, index = _tensor_at(expected.name, element, described)
        x, w = got[rank][element], expected.values[rank][element]
        execution.first = Divergence(
            step, rank, bucket, name, index, element, _number(w), _number(x), _ulps(x, w), expected.tolerance.name,
            _chunks(torch.stack([~same for same in equal]).any(0), replay) if expected.name == "x" else None,
        )  # fmt: skip
        inputs = [record.inputs["x"] for record in records if expected.name == "x" and "x" in record.inputs]
        execution.kind = recognise(expected, got, inputs if len(inputs) == len(records) else None, replay)
    return execution


def _error(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference relative to the largest value; inf if only one of expected and found is finite."""
    same = where_equal(got, wanted, EXACT)
    if same.all():
        return 0.0
    got, wanted = got.double(), wanted.double()
    error = torch.where(same, 0.0, (got - wanted).abs()).max().item()
    if not math.isfinite(error):
        return math.inf
    both = torch.cat([got, wanted])
    return error / both[both.isfinite()].abs().max().clamp(min=torch.finfo(torch.float64).tiny).item()


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
    if replay.algorithm not in ("bytegrad", "qadam") and not {"scattergather", "compression"} & {
        name for name, value in replay.options.items() if value
    }:
        return None
    starts = [sum(replay.nodes[:node]) for node in range(len(replay.nodes))]
    reducers = starts if replay.options.get("hierarchical") else list(range(sum(replay.nodes)))
    count = len(reducers)
    if count == 1:
        return None
    size = (wrong.numel() + -wrong.numel() % math.lcm(sum(replay.nodes), count)) // count
    hit = sorted(set((wrong.nonzero().reshape(-1) // size).tolist()))
    ranks = ", ".join(str(reducers[chunk]) for chunk in hit)
    return f"chunk {', '.join(map(str, hit))} of {count} chunks of {size} elements, reduced by rank {ranks}"


def _number(x: Tensor) -> float:
    return float(x.item())


def _ulps(a: Tensor, b: Tensor) -> int | None:
    if not a.dtype.is_floating_point or a.isnan() or b.isnan():
        return None
    return abs(int(places(a.reshape(1)).item()) - int(places(b.reshape(1)).item()))
