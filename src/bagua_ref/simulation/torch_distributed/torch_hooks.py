"""The private parts of torch that the simulated `torch.distributed` uses or replaces, collected in
one place.

They are replaced only during a run; threads that are not simulated use the originals.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bagua_ref.errors import SimulationError
from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.scheduler import Scheduler
from bagua_ref.simulation.torch_distributed.processes import Replacements
from bagua_ref.simulation.torch_distributed.work import wait_first, works_of_backward

rendezvous = sys.modules["torch.distributed.rendezvous"]  # the package has a function of this name

SUPPORTED = ("2.13", "2.14")
"""The tested versions of torch."""

BACKEND = "bagua_ref_simulated"
"""The name of the simulated backend in torch."""

WORLD = (distributed_c10d, "_world")
"""The attribute that holds torch's Python state of process groups."""

_MAPS = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
    "pg_coalesce_state",
)
_STORES = ("TCPStore", "FileStore", "HashStore", "PrefixStore")


def check_version() -> None:
    """Raise SimulationError if this version of torch is not supported."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in SUPPORTED:
        raise SimulationError(
            f"torch_distributed=True supports torch {' and '.join(SUPPORTED)}, not"
            f" {torch.__version__}: it replaces private parts",
            kind="unsupported",
        )


class GroupState:
    """One rank's process-group state, in place of torch's process-wide `_World`."""

    def __init__(self) -> None:
        self.default_pg, self.group_count, self.comms = None, 0, []  # type: Any, int, list[Any]
        for name in _MAPS:
            setattr(self, name, {})

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """The configuration of all groups, as torch lists it."""
        return distributed_c10d._World.pg_config_info.fget(self)  # type: ignore[attr-defined,no-any-return]


class GroupNames(dict[str, Any]):
    """The process groups of one rank by the names under which torch's C++ code finds them."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = threading.local()

    def register_in_thread(self) -> None:
        """Update the calling thread's registry of groups, which C++ code reads."""
        if getattr(self._threads, "names", {}) != self:
            self._threads.names = dict(self)
            _c10d._unregister_all_process_groups()
            for name, group in self.items():
                _c10d._register_process_group(name, group)


_c10d: Any = torch._C._distributed_c10d


def replace(
    replacements: Replacements,
    scheduler: Scheduler,
    connect: Callable[..., Any],
    open_store: Callable[..., Any],
) -> None:
    """Replace torch's groups and stores by simulated ones.

    Args:
        replacements: context that undoes the replacement.
        scheduler: scheduler of the ranks.
        connect: takes torch's description of a new group, and returns the process group.
        open_store: takes the name of a store's class and its arguments.
    """
    global _connect
    _connect = connect
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])

    def new_group(
        original: Any,
        size: int,
        rank: int,
        ranks: Any,
        backend: Any,
        store: Any,
        name: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        options |= {"device_id": None, "backend_options": None}
        group, store = original(size, rank, ranks, BACKEND, store, name, *args, **options)
        world = distributed_c10d._world
        if group in world.pg_map:  # callers look for gloo by name
            world.pg_map[group] = ("gloo", world.pg_map[group][1])
            world.pg_backend_config[group] = "cpu:gloo"
            # other groups inherit the name that callers see
            group.is_nccl = "nccl" in str(backend) or getattr(world.default_pg, "is_nccl", False)
        return group, store

    def split_group(
        original: Any,
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        **options: Any,
    ) -> Any:
        parents = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
        groups = [[parents[rank] for rank in ranks] for ranks in split_ranks]
        own = next((ranks for ranks in groups if dist.get_rank() in ranks), None)
        return own and dist.new_group(own, timeout=timeout, use_local_synchronization=True)

    # With a static graph, the reducer starts all operations of the first backward in a callback,
    # and waits for them there.
    replacements.function(_c10d.Reducer, "_delay_all_reduce", works_of_backward.run_at_end)
    for name in ("collect_all", "wait_all"):
        replacements.function(torch.futures, name, wait_first)
    for owner in (dist, distributed_c10d):
        replacements.function(owner, "split_group", split_group)
    replacements.function(distributed_c10d, "_new_process_group_helper", new_group)
    changes: dict[str, Any] = {
        "_register_process_group": dict.__setitem__,
        "_unregister_process_group": lambda groups, name: groups.pop(name, None),
        "_unregister_all_process_groups": dict.clear,
    }
    for name, change in changes.items():
        replacements.function(distributed_c10d, name, partial(_change_names, change))
    for name in _STORES:
        substitute = _substitute(getattr(dist, name), replacements.is_simulated, open_store)
        for module in (dist, distributed_c10d, rendezvous):
            if hasattr(module, name):
                replacements.put(module, name, substitute)
    # all threads share the groups of the process again
    replacements.callback(_c10d._set_thread_isolation_mode, False)
    _c10d._set_thread_isolation_mode(True)


def hide_from_compiler(owner: type) -> None:
    """Make `torch.compile` treat a class's methods as opaque C++ code, instead of tracing them."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for method in vars(owner).values():
        if inspect.isfunction(method):
            frames.set_code_exec_strategy(method.__code__, skip)


_connect: Callable[..., Any] | None = None


def _change_names(change: Callable[..., object], original: Any, *args: Any) -> None:
    """Change the registered names of the calling rank's groups."""
    groups = rank_world().process_state.group_names
    change(groups, *args)
    groups.register_in_thread()


def _create(options: Any, backend_options: Any) -> Any:
    assert _connect is not None
    return _connect(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,
    )


class _StoreClass(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real) or getattr(instance, "kind", "") == cls.__name__  # type: ignore[attr-defined]


def _substitute(real: Any, is_simulated: Callable[[], bool], open_store: Callable[..., Any]) -> Any:
    """Return a replacement of a store's class that makes simulated stores in simulated threads."""

    def make(cls: Any, *args: Any, **options: Any) -> Any:
        return (
            open_store(real.__name__, *args, **options)
            if is_simulated()
            else real(*args, **options)
        )

    return _StoreClass(real.__name__, (), {"__new__": make, "real": real})


def current_backward() -> int | None:
    """Return the id of the calling thread's backward pass, or None."""
    number = int(torch._C._current_graph_task_id())
    return None if number == -1 else number
