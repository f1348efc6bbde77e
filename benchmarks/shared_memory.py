"""Means of float32 tensors over the ranks of one machine, through memory that they share: against
gloo, one thread each.

The floor is a copy of the tensor, on all ranks at once: every rank must read all of its elements,
and write all of the result.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import common
import torch
import torch.distributed as dist
import workers

import bagua_ref

SIZES = {1_000: 200, 250_000: 50, 2_500_000: 8, 25_000_000: 1}
"""Elements, and calls in a turn."""

LIMITS = {2: 0.5, 4: 0.8}
"""The most of gloo's time, by the number of ranks; four share two cores."""


def measure(size: int, calls: int, rounds: int) -> dict[str, float]:
    """Return each contender's median seconds per call on this rank."""
    x, y = torch.ones(size), torch.empty(size)

    def by_gloo() -> None:
        dist.all_reduce(x)
        x.div_(dist.get_world_size())

    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: bagua_ref.allreduce_inplace(x, bagua_ref.ReduceOp.AVG),
        "gloo": by_gloo,
        "copy": lambda: y.copy_(x),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            workers.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                contender()
            if turn:  # the first is for warming up
                times[name].append((time.perf_counter() - start) / calls)
    assert torch.all(x == 1)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    args = common.arguments(__doc__.partition("\n\n")[0])
    rows = []
    cases = list(itertools.product(LIMITS.items(), SIZES.items()))
    for (ranks, limit), (size, calls) in cases[: 1 if args.quick else None]:
        per_rank = workers.launch(measure, ranks, size, *((1, 2) if args.quick else (calls, 15)))
        slowest = {name: 1e3 * max(rank[name] for rank in per_rank) for name in per_rank[0]}
        ours = slowest.pop("ours")
        rows.append(
            common.Row(
                f"{ranks} ranks, {size:,} elements",
                "ms",
                ours,
                slowest,
                "gloo",
                common.at_most(limit),
            )
        )
    return common.report("shared_memory", rows, args)


if __name__ == "__main__":
    sys.exit(main())
