"""The command line ``bagua-ref``, one module for each command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

import bagua_ref
from bagua_ref.cli import advise, balance, demo, doctor, graph, measure, sim, trace, vectors, verify
from bagua_ref.cli.command import CommandError, PrintCompletion, require
from bagua_ref.conformance.vectors import VectorsError
from bagua_ref.record import RecordingError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bagua-ref`` with ``argv`` (None: the process's arguments); return the exit code.

    0: success. 1: a run or a check failed, or nobody reads the output. 2: bad input (raised as
    SystemExit by argparse), a missing package, or a file that cannot be read or written. 130:
    interrupted.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    end = words.index("--") if words[:1] == ["sim"] and "--" in words else len(words)
    arguments, unknown = _parser().parse_known_args(words[:end])
    arguments.after = words[end + 1 :]  # the arguments of the program that sim runs
    parser: argparse.ArgumentParser = arguments.parser
    if unknown:
        # parse_args would print the usage of bagua-ref itself
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.stdout = sys.stdout
    try:
        if arguments.tables and not arguments.json:
            require("printing tables", "demo", "rich")
        if getattr(arguments, "png", None) is not None:
            require("--png", "demo", "matplotlib")
        # Other output, such as that of a tested implementation, must not get between the lines of
        # JSON.
        with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
            exit_code: int = arguments.command(parser, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed it
        # else flushing at exit fails again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # as rich's tables do
    except (CommandError, RecordingError, VectorsError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua-ref", description="PyTorch training with relaxed communication."
    )
    parser.add_argument("--version", action="version", version=f"bagua_ref {bagua_ref.__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=("bash", "zsh", "tcsh", "fish"),
        help="print a completion script for this shell and exit; needs shtab",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (demo, doctor, measure, advise, sim, balance, graph, vectors, trace, verify):
        command.add_parser(commands)
    return parser
