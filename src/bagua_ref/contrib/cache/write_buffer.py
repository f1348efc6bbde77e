"""Encoded values on their way to the stores, and how the last of them get there when a process ends (S8.2)."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bagua_ref.contrib.utils.store import Store

__all__ = ["WriteBuffer"]

_FLUSH_PRIORITY = 10
"""Of writing the rest at exit: before the servers stop."""

_waiting: weakref.WeakSet[WriteBuffer] = weakref.WeakSet()
"""Buffers of this process that are written when it is told to terminate."""


class WriteBuffer:
    """Up to ``size`` values that wait to be written together. They belong to this process: a fork begins with none.

    The rest is written when the process ends: as interpreters do, as children of `multiprocessing` do, which skip the handlers
    of `atexit`, and as daemon children do, such as DataLoader workers that nobody waited for, which are sent SIGTERM.

    Args:
        store: where to write; it never raises.
        size: how many values to collect.
    """

    def __init__(self, store: Store, size: int) -> None:
        self._store, self._size = store, size
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {"_store": self._store, "_size": self._size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._pid = 0
        self._values: dict[str, bytes] = {}
        self._turn, self._flushing = threading.Lock(), threading.Lock()

    def get(self, key: str) -> bytes | None:
        """Return the value that waits under ``key``, if one does."""
        return self._values.get(key) if self._values and self._pid == os.getpid() else None

    def put(self, values: Mapping[str, bytes], flush: bool = False) -> None:
        """Take ``values``; write everything if the buffer is then full, or if asked to."""
        if self._pid != os.getpid():
            self._reset()
            self._pid = os.getpid()
            self._write_at_exit()
        with self._turn:
            self._values.update(values)
        if flush or len(self._values) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write what waits. What cannot be written is dropped: it can be made again, and must not pile up."""
        if self._pid != os.getpid() or not self._values:
            return
        _write(self._store, self._values, self._turn, self._flushing)

    def _write_at_exit(self) -> None:
        # Runs also when the buffer is garbage, so it must not hold the buffer itself.
        rest = (self._store, self._values, self._turn, self._flushing)
        util.Finalize(self, _write, rest, exitpriority=_FLUSH_PRIORITY)
        if not multiprocessing.current_process().daemon or threading.current_thread() is not threading.main_thread():
            return
        _waiting.add(self)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)


def _write(store: Store, values: dict[str, bytes], turn: threading.Lock, flushing: threading.Lock) -> None:
    with flushing:
        with turn:
            batch = dict(values)
        if batch:
            store.mset(batch)  # meanwhile they can still be read from the buffer
        with turn:
            for key, value in batch.items():
                if values.get(key) is value:
                    del values[key]


def _terminate(number: int, frame: Any) -> None:
    """Write what waits, and end as this process would have: torch's workers with success, others by the signal."""
    for buffer in list(_waiting):
        if buffer._values and buffer._pid == os.getpid():
            # The interrupted code may hold every lock, and wait for an answer on its connection: a copy has none of them.
            copy: Store = pickle.loads(pickle.dumps(buffer._store))  # noqa: S301
            copy.mset(dict(buffer._values))
    if get_worker_info() is not None:
        os._exit(0)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
