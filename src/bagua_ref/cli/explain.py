"""``bagua-ref explain``: say in a sentence why a real job hangs, from what its ranks have dumped."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from bagua_ref.base.untrusted import one_line
from bagua_ref.cli.command import (
    COLORS,
    CommandError,
    Commands,
    add_command,
    write_json,
    write_picture,
)

__all__ = ["JSON_VERSION", "add_parser"]

JSON_VERSION = 1
"""Version of the result that ``--json`` prints."""

_MAX_SIMULATED = 8
"""Ranks of the command to try: errors of a program seldom need more."""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``explain`` to the commands of ``bagua-ref``."""
    parser = add_command(
        commands,
        "explain",
        _run,
        examples=("bagua-ref explain dumps", "bagua-ref explain dumps --json"),
        description=(
            "Read what the ranks of a job that hangs have dumped, and say which calls do not match,"
            " who waits for whom and what the likely cause is. Files are torch's flight recorder's"
            " (torch_trace_rank_0, ...), those of bagua_ref.explain_hangs(folder) and of"
            " bagua_ref.flight_recorder, and the output of py-spy dump (spy_rank_0.txt, ...)."
        ),
        epilog=(
            "Exit status is 0 if the job is healthy, 1 if an error was found, and 2 if a dump cannot"
            " be read or does not belong to the others."
        ),
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the dumps")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the ranks' last calls; needs matplotlib"
    )


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    # Here, as importing torch.distributed takes a second.
    from bagua_ref.explain import DumpError, explain
    from bagua_ref.explain.picture import draw_timeline

    try:
        found = explain(arguments.folder)
    except DumpError as error:
        raise CommandError(str(error)) from None
    finding, dumps = found.finding, found.dumps
    script = next((dump.script for dump in dumps.values() if dump.script), "train.py")
    ranks = max(2, min(found.world_size, _MAX_SIMULATED))
    command = shlex.join(["bagua-ref", "sim", script, "--ranks", str(ranks)])
    result = {
        "version": JSON_VERSION,
        "verdict": "found" if finding else "healthy",
        "kind": finding and finding.kind,
        "message": finding and finding.message,
        "rank": finding and finding.rank,
        "file": (finding and finding.file) or None,
        "line": (finding and finding.line) or None,
        "cause": found.cause or None,
        "certainty": found.certainty or None,
        "command": finding and command,
        "world_size": found.world_size,
        "ranks": sorted(dumps),
        "waits": [call._asdict() for call in found.waits],
        "notes": found.notes,
    }
    if not arguments.json:
        lines = [f"note: {note}" for note in found.notes]
        if finding is None:
            lines.append(f"healthy: {len(dumps)} dumps show no rank that hangs")
        else:
            lines.append(f"found: {finding.message}")
            if found.cause:
                lines.append(f"{found.certainty} cause: {found.cause}")
            lines.append(f"try: {command}")
        print("\n".join(map(one_line, lines)).replace(os.getcwd() + os.sep, ""))
    write_json(arguments, result)
    write_picture(lambda: draw_timeline(found, COLORS), arguments.png)
    return 1 if finding else 0
