"""The connections between the processes of one job, from which their communicators are made (S1).

`bagua_ref.groups.process_group` finds the store through which the processes find each other.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_ref.base.untrusted import NATURAL
from bagua_ref.communicators.gloo_sockets import close_served
from bagua_ref.communicators.processes import Processes, leave_to_parent, node_name, this_process
from bagua_ref.communicators.rendezvous import another_connection, prefixed, rendezvous
from bagua_ref.communicators.shared_memory import shared_by
from bagua_ref.communicators.torch_distributed import TorchDistributedCommunicator
from bagua_ref.communicators.waiting import Waiting

__all__ = ["TorchDistributedTransport"]

_INFO_FORM = [str, NATURAL, (str, type(None)), [str, NATURAL, NATURAL], str]
"""Form of a rank's information: node, number of GPUs, CUDA_VISIBLE_DEVICES, `this_process`, `shared_by`."""


class TorchDistributedTransport:
    """The connections between the processes of one job, which find each other through a shared store.

    Making one is collective: every rank of the job does so with the same ``world_size``, and it returns when all have.

    Args:
        store: the job's torch store; consecutive jobs may use the same one.
        rank: the rank of this process.
        world_size: the number of processes.
        local_world_size: ranks per node, consecutive; -1: the node is given by GROUP_RANK or NODE_RANK, else by the host name.
        timeout: seconds to wait for the other ranks.

    Attributes:
        node_of: the node of each global rank; nodes are numbered as they first appear.
        owns_gpu: whether every rank has a GPU of its own.
        store: the part of the store that only this job uses.
    """

    def __init__(self, store: Store, rank: int, world_size: int, local_world_size: int, timeout: float) -> None:
        node = str(rank // local_world_size) if local_world_size > 0 else node_name()
        gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
        self._machine = shared_by()
        info = [node, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), this_process(), self._machine]
        job, found = rendezvous(prefixed("bagua_ref", store), rank, world_size, info, timeout, _INFO_FORM)
        # The job's name is unique, so the caller's prefix is not needed; without it, `another_connection` works in every torch.
        self.store = prefixed(f"bagua_ref/{job}", getattr(store, "_underlying_non_prefix_store", store))
        self._idle = [self.store]
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
        self.waits = Waiting(
            prefixed("waiting", self.store), rank, world_size, Processes([process for *_, process, _ in found], rank)
        )
        self._places = [(node, where) for node, (*_, where) in zip(self.node_of, found, strict=True)]
        self.uses_nccl = False
        """Whether CUDA tensors use NCCL; otherwise they are copied to the host and use gloo."""
        leave_to_parent(self)

    def connect(self, name: str, ranks: Sequence[int], timeout: float) -> TorchDistributedCommunicator:
        """Return this rank's communicator for the global ``ranks``; wait until all of them have called this.

        Raises:
            CommunicationTimeoutError: one of them has not called this within ``timeout`` seconds.
        """
        try:
            connection = self._idle.pop()
        except IndexError:  # another thread is connecting, perhaps to ranks that wait for this thread's group
            connection = another_connection(self.store)
        store = prefixed(name, connection)
        shares_memory = self._machine != "" and {self._places[rank] for rank in ranks} == {self._places[self.rank]}
        communicator = TorchDistributedCommunicator(
            store, name, ranks, self.rank, timeout, self.uses_nccl, self.waits, shares_memory
        )
        self._idle.append(connection)  # if that has failed, gloo may still wait in it
        self._communicators.add(communicator)
        return communicator

    def close(self) -> None:
        """Abort every communicator."""
        self.waits.close()
        for communicator in list(self._communicators):
            communicator.abort()

    def leave_to_parent(self) -> None:
        """Leave every communicator to the parent of this process, a forked child; using them raises CommunicationError."""
        for communicator in list(self._communicators):
            communicator.leave_to_parent()
        close_served(self.store)
