"""A sampler that gives all replicas samples of similar complexity at each step (S7.1 - S7.3).

Complexities and their order are in `complexities`.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from bagua_ref.backends import KernelBackend, get_backend
from bagua_ref.contrib.complexities import (
    Ordering,
    ends,
    noise_bound,
    numbers_of,
    read_complexities,
    shown,
    to_number,
)
from bagua_ref.contrib.resumable_sampler import Place, ResumableSampler, epoch_of, replica_of, whole

__all__ = ["Chunks", "LoadBalancingDistributedSampler"]

_BLOCK = 4096  # indices that are converted to Python numbers at once


class LoadBalancingDistributedSampler(
    ResumableSampler[int, "Chunks"],
    DistributedSampler[int],  # by which trainers know that it takes this rank's share
):
    """Gives each of R replicas a share of the samples so that all draw similar complexities at each
    step (S7.1 - S7.3).

    The N samples are sorted by complexity (with shuffle, by complexity + noise that is drawn for
    each epoch) and split into chunks of R neighbours, of which the last is filled up from the
    front. The chunks are shuffled, and rank i takes element i of each. All replicas must get the
    same complexities and options. Use it like `torch.utils.data.DistributedSampler`. If torch has
    no process group, ``bagua_ref.init_process_group()`` or the launcher's environment determine
    rank and size.

    ``state_dict()`` counts the samples that the newest iterator has returned. A DataLoader with
    workers fetches samples ahead of training; then pass the number that training has used:
    ``state_dict(samples=batches_done * batch_size)``. A sampler with another number of replicas
    continues the epoch with the remaining samples (S7.6).

    Args:
        dataset: has a length of at least 1. It is read once, when the sampler is made, unless
            ``complexities`` is given.
        complexity_fn: sample -> an int or float (or NumPy scalar, or tensor of one element; not
            modified), or None with ``complexities``. Infinity is allowed with shuffle=False only.
        num_replicas: R; None: the number of ranks.
        rank: from 0 to R - 1; None: this rank.
        shuffle: draw a new order in each epoch, see `set_epoch`.
        seed: the random seed, the same on all replicas.
        drop_last: drop the last N mod R samples of the order instead of filling up.
        random_level: from 0 (best balance) to 1 (noise as large as the range of complexities).
        complexities: the complexities, one per sample, as a list, an array or a 1-D tensor; copied.
        progress: show progress (rank 0 only) while the dataset is read.
        backend: the kernel backend that sorts: a name, a backend, or None for the usual choice.

    Raises:
        ValueError: random_level is outside [0, 1], rank outside [0, R), R < 1, the dataset empty, a
            complexity NaN, their number wrong, or both or none of complexity_fn and complexities
            are given.
        TypeError: a complexity is not a number.

    >>> lengths = [3, 1, 4, 1, 5, 9]
    >>> for rank in range(2):
    ...     sampler = LoadBalancingDistributedSampler(lengths, lambda x: x, num_replicas=2, rank=rank, shuffle=False)
    ...     print([lengths[index] for index in sampler])
    [1, 3, 5]
    [1, 4, 9]
    """

    unit = "samples"

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[[Any], Any] | None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
        *,
        complexities: Any = None,
        progress: bool = False,
        backend: str | KernelBackend | None = None,
    ) -> None:
        self.num_replicas, self.rank = replica_of(num_replicas, rank)
        self.random_level = to_number("random_level", random_level)
        if not 0 <= self.random_level <= 1:
            raise ValueError(f"random_level={random_level!r} must be from 0 (best balance) to 1")
        self.dataset = dataset
        self.length = len(dataset)
        if self.length == 0:
            raise ValueError("dataset is empty; it must have at least one sample")
        if (complexity_fn is None) == (complexities is None):
            raise ValueError(
                "pass either complexity_fn or complexities= (with complexity_fn=None), not both"
            )
        if complexity_fn is not None and not callable(complexity_fn):
            raise TypeError(
                f"complexity_fn={complexity_fn!r} must be a function; pass numbers as complexities="
            )
        get_backend(backend)  # if it cannot run, raise before the dataset is read
        self.shuffle = bool(shuffle)
        self.seed = whole("seed", seed)
        self.drop_last = bool(drop_last)
        self.num_samples = num_samples(self.length, self.num_replicas, self.drop_last)
        self.total_size = self.num_samples * self.num_replicas
        self._start_epoch(epoch_of(self.seed, 0))

        if complexity_fn is not None:
            numbers = read_complexities(
                dataset, complexity_fn, progress=bool(progress) and self.rank == 0
            )
        else:
            numbers = numbers_of(complexities, self.length)
        low, high = ends(numbers)
        if low == high and self.length > 1:
            warnings.warn(
                f"all {self.length} complexities are {shown(low)}, so there is nothing to balance; "
                "check what complexity_fn or complexities= measures",
                stacklevel=2,
            )
        bound = noise_bound(numbers, self.random_level) if self.shuffle else 1
        if self.shuffle and self.random_level > 0 and bound == 1 and low != high:
            warnings.warn(
                f"random_level={random_level!r} has no effect: the noise is an integer below"
                f" int((max - min) * random_level + 1), and complexities from {shown(low)} to"
                f" {shown(high)} leave only 0. Multiply them so that they range over 1,000 or more",
                stacklevel=2,
            )
        self._ordering = Ordering(numbers, bound, backend)

    def shuffle_chunks(self) -> tuple[list[list[int]], list[int]]:
        """Return this epoch's chunks of indices and their drawing order (S7.3); after a change of
        replicas, those of the newest segment.
        """
        plan = self._plan_after(self.epoch, self._place.ended)
        if not len(plan.order):
            return [], []
        places = torch.arange(max(1, plan.total) * self.num_replicas) % len(plan.order)
        return plan.order[places].view(-1, self.num_replicas).tolist(), plan.chunks.tolist()

    def state_dict(self, *, samples: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Return the position in this epoch; samplers of all ranks can load it.

        Args:
            samples: the number of samples of this epoch that training has used on each rank; None:
                the number returned.
        """
        return self._state(samples)

    def _start_epoch(self, epoch: int) -> None:
        self._begin(epoch, Place((), 0, self.num_samples), None)

    def _begin(self, epoch: int, place: Place, plan: Chunks | None) -> None:
        # a plan takes as much memory as the sampler: made again when it is drawn
        super()._begin(epoch, place, None)

    def _order(self, epoch: int) -> tuple[Tensor, torch.Generator | None]:
        """Return the order of samples (S7.2)."""
        if not self.shuffle:
            return self._ordering.order(), None
        generator = torch.Generator().manual_seed(self.seed + epoch)
        # drawn even if it is all zeros
        noise = torch.randint(self._ordering.bound, (self.length,), generator=generator)
        return self._ordering.order(noise), generator

    def _plan(
        self, order: Tensor, replicas: int, generator: torch.Generator | None, ended: bool
    ) -> Chunks:
        """Return the chunks of R neighbours in drawing order (S7.3)."""
        number = num_samples(len(order), replicas, self.drop_last)
        count = max(1, number)
        drawn = (
            torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        )
        return Chunks(order, drawn[:number], replicas, self.rank)

    @cached_property
    def _checksum(self) -> int:
        """Checksum of all complexities, cached because it takes 100 ms for 1e7 of them."""
        return zlib.crc32(self._ordering.stored())

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a saved position depends on."""
        return {
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "random_level": self.random_level,
            "complexities": self._checksum,
        }


class Chunks:
    """Chunks of R neighbours in the order of samples, in drawing order (S7.3).

    Args:
        order: all samples in order, int64.
        chunks: indices of the chunks, in drawing order.
        replicas: R.
        rank: index of the replica whose samples `items` returns.
    """

    def __init__(self, order: Tensor, chunks: Tensor, replicas: int, rank: int) -> None:
        self.order, self.chunks, self.replicas, self.rank = order, chunks, replicas, rank
        self.total = len(chunks)

    def of(self, rank: int, start: int = 0) -> Tensor:
        """Return a replica's samples from chunk ``start`` on."""
        return self.order.index_select(
            0, (self.chunks[start:] * self.replicas + rank) % max(1, len(self.order))
        )

    def drawn(self, count: int) -> Tensor:
        """Return the samples in the first ``count`` chunks, including those that fill up the last
        chunk.
        """
        most = min(self.replicas, len(self.order))  # more would be the same samples again
        places = self.chunks[:count, None] * self.replicas + torch.arange(most)
        return self.order[places.flatten() % max(1, len(self.order))]

    def items(self, start: int) -> Iterator[int]:
        """Return an iterator over the samples of this replica."""
        return _numbers(self.of(self.rank, start))


def num_samples(length: int, replicas: int, drop_last: bool) -> int:
    """Return the number of samples per replica, out of ``length`` (S7.1)."""
    return length // replicas if drop_last else -(-length // replicas)


def _numbers(samples: Tensor) -> Iterator[int]:
    for block in samples.split(_BLOCK):
        yield from block.tolist()
