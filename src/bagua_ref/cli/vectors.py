"""``bagua-ref vectors``: write the golden vectors, and compare an implementation's outputs with
them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from bagua_ref.base.untrusted import one_line
from bagua_ref.cli.command import Commands, add_command, write_json
from bagua_ref.conformance.clauses import SPEC_VERSION, VECTORS_VERSION
from bagua_ref.conformance.vectors import (
    VectorsReport,
    Verdict,
    check_outputs,
    check_program,
    export_vectors,
)
from bagua_ref_cli import COMMANDS

__all__ = ["add_parser"]

_STATUSES = ("passed", "failed", "missing")
_SHOWN = 20  # failures that are printed; the JSON has all


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``vectors export`` and ``vectors check`` to the commands of ``bagua-ref``."""
    vectors = commands.add_parser(
        "vectors",
        help=COMMANDS["vectors"],
        description=(
            "Golden vectors are inputs and expected outputs, stored as safetensors files with a"
            " JSON manifest, to test implementations in any language."
        ),
    )
    vectors.set_defaults(parser=vectors)
    verbs = vectors.add_subparsers(title="commands", metavar="COMMAND")
    export = add_command(
        verbs,
        "export",
        _export,
        examples=("bagua-ref vectors export vectors",),
        help="write all test cases to a folder",
        description="Write all test cases to a folder. The files are identical on every machine.",
    )
    export.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="folder to create; if it exists, it must be empty",
    )

    check = add_command(
        verbs,
        "check",
        _check,
        examples=(
            "bagua-ref vectors check outputs",
            "bagua-ref vectors check --command ./serve --only codecs/ --only MinMaxUInt8",
        ),
        help="compare an implementation's outputs with the expected ones",
        description=(
            "Compare an implementation's outputs with the expected ones, within the tolerance of"
            " each test case."
        ),
        epilog=(
            "Exit status is 0 if all cases passed, 1 if a case failed or is missing or the outputs"
            " contain anything else, and 2 if the outputs cannot be read or the program broke the"
            " protocol."
        ),
    )
    check.add_argument(
        "outputs",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="folder of the outputs: safetensors files with tensors named ID:NAME",
    )
    check.add_argument(
        "--command",
        dest="program",
        metavar="COMMAND",
        help="program that answers requests for the outputs, instead of a folder",
    )
    check.add_argument(
        "--only",
        nargs="+",
        action="append",
        default=[],
        metavar="TEXT",
        help="check only cases whose id contains one of the texts; each --only narrows further",
    )


def _export(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    count = export_vectors(arguments.directory)
    if not arguments.json:
        print(f"Wrote {count} cases (vectors version {VECTORS_VERSION}) to {arguments.directory}")
    write_json(
        arguments,
        {"directory": str(arguments.directory), "vectors_version": VECTORS_VERSION, "cases": count},
    )
    return 0


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if (arguments.outputs is None) == (arguments.program is None):
        parser.error("name a folder of outputs, or a program with --command")
    if arguments.program is not None:
        report = check_program(arguments.program, only=arguments.only)
    elif arguments.outputs.is_dir():
        report = check_outputs(arguments.outputs, only=arguments.only)
    else:
        parser.error(f"no such folder: {str(arguments.outputs)!r}")
    if not arguments.json:
        _print_report(report)
    write_json(arguments, report.as_json())
    return 0 if report.passed else 1


def _print_report(report: VectorsReport) -> None:
    rows: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        rows[verdict.case.operation, verdict.case.dtype].append(verdict)
    width = max(len(operation) for operation, _ in rows)
    print(f"{'operation':{width}} {'dtype':9} {'passed':>6} {'failed':>6} {'missing':>7}  clauses")
    for (operation, dtype), verdicts in rows.items():
        passed, failed, missing = (
            sum(verdict.status == status for verdict in verdicts) for status in _STATUSES
        )
        clauses = ", ".join(sorted({verdict.case.clause for verdict in verdicts}))
        print(f"{operation:{width}} {dtype:9} {passed:6} {failed:6} {missing:7}  {clauses}")
    print()
    _print_list("Files", [f"{path}: {message}" for path, message in report.problems.items()])
    wrong = [
        f"{v.case.clause} {v.case.id} [{v.case.flag}]: {v.message}"
        for status in ("failed", "missing")
        for v in report.verdicts
        if v.status == status
    ]
    _print_list("Cases", wrong)
    counts = [f"{report.count(status)} {status}" for status in _STATUSES]
    counts += [f"{report.not_selected} not selected"] if report.not_selected else []
    print(
        f"{'PASSED' if report.passed else 'FAILED'}: {', '.join(counts)}, {len(report.problems)}"
        f" problems with files (vectors {VECTORS_VERSION}, specification {SPEC_VERSION})"
    )
    print(
        "Next: bagua-ref verify --command PROGRAM, which searches for inputs that differ"
        if report.passed
        else "Next: --only ID checks a single case again"
    )


def _print_list(title: str, lines: list[str]) -> None:
    if lines:
        print(f"{title}:")
        for line in lines[:_SHOWN]:
            print(f"  {one_line(line)}")
        if len(lines) > _SHOWN:
            print(f"  ... and {len(lines) - _SHOWN} more; --json has all")
        print()
