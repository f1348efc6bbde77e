"""The part of a process's global state of which each simulated rank has its own copy, as if it were a process."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np

from bagua_ref.base.runtime import Identity
from bagua_ref.communicators.tasks import RankState
from bagua_ref.simulation.torch_distributed import torch_hooks

__all__ = ["ProcessState"]

_bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]


class ProcessState(RankState):
    """A rank's environment, arguments, modules, random generators and groups of `torch.distributed`.

    Putting it into the process exchanges references, so that a switch between ranks costs a few microseconds.

    Args:
        identity: the rank's; None: the state of the process outside of the simulation.
    """

    def __init__(self, identity: Identity | None) -> None:
        super().__init__()
        self._environment: Any = os.environ._data  # type: ignore[attr-defined]
        self._arguments = sys.argv
        self._numpy = np.random.get_bit_generator()
        self._module_locks: Any = _bootstrap._module_locks if identity is None else {}
        self.modules: dict[str, ModuleType | None] = {}
        """The modules of which the rank has its own, by name; None: not imported, or in use."""
        self.groups = torch_hooks.Groups()
        if identity is None:
            self.groups.world = torch_hooks.current_world()
            self.modules = {"__main__": sys.modules["__main__"]}
        else:
            self._environment = dict(self._environment)
            self._arguments = list(sys.argv)
            self._numpy = _copy(self._numpy)
            for name, value in _variables(identity).items():
                self._environment[os.environ.encodekey(name)] = os.environ.encodevalue(str(value))  # type: ignore[attr-defined]

    def save(self) -> None:
        """Take the state from the process."""
        super().save()
        self._environment, self._arguments = os.environ._data, sys.argv  # type: ignore[attr-defined]
        self._numpy = np.random.get_bit_generator()
        self._module_locks = _bootstrap._module_locks
        for name in self.modules:
            self.modules[name] = sys.modules.pop(name, None)

    def restore(self) -> None:
        """Put the state into the process."""
        super().restore()
        os.environ._data, sys.argv = self._environment, self._arguments  # type: ignore[attr-defined]
        np.random.set_bit_generator(self._numpy)
        _bootstrap._module_locks = self._module_locks
        sys.modules.update({name: module for name, module in self.modules.items() if module is not None})
        torch_hooks.use_groups(self.groups)

    def resumed(self) -> None:
        """Register the rank's groups in the calling thread."""
        self.groups.register_in_thread()


def _copy(generator: Any) -> Any:
    copy = type(generator)()
    copy.state = generator.state
    return copy


def _variables(identity: Identity) -> dict[str, Any]:
    """Return the variables that torch's launcher sets."""
    return {
        "RANK": identity.rank,
        "WORLD_SIZE": identity.world_size,
        "LOCAL_RANK": identity.local_rank,
        "LOCAL_WORLD_SIZE": identity.local_world_size,
        "GROUP_RANK": identity.node_rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29_500,
    }
