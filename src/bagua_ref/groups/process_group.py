"""Process groups: their ranks, connections and lifetime (S1)."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from bagua_ref.base import runtime
from bagua_ref.base.launch_environment import Identity
from bagua_ref.base.runtime import World, current_world
from bagua_ref.communicators.base import Communicator, NonMember
from bagua_ref.communicators.gloo_sockets import let_gloo_rest
from bagua_ref.communicators.job_store import TorchDistributedTransport, connect_job
from bagua_ref.communicators.processes import refuse_in_child
from bagua_ref.env import checked_timeout, get_default_timeout
from bagua_ref.errors import CommunicationError, NotInitializedError
from bagua_ref.types import Transport

MaybeCommunicator = Communicator | NonMember


@dataclass
class _Job:
    """State shared by the process groups of one ``init_process_group()`` call; it ends with them
    and its world.
    """

    world: World
    transport: Transport
    timeout: float
    owns_transport: bool = False
    owns_torch_group: bool = False
    torch_group: Any = None
    """torch's default group: if a DistributedDataParallel were its last owner, freeing that could
    wait forever (see `let_gloo_rest`).
    """
    pid: int = field(default_factory=os.getpid)
    taken: set[str] = field(default_factory=set)
    groups: weakref.WeakValueDictionary[str, BaguaProcessGroup] = field(
        default_factory=weakref.WeakValueDictionary
    )
    counters: dict[str, Iterator[int]] = field(default_factory=dict)

    def next_name(self, stem: str) -> str:
        """Return ``stem`` with the next number; ranks agree on it because they make groups in the
        same order.
        """
        return f"{stem}{next(self.counters.setdefault(stem, itertools.count()))}"


class BaguaProcessGroup:
    """A group of ranks with communicators among all of them, within each node, and among the node
    leaders (S1).

    Making a group is free. Its ranks connect when they first ask for a communicator, which all of
    them must do in the same order. A group is used by one thread at a time.

    Args:
        ranks: distinct global ranks; an empty list makes a group whose communicators are
            `NonMember` on every rank.
        stream: the CUDA stream of background operations; None: a new high-priority stream.
        group_name: a name that no other group has, equal on all ranks.

    Attributes:
        ranks: the global ranks, in group order.
        group_name: the name.
        timeout: seconds without progress after which connecting or a collective raises, as given to
            `init_process_group`.
        is_background: whether `for_background` made it.
        before_destruction: callback that runs before `destroy_process_group`, or the end of the
            interpreter, closes the group, unless an exception ends this rank; it may communicate.

    Raises:
        ValueError: ranks are repeated or out of range, or the name is taken.
        NotInitializedError: ``init_process_group()`` has not been called.
        CommunicationError: it was called in the process from which this one was forked.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stream: Any,
        group_name: str,
        *,
        is_background: bool = False,
        job: _Job | None = None,
    ) -> None:
        if job is None:
            job = _get_default_group()._job
        refuse_in_child(job.pid)
        size = len(job.transport.node_of)
        if len(set(ranks)) != len(ranks) or not all(
            isinstance(r, int) and 0 <= r < size for r in ranks
        ):
            raise ValueError(
                f"ranks={list(ranks)} must be different ranks between 0 and {size - 1}"
            )
        if group_name in job.taken:
            raise ValueError(
                f"group_name={group_name!r} is taken; give each group a name of its own"
            )
        self.ranks, self.stream, self.group_name, self.is_background = (
            tuple(ranks),
            stream,
            group_name,
            is_background,
        )
        self._job: _Job = job
        self.timeout = job.timeout
        self.before_destruction: Callable[[], None] | None = None
        self._closed = False
        self._rank = job.world.identity.rank
        self._communicators: dict[str, MaybeCommunicator] = {}
        self._siblings: list[weakref.ref[BaguaProcessGroup]] = []
        self._side_streams: dict[torch.device, Any] = {}
        job.taken.add(group_name)
        job.groups[group_name] = self

    def __repr__(self) -> str:
        return (
            f"BaguaProcessGroup({self.group_name!r}, ranks"
            f" {list(self.ranks)}{', closed' if self._closed else ''})"
        )

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    @property
    def nodes(self) -> dict[int, list[int]]:
        """The group's ranks by node, in group order."""
        found: dict[int, list[int]] = {}
        for rank in self.ranks:
            found.setdefault(self._job.transport.node_of[rank], []).append(rank)
        return found

    def get_global_communicator(self) -> Any:
        """Return the communicator of all ranks of the group (S1), or a `NonMember` on any other
        rank.
        """
        return self._communicator("global")

    def get_inter_node_communicator(self) -> Any:
        """Return the communicator of the leaders, one per node (S1), or a `NonMember` on any other
        rank.
        """
        return self._communicator("inter")

    def get_intra_node_communicator(self) -> Any:
        """Return the communicator of the group's ranks on this node (S1), or a `NonMember` on a
        rank outside the group.
        """
        return self._communicator("intra")

    def for_background(self) -> BaguaProcessGroup:
        """Return a background group of the same ranks, this one if it is one already; all ranks
        call this in the same order.
        """
        return self if self.is_background else self.sibling()

    def sibling(self) -> BaguaProcessGroup:
        """Return a new background group of the same ranks; all ranks call this in the same
        order.
        """
        name = self._job.next_name(f"{self.group_name}/background")
        group = BaguaProcessGroup(self.ranks, self.stream, name, is_background=True, job=self._job)
        self._siblings.append(weakref.ref(group))
        return group

    def side_stream(self, device: torch.device) -> Any:
        """Return the stream of ``device`` for background operations of this group; None: the
        caller's stream.

        Simulated ranks pass tensors to each other without events, so they stay on one stream.
        """
        if self.stream is not None or not self._job.transport.has_streams:
            return self.stream
        if device not in self._side_streams:
            self._side_streams[device] = runtime.side_stream(device)
        return self._side_streams[device]

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent by this rank in this group and its background groups, by
        formula.
        """
        return round(self.unrounded_bytes)

    @property
    def unrounded_bytes(self) -> float:
        """Return `bytes_sent` without rounding, for use in sums."""
        siblings = [group for weak in self._siblings if (group := weak()) is not None]
        return sum(sender.unrounded_bytes for sender in (*self._communicators.values(), *siblings))

    def refuse_in_child(self) -> None:
        """Raise CommunicationError if this process was forked after ``init_process_group()``."""
        refuse_in_child(self._job.pid)

    def abort(self, why: str) -> None:
        """Abort all connections: operations under way and later ones raise CommunicationError, on
        other ranks with the reason.
        """
        for communicator in list(self._communicators.values()):
            communicator.abort(why)

    def close(self) -> None:
        """Close all connections; later use raises."""
        self._closed = True
        for kind in list(self._communicators):
            # Another thread, or the garbage collection of a training that has ended, may be closing
            # this group, too.
            if (communicator := self._communicators.pop(kind, None)) is not None:
                communicator.close()

    def _communicator(self, kind: str) -> MaybeCommunicator:
        if kind in self._communicators:
            return self._communicators[kind]
        self.refuse_in_child()
        if self._closed:
            raise NotInitializedError(
                f"{self!r} was closed; call init_process_group() and make a new group"
            )
        nodes, here = self.nodes, self._job.transport.node_of[self._rank]
        leaders = tuple(on_node[0] for on_node in nodes.values())
        ranks = {"global": self.ranks, "inter": leaders, "intra": tuple(nodes.get(here, ()))}[kind]
        name = f"{self.group_name}/{kind}{here if kind == 'intra' else ''}"
        if self._rank in ranks and self._rank in self.ranks:
            communicator = self._communicators[kind] = self._job.transport.connect(
                name, ranks, self._job.timeout
            )
            communicator.compares_calls = not self.is_background  # rounds are compared as a whole
        else:
            self._communicators[kind] = NonMember(len(ranks), name)
        return self._communicators[kind]


def init_process_group(
    store: Any = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    *,
    backend: str | None = None,
    timeout: float | None = None,
) -> None:
    """Connect all ranks and make the default group of them (S1). Every rank calls it.

    It uses torch's default process group if there is one. Otherwise it makes that from ``store``,
    ``rank`` and ``world_size``, or from the environment variables of ``torchrun``, ``mpirun`` or
    ``srun``; without any, this is a world of one rank.

    Args:
        store: a torch.distributed store that all ranks share; needs ``rank`` and ``world_size``.
        rank: the rank of this process; -1: taken from the environment.
        world_size: the number of processes; -1: taken from the environment.
        local_world_size: ranks per node, consecutive; -1: the node is given by GROUP_RANK or
            NODE_RANK, else by the host name.
        backend: "gloo" or "nccl", for torch's group and CUDA tensors; None: nccl if every rank has
            its own GPU, else gloo.
        timeout: seconds without progress after which connecting or a collective raises; None:
            `bagua_ref.env.get_default_timeout`.

    Raises:
        RuntimeError: it was called before; call `destroy_process_group` first.
        ValueError: an argument is out of range or disagrees with torch's default group, or the
            launcher's variables are incomplete or contradictory.
        CommunicationTimeoutError: the store or other ranks were not found in time; names missing
            ranks as far as they are known.
        CommunicationError: another program has the port, or the store or another rank was lost.

    >>> init_process_group(); get_communicator("default", "global").nranks()
    1
    >>> destroy_process_group()
    """
    world = current_world()
    if world.default_group is not None:
        _get_default_group().refuse_in_child()
        raise RuntimeError(
            "init_process_group() was called already; call destroy_process_group() first"
        )
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(
            f"backend={backend!r} must be 'gloo', 'nccl' or None (nccl if every rank has its own"
            " GPU)"
        )
    if local_world_size != -1 and local_world_size < 1:
        raise ValueError(
            f"local_world_size={local_world_size} must be 1 or more, or -1 (ask the launcher)"
        )
    timeout = get_default_timeout() if timeout is None else checked_timeout(timeout)
    if world.transport is not None:
        job = _Job(world, world.transport, timeout)
    else:
        job = _join(world, store, rank, world_size, local_world_size, backend, timeout)
    world.default_group = BaguaProcessGroup(
        range(len(job.transport.node_of)), None, "default", job=job
    )


def _join(
    world: World,
    store: Any,
    rank: int,
    world_size: int,
    local_world_size: int,
    backend: str | None,
    timeout: float,
) -> _Job:
    if owns_torch_group := not dist.is_initialized():
        transport = connect_job(world, store, rank, world_size, local_world_size, timeout)
        rank, world_size = transport.rank, len(transport.node_of)
        chosen = backend or ("nccl" if transport.owns_gpu else "gloo")
        _make_torch_group(transport, chosen, timeout)
    else:
        for name, given, known in (
            ("rank", rank, dist.get_rank()),
            ("world_size", world_size, dist.get_world_size()),
        ):
            if given not in (-1, known):
                raise ValueError(
                    f"{name}={given} disagrees with torch.distributed, which is initialized with"
                    f" {known}"
                )
        existing = dist.get_backend()
        if backend is not None and backend not in existing:
            raise ValueError(
                f"backend={backend!r} disagrees with torch.distributed, which is initialized with"
                f" {existing!r}"
            )
        store, rank, world_size = (
            dist.distributed_c10d._get_default_store(),
            dist.get_rank(),
            dist.get_world_size(),
        )
        transport = TorchDistributedTransport(store, rank, world_size, local_world_size, timeout)
    transport.uses_nccl = "nccl" in dist.get_backend()
    nodes = transport.node_of
    node = nodes[rank]
    world.known_identity = Identity(
        rank=rank,
        world_size=world_size,
        local_rank=nodes[:rank].count(node),
        local_world_size=nodes.count(node),
        node_rank=node,
    )
    world.transport, world.was_in_job = transport, True
    job = _Job(
        world,
        transport,
        timeout,
        owns_transport=True,
        owns_torch_group=owns_torch_group,
        torch_group=dist.group.WORLD,
    )
    # Connections that are open during the interpreter's shutdown can abort the process.
    atexit.register(_destroy_at_exit, world, job.pid)
    # multiprocessing's processes end without functions of atexit.
    multiprocessing.util.Finalize(None, _destroy_at_exit, (world, job.pid), exitpriority=0)
    return job


def _make_torch_group(transport: TorchDistributedTransport, backend: str, timeout: float) -> None:
    """Make torch's default group of all ranks."""
    members, over_nccl = range(len(transport.node_of)), backend == "nccl"

    def make() -> None:
        # in a store that no earlier attempt of an elastic launch has written to
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=timeout),
            world_size=len(members),
            rank=transport.rank,
            store=transport.store,
        )
        if not over_nccl:
            # a rank that exits at once must not make the others fail, which may be connecting yet
            dist.barrier()

    try:
        transport.peers.meet(
            "torch.distributed", members, timeout, (lambda: None) if over_nccl else make
        )
    except CommunicationError:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    if over_nccl:
        make()  # on this thread, which may have chosen its device


