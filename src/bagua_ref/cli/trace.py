"""``bagua-ref trace``: find where two recorded runs diverge, or summarize a recording."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from bagua_ref.base.untrusted import one_line
from bagua_ref.cli.command import Outcome, table, write_picture
from bagua_ref.record import diff_records, draw_distances, read_recording

__all__ = ["run"]


def run(arguments: Namespace) -> Outcome:
    """Run ``trace diff`` or ``trace show``."""
    if arguments.name == "trace show":
        return _show(arguments.directory)
    report = diff_records(arguments.a, arguments.b)
    first, then = report.first, "nothing: both runs compute the same bits"
    if first is not None:
        then = f"stop both runs in step {first.step} and look at {first.record}"
    picture = write_picture(lambda: draw_distances(report), arguments.png)
    return Outcome(
        f"{report}\n{one_line(f'Next: {then}')}{picture}", report.as_json(), int(first is not None)
    )


def _show(folder: Path) -> Outcome:
    ranks = read_recording(folder)
    manifest = ranks[0].manifest
    step, last = max(ranks[0].steps.items(), default=(None, None))
    entries = Counter(name.partition(":")[0] for name in last.entries) if last else Counter[str]()
    states: list[dict[str, Any]] = []
    for rank in ranks:
        state = "complete" if rank.manifest["complete"] else "not ended"
        if stopped := rank.manifest.get("stopped"):
            state = f"stopped: {stopped}"
        states.append({"steps": sorted(rank.steps), "state": one_line(state)})
    rows = [
        (number, len(steps), steps[0] if steps else "-", steps[-1] if steps else "-", each["state"])
        for number, each in enumerate(states)
        for steps in [each["steps"]]
    ]
    process = ", ".join(f"{name} {value}" for name, value in manifest["settings"].items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in entries.items())
    lines = [
        one_line(f"Command: {shlex.join(manifest['command'])}"),
        one_line(f"Process: {process}"),
        table("", ("rank", "steps", "first", "last", "state"), rows),
        one_line(f"Entries of step {step}, rank 0: {kinds}"),
        "Next: bagua-ref trace diff compares it with another one",
    ]
    return Outcome(
        "\n".join(lines),
        {
            "command": manifest["command"],
            "settings": manifest["settings"],
            "ranks": states,
            "step": step,
            "entries": entries,
        },
    )
