"""The process groups of one communicator: created through a store, used by one thread at a time,
aborted at the first failure.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_ref.base.runtime import is_background_thread
from bagua_ref.communicators import shared_memory
from bagua_ref.communicators.gloo_sockets import GlooSockets, open_sockets
from bagua_ref.communicators.missing import Peers, title
from bagua_ref.communicators.pipelining import ComputingError, OtherCallError
from bagua_ref.communicators.processes import keep_forever, refuse_in_child
from bagua_ref.communicators.rendezvous import Prefixed, another_connection, first_sentence, host_of
from bagua_ref.communicators.shared_memory import SharedMemory
from bagua_ref.communicators.sockets import Mesh, connect_all
from bagua_ref.errors import CommunicationError

_TICK = timedelta(milliseconds=200)  # seconds until a waiting collective notices abort() or Ctrl-C


class Connection:
    """The connection of one communicator: a gloo process group and, once needed, an NCCL group of
    the same ranks.

    Creating one is collective: it returns when every rank has connected.

    Args:
        store: a store used by these ranks only, for their rendezvous.
        name: the communicator's.
        rank: the rank of this process in it.
        ranks: the global ranks, in the group's order.
        timeout: seconds without progress after which a collective raises.
        peers: the state of the job's ranks.
        shares_memory: whether all ranks are processes of one machine that may share memory.

    Attributes:
        name: the communicator's.
        rank: the rank of this process in it.
        ranks: the global ranks.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        peers: Peers,
        shares_memory: bool = False,
    ) -> None:
        self._store, self.name, self.rank, self.ranks, self._peers = store, name, rank, ranks, peers
        self._title = title(name, ranks[rank], ranks)
        self._collectives = self._exchanges = 0
        self._begun: list[Any] = []
        """Works of the current exchange of integers."""
        self.memory: SharedMemory | None = None
        """Shared memory, used instead of gloo for host tensors if all ranks share some."""
        self._mesh: Mesh | None = None
        """Sockets, used instead of gloo for integers if all ranks can reach each other."""
        self._seconds, self._timeout = timeout, timedelta(seconds=timeout)
        self._turn, self._pid = threading.Lock(), os.getpid()
        self._closed = ""
        self._kind_of_end: type[CommunicationError] = CommunicationError
        self._gloo: Any = None
        self._gloo_sockets: GlooSockets | None = None
        self._nccl: Any = None
        self._place = ""
        """Place of the last collective that was waited for."""
        before = open_sockets()
        make = partial(
            dist.ProcessGroupGloo, Prefixed("gloo", store), rank, len(ranks), self._timeout
        )
        self._gloo = peers.meet(name, ranks, timeout, make)
        found = GlooSockets(before)
        # The rank that serves the store must not exit before all are connected, so every rank waits
        # for all.
        found.find(self._share(found.listening), rank)
        self._gloo_sockets = found
        host = "" if shares_memory else host_of(store)
        mesh = connect_all(rank, len(ranks), host, self._share, timeout)
        if mesh is not None and shares_memory and len(ranks) > 1:
            self.memory = shared_memory.connect(mesh, self._share)
            if self.memory is None:
                return
        self._mesh = mesh

    def _share(self, values: Sequence[int]) -> list[list[int]]:
        return self.exchange_ints(values, "connect")()

    def exchange_ints(
        self, values: Sequence[int], collective: str = "agreement"
    ) -> Callable[[], list[list[int]]]:
        """Send ``values`` to every rank; return a function that waits for all ranks' values. Other
        collectives may run in between.

        Only one exchange can be in progress at a time. It raises the errors of `run`.
        """
        self._exchanges += 1
        place, mesh = f"agreement {self._exchanges}", self._mesh
        if mesh is not None:
            received = mesh.received
            self.run(collective, lambda _: [mesh.send(values)], waits=False)
        else:  # by an interruptible all-to-all, which unlike an all-gather passes them on by no ring
            copies = torch.tensor(values, dtype=torch.int64).repeat(len(self.ranks))
            incoming = torch.empty_like(copies)
            received = incoming.view(len(self.ranks), -1).tolist
            self.run(
                collective,
                lambda group: [group.alltoall_base(incoming, copies, [], [])],
                waits=False,
            )

        def finish() -> list[list[int]]:
            # Mostly it is complete, and this takes half the time. Another thread may be ending a
            # collective, whose messages come through the same sockets.
            if mesh is not None and not self._closed:
                with self._turn, suppress(RuntimeError):
                    if mesh.is_complete():
                        return received()
            self.run(collective, lambda _: self._begun, place=place)
            return received()

        return finish

    def compare(self, collective: str, call: str) -> None:
        """Raise CommunicationError on all ranks unless all make the same ``call``. Collective."""
        number = zlib.crc32(call.encode())
        if any(theirs != [number] for theirs in self.exchange_ints([number], collective)()):
            why = self._peers.different_calls(self.name, self.ranks, call)
            self.abort(why)
            raise CommunicationError(why)

    def run(
        self,
        collective: str,
        start: Callable[[Any], Iterable[Any]],
        over_nccl: bool = False,
        peers: Collection[int] | None = None,
        *,
        waits: bool = True,
        place: str = "",
        call: str = "",
    ) -> None:
        """Run ``collective`` on a process group and wait for its end; with NCCL, only the current
        stream waits, not the host.

        If NCCL does not finish within the timeout, the group is aborted, which ends its kernels,
        and the next call raises.

        Args:
            collective: its name, for messages.
            start: function of the process group that returns the works to wait for, or yields each
                one after the last has ended.
            over_nccl: whether to use NCCL instead of gloo.
            peers: the ranks of this group that take part, as senders or receivers; None: all.
            waits: whether to wait; if not, the works are stored for later.
            place: name of this wait, unique within the connection; "": the number of collectives
                waited for.
            call: description of the call, which must be equal on all ranks; "": not compared.

        Raises:
            CommunicationTimeoutError: no progress within the timeout.
            CommunicationError: the collective failed, `abort` was called, or another thread is
                using the connection. It cannot be retried.
            Exception: a computation of ``start`` between works failed, which is reported to the
                other ranks. It cannot be retried.
        """
        refuse_in_child(self._pid)
        if not self._turn.acquire(blocking=False):
            why = self._closed or (
                "another thread is inside a collective of this communicator, and two at once would"
                " mix up their data; give each thread a group of its own (new_group)"
            )
            raise self._kind_of_end(f"{collective} on {self._title}: {why}")
        group = works = work = None
        try:
            if self._closed:
                raise self._kind_of_end(f"{collective} on {self._title}: {self._closed}")
            group = self._nccl_group() if over_nccl else self._gloo
            works = start(group)
            if not waits:
                self._begun = list(works)
                return
            if over_nccl:
                for work in works:
                    work.wait()
                    self._peers.watch_work(
                        work,
                        collective,
                        self._next_place(peers),
                        self._members(peers),
                        partial(Connection.interrupt, weakref.proxy(self)),
                        self._seconds,
                    )
                return
            self._place = f"{self.name}/{place}" if place else self._next_place(peers)
            with self._peers.waiting(
                f"in {collective} of group {self.name!r}",
                self._place,
                self._members(peers),
                self.interrupt,
                is_background_thread(),
                self._seconds,
            ):
                for work in works:
                    # gloo cannot split the wait of send and recv into short ones
                    if peers is not None and self.memory is None:
                        work.wait()
                    else:
                        self._wait_in_ticks(work)
        except CommunicationError:
            # destroying it joins its threads, one of which may be waiting for a peer
            keep_forever(group)
            self._drop()
            raise
        except ComputingError as failed:
            own = failed.error
            if call and isinstance(failed, OtherCallError):
                own = CommunicationError(self._peers.different_calls(self.name, self.ranks, call))
            self._closed = self._closed or f"it failed earlier, in {collective}"
            self._peers.give_up(self.name, f"{type(own).__name__}: {own}")
            del group, works, work
            # their tracebacks would keep the connections alive, and the other ranks waiting
            for known in (failed, own):
                traceback.clear_frames(known.__traceback__)
            self._drop()
            raise own from None
        except RuntimeError as error:
            # Nothing may keep the connections alive: the other ranks notice the failure when they
            # close.
            del group, works, work
            error.__traceback__ = error.__context__ = None
            raise self._failure(collective, error) from None
        except BaseException as interruption:
            # Ctrl-C, for example: a started collective cannot be undone
            self._closed = self._closed or f"it was interrupted earlier, in {collective}"
            keep_forever(group)
            # first: the others look for the reason as soon as the connections close
            self._peers.give_up(self.name, f"{type(interruption).__name__} in {collective}")
            self._drop()
            raise
        finally:
            # Freeing a work releases the GIL for a moment, and a thread that does so while the
            # interpreter ends aborts the process. So it is freed before abort(), which comes first
            # then, can acquire ``_turn``.
            group = works = work = None
            if self._closed:  # while this was in progress
                self._drop()
            self._turn.release()

    def abort(self, reason: str = "") -> None:
        """Abort the connection; current and later operations raise CommunicationError, which on
        other ranks contains the reason.
        """
        refuse_in_child(self._pid)
        if reason and not self._closed:
            self._peers.give_up(self.name, reason)
        self.interrupt(reason or "it was aborted or its process group destroyed")

    def interrupt(self, reason: str, kind: type[CommunicationError] = CommunicationError) -> None:
        """Abort the current collective and all later ones with an error of this ``kind``."""
        if not self._closed:
            self._closed, self._kind_of_end = reason, kind
        if self._gloo_sockets is not None:  # gloo itself cannot be interrupted in send and recv
            self._gloo_sockets.shut_down()
        # A collective in progress notices this within a tick, and drops the groups itself.
        if self._turn.acquire(timeout=5 * _TICK.total_seconds()):
            self._drop()
            self._turn.release()

    def _members(self, peers: Collection[int] | None) -> Sequence[int]:
        return self.ranks if peers is None else [self.ranks[peer] for peer in {self.rank, *peers}]

    def _next_place(self, peers: Collection[int] | None) -> str:
        if peers is None:
            self._collectives += 1
        return f"{self.name}/{self._collectives if peers is None else 'exchange'}"

    def _wait_in_ticks(self, work: Any) -> None:
        while True:
            try:
                work.wait(_TICK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the error, if there was one
                    return
                if self._closed:
                    del work  # the error's traceback would keep it alive
                    raise CommunicationError(
                        f"a collective on {self._title} was aborted: {self._closed}"
                    ) from None

    def close_in_child(self) -> None:
        """Close a forked child's copies of all sockets, which must end with the parent, or its
        peers would wait for it. Nothing else is destroyed, which would end the parent's
        connections, too: both processes share the epoll set that watches its sockets.
        """
        keep_forever(self)
        if self._mesh is not None:
            self._mesh.close()
        if self._gloo_sockets is not None:
            self._gloo_sockets.close_in_child()

    def _nccl_group(self) -> Any:
        if self._nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            # torch ends the process at its timeout; ours comes first
            options._timeout = 2 * self._timeout + timedelta(minutes=1)
            options.is_high_priority_stream = True
            # Unlike gloo, NCCL uses the store again at its first collective, from its own threads.
            store = Prefixed("nccl", another_connection(self._store))
            self._nccl = dist.ProcessGroupNCCL(store, self.rank, len(self.ranks), options)
        return self._nccl

    def _failure(self, collective: str, error: RuntimeError) -> CommunicationError:
        """Close the connection, which makes the other ranks fail, too, and return the exception to
        raise.
        """
        interrupted, why = self._closed, str(error)
        if not interrupted and "Duplicate GPU" in why:
            interrupted = (
                "ranks share a GPU, which NCCL refuses; init_process_group(backend='gloo') moves"
                " data through the host's memory"
            )
        self._closed = self._closed or f"it failed earlier, in {collective}"
        if interrupted:
            failure = self._kind_of_end(
                f"{collective} on {self._title} failed; {interrupted} ({first_sentence(error)})"
            )
        else:
            hung_up = self._mesh.hung_up() if self._mesh is not None else ()
            # before the connections close, which would end the waits of ranks that have come
            failure = self._peers.failure(
                collective,
                self.name,
                self.ranks,
                self._place,
                error,
                self._seconds,
                {self.ranks[peer] for peer in hung_up},
            )
        self._drop()
        return failure

    def _drop(self) -> None:
        nccl, self._nccl, self._gloo, self._begun = self._nccl, None, None, []
        if self._mesh is not None:
            self._mesh.close()
        if self._gloo_sockets is not None:  # gloo closes them later, or never while it waits
            self._gloo_sockets.shut_down()
        if nccl is not None:
            nccl.abort()
