"""``bagua-ref vectors``: write the golden vectors, and compare an implementation's outputs with
them.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict

from bagua_ref.base.untrusted import one_line
from bagua_ref.cli.command import CommandError, Outcome, table
from bagua_ref.conformance.clauses import SPEC_VERSION, VECTORS_VERSION
from bagua_ref.conformance.vectors import (
    VectorsReport,
    Verdict,
    check_outputs,
    check_program,
    export_vectors,
)

__all__ = ["run"]

_STATUSES = ("passed", "failed", "missing")
_SHOWN = 20  # failures that are printed; the JSON has all


def run(arguments: Namespace) -> Outcome:
    """Run ``vectors export`` or ``vectors check``."""
    if arguments.name == "vectors export":
        count, folder = export_vectors(arguments.directory), str(arguments.directory)
        return Outcome(
            f"Wrote {count} cases (vectors version {VECTORS_VERSION}) to {folder}",
            {"directory": folder, "vectors_version": VECTORS_VERSION, "cases": count},
        )
    only = arguments.only or []
    if (arguments.outputs is None) == (arguments.program is None):
        raise CommandError("name a folder of outputs, or a program with --command")
    if arguments.program is not None:
        report = check_program(arguments.program, only=only)
    elif arguments.outputs.is_dir():
        report = check_outputs(arguments.outputs, only=only)
    else:
        raise CommandError(f"no such folder: {str(arguments.outputs)!r}")
    return Outcome(_text(report), report.as_json(), int(not report.passed))


def _text(report: VectorsReport) -> str:
    verdicts: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        verdicts[verdict.case.operation, verdict.case.dtype].append(verdict)
    rows = [
        (
            *of,
            *(sum(verdict.status == status for verdict in listed) for status in _STATUSES),
            ", ".join(sorted({verdict.case.clause for verdict in listed})),
        )
        for of, listed in verdicts.items()
    ]
    wrong = [
        f"{v.case.clause} {v.case.id} [{v.case.flag}]: {v.message}"
        for status in ("failed", "missing")
        for v in report.verdicts
        if v.status == status
    ]
    lines = [table("", ("operation", "dtype", *_STATUSES, "clauses"), rows), ""]
    problems = [f"{path}: {message}" for path, message in report.problems.items()]
    for title, listed in (("Files", problems), ("Cases", wrong)):
        if listed:
            lines += [f"{title}:", *(f"  {one_line(line)}" for line in listed[:_SHOWN])]
            if len(listed) > _SHOWN:
                lines.append(f"  ... and {len(listed) - _SHOWN} more; --json has all")
            lines.append("")
    counts = [f"{report.count(status)} {status}" for status in _STATUSES]
    counts += [f"{report.not_selected} not selected"] if report.not_selected else []
    lines.append(
        f"{'PASSED' if report.passed else 'FAILED'}: {', '.join(counts)}, {len(report.problems)}"
        f" problems with files (vectors {VECTORS_VERSION}, specification {SPEC_VERSION})"
    )
    lines.append(
        "Next: bagua-ref verify --command PROGRAM, which searches for inputs that differ"
        if report.passed
        else "Next: --only ID checks a single case again"
    )
    return "\n".join(lines)
