"""Parts shared by all commands: outcomes and errors, files and pictures, user code, tables."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from bagua_ref.base.not_provided import install_command

__all__ = [
    "COLORS",
    "CommandError",
    "Outcome",
    "become_rank",
    "call_object",
    "check_choice",
    "end_progress",
    "foreign_code",
    "load_object",
    "require",
    "show_progress",
    "table",
    "write_file",
    "write_picture",
]

COLORS = ("#d55e00", "#0072b2", "#cc79a7", "#009e73", "#e69f00", "#56b4e9", "#000000")
"""Colours of Okabe and Ito, which colour-blind readers can tell apart."""

_PACKAGES = {"sklearn": "scikit-learn"}
"""Module -> package, where their names differ."""


class CommandError(Exception):
    """The reason why a command cannot run; it is printed, and the exit code is 2."""


class Outcome(NamedTuple):
    """The result of a command: text, JSON and exit code.

    Attributes:
        text: the printed output.
        result: the output with ``--json``; None: nothing.
        code: the exit code.
        files: contents of files to write, by path.
    """

    text: str
    result: Any
    code: int = 0
    files: Mapping[Path, str] = {}


def write_file(path: Path, text: str) -> None:
    """Write a file requested by the user.

    Raises:
        CommandError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {str(path)!r}: {error.strerror}") from None


def write_picture(draw: Callable[[], Any], path: Path | None) -> str:
    """Save the matplotlib Figure returned by ``draw()`` to ``path``, if there is one; return a line
    that names the file.

    Raises:
        CommandError: the file cannot be written.
    """
    if path is None:
        return ""
    try:
        draw().savefig(path, dpi=120, metadata={"Software": None})
    except (OSError, ValueError) as error:  # no such folder or format
        raise CommandError(f"cannot write {str(path)!r}: {error}") from None
    return f"\nPicture: {path}"


@contextmanager
def foreign_code(failure: str) -> Iterator[None]:
    """Context for importing or calling user code: any exception becomes a CommandError that begins
    with ``failure``.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # it is usually in the current folder
    try:
        yield
    except (Exception, SystemExit) as error:
        raise CommandError(f"{failure}: {type(error).__name__}: {error}") from None


def load_object(path: str) -> Any:
    """Import the object named ``pkg.mod:name`` by the user; raise CommandError if that fails."""
    with foreign_code(f"cannot load {path}"):
        return resolve_name(path)


def call_object(path: str) -> Any:
    """Call the function named ``pkg.mod:name`` by the user, and return its result; raise
    CommandError if that fails.
    """
    function = load_object(path)
    with foreign_code(f"{path}() failed"):
        return function()


def check_choice(argument: str, words: Iterable[str], choices: Collection[str]) -> None:
    """Raise CommandError, with argparse's message, if a word is not among the choices."""
    for word in words:
        if word not in choices:
            raise CommandError(
                f"argument {argument}: invalid choice: {word!r} (choose from {', '.join(choices)})"
            )


def become_rank(rank: int, ranks: int, port: int) -> None:
    """Set this process's environment variables to those of a rank started by torchrun on one
    machine, with the store at ``port``.
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
    """Raise CommandError if modules of ``extra`` that ``user`` needs are missing; called before any
    work.
    """
    if missing := [
        _PACKAGES.get(module, module) for module in modules if find_spec(module) is None
    ]:
        raise CommandError(
            f"{user} needs {', '.join(missing)}; install with: {install_command(extra)}"
        )


def show_progress(line: str, keep: bool = False) -> None:
    """Show progress on standard error: a line that changes in a terminal; elsewhere, only lines
    with ``keep``.
    """
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="\n" if keep else "", file=sys.stderr, flush=True)
    elif keep:
        print(line, file=sys.stderr, flush=True)


def end_progress() -> None:
    """Remove the changing line of `show_progress`."""
    show_progress("")


def table(title: str, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table with columns as wide as their cells, which may have several lines; the first
    column is left-aligned, numbers are right-aligned.
    """
    cells = [[str(cell).split("\n") for cell in row] for row in (headers, *rows)]
    widths = [
        max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)
    ]
    printed = [title]
    for row in cells:
        for lines in itertools.zip_longest(*row, fillvalue=""):
            right = [line.rjust(width) for line, width in zip(lines, widths, strict=True)]
            printed.append("  ".join([lines[0].ljust(widths[0]), *right[1:]]).rstrip())
        if row is cells[0]:
            printed.append("-" * (sum(widths) + 2 * len(widths) - 2))
    return "\n".join(printed)