def destroy_process_group() -> None:
    """Close every communicator and forget the default group; does nothing if there is none.

    It destroys torch's default group only if `init_process_group` made it. Ranks need not call it
    at the same time, but a rank that is still inside a collective raises CommunicationError.
    Asynchronous averaging ends first, for which all ranks must come here, end or call its
    ``abort``. The end of the interpreter does the same.

    Raises:
        CommunicationError: this process was forked after ``init_process_group()``; only its parent
            can do this.
    """
    world = current_world()
    if world.default_group is not None:
        _destroy(world, sys.exc_info()[1])


def _destroy(world: World, error: BaseException | None) -> None:
    job = cast("BaguaProcessGroup", world.default_group)._job
    refuse_in_child(job.pid)
    error = None if isinstance(error, SystemExit) and not error.code else error
    groups = list(job.groups.values())
    try:
        for group in groups if error is None else ():
            if group.before_destruction is not None:
                group.before_destruction()
    finally:
        if job.owns_transport:
            cast(TorchDistributedTransport, job.transport).peers.leave(
                error, None if world.meter is None else world.meter.steps
            )
        world.default_group = None
        for group in groups:
            group.close()
        if job.owns_transport:
            job.transport.close()
            world.transport = world.meter = None
            world.known_identity = None
            atexit.unregister(_destroy_at_exit)
            let_gloo_rest()
            job.torch_group = None
            if job.owns_torch_group and dist.is_initialized():
                dist.destroy_process_group()


