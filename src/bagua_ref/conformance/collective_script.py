"""A collective written down as a script: all ranks, what they bring and what they should have afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagua_ref.conformance.violation import Script, literal
from bagua_ref.types import ReduceOp

if TYPE_CHECKING:
    from torch import Tensor

    from bagua_ref.conformance.target import Target

__all__ = ["script_of_collective"]


def script_of_collective(
    target: Target, nodes: tuple[int, ...], seed: int, method: str, brought: list[tuple[Any, ...]], expected: list[list[Tensor]]
) -> str:
    """Return a script that calls ``method`` on every rank of a simulated world and compares all tensors with ``expected``."""
    factory = target.parts.get("communicator")
    name = getattr(factory, "__qualname__", "").partition(".")[0]
    source = (
        f"from {factory.__module__} import {name}" if factory is not None and name else "# the factory under test is needed here"
    )
    own = "communicator" not in target.parts
    setup = [
        "from bagua_ref.conformance import EXACT, assert_equal",
        "from bagua_ref.conformance.world import RankWorld" + (", own_communicator" if own else ""),
        "from bagua_ref.simulation import SimulatedWorld",
        *([] if own else [source]),
        "",
    ]
    call = "own_communicator" if own else getattr(factory, "__qualname__", "communicator")
    rows = "".join(f"    ({', '.join(map(_literal, row))},),\n" for row in brought)
    body = [
        f"nodes = {nodes!r}",
        f"brought = [\n{rows}]",
        f"expected = {literal(expected)}",
        "",
        "",
        "def program(transport):",
        f"    comm = {call}(RankWorld(transport.rank(), {sum(nodes)}, nodes, transport))",
        f"    comm.{method}(*brought[transport.rank()])",
        "",
        "",
        f"SimulatedWorld({sum(nodes)}, nodes=nodes, seed={seed}).run(program)",
        "for mine, wanted in zip(brought, expected):",
        "    for tensor, want in zip([item for item in mine if isinstance(item, torch.Tensor)], wanted):",
        "        assert_equal(tensor, want, EXACT)",
    ]
    return str(Script(setup, body))


def _literal(value: Any) -> str:
    return str(int(value)) if isinstance(value, ReduceOp) else literal(value)
