"""Predicted against measured times of training steps over slow links: 2 and 4 processes in network namespaces (S14).

Predictions are those of `bagua_ref.planning`, from what `bagua-ref measure` measures over the same link, and from training without
communication, on all ranks at once. Nothing is fitted to the times that are judged.
It needs Linux with iproute2 and permission to create network namespaces.
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

from bagua_ref.cli.measure import fit_links, time_codecs
from bagua_ref.planning import MeasuredMachine, StepPlan, median_of, plan_of, predict

SIZES = [256, *[512] * 3, 256]  # 0.8e6 parameters
BATCH = 64
BUCKET_BYTES = 1 << 20
RANKS = (2, 4)
LINKS = dict(sorted({**links.RATES, "300 Mbit/s": ("300mbit", 3e8)}.items(), key=lambda link: link[1][1]))
DELAYS = {"": 0.0, ", +5 ms": 0.005}
CONTENDERS = (*slow_link.OURS, "diloco", "diloco, streaming")
APART = 1.1
"""How many times as long one of two contenders takes as the other, at least, if their order is judged."""
WORK = {"10 Mbit/s": (2, 3), "100 Mbit/s": (5, 5), "300 Mbit/s": (8, 10), "1 Gbit/s": (12, 10)}
"""For each link, the least number of steps that are timed, and how often what costs are fitted to is repeated."""
BARS = {
    "median error": (0.10, common.at_most(1)),
    "largest error": (0.25, common.at_most(1)),
    "pairs in order": (0.95, common.at_least(1)),
}


def measure(rank: links.Rank, work: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the predicted and measured seconds of each contender's step on each link, and the costs of each link."""
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(BUCKET_BYTES)
    x, y = torch.randn(BATCH, SIZES[0]), torch.randint(SIZES[-1], (BATCH,))
    alone = contenders.plain(perceptron(*SIZES)[0], torch.optim.SGD)
    found: dict[str, Any] = {}
    for link, (steps, repeat) in work.items():
        rate, bits = LINKS[link]
        # Two milliseconds of the link: what is sent at once after a pause is not in the formulas.
        slow_down = partial(rank.slow_down, rate, burst=f"{2 * bits / 8000:.0f}b", queue="1s")
        slow_down()
        between = fit_links(repeat)["between"]
        rates = time_codecs(repeat)
        passes, updates, measured = list[float](), list[float](), {}
        plans: dict[str, StepPlan] = {}
        for name in CONTENDERS:
            dist.barrier()
            passes.append(_seconds(partial(alone.step, x, y), 6))  # beside each one, as a machine's speed varies
            updates.append(_seconds(alone.update, 6))
            rank.slow_down(None)
            training = slow_link.make(name, perceptron(*SIZES)[0], rank)
            plans[name] = plan = plan_of(training.options, training.forward, (1,) * rank.ranks)
            for _ in range(max(3, plan.cycle)):  # builds buckets; the warm-up of QAdam and PowerSGD
                training.step(x, y)
            slow_down()
            # Rounds in the background come in any step, so that one is as good as the mean of many.
            cycle, count = (plan.cycle, math.ceil(steps / plan.cycle)) if plan.interval is None else (100, 1)
            measured[name] = statistics.median(_seconds(partial(training.step, x, y), cycle) for _ in range(count))
            training.stop()
        whole, update = median_of(passes), median_of(updates)
        costs = MeasuredMachine((between.alpha, between.beta), (between.alpha, between.beta), whole, rates)
        machine = costs.machine(lambda estimate: estimate.value)._replace(compute=whole.value - update.value, after=update.value)
        seconds = {name: {"predicted": predict(plans[name], machine).seconds, "measured": measured[name]} for name in CONTENDERS}
        found[link] = {"seconds": seconds, "costs": machine._asdict(), "residuals": between.residuals}
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
    path = args.json or (None if args.quick else common.path_of("predicted_times"))
    rows, order = [], []
    for ranks, (added, delay) in itertools.product(RANKS[: 1 if args.quick else None], DELAYS.items()):
        named = {link: f"{ranks} ranks, {link}{added}" for link in LINKS}
        order += list(itertools.product(named.values(), CONTENDERS))
        chosen = [link for link, setting in named.items() if args.only in setting]
        work = dict.fromkeys(chosen[-1:], (2, 3)) if args.quick else {link: WORK[link] for link in chosen}
        found = links.launch(ranks, work, delay=delay) if work else {}
        for link, result in found.items():
            print(f"{named[link]}: {json.dumps(result['costs'])}; residuals {json.dumps(result['residuals'])}", flush=True)
            for name, seconds in result["seconds"].items():
                place = {"setting": named[link], "contender": name}
                predicted, peers = 1e3 * seconds["predicted"], {"measured": 1e3 * seconds["measured"]}
                rows.append(common.Row(f"{name}, {named[link]}", "ms/step", predicted, peers, "measured", extra=place))
    if path is not None:
        common.merge(path, "predicted_times", list(map(common.as_json, rows)), ("setting", "contender"), order)
    common.show(rows)
    print()
    known = list(map(common.as_json, rows)) if path is None else json.loads(path.read_text(encoding="utf-8"))["rows"]
    summary = [
        common.Row(f"{name}, of {len(known)} times", "1", figure, {"bar": BARS[name][0]}, "bar", BARS[name][1])
        for name, figure in judged(known).items()
    ]
    common.show(summary)
    return 0 if args.quick else int(any(not row.limit.holds(row.ratio) for row in summary))


if __name__ == "__main__":
    only = {"default": "", "metavar": "TEXT", "help": "run the settings with TEXT in their name; keep the other rows"}
    sys.exit(links.main(__doc__, measure, report, only=only))
