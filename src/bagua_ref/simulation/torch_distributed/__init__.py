"""`torch.distributed` over simulated ranks: what `SimulatedWorld(n, torch_distributed=True)` puts in place of gloo.

Each rank is like a process: it has its own environment (that of torchrun), arguments, random generators, ``__main__``, modules of
the user that it imports during the run, groups, threads and signal handlers. Clocks and sleeping are virtual. Collectives and
messages are those of gloo on CPU tensors; what one writes that does not block is seen only when it is waited for, and NaN before.
Reductions run in rank order [defined].
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from bagua_ref.base.runtime import Identity
from bagua_ref.communicators.scheduler import Scheduler
from bagua_ref.communicators.simulated import SimulatedNetwork
from bagua_ref.errors import SimulationError
from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.torch_distributed import torch_hooks
from bagua_ref.simulation.torch_distributed.process_group import SimulatedProcessGroup
from bagua_ref.simulation.torch_distributed.processes import (
    Replacements,
    UserModules,
    as_current_thread,
    end_threads,
    replace_clocks,
    replace_processes,
    replace_threads,
    run_script,
)
from bagua_ref.simulation.torch_distributed.rank_state import ProcessState, restore_environment
from bagua_ref.simulation.torch_distributed.stores import SimulatedStore, shared_stores
from bagua_ref.simulation.torch_distributed.work import SimulatedWork, works_of_backward

__all__ = ["ProcessState", "SimulatedProcessGroup", "SimulatedStore", "run_script", "simulated_torch"]


def rank_states(identities: Sequence[Identity]) -> list[ProcessState]:
    """Return each rank's part of the process's state."""
    torch_hooks.check_version()
    return [ProcessState(identity) for identity in identities]


def run_process(world: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` of one rank, as the main function of a process; wait for its threads. Exit code 0 gives None."""
    world.main_thread = threading.Thread(name="MainThread", daemon=False)
    with as_current_thread(world.main_thread):
        try:
            result = function(*args)
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                raise
            result = None
        end_threads(world.started_threads)
    return result


@contextmanager
def simulated_torch(scheduler: Scheduler, network: SimulatedNetwork, states: Sequence[ProcessState]) -> Iterator[None]:
    """Make torch.distributed that of the simulated ranks, for the threads of a scheduler, while the context lasts."""
    outside = ProcessState(None)

    def connect(
        store: SimulatedStore, place: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]
    ) -> SimulatedProcessGroup:
        rank = rank_world().identity.rank
        ranks = list(ranks) or (list(range(size)) if size == len(network.node_of) else [-1] * size)
        try:
            group = network.connect(
                f"{store.path}{name}", rank, place, ranks, timeout.total_seconds(), f"new_group(ranks={list(ranks)})", name=name
            )
        except SimulationError as error:
            scheduler.end(error)
        return SimulatedProcessGroup(group, place, store)

    modules = UserModules(lambda: rank_world().process_state.modules if scheduler.is_calling() else None)
    for owner in (SimulatedProcessGroup, SimulatedWork, SimulatedStore):
        torch_hooks.hide_from_compiler(owner)
    with Replacements(scheduler.is_calling) as replacements:
        for undo in (_running.clear, works_of_backward.clear, partial(restore_environment, states), outside.restore):
            replacements.callback(undo)
        torch_hooks.replace(replacements, scheduler, connect, shared_stores(scheduler))
        replace_processes(replacements, scheduler)
        replace_threads(replacements, scheduler)
        replace_clocks(replacements, scheduler)
        sys.meta_path.insert(0, modules)
        replacements.callback(sys.meta_path.remove, modules)
        _running.append(scheduler)
        yield


_running: list[Scheduler] = []
"""The scheduler of the run under way, if any."""


def _forget_simulation() -> None:
    for scheduler in _running:
        scheduler.forget()


# A data loader's worker is a fork of a simulated thread, and is not simulated.
os.register_at_fork(after_in_child=_forget_simulation)
