"""``bagua-ref verify``: check an implementation from the command line."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator

from bagua_ref.cli.command import (
    CommandError,
    Outcome,
    check_choice,
    end_progress,
    foreign_code,
    require,
    show_progress,
)
from bagua_ref.conformance.clauses import SUITES
from bagua_ref.conformance.run.report import Result
from bagua_ref.conformance.run.runner import (
    NamedTarget,
    default_jobs,
    read_xfails,
    run_conformance,
)
from bagua_ref.errors import BaguaError

__all__ = ["run"]


def run(arguments: Namespace) -> Outcome:
    """Run the checks and return the exit code: 0 if all passed, 1 if one failed, 2 if none could
    run.
    """
    named = NamedTarget(
        arguments.target, arguments.backend, arguments.communicator, arguments.program
    )
    given = named.target, named.backend, named.communicator
    if any(given) == (named.command is not None) or (named.target and named.backend):
        raise CommandError(
            "one of --backend, --target, --communicator (also with one of these) and --command is"
            " required"
        )
    if arguments.xfails is not None and not arguments.xfails.is_file():
        raise CommandError(f"argument --xfails: no such file: {str(arguments.xfails)!r}")
    check_choice("--suite", arguments.suite or (), SUITES)
    require("bagua-ref verify", "conformance", "hypothesis", "pytest", "xdist")
    time_limit = arguments.time_limit or (10.0 if named.command is None else 60.0)
    name = named.command or named.target or named.backend or named.communicator
    with foreign_code(f"cannot load {name}"), _output_on_stderr():
        target = named.load(time_limit)
    try:
        report = run_conformance(
            named,
            arguments.suite,
            arguments.profile,
            read_xfails(arguments.xfails) if arguments.xfails else (),
            arguments.fail_fast,
            checks=arguments.check,
            seed=arguments.seed,
            jobs=arguments.jobs or default_jobs(target),
            time_limit=time_limit,
            progress=_show,
        )
    except (ValueError, TypeError, AttributeError, ImportError, OSError, BaguaError) as error:
        raise CommandError(str(error)) from None
    end_progress()
    files = {} if arguments.junit is None else {arguments.junit: report.to_junit()}
    code = 0 if report.passed else 1 if report.ran else 2
    lines = [str(report)]
    if code == 1:
        lines.append("Next: --check ID runs a failed check again")
    elif code == 0 and arguments.profile == "quick":
        lines.append("Next: --profile full tries more inputs")
    if report.not_tried() and named.backend and ":" not in named.backend:
        lines.append(
            f"--backend {named.backend} has kernels only; --target {named.backend} checks all of"
            " bagua_ref with them"
        )
    return Outcome("\n".join(lines), json.loads(report.to_json()), code, files)


@contextlib.contextmanager
def _output_on_stderr() -> Iterator[None]:
    """Context that redirects all output, including that of C code, to standard error."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def _show(done: int, total: int, result: Result) -> None:
    show_progress(f"[{done}/{total}] {result.id}: {result.status}", keep=result.failed)
