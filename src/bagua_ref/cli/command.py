"""Parts shared by all subcommands: parsers, errors, JSON and pictures, progress, tables."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bagua_ref.base.not_provided import install_command
from bagua_ref.conformance.targets.target import load
from bagua_ref_cli import COMMANDS

__all__ = [
    "COLORS",
    "CommandError",
    "Commands",
    "add_command",
    "become_rank",
    "call_object",
    "end_progress",
    "foreign_code",
    "load_object",
    "number",
    "print_rows",
    "require",
    "show_progress",
    "write_file",
    "write_json",
    "write_picture",
]

COLORS = ("#d55e00", "#0072b2", "#cc79a7", "#009e73", "#e69f00", "#56b4e9", "#000000")
"""Colours of Okabe and Ito, which colour-blind readers can tell apart."""

_PACKAGES = {"sklearn": "scikit-learn"}
"""Module -> package, where their names differ."""

_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}

# argparse has no public name for the result of add_subparsers
Commands = argparse._SubParsersAction


class CommandError(Exception):
    """The reason why a subcommand cannot run; `main` prints the message and exits with 2."""


def add_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.ArgumentParser, argparse.Namespace], int],
    *,
    examples: Sequence[str],
    epilog: str = "Exit status is 0 on success and 2 on errors.",
    help: str = "",
    **texts: Any,
) -> argparse.ArgumentParser:
    """Return the parser of a new subcommand, which `main` runs as ``run(parser, arguments)``; it
    has the options ``--json`` and ``--json-file`` for `write_json`.

    Args:
        commands: the subcommands to add it to.
        name: the name that users type.
        run: runs the command and returns the exit code.
        examples: command lines for the help.
        epilog: the end of the help.
        help: of a verb; commands have theirs in `bagua_ref_cli.COMMANDS`.
        texts: ``description``.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    texts["help"] = COMMANDS.get(name, help)
    parser = commands.add_parser(
        name, **texts, formatter_class=_HelpFormatter, epilog=f"examples:\n{lines}\n\n{epilog}"
    )
    parser.set_defaults(command=run, parser=parser)
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON instead of text"
    )
    parser.add_argument(
        "--json-file", type=Path, metavar="PATH", help="also write the result as JSON to PATH"
    )
    return parser


class _HelpFormatter(argparse.HelpFormatter):
    """Argparse's layout, with indented lines left as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(
            line if line[:1] == " " else fill(line, width, indent) for line in text.split("\n")
        )


def write_json(arguments: argparse.Namespace, result: Any) -> None:
    """Write ``result`` as JSON to the outputs that ``--json`` and ``--json-file`` select.

    Raises:
        CommandError: the file cannot be written.
    """
    text = json.dumps(result, indent=2) + "\n"
    if arguments.json:
        print(text, end="", file=arguments.stdout)
    if arguments.json_file is not None:
        write_file(arguments.json_file, text)


def write_file(path: Path, text: str) -> None:
    """Write a file that the user asked for.

    Raises:
        CommandError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {str(path)!r}: {error.strerror}") from None


def write_picture(draw: Callable[[], Any], path: Path | None) -> None:
    """Save the matplotlib Figure that ``draw()`` returns, if there is a path, and print the path.

    Raises:
        CommandError: the file cannot be written.
    """
    if path is None:
        return
    try:
        draw().savefig(path, dpi=120, metadata={"Software": None})
    except (OSError, ValueError) as error:  # no such folder or format
        raise CommandError(f"cannot write {str(path)!r}: {error}") from None
    print(f"Picture: {path}")


@contextmanager
def foreign_code(failure: str) -> Iterator[None]:
    """Import or call foreign code, which may raise anything, in this context; raise CommandError,
    with the failure, if it does.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # it is usually in the current folder
    try:
        yield
    except (Exception, SystemExit) as error:
        raise CommandError(f"{failure}: {type(error).__name__}: {error}") from None


def load_object(path: str) -> Any:
    """Return the object that a user names as ``pkg.mod:name``; raise CommandError if it cannot be
    imported.
    """
    with foreign_code(f"cannot load {path}"):
        return load(path)


def call_object(path: str) -> Any:
    """Return the result of the function that a user names as ``pkg.mod:name``; raise CommandError
    if there is none.
    """
    function = load_object(path)
    with foreign_code(f"{path}() failed"):
        return function()


def number(low: float, high: float, integer: bool = False) -> Callable[[str], Any]:
    """Return an argument type: a number from ``low`` to ``high``, such as 25, 340e6 or 124M."""

    def parse(text: str) -> float:
        factor = _SUFFIXES.get(text[-1:].upper())
        try:
            value = float(text[:-1]) * factor if factor else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (integer and value != int(value)):
            raise argparse.ArgumentTypeError(
                f"{text!r} must be {'an integer' if integer else 'a number'} from {low:,g} to {high:,g}"
            )
        return int(value) if integer else value

    return parse


def become_rank(rank: int, ranks: int, port: int) -> None:
    """Set the environment of this process to that of a rank under torch's launcher, on one machine
    and with a store at ``port``.
    """
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)  # there may be more workers than cores


def require(user: str, extra: str, *modules: str) -> None:
    """Raise CommandError if modules of ``extra`` are missing, which ``user`` needs; called before
    any work.
    """
    if missing := [
        _PACKAGES.get(module, module) for module in modules if find_spec(module) is None
    ]:
        raise CommandError(
            f"{user} needs {', '.join(missing)}; install with: {install_command(extra)}"
        )


def show_progress(line: str, keep: bool = False) -> None:
    """Show progress on standard error: a changing line in a terminal, elsewhere lines to ``keep``."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="\n" if keep else "", file=sys.stderr, flush=True)
    elif keep:
        print(line, file=sys.stderr, flush=True)


def end_progress() -> None:
    """Remove the changing line of `show_progress`."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def print_rows(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as its cells; the first column is left-aligned."""
    cells = [[cell.split("\n") for cell in row] for row in (headers, *rows)]
    widths = [
        max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)
    ]
    print(title)
    for row in cells:
        for lines in itertools.zip_longest(*row, fillvalue=""):
            right = [line.rjust(width) for line, width in zip(lines, widths, strict=True)]
            print("  ".join([lines[0].ljust(widths[0]), *right[1:]]).rstrip())
        if row is cells[0]:
            print("-" * (sum(widths) + 2 * len(widths) - 2))
