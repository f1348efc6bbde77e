"""A dataset that computes each sample once and then reads it from the cache (S8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from bagua_ref.base.runtime import current_world
from bagua_ref.base.utils import tracked
from bagua_ref.contrib.cache_loader import CacheLoader, CacheStats

__all__ = ["CachedDataset"]

_PREFILL_BATCH = 64


class CachedDataset(Dataset[Any]):
    """Dataset wrapper that caches samples under ``"{dataset_name}_{index}"`` (S8.1), which makes
    all epochs after the first fast.

    A DataLoader gets each batch with one request to each server. Apply random augmentation after
    the cache, not before it, as ``dataset`` is evaluated only once.

    Args:
        dataset: an object with ``__getitem__`` and ``__len__``.
        backend: see `CacheLoader`.
        dataset_name: datasets with the same name share samples; give each its own name, and a new
            one when its samples change.
        writer_buffer_size: number of individually requested samples to buffer before writing them.
        kwargs: further arguments of `CacheLoader` and `RedisStore`.

    Attributes:
        dataset: the wrapped dataset.
        cache_loader: the `CacheLoader`.

    Raises:
        TypeError: ``dataset`` cannot be indexed.

    >>> from bagua_ref.contrib import CachedDataset
    >>> with CachedDataset([torch.tensor(1), torch.tensor(2)], backend="fakeredis", dataset_name="two") as dataset:
    ...     epochs = [[sample.item() for sample in dataset] for _ in range(2)]
    ...     print(epochs, dataset.stats().hits)
    [[1, 2], [1, 2]] 2
    """

    def __init__(
        self,
        dataset: Any,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        **kwargs: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset={type(dataset).__name__} cannot be indexed; CachedDataset needs a dataset"
                " with __getitem__"
            )
        self.dataset = dataset
        self.cache_loader = CacheLoader(backend, dataset_name, writer_buffer_size, **kwargs)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.cache_loader.get(_key(index), self.dataset.__getitem__)

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the samples at ``indices``; a DataLoader calls this for a batch."""
        # A subclass that changes single samples, and does not say how to make a batch, gets single
        # samples.
        if (
            type(self).__getitem__ is not CachedDataset.__getitem__
            and type(self).__getitems__ is CachedDataset.__getitems__
        ):
            return [self[index] for index in indices]
        return self.cache_loader.get_many(list(map(_key, indices)), self._load)

    def __enter__(self) -> CachedDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prefill(self, progress: bool = True) -> int:
        """Compute all samples missing from the cache; return their number. Ranks that call this
        share the work.

        It returns when this rank has finished its share; use a barrier to wait for the others.

        Args:
            progress: whether to show progress on standard error, on the first rank.
        """
        rank, ranks = self._place()
        mine = range(rank, len(self), ranks)
        batches = [
            mine[start : start + _PREFILL_BATCH] for start in range(0, len(mine), _PREFILL_BATCH)
        ]
        made = 0
        for batch in tracked(batches, "filling the cache", progress and rank == 0):
            there = self.cache_loader.contains(batch)
            missing = [index for index, known in zip(batch, there, strict=True) if not known]
            made += len(missing)
            if missing:
                self.cache_loader.get_many(missing, self._load)
        self.flush()
        return made

    def flush(self) -> None:
        """Write this process's buffered samples."""
        self.cache_loader.flush()

    def close(self) -> None:
        """Write buffered samples and close this process's connections; servers keep running, and
        the dataset can still be used.
        """
        self.cache_loader.close()

    def stats(self) -> CacheStats:
        """Return hits, misses, errors and bytes of this process and its DataLoader workers."""
        return self.cache_loader.stats()

    def _load(self, indices: list[Any]) -> Iterable[Any]:
        load_batch = getattr(self.dataset, "__getitems__", None)
        return load_batch(indices) if load_batch else [self.dataset[index] for index in indices]

    def _place(self) -> tuple[int, int]:
        """Return this rank's index among the ranks that share a cache, and the number of these
        ranks.
        """
        world = current_world()
        if world.default_group is None and not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        identity = world.identity
        if not self.cache_loader.store.cluster_mode:
            return identity.local_rank, identity.local_world_size
        return (
            (identity.rank, identity.world_size)
            if world.default_group is not None
            else (dist.get_rank(), dist.get_world_size())
        )


def _key(index: Any) -> Any:
    """Convert an integer of a tensor or of NumPy to an int, so that each sample has a single
    key.
    """
    try:
        return index.__index__()
    except (AttributeError, TypeError):
        return index
