"""Checks that are scripts: each line is recorded and then run, so the script shown is the one that
ran.

Ranks of a world run the script's ``program``, with the target's communicators or those of a
simulated world.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
import textwrap
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, SUM, Tolerance, assert_equal
from bagua_ref.conformance.lab.lab import Lab, copies_of, tensors_in
from bagua_ref.conformance.lab.violation import Definition, Script, Violation, literal
from bagua_ref.conformance.targets.reference_algorithms import ReferenceAlgorithms
from bagua_ref.conformance.targets.reference_target import ReferenceCommOps
from bagua_ref.conformance.targets.target import Target, load

__all__ = [
    "Play",
    "RankScript",
    "after_call",
    "assert_ranks",
    "copies_of",
    "source_of_part",
    "tensors_in",
]


class Play:
    """A script that runs while it is written.

    Args:
        lab: provides the target.
        part: name of the part of the target, also in the script.
        imports: lines of the script after its first one.

    Attributes:
        what: description of what is run, for messages; empty: the line itself.
        names: the script's variables.
    """

    def __init__(self, lab: Lab, part: str, *imports: str) -> None:
        self.lab, self.part, self.what = lab, part, ""
        imports = ("from bagua_ref.conformance import EXACT, SUM, assert_equal", *imports)
        self.script = Script([*imports, *source_of_part(lab.target, part), ""])
        self.names: dict[str, Any] = {
            "__name__": "counterexample",
            "inf": math.inf,
            "nan": math.nan,
        }
        self._run("\n".join(["import torch", *imports]))
        if part in lab.target.parts:
            self.names[part] = lab.part(part)
        else:
            self.names["kernels"] = lab.kernels()
            first, *_, last = source_of_part(lab.target, part)
            self._run(f"{first}\n{last}")

    def give(self, **values: Any) -> None:
        """Define names."""
        for name, value in values.items():
            self.names[name] = value
            self.script.body.append(Definition(name, copy.deepcopy(value)))  # calls may change it

    def do(self, line: str) -> None:
        """Append a line, or a few that belong together, and run it; raise `Violation` for any
        exception.

        A statement with an assertion, in it or in what it calls by a name with ``assert`` or
        ``expect``, is a comparison.
        """
        before, done = Script(self.script.setup, list(self.script.body)), line
        self.script.body.append(line)
        try:
            for statement in ast.parse(line).body:
                done = "\n".join(line.splitlines()[: statement.end_lineno])
                with self.lab.journal.call((self.what or self.part, before.and_then(done))):
                    self._run(ast.Module([statement], type_ignores=[]))
                self.lab.comparisons += _asserts(statement)
        except BaseException as error:  # whatever an implementation does, there is a verdict
            said = f"{type(error).__name__}: {error}"
            shown = self.what or done.splitlines()[-1].strip()
            says_itself = isinstance(error, AssertionError) and str(error) and not self.what
            message = str(error) if says_itself else f"{shown} raised {said}"
            raise Violation(message[:1000], str(self.script)) from error

    def refuses(self, call: str, error: str = "ValueError", said: str = "") -> None:
        """Require an error of a class of a call, or fail with a message, which is source of a
        string.
        """
        said = said or repr(f"{call} must raise a {error}")
        self.do(
            f"try:\n    {call}\nexcept {error}:\n    pass\nelse:\n    raise AssertionError({said})"
        )

    def _run(self, source: str | ast.Module) -> None:
        code = (
            _compiled(source, "exec")
            if isinstance(source, str)
            else compile(source, "<counterexample>", "exec")
        )
        exec(code, self.names)  # noqa: S102 # written by the check, line by line

    def value(self, source: str) -> Any:
        """Return the value of an expression; raise `Violation` for any exception."""
        try:
            return eval(_compiled(source, "eval"), self.names)  # noqa: S307 # written by the check
        except Exception as error:
            raise self.violation(
                f"{source} raised {type(error).__name__}: {error}", source
            ) from error

    def expect(
        self,
        source: str,
        want: Tensor,
        where: str,
        tolerance: Tolerance = EXACT,
        magnitude: Tensor | float | None = None,
    ) -> None:
        """Raise `Violation` unless the value of an expression equals ``want``."""
        found, size = (
            self.value(source),
            None if magnitude is None else torch.as_tensor(magnitude, dtype=torch.float64),
        )
        self.lab.comparisons += 1
        if found is None:
            raise self.violation(f"{where}: there is none", f"assert {source} is not None")
        try:
            assert_equal(found, want, tolerance, magnitude=size)
        except AssertionError as error:
            more = "" if size is None else f", magnitude={literal(size)}"
            line = f"assert_equal({source}, {literal(want)}, {tolerance.name}{more})"
            raise self.violation(f"{where}: {error}", line) from None

    def expect_true(self, source: str, message: str) -> None:
        """Raise `Violation` unless an expression is true."""
        self.lab.comparisons += 1
        if not self.value(source):
            raise self.violation(message, f"assert {source}")

    def violation(self, message: str, line: str) -> Violation:
        """Return a violation whose script ends with ``line``."""
        return Violation(
            f"{self.what}: {message}" if self.what else message, str(self.script.and_then(line))
        )


class RankScript(Play):
    """A script that runs a program on every rank and compares what it returns.

    Args:
        lab: provides the target.
        nodes: number of ranks on each node.
        seed: seed of the interleaving.
        part: the part of the target that the program uses. Ranks have the target's communicators if
            it is "communicator", else those of a simulated world.
    """

    def __init__(
        self, lab: Lab, nodes: tuple[int, ...], seed: int, part: str = "communicator"
    ) -> None:
        super().__init__(
            lab,
            part,
            "from bagua_ref.conformance.lab.play import after_call, assert_ranks, copies_of",
            "from bagua_ref.conformance.targets.world import RankWorld, own_communicator,"
            " run_world",
        )
        self._seed, self._factory = seed, part if part == "communicator" else "own_communicator"
        self.nodes = nodes
        self.give(nodes=nodes)

    def give(self, **values: Any) -> None:
        """Define names, of which no tensor may have a dtype that the target's capabilities
        exclude.
        """
        self.lab.need_dtypes(tensors_in(list(values.values())))
        super().give(**values)

    def run(self, what: str, program: str) -> None:
        """Run the lines of ``program`` on every rank with its communicator ``comm``; what they
        return is in ``results``, by rank.

        Raises:
            Violation: any exception of any rank; ``what`` describes the program.
        """
        self.lab.need_ranks(sum(self.nodes))
        self.what = f"{what} on nodes {self.nodes}"
        lines = textwrap.indent(textwrap.dedent(program).strip("\n"), "    ")
        self.do(
            f"\n\ndef program(comm):\n{lines}\n\n\nresults = run_world({self._factory}, nodes,"
            f" program, seed={self._seed})"
        )
        self.what = ""


_OWN = {"comm_ops": ReferenceCommOps, "algorithms": ReferenceAlgorithms}
"""Parts of the package's own, which are made with the target's kernels."""


def _asserts(node: ast.AST) -> bool:
    """Return whether running a statement asserts something; what it defines is not run yet."""
    if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
        return False
    name = (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )
    named = name.lower().startswith(("assert", "expect"))
    return named or isinstance(node, ast.Assert) or any(map(_asserts, ast.iter_child_nodes(node)))


@functools.lru_cache(4096)
def _compiled(source: str, mode: str) -> CodeType:
    return compile(source, "<counterexample>", mode)


def source_of_part(target: Target, part: str) -> list[str]:
    """Return lines of a script that define a part of the target under the part's name."""
    if part not in target.parts:
        own = _OWN[part]
        device = (
            ""
            if target.device.type == "cpu" or part == "comm_ops"
            else f", device={str(target.device)!r}"
        )
        return [
            f"from {own.__module__} import {own.__name__}",
            *target.setup,
            f"{part} = {own.__name__}(kernels{device})",
        ]
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


