"""A batch sampler that gives every replica the same number of variable-size batches (S7.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from bagua_ref.contrib.load_balancing_sampler import LoadBalancingDistributedSampler, Place, check_settings, checked_count

__all__ = ["LoadBalancingDistributedBatchSampler"]


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Gives each replica batches of variable size, and all replicas the same number of them (S7.4).

    ``batch_fn`` splits the indices of every replica, on every replica, so it must be deterministic. Replicas with fewer batches
    than the longest one repeat theirs cyclically; with drop_last, all stop after the number of the shortest one.

    ``state_dict()`` counts the batches that the newest iterator has returned. A DataLoader with workers fetches batches ahead of
    training; then pass the number that training has used: ``state_dict(batches=batches_done)``.

    Args:
        sampler: a `LoadBalancingDistributedSampler` with drop_last=False.
        batch_fn: indices -> batches, each a list of indices.
        drop_last: drop the excess batches instead of repeating.

    Raises:
        ValueError: sampler is another kind of sampler or has drop_last=True, or a replica gets no batches.

    >>> lengths = [3, 1, 4, 1, 5, 9]
    >>> sampler = LoadBalancingDistributedSampler(lengths, lambda x: x, num_replicas=2, rank=0, shuffle=False)
    >>> list(LoadBalancingDistributedBatchSampler(sampler, lambda indices: [indices[:2], indices[2:]]))
    [[1, 0], [4]]
    """

    def __init__(
        self, sampler: LoadBalancingDistributedSampler, batch_fn: Callable[[list[int]], list[list[int]]], drop_last: bool = False
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError(f"sampler={sampler!r} must be a LoadBalancingDistributedSampler")
        if sampler.drop_last:
            raise ValueError("sampler.drop_last must be False; drop_last=True of the batch sampler drops whole batches")
        if not callable(batch_fn):
            raise TypeError(f"batch_fn={batch_fn!r} must be a function from a list of indices to a list of batches")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = bool(drop_last)
        self.num_replicas, self.rank = sampler.num_replicas, sampler.rank
        self._place = Place()
        self._resume_at = 0
        self.generate_batches()

    def generate_batches(self) -> None:
        """Split the current epoch's indices of every replica into batches again (S7.4)."""
        self._batches, self._num_batches = self._cut(self.sampler.epoch)
        self._epoch = self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, as `LoadBalancingDistributedSampler.set_epoch` does, and split its indices into batches."""
        self.sampler.set_epoch(epoch)
        self._follow()

    def __iter__(self) -> Iterator[list[int]]:
        self._follow()
        return self._draw(self._epoch, self._batches, self._num_batches)

    def __len__(self) -> int:
        """Return the number of batches that every replica draws in this epoch (S7.4)."""
        self._follow()
        return self._num_batches

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.sampler!r}, drop_last={self.drop_last}; "
            f"epoch {self._epoch}: {self._place.taken} of {self._num_batches} batches drawn)"
        )

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return the position in this epoch, in a form that any rank's batch sampler can load.

        Args:
            batches: the number of batches of this epoch that training has used on each rank; None: the number returned.
        """
        self._follow()
        taken = self._place.taken if batches is None else checked_count("batches", batches, len(self))
        return {**self._settings(), "epoch": self._epoch, "batches": taken, "num_batches": self._num_batches}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iterator continue at the saved batch; later iterators begin at the first batch again.

        Raises:
            ValueError: the state was saved with another number of replicas, dataset, batch_fn or other options.
        """
        check_settings(state_dict, self._settings(), "batches")
        epoch = self.sampler._checked_epoch(state_dict["epoch"])
        own, total = self._cut(epoch)
        check_settings(state_dict, {"num_batches": total}, "batches")
        taken = checked_count("batches", state_dict["batches"], total)
        self.sampler.set_epoch(epoch)
        self._batches, self._num_batches, self._epoch = own, total, epoch
        self._place = Place(taken)
        self._resume_at = taken

    def _follow(self) -> None:
        """Begin the sampler's epoch, if it is a new one."""
        if self.sampler.epoch != self._epoch:
            self.generate_batches()
            self._place = Place()
            self._resume_at = 0

    def _cut(self, epoch: int) -> tuple[list[list[int]], int]:
        """Return this replica's batches before any are repeated or dropped, and the number that every replica draws."""
        order, chunks = self.sampler._plan(epoch)
        counts, own = [], []
        for replica in range(self.num_replicas):
            indices = order[(chunks * self.num_replicas + replica) % self.sampler.length].tolist()
            made = self.batch_fn(indices)
            if not isinstance(made, Iterable):
                raise TypeError(
                    f"batch_fn returned a {type(made).__name__} for replica {replica}; it must return a list of batches"
                )
            batches = list(made)
            if not batches:
                raise ValueError(f"batch_fn made no batches for replica {replica} from its {len(indices)} indices; each needs one")
            counts.append(len(batches))
            if replica == self.rank:
                own = batches
        return own, min(counts) if self.drop_last else max(counts)

    def _draw(self, epoch: int, batches: list[list[int]], total: int) -> Iterator[list[int]]:
        place = Place()
        if epoch == self._epoch:
            place.taken, self._resume_at = self._resume_at, 0
            self._place = place
        for turn in range(place.taken, total):
            place.taken += 1
            yield list(batches[turn % len(batches)])  # the next epoch draws it again, whatever becomes of this list

    def _settings(self) -> dict[str, Any]:
        return {**self.sampler._settings(), "drop_last": self.drop_last}
