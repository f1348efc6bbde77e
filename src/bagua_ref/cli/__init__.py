"""The commands of ``bagua-ref``, one module each; their options are in `bagua_ref_cli`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import nullcontext, redirect_stdout
from importlib import import_module

from bagua_ref.cli.command import CommandError, Outcome, require, write_file
from bagua_ref.conformance.vectors import VectorsError
from bagua_ref.record import RecordingError
from bagua_ref_cli import Parser, main

__all__ = ["main", "run"]


def run(parser: Parser, arguments: Namespace) -> int:
    """Run the command of these arguments, print its outcome and return the exit code."""
    try:
        command = import_module(f"bagua_ref.cli.{arguments.name.partition(' ')[0]}")
        if getattr(arguments, "png", None) is not None:
            require("--png", "demo", "matplotlib")
        # Other output, such as that of a tested implementation, must not get between the lines of
        # JSON.
        with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
            outcome: Outcome = command.run(arguments)
        if outcome.text and not arguments.json:
            print(outcome.text)
        files = {**outcome.files}
        if outcome.result is not None and (arguments.json or arguments.json_file):
            text = json.dumps(outcome.result, indent=2) + "\n"
            print(text if arguments.json else "", end="")
            files |= {arguments.json_file: text} if arguments.json_file else {}
        for path, text in files.items():
            write_file(path, text)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # which the console script silences
        raise
    except (CommandError, RecordingError, VectorsError, OSError) as error:
        sys.stderr.write(parser.complaint(str(error)))
        return 2
    return outcome.code
