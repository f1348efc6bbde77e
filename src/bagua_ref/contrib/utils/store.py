"""Key-value stores: the contract, and several stores used as one (S8.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

import xxhash

from bagua_ref.errors import BaguaError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ClusterStore", "Store", "StoreError"]

_T = TypeVar("_T")


class StoreError(BaguaError):
    """A store cannot be reached, or refuses.

    Args:
        message: what happened, to which store.
        refused: whether the store answered, and the answer was no.
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Store(ABC):
    """A store of bytes under string keys. Every method may raise `StoreError`."""

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store ``value`` under ``key``."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return what is stored under ``key``, None if nothing is."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return how many keys there are."""

    @abstractmethod
    def clear(self) -> None:
        """Delete all keys."""

    @abstractmethod
    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        """Store every value under its key."""

    @abstractmethod
    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return what is stored under each of ``keys``, None where nothing is."""

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether something is stored under each of ``keys``."""
        return [value is not None for value in self.mget(keys)]

    @abstractmethod
    def status(self) -> bool:
        """Return whether the store answers; raises nothing."""

    def shutdown(self) -> None:  # noqa: B027  (most stores belong to someone else)
        """Stop the server if this process started it; a store that it did not start goes on."""

    def close(self) -> None:  # noqa: B027
        """Drop this process's connections; they are opened again when needed."""


class ClusterStore(Store):
    """Several stores used as one: each key lives in the store that its hash names (S8.1).

    Args:
        stores: one or more, in an order that all processes share.

    Raises:
        ValueError: there are none.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ValueError("stores=[] must hold one store or more")
        self.stores = list(stores)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.stores))})"

    def route(self, key: str) -> Store:
        """Return the store of ``key``: index xxh64(key in UTF-8, seed 0) mod number of stores (S8.1)."""
        return self.stores[self._index(key)]

    def set(self, key: str, value: str | bytes) -> None:
        """Store ``value`` under ``key``."""
        self.route(key).set(key, value)

    def get(self, key: str) -> bytes | None:
        """Return what is stored under ``key``, None if nothing is."""
        return self.route(key).get(key)

    def num_keys(self) -> int:
        """Return how many keys all stores have."""
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        """Delete all keys of all stores."""
        for store in self.stores:
            store.clear()

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        """Store every value under its key, with one ``mset`` for each store concerned."""
        if len(self.stores) == 1:
            self.stores[0].mset(dictionary)
            return
        parts: dict[int, dict[str, str | bytes]] = {}
        for key, value in dictionary.items():
            parts.setdefault(self._index(key), {})[key] = value
        for index, part in parts.items():
            self.stores[index].mset(part)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return what is stored under each of ``keys``, with one ``mget`` for each store concerned."""
        return self._ask(keys, lambda store, part: store.mget(part))

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether something is stored under each of ``keys``."""
        return self._ask(keys, lambda store, part: store.contains(part))

    def status(self) -> bool:
        """Return whether all stores answer."""
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        """Stop the servers that this process started."""
        for store in self.stores:
            store.shutdown()

    def close(self) -> None:
        """Drop this process's connections; they are opened again when needed."""
        for store in self.stores:
            store.close()

    def _index(self, key: str) -> int:
        return xxhash.xxh64_intdigest(key.encode()) % len(self.stores) if len(self.stores) > 1 else 0

    def _ask(self, keys: Sequence[str], ask: Callable[[Store, Sequence[str]], list[_T]]) -> list[_T]:
        if len(self.stores) == 1:
            return ask(self.stores[0], keys)
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._index(key), []).append(place)
        found: dict[int, _T] = {}
        for index, part in places.items():
            found.update(zip(part, ask(self.stores[index], [keys[place] for place in part]), strict=True))
        return [found[place] for place in range(len(keys))]
