"""`torch.distributed` on simulated ranks: the replacement of gloo in `SimulatedWorld(n,
torch_distributed=True)`.

Each rank is like a process: it has its own environment (that of torchrun), arguments, random
generators, ``__main__``, modules of the user that it imports during the run, groups, threads and
signal handlers. Clocks and sleeping are virtual. Collectives and messages are those of gloo on CPU
tensors; what one writes that does not block is seen only when it is waited for, and NaN before.
Reductions run in rank order [defined].
"""

from __future__ import annotations

import copy
import importlib
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from bagua_ref.base.launch_environment import Identity
from bagua_ref.errors import SimulationError
from bagua_ref.simulation.communicator import SimulatedNetwork
from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.scheduler import Scheduler
from bagua_ref.simulation.tasks import RankState
from bagua_ref.simulation.torch_distributed import torch_hooks
from bagua_ref.simulation.torch_distributed.process_group import SimulatedProcessGroup
from bagua_ref.simulation.torch_distributed.processes import (
    Replacements,
    UserModules,
    as_current_thread,
    end_threads,
    replace_clocks,
    replace_compiler,
    replace_processes,
    replace_threads,
    run_module,
    run_script,
    separate_logging,
    silence_profiler,
)
from bagua_ref.simulation.torch_distributed.stores import SimulatedStore, shared_stores
from bagua_ref.simulation.torch_distributed.work import SimulatedWork, works_of_backward

__all__ = ["run_module", "run_script"]

_LIBRARIES = (
    ("accelerate.state", "PartialState", "_shared_state"),
    ("accelerate.state", "AcceleratorState", "_shared_state"),
    ("accelerate.state", "GradientState", "_shared_state"),
)
"""Process-wide attributes of libraries' classes: module, class, attribute."""

_numpy_random: Any = np.random
_environ: Any = os.environ
_PLACES: dict[str, tuple[Any, str]] = {
    "environment": (_environ, "_data"),
    "arguments": (sys, "argv"),
    "groups": torch_hooks.WORLD,
    "module of DDP's forward": (DistributedDataParallel, "_active_ddp_module"),
    # set while a rank compiles, when others may go on
    "compiling": (torch.compiler, "_is_compiling_flag"),
    # what `warnings.catch_warnings` changes
    "filters of warnings": (warnings, "filters"),
    "showing of warnings": (warnings, "showwarning"),
    "recording of warnings": (warnings, "_showwarnmsg_impl"),
    "module locks": (importlib.import_module("importlib._bootstrap"), "_module_locks"),
}
"""Process-wide state by name: objects and names of attributes."""


class ProcessState(RankState):
    """A rank's environment, arguments, modules, random generators and groups of
    `torch.distributed`.

    Restoring the state exchanges references, so that a switch between ranks costs a few
    microseconds.

    Args:
        identity: identity of the rank; None: the process outside of the simulation.
    """

    values: dict[str, Any]
    """The values of the attributes in `_PLACES`, by the same names."""

    def __init__(self, identity: Identity | None) -> None:
        self.modules: dict[str, ModuleType | None] = {}
        """The rank's own modules, by name; None: not imported, or in use."""
        self.group_names = torch_hooks.GroupNames()
        super().__init__()
        self._save_references()
        if identity is None:
            self.modules = {"__main__": sys.modules["__main__"]}
        else:
            variables = {
                _environ.encodekey(name): _environ.encodevalue(str(value))
                for name, value in _variables(identity).items()
            }
            warned = [name for name in _PLACES if name.endswith(" of warnings")]
            self.values = {
                "environment": _environ._data | variables,
                "arguments": list(sys.argv),
                "groups": torch_hooks.GroupState(),
                "module of DDP's forward": None,
                "compiling": False,
                **{name: copy.copy(self.values[name]) for name in warned},
            }
            # Processes start with different states of these two, and with the same one of torch's.
            self._python = random.Random(f"rank {identity.rank}").getstate()  # noqa: S311 # to repeat a run
            self._numpy = np.random.MT19937(identity.rank)

    def save(self) -> None:
        """Copy the state from the process."""
        super().save()
        self._save_references()
        for name in self.modules:
            self.modules[name] = sys.modules.pop(name, None)

    def _save_references(self) -> None:
        self._numpy = _numpy_random.get_bit_generator()
        self.values = {
            name: vars(owner)[attribute] for name, (owner, attribute) in _places().items()
        }

    def restore(self) -> None:
        """Restore the state in the process."""
        super().restore()
        _numpy_random.set_bit_generator(self._numpy)
        for name, (owner, attribute) in _places().items():
            setattr(owner, attribute, self.values.setdefault(name, None if name == "hydra" else {}))
        sys.modules.update(
            {name: module for name, module in self.modules.items() if module is not None}
        )

    def resumed(self) -> None:
        """Register the rank's groups in the calling thread."""
        self.group_names.register_in_thread()


