"""Programs run on every rank with a target's communicators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bagua_ref.conformance.lab.lab import Lab
from bagua_ref.conformance.lab.violation import Violation
from bagua_ref.conformance.targets.world import own_communicator, run_world

__all__ = ["run_ranks"]


def run_ranks(
    lab: Lab, nodes: tuple[int, ...], program: Callable[[Any], Any], what: str, script: str, seed: int = 0, simulated: bool = False
) -> list[Any]:
    """Run ``program(communicator)`` on every rank with the target's communicators; raise `Violation` for any exception.

    Args:
        lab: provides the target.
        nodes: number of ranks on each node.
        program: runs on each rank and returns its result.
        what: description for messages.
        script: does the same, in a line that begins with ``results =``; what follows it is left out if the program hangs.
        seed: seed of the interleaving.
        simulated: use a simulated world even if the target's communicators need real threads.
    """
    factory = lab.target.parts.get("communicator", own_communicator)
    if simulated and getattr(factory, "real_threads", False):
        factory = own_communicator
    lab.need_ranks(sum(nodes))
    lines = script.splitlines()
    last = next(place for place, line in enumerate(lines) if line.startswith("results ="))
    try:
        with lab.journal.call((f"{what} on nodes {nodes}", "\n".join(lines[: last + 1]))):
            return run_world(factory, nodes, program, seed)
    except Violation:
        raise
    except BaseException as error:  # whatever an implementation does, there is a verdict
        raise Violation(f"{what} on nodes {nodes} raised {type(error).__name__}: {error}") from error
