"""``bagua-ref verify``: check an implementation from the command line."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from bagua_ref.cli.command import (
    CommandError,
    Commands,
    add_command,
    end_progress,
    foreign_code,
    number,
    require,
    show_progress,
    write_file,
    write_json,
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

__all__ = ["add_parser"]


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``verify`` to the commands of ``bagua-ref``."""
    verify = add_command(
        commands,
        "verify",
        _verify,
        examples=(
            "bagua-ref verify --backend mycode:MyKernels",
            "bagua-ref verify --command ./serve --suite kernels codec",
            "bagua-ref verify --target reference --check S4.1",
        ),
        help="check an implementation against the specification, clause by clause",
        description="Search for inputs for which an implementation differs from the specification.",
        epilog=(
            "Exit status is 0 if all checks passed, 1 if one failed or a known failure passed, and"
            " 2 if nothing could be run."
        ),
    )
    verify.add_argument(
        "--backend",
        metavar="NAME|pkg.mod:Class",
        help="a kernel backend, or any other target that run_conformance accepts",
    )
    verify.add_argument(
        "--target",
        metavar="NAME|pkg.mod:Class",
        help=(
            "all parts of bagua_ref with this kernel backend ('reference': as it is installed), or"
            " an object with some of them"
        ),
    )
    verify.add_argument(
        "--communicator",
        metavar="pkg.mod:factory",
        help="a function that each rank calls with its world",
    )
    verify.add_argument(
        "--command",
        dest="command_line",
        metavar="PROGRAM",
        help=(
            "a program in any language, with its arguments, that answers requests on standard input"
            " and output"
        ),
    )
    verify.add_argument(
        "--suite",
        nargs="+",
        action="extend",
        choices=SUITES,
        metavar="NAME",
        help="suites to run: %(choices)s (default: all that apply to the target)",
    )
    verify.add_argument(
        "--check",
        nargs="+",
        action="extend",
        metavar="ID",
        help="run only these checks, given by id or by clause; S4 stands for S4.1, S4.2, ..., too",
    )
    verify.add_argument(
        "--profile",
        choices=("quick", "full", "large"),
        default="quick",
        help="number of inputs to try, and how long long ones are (default: %(default)s)",
    )
    verify.add_argument(
        "--xfails",
        type=Path,
        metavar="FILE",
        help="list of known failures: one id per line, comments start with #",
    )
    verify.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed of all inputs (default: %(default)s)",
    )
    verify.add_argument(
        "--jobs",
        type=number(1, 1e6, integer=True),
        metavar="N",
        help=(
            "number of worker processes (default: one per core, up to 4; 1 if the target is"
            " external)"
        ),
    )
    verify.add_argument(
        "--time-limit",
        type=number(1e-3, 1e9),
        metavar="S",
        help=(
            "seconds after which a single call counts as hanging (default: 10, and 60 with"
            " --command, whose ranks must start)"
        ),
    )
    verify.add_argument("--fail-fast", action="store_true", help="stop at the first failure")
    verify.add_argument(
        "--junit", type=Path, metavar="PATH", help="also write the result as JUnit XML to PATH"
    )


def _verify(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    named = (
        arguments.backend is not None
        or arguments.target is not None
        or arguments.communicator is not None
    )
    if named == (arguments.command_line is not None) or None not in (
        arguments.backend,
        arguments.target,
    ):
        parser.error(
            "one of --backend, --target, --communicator (also with one of these) and --command is"
            " required"
        )
    if arguments.xfails is not None and not arguments.xfails.is_file():
        parser.error(f"argument --xfails: no such file: {str(arguments.xfails)!r}")
    return _run(parser, arguments)


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the checks; return 0 if all passed, 1 if one failed, 2 if none could be run.

    Raises:
        CommandError: the target cannot be imported or made, or Hypothesis is missing.
    """
    require("bagua-ref verify", "conformance", "hypothesis", "pytest", "xdist")
    time_limit = arguments.time_limit or (10.0 if arguments.command_line is None else 60.0)
    named = NamedTarget(
        arguments.target, arguments.backend, arguments.communicator, arguments.command_line
    )
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
    except ValueError as error:
        parser.error(str(error))
    except (TypeError, AttributeError, ImportError, OSError, BaguaError) as error:
        raise CommandError(error) from None
    end_progress()
    code = 0 if report.passed else 1 if report.ran else 2
    if not arguments.json:
        print(report)
        if code == 1:
            print("Next: --check ID runs a failed check again")
        elif code == 0 and arguments.profile == "quick":
            print("Next: --profile full tries more inputs")
        if report.not_tried() and arguments.backend is not None and ":" not in arguments.backend:
            print(
                f"--backend {arguments.backend} has kernels only; --target {arguments.backend}"
                " checks all of bagua_ref with them"
            )
    try:
        write_json(arguments, json.loads(report.to_json()))
        if arguments.junit is not None:
            write_file(arguments.junit, report.to_junit())
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        code = 2
    return code


@contextlib.contextmanager
def _output_on_stderr() -> Iterator[None]:
    """Send all output in this context, also that of C code, to standard error."""
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
