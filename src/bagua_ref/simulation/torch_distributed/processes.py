"""What a simulated rank does with its process: start others, handle signals, and import modules."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing.process
import os
import signal
import subprocess  # to refuse launches
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch.distributed.rpc
import torch.multiprocessing

from bagua_ref.communicators.call_sites import is_user_code
from bagua_ref.communicators.scheduler import Scheduler
from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.torch_distributed.replacements import Replacements

__all__ = ["UserModules", "replace_processes", "run_script"]

_LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed", "mpirun", "srun")


def replace_processes(replacements: Replacements, scheduler: Scheduler) -> None:
    """Run functions that ``spawn`` would start in processes on the ranks; refuse other launches; record signal handlers."""

    def refuse(what: str) -> NoReturn:
        advice = "; a simulated world has its ranks already. Start them by torch.multiprocessing.spawn(function, nprocs=ranks of "
        advice += "the node), or let the script be started by torchrun"
        scheduler.refuse("unsupported", f"starts {what}", what, advice)

    def spawn(original: Any, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **options: Any) -> Any:
        identity = rank_world().identity
        if nprocs != identity.local_world_size:
            refuse(f"{nprocs} processes on a node of {identity.local_world_size} ranks")
        fn(identity.local_rank, *args)
        return None if join else SimpleNamespace(join=lambda timeout=None: True)  # they have ended

    def start(original: Callable[..., None], process: Any) -> None:
        modules = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(None))
        if "torch.utils.data.dataloader" not in modules:
            refuse(f"process {process.name!r}")
        original(process)

    def popen(original: Callable[..., None], self: Any, args: Any, *rest: Any, **options: Any) -> None:
        first = args if isinstance(args, str | bytes | os.PathLike) else next(iter(args))
        if Path(os.fsdecode(first).split()[0]).name.startswith(_LAUNCHERS):
            refuse(f"process {os.fsdecode(first)!r}")
        if len(rest) < 10 and options.get("env") is None:
            options["env"] = dict(os.environ)  # C code knows only the process's
        original(self, args, *rest, **options)

    def set_handler(original: Any, number: Any, handler: Any) -> Any:
        handlers = rank_world().signal_handlers
        previous = handlers.get(number, signal.SIG_DFL)
        handlers[number] = handler
        return previous

    replacements.function(torch.multiprocessing, "spawn", spawn)
    replacements.function(torch.distributed.rpc, "init_rpc", lambda original, *args, **options: refuse("torch.distributed.rpc"))
    replacements.function(multiprocessing.process.BaseProcess, "start", start)
    replacements.function(subprocess.Popen, "__init__", popen)
    replacements.function(signal, "signal", set_handler)
    replacements.function(signal, "getsignal", lambda original, number: rank_world().signal_handlers.get(number, signal.SIG_DFL))


class UserModules(importlib.abc.MetaPathFinder):
    """Finds the user's modules for a rank, which gets its own copy of each that is imported during the run.

    Args:
        modules_of_rank: returns the calling rank's modules by name.
    """

    def __init__(self, modules_of_rank: Callable[[], dict[str, ModuleType | None] | None]) -> None:
        self._modules_of_rank = modules_of_rank

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Find a module as Python does; note it if it is the user's."""
        modules = self._modules_of_rank()
        if modules is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            # A package of several folders has no file of its own.
            files = [f"{folder}/" for folder in spec.submodule_search_locations or ()] if spec.origin is None else [spec.origin]
            if all(file.endswith((".py", "/")) and is_user_code(file) for file in files):
                modules.setdefault(fullname, None)
        return spec


def run_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Run a script as a simulated rank's main program: with its own ``__main__``, arguments and modules.

    Args:
        path: the script's.
        arguments: of its command line.
    """
    source = Path(path).read_bytes()
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=__builtins__)
    rank_world().process_state.modules["__main__"] = main
    sys.modules["__main__"] = main
    sys.argv = [str(path), *arguments]
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    exec(compile(source, str(path), "exec"), main.__dict__)  # noqa: S102 # the user's own script
