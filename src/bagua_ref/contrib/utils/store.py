"""Key-value stores: the contract, and a store that combines several (S8.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import xxhash

from bagua_ref.errors import BaguaError

__all__ = ["ClusterStore", "Store", "StoreError", "encoded_key"]

_T = TypeVar("_T")


class StoreError(BaguaError):
    """Raised if a store cannot be reached, or refuses a request.

    Args:
        message: the error, with the name of the store.
        refused: whether the store answered and refused.
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def encoded_key(key: str) -> bytes:
    """Encode a store's key in UTF-8, including lone surrogates, which occur in file names that are
    not UTF-8 (S8.1).

    Raises:
        TypeError: the key is not a str.
    """
    if not isinstance(key, str):
        raise TypeError(f"key={key!r} of a store is a {type(key).__name__}; it must be a str")
    return key.encode("utf-8", "surrogatepass")


class Store(ABC):
    """Contract of stores of bytes under string keys. Every method may raise `StoreError`."""

    def set(self, key: str, value: str | bytes) -> None:
        """Store ``value`` under ``key``."""
        self.mset({key: value})

    def get(self, key: str) -> bytes | None:
        """Return the value stored under ``key``, or None."""
        return self.mget([key])[0]

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of keys."""

    @abstractmethod
    def clear(self) -> None:
        """Delete all keys."""

    @abstractmethod
    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        """Store every value under its key."""

    @abstractmethod
    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values stored under ``keys``, None for those without a value."""

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each of ``keys`` has a value."""
        return [value is not None for value in self.mget(keys)]

    @abstractmethod
    def status(self) -> bool:
        """Return whether the store answers; never raises an error."""

    def shutdown(self) -> None:  # noqa: B027  (most stores belong to someone else)
        """Stop the server if this process started it; other servers keep running."""

    def close(self) -> None:  # noqa: B027
        """Close this process's connections; they are reopened when needed."""


class ClusterStore(Store):
    """Several stores used as one: each key is stored in the store that its hash selects (S8.1).

    Args:
        stores: at least one store; all processes use the same order.

    Raises:
        ValueError: stores is empty.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ValueError("stores=[] must contain at least one store")
        self.stores: Sequence[Store] = list(stores)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.stores))})"

    def route(self, key: str) -> Store:
        """Return the store of ``key``: index xxh64(key in UTF-8, seed 0) mod number of stores
        (S8.1).
        """
        return self.stores[self._index(key)]

    def num_keys(self) -> int:
        """Return the number of keys in all stores."""
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        """Delete all keys of all stores."""
        for store in self.stores:
            store.clear()

    def mset(self, dictionary: Mapping[str, str | bytes]) -> None:
        """Store values under their keys, with one ``mset`` per store."""
        parts: dict[int, dict[str, str | bytes]] = {}
        for key, value in dictionary.items():
            parts.setdefault(self._index(key), {})[key] = value
        for index, part in parts.items():
            self.stores[index].mset(part)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values stored under ``keys``, None for those without a value, with one
        ``mget`` per store.
        """
        return self._ask(keys, lambda store, part: store.mget(part))

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each of ``keys`` has a value."""
        return self._ask(keys, lambda store, part: store.contains(part))

    def status(self) -> bool:
        """Return whether all stores answer."""
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        """Stop the servers started by this process."""
        for store in self.stores:
            store.shutdown()

    def close(self) -> None:
        """Close this process's connections; they are reopened when needed."""
        for store in self.stores:
            store.close()

    def _index(self, key: str) -> int:
        return (
            xxhash.xxh64_intdigest(encoded_key(key)) % len(self.stores)
            if len(self.stores) > 1
            else 0
        )

    def _ask(
        self, keys: Sequence[str], ask: Callable[[Store, Sequence[str]], list[_T]]
    ) -> list[_T]:
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._index(key), []).append(place)
        found: dict[int, _T] = {}
        for index, part in places.items():
            found.update(
                zip(part, ask(self.stores[index], [keys[place] for place in part]), strict=True)
            )
        return [found[place] for place in range(len(keys))]
