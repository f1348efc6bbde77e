"""Comparison of the samplers of all ranks, through the store of torch's default process group.

Ranks never wait for each other here: a sampler may be drawn on one rank alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bagua_ref.base.ranks import format_ranks
from bagua_ref.communicators.rendezvous import ask

__all__ = ["SamplerAgreement", "raise_difference"]

_drawn = Counter[str]()  # samplers that this process has begun to draw, by kind


def raise_difference(states: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError if the states of the ranks' samplers differ; it names ranks and values."""
    first, *others = sorted(states)
    for name, value in states[first].items():
        if different := [rank for rank in others if states[rank].get(name) != value]:
            theirs = states[different[0]].get(name)
            raise ValueError(
                f"the ranks' samplers differ, so samples would repeat and others be left out:"
                f" {format_ranks(different)} {'have' if len(different) > 1 else 'has'}"
                f" {name}={theirs!r}, and rank {first} has {name}={value!r}; give all the same"
            )


class SamplerAgreement:
    """One rank's part in the comparison of a sampler with those of the other ranks.

    The rank publishes its sampler's state when it begins to draw, and compares those of the others
    after 2, 4, 8, ... items, until it has seen all: so a difference is found in the first epoch, on
    every rank that draws more than a few items.

    Args:
        kind: samplers are compared if they are the n-th of this kind on their ranks.
        state: the settings and the position of the sampler.
    """

    def __init__(self, store: Store, rank: int, ranks: int, kind: str, state: dict[str, Any]):
        _drawn[kind] += 1
        self._prefix = f"bagua_ref/sampler/{kind}/{_drawn[kind]}"
        self._store, self._missing = store, set(range(ranks)) - {rank}
        self._states = {rank: state}
        self._looked = 1  # after the second item, all ranks have done a step with the first
        key = f"{self._prefix}/{rank}"
        ask(store, lambda store: store.set(key, json.dumps(state)), None)

    @staticmethod
    def begin(rank: int, ranks: int, kind: str, state: dict[str, Any]) -> SamplerAgreement | None:
        """Return the comparison; None without a process group of these ranks."""
        if ranks == 1 or not (dist.is_available() and dist.is_initialized()):
            return None
        # In a simulated world, torch's default group has a store of no use between processes.
        store = dist.distributed_c10d._get_default_store()
        here = dist.get_rank(), dist.get_world_size()
        if here != (rank, ranks) or not isinstance(store, Store):
            return None
        return SamplerAgreement(store, rank, ranks, f"{kind}/{ranks}", state)

    def compare(self, drawn: int) -> bool:
        """Compare with the ranks that have published, after ``drawn`` items; return whether there
        is nothing more to compare.

        Raises:
            ValueError: the samplers of two ranks differ.
        """
        if drawn < 2 * self._looked:
            return False
        self._looked = drawn

        def published(store: Store) -> dict[int, dict[str, Any]]:
            keys = {rank: f"{self._prefix}/{rank}" for rank in self._missing}
            there = [rank for rank, key in keys.items() if store.check([key])]
            return {rank: json.loads(store.get(keys[rank])) for rank in there}

        nothing: dict[int, dict[str, Any]] = {}
        self._states |= ask(self._store, published, nothing)
        self._missing -= set(self._states)
        raise_difference(self._states)
        return not self._missing
