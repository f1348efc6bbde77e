"""Checks that are scripts: each line is recorded and then run, so the script shown is the one that ran."""

from __future__ import annotations

import ast
import math
from types import ModuleType
from typing import Any

from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.violation import Script, Violation, literal
from bagua_ref.conformance.targets.reference_ops import ReferenceCommOps
from bagua_ref.conformance.targets.target import Target, load

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
        self.names: dict[str, Any] = {"__name__": "counterexample", "inf": math.inf, "nan": math.nan}
        self._run("\n".join(["import torch", *imports]))
        own = part == "comm_ops" and part not in lab.target.parts
        self.names[part] = ReferenceCommOps(lab.target.kernels) if own else lab.target.parts[part]

    def give(self, **values: Any) -> None:
        """Define names; the source of their values, which may be long, is only written."""
        for name, value in values.items():
            self.names[name] = value
            self.script.body.append(f"{name} = {literal(value)}")

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
    if part == "comm_ops" and part not in target.parts:
        own = "from bagua_ref.conformance.targets.reference_ops import ReferenceCommOps"
        return [own, *target.setup, "comm_ops = ReferenceCommOps(kernels)"]
    found = target.parts[part]
    if isinstance(found, ModuleType):
        return [f"import {found.__name__} as {part}"]
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    if part == "communicator" and target.factory:
        module, _, name = target.factory.partition(":")
    if module != "__main__" and name and _is_there(module, name, found):
        top = name.partition(".")[0]
        if top != name:
            return [f"from {module} import {top}", "", f"{part} = {name}"]
        return [f"from {module} import {name}" + ("" if name == part else f" as {part}")]
    if target.origin and not (part == "communicator" and target.factory):
        return [*target.origin, f"{part} = target.{part}"]
    return [f"# {part} = the part of your target"]


def _is_there(module: Any, name: str, found: Any) -> bool:
    try:
        return load(f"{module}:{name}") is found
    except (ImportError, AttributeError, ValueError):
        return False
