"""``bagua-ref verify``: check an implementation from the command line."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from bagua_ref.errors import BaguaError

if TYPE_CHECKING:
    import argparse

    from bagua_ref.conformance.report import Result

__all__ = ["verify"]


def verify(arguments: argparse.Namespace) -> int:
    """Run the checks; return 0 if all passed, 1 if one did not, 2 if nothing could be run."""
    try:
        from bagua_ref.conformance.checks import all_checks
        from bagua_ref.conformance.runner import check_ids, run_conformance
        from bagua_ref.conformance.target import assemble
        from bagua_ref.conformance.xfails import read_xfails

        sys.path.insert(0, os.getcwd())  # pkg.mod:Class is most often in the folder one works in
        try:
            target = assemble(arguments.backend, arguments.communicator)
        except Exception as error:  # what is named may fail in any way while it is imported or made
            print(
                f"bagua-ref verify: {arguments.backend or arguments.communicator}: {type(error).__name__}: {error}", file=sys.stderr
            )
            return 2
        known = [*all_checks(), *check_ids()]
        xfail = read_xfails(arguments.xfails, known) if arguments.xfails else ()
        report = run_conformance(
            target,
            arguments.suite,
            arguments.profile,
            xfail,
            arguments.fail_fast,
            checks=arguments.check,
            seed=arguments.seed,
            jobs=arguments.jobs,
            time_limit=arguments.time_limit,
            progress=_show,
        )
    except (ValueError, TypeError, AttributeError, ImportError, OSError, BaguaError) as error:
        print(f"bagua-ref verify: {error}", file=sys.stderr)
        return 2
    _show(0, 0, None)
    print(report)
    code = 0 if report.passed else 1 if report.ran else 2
    try:
        report.write(json_path=arguments.json, junit_path=arguments.junit)
    except OSError as error:
        print(f"bagua-ref verify: the report cannot be written: {error}", file=sys.stderr)
        code = 2
    if any("no answer within" in result.message for result in report.results):
        # A thread that hangs in foreign code would keep this process from ending, or end it badly.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _show(done: int, total: int, result: Result | None) -> None:
    """Show progress: one line that changes in a terminal, else a line for each failure and each tenth of the way."""
    terminal = sys.stderr.isatty()
    if result is None:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return
    line = f"[{done}/{total}] {result.id}: {result.status}"
    if terminal:
        print(f"\r\x1b[K{line}", end="" if result.status != "failed" else "\n", file=sys.stderr, flush=True)
    elif result.status in ("failed", "xpassed") or done == total or done * 10 // total > (done - 1) * 10 // total:
        print(line, file=sys.stderr, flush=True)
