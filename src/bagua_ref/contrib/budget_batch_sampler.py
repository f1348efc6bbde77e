"""Sampler of batches of similar cost within a budget, with the same number of batches on every
replica (S7.7).
"""

from __future__ import annotations

import bisect
import functools
import heapq
import math
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from bagua_ref.contrib.complexities import numbers_of, to_number
from bagua_ref.contrib.resumable_sampler import ResumableSampler, epoch_of, replica_of, whole

__all__ = ["BudgetBatchSampler"]

Places: TypeAlias = "np.ndarray[Any, Any]"


class BudgetBatchSampler(ResumableSampler[list[int], "Steps"]):
    """Gives each of R replicas batches of similar samples within a budget, and all replicas the
    same number of them (S7.7).

    The N samples are ordered by cost and cut into batches, each as large as the budget allows. With
    shuffle, equal costs are mixed, and then so are the samples of every ``mix`` neighbouring
    batches, which are split again: a larger ``mix`` makes batches more random, with more padding.
    The largest batches are halved until R divides their number. Sorted by cost, R neighbours make a
    step, so that all replicas have similar work in each; the steps come in random order.

    Every sample is drawn once per epoch (some once more if N < R), or dropped with drop_last. All
    replicas must get the same costs and options. Pass it to a DataLoader as ``batch_sampler``. The
    epoch is planned when it is chosen, not at its first batch.

    ``state_dict()`` counts the batches that the newest iterator has returned. A DataLoader with
    workers fetches batches ahead of training; then pass the number that training has used:
    ``state_dict(batches=batches_done)``. A sampler with another number of replicas continues the
    epoch with the remaining samples (S7.6).

    Args:
        costs: one positive finite number per sample, such as its length in tokens, as a list, an
            array or a 1-D tensor; copied.
        max_cost: maximum cost of a batch, at least 1.
        padded: how m samples, the largest of cost h, are counted. True: m * h, all padded to the
            largest; False: the sum of their costs; a function (m, h) -> number that decreases in
            neither, such as ``lambda m, h: m * h * h`` for attention.
        num_replicas: R; None: the number of ranks.
        rank: from 0 to R - 1; None: this rank.
        shuffle: draw a new order in each epoch, see `set_epoch`.
        seed: the random seed, the same on all replicas.
        mix: the number of neighbouring batches whose samples are mixed, with shuffle; 1: none.
        drop_last: drop the cheapest batches, at most R - 1, instead of halving the largest; their
            number is `dropped`.

    Raises:
        ValueError: a cost, or that of a single sample, exceeds the budget, is not positive or not
            finite; there are no costs, or with drop_last no batch is left; max_cost < 1, mix < 1,
            rank outside [0, R), R < 1, padded(m, h) decreases or is NaN.
        TypeError: a cost or an option has the wrong type.

    >>> for rank in range(2):
    ...     print(list(BudgetBatchSampler([3, 1, 4, 1, 5, 9], max_cost=9, num_replicas=2, rank=rank, shuffle=False)))
    [[2], [5]]
    [[4], [1, 3, 0]]
    """

    def __init__(
        self,
        costs: Any,
        max_cost: float,
        padded: bool | Callable[[int, Any], Any] = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        mix: int = 8,
        drop_last: bool = False,
    ) -> None:
        self.num_replicas, self.rank = replica_of(num_replicas, rank)
        self.max_cost = to_number("max_cost", max_cost)
        if not 1 <= self.max_cost < math.inf:
            raise ValueError(f"max_cost={max_cost!r} must be a finite number of at least 1")
        if not isinstance(padded, bool) and not callable(padded):
            raise TypeError(
                f"padded={padded!r} must be True, False or a function of a batch's size and largest"
                " cost"
            )
        self.padded = padded
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.seed, self.mix = whole("seed", seed), whole("mix", mix)
        if self.mix < 1:
            raise ValueError(f"mix={self.mix} must be at least 1")
        self._costs = self._checked_costs(costs)
        self.length = len(self._costs)
        self._formula: bool | str = (
            padded if isinstance(padded, bool) else self._formula_of_prices()
        )
        self._start_epoch(epoch_of(self.seed, 0))

    @property
    def dropped(self) -> int:
        """Number of batches dropped by drop_last in the current plan."""
        return self._made.dropped if self._made is not None else 0

    def _checked_costs(self, given: Any) -> Places:
        """Convert the costs to int64 or float64; raise unless each is positive, finite and within
        the budget.
        """
        numbers = numbers_of(given, None, "costs")
        try:
            costs = (
                numbers.numpy()
                if isinstance(numbers, Tensor)
                else np.array(numbers, dtype=np.float64)
            )
        except OverflowError:
            raise ValueError("costs has a number that is too large for a float") from None
        wrong = ~((costs > 0) & (costs < math.inf))
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(f"costs[{place}]={costs[place]} must be positive and finite")
        kinds, places = np.unique(costs, return_index=True)
        for cost, place in zip(kinds.tolist(), places.tolist(), strict=True):
            if (alone := self._price(1, cost, float(cost))) > self.max_cost:
                raise ValueError(
                    f"costs[{place}]={cost} makes a batch of sample {place} alone cost {alone},"
                    f" over max_cost={self.max_cost}"
                )
        return costs

    def _order(self, epoch: int) -> tuple[Tensor, torch.Generator | None]:
        """Return the samples by ascending cost; with shuffle, ties are in random order (S7.7.2)."""
        if not self.shuffle:
            return torch.from_numpy(self._costs.argsort(kind="stable")), None
        generator = torch.Generator().manual_seed(self.seed + epoch)
        drawn = torch.randperm(self.length, generator=generator)
        return drawn[torch.from_numpy(self._costs[drawn.numpy()].argsort(kind="stable"))], generator

    def _plan(
        self, order: Tensor, replicas: int, generator: torch.Generator | None, ended: bool
    ) -> Steps:
        """Return the plan of an epoch: steps of R batches (S7.7.2 to 5)."""
        if not len(order):
            return Steps(
                order.numpy(), np.empty((0, 2), dtype=np.int64), order, replicas, self.rank, 0
            )
        samples = order.numpy()
        ends, prices = self._cut(samples)
        if generator is not None and self.mix > 1:
            groups = np.diff([0, *ends[self.mix - 1 : -1 : self.mix], len(samples)]).tolist()
            places = [torch.randperm(size, generator=generator) for size in groups]
            firsts = np.cumsum([0, *groups[:-1]]).repeat(groups)
            samples = samples[torch.cat(places).numpy() + firsts]
            ends, prices = self._cut(samples)
        batches = np.array([[0, *ends[:-1]], ends]).T
        if (excess := len(batches) % replicas) and not self.drop_last:
            samples, batches, prices = self._more(
                samples, batches, prices, replicas - excess, order.numpy()
            )
        by_price = np.argsort(prices, kind="stable")[excess if self.drop_last else 0 :]
        if not len(by_price):
            raise ValueError(
                f"drop_last=True leaves no batch: {excess} batches of {len(samples)} samples are"
                f" fewer than {replicas} replicas; use drop_last=False, a smaller max_cost, or"
                " begin the next epoch with set_epoch"
            )
        steps = len(by_price) // replicas
        turns = (
            torch.arange(steps) if generator is None else torch.randperm(steps, generator=generator)
        )
        return Steps(
            samples, batches[by_price], turns, replicas, self.rank, excess if self.drop_last else 0
        )

    def _cut(self, samples: Places) -> tuple[list[int], Places]:
        """Split samples into batches, each as long as the budget allows; return their end positions
        and costs (S7.7.2).
        """
        batches: list[tuple[int, Any, Any]] = []  # the end, the price and the largest cost of each
        size, largest, total, price = 0, 0.0, 0.0, 0.0
        # a call for each sample would double the time
        by_function, by_largest = callable(self.padded), self.padded is True
        for place, cost in enumerate(self._costs[samples].tolist()):
            joined = cost if cost > largest else largest
            if by_function:
                more = self._price(size + 1, joined, total)
            else:
                more = (size + 1) * joined if by_largest else total + cost
            if size and more > self.max_cost:
                batches.append((place, price, largest))
                size, total, joined = 0, 0.0, cost
                more = self._price(1, cost, float(cost)) if by_function else cost
            elif size and more < price:
                raise ValueError(
                    f"padded must not decrease: padded({size}, {largest}) is {price}, and"
                    f" padded({size + 1}, {joined}) {more}"
                )
            size, largest, total, price = size + 1, joined, total + cost, more
        batches.append((len(samples), price, largest))
        ends, prices, largest_costs = zip(*batches, strict=True)
        if callable(self.padded):
            _check_increasing(np.diff([0, *ends]).tolist(), largest_costs, prices)
        return list(ends), np.array(prices, dtype=np.float64)

    def _more(
        self, samples: Places, batches: Places, prices: Places, count: int, order: Places
    ) -> tuple[Places, Places, Places]:
        """Add ``count`` batches: halve the most expensive ones, and repeat the first samples once
        only single samples are left (S7.7.4).
        """
        several = np.flatnonzero(batches[:, 1] - batches[:, 0] > 1)
        # halves are no dearer, so the others stay whole
        dearest = several[np.argsort(-prices[several], kind="stable")[:count]]
        heap = [(-prices[place], *batches[place].tolist()) for place in dearest.tolist()]
        heapq.heapify(heap)
        single: list[tuple[float, int, int]] = []
        wanted = len(heap) + count
        while heap and len(heap) + len(single) < wanted:
            _, first, end = heapq.heappop(heap)
            middle = first + (end - first) // 2
            for start, stop in ((first, middle), (middle, end)):
                costs = self._costs[samples[start:stop]].tolist()
                price = self._price(
                    stop - start, max(costs), functools.reduce(operator.add, costs, 0.0)
                )
                heapq.heappush(heap if stop - start > 1 else single, (-price, start, stop))
        repeated = np.resize(order, wanted - len(heap) - len(single))  # in cycle
        for place, cost in enumerate(self._costs[repeated].tolist(), len(samples)):
            single.append((-self._price(1, cost, float(cost)), place, place + 1))
        made = sorted((start, stop, -price) for price, start, stop in (*heap, *single))
        prices = np.append(np.delete(prices, dearest), [price for _, _, price in made])
        batches = np.append(
            np.delete(batches, dearest, axis=0), [(start, stop) for start, stop, _ in made], axis=0
        )
        in_order = np.argsort(batches[:, 0], kind="stable")
        return np.append(samples, repeated), batches[in_order], prices[in_order]

    def _price(self, size: int, largest: Any, total: float) -> Any:
        """Return the cost of a batch of ``size`` samples, given the largest of their costs and the
        sum (S7.7.1).
        """
        if isinstance(self.padded, bool):
            return size * largest if self.padded else total
        price = self.padded(size, largest)
        if type(price) in (int, float) and price == price:  # it is not NaN
            return price
        return to_number(f"padded({size}, {largest})", price)

    def _formula_of_prices(self) -> str:
        """Return a checksum of the costs that the user's function computes, since functions cannot
        be saved or compared.
        """
        _, prices = self._cut(self._costs.argsort(kind="stable"))
        return f"a function, {zlib.crc32(prices.tobytes()):08x}"

    @functools.cached_property
    def _checksum(self) -> int:
        """Checksum of all costs, cached because it takes 100 ms for 1e7 of them."""
        return zlib.crc32(self._costs.tobytes())

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a saved position depends on."""
        return {
            "length": self.length,
            "max_cost": self.max_cost,
            "padded": self._formula,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "mix": self.mix,
            "drop_last": self.drop_last,
            "costs": self._checksum,
        }


class Steps:
    """Plan of an epoch: steps of R batches, in drawing order (S7.7.5).

    Args:
        samples: the samples of all batches, int64.
        batches: where each batch begins and ends in ``samples``, of shape (number of batches, 2),
            by ascending price.
        turns: indices of the steps in drawing order.
        replicas: R.
        rank: index of the replica whose batches `items` returns.
        dropped: number of dropped batches.
    """

    def __init__(
        self,
        samples: Places,
        batches: Places,
        turns: Tensor,
        replicas: int,
        rank: int,
        dropped: int,
    ) -> None:
        self._samples, self._batches, self._turns = samples, batches, turns
        self._replicas, self._rank, self.dropped = replicas, rank, dropped
        self.total = len(turns)

    def drawn(self, count: int) -> Tensor:
        """Return the samples of the first ``count`` steps."""
        places = (
            (self._turns[:count, None] * self._replicas + torch.arange(self._replicas))
            .flatten()
            .numpy()
        )
        return torch.from_numpy(
            np.concatenate(
                [self._samples[first:end] for first, end in self._batches[places].tolist()]
            )
        )

    def items(self, start: int) -> Iterator[list[int]]:
        """Return an iterator over the batches of this replica; replicas take turns in drawing the
        most expensive batch of a step.
        """
        for number, turn in enumerate(self._turns[start:].tolist(), start):
            first, end = self._batches[
                turn * self._replicas + (self._rank + number) % self._replicas
            ].tolist()
            yield self._samples[first:end].tolist()


def _check_increasing(sizes: Sequence[int], largest: Sequence[Any], prices: Sequence[Any]) -> None:
    """Raise ValueError if a batch costs less than another one that is no longer and has no larger
    cost.
    """
    costs_before: list[Any] = []  # ascending, and so are the prices of the batches that have them
    prices_before: list[Any] = []
    for size, cost, price in sorted(zip(sizes, largest, prices, strict=True)):
        place = bisect.bisect_right(costs_before, cost)
        if place and prices_before[place - 1] > price:
            raise ValueError(
                f"padded must not decrease: padded({size}, {cost}) is {price}, less than"
                f" {prices_before[place - 1]} of a batch that is not longer, with the largest cost"
                f" {costs_before[place - 1]}"
            )
        end = place
        while end < len(prices_before) and prices_before[end] <= price:
            end += 1
        costs_before[place:end], prices_before[place:end] = [cost], [price]
