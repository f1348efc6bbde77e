"""``bagua-ref measure``: the costs of this job's links, codecs and compute, which ``bagua-ref advise`` reads."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import bagua_ref
from bagua_ref.backends import get_codec, list_codecs
from bagua_ref.cli.command import (
    CommandError,
    Commands,
    add_command,
    add_json_options,
    call_object,
    number,
    print_rows,
    write_file,
    write_json,
)
from bagua_ref.comm_ops.top_k import count_of, largest
from bagua_ref.formulas.costs import all_reduce, chunk_bytes
from bagua_ref.planning import Cluster, Estimate, Exchange, Fit, MeasuredMachine, fit_link, median_of

__all__ = ["add_parser", "fit_links", "time_codecs", "times_of"]

_SIZES = (1 << 6, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
"""Elements of the all-reduced tensors."""
_LONGEST = 1.0
"""Seconds of an all-reduce after which no larger one is timed: over slow links it would take minutes, and tell no more."""
_ELEMENTS = 1 << 20
"""Those with which codecs are timed."""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``measure`` to the commands of ``bagua-ref``."""
    measure = add_command(
        commands,
        "measure",
        _measure,
        help="measure links, codecs and compute, for bagua-ref advise",
        description="Fit latency and bandwidth of the links inside nodes and between them to the times of all-reduces, time codecs "
        "and a training step, and write the costs that bagua-ref advise reads. Start it on every rank, as in: torchrun "
        "--nproc-per-node 2 -m bagua_ref.cli measure --output costs.json",
        epilog="Exit status is 0 on success and 2 on errors.",
    )
    measure.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file that rank 0 writes")
    measure.add_argument(
        "--step", metavar="PKG.MOD:FACTORY", help="a function that returns a function, which runs one forward and backward pass"
    )
    measure.add_argument(
        "--repeat", type=number(2, 1e6, whole=True), default=10, metavar="N", help="times that each is run (default: %(default)s)"
    )
    add_json_options(measure)


def _measure(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    step = None if arguments.step is None else call_object(arguments.step)
    if step is not None and not callable(step):
        raise CommandError(f"{arguments.step}() returned a {type(step).__name__}; it must return a function")
    bagua_ref.init_process_group()
    try:
        fits = fit_links(arguments.repeat)
        rates = time_codecs(arguments.repeat)
        compute = None if step is None else median_of(times_of(step, arguments.repeat))
        rank, ranks = bagua_ref.get_rank(), bagua_ref.get_world_size()
    finally:
        bagua_ref.destroy_process_group()
    if not fits:
        raise CommandError("one rank alone has no links to measure; start two or more, by torchrun")
    links = {kind: (fit.alpha, fit.beta) for kind, fit in fits.items()}
    about = f"measured on {ranks} ranks, with {arguments.repeat} repeats"
    found = MeasuredMachine(links.get("between"), links.get("inside"), compute, rates, about)
    if rank != 0:
        return 0
    result = found.as_json() | {"residuals": {kind: fit.residuals for kind, fit in fits.items()}}
    write_file(arguments.output, json.dumps(result, indent=2) + "\n")
    if not arguments.json:
        _print(found, fits)
        print(f"Costs: {arguments.output}")
    write_json(arguments, result)
    return 0


def fit_links(repeat: int) -> dict[str, Fit]:
    """Return the fitted costs of the links of each kind that there is; the same on all ranks, from the slowest one's times."""
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
        cluster = Cluster((1,) * n if kind == "between" else (n,))
        rounds, nbytes, seconds = [], [], []
        for size in _SIZES:
            x = torch.zeros(size)
            takes_part = comm.rank() >= 0 and comm.nranks() == n
            comm.compares_calls = False  # as in training, which compares rounds as a whole
            run = partial(comm.allreduce_inplace, x) if takes_part else partial(int)
            taken = torch.tensor(median(times_of(run, repeat)), dtype=torch.float64)
            everyone.allreduce_inplace(taken, bagua_ref.ReduceOp.MAX)
            exchange = Exchange(all_reduce(chunk_bytes(size, 4, n)), cluster, 4 * size)
            rounds.append(exchange.rounds.total())
            nbytes.append(sum(count * loads[0][1] for loads, count in exchange.rounds.items()))
            seconds.append(taken.item())
            if taken > _LONGEST and len(seconds) >= 3:
                break
        found[kind] = fit_link(rounds, nbytes, seconds)
    return found


def time_codecs(repeat: int) -> dict[str, Estimate]:
    """Return the seconds per element of every codec, of the selection of topk, and of a multiplication of powersgd."""
    x = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0))
    side = int(_ELEMENTS**0.5)
    square, column, out = x.view(side, side), x[:side].view(side, 1), torch.empty_like(x)
    work: dict[str, tuple[Callable[[], Any], int]] = {
        "topk": (lambda: largest(x, count_of(_ELEMENTS, 0.01)), _ELEMENTS),
        "powersgd": (lambda: square @ column, _ELEMENTS),
    }
    for name in list_codecs():
        codec = get_codec(name)
        work[name] = (lambda codec=codec: codec.decompress(codec.compress(x, 1), 1, out=out), 2 * _ELEMENTS)  # type: ignore[misc]
    rates = {name: median_of([taken / passed for taken in times_of(run, repeat)]) for name, (run, passed) in work.items()}
    return {**rates, "": max(rates.values(), key=lambda rate: rate.value)}


def times_of(run: Callable[[], Any], repeat: int) -> list[float]:
    """Return the seconds of each run but the first two, which may allocate memory or connect."""
    times = []
    for _ in range(2 + repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times[2:]


def _print(found: MeasuredMachine, fits: dict[str, Fit]) -> None:
    def cells(name: str, estimate: Estimate, unit: str, factor: float) -> Sequence[str]:
        return name, *(f"{number * factor:,.4g}" for number in (estimate.value, estimate.low, estimate.high)), unit

    rows = []
    for kind, fit in fits.items():
        rows.append(cells(f"latency {kind}", fit.alpha, "us", 1e6))
        rows.append(cells(f"time per byte {kind}", fit.beta, "ns", 1e9))
    rows += [cells(f"codec {name or 'not listed'}", rate, "ns per element", 1e9) for name, rate in found.codec.items()]
    rows += [] if found.compute is None else [cells("compute", found.compute, "ms", 1e3)]
    print_rows("Measured costs", ["", "value", "low", "high", "unit"], rows)
    for kind, fit in fits.items():
        parts = ", ".join(
            f"{4 * size:,} B {part:+.0%}" for size, part in zip(_SIZES[: len(fit.residuals)], fit.residuals, strict=True)
        )
        print(f"Fitted minus measured time of all-reduces {kind}: {parts}")
