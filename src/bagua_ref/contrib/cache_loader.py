"""A cache in Redis for values that are slow to compute (S8)."""

from __future__ import annotations

import multiprocessing
import operator
import os
import pickle
import reprlib
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import get_worker_info

from bagua_ref.base.not_provided import explain_missing
from bagua_ref.contrib.cache.codec import DamagedValueError, TooLargeError, decode, encode
from bagua_ref.contrib.cache.guard import CacheStats, Counters, Guard
from bagua_ref.contrib.utils.redis_store import FakeRedisStore, RedisStore
from bagua_ref.contrib.utils.store import ClusterStore, Store

__all__ = ["CacheLoader"]

BACKENDS: dict[str, type[RedisStore]] = {"redis": RedisStore, "fakeredis": FakeRedisStore}
_FLUSH_PRIORITY = 10
"""The priority of writing the rest at exit: before the servers stop."""

_waiting: weakref.WeakSet[WriteBuffer] = weakref.WeakSet()
"""Buffers of this process that are written when it receives SIGTERM."""


class CacheLoader:
    """Caches the values of an expensive function in a key-value store, under
    ``"{dataset_name}_{key}"`` (S8.1).

    If a store is down, full or has damaged values, that costs time but raises nothing: ``load_fn``
    computes the values (S8.3). Loaders can be sent to DataLoader workers, forked or spawned; each
    process opens its own connections. Make the first loader of a job on every rank, in its main
    process.

    Args:
        backend: "redis", a real server, or "fakeredis", a small one in Python for laptops and
            tests.
        dataset_name: loaders with the same name share values; give each dataset its own name.
        writer_buffer_size: the number of values to collect before they are written (S8.2).
        allow_pickle: whether objects other than tensors, arrays, numbers, str, bytes and tuples,
            lists and dicts of them may be stored with pickle; None: on servers that this job
            started, not on ``hosts`` (S8.5).
        kwargs: for `RedisStore`: ``hosts``, ``cluster_mode``, ``capacity_per_node``, ``timeout``.

    Raises:
        ValueError: an argument is out of range, or a server in ``hosts`` needs a password or is
            part of a Redis Cluster.
        TypeError: an argument has another type.
        BackendUnavailableError: the backend cannot run here; the message names alternatives.

    >>> from bagua_ref.contrib import CacheLoader
    >>> with CacheLoader(backend="fakeredis", dataset_name="squares") as loader:
    ...     print([loader.get(key, lambda key: key * key) for key in (3, 4, 3)], loader.num_keys(), loader.stats().hits)
    [9, 16, 9] 2 1
    """

    def __init__(
        self,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        *,
        allow_pickle: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} must be one of {', '.join(map(repr, BACKENDS))}")
        if not isinstance(dataset_name, str):
            raise TypeError(
                f"dataset_name={dataset_name!r} is a {type(dataset_name).__name__}; it must be"
                " a str"
            )
        if not isinstance(writer_buffer_size, int) or writer_buffer_size < 1:
            raise ValueError(f"writer_buffer_size={writer_buffer_size!r} must be 1 or more values")
        if backend == "fakeredis" and kwargs.get("hosts") is not None:
            raise ValueError("hosts= names running Redis servers; it needs backend='redis'")
        if backend == "fakeredis":
            kwargs.pop("hosts", None)
        self.backend, self.dataset_name = backend, dataset_name
        self.store: RedisStore = BACKENDS[backend](**kwargs)
        self._allow_pickle = (
            kwargs.get("hosts") is None if allow_pickle is None else bool(allow_pickle)
        )
        self._counters = Counters()
        self._guarded = ClusterStore([Guard(store, self._counters) for store in self.store.stores])
        self._buffer = WriteBuffer(self._guarded, writer_buffer_size)
        self._has_warned = False

    def __repr__(self) -> str:
        return f"CacheLoader({self.store!r}, dataset_name={self.dataset_name!r})"

    def __enter__(self) -> CacheLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """Return the value of ``key``: from the cache, or else ``load_fn(key)``, which is then
        cached (S8.2).

        Args:
            key: the name of the value: a str, bytes, int, float, bool, None or path, or a tuple or
                list of these, by its text, so that ``1`` and ``"1"`` are one key (S8.1). Integers
                and floats of NumPy and integer tensors count as Python's.
            load_fn: computes the value from the key; its exceptions are not caught.

        Raises:
            TypeError: the key is something else, the value is a NumPy structured array, or it needs
                pickle without permission (S8.5).
        """
        return self.get_many([key], lambda keys: [load_fn(keys[0])], flush=False)[0]

    def get_many(
        self,
        keys: Sequence[Any],
        load_many: Callable[[list[Any]], Iterable[Any]],
        flush: bool = True,
    ) -> list[Any]:
        """Return the values of ``keys`` in order, with one ``mget`` for each store and one ``mset``
        for missing values.

        Args:
            keys: the names of the values, as in `get`; they may repeat.
            load_many: returns the values of a list of distinct keys, as any iterable.
            flush: whether to write new values now instead of when the buffer is full.

        Raises:
            TypeError: see `get`.
            ValueError: ``load_many`` returned a different number of values.
        """
        names = [self._stored_name(key) for key in keys]
        values, missing = self._look_up(names)
        if not missing:
            return values
        first: dict[str, int] = {}
        for place in missing:
            first.setdefault(names[place], place)
        made = list(load_many([keys[place] for place in first.values()]))
        if len(made) != len(first):
            raise ValueError(f"load_many returned {len(made)} values for {len(first)} keys")
        new: dict[str, bytes] = {}
        for (name, place), value in zip(first.items(), made, strict=True):
            values[place] = value
            try:
                new[name] = encode(value, self._allow_pickle)
            except TooLargeError as error:
                self._record(error)
        for place in missing:
            # a key that repeats gets separate values, as two samples do
            if place != first[names[place]]:
                again = new.get(names[place])
                values[place] = (
                    next(iter(load_many([keys[place]])))
                    if again is None
                    else decode(again, self._allow_pickle)
                )
        self._counters.add(misses=len(missing))
        self._buffer.put(new, flush)
        return values

    def contains(self, keys: Sequence[Any]) -> list[bool]:
        """Return which of ``keys`` have a value in the stores, without reading it; False if a store
        does not answer.
        """
        self.flush()
        return self._guarded.contains([self._stored_name(key) for key in keys])

    def num_keys(self) -> int:
        """Return the number of keys of all datasets in all stores that answer, after writing
        buffered values (S8.2).
        """
        self.flush()
        return self._guarded.num_keys()

    def flush(self) -> None:
        """Write the values that this process has buffered."""
        self._buffer.flush()

    def close(self) -> None:
        """Write buffered values and close this process's connections; servers keep running, and the
        loader can be used again.
        """
        self.flush()
        self._guarded.close()

    def stats(self) -> CacheStats:
        """Return the counts of this process and of all DataLoader workers that it started with this
        loader (S8.3).
        """
        return self._counters.total()

    def _stored_name(self, key: Any) -> str:
        """Return the name of ``key``'s value in the stores, unique for each dataset name and key
        (S8.1).
        """
        dataset = self.dataset_name.replace("%", "%25").replace("_", "%5F")
        plain = _plain(key)
        return f"{dataset}_{plain if isinstance(plain, str) else repr(plain)}"

    def _look_up(self, names: list[str]) -> tuple[list[Any], list[int]]:
        """Return the values that are cached, and the positions of those that are not."""
        waiting = [self._buffer.get(name) for name in names]
        asked = [name for name, data in zip(names, waiting, strict=True) if data is None]
        answers = self._guarded.mget(asked) if asked else []
        # free each reply once it is decoded, so that the next value reuses warm memory
        answers.reverse()
        values: list[Any] = []
        missing: list[int] = []
        read = 0
        for place, data in enumerate(waiting):
            if data is None:
                data = answers.pop()
                read += len(data or b"")
            value = None
            if data is None:
                missing.append(place)
            else:
                try:
                    value = decode(data, self._allow_pickle)
                except DamagedValueError as error:
                    self._record(error, names[place])
                    missing.append(place)
            values.append(value)
        self._counters.add(hits=len(names) - len(missing), bytes_read=read)
        return values, missing

    def _record(self, error: ValueError, name: str = "") -> None:
        self._counters.add(errors=1)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{f'{name!r} is computed again: ' if name else ''}{error}", stacklevel=5)


