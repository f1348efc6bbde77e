"""A batch sampler that gives every replica the same number of variable-size batches (S7.4)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bagua_ref.contrib.load_balancing_sampler import Chunks, LoadBalancingDistributedSampler
from bagua_ref.contrib.resumable_sampler import ResumableSampler

__all__ = ["LoadBalancingDistributedBatchSampler"]


class LoadBalancingDistributedBatchSampler(ResumableSampler[list[int], "Batches"]):
    """Gives each replica batches of variable size, and all replicas the same number of them (S7.4).

    ``batch_fn`` splits the indices of every replica, on every replica, so it must be deterministic.
    Replicas with fewer batches than the longest one repeat theirs cyclically; with drop_last, all
    stop after the number of the shortest one.

    ``state_dict()`` counts the batches that the newest iterator has returned. A DataLoader with
    workers fetches batches ahead of training; then pass the number that training has used:
    ``state_dict(batches=batches_done)``. With another number of replicas, the samples that no
    replica has drawn are distributed and split again (S7.6).

    Args:
        sampler: a `LoadBalancingDistributedSampler` with drop_last=False.
        batch_fn: indices -> batches, each a list of indices.
        drop_last: drop the excess batches instead of repeating.

    Raises:
        ValueError: sampler is another kind of sampler or has drop_last=True, or a replica gets no
            batches.

    >>> lengths = [3, 1, 4, 1, 5, 9]
    >>> sampler = LoadBalancingDistributedSampler(lengths, lambda x: x, num_replicas=2, rank=0, shuffle=False)
    >>> list(LoadBalancingDistributedBatchSampler(sampler, lambda indices: [indices[:2], indices[2:]]))
    [[1, 0], [4]]
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError(f"sampler={sampler!r} must be a LoadBalancingDistributedSampler")
        if sampler.drop_last:
            raise ValueError(
                "sampler.drop_last must be False; drop_last=True of the batch sampler drops whole"
                " batches"
            )
        if not callable(batch_fn):
            raise TypeError(
                f"batch_fn={batch_fn!r} must be a function from a list of indices to a list of"
                " batches"
            )
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = bool(drop_last)
        self.num_replicas, self.rank, self.seed = sampler.num_replicas, sampler.rank, sampler.seed
        self.length = sampler.length
        self._start_epoch(sampler.epoch)

    def generate_batches(self) -> None:
        """Recompute the batches of the current epoch for every replica (S7.4)."""
        self._follow()
        plan = self._plan_after(self.epoch, self._place.ended)
        self._place.total, self._made = plan.total, plan

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as `LoadBalancingDistributedSampler.set_epoch` does, and split its indices
        into batches.
        """
        self.sampler.set_epoch(epoch)
        self._follow()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the saved batch; see `LoadBalancingDistributedSampler.load_state_dict`
        (S7.6).

        Raises:
            ValueError: the state was saved with another dataset, batch_fn or other options.
        """
        super().load_state_dict(state_dict)
        self.sampler._first_epoch = 0
        self.sampler.set_epoch(self.epoch)
        self.sampler._loaded = True

    def __copy__(self) -> LoadBalancingDistributedBatchSampler:
        """Return a copy with its own epoch and position."""
        copied = super().__copy__()
        assert isinstance(copied, LoadBalancingDistributedBatchSampler)
        copied.sampler = copy.copy(self.sampler)
        return copied

    def _draw(self, epoch: int) -> Iterator[list[int]]:
        self.sampler._loaded = False
        yield from super()._draw(epoch)

    def _follow(self) -> None:
        """Start the sampler's epoch, if that has changed."""
        if self.sampler.epoch != self.epoch:
            self._start_epoch(self.sampler.epoch)

    def _order(self, epoch: int) -> tuple[Tensor, torch.Generator | None]:
        return self.sampler._order(epoch)

    def _plan(
        self, order: Tensor, replicas: int, generator: torch.Generator | None, ended: bool
    ) -> Batches:
        shares = self.sampler._plan(order, replicas, generator, ended)
        return Batches(
            shares,
            self.batch_fn,
            self.drop_last,
            range(replicas) if ended else range(self.rank, self.rank + 1),
        )

    def _settings(self) -> dict[str, Any]:
        return {**self.sampler._settings(), "drop_last": self.drop_last}


class Batches:
    """Batches of all replicas, the same number for each (S7.4).

    Args:
        shares: the samples of each replica, as chunks.
        batch_fn: indices -> batches.
        drop_last: drop the excess batches instead of repeating.
        kept: the replicas whose batches are stored.
    """

    def __init__(
        self,
        shares: Chunks,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool,
        kept: range,
    ) -> None:
        counts: list[int] = []
        self._kept: list[list[list[int]]] = []
        for replica in range(shares.replicas if shares.total else 0):
            indices = shares.of(replica).tolist()
            made = batch_fn(indices)
            if not isinstance(made, Iterable):
                raise TypeError(
                    f"batch_fn returned a {type(made).__name__} for replica {replica}; it must"
                    " return a list of batches"
                )
            batches = list(made)
            if not batches:
                raise ValueError(
                    f"batch_fn made no batches for replica {replica} from its {len(indices)}"
                    " indices; each needs one"
                )
            counts.append(len(batches))
            if replica in kept:
                self._kept.append(batches)
        self.total = (min if drop_last else max)(counts, default=0)

    def drawn(self, count: int) -> Tensor:
        """Return the samples in the first ``count`` batches of the replicas."""
        return torch.tensor(
            [index for batches in self._kept for batch in batches[:count] for index in batch],
            dtype=torch.int64,
        )

    def items(self, start: int) -> Iterator[list[int]]:
        """Return an iterator over this replica's batches, which repeat cyclically."""
        # Copies, as the next epoch draws a batch again, whatever becomes of this list.
        return (list(self._kept[0][turn % len(self._kept[0])]) for turn in range(start, self.total))
