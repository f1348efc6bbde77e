"""Lines that one gradient passes: functions of bagua_ref that run on rank 0 of two gloo processes,
for wrapping and for a step.

A function counts with all its lines, docstring and comments included, once, if it is called on any
thread. The transport (``communicators/``) is left out. ``--list`` shows the functions; the command
fails if a goal is missed.
"""

from __future__ import annotations

import ast
import sys
import threading
import types
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import workers
from torch import nn

import bagua_ref
from bagua_ref.algorithms import ByteGradAlgorithm

HOME = Path(bagua_ref.__file__).parent
TRANSPORT = "communicators"
GOALS = {"wrapping": (1600, 35), "step": (1000, 18)}
"""At most so many lines, in so many files."""


class Calls:
    """The functions of the package that are called on any thread while it records; made before any
    of these threads starts.
    """

    def __init__(self) -> None:
        self._codes: set[types.CodeType] | None = None
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call" and self._codes is not None:
            self._codes.add(frame.f_code)

    def begin(self) -> None:
        """Begin to record."""
        self._codes = set()

    def end(self) -> dict[tuple[str, str, int], int]:
        """End; return the lines of each function called, by file, name and first line."""
        codes, self._codes = self._codes or set(), None
        called: dict[Path, set[int]] = {}
        for code in codes:
            path = Path(code.co_filename)
            if path.is_relative_to(HOME) and path.relative_to(HOME).parts[0] != TRANSPORT:
                called.setdefault(path, set()).add(code.co_firstlineno)
        return {
            (str(path.relative_to(HOME)), *key): count
            for path, at in called.items()
            for key, count in functions(path, at).items()
        }


def functions(path: Path, called: set[int]) -> dict[tuple[str, int], int]:
    """Return the lines of each function of a file that holds code called, by name and first line.

    Functions inside it count for themselves; lambdas and comprehensions are part of it.
    """
    found: dict[tuple[str, int], int] = {}

    def visit(node: ast.AST, name: str, lines: set[int]) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                visit(child, name, lines)
                continue
            inside = f"{name}.{child.name}".lstrip(".")
            first, end = (
                min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)]),
                child.end_lineno or 0,
            )
            own = {*range(first, end + 1)}
            lines -= own
            visit(child, inside, own)
            if isinstance(child, ast.FunctionDef) and own & called:
                found[inside, first] = len(own)

    visit(ast.parse(path.read_text()), "", set())
    return found


def record() -> dict[str, dict[tuple[str, str, int], int]]:
    """Return the lines of the functions called when a module is wrapped, and in its third step with
    bytegrad.
    """
    calls = Calls()
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    calls.begin()
    module.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=False))
    found = {"wrapping": calls.end()}
    for _ in range(3):
        calls.begin()
        optimizer.zero_grad()
        module(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        found["step"] = calls.end()
        workers.barrier()
    return found


def main(arguments: list[str]) -> int:
    """Print lines and files, and return 1 if a goal is missed."""
    found: dict[str, dict[Any, int]] = workers.launch(record, 2)[0]
    missed = False
    for what, functions in found.items():
        files = Counter[str]()
        for (file, _, _), count in functions.items():
            files[file] += count
        if "--list" in arguments:
            for (file, name, first), count in sorted(functions.items()):
                print(f"{count:5} {file}:{first} {name}")
        lines, most = GOALS[what]
        missed = missed or files.total() > lines or len(files) > most
        print(f"{what}: {files.total()} lines in {len(files)} files (goal: {lines} in {most})")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
