"""Worlds in which communicators and bucket operations are tried: every rank a thread of the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bagua_ref.conformance.violation import Violation
from bagua_ref.simulation import SimulatedWorld

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagua_ref.communicators.base import Communicator
    from bagua_ref.conformance.lab import Lab

__all__ = ["RankWorld", "own_communicator", "run_ranks"]


@dataclass(frozen=True)
class RankWorld:
    """What a target's ``communicator(world)`` is given, on each rank.

    Attributes:
        rank: this rank.
        world_size: how many ranks there are.
        nodes: how many ranks each node has.
        transport: a communicator that works; one under test may send through it.
    """

    rank: int
    world_size: int
    nodes: tuple[int, ...]
    transport: Communicator


def own_communicator(world: RankWorld) -> Communicator:
    """Return the simulated world's own communicator: the reference of the collectives suite."""
    return world.transport


def run_ranks(
    lab: Lab, nodes: tuple[int, ...], program: Callable[[Any], Any], what: str, inputs: Any, seed: int = 0, expected: Any = None
) -> list[Any]:
    """Run ``program(communicator)`` on every rank with the target's communicators; raise `Violation` for whatever it raises.

    Args:
        lab: knows the target.
        nodes: how many ranks each node has.
        program: what each rank does; returns its result.
        what: in words, for messages.
        inputs: what is written down, if it hangs or fails.
        seed: of the interleaving.
        expected: likewise written down.
    """
    factory = lab.target.parts.get("communicator", own_communicator)
    size = sum(nodes)

    def rank(transport: Communicator) -> Any:
        return program(factory(RankWorld(transport.rank(), size, nodes, transport)))

    try:
        with lab.journal.call((f"{what} on nodes {nodes}: {inputs!r}"[:2000], None)):
            return SimulatedWorld(size, nodes=nodes, seed=seed).run(rank)
    except Violation:
        raise
    except BaseException as error:  # whatever an implementation does, there is a verdict
        raise Violation(f"{what} on nodes {nodes} raised {type(error).__name__}: {error}") from error
