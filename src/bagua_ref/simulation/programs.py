"""Programs for simulated ranks, a script or a function, and the destination of their output."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from bagua_ref.base.runtime import current_world
from bagua_ref.formulas.costs import LinkCosts
from bagua_ref.simulation.torch_distributed import run_module, run_script
from bagua_ref.simulation.torch_distributed.cpu import Devices


@dataclass(frozen=True)
class Program:
    """The code that every rank runs: a script or a function.

    Args:
        name: ``path/to/script.py`` or ``package.module:function``; with ``function``, only a name
            for reports.
        is_module: whether ``name`` is a module to run as ``python -m`` does.
        arguments: arguments of the script, in ``sys.argv``.
        function: function to call without arguments, in place of ``name``.
        loads_in_process: whether data loaders run without the worker processes that they ask for.
        link: link between the ranks; None: communication takes no time.
        folder: working folder; empty: a new one for each run.
        cpu: whether the CPU replaces other devices that the program names, such as CUDA's.
        compute: the seconds of a forward and backward pass, see
            `bagua_ref.simulation.SimulatedWorld`.

    Raises:
        ValueError: there is no such script, or the name is not ``module:function``.
    """

    name: str
    arguments: tuple[str, ...] = ()
    function: Callable[[], Any] | None = None
    loads_in_process: bool = False
    link: LinkCosts | None = None
    compute: float | None = None
    cpu: bool = False
    is_module: bool = False
    folder: str = ""

    def __post_init__(self) -> None:
        module, _, function = self.name.partition(":")
        if self.is_module:
            if not all(part.isidentifier() for part in self.name.split(".")):
                raise ValueError(f"{self.name!r} must be a module, as python -m takes it")
        elif (
            self.function is None
            and not self.is_script
            and not (module and function.isidentifier())
        ):
            raise ValueError(f"{self.name!r} must be a script.py or module:function")
        if self.is_script and not Path(self.name).is_file():
            raise ValueError(f"there is no script {self.name!r}")

    @property
    def is_script(self) -> bool:
        """Whether it is a script, and not a function."""
        return self.function is None and not self.is_module and self.name.endswith(".py")

    def absolute(self) -> Program:
        """Return the same program with an absolute path; add its folder to the import path."""
        folder = str(Path(self.name).resolve().parent) if self.is_script else os.getcwd()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return replace(self, name=str(Path(self.name).resolve())) if self.is_script else self

    def run(self) -> Any:
        """Run the program on the calling rank; return the function's result."""
        with Devices() if self.cpu else nullcontext():
            return self._run()

    def _run(self) -> Any:
        # a new process seeds it by chance, each rank differently; here, alike in all runs
        if self.function is None:
            torch.default_generator.manual_seed(2**40 + current_world().identity.rank)
        if self.is_script:
            return run_script(self.name, self.arguments)
        if self.is_module:
            return run_module(self.name, self.arguments)
        if self.function is not None:
            return self.function()
        module, _, function = self.name.partition(":")
        sys.argv = [module, *self.arguments]
        return getattr(importlib.import_module(module), function)()


def uses_hashes(file: str) -> bool:
    """Return whether a Python file uses sets or ``hash()``, whose order PYTHONHASHSEED changes."""
    return any(
        isinstance(node, ast.Set | ast.SetComp)
        or (isinstance(node, ast.Name) and node.id in ("set", "frozenset", "hash"))
        for node in ast.walk(ast.parse(Path(file).read_bytes()))
    )


class RankOutput(io.TextIOBase):
    """A text stream that prefixes each line with the rank.

    Args:
        stream: destination of the lines; None: they are dropped.
        ranks: the number of ranks.
    """

    def __init__(self, stream: TextIO | None, ranks: int) -> None:
        super().__init__()
        self._stream = stream
        self._open = [""] * ranks
        self.written = [""] * ranks
        """Output of each rank."""

    def write(self, text: str) -> int:
        """Write complete lines, and buffer the rest."""
        rank = getattr(current_world().identity, "rank", 0)
        self.written[rank] += text
        *lines, self._open[rank] = (self._open[rank] + text).split("\n")
        self._print(rank, lines)
        return len(text)

    def finish(self) -> None:
        """Write the buffered incomplete lines."""
        for rank, line in enumerate(self._open):
            self._print(rank, [line] * bool(line))

    def _print(self, rank: int, lines: list[str]) -> None:
        for line in lines if self._stream is not None else ():
            print(f"[rank {rank}] {line}", file=self._stream, flush=True)
