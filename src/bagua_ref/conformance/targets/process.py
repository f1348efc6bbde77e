"""A program in any language as a target: its kernels, codecs, samplers and collectives, each call a
message to its process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bagua_ref import contrib
from bagua_ref.backends.base import KernelBackend
from bagua_ref.backends.codec import Codec
from bagua_ref.base.untrusted import check_form
from bagua_ref.communicators.base import Communicator
from bagua_ref.conformance.cases.tensor_files import name_of
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.targets.process_link import DTYPES, Link, ProgramError, Programs
from bagua_ref.conformance.targets.world import RankWorld
from bagua_ref.types import ReduceOp

__all__ = ["ProcessTarget"]


@dataclass
class ProcessTarget:
    """A target whose parts are in another program, which says what it has.

    The program is started when it is needed, and ended with this process. Arguments are checked
    here, by the base classes, so that it gets valid ones only.

    Args:
        command: the program and its arguments.
        seconds: in which the program must start, and give each answer.

    Raises:
        ProgramError: the program cannot be started, or does not say what it has.
    """

    command: str
    seconds: float = 60.0
    _live: dict[int, _Live] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Ask the program what it has."""
        # Removed by this process, as those of checks are killed.
        self._folder = tempfile.mkdtemp(prefix="bagua_ref-")
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        programs = self.start(1)
        try:
            said = programs.hello()
        finally:
            programs.end()
        self.name = str(said.get("name", self.command))
        try:
            check_form(said, _HELLO, "answer")
        except ValueError as error:
            raise ProgramError(f"the program's answer to hello: {error}") from None
        defaults = {
            "dtypes": list(DTYPES),
            "external": False,
            "kernels": [],
            "codecs": [],
        }
        said = {
            **defaults,
            **{member: value for member, value in said.items() if value is not None},
        }
        for member, known in (("dtypes", DTYPES), ("kernels", _KERNELS)):
            if unknown := sorted(set(said[member]) - set(known)):
                raise ProgramError(
                    f"the program's {member} have {unknown[0]!r}, which must be one of"
                    f" {', '.join(known)}"
                )
        self.capabilities = {
            key: said[key] for key in ("dtypes", "external", "max_ranks") if key in said
        }
        self.kernels = _kernels(self._link, said["kernels"], said["codecs"])
        self.samplers = _Samplers(self._link) if said.get("samplers") is True else None
        self.communicator = self._join if said.get("collectives") is True else None

    def _link(self) -> Link:
        return self.live().single().links[0]

    def _join(self, world: RankWorld) -> Communicator:
        return self.live().join(world)

    _join.real_threads = True  # type: ignore[attr-defined] # each with a process of its own

    def start(self, ranks: int) -> Programs:
        """Start so many processes of the program."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        return Programs(self.command, folder, ranks, self.seconds)

    def end(self) -> None:
        """End the programs that belong to this process, and remove their files; none may follow."""
        self._live.pop(os.getpid(), _Live(self)).end()
        self._remove()

    def requests(self) -> int:
        """Return how many requests this process has sent to programs."""
        return Link.sent

    def live(self) -> _Live:
        """Return the processes that belong to this process; one that was forked starts its own."""
        return self._live.setdefault(os.getpid(), _Live(self))


_HELLO = {
    "dtypes?": [str],
    "external?": bool,
    "max_ranks?": range(1, 2**31),
    "kernels?": [str],
    "codecs?": [str],
}
"""The form of an answer to hello."""


class _Live:
    """Processes of the program: one for what needs no other ranks, and sets of ranks, each for one
    world at a time.
    """

    def __init__(self, target: ProcessTarget) -> None:
        self._target, self._lock, self._sets = target, threading.Lock(), list[_Set]()
        self._single: Programs | None = None

    def single(self) -> Programs:
        """Return the process for calls without other ranks."""
        with self._lock:
            if self._single is not None and self._single.broken:
                self._single.end()
                self._single = None
            self._single = self._single or self._target.start(1)
            return self._single

    def end(self) -> None:
        """End all programs."""
        for programs in [
            *([] if self._single is None else [self._single]),
            *(group.programs for group in self._sets),
        ]:
            programs.end()

    def join(self, world: RankWorld) -> Communicator:
        """Return a rank's communicator in the set of processes for its world."""
        with self._lock:
            mine = next((group for group in self._sets if group.store is world.store), None)
            if mine is None:
                mine = next((group for group in self._sets if group.is_free()), None) or _Set(
                    self._target.start(world.world_size)
                )
                mine.begin(world)
            for group in self._sets:
                if group is not mine and group.programs.broken:
                    group.programs.end()
            self._sets = [
                mine,
                *(group for group in self._sets if group is not mine and not group.programs.broken),
            ]
            communicator = _ProcessCommunicator(mine, world)
            mine.members.append(weakref.ref(communicator))
        communicator.enter()
        return communicator