def _destroy_at_exit(world: World, pid: int) -> None:
    # A forked child shares the connections, which only its parent may close.
    if world.default_group is not None and os.getpid() == pid:
        # At a prompt, the program went on after the error.
        _destroy(
            world,
            sys.exc_info()[1]
            or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)),
        )


def is_initialized() -> bool:
    """Return whether ``init_process_group()`` has been called, and `destroy_process_group` has
    not.
    """
    return current_world().default_group is not None


def _get_default_group() -> BaguaProcessGroup:
    """Return the group of all ranks.

    Raises:
        NotInitializedError: ``init_process_group()`` has not been called.
    """
    group = current_world().default_group
    if group is None:
        raise NotInitializedError(
            "there is no process group yet; call bagua_ref.init_process_group() first"
        )
    return cast("BaguaProcessGroup", group)


def new_group(ranks: Sequence[int] | None = None, stream: Any = None) -> BaguaProcessGroup:
    """Return a group of ``ranks`` (None: all) in ascending order. Every rank of the default group
    calls it, member or not.

    Raises:
        ValueError: ranks are repeated or out of range.
    """
    job = _get_default_group()._job
    ranks = sorted(ranks) if ranks is not None else range(len(job.transport.node_of))
    return BaguaProcessGroup(ranks, stream, job.next_name("group"))


