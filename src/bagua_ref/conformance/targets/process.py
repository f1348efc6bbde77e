"""A program in any language as a target: its kernels, codecs and collectives, each call a
request to its process.
"""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import Codec
from bagua_ref.communicators.base import Communicator
from bagua_ref.conformance.cases.tensor_files import name_of
from bagua_ref.conformance.targets.process_link import DTYPES, Program, ProgramError
from bagua_ref.conformance.targets.world import RankWorld
from bagua_ref.types import ReduceOp

PROTOCOL = 2
"""Version of the protocol."""

_KERNELS = sorted(name.strip("_") for name in KernelBackend.__abstractmethods__)


@dataclass
class ProcessTarget:
    """A target implemented by another program, which declares its parts.

    The program's processes end at `end`, when Python collects the target, or with this process. The
    base classes check arguments here, so that the program gets only valid ones.

    Args:
        command: the program and its arguments.
        seconds: time limit of the program's start and of each answer.

    Raises:
        ProgramError: the program cannot be started, or does not declare its parts.
    """

    command: str
    seconds: float = 60.0

    cannot_be_asked = ("samplers",)

    def __post_init__(self) -> None:
        """Start the program and ask for its parts."""
        self._folder, self._lock = tempfile.mkdtemp(prefix="bagua_ref-"), threading.Lock()
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._single, self._world, self._number = self._start(), None, 0
        self._ranks: list[Program] = []
        try:
            said, _ = self._single.ask("hello", protocol=PROTOCOL)
            kernels, codecs = said.get("kernels") or (), said.get("codecs") or ()
            if said.get("protocol") != PROTOCOL or not set(kernels) <= set(_KERNELS):
                raise ProgramError(
                    f"{self.command!r}: the answer to hello must have protocol {PROTOCOL}, and"
                    f" kernels of {', '.join(_KERNELS)}; it is {said}"
                )
        except ProgramError:
            self.end()
            raise
        self.name = said.get("name") or self.command
        self.capabilities = {
            "dtypes": said.get("dtypes") or list(DTYPES),
            **{key: said[key] for key in ("external", "max_ranks") if said.get(key) is not None},
        }
        self.kernels = _kernels(self.ask, kernels, codecs)
        self.communicator = self._join if said.get("collectives") else None

    def _start(self) -> Program:
        return Program(self.command, self.seconds, self._folder)

    def ask(self, call: str, *tensors: Any, **members: Any) -> Any:
        """Return the answer of a process that is no rank; see `Program.ask`."""
        with self._lock:
            if self._single.broken:
                self._single.end()
                self._single = self._start()
        return self._single.ask(call, *tensors, **members)

    def end(self) -> None:
        """Terminate the program's processes, and remove their files; the target is unusable
        afterwards.
        """
        for program in (self._single, *self._ranks):
            program.end()
        self._remove()

    def requests(self) -> int:
        """Return the number of requests that this process has sent to programs."""
        return Program.sent

    def _join(self, world: RankWorld) -> Communicator:
        """Return a rank's communicator. Its process is reused by the same rank of later worlds,
        unless a rank of an earlier world is still waiting.
        """
        with self._lock:
            if world.store is not self._world:
                if any(program.busy for program in self._ranks):
                    for program in self._ranks:
                        program.end()
                    self._ranks = []
                shutil.rmtree(f"{self._folder}/{self._number}", ignore_errors=True)
                self._world, self._number = world.store, self._number + 1
                while len(self._ranks) < world.world_size:
                    self._ranks.append(self._start())
                for program in self._ranks:
                    program.world = self._number
            program, number = self._ranks[world.rank], self._number
        folder = f"{self._folder}/{number}"
        return _ProcessCommunicator(program, world, number, folder)

    _join.real_threads = True  # type: ignore[attr-defined] # each with a process of its own


def _collective(call: str) -> Callable[..., None]:
    """Return a communicator's method that sends its first tensor argument and receives its last, on
    the ranks that have them.
    """

    def method(self: _ProcessCommunicator, *arguments: Any) -> None:
        tensors = [x.view(-1) for x in arguments if isinstance(x, Tensor)]
        members: dict[str, Any] = {}
        for argument in arguments[len(tensors) :]:
            if isinstance(argument, ReduceOp):
                members["op"] = argument.name
            else:
                members["root"] = argument
        other = members.get("root", self._rank) != self._rank
        given = {} if other and call == "scatter" else {"x": tensors[0]}
        wanted = {} if other and call in ("gather", "reduce") else {"out": tensors[-1]}
        members |= _size(tensors[-1])
        self._program.ask(call, given, wanted, self._number, **members)

    return method


