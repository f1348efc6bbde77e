"""``bagua-ref trace``: check a recorded training against what its algorithm must compute, and show what was recorded."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from bagua_ref.conformance.trace import RankTrace, TraceReport

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``trace check`` and ``trace show`` to the commands of ``bagua-ref``."""
    trace = commands.add_parser(
        "trace",
        help="check a recorded training against what its algorithm must compute",
        description="A trace is what bagua_ref.conformance.trace.Recorder wrote during a training: what went into and came out of "
        "every bucket's operation, on every rank.",
    )
    verbs = trace.add_subparsers(title="commands", required=True, metavar="COMMAND")
    check = verbs.add_parser(
        "check",
        help="replay all ranks and find the first divergence",
        description="Replay all ranks in the simulated world and compare. Exit code 0: no divergence; 1: a divergence; 2: the "
        "trace cannot be checked.",
    )
    check.set_defaults(command=_check)
    check.add_argument("directory", type=Path, metavar="DIR", help="holds rank0, rank1, ...")
    check.add_argument("--algorithm", metavar="NAME", help="what the training claims to be (default: what the trace says)")
    check.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the algorithm, such as hierarchical=false; again for each (default: as the trace says, else the algorithm's)",
    )
    check.add_argument("--bucket", action="append", default=[], metavar="NAME", help="only this one; again for each (default: all)")
    check.add_argument("--json", type=Path, metavar="PATH", help="write the report as JSON")
    check.add_argument("--png", type=Path, metavar="PATH", help="draw the errors over steps and ranks; needs matplotlib")

    show = verbs.add_parser("show", help="say what was recorded", description="Say what was recorded, without checking it.")
    show.set_defaults(command=_show)
    show.add_argument("directory", type=Path, metavar="DIR", help="holds rank0, rank1, ...")


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.conformance.trace import TraceError, check_trace
    from bagua_ref.conformance.trace.options import parse_options

    try:
        options = parse_options(arguments.option)
        report = check_trace(arguments.directory, arguments.algorithm, options, buckets=arguments.bucket, progress=_progress)
    except (TraceError, ValueError) as error:
        _end_progress()
        print(f"bagua-ref trace: {error}", file=sys.stderr)
        return 2
    _end_progress()
    print(report)
    try:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        if arguments.png is not None:
            _draw(report, arguments.png)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"bagua-ref trace: the report cannot be written: {error}", file=sys.stderr)
        return 2
    return 0 if report.passed else 1


def _draw(report: TraceReport, path: Path) -> None:
    try:
        from bagua_ref.conformance.trace.plot import draw_errors

        draw_errors(report).savefig(path, dpi=120, metadata={"Software": None})
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--png needs matplotlib: pip install 'bagua_ref[conformance]'") from None
    print(f"Picture: {path}")


def _show(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.conformance.trace import TraceError, read_trace

    try:
        ranks = read_trace(arguments.directory)
        print(_summary(ranks))
    except (TraceError, OSError) as error:
        print(f"bagua-ref trace: {error}", file=sys.stderr)
        return 2
    return 0


def _summary(ranks: list[RankTrace]) -> str:
    first = ranks[0].manifest
    options = ", ".join(f"{name}={value}" for name, value in first["options"].items())
    name = first.get("algorithm") or "an algorithm that the trace does not name"
    lines = [
        f"{name}{f'({options})' if options else ''} on {first['world_size']} ranks, nodes {first['nodes']}",
        f"sampling: {first.get('sampling', 'not said')}",
        f"{'rank':>4} {'steps':>6} {'first':>6} {'last':>6} {'bytes':>13}  state",
    ]
    for place, rank in enumerate(ranks):
        steps = sorted(rank.steps)
        stopped = rank.manifest.get("stopped")
        state = "complete" if rank.manifest.get("complete") else f"stopped: {stopped['reason']}" if stopped else "not ended"
        ends = (f"{steps[0]}", f"{steps[-1]}") if steps else ("-", "-")
        lines.append(f"{place:4} {len(steps):6} {ends[0]:>6} {ends[1]:>6} {rank.bytes():13,}  {state}")
    times = Counter(record["bucket"] for entry in ranks[0].steps.values() for record in entry["records"])
    lines.append(f"{'bucket':10} {'dtype':9} {'elements':>12} {'tensors':>7} {'recorded':>8}")
    for name, bucket in first["buckets"].items():
        lines.append(f"{name:10} {bucket['dtype']:9} {bucket['elements']:12,} {len(bucket['tensors']):7} {times[name]:8}")
    return "\n".join(lines)


def _progress(done: int, total: int) -> None:
    """Show progress: one line that changes in a terminal, else a line for each tenth of the way."""
    if sys.stderr.isatty():
        print(f"\r\x1b[Kreplaying: {done} of {total} steps", end="", file=sys.stderr, flush=True)
    elif done == total or done * 10 // total > (done - 1) * 10 // total:
        print(f"replaying: {done} of {total} steps", file=sys.stderr, flush=True)


def _end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
