"""Base of samplers that can resume within an epoch, also with another number of replicas (S7.6)."""

from __future__ import annotations

import math
import operator
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from bagua_ref.base.runtime import current_world
from bagua_ref.contrib.sampler_agreement import (
    call_stack,
    callers,
    comparison,
    difference,
    same_share,
)
from bagua_ref.groups.process_group import _get_default_group

__all__ = ["EpochPlan", "ResumableSampler", "Stretch", "replica_of", "whole"]

MOST_REPLICAS = 2**20
"""Maximum number of replicas in a saved position: a larger one is damaged, and planning it could
take hours.
"""

T = TypeVar("T")
P = TypeVar("P", bound="EpochPlan")


class Stretch(NamedTuple):
    """A segment of an epoch, in which each of ``replicas`` drew ``taken`` of ``total`` items
    (S7.6).
    """

    replicas: int
    taken: int
    total: int


class EpochPlan(Protocol):
    """Protocol of the plan of a segment: the items of each replica."""

    @property
    def total(self) -> int:
        """The number of items of each replica."""

    def drawn(self, count: int) -> Tensor:
        """Return the samples in the first ``count`` items of all replicas, as int64, possibly with
        repetitions.
        """

    def items(self, start: int) -> Iterator[Any]:
        """Return an iterator over this replica's items from index ``start`` on."""


class Place:
    """Position of an iterator: the earlier segments of the epoch, and how many of the ``total``
    items it has returned.
    """

    def __init__(self, ended: Sequence[Stretch], taken: int, total: int) -> None:
        self.ended, self.taken, self.total = tuple(ended), taken, total


