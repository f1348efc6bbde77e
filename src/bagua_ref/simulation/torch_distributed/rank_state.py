"""The part of a process's global state of which each simulated rank has its own copy, as if it were a process."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from bagua_ref.base.runtime import Identity
from bagua_ref.communicators.tasks import RankState
from bagua_ref.simulation.torch_distributed import torch_hooks

__all__ = ["ProcessState", "restore_environment"]

_ACCELERATE = ("PartialState", "AcceleratorState", "GradientState")
"""Classes of ``accelerate.state`` whose ``_shared_state`` belongs to a process."""

_numpy_random: Any = np.random
_environ: Any = os.environ


_PLACES: dict[str, tuple[Any, str]] = {
    "environment": (_environ, "_data"),
    "arguments": (sys, "argv"),
    "groups": torch_hooks.WORLD,
    "module locks": (importlib.import_module("importlib._bootstrap"), "_module_locks"),
}
"""The attributes that hold what belongs to a process, by name: objects and names of attributes."""


def _places() -> dict[str, tuple[Any, str]]:
    library = sys.modules.get("accelerate.state")
    if library is not None and _ACCELERATE[-1] not in _PLACES and hasattr(library, _ACCELERATE[-1]):
        _PLACES.update({name: (getattr(library, name), "_shared_state") for name in _ACCELERATE})
    return _PLACES


class ProcessState(RankState):
    """A rank's environment, arguments, modules, random generators and groups of `torch.distributed`.

    Putting it into the process exchanges references, so that a switch between ranks costs a few microseconds.

    Args:
        identity: the rank's; None: the state of the process outside of the simulation.
    """

    def __init__(self, identity: Identity | None) -> None:
        self.modules: dict[str, ModuleType | None] = {}
        """The modules of which the rank has its own, by name; None: not imported, or in use."""
        self.group_names = torch_hooks.GroupNames()
        super().__init__()
        self._save_references()
        if identity is None:
            self.modules = {"__main__": sys.modules["__main__"]}
        else:
            variables = {_environ.encodekey(name): _environ.encodevalue(str(value)) for name, value in _variables(identity).items()}
            self.values: dict[str, Any] = {"environment": _environ._data | variables, "arguments": list(sys.argv)}
            self.values["groups"] = torch_hooks.GroupState()
            # Processes start with different states of these two, and with the same one of torch's.
            self._python = random.Random(f"rank {identity.rank}").getstate()  # noqa: S311 # to repeat a run
            self._numpy = np.random.MT19937(identity.rank)

    def save(self) -> None:
        """Take the state from the process."""
        super().save()
        self._save_references()
        for name in self.modules:
            self.modules[name] = sys.modules.pop(name, None)

    def _save_references(self) -> None:
        self._numpy = _numpy_random.get_bit_generator()
        self.values = {name: vars(owner)[attribute] for name, (owner, attribute) in _places().items()}

    def restore(self) -> None:
        """Put the state into the process."""
        super().restore()
        _numpy_random.set_bit_generator(self._numpy)
        for name, (owner, attribute) in _places().items():
            setattr(owner, attribute, self.values.setdefault(name, {}))
        sys.modules.update({name: module for name, module in self.modules.items() if module is not None})

    def resumed(self) -> None:
        """Register the rank's groups in the calling thread."""
        self.group_names.register_in_thread()


def restore_environment(states: Sequence[ProcessState]) -> None:
    """Undo the ranks' changes in the process's own environment, which C code reads."""
    for name in {name for state in states for name in state.values["environment"]} | set(_environ._data):
        value = _environ._data.get(name)
        if value is None:
            os.unsetenv(name)
        else:
            os.putenv(name, value)


def _variables(identity: Identity) -> dict[str, Any]:
    """Return the variables that torch's launcher sets."""
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
