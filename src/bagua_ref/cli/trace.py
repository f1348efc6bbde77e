"""``bagua-ref trace``: check a recorded training against its algorithm, compare it with another
one, or summarize the recording.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from bagua_ref.base.untrusted import one_line
from bagua_ref.cli.command import (
    Commands,
    add_command,
    add_json_options,
    end_progress,
    show_progress,
    write_json,
    write_picture,
)
from bagua_ref.conformance.trace import RankTrace, check_trace, diff_records, read_trace
from bagua_ref.conformance.trace.differences import draw_distances
from bagua_ref.conformance.trace.replay import parse_options
from bagua_ref.conformance.trace.report import draw_errors

__all__ = ["add_parser"]


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``trace check``, ``diff`` and ``show`` to the commands of ``bagua-ref``."""
    trace = commands.add_parser(
        "trace",
        help=(
            "check a recorded training run against what its algorithm must compute, or compare it"
            " with another run"
        ),
        description=(
            "A trace is what bagua_ref.record wrote during a training run: digests of all that each"
            " step computes; or what bagua_ref.conformance.trace.Recorder wrote: the inputs and"
            " outputs of every bucket's operation, on every rank."
        ),
    )
    verbs = trace.add_subparsers(title="commands", required=True, metavar="COMMAND")
    check = add_command(
        verbs,
        "check",
        _check,
        examples=("bagua-ref trace check folder --png errors.png",),
        help="replay all ranks and find the first divergence",
        description=(
            "Replay all ranks in the simulated world and compare the results with the recorded"
            " ones."
        ),
        epilog=(
            "Exit status is 0 if nothing diverges, 1 if something does, and 2 if the trace cannot"
            " be checked."
        ),
    )
    check.add_argument(
        "directory", type=Path, metavar="DIR", help="folder that contains rank0, rank1, ..."
    )
    check.add_argument(
        "--algorithm",
        metavar="NAME",
        help="algorithm to replay (default: the one that the trace names)",
    )
    check.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=(
            "option of the algorithm, such as hierarchical=false; can be repeated (default: the"
            " recorded value, or else the algorithm's default)"
        ),
    )
    check.add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="NAME",
        help="check only this bucket; can be repeated (default: all)",
    )
    add_json_options(check)
    check.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="plot the errors by step and rank; needs matplotlib",
    )

    diff = add_command(
        verbs,
        "diff",
        _diff,
        examples=("bagua-ref trace diff run1 run2",),
        help="find where two recorded trainings part",
        description=(
            "Compare two records of bagua_ref.record: find the first one that differs though its"
            " inputs are equal."
        ),
        epilog=(
            "Exit status is 0 if the records are equal, 1 if they differ, and 2 if they cannot be"
            " compared."
        ),
    )
    for name in "ab":
        diff.add_argument(
            name,
            type=Path,
            metavar="DIR",
            help="folder that contains rank0, rank1, ... of one training",
        )
    add_json_options(diff)
    diff.add_argument(
        "--window",
        action="store_true",
        help="print only the commands that record the step with its values",
    )
    diff.add_argument(
        "--png", type=Path, metavar="FILE", help="plot the distance by step; needs matplotlib"
    )

    show = add_command(
        verbs,
        "show",
        _show,
        examples=("bagua-ref trace show folder",),
        help="summarize what was recorded",
        description="Summarize what was recorded, without checking it.",
        epilog="Exit status is 0 on success and 2 if the trace cannot be read.",
    )
    show.add_argument(
        "directory", type=Path, metavar="DIR", help="folder that contains rank0, rank1, ..."
    )
    add_json_options(show)


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        options = parse_options(arguments.option)
        try:
            report = check_trace(
                arguments.directory,
                arguments.algorithm,
                options,
                buckets=arguments.bucket,
                progress=_progress,
            )
        finally:
            end_progress()
    except ValueError as error:
        parser.error(str(error))
    if not arguments.json:
        print(report)
    write_json(arguments, report.as_json())
    write_picture(lambda: draw_errors(report), arguments.png)
    return 0 if report.passed else 1


def _diff(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    report = diff_records(arguments.a, arguments.b)
    if not arguments.json:
        print("\n".join(report.window()) if arguments.window else report)
    write_json(arguments, report.as_json())
    write_picture(lambda: draw_distances(report), arguments.png)
    return 0 if report.first is None else 1


def _progress(done: int, total: int) -> None:
    show_progress(f"replaying: {done} of {total} steps", done, total)


def _show(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    ranks = read_trace(arguments.directory)
    if not arguments.json:
        print(_summary(ranks))
    write_json(arguments, _as_json(ranks))
    return 0


def _as_json(ranks: list[RankTrace]) -> dict[str, Any]:
    first, times = ranks[0].manifest, _times_recorded(ranks)
    return {
        "algorithm": first.get("algorithm"),
        "options": first["options"],
        "nodes": first["nodes"],
        "sampling": first.get("sampling"),
        "ranks": [
            {
                "steps": sorted(rank.steps),
                "bytes": rank.bytes(),
                "complete": bool(rank.manifest.get("complete")),
                "stopped": rank.manifest.get("stopped"),
            }
            for rank in ranks
        ],
        "buckets": {
            name: {**bucket, "recorded": times[name]} for name, bucket in first["buckets"].items()
        },
    }


def _times_recorded(ranks: list[RankTrace]) -> Counter[str]:
    """Return the number of times that rank 0 recorded each bucket."""
    return Counter(
        record["bucket"] for entry in ranks[0].steps.values() for record in entry["records"]
    )


def _summary(ranks: list[RankTrace]) -> str:
    first, times = ranks[0].manifest, _times_recorded(ranks)
    options = ", ".join(f"{name}={value}" for name, value in first["options"].items())
    name = first.get("algorithm") or "unknown algorithm"
    lines = [
        (
            f"{name}{f'({options})' if options else ''} on {first['world_size']} ranks, nodes"
            f" {first['nodes']}"
        ),
        f"sampling: {first.get('sampling', 'unknown')}",
        f"{'rank':>4} {'steps':>6} {'first':>6} {'last':>6} {'bytes':>13}  state",
    ]
    for place, rank in enumerate(ranks):
        steps = sorted(rank.steps)
        stopped = rank.manifest.get("stopped")
        state = (
            "complete"
            if rank.manifest.get("complete")
            else f"stopped: {stopped['reason']}"
            if stopped
            else "not ended"
        )
        ends = (f"{steps[0]}", f"{steps[-1]}") if steps else ("-", "-")
        lines.append(
            f"{place:4} {len(steps):6} {ends[0]:>6} {ends[1]:>6} {rank.bytes():13,}  {state}"
        )
    lines.append(f"{'bucket':10} {'dtype':9} {'elements':>12} {'tensors':>7} {'recorded':>8}")
    for name, bucket in first["buckets"].items():
        lines.append(
            f"{name:10} {bucket['dtype']:9} {bucket['elements']:12,} {len(bucket['tensors']):7}"
            f" {times[name]:8}"
        )
    return "\n".join(map(one_line, lines))