class _Set:
    """Processes that are the ranks of one world after another."""

    def __init__(self, programs: Programs) -> None:
        self.programs, self.store, self.number = programs, None, 0
        self.members: list[weakref.ref[Any]] = []
        self.folder = programs.folder / "0"

    def is_free(self) -> bool:
        """Return whether no communicator of an earlier world is left."""
        return not self.programs.broken and all(ref() is None for ref in self.members)

    def begin(self, world: RankWorld) -> None:
        """Start a new world."""
        self.programs.grow(world.world_size)
        self.store, self.members, self.number = world.store, [], self.number + 1
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = self.programs.folder / str(self.number)
        self.folder.mkdir()


class _ProcessCommunicator(Communicator):
    """The collectives of S3.9, each a request to the rank's process."""

    def __init__(self, group: _Set, world: RankWorld) -> None:
        super().__init__(world.rank, world.world_size, "process")
        self._group, self._world = group, world
        self._link = group.programs.links[world.rank]

    def enter(self) -> None:
        """Tell the process which world begins."""
        self._link.ask(
            "world",
            world=self._group.number,
            rank=self._rank,
            nranks=self._nranks,
            nodes=list(self._world.nodes),
            folder=str(self._group.folder),
        )

    def abort(self, reason: str = "") -> None:
        """End the processes of the world."""
        self._group.programs.end()

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._link.ask("barrier")

    def _request(
        self, call: str, given: Tensor | None, wanted: Tensor | None, **values: Any
    ) -> None:
        """Send ``given`` as x and receive ``wanted`` as out, both flat."""
        self._link.ask_for(call, _flat("out", wanted), _flat("x", given), **values)

    def _send(self, tensor: Tensor, dst: int) -> None:
        self._link.ask("send", _flat("x", tensor), dst=dst)

    def _recv(self, tensor: Tensor, src: int) -> None:
        self._link.ask_for("recv", _flat("x", tensor), src=src, **_size(tensor))

    def _exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]
    ) -> None:
        self._link.ask_for(
            "exchange",
            {f"recv{place}": tensor.view(-1) for place, (tensor, _) in enumerate(recvs)},
            {f"send{place}": tensor.view(-1) for place, (tensor, _) in enumerate(sends)},
            sends=[peer for _, peer in sends],
            recvs=[{"src": peer, **_size(tensor)} for tensor, peer in recvs],
        )

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self._link.ask_for("broadcast", _flat("x", tensor), _flat("x", tensor), root=src)

    def _gather(self, send_tensor: Tensor, recv_tensor: Tensor, dst: int) -> None:
        self._request("gather", send_tensor, recv_tensor if self._rank == dst else None, root=dst)

    def _scatter(self, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None:
        self._request(
            "scatter",
            send_tensor if self._rank == src else None,
            recv_tensor,
            root=src,
            **_size(recv_tensor),
        )

    def _allgather(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        self._request("allgather", send_tensor, recv_tensor)

    def _alltoall(self, send_tensor: Tensor, recv_tensor: Tensor) -> None:
        self._request("alltoall", send_tensor, recv_tensor)

    def _allreduce_inplace(self, tensor: Tensor, op: ReduceOp) -> None:
        self._request("allreduce", tensor, tensor, op=op.name)

    def _reduce_inplace(self, tensor: Tensor, dst: int, op: ReduceOp) -> None:
        self._request("reduce", tensor, tensor if self._rank == dst else None, op=op.name, root=dst)

    def _reduce_scatter(self, send_tensor: Tensor, recv_tensor: Tensor, op: ReduceOp) -> None:
        self._request("reduce_scatter", send_tensor, recv_tensor, op=op.name)


def _flat(name: str, x: Tensor | None) -> dict[str, Tensor]:
    return {} if x is None else {name: x.view(-1)}


def _size(x: Tensor) -> dict[str, Any]:
    return {"elements": x.numel(), "dtype": name_of(x.dtype)}


def _in_place(call: str, *names: str) -> Callable[..., None]:
    """Return a kernel that changes x by a request with its other arguments by these names."""

    def kernel(self: _Backend, x: Tensor, *arguments: Any) -> None:
        given = dict(zip(names, arguments, strict=True))
        tensors = {name: given.pop(name) for name in names if isinstance(given[name], Tensor)}
        self._link().ask_for(call, {"x": x}, {"x": x, **tensors}, **given)

    return kernel


class _Backend(KernelBackend):
    """Every kernel as a request."""

    name = "process"

    def __init__(self, link: Any) -> None:
        self._link = link

    _add_ = _in_place("add", "y")
    _subtract_ = _in_place("subtract", "y")
    _add_scaled_ = _in_place("add_scaled", "y", "factor")
    _average_ = _in_place("average", "y")
    _divide_ = _in_place("divide", "divisor")
    _combine_ring_ = _in_place("combine_ring", "left", "right", "weight")
    _async_average_ = _in_place("async_average", "reduced", "snapshot", "nranks")
    _update_momentum_ = _in_place("update_momentum", "grad", "beta1", "one_minus_beta1")
    _reduce_chunks_ = _in_place("reduce_chunks", "num_chunks", "target_chunk", "average")

    def _gather_flat(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        self._link().ask_for(
            "gather_flat", {"flat": out}, {f"t{place}": x for place, x in enumerate(tensors)}
        )

    def _scatter_flat(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        wanted = {f"t{place}": x for place, x in enumerate(tensors)}
        self._link().ask_for(
            "scatter_flat", wanted, {"flat": flat}, shapes=[list(x.shape) for x in tensors]
        )

    def _order_by_complexity(self, keys: Tensor) -> Tensor:
        order = torch.empty(keys.numel(), dtype=torch.int64)
        self._link().ask_for("order_by_complexity", {"order": order}, {"keys": keys})
        return order


_KERNELS = sorted(name.strip("_") for name in KernelBackend.__abstractmethods__)


def _kernels(
    link: Any, names: Sequence[str], codecs: Sequence[str]
) -> _Backend | SimpleNamespace | None:
    """Return a backend, or the kernels and codecs of a program that does not have all."""
    made: dict[str, type[Codec]] = {
        name: type(name, (_ProcessCodec,), {"name": name, "link": staticmethod(link)})
        for name in codecs
    }
    backend: _Backend = type("Backend", (_Backend,), {"codecs": made})(link)
    if set(names) == set(_KERNELS) and "MinMaxUInt8" in codecs:
        return backend
    methods = [name.removeprefix("_") for name in KernelBackend.__abstractmethods__]
    found = {method: getattr(backend, method) for method in methods if method.rstrip("_") in names}
    return SimpleNamespace(device_types=("cpu",), codecs=made, **found) if names or codecs else None


class _ProcessCodec(Codec):
    """A codec whose work is done by requests."""

    link: Any

    def __init__(self, kernels: Any) -> None:
        super().__init__(_Backend(self.link))

    def payload_bytes(self, c: int, dtype: torch.dtype) -> int:
        """Return what the program says, which must be a whole number."""
        kind = name_of(dtype)
        said, _ = self.link().ask("payload_bytes", codec=self.name, elements=c, dtype=kind)
        value = said.get("value")
        if not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise ProgramError(f"payload_bytes of {c} {kind}: the program answered {value!r}")
        return value

    def _compress(self, x: Tensor, num_chunks: int, target_chunk: int | None, out: Tensor) -> None:
        given = {"x": x} if target_chunk is None else {"x": x, "payload": out}
        self.link().ask_for(
            "compress",
            {"payload": out},
            given,
            codec=self.name,
            num_chunks=num_chunks,
            target_chunk=target_chunk,
        )

    def _decompress(self, payload: Tensor, num_chunks: int, out: Tensor) -> None:
        self.link().ask_for(
            "decompress",
            {"x": out},
            {"payload": payload},
            codec=self.name,
            num_chunks=num_chunks,
            **_size(out),
        )


class _Samplers:
    """Both classes of S7: their indices and batches come from the program, all else is checked and
    drawn here.
    """

    def __init__(self, link: Callable[[], Link]) -> None:
        self.LoadBalancingDistributedSampler = type(
            "Sampler", (_Sampler,), {"link": staticmethod(link)}
        )
        self.LoadBalancingDistributedBatchSampler = type(
            "BatchSampler", (_BatchSampler,), {"link": staticmethod(link)}
        )


class _Sampler(contrib.LoadBalancingDistributedSampler):
    link: Any

    def __init__(self, dataset: Any, complexity_fn: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(dataset, complexity_fn, *arguments, **options)
        values = [complexity_fn(dataset[place]) for place in range(len(dataset))]
        self._complexities = [
            value.item() if isinstance(value, Tensor) else value for value in values
        ]

    def indices(self, rank: int) -> list[int]:
        """Return the indices that a rank draws, as the program gives them."""
        options = {
            name: getattr(self, name)
            for name in ("shuffle", "drop_last", "random_level", "seed", "epoch")
        }
        drawn = samplers_plain.noise_and_chunks(self._complexities, self.num_replicas, **options)
        noise, order = (torch.tensor(values, dtype=torch.int64) for values in drawn)
        values = {
            "complexities": self._complexities,
            "num_replicas": self.num_replicas,
            "rank": rank,
            **options,
        }
        _, found = self.link().ask(
            "sampler_indices", {"noise": noise, "chunk_order": order}, **values
        )
        indices: list[int] = found["indices"].tolist()
        return indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices(self.rank))

    def __len__(self) -> int:
        return len(self.indices(self.rank))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError("programs are not asked for what is left of an epoch (S7.6)")


class _BatchSampler(contrib.LoadBalancingDistributedBatchSampler):
    link: Any
    sampler: _Sampler

    def batches(self) -> list[list[int]]:
        """Return the own batches that the program chooses, given how many each rank has."""
        of_ranks = [self.batch_fn(self.sampler.indices(rank)) for rank in range(self.num_replicas)]
        counts = torch.tensor([len(batches) for batches in of_ranks])
        _, found = self.link().ask(
            "equal_batches", {"counts": counts}, rank=self.rank, drop_last=self.drop_last
        )
        return [of_ranks[self.rank][place] for place in found["batches"].tolist()]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())

    def __len__(self) -> int:
        return len(self.batches())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise NotImplementedError."""
        self.sampler.load_state_dict(state_dict)