class ResumableSampler(Sampler[T], ABC, Generic[T, P]):
    """Base of samplers that draw an epoch in segments, each with its own number of replicas (S7.6).

    A segment (`Stretch`) distributes the samples that no earlier one has drawn. Its plan is
    determined by the epoch and the earlier segments: it is equal on all replicas, and a saved
    position is a few numbers.

    Subclasses set ``num_replicas`` and ``rank``, then call `_start_epoch`.
    """

    unit = "batches"
    """Name of the items in states and messages."""

    num_replicas: int
    rank: int
    seed: int
    epoch: int
    length: int

    _loaded = False  # whether a loaded position waits for the next iterator
    _first_epoch = 0  # the epoch that a trainer counts as 0 after a restart
    _compared = False  # whether this sampler has been compared with those of the other ranks
    _made_by: int  # the statement that has made this sampler, which is the same on all ranks

    def __new__(cls, *args: Any, **options: Any) -> Any:  # noqa: D102
        made = super().__new__(cls)
        made._made_by = call_stack(sys._getframe(1))
        return made

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Return the settings that a saved position depends on."""

    @abstractmethod
    def _order(self, epoch: int) -> tuple[Tensor, torch.Generator | None]:
        """Return the order of all samples, and the random generator that made it, for further
        drawing in segments.
        """

    @abstractmethod
    def _plan(
        self, order: Tensor, replicas: int, generator: torch.Generator | None, ended: bool
    ) -> P:
        """Return the plan of a segment that distributes ``order``; if ``ended``, only
        `EpochPlan.drawn` is used.
        """

    def _follow(self) -> None:
        """Start the epoch of the underlying sampler, if there is one."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order if shuffle=True; call this before each epoch
        (S7.2).

        Choosing the current epoch again changes nothing: a position set by `load_state_dict` is
        kept. It is kept, too, if a trainer that counts epochs from its own start chooses epoch 0
        before the loaded position was drawn; then the epochs that it chooses are counted from the
        loaded one, with a warning.
        """
        number = whole("epoch", epoch)
        if self._loaded and number == 0 and self.epoch != 0:
            warnings.warn(
                f"set_epoch(0) after load_state_dict() of epoch {self.epoch}: the loaded position"
                " is kept, and from now on epochs are counted from it",
                stacklevel=2,
            )
            self._first_epoch = self.epoch
        number += self._first_epoch
        if number != self.epoch:
            self._start_epoch(epoch_of(self.seed, number))

    def __copy__(self) -> ResumableSampler[T, P]:
        """Return a copy with its own position."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._place = Place(self._place.ended, self._place.taken, self._place.total)
        if self._next is not None:
            copied._next = copied._place
        return copied

    def __repr__(self) -> str:
        ended = [
            f"{taken} of {total} drawn by each of {replicas}, then "
            for replicas, taken, total in self._place.ended
        ]
        return (
            f"{type(self).__name__}({self.length} samples, rank {self.rank} of"
            f" {self.num_replicas}; epoch {self.epoch}: {''.join(ended)}{self._place.taken} of"
            f" {self._place.total} {self.unit} drawn)"
        )

    def __iter__(self) -> Iterator[T]:
        self._follow()
        return self._draw(self.epoch)

    def __len__(self) -> int:
        """Return the number of this replica's items in the epoch; after a change of replicas, in
        the newest segment.
        """
        self._follow()
        return self._place.total

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return the position in this epoch; samplers of all ranks can load it.

        Args:
            batches: the number of batches of this epoch that training has used on each rank; None:
                the number returned.
        """
        return self._state(batches)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the saved position in the next iterator; later iterators start the epoch from
        the beginning.

        With the saved number of replicas, it continues at the same item; with another number, the
        rest of the epoch is distributed again (S7.6), and `len` returns its length.

        Raises:
            ValueError: the state was saved with another dataset or other options, or holds no
                position of the epoch.
            TypeError: ``state_dict`` is not a mapping, or a count in it is not an int.
        """
        epoch, saved = self._read(state_dict)
        stretches, plan = self._walk(epoch, saved)
        total = state_dict.get(f"num_{self.unit}")  # states of before lack it
        if stretches and total is not None and total != stretches[-1].total:
            raise ValueError(
                f"state_dict was saved with num_{self.unit}={total}, and here it is"
                f" {stretches[-1].total}"
            )
        continued = bool(stretches) and stretches[-1].replicas == self.num_replicas
        ended, taken = (stretches[:-1], stretches[-1].taken) if continued else (stretches, 0)
        self._begin(epoch, Place(ended, taken, plan.total), plan)
        self._loaded, self._first_epoch = True, 0

    def check_agreement(self) -> None:
        """Compare the settings and positions on all ranks of the default group; collective.

        Raises:
            ValueError: settings or positions differ, or two ranks draw the same share; raised on
                every rank.
        """
        own = self._state(None) | self._share()
        comm = _get_default_group().get_global_communicator()
        states = dict(enumerate(comm.broadcast_object(own, rank) for rank in range(comm.nranks())))
        said = difference(states)
        if self.num_replicas == comm.nranks():
            said = said or same_share(states)
        if said:
            raise ValueError(said)

    def _state(self, taken: int | None) -> dict[str, Any]:
        """Return the position after ``taken`` items; None: after the items returned by the newest
        iterator.
        """
        self._follow()
        place = self._place
        taken = place.taken if taken is None else self._checked_count(taken, place.total)
        stretches = [*place.ended, Stretch(self.num_replicas, taken, place.total)]
        if taken == 0 and place.ended:  # a stretch that drew nothing is left out
            stretches.pop()
        *earlier, newest = stretches
        return {
            **self._settings(),
            "num_replicas": newest.replicas,
            "epoch": self.epoch,
            self.unit: newest.taken,
            f"num_{self.unit}": newest.total,
            "stretches": [[stretch.replicas, stretch.taken] for stretch in earlier],
        }

    def _read(self, state: Mapping[str, Any]) -> tuple[int, list[tuple[int, int]]]:
        """Validate a state; return its epoch, and the replicas and drawn items of each segment."""
        if not isinstance(state, Mapping):
            raise TypeError(
                f"state_dict is a {type(state).__name__}; it must be a dict that state_dict()"
                " returned"
            )
        here = self._settings()
        if missing := [
            name for name in ("num_replicas", *here, "epoch", self.unit) if name not in state
        ]:
            raise ValueError(
                f"state_dict lacks {', '.join(missing)}; it must come from state_dict() of the same"
                " kind of sampler"
            )
        for name, value in here.items():
            if state[name] == value:
                continue
            if name in ("complexities", "costs"):
                raise ValueError(
                    f"state_dict was saved with other {name}, so its place is not one in this order"
                )
            raise ValueError(
                f"state_dict was saved with {name}={state[name]}, and here it is {value}"
            )
        earlier = state.get("stretches", ())
        if not isinstance(earlier, Sequence) or not all(
            isinstance(pair, Sequence) and len(pair) == 2 for pair in earlier
        ):
            raise ValueError(
                f"stretches={earlier!r} must be pairs of a number of replicas and of {self.unit}"
                " drawn"
            )
        pairs = [*earlier, (state["num_replicas"], state[self.unit])]
        read = [
            (whole("num_replicas", replicas), whole(self.unit, taken)) for replicas, taken in pairs
        ]
        if len(read) == 1 and read[0][1] == 0 and read[0][0] != self.num_replicas:
            del read[0]  # nothing was drawn
        for place, (replicas, taken) in enumerate(read):
            if (
                not 1 <= replicas <= MOST_REPLICAS
                or (taken == 0 and len(read) > 1)
                or (place > 0 and replicas == read[place - 1][0])
            ):
                raise ValueError(
                    f"stretch {place} of {len(read)}, {replicas} replicas that drew {taken}"
                    f" {self.unit} each, must be of 1 to {MOST_REPLICAS} replicas, other ones than"
                    f" before it, that drew at least 1 of the {self.unit}"
                )
        return epoch_of(self.seed, state["epoch"]), read

    def _walk(self, epoch: int, saved: Sequence[tuple[int, int]]) -> tuple[list[Stretch], P]:
        """Replay the saved segments of an epoch; return them with their totals, and the plan for
        the rest.
        """
        order, generator = self._order(epoch)
        stretches: list[Stretch] = []
        for replicas, taken in saved:
            continues = len(stretches) == len(saved) - 1 and replicas == self.num_replicas
            plan = self._plan(order, replicas, generator, ended=not continues)
            stretches.append(Stretch(replicas, self._checked_count(taken, plan.total), plan.total))
            if continues:
                return stretches, plan
            if taken == plan.total:  # the end of the epoch, whatever drop_last has left
                order = order[:0]
            else:
                left = torch.ones(int(order.max()) + 1, dtype=torch.bool)
                left[plan.drawn(taken)] = False
                order = order[left[order]]
        return stretches, self._plan(order, self.num_replicas, generator, ended=False)

    def _plan_after(self, epoch: int, ended: Sequence[Stretch]) -> P:
        """Return the plan of this sampler's replicas after the segments ``ended``."""
        return self._walk(epoch, [(stretch.replicas, stretch.taken) for stretch in ended])[1]

    def _checked_count(self, value: int, most: int) -> int:
        number = whole(self.unit, value)
        if not 0 <= number <= most:
            raise ValueError(
                f"{self.unit}={number} must be from 0 to {most}, the number of {self.unit} in the"
                " epoch"
            )
        return number

    def _start_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch."""
        _, plan = self._walk(epoch, ())
        self._begin(epoch, Place((), 0, plan.total), plan)

    def _begin(self, epoch: int, place: Place, plan: P | None) -> None:
        self.epoch, self._place, self._made = epoch, place, plan
        self._next: Place | None = place  # of the next iterator

    def _draw(self, epoch: int) -> Iterator[T]:
        # Only when the first item is requested: a DataLoader with workers makes an iterator that it
        # never uses.
        plan = None
        if self.num_replicas > 1:
            self._refuse_second_sharding()
        if epoch != self.epoch:
            place = Place((), 0, 0)
        else:
            if self._next is None and (self._made is None or self._place.ended):
                self._start_epoch(epoch)
            elif self._next is None:
                self._begin(epoch, Place((), 0, self._place.total), self._made)
            place, plan, self._next = self._place, self._made, None
        if plan is None:
            plan = self._plan_after(epoch, place.ended)
        self._loaded = False
        items = plan.items(place.taken)
        del plan  # it may be as large as everything else that the sampler stores
        look, begun_at = self._comparison(), place.taken
        for item in items:
            place.taken += 1
            if look is not None:
                look(place.taken - begun_at)
            yield item
        if look is not None:
            look(math.inf)

    def _refuse_second_sharding(self) -> None:
        """Raise RuntimeError if accelerate would shard this rank's items over the ranks a second
        time.

        accelerate has no attribute by which a sampler could declare that it is sharded already; so
        the call stack is inspected once per epoch.
        """
        accelerate = sys.modules.get("accelerate.data_loader")
        if accelerate is None:
            return
        sharding = (accelerate.BatchSamplerShard, accelerate.DataLoaderDispatcher)
        for caller in callers(sys._getframe()):
            if isinstance(caller, sharding) and getattr(caller, "num_processes", None) != 1:
                raise RuntimeError(
                    f"accelerate would distribute what {type(self).__name__} draws for rank"
                    f" {self.rank} over the {self.num_replicas} ranks once more, and most samples"
                    " would never be drawn; do not pass this DataLoader to accelerator.prepare():"
                    " iterate over it as it is, and move batches to accelerator.device"
                )

    def _share(self) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas, "rank": self.rank}

    def _comparison(self) -> Callable[[float], None] | None:
        """Start the comparison of this sampler with the other ranks' samplers, once."""
        if self._compared:
            return None
        self._compared = True
        kind = f"{type(self).__name__}/{self._made_by}"
        return comparison(kind, self._settings() | self._share())


def replica_of(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of replicas and the rank; None means the process group's value, else the
    environment's.

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
    """Return the argument ``name`` as an int; raise unless it is an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; it must be an int"
        ) from None


def epoch_of(seed: int, epoch: int) -> int:
    """Return ``epoch`` as an int; raise unless seed + epoch is a valid seed of a generator."""
    number = whole("epoch", epoch)
    if not -(2**63) <= seed + number < 2**64:
        raise ValueError(f"seed + epoch = {seed + number} must fit into 64 bits")
    return number


def _size_and_rank() -> tuple[int, int]:
    world = current_world()
    if world.transport is None and dist.is_available() and dist.is_initialized():
        # only torch was initialized, perhaps without a launcher
        return dist.get_world_size(), dist.get_rank()
    return world.identity.world_size, world.identity.rank