class _ProcessCommunicator(Communicator):
    """The collectives of S3.9, each a request to the rank's process."""

    def __init__(self, program: Program, world: RankWorld, number: int, folder: str) -> None:
        super().__init__(world.rank, world.world_size, "process")
        self._program, self._number = program, number
        os.makedirs(folder, exist_ok=True)
        nodes = list(world.nodes)
        program.ask("world", rank=world.rank, nranks=world.world_size, nodes=nodes, folder=folder)

    def abort(self, reason: str = "") -> None:
        """Terminate the rank's process."""
        self._program.end()

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._program.ask("barrier", of_world=self._number)

    def _exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]
    ) -> None:
        self._program.ask(
            "exchange",
            {f"send{place}": x.view(-1) for place, (x, _) in enumerate(sends)},
            {f"recv{place}": x.view(-1) for place, (x, _) in enumerate(recvs)},
            self._number,
            sends=[peer for _, peer in sends],
            recvs=[{"src": peer, **_size(x)} for x, peer in recvs],
        )

    _broadcast = _collective("broadcast")
    _gather = _collective("gather")
    _scatter = _collective("scatter")
    _allgather = _collective("allgather")
    _alltoall = _collective("alltoall")
    _allreduce_inplace = _collective("allreduce")
    _reduce_inplace = _collective("reduce")
    _reduce_scatter = _collective("reduce_scatter")


def _size(x: Tensor) -> dict[str, Any]:
    return {"num_elements": x.numel(), "dtype": name_of(x.dtype)}


def _in_place(name: str) -> Callable[..., None]:
    """Return a kernel that requests an in-place change of its first argument, called x in the
    request; the others keep their names.
    """
    _, _, *names = inspect.signature(getattr(KernelBackend, name)).parameters

    def kernel(self: _Backend, x: Tensor, *arguments: Any) -> None:
        given = dict(zip(names, arguments, strict=True))
        tensors = {key: given.pop(key) for key in names if isinstance(given[key], Tensor)}
        self.ask(name.strip("_"), {"x": x, **tensors}, {"x": x}, **given)

    return kernel


class _Backend(KernelBackend):
    """A backend whose kernels are requests; `_IN_PLACE` has the others."""

    name = "process"

    def __init__(self, ask: Any) -> None:
        self.ask = ask

    def _gather_flat(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        self.ask("gather_flat", _numbered(tensors), {"flat": out})

    def _scatter_flat(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        shapes = [list(x.shape) for x in tensors]
        self.ask("scatter_flat", {"flat": flat}, _numbered(tensors), shapes=shapes)

    def _order_by_complexity(self, keys: Tensor) -> Tensor:
        order = torch.empty(keys.numel(), dtype=torch.int64)
        self.ask("order_by_complexity", {"keys": keys}, {"order": order})
        return order


_IN_PLACE = {
    name: _in_place(name) for name in KernelBackend.__abstractmethods__ if name.endswith("_")
}


def _backend(ask: Any, codecs: Mapping[str, Any]) -> Any:
    return type("Backend", (_Backend,), {**_IN_PLACE, "codecs": codecs})(ask)


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"t{place}": x for place, x in enumerate(tensors)}


def _kernels(ask: Any, names: Sequence[str], codecs: Sequence[str]) -> Any:
    """Return a backend; for a program that lacks some kernels, only its kernels and codecs; None if
    it has none.
    """
    made = {name: type(name, (_ProcessCodec,), {"name": name, "ask": ask}) for name in codecs}
    backend = _backend(ask, made)
    if set(names) == set(_KERNELS) and "MinMaxUInt8" in codecs:
        return backend
    methods = [name.removeprefix("_") for name in KernelBackend.__abstractmethods__]
    found = {method: getattr(backend, method) for method in methods if method.rstrip("_") in names}
    return SimpleNamespace(device_types=("cpu",), codecs=made, **found) if names or codecs else None


class _ProcessCodec(Codec):
    """A codec whose methods are requests."""

    ask: Any

    def __init__(self, kernels: Any) -> None:
        super().__init__(_backend(self.ask, {}))

    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return the size reported by the program, a non-negative int."""
        kind = name_of(dtype)
        said, _ = self.ask("payload_bytes", codec=self.name, num_elements=c, dtype=kind)
        value = said.get("value")
        if not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise ProgramError(f"the answer to payload_bytes has the value {value!r}, not a size")
        return value

    def _compress(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None:
        given, members = {"x": x}, {"codec": self.name, "num_chunks": num_chunks}
        if target_chunk is not None:
            given["payload"], members["target_chunk"] = out, target_chunk
        self.ask("compress", given, {"payload": out}, **members)

    def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        members = {"codec": self.name, "num_chunks": num_chunks, **_size(out)}
        self.ask("decompress", {"payload": payload}, {"x": out}, **members)
