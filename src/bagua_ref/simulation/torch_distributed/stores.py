"""The stores of `torch.distributed` in a simulated world: one dictionary per address, whose waits take virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_ref.communicators.scheduler import Scheduler
from bagua_ref.communicators.tasks import Ticket
from bagua_ref.simulation.torch_distributed.work import seconds_of

__all__ = ["SharedStores", "SimulatedStore"]

_DEFAULT_TIMEOUT = timedelta(seconds=300)


class _Contents:
    """The keys of one store, and the threads that wait for some of them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, list[bytes]] = {}
        self.waiting: list[Ticket] = []


class SharedStores:
    """The stores of one run, by address."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._contents: dict[Any, _Contents] = {}
        self._ports = 29_500

    def open(self, address: Any, timeout: timedelta | None = None) -> SimulatedStore:
        """Return a client of the store at ``address``, which is made if there is none."""
        contents = self._contents.setdefault(address, _Contents())
        return SimulatedStore(self.scheduler, contents, address, "", timeout or _DEFAULT_TIMEOUT)

    def free_port(self) -> int:
        """Return a port that no store of the run has."""
        self._ports += 1
        return self._ports


class SimulatedStore(Store):
    """A client of a simulated store; keys have a prefix."""

    kind = "Store"
    """The name of torch's class that it stands for."""

    def __init__(self, scheduler: Scheduler, contents: _Contents, address: Any, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        self._scheduler, self._contents, self._address, self._prefix = scheduler, contents, address, prefix
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"SimulatedStore({self._address!r}, prefix={self._prefix!r})"

    def prefixed(self, prefix: str) -> SimulatedStore:
        """Return a client whose keys have another prefix before this one's."""
        return SimulatedStore(self._scheduler, self._contents, self._address, f"{self._prefix}{prefix}/", self._timeout)

    @property
    def path(self) -> str:
        """Address and prefix."""
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
        return SimulatedStore(self._scheduler, self._contents, self._address, "", self._timeout)

    @property
    def timeout(self) -> timedelta:
        """The limit of waits, in virtual time."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of waits, in virtual time."""
        self._timeout = timeout

    def clone(self) -> SimulatedStore:
        """Return another client of the same keys."""
        return SimulatedStore(self._scheduler, self._contents, self._address, self._prefix, self._timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key, and wake those who wait."""
        self._scheduler.yield_()
        self._contents.values[self._prefix + key] = _bytes(value)
        self._wake()

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._contents.values[self._prefix + key]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        self._scheduler.yield_()
        total = int(self._contents.values.get(self._prefix + key, b"0")) + amount
        self._contents.values[self._prefix + key] = str(total).encode()
        self._wake()
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key's value."""
        self.set(key, self._contents.values.get(self._prefix + key, b"") + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if its value is ``expected``, or if it is missing and ``expected`` is empty; return its value."""
        self._scheduler.yield_()
        own, current = self._prefix + key, self._contents.values.get(self._prefix + key)
        if current == _bytes(expected) or (current is None and not expected):
            current = self._contents.values[own] = _bytes(desired)
            self._wake()
        return _bytes(expected) if current is None else current

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        self._scheduler.poll()
        return all(self._prefix + key in self._contents.values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was set."""
        self._scheduler.yield_()
        return self._contents.values.pop(self._prefix + key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys in the whole store."""
        self._scheduler.yield_()
        return len(self._contents.values)

    def list_keys(self) -> list[str]:
        """Return the keys in the whole store."""
        self._scheduler.yield_()
        return list(self._contents.values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys and return their values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append to a queue."""
        self._scheduler.yield_()
        self._contents.queues.setdefault(self._prefix + key, []).append(_bytes(value))
        self._wake()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first item of a queue, which is waited for unless ``block`` is False."""
        queues, own = self._contents.queues, self._prefix + key
        self._wait_until(lambda: not block or bool(queues.get(own)), f"for the store's queue {key!r}", self._timeout)
        if not queues.get(own):
            raise dist.QueueEmptyError(f"queue {key!r} is empty")
        return queues[own].pop(0)

    def queue_len(self, key: str) -> int:
        """Return the length of a queue."""
        self._scheduler.yield_()
        return len(self._contents.queues.get(self._prefix + key, ()))

    def has_extended_api(self) -> bool:
        """Return True: appends and operations on several keys are there."""
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; raise DistStoreError after ``timeout``, or the store's, of virtual time."""
        values, own = self._contents.values, [self._prefix + key for key in keys]
        self._wait_until(
            lambda: all(key in values for key in own), f"for the store's key {', '.join(own)}", timeout or self._timeout
        )

    def _wait_until(self, condition: Any, what: str, timeout: timedelta) -> None:
        self._scheduler.yield_()
        deadline = self._scheduler.time + (seconds_of(timeout) or 0.0)
        while not condition():
            ticket = self._scheduler.ticket(what)
            self._contents.waiting.append(ticket)
            if not self._scheduler.wait(ticket, deadline - self._scheduler.time, passes=True) and not condition():
                raise dist.DistStoreError(f"wait timeout after {timeout.total_seconds():g} s, waiting {what}")

    def _wake(self) -> None:
        waiting, self._contents.waiting = self._contents.waiting, []
        for ticket in waiting:
            self._scheduler.grant(ticket)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
