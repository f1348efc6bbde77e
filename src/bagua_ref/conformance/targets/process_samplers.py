"""Samplers of a program: their indices and batches are answers to requests (S7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bagua_ref import contrib
from bagua_ref.conformance.expected import samplers_plain
from bagua_ref.conformance.targets.process_link import Link

__all__ = ["ProcessSamplers"]


class ProcessSamplers:
    """Both classes of S7: their indices and batches come from the program, all else is checked and drawn here.

    Args:
        link: returns the connection to the program.
    """

    def __init__(self, link: Callable[[], Link]) -> None:
        self.LoadBalancingDistributedSampler = type("Sampler", (_Sampler,), {"link": staticmethod(link)})
        self.LoadBalancingDistributedBatchSampler = type("BatchSampler", (_BatchSampler,), {"link": staticmethod(link)})


class _Sampler(contrib.LoadBalancingDistributedSampler):
    link: Any

    def __init__(self, dataset: Any, complexity_fn: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(dataset, complexity_fn, *arguments, **options)
        values = [complexity_fn(dataset[place]) for place in range(len(dataset))]
        self._complexities = [value.item() if isinstance(value, Tensor) else value for value in values]

    def indices(self, rank: int) -> list[int]:
        """Return what the program says that a rank draws."""
        options = {name: getattr(self, name) for name in ("shuffle", "drop_last", "random_level", "seed", "epoch")}
        drawn = samplers_plain.noise_and_chunks(self._complexities, self.num_replicas, **options)
        noise, order = (torch.tensor(values, dtype=torch.int64) for values in drawn)
        values = {"complexities": self._complexities, "num_replicas": self.num_replicas, "rank": rank, **options}
        _, found = self.link().ask("sampler_indices", {"noise": noise, "chunk_order": order}, **values)
        indices: list[int] = found["indices"].tolist()
        return indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices(self.rank))

    def __len__(self) -> int:
        return len(self.indices(self.rank))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError("programs are not asked for what is left of an epoch (S7.6)")


class _BatchSampler(contrib.LoadBalancingDistributedBatchSampler):
    link: Any
    sampler: _Sampler

    def batches(self) -> list[list[int]]:
        """Return the own batches that the program chooses, given how many each rank has."""
        of_ranks = [self.batch_fn(self.sampler.indices(rank)) for rank in range(self.num_replicas)]
        counts = torch.tensor([len(batches) for batches in of_ranks])
        _, found = self.link().ask("equal_batches", {"counts": counts}, rank=self.rank, drop_last=self.drop_last)
        return [of_ranks[self.rank][place] for place in found["batches"].tolist()]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())

    def __len__(self) -> int:
        return len(self.batches())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise NotImplementedError."""
        self.sampler.load_state_dict(state_dict)
