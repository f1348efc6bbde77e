"""Counts of cache hits and misses over all processes that use a loader."""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import dataclass
from multiprocessing import context, sharedctypes
from typing import Any

from bagua_ref.base.utils import readable_bytes

__all__ = ["CacheStats", "Counters"]

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

    >>> from bagua_ref.contrib.cache.counters import CacheStats
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
            f"CacheStats(hits={self.hits}, misses={self.misses} ({self.hit_rate:.1%} hits), errors={self.errors}, "
            f"read {readable_bytes(self.bytes_read)}, written {readable_bytes(self.bytes_written)})"
        )


class Counters:
    """Counts in memory that forked and spawned children share. Each process has its own row, so none has to wait.

    If no row is free, a process takes over the row of one that has ended and continues its counts.
    """

    def __init__(self) -> None:
        self._table: Any = sharedctypes.RawArray("q", _ROWS * _WIDTH)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        # Shared memory can only be passed to a child that is being started: other copies count separately.
        return {"_table": self._table if context.get_spawning_popen() is not None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._table = state["_table"] or sharedctypes.RawArray("q", _ROWS * _WIDTH)
        self._forget()

    def add(self, hits: int = 0, misses: int = 0, errors: int = 0, bytes_read: int = 0, bytes_written: int = 0) -> None:
        """Add to this process's counts."""
        if self._pid != os.getpid():
            self._take_row()
        at = self._at
        with self._turn:
            for place, count in enumerate((hits, misses, errors, bytes_read, bytes_written), start=at):
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
        # Sibling workers have consecutive process ids, so they begin their search at different rows.
        rows = [(pid + step) % _ROWS * _WIDTH for step in range(_ROWS)]
        mine = next((row for row in rows if self._table[row] in (0, pid)), None)
        if mine is None:
            mine = next((row for row in rows if not _is_alive(self._table[row])), rows[0])
        self._table[mine] = pid
        self._forget()
        self._pid, self._at = pid, mine + 1


def _is_alive(pid: int) -> bool:
    if pid in {child.pid for child in multiprocessing.active_children()}:  # this also reaps ended children
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
