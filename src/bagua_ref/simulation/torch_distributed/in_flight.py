"""Tensors of operations in flight: any read or write before ``wait()`` is an error at its line."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bagua_ref.errors import RankCall, SimulationError
from bagua_ref.simulation.rank_world import rank_world
from bagua_ref.simulation.tasks import call_site, place
from bagua_ref.simulation.torch_distributed.processes import Replacements

_METADATA = ("empty", "zeros", "ones", "rand", "full", "new_", "lift_fresh", "_unsafe_view", "sym_")
"""Name prefixes of operations, other than views, that read no elements of their arguments."""

_TRANSPARENT = ("DTensor", "AsyncCollectiveTensor")
"""Subclasses whose operations are dispatched again for their parts: an AsyncCollectiveTensor waits
first.
"""

_PLAIN = (Tensor, torch.nn.Parameter)

_OWN = str(Path(__file__).parents[2]) + os.sep
_PASSED = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).with_name("cpu.py")))
"""Paths of files through which a program's operations pass."""

_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations that return uninitialised tensors."""

_BYTE = 0x5A
"""As a float32 1.5e16; as an integer it is far from any index."""


class _Mode(TorchDispatchMode):
    """Base of dispatch modes that `torch.compile` ignores."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that `torch.compile` ignores this mode."""
        return True


class WatchedOperations(_Mode):
    """Mode that ends the run when the calling thread accesses a tensor of one of its rank's
    operations in flight.

    An operation's inputs must not be written, and its outputs neither read nor written, from its
    start until its work is waited for, is found completed or is dropped.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in _TRANSPARENT for kind in types):
            return NotImplemented
        works = rank_world().works
        if works and not _only_metadata(func) and not _is_own():
            for tensor, is_written in _touched(func, args, kwargs or {}):
                _check(tensor, is_written, func.name())
        return func(*args, **(kwargs or {}))


class FilledMemory(_Mode):
    """Mode that fills the tensors of ``torch.empty`` and similar functions with bytes that are
    unlikely in fresh memory.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in _TRANSPARENT for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        if (
            func.name().partition("::")[2].partition(".")[0] in _UNINITIALISED
            and type(made) is Tensor
            and made.device.type == "cpu"
            and made.dtype != torch.bool
            and not _is_own()
        ):
            ctypes.memset(made.data_ptr(), _BYTE, made.untyped_storage().nbytes())
        return made


def _is_own() -> bool:
    """Return whether the simulator, or an algorithm of this package, is the caller."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OWN)


def _only_metadata(func: Any) -> bool:
    namespace, _, name = func.name().partition("::")
    return namespace != "aten" or func.is_view or name.startswith(_METADATA) or "_like" in name


def _touched(
    func: Any, args: Sequence[Any], options: dict[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """Yield each tensor among an operation's arguments, and whether the operation writes it."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else options.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if type(tensor) in _PLAIN and tensor.layout == torch.strided:
                yield tensor, is_written


def _check(tensor: Tensor, is_written: bool, operation: str) -> None:
    for work in rank_world().works:
        if work.is_touched_by(tensor, is_written):
            _refuse(operation, work.call, is_written)


def replace_readers(replacements: Replacements) -> None:
    """Also check methods that read tensors without torch operations."""

    def read(original: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        if type(tensor) in _PLAIN:
            _check(tensor, False, original.__name__)
        return original(tensor, *args, **options)

    for name in ("__repr__", "tolist", "numpy"):
        replacements.function(Tensor, name, read)


def _refuse(operation: str, call: Any, is_written: bool) -> None:
    file, line = call_site(sys._getframe(1))
    rank, does = call.group.ranks[call.rank], "changes" if is_written else "reads"
    scheduler = call.group.scheduler
    text = (
        f"a tensor of an operation under way is used before wait(): rank {rank} {does} a tensor of"
        f" {call} at {place(file, line)} ({operation}), and started that operation at"
        f" {place(call.file, call.line)}"
    )
    task = scheduler.calling()
    scheduler.end(
        SimulationError(
            text, "early_use", (RankCall(rank, task.thread, str(call), "", file, line),)
        )
    )
