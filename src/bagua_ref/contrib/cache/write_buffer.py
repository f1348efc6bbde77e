"""A buffer of encoded values that are written to the stores together, or when the process ends (S8.2)."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Mapping
from multiprocessing import util
from typing import Any

from torch.utils.data import get_worker_info

from bagua_ref.contrib.utils.store import Store

__all__ = ["WriteBuffer"]

_FLUSH_PRIORITY = 10
"""The priority of writing the rest at exit: before the servers stop."""

_waiting: weakref.WeakSet[WriteBuffer] = weakref.WeakSet()
"""Buffers of this process that are written when it receives SIGTERM."""


class WriteBuffer:
    """Up to ``size`` values to be written together. They belong to this process: a forked child starts with none.

    The rest is written when the process ends: at the interpreter's exit; at the end of `multiprocessing` children, which skip
    `atexit` handlers; and on SIGTERM, which ends daemon children such as DataLoader workers.

    Args:
        store: the store to write to; it never raises.
        size: the number of values to collect.
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
        """Return the buffered value of ``key``, or None."""
        return self._values.get(key) if self._values and self._pid == os.getpid() else None

    def put(self, values: Mapping[str, bytes], flush: bool = False) -> None:
        """Add ``values``; write everything if the buffer is then full, or if asked to."""
        if self._pid != os.getpid():
            self._reset()
            self._pid = os.getpid()
            self._write_at_exit()
        with self._turn:
            self._values.update(values)
        if flush or len(self._values) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write the buffered values. If that fails, drop them: they can be computed again, and must not pile up."""
        if self._pid != os.getpid() or not self._values:
            return
        _write(self._store, self._values, self._turn, self._flushing)

    def _write_at_exit(self) -> None:
        # This also runs when the buffer is garbage, so it must not refer to the buffer.
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
            store.mset(batch)  # until then they can be read from the buffer
        with turn:
            for key, value in batch.items():
                if values.get(key) is value:
                    del values[key]


def _terminate(number: int, frame: Any) -> None:
    """Write the buffered values, then end as the process would have: torch's workers with success, others by the signal."""
    for buffer in list(_waiting):
        if buffer._values and buffer._pid == os.getpid():
            # The interrupted code may hold locks and wait for a reply on its connection, so use a copy, which has neither.
            copy: Store = pickle.loads(pickle.dumps(buffer._store))  # noqa: S301 # our own object
            copy.mset(dict(buffer._values))
    if get_worker_info() is not None:
        os._exit(0)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
