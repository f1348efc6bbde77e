"""A job of several processes: the store for their rendezvous, and the connections between them
(S1).

The store is passed by the caller, provided by the launcher, or served by rank 0.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_ref.base.launch_environment import Identity, read_launch
from bagua_ref.base.runtime import World
from bagua_ref.base.untrusted import NATURAL
from bagua_ref.communicators.connection import Connection
from bagua_ref.communicators.gloo_sockets import sockets_of_server
from bagua_ref.communicators.missing import Peers
from bagua_ref.communicators.processes import Processes, leave_to_parent, node_name, this_process
from bagua_ref.communicators.rendezvous import (
    NoReply,
    Prefixed,
    StoreLostError,
    another_connection,
    first_sentence,
    rendezvous,
    within,
)
from bagua_ref.communicators.shared_memory import shared_by
from bagua_ref.communicators.torch_distributed import TorchDistributedCommunicator
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

_logger = logging.getLogger(__name__)
_ADVICE = (
    "MASTER_ADDR and MASTER_PORT must be an address of rank 0's machine and a free port there, the"
    " same on all ranks"
)
_INFO_FORM = [str, NATURAL, (str, type(None)), [str, NATURAL, NATURAL], str]
"""Form of a rank's information: node, number of GPUs, CUDA_VISIBLE_DEVICES, `this_process`,
`shared_by`.
"""


class TorchDistributedTransport:
    """The connections between the processes of one job, which find each other through a shared
    store.

    Creating one is collective: every rank of the job does so with the same ``world_size``, and it
    returns when all have.

    Args:
        store: the job's torch store; consecutive jobs may use the same one.
        rank: the rank of this process.
        world_size: the number of processes.
        local_world_size: ranks per node, consecutive; -1: the node is given by GROUP_RANK or
            NODE_RANK, else by the host name.
        timeout: seconds to wait for the other ranks.

    Attributes:
        node_of: the node of each global rank; nodes are numbered as they first appear.
        owns_gpu: whether every rank has its own GPU.
        store: the part of the store that only this job uses.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, local_world_size: int, timeout: float
    ) -> None:
        node = str(rank // local_world_size) if local_world_size > 0 else node_name()
        gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
        self._machine = shared_by()
        info = [node, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), this_process(), self._machine]
        job, found = rendezvous(
            Prefixed("bagua_ref", store), rank, world_size, info, timeout, _INFO_FORM
        )
        # The job's name is unique, so the caller's prefix is not needed; without it,
        # `another_connection` works in every torch.
        self.store = Prefixed(
            f"bagua_ref/{job}", getattr(store, "_underlying_non_prefix_store", store)
        )
        self._idle: list[Store] = [self.store]
        self.has_streams = True
        self.rank = rank
        self._communicators: weakref.WeakSet[TorchDistributedCommunicator] = weakref.WeakSet()
        names = list(dict.fromkeys(name for name, *_ in found))
        self.node_of = tuple(names.index(name) for name, *_ in found)
        self.owns_gpu = all(
            gpus >= len(peers) or (gpus > 0 and len({v for _, _, v, *_ in peers}) == len(peers))
            for (name, gpus, *_) in found
            for peers in [[other for other in found if other[0] == name]]
        )
        self.peers = Peers(
            Prefixed("peers", self.store),
            rank,
            world_size,
            Processes([process for *_, process, _ in found], rank),
        )
        self._places = [
            (node, where) for node, (*_, where) in zip(self.node_of, found, strict=True)
        ]
        self.uses_nccl = False
        """Whether CUDA tensors use NCCL; otherwise they are copied to the host and use gloo."""
        leave_to_parent(self)

    def connect(
        self, name: str, ranks: Sequence[int], timeout: float
    ) -> TorchDistributedCommunicator:
        """Create this rank's communicator for the global ``ranks``; wait until all of them have
        called this.

        Raises:
            CommunicationTimeoutError: one of them has not called this within ``timeout`` seconds.
        """
        try:
            store = self._idle.pop()
        except IndexError:
            # another thread is connecting, perhaps to ranks that wait for this thread's group
            store = another_connection(self.store)
        shares_memory = self._machine != "" and {self._places[rank] for rank in ranks} == {
            self._places[self.rank]
        }
        place, own = ranks.index(self.rank), Prefixed(name, store)
        connection = Connection(own, name, place, ranks, timeout, self.peers, shares_memory)
        communicator = TorchDistributedCommunicator(connection, self.uses_nccl)
        self._idle.append(store)  # if that has failed, gloo may still wait in it
        self._communicators.add(communicator)
        return communicator

    def close(self) -> None:
        """Abort all communicators; if this process serves the store, keep serving it for a few
        seconds until other ranks have ended.
        """
        for communicator in list(self._communicators):
            communicator.abort()
        if sockets_of_server(self.store):
            self.peers.await_exits()

    def leave_to_parent(self) -> None:
        """Close a forked child's copies of the connections; using a communicator there raises
        CommunicationError.
        """
        for communicator in list(self._communicators):
            communicator.leave_to_parent()
        for file in sockets_of_server(self.store):  # so that the store ends with the parent
            os.close(file)


