"""``bagua-ref sim``: run a torch.distributed program on simulated ranks under many schedules, and
report its errors.
"""

from __future__ import annotations

import json
import os
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from bagua_ref.cli.command import (
    CommandError,
    Outcome,
    check_choice,
    end_progress,
    show_progress,
)
from bagua_ref.formulas.costs import LinkCosts, parse_seconds
from bagua_ref.simulation.judge import Exploration, Judgement, judge
from bagua_ref.simulation.programs import Program
from bagua_ref.simulation.schedules import FAULTS, Fault, Schedule

__all__ = ["JSON_VERSION", "run"]

JSON_VERSION = 1
"""Version of the ``--json`` output."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def run(arguments: Namespace) -> Outcome:
    """Run the program under many schedules."""
    nodes = arguments.nodes or (arguments.ranks or 2,)
    if arguments.cwd and not arguments.cwd.is_dir():
        raise CommandError(f"argument --cwd: there is no folder {str(arguments.cwd)!r}")
    if arguments.ranks not in (None, sum(nodes)):
        raise CommandError(
            f"argument --nodes: {','.join(map(str, nodes))} must sum to --ranks {arguments.ranks}"
        )
    kinds = tuple(filter(None, (arguments.faults or "").split(",")))
    check_choice("--faults", kinds, FAULTS)
    if not arguments.link and (arguments.compute or arguments.trace):
        raise CommandError("arguments --compute and --trace need --link")
    try:
        program = Program(
            arguments.program,
            tuple(arguments.after),
            loads_in_process=arguments.workers is not None,
            link=arguments.link and LinkCosts.parse(arguments.link),
            compute=arguments.compute and parse_seconds(arguments.compute),
            cpu=arguments.cpu,
            is_module=arguments.is_module,
            folder=str(arguments.cwd.resolve()) if arguments.cwd else "",
        )
        search = Exploration(
            nodes,
            arguments.seeds,
            arguments.deviations,
            _seconds(arguments.limit),
            None if arguments.schedule is None else Schedule.parse(arguments.schedule),
            kinds,
            None if arguments.fault is None else Fault.parse(arguments.fault),
            arguments.compare == "stdout",
        )
    except ValueError as error:
        raise CommandError(str(error)) from None
    if search.fault is not None and search.fault.rank >= sum(nodes):
        raise CommandError(
            f"argument --fault: rank {search.fault.rank} must be one of 0 to {sum(nodes) - 1}"
        )

    def progress(report: Judgement) -> None:
        show_progress(f"{report.runs} of {report.planned or 'many'} runs")

    report = judge(program, search, progress)
    end_progress()
    found = report.finding
    command = None if found is None else _command(arguments, found)
    result: dict[str, Any] = {
        "version": JSON_VERSION,
        "verdict": report.verdict,
        "runs": report.runs,
        "planned": report.planned,
        **dict.fromkeys(("kind", "message", "rank", "file", "line", "step", "schedule", "fault")),
        "command": command,
        "hints": report.hints,
        **dict.fromkeys(("trace", "seconds_per_step", "exposed_seconds_per_step")),
    }
    lines = [f"hint: {hint}" for hint in report.hints]
    if report.timeline is not None:
        seconds, exposed = report.timeline.per_step()
        trace = str(arguments.trace or "sim-trace.json")
        Path(trace).write_text(json.dumps(report.timeline.chrome_trace()))
        lines.append(
            f"time: {seconds:.6g} s a step, {exposed:.6g} s of it exposed communication; trace:"
            f" {trace}"
        )
        result |= {
            "trace": trace,
            "seconds_per_step": seconds,
            "exposed_seconds_per_step": exposed,
        }
    counts = f"{report.runs} run{'s' * (report.runs != 1)}"
    if found is not None:
        result |= {
            "kind": found.kind,
            "message": found.message,
            "rank": found.rank,
            "file": found.file or None,
            "line": found.line or None,
            "step": found.step,
            "schedule": str(found.schedule),
            "fault": found.fault and str(found.fault),
        }
        head = "no verdict" if report.verdict == "undecided" else "found"
        lines += [f"{head} in {counts}: {found.message}", f"replay: {command}"]
    elif report.is_complete:
        lines.append(
            f"OK: no error in {counts}, and all have equal communication, weights and results"
        )
        if not kinds:
            lines.append("Next: --faults kill,stop,slow, which also lets ranks die or wait")
    else:
        of = f"{report.runs} of {report.planned}" if report.planned else str(report.runs)
        lines.append(f"no verdict: the time limit came after {of} runs. Next: --limit 10m")
    text = "\n".join(lines).replace(os.getcwd() + os.sep, "")
    return Outcome(text, result, {"agree": 0, "found": 1, "undecided": 3}[report.verdict])


def _command(arguments: Namespace, found: Any) -> str:
    """Return the command line that replays a finding."""
    words = ["bagua-ref", "sim", arguments.program]
    options = {
        "--ranks": arguments.ranks or (None if arguments.nodes else 2),
        "--nodes": arguments.nodes and ",".join(map(str, arguments.nodes)),
        "--schedule": str(found.schedule).replace("default", ""),
        "--fault": found.fault,
    }
    options |= {
        f"--{name}": getattr(arguments, name)
        for name in ("compare", "workers", "cwd", "link", "compute")
    }
    for name, value in options.items():
        words += [name, str(value)] if value else []
    words += ["-m"] * arguments.is_module + ["--cpu"] * arguments.cpu
    return shlex.join([*words, *(["--", *arguments.after] if arguments.after else [])])


def _seconds(text: str) -> float:
    """Parse a time limit, such as 90s, 5m or 1h, as seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise ValueError(f"argument --limit: {text!r} must be a time such as 90s, 5m or 1h")
    return seconds