def after_call(comm: Any, method: str, arguments: Sequence[Any]) -> list[Tensor]:
    """Call ``comm.method`` with copies of arguments; return the tensors among them afterwards."""
    mine = copies_of(arguments)
    returned = getattr(comm, method)(*mine)
    assert returned is None, f"{method} returned {returned!r}"
    return [tensor.clone() for tensor in tensors_in(mine)]


def assert_ranks(
    calls: Sequence[tuple[str, int]],
    nodes: tuple[int, ...],
    results: Sequence[Sequence[Sequence[Tensor]]],
    expected: Sequence[Sequence[Sequence[Tensor]]],
) -> None:
    """Raise AssertionError unless the tensors of each call on each rank are as expected.

    Args:
        calls: a method of communicators, and n if its result may differ by `SUM` (n), 0 if it may
            not.
        nodes: number of ranks on each node.
        results: the tensors among the arguments of each call after it, by rank.
        expected: what they must be.
    """
    for place, (name, terms) in enumerate(calls):
        which = f", call {place} of {len(calls)}" if len(calls) > 1 else ""
        for rank, (mine, wanted) in enumerate(zip(results, expected, strict=True)):
            for number, (tensor, want) in enumerate(zip(mine[place], wanted[place], strict=True)):
                try:
                    assert_equal(tensor, want, SUM(terms) if terms else EXACT)
                except AssertionError as error:
                    raise AssertionError(
                        f"{name} on nodes {nodes}{which}: tensor {number} of rank {rank}: {error}"
                    ) from None
