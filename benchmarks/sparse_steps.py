"""Steps, bytes and predicted seconds until sparse exchanges reach the loss that averaging gradients
reaches, for 4 processes; medians over 10 seeds.

The tasks are those of `time_to_quality.py`; losses are those of the weights to be judged, on
held-out data. A seed determines weights and batches. Bytes are what a rank sends; seconds are the
plan's price of a step, with compute as measured here and links of 10 and 100 Mbit/s, times the
steps. The bars, for SparseLoCo: 1.7 times diloco's steps, at 1/25 of its bytes.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from functools import partial
from importlib.resources import files
from typing import Any

import common
import contenders
import torch
import workers
from time_to_quality import TASKS

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.formulas.costs import LinkCosts
from bagua_ref.planning import Machine, plan_of, predict

PROCESSES = 4
BASELINE, LOCAL = "gradient_allreduce", "diloco"
SPARSE = {"top_k": 64, "compression": "Stat2"}
CONTENDERS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    LOCAL: {},
    "sparseloco": SPARSE,
    "sparseloco, contributors": {**SPARSE, "mean": "contributors"},
    "sparseloco, float32": {"top_k": 64},
    "demo": {},
    "demo, Stat2": {"compression": "Stat2"},
}
LINKS = ("10 Mbit/s", "100 Mbit/s")


def algorithm_of(name: str, period: int) -> tuple[str, dict[str, Any]]:
    options = CONTENDERS[name]
    if name == BASELINE or name.startswith("demo"):
        return name.partition(",")[0], options
    return LOCAL, {"period": period, **options}


def curve(task: Any, name: str, seed: int, quick: bool) -> list[float]:
    """Train, and return the held-out loss after every ``task.every`` steps on rank 0."""
    torch.manual_seed(seed)
    model, rank, losses = task.make(), bagua_ref.get_rank(), []
    # with signs, a step is the learning rate
    make = partial(torch.optim.SGD, lr=1e-3) if name.startswith("demo") else task.optimizer
    algorithm, options = algorithm_of(name, task.period)
    training = contenders.ours(algorithm, model, make, **options)
    batches = task.batches(rank + PROCESSES * seed)
    steps = task.every if quick else task.steps if name == BASELINE else task.most
    for step in range(1, steps + 1):
        training.step(*next(batches))
        if step % task.every == 0 and rank == 0:
            with training.weights():
                losses.append(task.loss(model))
            model.train()
    return losses


def measure(tasks: list[str], seeds: list[int], quick: bool) -> dict[str, Any]:
    """Return the curves of each contender by seed, and the seconds of a step without communication
    on all ranks at once.
    """
    found: dict[str, Any] = {}
    for name in tasks:
        task = TASKS[name]()
        alone, batches, times = contenders.plain(task.make(), task.optimizer), task.batches(0), []
        bagua_ref.barrier()
        for _ in range(2 if quick else 30):
            start = time.perf_counter()
            alone.step(*next(batches))
            times.append(time.perf_counter() - start)
        curves = {}
        for contender in CONTENDERS:
            curves[contender] = [curve(task, contender, seed, quick) for seed in seeds]
            if bagua_ref.get_rank() == 0:
                ends = ", ".join(f"{seed[-1]:.3f}" for seed in curves[contender])
                print(f"{name}, {contender}: {ends}", flush=True)
        found[name] = {"compute": statistics.median(times), "curves": curves}
    return found


def rows(name: str, compute: float, curves: dict[str, list[list[float]]]) -> list[common.Row]:
    """Return a row for each contender; where not all seeds reach the loss, of the lowest loss."""
    task = TASKS[name]()
    goals = [seed[-1] for seed in curves[BASELINE]]
    plans = {
        each: plan_of(_init(each, task.period), task.make(), (1,) * PROCESSES) for each in curves
    }
    devices = json.loads(files("bagua_ref.planning").joinpath("devices.json").read_text())
    costs = {key: devices["cpu"][key] for key in ("codec", "operation", "shared_processor")}
    found: dict[str, dict[str, Any]] = {}
    for contender, seeds in curves.items():
        reached = [
            next((place + 1 for place, x in enumerate(seed) if x <= goal), math.inf) * task.every
            for seed, goal in zip(seeds, goals, strict=True)
        ]
        steps, plan = statistics.median(reached), plans[contender]
        extra: dict[str, Any] = {"task": name, "steps": reached, "target": goals}
        extra["lowest"] = [min(seed) for seed in seeds]
        if math.isfinite(steps):
            extra["bytes"] = plan.sent[0] * steps
            for link in LINKS:
                rate = link.replace(" ", "").replace("/s", "")
                machine = Machine(LinkCosts.parse(f"{rate},1ms"), compute, **costs)
                extra[f"seconds, {link}"] = predict(plan, machine).seconds * steps
        found[contender] = {"ours": steps, **extra}
    local = found[LOCAL]
    result = []
    for contender, extra in found.items():
        steps = extra.pop("ours")
        work = f"{name}: {contender}"
        if not math.isfinite(steps):
            lowest, goal = statistics.median(extra["lowest"]), statistics.median(goals)
            extra["steps"] = [step if math.isfinite(step) else None for step in extra["steps"]]
            result.append(
                common.Row(
                    f"{work}, not reached", "loss", lowest, {"target": goal}, "target", extra=extra
                )
            )
            continue
        judged = contender.startswith("sparseloco") and "Stat2" in str(CONTENDERS[contender])
        limit = common.at_most(1.7) if judged else common.NO_LIMIT
        against = LOCAL if "bytes" in local else contender
        peers = (
            {LOCAL: statistics.median(local["steps"])} if against == LOCAL else {contender: steps}
        )
        result.append(common.Row(work, "steps", steps, peers, against, limit, extra))
        if judged and against == LOCAL:
            bars = {LOCAL: local["bytes"] / 1e6}
            mine = extra["bytes"] / 1e6
            result.append(
                common.Row(work, "MB", mine, bars, LOCAL, common.at_most(1 / 25), {"task": name})
            )
    return result


def _init(name: str, period: int) -> Algorithm:
    algorithm, options = algorithm_of(name, period)
    return Algorithm.init(algorithm, **options)


def main() -> int:
    options = {
        "seeds": {"type": int, "nargs": "+", "default": [*range(10)], "metavar": "SEED"},
        "only": {"default": "", "metavar": "TEXT", "help": "tasks with TEXT in their name"},
    }
    args = common.arguments(__doc__.partition("\n\n")[0], **options)
    tasks = [name for name in TASKS if args.only in name]
    tasks, seeds = (tasks[:1], [0]) if args.quick else (tasks, args.seeds)
    found = workers.launch(measure, PROCESSES, tasks, seeds, args.quick)[0]
    result = [row for name, each in found.items() for row in rows(name, **each)]
    return common.report("sparse_steps", result, args)


if __name__ == "__main__":
    sys.exit(main())
