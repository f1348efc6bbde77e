"""``bagua-ref verify``: check an implementation from the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys

from bagua_ref.cli.command import CommandError, write_file, write_json
from bagua_ref.conformance.run.report import Result
from bagua_ref.errors import BaguaError

__all__ = ["verify"]


def verify(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the checks; return 0 if all passed, 1 if one failed, 2 if none could be run.

    Raises:
        CommandError: the target cannot be imported or made, or Hypothesis is missing.
    """
    from bagua_ref.conformance.run.runner import check_ids, read_xfails, run_conformance
    from bagua_ref.conformance.suites.checks import all_checks
    from bagua_ref.conformance.targets.process import ProcessTarget
    from bagua_ref.conformance.targets.target import assemble, resolve

    time_limit = arguments.time_limit or (10.0 if arguments.command_line is None else 60.0)
    sys.path.insert(0, os.getcwd())  # pkg.mod:Class is usually in the current folder
    try:
        if arguments.command_line is not None:
            target = resolve(ProcessTarget(arguments.command_line, arguments.launch, arguments.ranks, time_limit))
        else:
            target = assemble(arguments.backend, arguments.communicator)
    except Exception as error:  # importing or creating a foreign target may raise anything
        named = arguments.command_line or arguments.backend or arguments.communicator
        raise CommandError(f"cannot load {named}: {type(error).__name__}: {error}") from None
    try:
        known = [*all_checks(), *check_ids()]
        report = run_conformance(
            target,
            arguments.suite,
            arguments.profile,
            read_xfails(arguments.xfails, known) if arguments.xfails else (),
            arguments.fail_fast,
            checks=arguments.check,
            seed=arguments.seed,
            jobs=arguments.jobs,
            time_limit=time_limit,
            progress=_show,
        )
    except ValueError as error:
        parser.error(str(error))
    except (TypeError, AttributeError, ImportError, OSError, BaguaError) as error:
        raise CommandError(error) from None
    _show(0, 0, None)
    if not arguments.json:
        print(report)
    code = 0 if report.passed else 1 if report.ran else 2
    try:
        write_json(arguments, json.loads(report.to_json()))
        if arguments.junit is not None:
            write_file(arguments.junit, report.to_junit())
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        code = 2
    if any("no answer within" in result.message for result in report.results):
        # A thread that hangs in foreign code would prevent a normal exit, or crash it.
        arguments.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _show(done: int, total: int, result: Result | None) -> None:
    """Show progress: one changing line in a terminal, else one line for each failure and each tenth."""
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