def _places() -> dict[str, tuple[Any, str]]:
    for module, name, attribute in _LIBRARIES:
        owner = getattr(sys.modules.get(module), name, None)  # None while it is being imported
        if owner is not None:
            _PLACES[name] = (owner, attribute)
    hydra = getattr(sys.modules.get("hydra.core.global_hydra"), "GlobalHydra", None)
    if hydra is not None:
        _PLACES["hydra"] = (hydra(), "hydra")
    return _PLACES


def _variables(identity: Identity) -> dict[str, Any]:
    """Return the environment variables that torch's launcher sets."""
    return {
        "RANK": identity.rank,
        "WORLD_SIZE": identity.world_size,
        "LOCAL_RANK": identity.local_rank,
        "LOCAL_WORLD_SIZE": identity.local_world_size,
        "GROUP_RANK": identity.node_rank,
        "TORCHELASTIC_RUN_ID": "simulated",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29_500,
    }


def rank_states(identities: Sequence[Identity]) -> list[ProcessState]:
    """Return the `ProcessState` of each rank."""
    torch_hooks.check_version()
    return [ProcessState(identity) for identity in identities]


def run_process(world: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` of one rank like the main function of a process, and wait for its
    threads; return the result, None for exit code 0.
    """
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
def simulated_torch(
    scheduler: Scheduler, network: SimulatedNetwork, states: Sequence[ProcessState]
) -> Iterator[None]:
    """Replace torch.distributed by the simulated one, for a scheduler's threads, for the duration
    of the context.
    """
    outside = ProcessState(None)

    def connect(
        store: SimulatedStore,
        place: int,
        size: int,
        timeout: timedelta,
        name: str,
        ranks: Sequence[int],
    ) -> SimulatedProcessGroup:
        rank = rank_world().identity.rank
        ranks = list(ranks) or (list(range(size)) if size == len(network.node_of) else [-1] * size)
        try:
            group = network.connect(
                f"{store.path}{name}",
                rank,
                place,
                ranks,
                timeout.total_seconds(),
                f"new_group(ranks={list(ranks)})",
                name=name,
            )
        except SimulationError as error:
            scheduler.end(error)
        return SimulatedProcessGroup(group, place, store)

    modules = UserModules(
        lambda: rank_world().process_state.modules if scheduler.is_calling() else None
    )
    for owner in (SimulatedProcessGroup, SimulatedWork, SimulatedStore):
        torch_hooks.hide_from_compiler(owner)
    with Replacements(scheduler.is_calling) as replacements:
        for undo in (
            _running.clear,
            works_of_backward.clear,
            partial(_restore_environment, states),
            outside.restore,
        ):
            replacements.callback(undo)
        torch_hooks.replace(replacements, scheduler, connect, shared_stores(scheduler))
        replace_processes(replacements, scheduler)
        replace_threads(replacements, scheduler)
        replace_compiler(replacements, scheduler)
        replace_clocks(replacements, scheduler)
        silence_profiler(replacements)
        separate_logging(replacements)
        sys.meta_path.insert(0, modules)
        replacements.callback(sys.meta_path.remove, modules)
        _running.append(scheduler)
        yield


def _restore_environment(states: Sequence[ProcessState]) -> None:
    """Undo the ranks' changes to the process's real environment, which C code reads."""
    for name in {name for state in states for name in state.values["environment"]} | set(
        _environ._data
    ):
        value = _environ._data.get(name)
        if value is None:
            os.unsetenv(name)
        else:
            os.putenv(name, value)


_running: list[Scheduler] = []
"""The scheduler of the current run, if any."""


def _forget_simulation() -> None:
    for scheduler in _running:
        scheduler.forget()


# A data loader's worker is a fork of a simulated thread, and is not simulated.
os.register_at_fork(after_in_child=_forget_simulation)
