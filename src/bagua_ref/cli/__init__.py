"""The command line ``bagua-ref``, one module for each command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib import import_module

from bagua_ref.cli.command import CommandError, require
from bagua_ref.conformance.vectors import VectorsError
from bagua_ref.record import RecordingError
from bagua_ref_cli import Parser, top_parser

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run a command of ``bagua-ref``, the first word of ``argv``; return the exit code.

    0: success. 1: a run or a check failed. 2: bad input, a missing package, or a file that cannot
    be read or written; argparse raises it as SystemExit. 130: interrupted.
    """
    words = list(argv)
    whole = parser_of(words[0])
    end = words.index("--") if words[0] == "sim" and "--" in words else len(words)
    arguments, unknown = whole.parse_known_args(words[:end])
    parser: Parser = arguments.parser
    if not hasattr(arguments, "command") and not unknown:
        parser.print_help()
        return 0
    arguments.after = words[end + 1 :]  # the arguments of the program that sim runs
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
    except BrokenPipeError:  # which the console script silences
        raise
    except (CommandError, RecordingError, VectorsError, OSError) as error:
        sys.stderr.write(parser.complaint(str(error)))
        return 2
    return exit_code


def parser_of(*names: str) -> Parser:
    """Return the parser of these commands, of which only the modules are imported."""
    parser, commands = top_parser()
    for name in names:
        import_module(f"bagua_ref.cli.{name}").add_parser(commands)
    return parser
