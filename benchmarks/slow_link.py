"""Time per training step of every algorithm over a slow link: two processes in network namespaces,
joined by veth and tbf.

Peers in the same run: torch's DistributedDataParallel with its defaults, with its best settings,
with Adam, and with its fp16 and PowerSGD hooks; torch's PeriodicModelAverager; torchft's DiLoCo
(pip install torchft); Decent-DP (pip install decent-dp).
Each is shown with its limit: the bytes that a rank sends divided by the link's bandwidth. The last
link is as fast as the machine. It needs Linux with iproute2 and permission to create network
namespaces.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import contenders
import links
import namespaces
import torch
import torch.distributed as dist
from allreduce_step import perceptron
from contenders import Outer, Training
from torch import nn

# 6.5e6 parameters, and 0.1e6 for a smoke run
SIZES, FEW = [1024, *[1448] * 3, 576], [128, *[181] * 3, 72]
BATCH = 8
PERIOD = 32
LINKS = {**links.RATES, "not slowed": (None, math.inf)}
DDP, BEST, ADAM = "DDP", "DDP, best settings", "DDP, Adam"
HOOK, BEST_HOOK = "DDP, PowerSGD hook", "DDP, PowerSGD hook, best settings"
_POWERSGD = (0.97, (HOOK, BEST_HOOK))
FASTER = {
    "10 Mbit/s": {"powersgd": _POWERSGD},
    "100 Mbit/s": {
        "bytegrad": (3.85, (DDP, BEST)),
        "bytegrad, OneBit": (3.5, ("bytegrad",)),
        "qadam": (3.5, (ADAM,)),
        "powersgd": _POWERSGD,
    },
    "1 Gbit/s": {"bytegrad": (2.5, (DDP, BEST)), "qadam": (2.0, (ADAM,)), "powersgd": _POWERSGD},
    "not slowed": {"powersgd": _POWERSGD},
}
"""For each link, how many times as fast as the better of which peers a contender is to be."""

_FLAT = {"hierarchical": False}
OURS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam"),
        _FLAT,
    ),
    "async": {},
    "local_sgd": {"period": PERIOD},
    **{
        f"bytegrad, {codec}": {**_FLAT, "compression": codec, "error_feedback": True}
        for codec in ("MXFP8", "MXFP4", "OneBit")
    },
    "powersgd": {"matrix_approximation_rank": 1, "warmup_steps": 2},  # as torch's hook
    "powersgd, rank 4": {"matrix_approximation_rank": 4, "warmup_steps": 2},
    "topk, 1 %": {"ratio": 0.01, "warmup_steps": 2},
}
"""The arguments of `Algorithm.init`; the algorithm's name is what comes before the comma."""


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def make(name: str, network: nn.Module, rank: links.Rank) -> Training:
    """Return the contender ``name``."""
    streaming = Outer(PERIOD, fragments=4, delay=PERIOD // 4 - 1, mix=0.5)

    def torchft(outer: Outer) -> Training:
        return contenders.TorchFT(rank.address, rank.rank, rank.ranks, rank.store).diloco(
            network, _sgd, outer
        )

    best = {"gradient_as_bucket_view": True, "static_graph": True}
    makes: dict[str, Callable[[], Training]] = {
        DDP: lambda: contenders.ddp(network, _sgd),
        BEST: lambda: contenders.ddp(network, _sgd, **best),
        ADAM: lambda: contenders.ddp(network, torch.optim.Adam, **best),
        "DDP, fp16 hook": lambda: contenders.ddp(network, _sgd, "fp16"),
        # One bucket: with several, this hook's callbacks reorder collectives on gloo.
        HOOK: lambda: contenders.ddp(network, _sgd, "PowerSGD", bucket_cap_mb=1000),
        BEST_HOOK: lambda: contenders.ddp(network, _sgd, "PowerSGD", bucket_cap_mb=1000, **best),
        "Decent-DP": lambda: contenders.decent(network, _sgd),
        "PeriodicModelAverager": lambda: contenders.averager(network, _sgd, PERIOD),
        "torchft DiLoCo": lambda: torchft(Outer(PERIOD)),
        "torchft DiLoCo, streaming": lambda: torchft(streaming),
        "diloco": lambda: contenders.our_diloco(network, _sgd, Outer(PERIOD)),
        "diloco, streaming": lambda: contenders.our_diloco(network, _sgd, streaming),
    }
    if name in makes:
        return makes[name]()
    return contenders.ours(name.partition(",")[0], network, _sgd, **OURS[name])


EVERY_STEP = (
    DDP,
    BEST,
    ADAM,
    "DDP, fp16 hook",
    HOOK,
    BEST_HOOK,
    "Decent-DP",
    *(name for name in OURS if name != "local_sgd"),
)
AT_INTERVALS = (
    "PeriodicModelAverager",
    "torchft DiLoCo",
    "torchft DiLoCo, streaming",
    "local_sgd",
    "diloco",
    "diloco, streaming",
)


def measure(
    rank: links.Rank, request: tuple[str, list[int], int, int, int]
) -> dict[str, dict[str, float] | str]:
    """Time each contender's steps and count the bytes that it sends, one contender after the other,
    in several passes.
    """
    rate, sizes, steps, periods, passes = request
    x, y = torch.randn(BATCH, sizes[0]), torch.randint(sizes[-1], (BATCH,))
    times: dict[str, list[float]] = {}
    sent: dict[str, int] = {}
    lacking: dict[str, dict[str, float] | str] = {}
    for name in (*EVERY_STEP, *AT_INTERVALS) * passes:
        try:
            training = make(name, perceptron(*sizes)[0], rank)
        except ImportError as error:
            lacking[name] = str(error)
            continue
        whole = PERIOD if name in AT_INTERVALS else 1
        # builds buckets; the warm-up of QAdam and PowerSGD
        for _ in range(whole if whole > 1 else 3):
            training.step(x, y)
        rank.slow_down(rate)
        before = namespaces.bytes_sent()
        for _ in range(periods * whole if whole > 1 else steps):
            begin = time.perf_counter()
            training.step(x, y)
            times.setdefault(name, []).append(time.perf_counter() - begin)
        sent[name] = sent.get(name, 0) + namespaces.bytes_sent() - before
        rank.slow_down(None)
        training.stop()
        if not all(parameter.isfinite().all() for parameter in training.forward.parameters()):
            raise SystemExit(f"{name} has diverged: what was timed is no training")
        dist.barrier()
    average = {
        name: statistics.mean if name in AT_INTERVALS else statistics.median for name in times
    }
    return lacking | {
        name: {
            "seconds": average[name](taken),
            "mean": statistics.mean(taken),
            "bytes": sent[name] / len(taken),
        }
        for name, taken in times.items()
    }


def report(args: argparse.Namespace) -> int:
    shown = []
    for link_name, (rate, bits) in list(LINKS.items())[-1 if args.quick else 0 :]:
        if args.only not in link_name:
            continue
        rows = []
        work = (
            (2, 1, 1)
            if args.quick
            else (2, 2, 1)
            if bits < 5e7
            else (5, 4, 1)
            if bits < 5e8
            else (20, 2, 3)
        )
        figures = links.launch(2, (rate, FEW if args.quick else SIZES, *work))
        measured = {name: figure for name, figure in figures.items() if isinstance(figure, dict)}
        for name, reason in figures.items():
            if isinstance(reason, str):
                print(f"{name} was not measured: {reason}")
        for name, figure in measured.items():
            times, candidates = FASTER[link_name].get(name, (None, (DDP, BEST)))
            peers = {peer: 1e3 * measured[peer]["seconds"] for peer in candidates}
            better = min(peers, key=peers.__getitem__)
            bar = common.NO_LIMIT if times is None else common.at_most(1 / times)
            limit = 1e3 * 8 * figure["bytes"] / bits
            extra = {
                "link": link_name,
                "contender": name,
                "limit_ms": limit,
                "bytes_per_step": figure["bytes"],
                "mean_ms": 1e3 * figure["mean"],
            }
            work_name = f"{name}, {link_name} (bytes/bandwidth {limit:.0f} ms)"
            rows.append(
                common.Row(
                    work_name,
                    "ms/step",
                    1e3 * figure["seconds"],
                    {better: peers[better]},
                    better,
                    bar,
                    extra,
                )
            )
        shown += rows
        order = [(link, name) for link in LINKS for name in (*EVERY_STEP, *AT_INTERVALS)]
        common.keep("slow_link", rows, args, ("link", "contender"), order)
    common.show(shown)
    return 0 if args.quick else int(any(not row.limit.holds(row.ratio) for row in shown))


if __name__ == "__main__":
    sys.exit(links.main(__doc__, measure, report, only=common.ONLY))
