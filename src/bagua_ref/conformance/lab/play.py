"""Checks that are scripts: each line is recorded and then run, so the script shown is the one that ran."""

from __future__ import annotations

import ast
import sys
from types import ModuleType
from typing import Any

from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.violation import Script, Violation
from bagua_ref.conformance.targets.target import Target

__all__ = ["Play", "source_of_part"]


class Play:
    """A script that runs while it is written.

    Args:
        lab: provides the target.
        part: name of the part of the target, also in the script.
        imports: first lines of the script.
    """

    def __init__(self, lab: Lab, part: str, *imports: str) -> None:
        self.lab, self.part = lab, part
        self.script = Script([*imports, *source_of_part(lab.target, part), ""])
        self.names: dict[str, Any] = {"__name__": "counterexample"}
        self._run("\n".join(["import torch", *imports]))
        self.names[part] = lab.target.parts[part]

    def do(self, line: str) -> None:
        """Append a line, or a few that belong together, and run it; raise `Violation` for any exception."""
        before = str(self.script)
        self.script.body.append(line)
        done = line
        try:
            for statement in ast.parse(line).body:
                done = "\n".join(line.splitlines()[: statement.end_lineno])
                with self.lab.journal.call((self.part, before + done)):
                    self._run(ast.Module([statement], type_ignores=[]))
        except BaseException as error:  # whatever an implementation does, there is a verdict
            said = f"{type(error).__name__}: {error}"
            shown = done.splitlines()[-1].strip()
            message = str(error) if isinstance(error, AssertionError) and str(error) else f"{shown} raised {said}"
            raise Violation(message[:1000], str(self.script)) from error

    def _run(self, source: str | ast.Module) -> None:
        code = compile(source, "<counterexample>", "exec")
        exec(code, self.names)  # noqa: S102  # nosec B102 # written by the check, line by line


def source_of_part(target: Target, part: str) -> list[str]:
    """Return lines of a script that define a part of the target under the part's name."""
    found = target.parts[part]
    if isinstance(found, ModuleType):
        return [f"import {found.__name__} as {part}"]
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    if module != "__main__" and name and getattr(sys.modules.get(str(module)), name, None) is found:
        return [f"from {module} import {name}" + ("" if name == part else f" as {part}")]
    if target.origin:
        return [*target.origin, f"{part} = target.{part}"]
    return [f"# {part} = the part of your target"]
