"""Training steps per second of gradient_allreduce against torch's DistributedDataParallel: 2 processes of one thread, gloo.

All of them train the same model in turns in the same two processes: torch's wrapper with its defaults, and with
gradient_as_bucket_view and static_graph. Beside them what no wrapper can beat: the training alone, without communication,
and one all-reduce of the gradients alone.
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_ref.algorithms import GradientAllReduceAlgorithm

MODELS = {
    "991,072": [64, *[432] * 6, 64],
    "25e6": [1024, *[3072] * 3, 1000],
}
BATCH = 32


def network(sizes: list[int]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stepper(sizes: list[int], wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module]) -> Callable[[], None]:
    inner = network(sizes)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
    module = wrap(inner, optimizer)
    x, y = torch.randn(BATCH, sizes[0]), torch.randint(sizes[-1], (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()

    return step


def measure(sizes: list[int], steps: int, rounds: int) -> dict[str, float]:
    """Return each contender's median seconds per step on this rank."""
    flat = torch.zeros(sum(p.numel() for p in network(sizes).parameters()))
    contenders: dict[str, Callable[[], None]] = {
        "ours": stepper(sizes, lambda module, optimizer: module.with_bagua([optimizer], GradientAllReduceAlgorithm())),
        "DDP": stepper(sizes, lambda module, optimizer: DistributedDataParallel(module)),
        "DDP, best settings": stepper(
            sizes, lambda module, optimizer: DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=True)
        ),
        "no communication": stepper(sizes, lambda module, optimizer: module),
        "all-reduce alone": lambda: dist.all_reduce(flat),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            workers.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                contender()
            workers.barrier()
            if turn:  # the first is for warming up
                times[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    args = common.arguments(__doc__.partition("\n")[0])
    rows = []
    for name, sizes in MODELS.items():
        steps, rounds = (2, 2) if args.quick else (40, 21) if name == "991,072" else (4, 15)
        per_rank = workers.launch(measure, 2, sizes, steps, rounds)
        rates = {contender: 1 / max(seconds[contender] for seconds in per_rank) for contender in per_rank[0]}
        peers = {contender: rate for contender, rate in rates.items() if contender != "ours"}
        better = max(("DDP", "DDP, best settings"), key=rates.__getitem__)
        rows.append(common.Row(f"{name} parameters, batch {BATCH}", "steps/s", rates["ours"], peers, better, common.at_least(1.0)))
    return common.report("allreduce_step", rows, args)


if __name__ == "__main__":
    sys.exit(main())
