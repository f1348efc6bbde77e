"""Invariants of a user's program, which a run that looks for errors checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bagua_ref.base.runtime import current_world
from bagua_ref.communicators.call_sites import place
from bagua_ref.communicators.scheduler import Scheduler
from bagua_ref.simulation.rank_world import SimulatedRankWorld

__all__ = ["always", "check_invariants"]


def always(function: Callable[[], Any]) -> None:
    """Check ``function()`` after every optimizer step and before every communication of the calling rank, from now on.

    If it returns False or raises an exception, ``bagua-ref sim`` and the fixture ``sim_world`` report that; elsewhere it is not
    called. It must not communicate.

    >>> always(lambda: 1 + 1 == 2)
    """
    world = current_world()
    if isinstance(world, SimulatedRankWorld):
        world.invariants.append(function)


def check_invariants(scheduler: Scheduler) -> None:
    """End the run if one of the calling rank's invariants does not hold."""
    world = current_world()
    for function in world.invariants if isinstance(world, SimulatedRankWorld) else ():
        try:
            wrong = "is False" if function() is False else ""
        except Exception as error:
            wrong = f"raises {type(error).__name__}: {error}"
        if wrong:
            code = getattr(function, "__code__", None)
            where = f" ({place(code.co_filename, code.co_firstlineno)})" if code else ""
            name = getattr(function, "__name__", repr(function))
            scheduler.refuse("invariant", f"breaks an invariant: {name}{where} {wrong}", "a step or communication")
