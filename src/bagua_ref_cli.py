"""The console script ``bagua-ref``: its help, version and misspelt commands.

It is a module beside the package, which imports torch: that takes a second, and only commands need
it.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as usual, and keep the words for `error`."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and where to find help, and exit with 2."""
        known = list(self._option_string_actions)
        options = [word.partition("=")[0] for word in self._words if word.startswith("--")]
        unknown = [word for word in options if not any(name.startswith(word) for name in known)]
        word = "" if "come last" in message else next(iter(unknown), "")
        if wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            word, known = wrong[1], re.findall(r"[^\s,']+", wrong[2])
        near = difflib.get_close_matches(word, known, 1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message}{hint}\nHelp: {self.prog} --help\n")


def top_parser() -> tuple[Parser, Any]:
    """Return the parser of ``bagua-ref``, and its subcommands, to which commands are added."""
    parser = Parser(prog="bagua-ref", description="PyTorch training with relaxed communication.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh", "fish"),
        help="print a completion script for this shell and exit; needs shtab",
    )
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
    if words == ["--version"]:
        try:
            print(f"bagua_ref {version('bagua_ref')}")
            return 0
        except PackageNotFoundError:  # a checkout that is not installed
            pass
    if not words or words[0] in ("-h", "--help") or words[0].isalpha() - (words[0] in COMMANDS):
        parser, commands = top_parser()
        for name, text in COMMANDS.items():
            commands.add_parser(name, help=text)
        if words and words[0].isalpha():
            parser.parse_args(words[:1])  # which refuses it
        parser.print_help()
        return 0
    from bagua_ref.cli import main as run

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
