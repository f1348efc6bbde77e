"""Processor time to wrap a module of many parameters, and to broadcast many buffers: 2 processes of
one thread.

Elements do not count here, as there are hardly any; what counts is what each tensor costs.
Processor time includes all threads of a process, and waiting for the other process costs none. The
slower rank counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import common
import torch
import workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bagua_ref.algorithms import (
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
)
from bagua_ref.data_parallel import DistributedDataParallel

Wrap = Callable[[nn.Module], nn.Module]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


WRAPPERS: dict[str, Wrap] = {
    "ours": lambda module: module.with_bagua([sgd(module)], GradientAllReduceAlgorithm()),
    "DDP": TorchDDP,
    "bytegrad": lambda module: module.with_bagua(
        [sgd(module)], ByteGradAlgorithm(hierarchical=False)
    ),
    "decentralized": lambda module: module.with_bagua(
        [sgd(module)], DecentralizedAlgorithm(hierarchical=False)
    ),
}


def median_of_turns(contenders: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return each contender's median processor time in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, contender in contenders.items():
            workers.barrier()
            start = time.process_time()
            made = contender()
            if turn:  # the first is for warming up
                times[name].append(1e3 * (time.process_time() - start))
            del made
    return {name: statistics.median(values) for name, values in times.items()}


def wrapping(parameters: int, turns: int) -> dict[str, float]:
    def contender(wrap: Wrap) -> Callable[[], nn.Module]:
        made = iter(
            [nn.ParameterList(torch.zeros(8) for _ in range(parameters)) for _ in range(turns + 1)]
        )
        return lambda: wrap(next(made))

    return median_of_turns({name: contender(wrap) for name, wrap in WRAPPERS.items()}, turns)


def forward(layers: int, turns: int) -> dict[str, float]:
    """Measure training forward passes, which begin with a broadcast of all running statistics."""
    x = torch.randn(4, 4)

    def contender(wrap: Wrap) -> Callable[[], torch.Tensor]:
        module = wrap(nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(layers))))
        return lambda: module(x)

    wrappers: dict[str, Wrap] = {
        "ours": DistributedDataParallel,
        "DDP": TorchDDP,
        "no broadcast": lambda module: module,
    }
    return median_of_turns({name: contender(wrap) for name, wrap in wrappers.items()}, turns)


def main() -> int:
    args = common.arguments(__doc__.partition("\n\n")[0])
    rows = []
    for work, function, count, turns, limit in (
        # connections count for more than parameters
        ("wrap, {:,} parameters", wrapping, 1_000, 5, common.NO_LIMIT),
        ("wrap, {:,} parameters", wrapping, 10_000, 5, common.at_most(1.5)),
        ("training forward, {:,} BatchNorms", forward, 100, 15, common.at_most(1.5)),
        ("training forward, {:,} BatchNorms", forward, 1_000, 15, common.at_most(1.5)),
    ):
        per_rank = workers.launch(
            function, 2, *((count // 10, 1) if args.quick else (count, turns))
        )
        slowest = {name: max(rank[name] for rank in per_rank) for name in per_rank[0]}
        ours = slowest.pop("ours")
        rows.append(common.Row(work.format(count), "ms", ours, slowest, "DDP", limit))
    return common.report("many_tensors", rows, args)


if __name__ == "__main__":
    sys.exit(main())
