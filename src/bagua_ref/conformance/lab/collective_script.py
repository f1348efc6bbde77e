"""Scripts of programs that every rank runs: arguments, calls and expected results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bagua_ref.conformance.lab.violation import Script, literal
from bagua_ref.conformance.targets.target import Target, load
from bagua_ref.conformance.targets.world import own_communicator
from bagua_ref.types import ReduceOp

__all__ = ["script_of_collective", "script_of_ranks"]


def script_of_collective(
    target: Target, nodes: tuple[int, ...], seed: int, method: str, brought: list[tuple[Any, ...]], expected: list[list[Tensor]]
) -> str:
    """Return a script that calls ``method`` on every rank and compares every tensor with ``expected``."""
    rows = "".join(f"    ({', '.join(map(_literal, row))},),\n" for row in brought)
    given = [f"brought = [\n{rows}]", f"expected = {literal(expected)}"]
    after = [
        "for mine, wanted in zip(brought, expected):",
        "    for tensor, want in zip([item for item in mine if isinstance(item, torch.Tensor)], wanted):",
        "        assert_equal(tensor, want, EXACT)",
    ]
    return script_of_ranks(target, nodes, seed, given, [f"comm.{method}(*brought[comm.rank()])"], after)


def script_of_ranks(
    target: Target, nodes: tuple[int, ...], seed: int, given: list[str], program: list[str], after: list[str]
) -> str:
    """Return a script that runs a program on every rank.

    Args:
        target: provides the communicators.
        nodes: number of ranks on each node.
        seed: seed of the interleaving.
        given: lines that define the ranks' arguments.
        program: lines that each rank runs with ``comm``; what it returns is in ``results``.
        after: lines that compare the results.
    """
    call, source = _factory(target)
    setup = [
        "from bagua_ref.conformance import EXACT, assert_equal",
        f"from bagua_ref.conformance.targets.world import {'own_communicator, ' if call == 'own_communicator' else ''}run_world",
        *source,
        "",
    ]
    body = [
        f"nodes = {nodes!r}",
        *given,
        "",
        "",
        "def program(comm):",
        *(f"    {line}" for line in program),
        "",
        "",
        f"results = run_world({call}, nodes, program, seed={seed})",
        *after,
    ]
    return str(Script(setup, body))


def _factory(target: Target) -> tuple[str, list[str]]:
    """Return the source of the target's communicator factory, and the lines that define it."""
    factory = target.parts.get("communicator")
    if factory is None or factory is own_communicator:
        return "own_communicator", []
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    if target.factory:
        module, _, name = target.factory.partition(":")
    if module != "__main__" and _is_there(module, name, factory):
        return name, [f"from {module} import {name.partition('.')[0]}"]
    if target.origin and not target.factory:
        return "target.communicator", target.origin
    return "communicator", ["# communicator is the factory under test"]


def _is_there(module: str, name: str, factory: Any) -> bool:
    try:
        return load(f"{module}:{name}") is factory
    except (ImportError, AttributeError, ValueError):
        return False


def _literal(value: Any) -> str:
    return str(int(value)) if isinstance(value, ReduceOp) else literal(value)
