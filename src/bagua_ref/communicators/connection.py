"""The process groups of one communicator: made from a store, used by one thread at a time, aborted at the first failure."""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bagua_ref.communicators.rendezvous import another_connection, prefixed
from bagua_ref.communicators.watch import Watch
from bagua_ref.errors import CommunicationError, CommunicationTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

__all__ = ["Connection"]

_TICK = timedelta(milliseconds=200)  # seconds until a waiting collective notices abort() or Ctrl-C
_watch = Watch()


class Connection:
    """A gloo process group and, once it is needed, an NCCL group of the same ranks.

    Making one is collective: it returns when every rank has connected.

    Args:
        store: a store for these ranks only, through which they find each other.
        rank: the rank of this process.
        nranks: the number of ranks.
        timeout: seconds without progress after which a collective raises.
        title: its name in error messages.
    """

    def __init__(self, store: Store, rank: int, nranks: int, timeout: float, title: str) -> None:
        self._store, self._rank, self._nranks, self._title = store, rank, nranks, title
        self._timeout = timedelta(seconds=timeout)
        self._turn = threading.Lock()
        self._closed = ""
        self._kind_of_end: type[CommunicationError] = CommunicationError
        self._gloo: Any = None
        self._nccl: Any = None
        try:
            self._gloo = dist.ProcessGroupGloo(prefixed("gloo", store), rank, nranks, timeout=self._timeout)
        except RuntimeError as error:
            raise self._failure("connect", error) from None
        # The rank that serves the store must not exit before all are connected.
        self.run("connect", lambda group: [group.barrier()])

    def run(self, collective: str, start: Callable[[Any], list[Any]], over_nccl: bool = False, interruptible: bool = True) -> None:
        """Start ``collective`` on a process group and wait until it is done; with NCCL, the current stream waits, not the host.

        If NCCL does not finish within the timeout, the group is aborted, which ends its kernels, and the next call raises.

        Args:
            collective: its name, for messages.
            start: takes the process group and returns the works to wait for.
            over_nccl: whether to use NCCL instead of gloo.
            interruptible: whether the wait can be split into short ones; gloo cannot do that for send and recv.

        Raises:
            CommunicationTimeoutError: no progress within the timeout.
            CommunicationError: it failed otherwise, `abort` was called, or another thread is using it. It cannot be retried.
        """
        if not self._turn.acquire(blocking=False):
            why = self._closed or (
                "another thread is inside a collective of this communicator, and two at once would mix up their data; give each "
                "thread a group of its own (new_group)"
            )
            raise self._kind_of_end(f"{collective} on {self._title}: {why}")
        group = works = work = None
        try:
            if self._closed:
                raise self._kind_of_end(f"{collective} on {self._title}: {self._closed}")
            group = self._nccl_group() if over_nccl else self._gloo
            works = start(group)
            for work in works:
                if over_nccl:
                    work.wait()
                    _watch.add(work, self._timeout.total_seconds(), _late(self, collective))
                elif interruptible:
                    self._wait_for_gloo(work)
                else:
                    work.wait()
        except CommunicationError:
            _keep_forever(group)
            self._drop()
            raise
        except RuntimeError as error:
            # Nothing may keep the connections alive: the other ranks notice the failure when they close.
            del group, works, work
            error.__traceback__ = None
            raise self._failure(collective, error) from None
        except BaseException:  # Ctrl-C, for example: what has been started cannot be undone
            self._closed = self._closed or f"it was interrupted earlier, in {collective}"
            _keep_forever(group)
            self._drop()
            raise
        finally:
            # Freeing a work lets go of Python's lock for a moment; a thread that does so while the interpreter ends aborts the
            # process. So it is freed before abort(), which comes first then, can have the turn.
            group = works = work = None
            self._turn.release()

    def abort(self) -> None:
        """Abort the connection; operations in progress and later ones raise CommunicationError."""
        self._closed = self._closed or "it was aborted or its process group destroyed"
        # A collective in progress notices this within a tick and drops the groups itself.
        if self._turn.acquire(timeout=5 * _TICK.total_seconds()):
            self._drop()
            self._turn.release()

    def _wait_for_gloo(self, work: Any) -> None:
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
                    raise CommunicationError(f"a collective on {self._title} was aborted: {self._closed}") from None

    def give_up_late(self, collective: str) -> None:
        """Abort the connection because ``collective`` has not finished within the timeout."""
        if not self._closed:
            self._kind_of_end = CommunicationTimeoutError
            self._closed = f"{collective} was not done within {self._timeout.total_seconds():g} s; a rank has not come, or has died"
        self._drop()

    def _nccl_group(self) -> Any:
        if self._nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 2 * self._timeout + timedelta(minutes=1)  # torch ends the process at its timeout; ours comes first
            options.is_high_priority_stream = True
            # Unlike gloo, NCCL uses the store again at its first collective, from its own threads.
            store = prefixed("nccl", another_connection(self._store))
            self._nccl = dist.ProcessGroupNCCL(store, self._rank, self._nranks, options)
        return self._nccl

    def _failure(self, collective: str, error: RuntimeError) -> CommunicationError:
        """Close for good, which the other ranks notice, and return the exception to raise."""
        self._closed = self._closed or f"it failed earlier, in {collective}"
        self._drop()
        why = _reason(error)
        if re.search(r"time(d )?out", why, re.IGNORECASE):
            limit = self._timeout.total_seconds()
            return CommunicationTimeoutError(f"{collective} on {self._title}: a rank has not come within {limit:g} s ({why})")
        return CommunicationError(f"{collective} on {self._title} failed; a rank has died or left ({why})")

    def _drop(self) -> None:
        nccl, self._nccl, self._gloo = self._nccl, None, None
        if nccl is not None:
            nccl.abort()


def _late(connection: Connection, collective: str) -> Callable[[], None]:
    """Return a function that gives up ``connection`` if it still exists."""
    weak = weakref.ref(connection)

    def give_up() -> None:
        found = weak()
        if found is not None:
            found.give_up_late(collective)

    return give_up


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of torch's message, without the source location."""
    text = re.sub(r"^\[[^\]]*\.(cc|cpp):\d+\]\s*", "", str(error)) or type(error).__name__
    return text.split(". This is typically", 1)[0].splitlines()[0].rstrip(".")


def _keep_forever(group: Any) -> None:
    """Keep ``group`` until the process ends: destroying it joins its threads, one of which may be waiting for a peer."""
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