def _plain(key: Any) -> Any:
    """Return a key in Python's own types, whose text has all that they are (S8.1).

    Raises:
        TypeError: it is something else, whose text need not: that of an array leaves out elements,
            for example.
    """
    if key is None or type(key) in (str, int, bool, float, bytes):
        return key
    if isinstance(key, (tuple, list)):
        items = map(_plain, key)
        return tuple(items) if isinstance(key, tuple) else list(items)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes(key)
    # a longdouble may have more digits
    if isinstance(key, (float, np.floating)) and (float(key) == key or key != key):
        return float(key)
    if isinstance(key, os.PathLike):
        return _plain(os.fspath(key))
    try:
        return operator.index(key)
    except TypeError:
        raise TypeError(
            f"a key of a cache cannot be or have {reprlib.repr(key)}, a"
            f" {type(key).__module__}.{type(key).__qualname__}: its text need not identify it. Keys"
            " are str, bytes, int, float, bool, None, os.PathLike, and tuples or lists of these;"
            " take what names the value, such as an index, a path or several in a tuple, or"
            " key.tolist() of an array or a tensor"
        ) from None


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("contrib.cache_loader")


class WriteBuffer:
    """Up to ``size`` values to be written together. They belong to this process: a forked child
    starts with none.

    The rest is written when the process ends: at the interpreter's exit; at the end of
    `multiprocessing` children, which skip `atexit` handlers; and on SIGTERM, which ends daemon
    children such as DataLoader workers.

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
        """Write the buffered values. If that fails, drop them: they can be computed again, and must
        not pile up.
        """
        if self._pid != os.getpid() or not self._values:
            return
        _write(self._store, self._values, self._turn, self._flushing)

    def _write_at_exit(self) -> None:
        # This also runs when the buffer is garbage, so it must not refer to the buffer.
        rest = (self._store, self._values, self._turn, self._flushing)
        util.Finalize(self, _write, rest, exitpriority=_FLUSH_PRIORITY)
        if (
            not multiprocessing.current_process().daemon
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        _waiting.add(self)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)


def _write(
    store: Store, values: dict[str, bytes], turn: threading.Lock, flushing: threading.Lock
) -> None:
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
    """Write the buffered values, then end as the process would have: torch's workers with success,
    others by the signal.
    """
    for buffer in list(_waiting):
        if buffer._values and buffer._pid == os.getpid():
            # The interrupted code may hold locks and wait for a reply on its connection, so use a
            # copy, which has neither.
            copy: Store = pickle.loads(pickle.dumps(buffer._store))  # noqa: S301 # our own object
            copy.mset(dict(buffer._values))
    if get_worker_info() is not None:
        os._exit(0)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
