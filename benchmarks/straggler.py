"""Total training steps per second when one of two ranks is slowed by 20 ms a step: asynchronous
averaging against all-reduce.

With all-reduce, every step waits for the slower rank. The ideal is both ranks training alone, each
at its own speed.
"""

from __future__ import annotations

import sys
import time

import common
import torch
import torch.distributed as dist
import workers
from allreduce_step import MODELS

from bagua_ref.algorithms import Algorithm

DELAY = 0.020


def steps_per_second(name: str | None, seconds: float) -> float:
    """Train for ``seconds`` and return this rank's steps per second; ``None`` trains alone."""
    module, loss = MODELS["perceptron, 991,072 elements in 14"][0]()
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    if name is not None:
        module.with_bagua([optimizer], Algorithm.init(name))
    going = torch.ones(1)

    def step() -> None:
        optimizer.zero_grad()
        loss(module).backward()
        optimizer.step()
        if rank == 1:
            time.sleep(DELAY)

    for _ in range(5):
        step()
    workers.barrier()
    start, steps = time.perf_counter(), 0
    while going.item():
        step()
        steps += 1
        if name != "gradient_allreduce":
            going.fill_(time.perf_counter() - start < seconds)
        elif steps % 10 == 0:  # ranks that synchronize at each step must stop at the same one
            going.fill_(time.perf_counter() - start < seconds)
            dist.broadcast(going, 0)
    rate = steps / (time.perf_counter() - start)
    if name == "async":
        module.bagua_algorithm.abort(module)
    return rate


def measure(seconds: float, rounds: int) -> dict[str, float]:
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in ("async", "gradient_allreduce", None):
            rates.setdefault(name or "no communication (ideal)", []).append(
                steps_per_second(name, seconds)
            )
    return {name: sorted(values)[len(values) // 2] for name, values in rates.items()}


def main() -> int:
    args = common.arguments(__doc__.partition("\n\n")[0])
    ranks = workers.launch(measure, 2, *((0.5, 1) if args.quick else (6.0, 3)))
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    row = common.Row(
        "2 ranks, one 20 ms slower",
        "steps/s",
        total["async"],
        {name: rate for name, rate in total.items() if name != "async"},
        "gradient_allreduce",
        common.at_least(4.0),
        {"per_rank": ranks},
    )
    return common.report("straggler", [row], args)


if __name__ == "__main__":
    sys.exit(main())
