"""A Redis cache for values that are slow to compute (S8)."""

from __future__ import annotations

import multiprocessing
import operator
import os
import reprlib
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import util
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash
from torch.utils.data import get_worker_info

from bagua_ref.base.not_provided import explain_missing
from bagua_ref.contrib.cache.client import of_signal_handler
from bagua_ref.contrib.cache.codec import DamagedValueError, TooLargeError, decode, encode
from bagua_ref.contrib.utils.redis_store import FakeRedisStore, RedisStore, commands, existing

__all__ = ["CacheLoader", "CacheStats"]

BACKENDS: dict[str, type[RedisStore]] = {"redis": RedisStore, "fakeredis": FakeRedisStore}
_FLUSH_PRIORITY = 10  # at exit, the rest is written before servers stop
# Pauses between requests to a server that fails. A failure that takes time, such as a timeout, has a
# longer one, so that a dead host costs a few percent of the time at most.
_FIRST_PAUSE, _LONG_PAUSE, _LONGEST_PAUSE, _TIMES_SPENT = 0.1, 1.0, 30.0, 20

_T = TypeVar("_T")


@dataclass(frozen=True)
class CacheStats:
    """Counters of one process, as returned by `CacheLoader.stats`.

    Attributes:
        hits: number of values read from the cache.
        misses: number of values computed by load_fn.
        errors: number of failed or refused requests, and of damaged or too large values.
        bytes_read: bytes of encoded values read from the servers.
        bytes_written: bytes of encoded values written to the servers.

    >>> from bagua_ref.contrib.cache_loader import CacheStats
    >>> CacheStats(hits=90, misses=10, errors=0, bytes_read=1_840_000, bytes_written=204_000)
    CacheStats(hits=90, misses=10, errors=0, bytes_read=1840000, bytes_written=204000)
    """

    hits: int = 0
    misses: int = 0
    errors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def hit_rate(self) -> float:
        """The hit rate, hits / (hits + misses); 0 before the first value."""
        return self.hits / max(1, self.hits + self.misses)


class CacheLoader:
    """Cache for the values of an expensive function in a key-value store, under
    ``"{dataset_name}_{key}"`` (S8.1).

    If a server is down or full, or has damaged values, no error is raised: ``load_fn`` computes the
    values, which takes longer (S8.3). Loaders can be sent to DataLoader workers, forked or spawned;
    each process has its own connections, write buffer and counts. Make the first loader of a job on
    every rank, in its main process.

    Args:
        backend: "redis", a server that all processes share, or "fakeredis", one in Python inside
            each process, for tests.
        dataset_name: loaders with the same name share values; give each dataset its own name.
        writer_buffer_size: number of values to buffer before writing them (S8.2).
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
        if backend == "fakeredis" and kwargs.pop("hosts", None) is not None:
            raise ValueError("hosts= names running Redis servers; it needs backend='redis'")
        self.backend, self.dataset_name = backend, dataset_name
        self._prefix = dataset_name.replace("%", "%25").replace("_", "%5F")
        self.store: RedisStore = BACKENDS[backend](**kwargs)
        self._allow_pickle = (
            kwargs.get("hosts") is None if allow_pickle is None else bool(allow_pickle)
        )
        self._writer_buffer_size = writer_buffer_size
        self._sessions: dict[int, _Session] = {}  # by process id

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sessions": {}}

    def __repr__(self) -> str:
        return f"CacheLoader({self.store!r}, dataset_name={self.dataset_name!r})"

    def __enter__(self) -> CacheLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """Return the value of ``key``: from the cache, or computed by ``load_fn(key)`` and then
        cached (S8.2).

        Args:
            key: the name of the value: a str, bytes, int, float, bool, None or path, or a tuple or
                list of these, by its text, so that ``1`` and ``"1"`` are one key (S8.1). Integers
                and floats of NumPy and integer tensors count as Python's.
            load_fn: computes the value from the key; its exceptions are not caught.

        Raises:
            TypeError: the key has another type, the value is a NumPy structured array, or it needs
                pickle without permission (S8.5).
        """
        return self.get_many([key], lambda keys: [load_fn(keys[0])], flush=False)[0]

    def get_many(
        self,
        keys: Sequence[Any],
        load_many: Callable[[list[Any]], Iterable[Any]],
        flush: bool = True,
    ) -> list[Any]:
        """Return the values of ``keys`` in order, with one ``mget`` per server, and one ``mset``
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
        session = self._session()
        stored = session.read(names)
        values: list[Any] = []
        missing: list[int] = []
        stored.reverse()  # so that each reply is freed when decoded, and the next value reuses its memory
        for index, name in enumerate(names):
            data, value = stored.pop(), None
            if data is None:
                missing.append(index)
            else:
                try:
                    value = decode(data, self._allow_pickle, name)
                except DamagedValueError as error:
                    session.record(error, f"{name.decode(errors='replace')!r} is computed again: ")
                    missing.append(index)
            values.append(value)
        session.count(hits=len(names) - len(missing))
        if not missing:
            return values
        first: dict[bytes, int] = {}
        for index in missing:
            first.setdefault(names[index], index)
        made = list(load_many([keys[index] for index in first.values()]))
        if len(made) != len(first):
            raise ValueError(f"load_many returned {len(made)} values for {len(first)} keys")
        new: dict[bytes, bytes] = {}
        for (name, index), value in zip(first.items(), made, strict=True):
            values[index] = value
            try:
                new[name] = encode(value, self._allow_pickle, name)
            except TooLargeError as error:
                session.record(error)
        for index in missing:
            # a key that repeats gets separate values, as two samples do
            if index != first[name := names[index]]:
                values[index] = (
                    decode(new[name], self._allow_pickle, name)
                    if name in new
                    else next(iter(load_many([keys[index]])))
                )
        session.count(misses=len(missing))
        session.put(new, flush)
        return values

    def contains(self, keys: Sequence[Any]) -> list[bool]:
        """Return which of ``keys`` have a stored value, without reading it; False if a server does
        not answer.
        """
        session = self._session()
        session.flush()
        return session.contains([self._stored_name(key) for key in keys])

    def num_keys(self) -> int:
        """Return the number of keys of all datasets in all servers that answer, after writing
        buffered values (S8.2).
        """
        session = self._session()
        session.flush()
        return session.num_keys()

    def flush(self) -> None:
        """Write this process's buffered values."""
        self._session().flush()

    def close(self) -> None:
        """Write buffered values and close this process's connections; servers keep running, and the
        loader can still be used.
        """
        self._session().close()
        self.store.close()

    def stats(self) -> CacheStats:
        """Return this process's counters; each DataLoader worker has its own (S8.3)."""
        return self._session().stats()

    def _session(self) -> _Session:
        pid = os.getpid()
        session = self._sessions.get(pid)
        if session is None:
            made = _Session(self.store, self._writer_buffer_size)
            session = self._sessions.setdefault(pid, made)  # another thread may have made one
            if session is made:
                session.write_at_exit(self)
        return session

    def _stored_name(self, key: Any) -> bytes:
        """Return the storage key of ``key``, unique for each dataset name and key (S8.1)."""
        plain = _plain(key)
        text = plain if isinstance(plain, str) else repr(plain)
        return f"{self._prefix}_{text}".encode("utf-8", "surrogatepass")


