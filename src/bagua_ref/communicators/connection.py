"""The life of one communicator's process groups: made from a store, used by one thread at a time, given up at the first failure."""

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

_TICK = timedelta(milliseconds=200)  # how soon a waiting collective notices abort() or Ctrl-C
_watch = Watch()


class Connection:
    """A gloo process group and, from its first use on, a NCCL one, between the same ranks.

    Collective: returns when every rank has connected.

    Args:
        store: where the ranks find each other, theirs alone.
        rank: this process, of ``nranks``.
        nranks: how many there are.
        timeout: seconds without progress after which a collective raises.
        title: what error messages call it.
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
        # Nobody may leave, and take the store along, before all are connected.
        self.run("connect", lambda group: [group.barrier()])

    def run(self, collective: str, start: Callable[[Any], list[Any]], over_nccl: bool = False, interruptible: bool = True) -> None:
        """Start ``collective`` on a process group and wait until it is done; over NCCL the current stream waits, not the host.

        What NCCL does not finish within the timeout is given up then, which ends its kernels, and the next call raises.

        Args:
            collective: its name, for messages.
            start: takes the process group, returns works to wait for.
            over_nccl: which group.
            interruptible: whether gloo can wait for these works a little at a time; it cannot for send and recv.

        Raises:
            CommunicationTimeoutError: no progress within the timeout.
            CommunicationError: it failed otherwise, `abort` was called, or two threads are at it; none of it can be repeated.
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
            # Nothing may keep the connections alive: that they close is what tells the other ranks.
            del group, works, work
            error.__traceback__ = None
            raise self._failure(collective, error) from None
        except BaseException:  # Ctrl-C, say: what is under way cannot be taken back
            self._closed = self._closed or f"it was interrupted before, in {collective}"
            _keep_forever(group)
            self._drop()
            raise
        finally:
            # Freeing a work lets go of Python's lock for a moment; a thread that does so while the interpreter ends aborts the
            # process. So it is freed before abort(), which comes first then, can have the turn.
            group = works = work = None
            self._turn.release()

    def abort(self) -> None:
        """Give the connection up; what is under way and all that comes later raises CommunicationError."""
        self._closed = self._closed or "it was aborted or its process group destroyed"
        # A collective under way notices within a tick, and drops the groups itself.
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
                    work.wait()  # raises what went wrong, if anything did
                    return
                if self._closed:
                    del work  # not to be kept, and freed late, by the error's traceback
                    raise CommunicationError(f"a collective on {self._title} was given up: {self._closed}") from None

    def give_up_late(self, collective: str) -> None:
        """Give the connection up, as ``collective`` was started and has not been done within the timeout."""
        if not self._closed:
            self._kind_of_end = CommunicationTimeoutError
            self._closed = f"{collective} was not done within {self._timeout.total_seconds():g} s; a rank has not come, or has died"
        self._drop()

    def _nccl_group(self) -> Any:
        if self._nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 2 * self._timeout + timedelta(minutes=1)  # torch ends the process then; ours comes first
            options.is_high_priority_stream = True
            # Unlike gloo, NCCL comes back to the store at its first collective, and from threads of its own.
            store = prefixed("nccl", another_connection(self._store))
            self._nccl = dist.ProcessGroupNCCL(store, self._rank, self._nranks, options)
        return self._nccl

    def _failure(self, collective: str, error: RuntimeError) -> CommunicationError:
        """Close for good, which tells the other ranks, and return what to raise."""
        self._closed = self._closed or f"it failed before, in {collective}"
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
    """Return what gives up ``connection``, if it is there still."""
    weak = weakref.ref(connection)

    def give_up() -> None:
        found = weak()
        if found is not None:
            found.give_up_late(collective)

    return give_up


def _reason(error: RuntimeError) -> str:
    """Return the first sentence of torch's message, without the place in torch's sources."""
    text = re.sub(r"^\[[^\]]*\.(cc|cpp):\d+\]\s*", "", str(error)) or type(error).__name__
    return text.split(". This is typically", 1)[0].splitlines()[0].rstrip(".")


def _keep_forever(group: Any) -> None:
    """Leave ``group`` to the end of the process: destroying it joins its threads, one of which may be waiting for a peer."""
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
