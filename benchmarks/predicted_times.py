"""Predicted against measured times of training steps over slow links: 2 and 4 processes in network
namespaces (S14).

Predictions are those of `bagua_ref.planning`, from what `bagua-ref measure` measures over the same
link, and from training without communication, on all ranks at once. Nothing is fitted to the times
that are judged. It needs Linux with iproute2 and permission to create network namespaces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import contenders
import links
import slow_link
import torch
import torch.distributed as dist
from allreduce_step import perceptron

from bagua_ref.cli.measure import fit_links, time_operations, times_of
from bagua_ref.formulas.costs import LinkCosts
from bagua_ref.planning import Machine, StepPlan, plan_of, predict

SIZES = [256, *[512] * 3, 256]  # 0.8e6 parameters
BATCH = 64
BUCKET_BYTES = 1 << 20
RANKS = (2, 4)
LINKS = dict(
    sorted({**links.RATES, "300 Mbit/s": ("300mbit", 3e8)}.items(), key=lambda link: link[1][1])
)
DELAYS = {"": 0.0, ", +5 ms": 0.005}
CONTENDERS = (*slow_link.OURS, "diloco", "diloco, streaming")
PARTS = ("compute", "after", "links", "own")
"""Of a step, in the result: compute, what follows it, links, and what a rank computes for
operations; some of it at once.
"""
APART = 1.1
"""How many times as long one of two contenders takes as the other, at least, if their order is
judged.
"""
WORK = {"10 Mbit/s": (2, 3), "100 Mbit/s": (5, 5), "300 Mbit/s": (8, 10), "1 Gbit/s": (12, 10)}
"""For each link, the least number of steps that are timed, and how often what costs are fitted to
is repeated.
"""
BARS = {
    "median error": (0.10, common.at_most(1)),
    "largest error": (0.25, common.at_most(1)),
    "pairs in order": (0.95, common.at_least(1)),
}


def measure(rank: links.Rank, work: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the predicted and measured seconds of each contender's step on each link, and the
    costs of each link.
    """
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(BUCKET_BYTES)
    x, y = torch.randn(BATCH, SIZES[0]), torch.randint(SIZES[-1], (BATCH,))
    sgd, adam = (
        contenders.plain(perceptron(*SIZES)[0], make)
        for make in (torch.optim.SGD, contenders.qadam)
    )
    found: dict[str, Any] = {}
    for name_of_link, (steps, repeat) in work.items():
        rate, bits = LINKS[name_of_link]
        # Two milliseconds of the link: what is sent at once after a pause is not in the formulas.
        slow_down = partial(rank.slow_down, rate, burst=f"{2 * bits / 8000:.0f}b", queue="1s")
        slow_down()
        link, residuals = fit_links(repeat)["between"]
        links_cost = LinkCosts(link, link)
        rates, operations = time_operations(repeat, links_cost)
        passes, updates, measured = list[float](), dict[str, float](), {}
        plans: dict[str, StepPlan] = {}
        for name in CONTENDERS:
            dist.barrier()
            alone = adam if name == "qadam" else sgd
            # beside each one, as a machine's speed varies
            updates[name] = statistics.median(times_of(alone.update, 6))
            passes += [taken - updates[name] for taken in times_of(partial(alone.step, x, y), 6)]
            rank.slow_down(None)
            training = slow_link.make(name, perceptron(*SIZES)[0], rank)
            plans[name] = plan = plan_of(training.options, training.forward, (1,) * rank.ranks)
            cycle = len(plan.cycle)
            for _ in range(max(3, cycle)):  # builds buckets; the warm-up of QAdam and PowerSGD
                training.step(x, y)
            slow_down()
            # Rounds in the background come in any step, so that one is as good as the mean of many.
            cycle, count = (cycle, math.ceil(steps / cycle)) if plan.interval is None else (100, 1)
            measured[name] = statistics.median(
                _seconds(partial(training.step, x, y), cycle) for _ in range(count)
            )
            training.stop()
        compute = statistics.median(passes)
        machine = Machine(links_cost, compute, 0.0, rates, operations, True, at_once=True)
        seconds = {}
        for name in CONTENDERS:
            predicted = predict(plans[name], machine._replace(after=updates[name]))
            of_links = predict(plans[name], machine._replace(codec={}, operation={})).communication
            seconds[name] = {
                "predicted": predicted.seconds,
                "measured": measured[name],
                "compute": machine.compute,
                "after": updates[name],
                "links": of_links,
                "own": predicted.communication - of_links,
            }
        found[name_of_link] = {
            "seconds": seconds,
            "costs": machine._asdict(),
            "residuals": residuals,
        }
    return found


def _seconds(step: Callable[[], object], count: int) -> float:
    """Return the mean seconds of ``count`` steps."""
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begin) / count


def judged(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return what `BARS` are about."""
    errors = [abs(row["ratio"] - 1) for row in rows]
    settings = defaultdict(list)
    for row in rows:
        settings[row["setting"]].append((row["peers"]["measured"], row["ours"]))
    pairs = [sorted(pair) for seen in settings.values() for pair in itertools.combinations(seen, 2)]
    in_order = [first[1] < second[1] for first, second in pairs if second[0] > APART * first[0]]
    share = statistics.fmean(in_order) if in_order else 1.0
    return dict(zip(BARS, (statistics.median(errors), max(errors), share), strict=True))


def report(args: argparse.Namespace) -> int:
    rows, order = [], []
    for ranks, (added, delay) in list(itertools.product(RANKS, DELAYS.items()))[
        : 1 if args.quick else None
    ]:
        named = {link: f"{ranks} ranks, {link}{added}" for link in LINKS}
        order += list(itertools.product(named.values(), CONTENDERS))
        chosen = [link for link, setting in named.items() if args.only in setting]
        work = (
            # over a faster link, a step takes as long as a busy machine makes a process wait
            dict.fromkeys([link for link in chosen if link == "100 Mbit/s"], (3, 5))
            if args.quick
            else {link: WORK[link] for link in chosen}
        )
        found = links.launch(ranks, work, delay=delay) if work else {}
        for link, result in found.items():
            print(
                f"{named[link]}: {json.dumps(result['costs'])}; residuals"
                f" {json.dumps(result['residuals'])}",
                flush=True,
            )
            for name, seconds in result["seconds"].items():
                ms = {part: 1e3 * taken for part, taken in seconds.items()}
                extra = {
                    "setting": named[link],
                    "contender": name,
                    "parts": {part: ms[part] for part in PARTS},
                }
                peers = {"measured": ms["measured"]}
                rows.append(
                    common.Row(
                        f"{name}, {named[link]}",
                        "ms/step",
                        ms["predicted"],
                        peers,
                        "measured",
                        extra=extra,
                    )
                )
    known = common.keep("predicted_times", rows, args, ("setting", "contender"), order)
    common.show(rows)
    print()
    summary = [
        common.Row(
            f"{name}, of {len(known)} times",
            "1",
            figure,
            {"bar": BARS[name][0]},
            "bar",
            BARS[name][1],
        )
        for name, figure in judged(known).items()
    ]
    common.show(summary)
    return 0 if args.quick else int(any(not row.limit.holds(row.ratio) for row in summary))


if __name__ == "__main__":
    sys.exit(links.main(__doc__, measure, report, only=common.ONLY))
