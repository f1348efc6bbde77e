"""A sampler that gives all replicas samples of similar complexity at each step (S7.1 - S7.3).

Complexities and their order are in `complexities`.
"""

from __future__ import annotations

import operator
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from bagua_ref.backends import KernelBackend, get_backend
from bagua_ref.base.runtime import RealWorld, current_world
from bagua_ref.contrib.complexities import Ordering, ends, noise_bound, numbers_of, read_complexities, shown, to_number

__all__ = ["LoadBalancingDistributedSampler", "Place", "check_settings", "checked_count"]

_BLOCK = 4096  # indices that are converted to Python numbers at once


class LoadBalancingDistributedSampler(Sampler[int]):
    """Gives each of R replicas a share of the samples so that all draw similar complexities at each step (S7.1 - S7.3).

    The N samples are sorted by complexity (with shuffle, by complexity + noise that is drawn for each epoch) and split into chunks
    of R neighbours, of which the last is filled up from the front. The chunks are shuffled, and rank i takes element i of each.
    All replicas must get the same complexities and options. Use it like `torch.utils.data.DistributedSampler`. If torch has no
    process group, ``bagua_ref.init_process_group()`` or the launcher's environment determine rank and size.

    ``state_dict()`` counts the samples that the newest iterator has returned. A DataLoader with workers fetches samples ahead of
    training; then pass the number that training has used: ``state_dict(samples=batches_done * batch_size)``.

    Args:
        dataset: has a length of at least 1. It is read once, when the sampler is made, unless ``complexities`` is given.
        complexity_fn: sample -> an int or float (or NumPy scalar, or tensor of one element; not modified), or None with
            ``complexities``. Infinity is allowed with shuffle=False only.
        num_replicas: R; None: the number of ranks.
        rank: from 0 to R - 1; None: this rank.
        shuffle: draw a new order in each epoch, see `set_epoch`.
        seed: the random seed, the same on all replicas.
        drop_last: drop the last N mod R samples of the order instead of filling up.
        random_level: from 0 (best balance) to 1 (noise as large as the range of complexities).
        complexities: the complexities, one per sample, as a list, an array or a 1-D tensor; copied.
        progress: show a bar (rank 0 only) while the dataset is read.
        backend: the kernel backend that sorts: a name, a backend, or None for the usual choice.

    Raises:
        ValueError: random_level is outside [0, 1], rank outside [0, R), R < 1, the dataset empty, a complexity NaN, their
            number wrong, or both or none of complexity_fn and complexities are given.
        TypeError: a complexity is not a number.

    >>> lengths = [3, 1, 4, 1, 5, 9]
    >>> for rank in range(2):
    ...     sampler = LoadBalancingDistributedSampler(lengths, lambda x: x, num_replicas=2, rank=rank, shuffle=False)
    ...     print([lengths[index] for index in sampler])
    [1, 3, 5]
    [1, 4, 9]
    """

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
            raise ValueError("pass either complexity_fn or complexities= (with complexity_fn=None), not both")
        if complexity_fn is not None and not callable(complexity_fn):
            raise TypeError(f"complexity_fn={complexity_fn!r} must be a function; pass numbers as complexities=")
        get_backend(backend)  # if it cannot run, raise before the dataset is read
        self.shuffle = bool(shuffle)
        self.seed = whole("seed", seed)
        self.drop_last = bool(drop_last)
        self.num_samples = self.length // self.num_replicas if self.drop_last else -(-self.length // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._start_epoch(0)

        if complexity_fn is not None:
            numbers = read_complexities(dataset, complexity_fn, progress=bool(progress) and self.rank == 0)
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
                f"random_level={random_level!r} has no effect: the noise is an integer below int((max - min) * random_level + 1), "
                f"and complexities from {shown(low)} to {shown(high)} leave only 0. Multiply them so that they range over 1,000 or "
                "more",
                stacklevel=2,
            )
        self._ordering = Ordering(numbers, bound, backend)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which with shuffle=True determines the order; call it before each epoch (S7.2).

        Choosing the current epoch again changes nothing: a position set by `load_state_dict` is kept.
        """
        if whole("epoch", epoch) != self.epoch:
            self._start_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return self._draw(self.epoch)

    def __len__(self) -> int:
        """Return the number of samples that this replica draws in an epoch (S7.1)."""
        return self.num_samples

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.length} samples, rank {self.rank} of {self.num_replicas}, shuffle={self.shuffle}, "
            f"seed={self.seed}, drop_last={self.drop_last}, random_level={self.random_level}; "
            f"epoch {self.epoch}: {self._place.taken} of {self.num_samples} drawn)"
        )

    def shuffle_chunks(self) -> tuple[list[list[int]], list[int]]:
        """Return this epoch's chunks of indices, and the order in which chunks are drawn (S7.3)."""
        order, chunks = self._plan(self.epoch)
        places = torch.arange(max(1, self.num_samples) * self.num_replicas) % self.length
        return order[places].view(-1, self.num_replicas).tolist(), chunks.tolist()

    def state_dict(self, *, samples: int | None = None) -> dict[str, Any]:
        """Return the position in this epoch, in a form that any rank's sampler can load.

        Args:
            samples: the number of samples of this epoch that training has used on each rank; None: the number returned.
        """
        taken = self._place.taken if samples is None else checked_count("samples", samples, len(self))
        return {**self._settings(), "epoch": self.epoch, "samples": taken}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iterator continue at the saved sample; later iterators begin at the first sample again.

        Raises:
            ValueError: the state was saved with another number of replicas, dataset or other options.
        """
        check_settings(state_dict, self._settings(), "samples")
        samples = checked_count("samples", state_dict["samples"], len(self))
        self._start_epoch(state_dict["epoch"], samples)

    def _start_epoch(self, epoch: int, samples: int = 0) -> None:
        self.epoch = self._checked_epoch(epoch)
        self._place = Place(samples)
        self._resume_at = samples

    def _checked_epoch(self, epoch: int) -> int:
        number = whole("epoch", epoch)
        if not -(2**63) <= self.seed + number < 2**64:
            raise ValueError(f"seed + epoch = {self.seed + number} must fit into 64 bits")
        return number

    def _draw(self, epoch: int) -> Iterator[int]:
        # Only when the first sample is requested: a DataLoader with workers makes an iterator that it never uses.
        place = Place()
        if epoch == self.epoch:
            place.taken, self._resume_at = self._resume_at, 0
            self._place = place
        order, chunks = self._plan(epoch)
        mine = order.index_select(0, (chunks * self.num_replicas + self.rank) % self.length)
        del order, chunks  # as large as everything else that the sampler stores
        for block in mine[place.taken :].split(_BLOCK):
            for index in block.tolist():
                place.taken += 1
                yield index

    def _plan(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the order of samples (S7.2) and of chunks (S7.3)."""
        num_chunks = max(1, self.num_samples)
        if not self.shuffle:
            return self._ordering.without_noise(), torch.arange(num_chunks)[: self.num_samples]
        generator = torch.Generator().manual_seed(self.seed + epoch)
        noise = torch.randint(self._ordering.bound, (self.length,), generator=generator)  # drawn even if it is all zeros
        return self._ordering.with_noise(noise), torch.randperm(num_chunks, generator=generator)[: self.num_samples]

    def _settings(self) -> dict[str, Any]:
        """Return the settings on which a saved position depends."""
        return {
            "num_replicas": self.num_replicas,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "random_level": self.random_level,
            "complexities": zlib.crc32(self._ordering.stored()),
        }


