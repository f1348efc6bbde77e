"""``bagua-ref vectors``: write the golden vectors, and compare somebody's outputs with them."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    from bagua_ref.conformance.vectors import Report, Verdict

__all__ = ["add_parser"]

_SHOWN = 20  # failures that are printed; the JSON has all


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``vectors export`` and ``vectors check`` to the commands of ``bagua-ref``."""
    vectors = commands.add_parser(
        "vectors",
        help="write golden vectors, or check another implementation's outputs against them",
        description="Golden vectors are inputs and expected outputs as safetensors files with a JSON manifest, for "
        "implementations in any language. Exit code 0: passed; 1: failed; 2: could not run.",
    )
    verbs = vectors.add_subparsers(title="commands", required=True, metavar="COMMAND")
    export = verbs.add_parser("export", help="write all cases", description="Write all cases: the same bytes on every machine.")
    export.set_defaults(command=_export)
    export.add_argument("directory", type=Path, metavar="DIR", help="is made, or must be empty")

    check = verbs.add_parser(
        "check",
        help="compare outputs with what the vectors expect",
        description="Compare outputs with what the vectors expect, each by its case's tolerance. Exit code 0: all passed; 1: a "
        "case failed or is missing, or something else lies among the outputs; 2: the vectors or the outputs cannot be used.",
    )
    check.set_defaults(command=_check)
    check.add_argument("directory", type=Path, metavar="DIR", help="the vectors")
    check.add_argument(
        "--outputs", type=Path, required=True, metavar="DIR2", help="safetensors files whose tensors are named ID:NAME"
    )
    check.add_argument("--operation", nargs="+", default=[], metavar="NAME", help="only these operations (default: all)")
    check.add_argument("--dtype", nargs="+", default=[], metavar="NAME", help="only cases of these dtypes (default: all)")
    check.add_argument("--json", action="store_true", help="print JSON, with every case, instead of the table")


def _export(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.conformance.vectors import VECTORS_VERSION, export_vectors

    def work() -> int:
        count = export_vectors(arguments.directory)
        print(f"{count} cases of vectors version {VECTORS_VERSION} in {arguments.directory}")
        return 0

    return _could_run(work)


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from bagua_ref.conformance.vectors import check_outputs

    def work() -> int:
        report = check_outputs(arguments.directory, arguments.outputs, operations=arguments.operation, dtypes=arguments.dtype)
        if arguments.json:
            print(json.dumps(report.as_json(), indent=2))
        else:
            _print_report(report)
        return 0 if report.passed else 1

    return _could_run(work)


def _could_run(work: Callable[[], int]) -> int:
    from bagua_ref.conformance.vectors import VectorsError

    try:
        return work()
    except VectorsError as error:
        print(f"bagua-ref vectors: {error}", file=sys.stderr)
        return 2


def _print_report(report: Report) -> None:
    rows: dict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        rows[verdict.case["suite"], verdict.case["operation"], verdict.case["dtype"]].append(verdict)
    width = max(len(operation) for _, operation, _ in rows)
    print(f"{'suite':9} {'operation':{width}} {'dtype':9} {'cases':>5} {'passed':>6} {'failed':>6} {'missing':>7}  clauses")
    for (suite, operation, dtype), verdicts in rows.items():
        counts = [sum(verdict.status == status for verdict in verdicts) for status in ("passed", "failed", "missing")]
        clauses = ", ".join(sorted({verdict.case["clause"] for verdict in verdicts}))
        print(f"{suite:9} {operation:{width}} {dtype:9} {len(verdicts):5} {counts[0]:6} {counts[1]:6} {counts[2]:7}  {clauses}")
    print()
    _print_list("Files", [f"{place}: {message}" for place, message in report.problems.items()])
    wrong: list[Any] = [verdict for verdict in report.verdicts if verdict.status == "failed"]
    wrong += [verdict for verdict in report.verdicts if verdict.status == "missing"]
    _print_list("Cases", [f"{v.case['clause']} {v.case['id']} [{', '.join(v.case['flags'])}]: {v.message}" for v in wrong])
    total = ", ".join(f"{report.count(status)} {status}" for status in ("passed", "failed", "missing"))
    more = f", {report.not_selected} not selected" if report.not_selected else ""
    versions = f"vectors {report.versions['vectors_version']}, specification {report.versions['spec_version']}"
    outcome = "PASSED" if report.passed else "FAILED"
    print(f"{outcome}: {total}{more}, {len(report.problems)} problems with files ({versions})")


def _print_list(title: str, lines: list[str]) -> None:
    if lines:
        print(f"{title}:")
        for line in lines[:_SHOWN]:
            print(f"  {line}")
        if len(lines) > _SHOWN:
            print(f"  ... and {len(lines) - _SHOWN} more; --json has all")
        print()