def connect_job(
    world: World, store: Any, rank: int, size: int, local_size: int, timeout: float
) -> TorchDistributedTransport:
    """Create the connections of a new job; see `job_store` for the arguments."""
    limit = timeout
    while True:
        try:
            return TorchDistributedTransport(
                *job_store(store, rank, size, limit), local_size, timeout
            )
        except StoreLostError:
            # A rank that starts its next job at once may still find the last job's store, which is
            # about to end: try again.
            if store is not None or not world.was_in_job:
                raise
            world.was_in_job, limit = False, min(timeout, 10.0)


def job_store(store: Any, rank: int, world_size: int, timeout: float) -> tuple[Store, int, int]:
    """Connect to the job's store; return it with this rank and the number of ranks.

    Args:
        store: a torch store, given with ``rank`` and ``world_size``; None: taken from the
            environment.
        rank: the rank of this process; -1: taken from the environment.
        world_size: the number of processes; -1: taken from the environment.
        timeout: seconds to wait for the store.

    Raises:
        ValueError: arguments or the launcher's variables are incomplete, out of range or
            contradictory.
        CommunicationTimeoutError: nobody serves the store at the address.
        CommunicationError: rank 0 cannot listen on the port, or another program has it.
    """
    if store is not None:
        if not isinstance(store, dist.Store):  # type: ignore[attr-defined]
            raise TypeError(
                f"store={store!r} must be a torch.distributed store, such as a TCPStore, or None"
            )
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank={rank} and world_size={world_size} must be given with store, with 0 <= rank"
                " < world_size"
            )
        return store, rank, world_size
    rank, world_size, address = _store_address(rank, world_size)
    if address is None:
        return dist.HashStore(), rank, world_size  # type: ignore[attr-defined]
    host, port = address
    if not 0 <= port < 2**16:
        raise ValueError(f"MASTER_PORT={port} must be a port, 0 to 65535")
    return _open_store(host, port, rank, timeout), rank, world_size


def _open_store(host: str, port: int, rank: int, timeout: float) -> Store:
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not by_torchrun
    what = (
        f"the job's store, which {'torchrun' if by_torchrun else 'rank 0'} serves at {host}:{port}"
    )
    began, problem = time.monotonic(), "rank 0 cannot reach itself there" if serves else "no answer"

    def open_store() -> Store:
        nonlocal problem
        while not serves:
            try:
                socket.create_connection((host, port), timeout).close()
            except (OSError, UnicodeError) as error:
                problem = str(error)
                if time.monotonic() > began + timeout:
                    raise NoReply from None
                time.sleep(0.1)
            else:
                problem = "a program listens there, but does not answer as a store"
                break
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout),
            # the rendezvous waits for them, and can name those that are missing
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )

    try:
        return within(open_store, timeout)
    except NoReply:
        raise CommunicationTimeoutError(
            f"rank {rank} timed out after {timeout:g} s connecting to {what} ({problem}); {_ADVICE}"
        ) from None
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise CommunicationError(
                f"rank 0 cannot listen at {host}:{port}, as another program has the port; set"
                f" MASTER_PORT ({error})"
            ) from error
        raise CommunicationError(
            f"rank {rank} tried for {time.monotonic() - began:.1f} s to connect to {what}:"
            f" {first_sentence(error)}; {_ADVICE}"
        ) from error


def _store_address(rank: int, world_size: int) -> tuple[int, int, tuple[str, int] | None]:
    """Return this rank, the number of ranks and the store's address (None in a world of one); -1
    means the environment's value.
    """
    launch, identity = read_launch(os.environ), Identity.from_environment()
    given = {"RANK": rank, "WORLD_SIZE": world_size}
    unknown = [name for name, value in given.items() if value == -1 and name not in os.environ]
    if launch is None and unknown:
        if len(unknown) == 2:
            return 0, 1, None
        one, other = (
            f"{name} (or the argument {name.lower()})"
            for name in sorted(given, key=unknown.__contains__)
        )
        raise ValueError(f"{one} is set, but {other} is not; set both, as torchrun does")
    rank = identity.rank if rank == -1 else rank
    world_size = identity.world_size if world_size == -1 else world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank={rank} and world_size={world_size}, as given or in the environment, must be 0 <="
            " rank < world_size"
        )
    if launch is not None:
        _logger.info(
            "rank %d of %d; the variables of %s say %s", rank, world_size, launch.launcher, launch
        )
        if world_size == 1:
            return 0, 1, None
        return rank, world_size, (launch.master_address(), launch.port)
    _logger.info("rank %d of %d, as given or as RANK and WORLD_SIZE say", rank, world_size)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(
                f"RANK and WORLD_SIZE are set or given, but {name} is not; set it, as torchrun does"
            )
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal():
        raise ValueError(f"environment variable MASTER_PORT={port!r} must be an integer")
    return rank, world_size, (os.environ["MASTER_ADDR"], int(port))
