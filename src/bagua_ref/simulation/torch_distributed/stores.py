"""The stores of `torch.distributed` in a simulated world: one per address, whose waits take virtual
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from bagua_ref.base.runtime import current_world
from bagua_ref.simulation.scheduler import Scheduler
from bagua_ref.simulation.tasks import Ticket
from bagua_ref.simulation.torch_distributed.work import seconds_of

_READS = ("check", "list_keys", "num_keys", "queue_len")


def shared_stores(scheduler: Scheduler) -> Callable[..., SimulatedStore]:
    """Return a function that opens the stores of one run: it takes the name of torch's class, and
    its arguments.
    """
    shared: dict[Any, tuple[Store, list[Ticket]]] = {}
    ports = count(29_501)

    def open_store(kind: str, *args: Any, **options: Any) -> SimulatedStore:
        if kind == "PrefixStore":
            opened = _PREFIXED(*args, **options)
        else:
            free = next(ports)  # no store has this one
            place, timeout = _ADDRESSES[kind](*args, **options)
            address = (kind, *(free if part == 0 else part for part in place))
            store, waiting = shared.setdefault(address, (HashStore(), []))
            opened = SimulatedStore(
                scheduler, store, waiting, address, timeout or timedelta(seconds=300)
            )
        opened.kind = kind
        return opened

    return open_store


_ADDRESSES: dict[str, Callable[..., tuple[tuple[Any, ...], Any]]] = {
    "TCPStore": lambda host_name, port=0, world_size=None, is_master=False, timeout=None, *rest, **options: (
        (host_name, port),
        timeout,
    ),
    "FileStore": lambda file_name, world_size=-1: ((str(file_name),), None),
    "HashStore": lambda: ((current_world().identity.rank, 0), None),
}
"""Functions from the arguments of torch's classes to the address, in which 0 is a free port, and
the timeout.
"""


_PREFIXED: Callable[..., SimulatedStore] = lambda prefix, store: store._client(  # noqa: E731
    f"{store._prefix}{prefix}/"
)


class SimulatedStore(Store):
    """A client of a simulated store.

    Args:
        scheduler: scheduler of the ranks' threads.
        store: underlying store, shared by all clients of the address; it is only asked for keys
            that it has.
        waiting: tickets of waiting threads, shared like ``store``.
        address: address of the store.
        timeout: the limit of waits, in virtual time.
        prefix: prefix of the client's keys.
    """

    kind = "Store"
    """The name of the replaced torch class."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: Store,
        waiting: list[Ticket],
        address: Any,
        timeout: timedelta,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self._scheduler, self._root, self._waiting = scheduler, store, waiting
        self._address, self._timeout, self._prefix = address, timeout, prefix
        self._store = PrefixStore(prefix[:-1], store) if prefix else store

    def __repr__(self) -> str:
        return f"SimulatedStore({self._address!r}, prefix={self._prefix!r})"

    def _client(self, prefix: str) -> SimulatedStore:
        return SimulatedStore(
            self._scheduler, self._root, self._waiting, self._address, self._timeout, prefix
        )

    @property
    def path(self) -> str:
        """The address and prefix of the keys."""
        return f"{self._address}/{self._prefix}"

    # What TCPStore and PrefixStore have.

    @property
    def host(self) -> str:
        """The host of a TCPStore's address."""
        return str(self._address[1])

    @property
    def port(self) -> int:
        """The port of a TCPStore's address."""
        return int(self._address[2])

    @property
    def underlying_store(self) -> SimulatedStore:
        """The same store without prefixes."""
        return self._client("")

    @property
    def timeout(self) -> timedelta:
        """The limit of waits, in virtual time."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of waits, in virtual time."""
        self._timeout = timeout

    def clone(self) -> SimulatedStore:
        """Return another client of the same keys."""
        return self._client(self._prefix)

    def has_extended_api(self) -> bool:
        """Return True: appends and operations on several keys are supported."""
        return True

    # What waits.

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys and return their values."""
        return [self.get(key) for key in keys]

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first item of a queue; with ``block``, wait for it."""
        is_ready = lambda: not block or self._store.queue_len(key) > 0  # noqa: E731
        self._wait_until(is_ready, f"for the store's queue {key!r}", self._timeout)
        return self._store.queue_pop(key, False)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; raise DistStoreError after ``timeout`` of virtual time, by
        default the store's.
        """
        what = f"for the store's key {', '.join(self._prefix + key for key in keys)}"
        self._wait_until(lambda: self._store.check(list(keys)), what, timeout or self._timeout)

    def _wait_until(self, condition: Callable[[], bool], what: str, timeout: timedelta) -> None:
        self._scheduler.yield_()
        deadline = self._scheduler.time + (seconds_of(timeout) or 0.0)
        while not condition():
            ticket = self._scheduler.ticket(what)
            self._waiting.append(ticket)
            if (
                not self._scheduler.wait(ticket, deadline - self._scheduler.time, passes=True)
                and not condition()
            ):
                raise dist.DistStoreError(
                    f"wait timeout after {timeout.total_seconds():g} s, waiting {what}"
                )

    def _pass_on(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method that never blocks, and wake the threads that may be waiting for keys
        written by it.
        """
        self._scheduler.poll() if name == "check" else self._scheduler.yield_()
        result = getattr(self._store, name)(*args, **options)
        while name not in _READS and self._waiting:
            self._scheduler.grant(self._waiting.pop(0))
        return result


for _name in (
    *_READS,
    "add",
    "append",
    "compare_set",
    "delete_key",
    "multi_set",
    "queue_push",
    "set",
):
    setattr(SimulatedStore, _name, functools.partialmethod(SimulatedStore._pass_on, _name))
