"""A wrapper that turns a store's failures into misses (S8.3)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from bagua_ref.contrib.cache.counters import Counters
from bagua_ref.contrib.utils.store import Store, StoreError

__all__ = ["Guard"]

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
    """``store`` with failures turned into misses: it finds and writes nothing, warns once, counts errors, and pauses.

    An unreachable store is not used during the pause. A store that refuses writes, because it is full, is still read.

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
            if self._reading.has_failed() and not self.store.status():  # it has a shorter timeout than the request
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
