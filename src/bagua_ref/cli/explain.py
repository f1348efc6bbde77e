"""``bagua-ref explain``: explain in one sentence why a job hangs, from the dumps of its ranks."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace

from bagua_ref.base.untrusted import one_line
from bagua_ref.cli.command import COLORS, CommandError, Outcome, write_picture
from bagua_ref.explain import DumpError, explain
from bagua_ref.explain.picture import draw_timeline

__all__ = ["JSON_VERSION", "run"]

JSON_VERSION = 1
"""Version of the ``--json`` output."""

_MAX_SIMULATED = 8
"""Maximum number of ranks in the suggested command: errors of a program seldom need more."""


def run(arguments: Namespace) -> Outcome:
    """Explain the dumps in a folder."""
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
    lines = [f"note: {note}" for note in found.notes]
    if finding is None:
        lines.append(f"healthy: {len(dumps)} dumps show no rank that hangs")
    else:
        lines.append(f"found: {finding.message}")
        if found.cause:
            lines.append(f"{found.certainty} cause: {found.cause}")
        lines.append(f"try: {command}")
    text = "\n".join(map(one_line, lines)).replace(os.getcwd() + os.sep, "")
    picture = write_picture(lambda: draw_timeline(found, COLORS), arguments.png)
    return Outcome(text + picture, result, int(finding is not None))
