"""``bagua-ref trace``: find where two recorded runs diverge, or summarize a recording."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from bagua_ref.base.untrusted import one_line
from bagua_ref.cli.command import Commands, add_command, write_json, write_picture
from bagua_ref.record import RankRecording, diff_records, draw_distances, read_recording
from bagua_ref_cli import COMMANDS

__all__ = ["add_parser"]


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``trace diff`` and ``trace show`` to the commands of ``bagua-ref``."""
    trace = commands.add_parser(
        "trace",
        help=COMMANDS["trace"],
        description=(
            "A recording is what bagua_ref.record wrote during a run: digests of everything each"
            " step computes."
        ),
    )
    trace.set_defaults(parser=trace)
    verbs = trace.add_subparsers(title="commands", metavar="COMMAND")
    diff = add_command(
        verbs,
        "diff",
        _diff,
        examples=("bagua-ref trace diff run1 run2",),
        help="find where two recorded runs diverge",
        description=(
            "Compare two recordings: find the first value that differs although everything it"
            " depends on is equal, and its likely cause."
        ),
        epilog=(
            "Exit status is 0 if the recordings are equal, 1 if they differ, and 2 if they cannot"
            " be compared."
        ),
    )
    for name in "ab":
        diff.add_argument(
            name,
            type=Path,
            metavar="DIR",
            help="folder that contains rank0, rank1, ... of one run",
        )
    diff.add_argument(
        "--png", type=Path, metavar="FILE", help="plot the distance by step; needs matplotlib"
    )
    show = add_command(
        verbs,
        "show",
        _show,
        examples=("bagua-ref trace show run1",),
        help="summarize a recording",
        description="Summarize what was recorded.",
        epilog="Exit status is 0 on success and 2 if the recording cannot be read.",
    )
    show.add_argument(
        "directory", type=Path, metavar="DIR", help="folder that contains rank0, rank1, ..."
    )


def _diff(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    report = diff_records(arguments.a, arguments.b)
    if not arguments.json:
        print(report)
    write_json(arguments, report.as_json())
    write_picture(lambda: draw_distances(report), arguments.png)
    return 0 if report.first is None else 1


def _show(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    ranks = read_recording(arguments.directory)
    found = _summary(ranks)
    if not arguments.json:
        lines = [
            f"Command: {shlex.join(found['command'])}",
            "Process: " + ", ".join(f"{name} {value}" for name, value in found["settings"].items()),
            f"{'rank':>4} {'steps':>6} {'first':>6} {'last':>6}  state",
            *(
                f"{rank:4} {len(steps):6} {steps[0] if steps else '-':>6}"
                f" {steps[-1] if steps else '-':>6}  {of_rank['state']}"
                for rank, of_rank in enumerate(found["ranks"])
                for steps in [of_rank["steps"]]
            ),
            f"Entries of step {found['step']}, rank 0: "
            + ", ".join(f"{count} {kind}" for kind, count in found["entries"].items()),
        ]
        print("\n".join(map(one_line, lines)))
    write_json(arguments, found)
    return 0


def _summary(ranks: list[RankRecording]) -> dict[str, Any]:
    first = ranks[0]
    step, last = max(first.steps.items(), default=(None, None))
    return {
        "command": first.manifest["command"],
        "settings": first.manifest["settings"],
        "ranks": [
            {
                "steps": sorted(rank.steps),
                "state": (
                    f"stopped: {stopped}"
                    if (stopped := rank.manifest.get("stopped"))
                    else "complete"
                    if rank.manifest["complete"]
                    else "not ended"
                ),
            }
            for rank in ranks
        ],
        "step": step,
        "entries": Counter(name.partition(":")[0] for name in last.entries) if last else {},
    }