def _plain(key: Any) -> Any:
    """Convert a key to built-in types, whose text identifies it completely (S8.1).

    Raises:
        TypeError: the key has another type, whose text may be incomplete, such as that of an array,
            which omits elements.
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


class _Pause:
    """Backoff time before the next request to a failed server, doubled by each consecutive
    failure.
    """

    def __init__(self) -> None:
        self.seconds = self.until = 0.0

    def fail(self, spent: float) -> None:
        self.seconds = min(max(2 * self.seconds, _FIRST_PAUSE), _LONG_PAUSE)
        self.seconds = max(self.seconds, min(_TIMES_SPENT * spent, _LONGEST_PAUSE))
        self.until = time.monotonic() + self.seconds


class _Session:
    """State of a loader in one process: connections, buffered values, counters, and backoff of
    failing servers. A forked process starts a new session, so it never writes its parent's values.
    """

    def __init__(self, store: RedisStore, size: int) -> None:
        self._store, self._size = store, size
        # A client is in here only while it has no request, so no other request gets its answer.
        self._idle: list[list[Any]] = [[] for _ in store.stores]
        self._pauses = [
            (_Pause(), _Pause()) for _ in store.stores
        ]  # of all requests, and of writes
        self._waiting: dict[bytes, bytes] = {}
        self._counts = Counter[str]()
        self._turn, self._flushing = threading.Lock(), threading.Lock()
        self._warned: set[int] = set()

    def stats(self) -> CacheStats:
        return CacheStats(**self._counts)

    def count(self, **counts: int) -> None:
        with self._turn:
            self._counts.update(counts)

    def record(self, error: Exception, consequence: str = "", server: int = -1) -> None:
        """Count an error; warn once for each server, and once for values."""
        self.count(errors=1)
        if server not in self._warned:
            self._warned.add(server)
            warnings.warn(f"{consequence}{error}", stacklevel=6)

    def read(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of keys: from the write buffer, else from the servers."""
        values = [self._waiting.get(name) for name in names]
        size = 0
        for server, places in self._places(names, values).items():
            asked = [names[place] for place in places]
            answer = self._ask(server, partial(_mget, names=asked))
            if answer is not None:
                for place, value in zip(places, answer, strict=True):
                    values[place] = value
                    size += len(value or b"")
        self.count(bytes_read=size)
        return values

    def contains(self, names: Sequence[bytes]) -> list[bool]:
        found = [False] * len(names)
        for server, places in self._places(names).items():
            asked = [names[place] for place in places]
            answer = self._ask(server, partial(existing, keys=asked))
            if answer is not None:
                for place, value in zip(places, answer, strict=True):
                    found[place] = value
        return found

    def num_keys(self) -> int:
        return sum(
            self._ask(server, methodcaller("dbsize")) or 0 for server in range(len(self._idle))
        )

    def put(self, values: dict[bytes, bytes], flush: bool) -> None:
        """Buffer ``values``; write the whole buffer if it is full, or on request."""
        with self._turn:
            self._waiting.update(values)
        if flush or len(self._waiting) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write the buffered values. Values that a server does not accept are dropped: they can be
        computed again, and must not pile up.
        """
        if not self._waiting:
            return
        with self._flushing:
            with self._turn:
                batch = dict(self._waiting)
            self.write(batch)
            with self._turn:  # until now they could be read from the buffer
                for name, value in batch.items():
                    if self._waiting.get(name) is value:
                        del self._waiting[name]

    def write(self, values: dict[bytes, bytes]) -> None:
        names = list(values)
        for server, places in self._places(names).items():
            for part in commands({names[place]: values[names[place]] for place in places}):
                if self._ask(server, methodcaller("mset", part), is_write=True):
                    self.count(bytes_written=sum(map(len, part.values())))

    def close(self) -> None:
        self.flush()
        for idle in self._idle:
            while idle:
                idle.pop().close()

    def _places(
        self, names: Sequence[bytes], known: Sequence[object] | None = None
    ) -> dict[int, list[int]]:
        """Group the indices of ``names`` by server (S8.1), without names whose value is known."""
        count = len(self._idle)
        places: dict[int, list[int]] = {}
        for place, name in enumerate(names):
            if known is None or known[place] is None:
                server = xxhash.xxh64_intdigest(name) % count if count > 1 else 0
                places.setdefault(server, []).append(place)
        return places

    def _ask(self, server: int, request: Callable[[Any], _T], is_write: bool = False) -> _T | None:
        """Return a server's answer; None if the request fails, or during the backoff after a
        failure (S8.3). A server that refuses writes because it is full is still read.
        """
        import redis

        store, idle, pauses = self._store.stores[server], self._idle[server], self._pauses[server]
        began, handled = time.monotonic(), sys.exc_info()[1]
        if any(began < pause.until for pause in pauses[: 1 + is_write]):
            return None
        try:
            client = idle.pop()
        except IndexError:
            client = store.connect()
        try:
            if pauses[0].seconds and not store.status():  # which has a shorter timeout
                raise redis.ConnectionError("it still does not answer")
            answer = request(client)
        except BaseException as error:
            client.close()  # its answer may still come, and would be taken for the next one's
            if not isinstance(error, Exception):
                raise
            if (raised := of_signal_handler(error, handled)) is not None:
                raise raised from None
            failure = store.failure(error)
            pauses[is_write and failure.refused].fail(time.monotonic() - began)
            self.record(failure, "cache unavailable; continuing without it: ", server)
            return None
        idle.append(client)
        for pause in pauses[: 1 + is_write]:
            pause.seconds = 0.0
        return answer

    def write_at_exit(self, loader: CacheLoader) -> None:
        """Write the rest when the loader is garbage-collected, and when this process ends: at the
        interpreter's exit; at the end of `multiprocessing` children, which skip `atexit` handlers;
        and on SIGTERM, with which `multiprocessing` ends daemon children such as DataLoader
        workers.
        """
        util.Finalize(loader, self.flush, exitpriority=_FLUSH_PRIORITY)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if multiprocessing.current_process().daemon and in_main_thread:
            _of_daemon.setdefault(os.getpid(), weakref.WeakSet()).add(self)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, _terminate)

    def write_in_signal_handler(self) -> None:
        # The interrupted code may hold the locks, and wait for an answer.
        _Session(self._store, self._size).write(dict(self._waiting))


def _mget(client: Any, names: Sequence[bytes]) -> list[bytes | None]:
    import redis

    answer = client.mget(names)
    if not isinstance(answer, list) or len(answer) != len(names):
        raise redis.InvalidResponse(f"it answers MGET of {len(names)} keys with {answer!r:.80}")
    return answer


# Sessions of daemon processes, by process id.
_of_daemon: dict[int, weakref.WeakSet[_Session]] = {}


def _terminate(number: int, frame: Any) -> None:
    """Handle SIGTERM: write the buffered values, then end the process: torch's workers with exit
    code 0, others by the signal.
    """
    for session in list(_of_daemon.get(os.getpid(), ())):
        session.write_in_signal_handler()
    if get_worker_info() is not None:
        os._exit(0)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if not TYPE_CHECKING:  # so that type checkers still find misspelt names
    __getattr__ = explain_missing("contrib.cache_loader")
