"""``bagua-ref measure``: measure the costs of this job's links, codecs and compute, for ``bagua-ref
advise``.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from statistics import median
from typing import Any

import torch

import bagua_ref
from bagua_ref.algorithms import (
    Algorithm,
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
    PowerSGDAlgorithm,
    TopKAlgorithm,
)
from bagua_ref.backends import list_codecs
from bagua_ref.cli.command import CommandError, Outcome, call_object, table
from bagua_ref.communicators.base import Communicator
from bagua_ref.data_parallel import DistributedDataParallel
from bagua_ref.formulas.costs import LinkCost, LinkCosts
from bagua_ref.planning import (
    Cluster,
    Exchange,
    Machine,
    exchange_seconds,
    fit_link,
    plan_of,
)
from bagua_ref.simulation import SimulatedWorld

__all__ = ["check_fits", "fit_links", "run", "time_operations", "times_of"]

_SIZES = (1 << 6, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
"""Numbers of elements of the tensors to all-reduce."""
_LONGEST = 1.0
"""Time of an all-reduce, in seconds, after which larger ones are skipped: over slow links they
would take minutes and add nothing.
"""
_BUCKETS = 4
"""Number of buckets in the training runs that time operations."""
_SMALL, _LARGE = 24, 512
"""Side of each bucket's square matrix; `powersgd` compresses even the small ones."""


def run(arguments: Namespace) -> Outcome:
    """Measure on all ranks; the first one reports."""
    step = None if arguments.step is None else call_object(arguments.step)
    if step is not None and not callable(step):
        raise CommandError(
            f"{arguments.step}() returned a {type(step).__name__}; it must return a function"
        )
    bagua_ref.init_process_group()
    try:
        fits = fit_links(arguments.repeat)
        if not fits:
            raise CommandError(
                "measure needs at least 2 ranks. Run: torchrun --nproc-per-node 2 -m bagua_ref.cli"
                " measure --output costs.json"
            )
        check_fits({kind: residuals for kind, (_, residuals) in fits.items()}, arguments.residual)
        links = {kind: link for kind, (link, _) in fits.items()}
        first = next(iter(links.values()))
        costs = LinkCosts(links.get("between", first), links.get("inside", first))
        rates, operations = time_operations(arguments.repeat, costs)
        compute = None if step is None else median(times_of(step, arguments.repeat))
        rank, ranks = bagua_ref.get_rank(), bagua_ref.get_world_size()
    finally:
        bagua_ref.destroy_process_group()
    result = {
        "between": links.get("between"),
        "inside": links.get("inside"),
        "compute": compute,
        "codec": rates,
        "operation": operations,
        "shared_processor": True,
        "about": f"measured on {ranks} ranks, with {arguments.repeat} repeats",
        "residuals": {kind: residuals for kind, (_, residuals) in fits.items()},
    }
    if rank:
        return Outcome("", None)
    text = f"{_text(result)}\nCosts: {arguments.output}"
    text += f"\nNext: bagua-ref advise --measured {arguments.output}"
    files = {arguments.output: json.dumps(result, indent=2) + "\n"}
    return Outcome(text, result, files=files)


def check_fits(residuals_of: dict[str, list[float]], limit: float) -> None:
    """Raise CommandError if fitted times differ from measured ones by more than ``limit``."""
    for kind, residuals in residuals_of.items():
        residual = max(map(abs, residuals))
        if residual > limit:
            where = "inside nodes" if kind == "inside" else "between nodes"
            raise CommandError(
                f"latency and bandwidth do not describe the links {where}: the fit is off by up to"
                f" {residual:.0%}, more than {limit:.0%}. Try again on idle machines with a larger"
                " --repeat, or allow it by --residual"
            )


def fit_links(repeat: int) -> dict[str, tuple[LinkCost, list[float]]]:
    """Return the fitted costs and residuals of each kind of link, from the slowest rank's times;
    equal on all ranks.
    """
    group = bagua_ref.communication.new_group()
    everyone, leaders, node = (
        group.get_global_communicator(),
        group.get_inter_node_communicator(),
        group.get_intra_node_communicator(),
    )
    found = {}
    for kind, comm in (("inside", node), ("between", leaders)):
        size_of = torch.tensor([comm.nranks()])
        everyone.allreduce_inplace(size_of, bagua_ref.ReduceOp.MAX)  # nodes may be uneven
        n = int(size_of.item())
        if n == 1:
            continue
        rounds, nbytes, seconds = list[float](), list[float](), list[float]()
        for size in _SIZES:
            x = torch.zeros(size)
            takes_part = comm.rank() >= 0 and comm.nranks() == n
            comm.compares_calls = False  # as in training, which compares rounds as a whole
            run = partial(comm.allreduce_inplace, x) if takes_part else partial(int)
            taken = torch.tensor(median(times_of(run, repeat)), dtype=torch.float64)
            everyone.allreduce_inplace(taken, bagua_ref.ReduceOp.MAX)
            rounds.append(2 * (n - 1))  # of a ring, with a chunk each (S14.1)
            nbytes.append(rounds[-1] * 4 * size / n)
            seconds.append(taken.item())
            if taken > _LONGEST and len(seconds) >= 3:
                break
        found[kind] = fit_link(rounds, nbytes, seconds)
    return found


