"""Scripts whose ``program`` every rank of a world runs, with the target's communicators or those of a simulated world."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bagua_ref.conformance.expected.tolerances import EXACT, SUM, assert_equal
from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.play import Play
from bagua_ref.conformance.lab.violation import Violation
from bagua_ref.conformance.targets.world import run_world

__all__ = ["RankScript", "after_call", "assert_ranks", "copies_of", "tensors_in"]


class RankScript(Play):
    """A script that runs a program on every rank and compares what it returns.

    Args:
        lab: provides the target.
        nodes: number of ranks on each node.
        seed: seed of the interleaving.
        part: the part of the target that the program uses. Ranks have the target's communicators if it is "communicator", else
            those of a simulated world.
    """

    def __init__(self, lab: Lab, nodes: tuple[int, ...], seed: int, part: str = "communicator") -> None:
        super().__init__(
            lab,
            part,
            "from bagua_ref.conformance import EXACT, SUM, assert_equal",
            "from bagua_ref.conformance.lab.ranks import after_call, assert_ranks, copies_of",
            "from bagua_ref.conformance.targets.world import RankWorld, own_communicator, run_world",
        )
        self.names |= {"inf": math.inf, "nan": math.nan}
        self._seed, self._factory = seed, part if part == "communicator" else "own_communicator"
        self.nodes = nodes
        self.give(nodes=nodes)

    def run(self, what: str, program: str) -> None:
        """Run the lines of ``program`` on every rank with its communicator ``comm``; what they return is in ``results``, by rank.

        Raises:
            Violation: any exception of any rank; ``what`` describes the program.
        """
        what = f"{what} on nodes {self.nodes}"
        lines = textwrap.indent(textwrap.dedent(program).strip("\n"), "    ")
        self.script.body += ["", "", f"def program(comm):\n{lines}", "", ""]
        self._run(f"def program(comm):\n{lines}")
        self.script.body.append(f"results = run_world({self._factory}, nodes, program, seed={self._seed})")
        self.lab.need_ranks(sum(self.nodes))
        script = str(self.script)
        try:
            with self.lab.journal.call((what, script)):
                results = run_world(self.names[self._factory], self.nodes, self.names["program"], self._seed)
        except BaseException as error:  # whatever an implementation does, there is a verdict
            raise Violation(f"{what} raised {type(error).__name__}: {error}", script) from error
        self.names["results"] = results

    def run_calls(self, calls: Sequence[tuple[str, int]], brought: list[list[Any]], expected: list[list[list[Tensor]]]) -> None:
        """Make calls on every rank, one after another, and compare the tensors among their arguments.

        Args:
            calls: a method of communicators, and n if its result may differ by `SUM` (n), 0 if it may not.
            brought: the arguments of each call, by rank.
            expected: the tensors among them after each call, by rank.
        """
        self.give(calls=list(calls), brought=brought, expected=expected)
        names = [method for method, _ in calls]
        self.run(
            ", ".join(names[:9]) + ", ..." * (len(names) > 9),
            "return [after_call(comm, name, arguments) for (name, _), arguments in zip(calls, brought[comm.rank()])]",
        )
        self.do("assert_ranks(calls, nodes, results, expected)")


def after_call(comm: Any, method: str, arguments: Sequence[Any]) -> list[Tensor]:
    """Call ``comm.method`` with copies of arguments; return the tensors among them afterwards."""
    mine = copies_of(arguments)
    returned = getattr(comm, method)(*mine)
    assert returned is None, f"{method} returned {returned!r}"
    return [tensor.clone() for tensor in tensors_in(mine)]


def copies_of(arguments: Any) -> Any:
    """Return arguments with copies of all tensors in them and in their lists and tuples."""
    if isinstance(arguments, Tensor):
        return arguments.clone()
    return type(arguments)(map(copies_of, arguments)) if isinstance(arguments, list | tuple) else arguments


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return the tensors among arguments and in their lists and tuples, in order."""
    if isinstance(arguments, Tensor):
        return [arguments]
    return [tensor for item in arguments for tensor in tensors_in(item)] if isinstance(arguments, list | tuple) else []


def assert_ranks(
    calls: Sequence[tuple[str, int]],
    nodes: tuple[int, ...],
    results: Sequence[Sequence[Sequence[Tensor]]],
    expected: Sequence[Sequence[Sequence[Tensor]]],
) -> None:
    """Raise AssertionError unless the tensors of each call on each rank are as expected; `RankScript.run_calls` has the rest."""
    for place, (name, terms) in enumerate(calls):
        which = f", call {place} of {len(calls)}" if len(calls) > 1 else ""
        for rank, (mine, wanted) in enumerate(zip(results, expected, strict=True)):
            for number, (tensor, want) in enumerate(zip(mine[place], wanted[place], strict=True)):
                try:
                    assert_equal(tensor, want, SUM(terms) if terms else EXACT)
                except AssertionError as error:
                    raise AssertionError(f"{name} on nodes {nodes}{which}: tensor {number} of rank {rank}: {error}") from None
