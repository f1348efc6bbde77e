"""The command line ``bagua-ref``, one module for each command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib import import_module

import bagua_ref
from bagua_ref.cli.command import CommandError, print_completion, require
from bagua_ref.conformance.vectors import VectorsError
from bagua_ref.record import RecordingError
from bagua_ref_cli import COMMANDS, top_parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bagua-ref`` with ``argv`` (None: the process's arguments); return the exit code.

    0: success. 1: a run or a check failed, or nobody reads the output. 2: bad input (raised as
    SystemExit by argparse), a missing package, or a file that cannot be read or written. 130:
    interrupted.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    whole = _parser(*(words[:1] if words[:1] and words[0] in COMMANDS else COMMANDS))
    end = words.index("--") if words[:1] == ["sim"] and "--" in words else len(words)
    arguments, unknown = whole.parse_known_args(words[:end])
    if arguments.version:
        print(f"bagua_ref {bagua_ref.__version__}")
        return 0
    if arguments.print_completion is not None:
        arguments.command, arguments.json, arguments.parser = print_completion, False, whole
    if not hasattr(arguments, "command"):
        whole.print_help()
        return 0
    arguments.after = words[end + 1 :]  # the arguments of the program that sim runs
    parser: argparse.ArgumentParser = arguments.parser
    if unknown:
        # parse_args would name bagua-ref itself
        text = f"unrecognized arguments: {' '.join(unknown)}"
        if words[0] == "sim":
            text += f" (those of the program come last: {arguments.program} -- {' '.join(unknown)})"
        parser.error(text)
    arguments.stdout = sys.stdout
    try:
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
        return 1
    except (CommandError, RecordingError, VectorsError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return exit_code


def _parser(*names: str) -> argparse.ArgumentParser:
    """Return the parser of these commands, of which only the modules are imported."""
    parser, commands = top_parser()
    for name in names:
        import_module(f"bagua_ref.cli.{name}").add_parser(commands)
    return parser
