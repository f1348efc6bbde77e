"""``bagua-ref sim``: run a program of torch.distributed on simulated ranks under many schedules,
and name what goes wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import Any

from bagua_ref.cli.command import (
    Commands,
    add_command,
    end_progress,
    number,
    show_progress,
    write_json,
)
from bagua_ref.formulas.costs import LinkCosts, parse_seconds

__all__ = ["JSON_VERSION", "add_parser"]

JSON_VERSION = 1
"""Version of the result that ``--json`` prints."""

_POSITIVE = number(1, 1e9, integer=True)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``sim`` to the commands of ``bagua-ref``."""
    sim = add_command(
        commands,
        "sim",
        _run,
        examples=(
            "bagua-ref sim train.py --ranks 4",
            "bagua-ref sim train.py --link 100Mbit,1ms --seeds 1 -- --epochs 1",
        ),
        description=(
            "Run an unmodified torch.distributed program on simulated ranks in one process, under"
            " many schedules, and report the first error: deadlocks, calls that do not match,"
            " exceptions, replicas that differ, and results that depend on the schedule. Each run"
            " has an empty working folder of its own."
        ),
        epilog=(
            "Exit status is 0 if all schedules agree, 1 if an error was found, 2 for bad usage, 3"
            " if there is no verdict (the program uses something that is not simulated, communicates"
            " nothing or does not repeat itself, or the time limit came first), and 130 after Ctrl-C."
        ),
    )
    sim.add_argument(
        "program",
        metavar="PROGRAM",
        help="script.py or package.module:function; its arguments come last, after --",
    )
    sim.add_argument(
        "-m",
        action="store_true",
        dest="is_module",
        help="PROGRAM is a module, as for python -m",
    )
    sim.add_argument(
        "--cwd",
        type=Path,
        metavar="DIR",
        help="run in this folder (default: an empty one for each run)",
    )
    sim.add_argument(
        "--ranks",
        type=_POSITIVE,
        metavar="N",
        help="the number of ranks (default: 2, or the sum of --nodes)",
    )
    sim.add_argument(
        "--nodes",
        type=_numbers,
        metavar="N,N,...",
        help="the number of ranks on each node (default: one node)",
    )
    how = sim.add_mutually_exclusive_group()
    how.add_argument(
        "--seeds",
        type=_POSITIVE,
        default=100,
        metavar="N",
        help="try N random schedules (default: %(default)s)",
    )
    how.add_argument(
        "--deviations",
        type=int,
        metavar="N",
        help="try all schedules with up to N deviations from the default",
    )
    how.add_argument(
        "--schedule",
        metavar="PLACE:CHOICE,...",
        help="run only this schedule, as a report names it",
    )
    sim.add_argument(
        "--faults",
        default="",
        metavar="KIND,...",
        help="also try these faults at each communication: kill, stop, slow",
    )
    sim.add_argument(
        "--fault", metavar="KIND:RANK:NUMBER", help="run only with this fault, as a report names it"
    )
    sim.add_argument(
        "--limit",
        type=_seconds,
        default=60.0,
        metavar="TIME",
        help="time for the runs after the first, which has as much (default: 60s)",
    )
    sim.add_argument(
        "--link",
        metavar="BANDWIDTH,LATENCY",
        help=(
            "let communication take time, such as 1Gbit,20ms; with two such pairs, between and"
            " inside nodes"
        ),
    )
    sim.add_argument(
        "--compute",
        metavar="TIME",
        help=(
            "with --link, of a forward and backward pass, such as 120ms (default: measured CPU"
            " time)"
        ),
    )
    sim.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="with --link, write the times for chrome://tracing (default: sim-trace.json)",
    )
    sim.add_argument(
        "--workers",
        choices=("0",),
        help="let data loaders run without their worker processes, which are real ones",
    )
    sim.add_argument(
        "--cpu",
        action="store_true",
        help="let devices that the program names, such as cuda:0, be the CPU",
    )
    sim.add_argument(
        "--compare",
        choices=("stdout",),
        help="what ranks print must not depend on the schedule either",
    )


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    # Here, as importing torch.distributed takes a second.
    from bagua_ref.simulation.judge import Exploration, Judgement, judge
    from bagua_ref.simulation.programs import Program
    from bagua_ref.simulation.schedules import FAULTS, Fault, Schedule

    nodes = arguments.nodes or (arguments.ranks or 2,)
    if arguments.cwd and not arguments.cwd.is_dir():
        parser.error(f"argument --cwd: there is no folder {str(arguments.cwd)!r}")
    if arguments.ranks not in (None, sum(nodes)):
        parser.error(
            f"argument --nodes: {','.join(map(str, nodes))} must sum to --ranks {arguments.ranks}"
        )
    kinds = tuple(filter(None, arguments.faults.split(",")))
    if not set(kinds) <= set(FAULTS):
        parser.error(f"argument --faults: {arguments.faults!r} must be some of {','.join(FAULTS)}")
    if arguments.deviations is not None and arguments.deviations < 0:
        parser.error(f"argument --deviations: {arguments.deviations} must be 0 or more")
    if not arguments.link and (arguments.compute or arguments.trace):
        parser.error("arguments --compute and --trace need --link")
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
            arguments.limit,
            None if arguments.schedule is None else Schedule.parse(arguments.schedule),
            kinds,
            None if arguments.fault is None else Fault.parse(arguments.fault),
            arguments.compare == "stdout",
        )
    except ValueError as error:
        parser.error(str(error))
    if search.fault is not None and search.fault.rank >= sum(nodes):
        parser.error(
            f"argument --fault: rank {search.fault.rank} must be one of 0 to {sum(nodes) - 1}"
        )

    def progress(report: Judgement) -> None:
        show_progress(f"{report.runs} of {report.planned or 'many'} runs")

    report = judge(program, search, progress)
    end_progress()
    found = report.finding
    result: dict[str, Any] = {
        "version": JSON_VERSION,
        "verdict": report.verdict,
        "runs": report.runs,
        "planned": report.planned,
    }
    for name in ("kind", "message", "rank", "file", "line", "step", "schedule", "fault"):
        value = getattr(found, name, None)
        result[name] = str(value) if name in ("schedule", "fault") and value else value
    result |= {"file": result["file"] or None, "line": result["line"] or None}
    result |= {"command": found and _command(arguments, nodes, found), "hints": report.hints}
    result["trace"] = result["seconds_per_step"] = result["exposed_seconds_per_step"] = None
    if report.timeline is not None:
        result["seconds_per_step"], result["exposed_seconds_per_step"] = seconds, exposed = (
            report.timeline.per_step()
        )
        result["trace"] = str(arguments.trace or "sim-trace.json")
        Path(result["trace"]).write_text(json.dumps(report.timeline.chrome_trace()))
    if not arguments.json:
        of = f"{report.runs} of {report.planned}" if report.planned else str(report.runs)
        counts = f"{report.runs} run{'s' * (report.runs != 1)}"
        lines = [f"hint: {hint}" for hint in report.hints]
        if report.timeline is not None:
            lines.append(
                f"time: {seconds:.6g} s a step, {exposed:.6g} s of it exposed communication; trace:"
                f" {result['trace']}"
            )
        if found is None and report.is_complete:
            lines.append(
                f"OK: no error in {counts}, and all have equal communication, weights and results"
            )
            if not kinds:
                lines.append("Next: --faults kill,stop,slow, which also lets ranks die or wait")
        elif found is None:
            lines.append(f"no verdict: the time limit came after {of} runs. Next: --limit 10m")
        else:
            head = "no verdict" if report.verdict == "undecided" else "found"
            lines += [f"{head} in {counts}: {found.message}", f"replay: {result['command']}"]
        print("\n".join(lines).replace(os.getcwd() + os.sep, ""))
    write_json(arguments, result)
    return {"agree": 0, "found": 1, "undecided": 3}[report.verdict]


def _command(arguments: argparse.Namespace, nodes: tuple[int, ...], found: Any) -> str:
    """Return the command that replays a finding."""
    options = {
        "--ranks": str(sum(nodes)),
        "--nodes": ",".join(map(str, nodes)) if len(nodes) > 1 else "",
        "--schedule": str(found.schedule).replace("default", ""),
        "--fault": str(found.fault or ""),
        "--compare": arguments.compare or "",
        "--workers": arguments.workers or "",
        "--cwd": str(arguments.cwd or ""),
        "--link": arguments.link or "",
        "--compute": arguments.compute or "",
    }
    words = [word for name, value in options.items() if value for word in (name, value)]
    return shlex.join(
        [
            "bagua-ref",
            "sim",
            arguments.program,
            *words,
            *(["-m"] if arguments.is_module else []),
            *(["--cpu"] if arguments.cpu else []),
            *(["--", *arguments.after] if arguments.after else []),
        ]
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_POSITIVE, text.split(",")))


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a time such as 90s, 5m or 1h")
    return seconds