def from_torch_group(group: Any, stream: Any = None) -> BaguaProcessGroup:
    """Return a new group of the same ranks as torch's ``group``; all its members call it in the
    same order.

    If this rank is not a member of ``group``, the result is a group of no ranks.
    """
    job = _get_default_group()._job
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        return BaguaProcessGroup((), stream, job.next_name("torch/others/"))
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r} must be a torch.distributed.ProcessGroup, as"
            " torch.distributed.new_group returns it"
        )
    return BaguaProcessGroup(
        dist.get_process_group_ranks(group), stream, job.next_name(f"torch/{group.group_name}/")
    )


def get_communicator(group_name: str, comm_name: str) -> Any:
    """Return a communicator of the group with this name: comm_name "global", "inter" or "intra"."""
    groups, kinds = _get_default_group()._job.groups, ("global", "inter", "intra")
    if group_name not in groups:
        raise ValueError(f"group_name={group_name!r} must be one of {sorted(groups)}")
    if comm_name not in kinds:
        raise ValueError(f"comm_name={comm_name!r} must be one of {sorted(kinds)}")
    return groups[group_name]._communicator(comm_name)


def _rank_not_in_comm(comm: MaybeCommunicator | None = None) -> bool:
    return isinstance(comm, NonMember)


def _rank_not_in_group(group: BaguaProcessGroup | None = None) -> bool:
    return group is not None and group._rank not in group.ranks
