"""Training by every algorithm and graph on 2 to 1,024 simulated ranks of one process: time, memory,
bytes and consensus.

Each row is a run of its own process: 20 steps of a model of 10,000 parameters. "copy" is the time
in which one thread copies as many bytes as the ranks send. The exit status is 1 if bytes are not
the plan's, or if the ranks' distance from their mean is not that of theory.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

import bagua_ref
from bagua_ref.algorithms import Algorithm, QAdamOptimizer
from bagua_ref.formulas.graphs import MODES, Graph
from bagua_ref.formulas.mixing import matrix
from bagua_ref.planning import StepPlan, plan_of
from bagua_ref.simulation import SimulatedWorld

STEPS = 20
GOALS = {"gradient_allreduce": 60.0}
GOAL, LARGEST = 150.0, 1024
"""The most seconds of a run with so many ranks."""
WORLDS = (2, 16, 128, LARGEST)
INTERVAL = 0.05
"""Virtual seconds of a step, and between two rounds of async."""
WARMUP = {"warmup_steps": 2}
RUNS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "qadam": {"hierarchical": False},
    "low_precision_decentralized": {"hierarchical": False},
    "async": {"sync_interval_ms": round(1000 * INTERVAL)},
    "local_sgd": {"period": 4, **WARMUP},
    "diloco": {"period": 4, **WARMUP},
    "powersgd": {"min_compression_rate": 1.0, **WARMUP},
    "topk": WARMUP,
    **{
        f"decentralized, {mode}": {"hierarchical": False, "peer_selection_mode": mode}
        for mode in MODES
    },
}


def model() -> torch.nn.Module:
    layers = [
        torch.nn.Linear(100, 50, bias=False),
        torch.nn.ReLU(),
        torch.nn.Linear(50, 100, bias=False),
    ]
    return torch.nn.Sequential(*layers)


def algorithm_for(run: str, module: torch.nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    name = run.partition(",")[0]
    if name == "qadam":
        adam = QAdamOptimizer(module.parameters(), lr=1e-3, **WARMUP)
        return Algorithm.init(name, q_adam_optimizer=adam, **RUNS[run]), adam
    lr = 0.0 if "decentralized" in name else 0.01  # then only averaging changes weights
    return Algorithm.init(name, **RUNS[run]), torch.optim.SGD(module.parameters(), lr=lr)


def name_of(run: str, n: int) -> str:
    return f"{run}, {n:,} ranks"


def train(comm: Any, run: str, steps: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return this rank's first hundred weights after each number of steps, and its metrics."""
    bagua_ref.init_process_group()
    module = model()
    algorithm, optimizer = algorithm_for(run, module)
    module.with_bagua([optimizer], algorithm)
    if "decentralized" in run:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(comm.rank()))
    inputs, weights = torch.randn(4, 100), next(module.parameters()).detach()[0]
    history = [weights.clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()
        history.append(weights.clone())
        if run == "async":
            bagua_ref.runtime.current_world().sleep(INTERVAL)
    if run == "async":
        module.bagua_algorithm.abort(module)
    return history, module.bagua_metrics()


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def copy_seconds(n: int) -> float:
    """Return the time of copying the weights of n ranks, for each byte."""
    sources, targets = torch.ones(2, n, 10_000).unbind()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / sources.nbytes


def planned(plan: StepPlan, steps: int, rounds: int | None) -> int:
    """Return the bytes that all ranks send in so many steps, or rounds of async with the last
    agreement to stop.
    """
    sent: dict[int, int] = {}
    places = (
        [1]
        if rounds is not None
        else [
            min(step, plan.warmup + 1 + (step - plan.warmup - 1) % plan.cycle)
            for step in range(1, steps + 1)
        ]
    )
    for place in set(places):
        operations = (exchange.operation for exchange in plan.exchanges(place))
        sent[place] = sum(
            message[2] for operation in operations for messages in operation for message in messages
        )
    return (
        sum(sent[place] for place in places)
        if rounds is None
        else rounds * sent[1] + 8 * (plan.cluster.n - 1)
    )


def graphs(run: str, n: int, steps: int) -> Iterator[Graph]:
    """Yield the graph of each step; with compressed changes (S3.5), weights set before the first
    step are only sent in it.
    """
    if run != "low_precision_decentralized":
        yield from (MODES[run.partition(", ")[2]].graph(step, n) for step in range(steps))
        return
    yield [[(rank, 1.0)] for rank in range(n)]
    # one of two is both
    neighbours = (
        MODES["ring"].graph(0, n) if n > 2 else [[(0, 1 / 3), (1, 2 / 3)], [(1, 1 / 3), (0, 2 / 3)]]
    )
    yield from [neighbours] * (steps - 1)


def consensus(
    run: str, histories: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[float], list[float]]:
    """Return the ranks' distance from their mean after each step, in parts of the first: measured,
    and by the mixing matrices.
    """
    measured = np.array(
        [[weights.numpy() for weights in history] for history in histories], dtype=np.float64
    ).swapaxes(0, 1)
    expected = [measured[0]]
    for graph in graphs(run, len(histories), len(measured) - 1):
        expected.append(matrix(graph) @ expected[-1])
    found, theory = (
        [float(np.linalg.norm(x - x.mean(0))) for x in weights] for weights in (measured, expected)
    )
    return [x / found[0] for x in found], [x / theory[0] for x in theory]


def measure(run: str, n: int, steps: int, results: Any) -> None:
    warnings.simplefilter("ignore")
    SimulatedWorld(2).run(train, run, 2)  # what is done once in a process
    per_byte, before = copy_seconds(n), resident()
    wall, processor = time.perf_counter(), time.process_time()
    ranks = SimulatedWorld(n).run(train, run, steps)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    metrics = [own for _, own in ranks]
    plan = plan_of(algorithm_for(run, model())[0], model(), (n,))
    sent, wanted = (
        sum(own["bytes_sent"] for own in metrics),
        planned(plan, steps, metrics[0].get("async_rounds")),
    )
    peers = {"copy": wanted * per_byte} | ({"goal": GOALS.get(run, GOAL)} if n == LARGEST else {})
    extra = {
        "algorithm": run,
        "ranks": n,
        "steps": steps,
        "processor_seconds": processor,
        "seconds_per_step": wall / steps,
        "memory_per_rank": memory // n,
        "bytes_sent": sent,
        "bytes_planned": wanted,
        "right": abs(sent - wanted) <= n,  # each rank counts a mean over ranks, rounded
    }
    if "decentralized" in run:
        found, theory = consensus(run, [history for history, _ in ranks])
        # Rounding in float32, and codes of 8 bits.
        near, far = (0.02, 0.02) if "low" in run else (1e-4, 1e-6)
        extra |= {"distance": found[-1], "distance_in_theory": theory[-1]}
        extra["right"] = extra["right"] and np.allclose(found, theory, near, far)
    against, limit = (
        ("goal", common.at_most(1.0)) if n == LARGEST else ("copy", common.at_least(1.0))
    )
    results.send(common.Row(name_of(run, n), "s", wall, peers, against, limit, extra))


def main() -> int:
    args = common.arguments(__doc__.partition("\n\n")[0], only=common.ONLY)
    rows, processes = [], multiprocessing.get_context("fork")
    order = list(itertools.product(WORLDS[:1] if args.quick else WORLDS, RUNS))
    for n, run in order:
        if args.only in name_of(run, n):
            ours, theirs = processes.Pipe()
            process = processes.Process(
                target=measure, args=(run, n, 6 if args.quick else STEPS, theirs)
            )
            process.start()
            theirs.close()
            rows.append(ours.recv())
            process.join()
            common.show(rows[-1:])
            common.keep("scale", rows[-1:], args, ("ranks", "algorithm"), order)
    wrong = [row.work for row in rows if not row.extra["right"]]
    print("".join(f"{work}: bytes or consensus differ from theory\n" for work in wrong), end="")
    missed = not args.quick and any(not row.limit.holds(row.ratio) for row in rows)
    return int(missed or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
