"""A wrapper that turns a store's failures into misses (S8.3), and counts of hits, misses and
failures over all processes.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import context, sharedctypes
from typing import Any, TypeVar

from bagua_ref.base.utils import readable_bytes
from bagua_ref.contrib.utils.store import Store, StoreError

__all__ = ["CacheStats", "Counters", "Guard"]

_ROWS = 256
_NAMES = ("hits", "misses", "errors", "bytes_read", "bytes_written")
_WIDTH = 1 + len(_NAMES)  # the process id, then the counts


@dataclass(frozen=True)
class CacheStats:
    """The counts that `CacheLoader.stats` returns.

    Attributes:
        hits: values that came from the cache.
        misses: values that load_fn computed.
        errors: requests that a store failed or refused, and values that were damaged or too large.
        bytes_read: encoded values read from the stores.
        bytes_written: encoded values written to the stores.

    >>> from bagua_ref.contrib.cache.guard import CacheStats
    >>> CacheStats(hits=90, misses=10, errors=0, bytes_read=1_840_000, bytes_written=204_000)
    CacheStats(hits=90, misses=10 (90.0% hits), errors=0, read 1.8 MB, written 204.0 kB)
    """

    hits: int
    misses: int
    errors: int
    bytes_read: int
    bytes_written: int

    @property
    def bytes(self) -> int:
        """Return the bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def hit_rate(self) -> float:
        """Return hits / (hits + misses), 0 before the first value."""
        return self.hits / max(1, self.hits + self.misses)

    def __repr__(self) -> str:
        return (
            f"CacheStats(hits={self.hits}, misses={self.misses} ({self.hit_rate:.1%} hits),"
            f" errors={self.errors}, read {readable_bytes(self.bytes_read)}, written"
            f" {readable_bytes(self.bytes_written)})"
        )


class Counters:
    """Counts in memory that forked and spawned children share. Each process has its own row, so
    none has to wait.

    If no row is free, a process takes over the row of one that has ended and continues its counts.
    """

    def __init__(self) -> None:
        self._table: Any = sharedctypes.RawArray("q", _ROWS * _WIDTH)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        # Shared memory can only be passed to a child that is being started: other copies count
        # separately.
        return {"_table": self._table if context.get_spawning_popen() is not None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._table = state["_table"] or sharedctypes.RawArray("q", _ROWS * _WIDTH)
        self._forget()

    def add(
        self,
        hits: int = 0,
        misses: int = 0,
        errors: int = 0,
        bytes_read: int = 0,
        bytes_written: int = 0,
    ) -> None:
        """Add to this process's counts."""
        if self._pid != os.getpid():
            self._take_row()
        at = self._at
        with self._turn:
            for place, count in enumerate(
                (hits, misses, errors, bytes_read, bytes_written), start=at
            ):
                if count:
                    self._table[place] += count

    def total(self) -> CacheStats:
        """Return the sums over all processes."""
        counts = [sum(self._table[1 + column :: _WIDTH]) for column in range(len(_NAMES))]
        return CacheStats(**dict(zip(_NAMES, counts, strict=True)))

    def _forget(self) -> None:
        self._pid, self._at, self._turn = 0, 0, threading.Lock()

    def _take_row(self) -> None:
        pid = os.getpid()
        # Sibling workers have consecutive process ids, so they begin their search at different
        # rows.
        rows = [(pid + step) % _ROWS * _WIDTH for step in range(_ROWS)]
        mine = next((row for row in rows if self._table[row] in (0, pid)), None)
        if mine is None:
            mine = next((row for row in rows if not _is_alive(self._table[row])), rows[0])
        self._table[mine] = pid
        self._forget()
        self._pid, self._at = pid, mine + 1


def _is_alive(pid: int) -> bool:
    # this also reaps ended children
    if pid in {child.pid for child in multiprocessing.active_children()}:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_T = TypeVar("_T")
_FIRST_PAUSE, _LONG_PAUSE, _LONGEST_PAUSE = 0.1, 1.0, 5.0
_SHARE_OF_TIME = 0.2
"""The largest share of time to spend on requests to a server that does not answer."""


class _Backoff:
    """The time of the next attempt: each consecutive failure doubles the pause."""

    def __init__(self) -> None:
        self._pause, self._until = 0.0, 0.0

    def has_failed(self) -> bool:
        return self._pause > 0

    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def fail(self, spent: float) -> None:
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONG_PAUSE)
        self._pause = max(self._pause, min(spent / _SHARE_OF_TIME, _LONGEST_PAUSE))
        self._until = time.monotonic() + self._pause

    def succeed(self) -> None:
        self._pause = 0.0


class Guard(Store):
    """``store`` with failures turned into misses: it finds and writes nothing, warns once, counts
    errors, and pauses.

    An unreachable store is not used during the pause. A store that refuses writes, because it is
    full, is still read.

    Args:
        store: the wrapped store.
        counters: count the failures.
    """

    def __init__(self, store: Store, counters: Counters) -> None:
        self.store, self._counters = store, counters
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "_counters": self._counters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._reading, self._writing = _Backoff(), _Backoff()
        self._warned = False

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        """Write, or do nothing if that fails."""
        if not self._writing.is_over():
            return

        def write() -> bool:
            self.store.mset(dictionary)
            return True

        if self._try(write, False):
            self._writing.succeed()
            self._counters.add(bytes_written=sum(map(len, dictionary.values())))

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read; return None for each key if that fails."""
        return self._try(lambda: self.store.mget(keys), [None] * len(keys))

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key has a value, False if that fails."""
        return self._try(lambda: self.store.contains(keys), [False] * len(keys))

    def num_keys(self) -> int:
        """Return the number of keys, 0 if that fails."""
        return self._try(self.store.num_keys, 0)

    def clear(self) -> None:
        """Delete all keys; unlike the other methods, raise if that fails."""
        self.store.clear()

    def status(self) -> bool:
        """Return whether the store answers."""
        return self.store.status()

    def shutdown(self) -> None:
        """Stop the server, if this process started it."""
        self.store.shutdown()

    def close(self) -> None:
        """Close this process's connections."""
        self.store.close()

    def _try(self, ask: Callable[[], _T], otherwise: _T) -> _T:
        if not self._reading.is_over():
            return otherwise
        started = time.monotonic()
        try:
            # it has a shorter timeout than the request
            if self._reading.has_failed() and not self.store.status():
                raise StoreError(f"{self.store} still does not answer")
            answer = ask()
        except StoreError as error:
            self._record(error, time.monotonic() - started)
            return otherwise
        self._reading.succeed()
        return answer

    def _record(self, error: StoreError, spent: float) -> None:
        (self._writing if error.refused else self._reading).fail(spent)
        self._counters.add(errors=1)
        if not self._warned:
            self._warned = True
            warnings.warn(f"cache unavailable; continuing without it: {error}", stacklevel=6)
