"""Support for GPU programs on simulated ranks, which compute on the CPU: ``bagua-ref sim
--cpu``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.torch_distributed.processes import Replacements

_DEVICE = re.compile(r"(cuda|xpu|mps|hpu|npu|accelerator|cpu)(:\d+)?")


class Devices(TorchFunctionMode):
    """Function mode that replaces devices in torch's calls by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if func is torch.device:
            return func("cpu") if args[:1] != ("meta",) else func(*args)
        if name == "to":
            args = (args[0], *_without_indices(args[1:]))
        options = _options(kwargs or {})
        if "pin_memory" in options:
            options["pin_memory"] = False
        return func(*map(_mapped, args), **options)


def _mapped(value: Any) -> Any:
    if isinstance(value, str):
        return "cpu" if _DEVICE.fullmatch(value) else value
    return (
        torch.device("cpu") if isinstance(value, torch.device) and value.type != "meta" else value
    )


def _without_indices(values: Sequence[Any]) -> list[Any]:
    """Return the arguments of ``to`` with a device index replaced by the CPU."""
    return ["cpu" if type(value) is int else value for value in values]


def _options(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: "cpu" if name == "device" and type(value) is int else _mapped(value)
        for name, value in options.items()
    }


def _nothing(*args: Any, **options: Any) -> None:
    pass


class _Event:
    """A CUDA event on a rank without CUDA: all earlier work is already complete."""

    record = wait = synchronize = _nothing

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, end: object) -> float:
        """Return 0."""
        return 0.0


class _Stream(_Event):
    record_event = wait_event = wait_stream = _nothing


_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "get_device_name": "CPU",
    "get_device_capability": (0, 0),
    "get_device_properties": SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=2**36, multi_processor_count=1
    ),
    "mem_get_info": (2**36, 2**36),
    "get_memory_info": (2**36, 2**36),
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "memory_stats": {},
} | dict.fromkeys(
    (
        "init",
        "set_device",
        "set_device_idx",
        "set_device_index",
        "set_stream",
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
        "set_rng_state",
        "set_rng_state_all",
    )
)
"""Return values of functions of ``torch.cuda`` and ``torch.accelerator`` on simulated ranks."""


def _local_rank() -> int:
    return rank_world().identity.local_rank


_FUNCTIONS: dict[str, Any] = {
    "device_count": lambda: rank_world().identity.local_world_size,
    "current_device": _local_rank,
    "current_device_index": _local_rank,
    "current_device_idx": _local_rank,
    "current_accelerator": lambda check_available=False: torch.device("cpu"),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "current_stream": lambda device=None: _Stream(),
    "default_stream": lambda device=None: _Stream(),
    "stream": contextlib.nullcontext,
    "device": contextlib.nullcontext,
    "device_index": contextlib.nullcontext,
}
"""Replacements of functions that compute something."""


def replace_cuda(replacements: Replacements) -> None:
    """Replace the functions of ``torch.cuda`` and ``torch.accelerator``, and the device handling of
    DDP and process groups.
    """

    def without_devices(original: Any, *args: Any, **options: Any) -> Any:
        for name in ("device_ids", "output_device", "device_id", "pin_memory"):
            options.pop(name, None)
        return original(*args, **options)

    replacements.put(torch.cuda, "Event", _Event)
    replacements.put(torch.cuda, "Stream", _Stream)
    for module in (torch.cuda, torch.accelerator):
        for name in _ANSWERS.keys() & vars(module).keys():
            replacements.function(
                module, name, lambda original, *args, name=name, **options: _ANSWERS[name]
            )
        for name in _FUNCTIONS.keys() & vars(module).keys():
            replacements.function(
                module,
                name,
                lambda original, *args, name=name, **options: _FUNCTIONS[name](*args, **options),
            )
    replacements.function(
        torch.nn.Module,
        "to",
        lambda original, module, *args, **options: original(
            module,
            *map(_mapped, _without_indices(args)),
            **_options(options),
        ),
    )
    replacements.function(
        torch.autocast,
        "__init__",
        lambda original, mode, device_type, *args, **options: original(
            mode, _mapped(device_type), *args, **options
        ),
    )
    replacements.function(torch.cuda.nccl, "version", lambda original: (2, 0, 0))
    for owner, name in (
        (DistributedDataParallel, "__init__"),
        (DataLoader, "__init__"),  # whose thread pins outside of `Devices`
        (dist, "init_process_group"),
    ):
        replacements.function(owner, name, without_devices)
