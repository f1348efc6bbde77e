"""Balanced samplers of another program (S7): their indices and batches come from it, all else is checked and drawn here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bagua_ref import contrib
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.targets.process_link import Link

__all__ = ["ProcessSamplers"]


class ProcessSamplers:
    """Both classes of S7.

    Args:
        link: returns the connection to the program.
    """

    def __init__(self, link: Callable[[], Link]) -> None:
        self.LoadBalancingDistributedSampler = type("Sampler", (_Sampler,), {"link": staticmethod(link)})
        self.LoadBalancingDistributedBatchSampler = type("BatchSampler", (_BatchSampler,), {"link": staticmethod(link)})


class _Sampler:
    link: Any

    def __init__(
        self, dataset: Any, complexity_fn: Any, num_replicas: int, rank: int, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False, random_level: float = 0.0,
    ) -> None:  # fmt: skip
        # Refuses what is invalid.
        contrib.LoadBalancingDistributedSampler(dataset, complexity_fn, num_replicas, rank, shuffle, seed, drop_last, random_level)
        values = [complexity_fn(dataset[place]) for place in range(len(dataset))]
        self._complexities = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
        self.num_replicas, self.rank, self.drop_last = num_replicas, rank, drop_last
        self._options: dict[str, Any] = {
            "shuffle": shuffle,
            "drop_last": drop_last,
            "random_level": random_level,
            "seed": seed,
            "epoch": 0,
        }

    def set_epoch(self, epoch: int) -> None:
        self._options["epoch"] = epoch

    def indices(self, rank: int) -> list[int]:
        """Return what the program says that a rank draws."""
        drawn = samplers_plain.noise_and_chunks(self._complexities, self.num_replicas, **self._options)
        noise, order = (torch.tensor(values, dtype=torch.int64) for values in drawn)
        values = {"complexities": self._complexities, "num_replicas": self.num_replicas, "rank": rank, **self._options}
        _, found = self.link().ask("sampler_indices", {"noise": noise, "chunk_order": order}, **values)
        indices: list[int] = found["indices"].tolist()
        return indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices(self.rank))

    def __len__(self) -> int:
        return len(self.indices(self.rank))


class _BatchSampler:
    link: Any

    def __init__(self, sampler: Any, batch_fn: Callable[[list[int]], list[list[int]]], drop_last: bool = False) -> None:
        if not isinstance(sampler, _Sampler) or sampler.drop_last:
            raise ValueError(f"sampler={sampler!r} must be a LoadBalancingDistributedSampler without drop_last")
        self._sampler, self._batch_fn, self._drop_last = sampler, batch_fn, drop_last
        self._batches()

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def _batches(self) -> list[list[int]]:
        """Return the own batches that the program chooses, given how many each rank has."""
        of_ranks = [self._batch_fn(self._sampler.indices(rank)) for rank in range(self._sampler.num_replicas)]
        if not all(of_ranks):
            raise ValueError("batch_fn returned no batches for some rank")
        counts = torch.tensor([len(batches) for batches in of_ranks])
        _, found = self.link().ask("equal_batches", {"counts": counts}, rank=self._sampler.rank, drop_last=self._drop_last)
        mine = of_ranks[self._sampler.rank]
        return [mine[place] for place in found["batches"].tolist()]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __len__(self) -> int:
        return len(self._batches())
