"""DiLoCo's losses against other ways to use four workers, ordered as published, with a small
language model.

All continue from the same 200 steps of one worker. Then one worker takes 512 steps; four workers
average gradients (a batch four times as large) or train with DiLoCo, plain and streaming, for 512
steps; one worker takes four times as many steps. In the paper (arXiv:2311.08105, table 2) one
worker is worst, the larger batch next, then DiLoCo, and four times as many steps are best;
streaming (arXiv:2501.18512) learns as much as plain DiLoCo. It does here where fragments arrive
after a step; another row shows what it costs so short a training to wait for seven steps and to
keep half of what was done meanwhile, as very slow links ask for.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import sys

import common
import contenders
import torch
from contenders import Outer
from time_to_quality import Task, language
from torch import nn

import bagua_ref
from bagua_ref.communicators.base import Communicator
from bagua_ref.simulation import SimulatedWorld

WORKERS, PERIOD = 4, 32
OUTER = {
    "diloco": Outer(PERIOD),
    "diloco, streaming": Outer(PERIOD, fragments=4, delay=1),
    "diloco, streaming, 7 steps late": Outer(PERIOD, fragments=4, delay=7, mix=0.5),
}


def begin(task: Task, seed: int, steps: int) -> nn.Sequential:
    """Return the model after ``steps`` steps of one worker."""
    torch.manual_seed(seed)
    model = task.make()
    training = contenders.plain(model, task.optimizer)
    for batch in itertools.islice(task.batches(1000 + seed), steps):
        training.step(*batch)
    return model


def train(
    task: Task, start: nn.Sequential, name: str, seed: int, steps: int
) -> tuple[float, float]:
    """Go on from ``start``; return the held-out loss, and the most bytes that a rank has to send in
    the time of one step.
    """
    if name.startswith("one worker"):
        model = copy.deepcopy(start)
        training = contenders.plain(model, task.optimizer)
        for batch in itertools.islice(
            task.batches(seed), WORKERS * steps if "times" in name else steps
        ):
            training.step(*batch)
        return task.loss(model), 0.0

    def work(communicator: Communicator) -> tuple[float, float]:
        bagua_ref.init_process_group()
        model = copy.deepcopy(start)
        if name == "larger batch":
            training = contenders.ours(
                "gradient_allreduce", model, task.optimizer, hierarchical=False
            )
        else:
            training = contenders.our_diloco(model, task.optimizer, OUTER[name])
        group, most = model._bagua.process_group, 0
        for batch in itertools.islice(task.batches(WORKERS * seed + communicator.rank()), steps):
            before = group.bytes_sent
            training.step(*batch)
            most = max(most, group.bytes_sent - before)
        with training.weights():
            return task.loss(model), most / max(OUTER[name].delay if name in OUTER else 1, 1)

    return SimulatedWorld(WORKERS).run(work)[0]


CONTENDERS = ("one worker", "larger batch", *OUTER, "one worker, 4 times the steps")


def main() -> int:
    args = common.arguments(__doc__.partition("\n\n")[0])
    before, steps, seeds = (2, 32, 1) if args.quick else (200, 512, 3)
    task = language(width=64, layers=2)
    losses: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    peaks = dict.fromkeys(CONTENDERS, 0.0)
    for seed in range(seeds):
        start = begin(task, seed, before)
        for name in CONTENDERS:
            loss, peaks[name] = train(task, start, name, seed, steps)
            losses[name].append(loss)
            print(f"seed {seed}, {name}: {loss:.3f}", flush=True)
    mean = {name: statistics.mean(values) for name, values in losses.items()}
    noise = max(statistics.stdev(values) for values in losses.values()) if seeds > 1 else 0.0
    at_most_noise = common.at_most(1 + 2 * noise / mean["diloco"])
    limits = {
        "diloco": ("one worker", common.at_most(1.0)),
        "diloco, streaming": ("diloco", at_most_noise),
    }
    rows = []
    for name in CONTENDERS:
        against, limit = limits.get(name, ("one worker", common.NO_LIMIT))
        extra = {"seeds": losses[name], "most_bytes_per_step": peaks[name]}
        rows.append(common.Row(name, "loss", mean[name], mean, against, limit, extra))
    return common.report("published_order", rows, args)


if __name__ == "__main__":
    sys.exit(main())
