"""Programs of simulated ranks: a script, or a function of a module, that runs on each rank as in a process of its own."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from bagua_ref.base.runtime import current_world
from bagua_ref.communicators.call_sites import is_user_code
from bagua_ref.simulation.torch_distributed import ProcessState

__all__ = ["Program", "RankOutput", "own_modules"]


@dataclass(frozen=True)
class Program:
    """Code that every rank runs.

    Args:
        name: ``path/to/script.py`` or ``package.module:function``; of a function that is given, only a name for reports.
        arguments: the script's, in ``sys.argv``.
        function: called without arguments, instead of what ``name`` says.
    """

    name: str
    arguments: tuple[str, ...] = ()
    function: Callable[[], Any] | None = None

    def check(self) -> None:
        """Raise ValueError if there is no such script, or if the name is not ``module:function``."""
        module, colon, function = self.name.partition(":")
        is_path = not colon and self.name.endswith(".py")
        if self.function is None and not (Path(self.name).is_file() if is_path else module and function.isidentifier()):
            raise ValueError(f"{self.name!r} must be {'an existing file' if is_path else 'a script.py or module:function'}")

    @property
    def folder(self) -> str:
        """The folder from which the program's modules are imported."""
        return str(Path(self.name).resolve().parent) if ":" not in self.name else os.getcwd()

    def absolute(self) -> Program:
        """Return the same program, whose script is found from any folder."""
        if ":" in self.name or self.function is not None:
            return self
        return Program(str(Path(self.name).resolve()), self.arguments)

    def run(self) -> Any:
        """Run the program on the calling rank; return the function's result. ``sys.exit(0)`` is a normal end."""
        sys.argv = [self.name.partition(":")[0], *self.arguments]
        try:
            if self.function is not None:
                return self.function()
            module, _, function = self.name.partition(":")
            return getattr(importlib.import_module(module), function)() if function else self._run_script()
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            return None

    def _run_script(self) -> None:
        main = ModuleType("__main__")
        main.__dict__.update(__file__=self.name, __builtins__=__builtins__)
        sys.modules["__main__"] = main
        exec(compile(Path(self.name).read_bytes(), self.name, "exec"), main.__dict__)  # nosec B102 # the user's own script


class _Finder:
    """Finds the user's modules, and makes them each rank's own."""

    def __init__(self, states: Sequence[ProcessState]) -> None:
        self._states = states

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's spec, as `PathFinder` does."""
        spec = PathFinder.find_spec(name, path, target)
        places = [] if spec is None else [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        if any(place and is_user_code(place) for place in places):
            for state in self._states:
                state.modules.setdefault(name, None)
        return spec


@contextmanager
def own_modules(states: Sequence[ProcessState]) -> Iterator[None]:
    """Give each rank its own ``__main__``, and its own copy of the user's modules that it imports, while the context lasts."""
    finder, main = _Finder(states), sys.modules["__main__"]
    for state in states:
        state.modules["__main__"] = main
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in states[0].modules:
            sys.modules.pop(name, None)
        sys.modules["__main__"] = main


class RankOutput(io.TextIOBase):
    """A text stream that puts the rank before each line.

    Args:
        stream: gets the lines; None: they are dropped.
        ranks: the number of ranks.
    """

    def __init__(self, stream: TextIO | None, ranks: int) -> None:
        super().__init__()
        self._stream = stream
        self._open = [""] * ranks
        self.written = [""] * ranks
        """All that each rank has written."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Write the complete lines, and keep the rest."""
        rank = current_world().identity.rank
        self.written[rank] += text
        *lines, self._open[rank] = (self._open[rank] + text).split("\n")
        for line in lines:
            self._print(rank, line)
        return len(text)

    def finish(self) -> None:
        """Write the lines that have no end."""
        for rank, line in enumerate(self._open):
            if line:
                self._print(rank, line)
        self._open = [""] * len(self._open)

    def _print(self, rank: int, line: str) -> None:
        if self._stream is not None:
            print(f"[rank {rank}] {line}", file=self._stream, flush=True)