def time_operations(repeat: int, links: LinkCosts) -> tuple[dict[str, float], dict[str, float]]:
    """Measure a rank's own time in operations on buckets, by codec: seconds per element, and
    seconds per operation of any size.

    Short training runs are timed, minus their time without communication. The time per element is
    measured with a single simulated rank on large buckets; the time per operation with all ranks on
    small buckets, minus the time of the links. Codecs that are not listed count as the most
    expensive one.

    Args:
        repeat: number of steps of each run.
        links: costs of the links.
    """
    usual = ByteGradAlgorithm(hierarchical=False)
    kinds = {"": GradientAllReduceAlgorithm(hierarchical=False), usual.compression: usual}
    for name in list_codecs():
        kinds.setdefault(name, ByteGradAlgorithm(False, compression=name, error_feedback=True))
    kinds["topk"], kinds["powersgd"] = (
        TopKAlgorithm(warmup_steps=0),
        PowerSGDAlgorithm(4, warmup_steps=0),
    )
    nodes = Cluster.even(
        bagua_ref.get_world_size(), bagua_ref.get_world_size() // bagua_ref.get_local_size()
    )
    rates, operations = dict[str, float](), dict[str, float]()
    for name, algorithm in kinds.items():
        if name:
            small, large = SimulatedWorld(1).run(partial(_alone, algorithm, repeat))[0]
            passed = sum(_exchange(algorithm, _LARGE, Cluster((1,))).work.values())
            rates[name] = max(0.0, (large - small) / passed)
        exchange = _exchange(algorithm, _SMALL, nodes)
        machine = Machine(links, 0.0, codec=rates, at_once=True)
        own = _beside_compute(algorithm, _SMALL, repeat) - exchange_seconds(exchange, machine)
        operations[name] = max(0.0, own)  # noise may make it negative
    return {**rates, "": max(rates.values())}, operations


def _exchange(algorithm: Algorithm, side: int, nodes: Cluster) -> Exchange:
    return plan_of(algorithm, torch.nn.Linear(side, side, bias=False, device="meta"), nodes).cycle[
        0
    ][0]


def _alone(algorithm: Algorithm, repeat: int, _: Communicator) -> list[float]:
    bagua_ref.init_process_group()
    return [_beside_compute(algorithm, side, repeat) for side in (_SMALL, _LARGE)]


def _beside_compute(algorithm: Algorithm, side: int, repeat: int) -> float:
    """Return the time per bucket of a training step, in seconds, minus that of a step without
    communication.
    """
    plain = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(_BUCKETS)))
    # a bucket for each parameter
    wrapped = DistributedDataParallel(deepcopy(plain), bucket_cap_mb=1e-6, algorithm=algorithm)
    x = torch.ones(1, side)
    compute, steps = (
        median(times_of(lambda model=model: model(x).sum().backward(), repeat))  # type: ignore[misc]
        for model in (plain, wrapped)
    )
    return (steps - compute) / _BUCKETS


def times_of(run: Callable[[], Any], repeat: int) -> list[float]:
    """Return the time of each run in seconds, without the first two, which may allocate memory or
    connect.
    """
    times = []
    for _ in range(2 + repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times[2:]


def _text(result: dict[str, Any]) -> str:
    rows = []
    for kind, residuals in result["residuals"].items():
        alpha, beta = result[kind]
        rows.append((f"latency {kind}", f"{alpha * 1e6:,.4g}", "us"))
        rows.append((f"time per byte {kind}", f"{beta * 1e9:,.4g}", "ns"))
        rows.append((f"largest error of the fit {kind}", f"{max(map(abs, residuals)):.0%}", ""))
    for name, rate in result["codec"].items():
        rows.append((f"codec {name or 'not listed'}", f"{rate * 1e9:,.4g}", "ns per element"))
    for name, cost in result["operation"].items():
        rows.append((f"operation {name or 'without a codec'}", f"{cost * 1e6:,.4g}", "us"))
    if result["compute"] is not None:
        rows.append(("compute", f"{result['compute'] * 1e3:,.4g}", "ms"))
    return table("Measured costs", ("", "", "unit"), rows)
