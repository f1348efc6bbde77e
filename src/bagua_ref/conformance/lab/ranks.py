"""Programs run on every rank with a target's communicators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagua_ref.conformance.lab.violation import Violation
from bagua_ref.conformance.targets.world import own_communicator, run_world

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagua_ref.conformance.lab.lab import Lab

__all__ = ["run_ranks"]


def run_ranks(
    lab: Lab, nodes: tuple[int, ...], program: Callable[[Any], Any], what: str, inputs: Any, seed: int = 0, simulated: bool = False
) -> list[Any]:
    """Run ``program(communicator)`` on every rank with the target's communicators; raise `Violation` for whatever it raises.

    Args:
        lab: knows the target.
        nodes: how many ranks each node has.
        program: what each rank does; returns its result.
        what: in words, for messages.
        inputs: what is written down, if it hangs or fails.
        seed: of the interleaving.
        simulated: the program needs a simulated world, whatever communicators the target has.
    """
    factory = lab.target.parts.get("communicator", own_communicator)
    if simulated and getattr(factory, "real_threads", False):
        factory = own_communicator
    try:
        with lab.journal.call((f"{what} on nodes {nodes}: {inputs!r}"[:2000], None)):
            return run_world(factory, nodes, program, seed)
    except Violation:
        raise
    except BaseException as error:  # whatever an implementation does, there is a verdict
        raise Violation(f"{what} on nodes {nodes} raised {type(error).__name__}: {error}") from error