class Place:
    """The number of items of an epoch that an iterator has returned."""

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken


def replica_of(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of replicas and the rank; None is replaced from the process group, else from the environment.

    Raises:
        ValueError: num_replicas is below 1, or rank is out of range.
    """
    if num_replicas is None or rank is None:
        found_size, found_rank = _size_and_rank()
        num_replicas = found_size if num_replicas is None else num_replicas
        rank = found_rank if rank is None else rank
    count, place = whole("num_replicas", num_replicas), whole("rank", rank)
    if count < 1:
        raise ValueError(f"num_replicas={count} must be at least 1")
    if not 0 <= place < count:
        raise ValueError(f"rank={place} must be from 0 to num_replicas - 1 = {count - 1}")
    return count, place


def whole(name: str, value: Any) -> int:
    """Return ``value`` of the argument ``name`` as an int; raise unless it is an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be an int") from None


def checked_count(name: str, value: int, most: int) -> int:
    """Return ``value`` as an int; raise unless it is from 0 to ``most``."""
    number = whole(name, value)
    if not 0 <= number <= most:
        raise ValueError(f"{name}={number} must be from 0 to {most}, the number of {name} in the epoch")
    return number


def check_settings(state_dict: Mapping[str, Any], here: Mapping[str, Any], unit: str) -> None:
    """Raise if the state was saved with other settings."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict is a {type(state_dict).__name__}; it must be a dict that state_dict() returned")
    if missing := [name for name in (*here, "epoch", unit) if name not in state_dict]:
        raise ValueError(f"state_dict lacks {', '.join(missing)}; it must come from state_dict() of the same kind of sampler")
    for name, value in here.items():
        if state_dict[name] == value:
            continue
        if name == "complexities":
            raise ValueError("state_dict was saved with other complexities, so its place is not one in this order")
        advice = (
            f"; which {unit} are left cannot be told exactly. Resume with {state_dict[name]} replicas, or call set_epoch"
            f"({state_dict['epoch'] + 1}) to begin the next epoch"
            if name == "num_replicas"
            else ""
        )
        raise ValueError(f"state_dict was saved with {name}={state_dict[name]}, and here it is {value}{advice}")


def _size_and_rank() -> tuple[int, int]:
    world = current_world()
    if isinstance(world, RealWorld) and world.known_identity is None and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()  # only torch was initialized, perhaps without a launcher
    return world.identity.world_size, world.identity.rank
