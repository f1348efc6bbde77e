"""The console script ``bagua-ref``: its help, version and misspelt commands.

It is a module beside the package, which imports torch: that takes a second, and only commands need
it.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

__all__ = ["COMMANDS", "Parser", "main", "top_parser"]

COMMANDS = {
    "demo": "compare all algorithms on a small task, and draw what they do",
    "doctor": "report what is installed and what can run on this machine",
    "selftest": "train with four algorithms in two processes of this machine",
    "measure": "measure links, codecs and compute, for bagua-ref advise",
    "advise": "predict which algorithm trains fastest on a given network",
    "sim": "find errors of a torch.distributed program on simulated ranks",
    "explain": "say why a real job hangs, from what its ranks have dumped",
    "same": "compare a training step on several ranks with that of one process",
    "balance": "show how much time balanced batches save",
    "graph": "show who averages with whom in decentralized training",
    "vectors": "export golden vectors, or check another implementation's outputs against them",
    "trace": "find where two recorded runs diverge",
    "verify": "check an implementation against the specification",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are two lines, with the nearest word for a misspelt one."""

    _words: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        # An abbreviation might be an option of the program that sim runs.
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as usual, and keep the words for `error`."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print `complaint` and exit with 2."""
        self.exit(2, self.complaint(message))

    def complaint(self, message: str) -> str:
        """Return two lines: ``message`` with a hint, and where to find help."""
        known = self._option_string_actions
        words = itertools.takewhile("--".__ne__, self._words)
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        hint = _nearest(message)
        if unknown := [name for name in options if name not in known]:
            hint = _near(unknown[0], known)
            if not message.startswith("unrecognized"):  # a required option, perhaps this one
                message = f"unrecognized arguments: {unknown[0]}"
        return f"{self.prog}: error: {message}{hint}\nHelp: {self.prog} --help\n"


def _nearest(message: str) -> str:
    """Return a hint at the word of a message that is nearest to the first one in quotes."""
    wrong = re.search(r"'([\w./-]+)'", message)
    if wrong is None or "did you mean" in message.lower():
        return ""
    return _near(wrong[1], re.findall(r"[A-Za-z_][\w.-]*", message[wrong.end() :]))


def _near(word: str, known: Iterable[str]) -> str:
    names = {name.lstrip("-").lower(): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-").lower(), names, 1)
    return f". Did you mean {names[near[0]]!r}?" if near and names[near[0]] != word else ""


def top_parser() -> tuple[Parser, Any]:
    """Return the parser of ``bagua-ref``, and its subcommands, to which commands are added."""
    parser = Parser(prog="bagua-ref", description="PyTorch training with relaxed communication.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bagua-ref`` with ``argv`` (None: the process's arguments); return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as head, has closed it
        # else flushing at exit fails again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print(f"bagua_ref {_version()}")
        return 0
    if not words or words[0] not in COMMANDS:
        parser, commands = top_parser()
        for name, text in COMMANDS.items():
            commands.add_parser(name, help=text)
        if words and words[0] != "help":
            parser.parse_args(words)  # which prints help, or refuses it
        parser.print_help()
        return 0
    from bagua_ref.cli import main as run

    return run(words)


def _version() -> str:
    try:
        return version("bagua_ref")
    except PackageNotFoundError:  # a checkout that is not installed
        from bagua_ref import __version__

        return __version__


if __name__ == "__main__":
    sys.exit(main())
