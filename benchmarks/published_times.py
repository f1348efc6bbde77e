"""Predicted against published epoch times: BERT-Large on 16 nodes of 8 GPUs, five algorithms, three networks.

The figures are those of Gan et al., "BAGUA", VLDB 2022. One constant is fitted, the steps of an epoch, to plain data parallelism at
1 Gbit/s; compute is the epoch of asynchronous averaging, which waits for nothing. Nothing runs: these are formulas (S14).
"""

from __future__ import annotations

import os
import statistics
import sys

import common
import torch
from torch import nn

from bagua_ref.algorithms import Algorithm
from bagua_ref.formulas.costs import LinkCosts
from bagua_ref.planning import Machine, Parameters, StepPlan, plan_of, predict

NODES = (8,) * 16
INSIDE = "1000Gbit,5us"
NETWORKS = {"1 Gbit/s": "1Gbit,50us", "100 Gbit/s": "100Gbit,50us", "100 Gbit/s, +5 ms": "100Gbit,5.05ms"}
DDP = "gradient_allreduce"
PUBLISHED = {
    DDP: (2580, 125, 905),
    "bytegrad": (700, 86, 464),
    "decentralized": (1505, 83, 415),
    "low_precision_decentralized": (730, 75, 155),
    "async": (61, 61, 61),
}
"""Seconds of an epoch on each network."""
OPTIONS = {DDP: {"hierarchical": True}, "decentralized": {"peer_selection_mode": "shift_one"}}
BUCKETS = {DDP: 25 * 2**20}  # those of torch's DistributedDataParallel; others: 10 MiB


def bert_large() -> nn.Module:
    """Return modules of the shapes of BERT-Large, without memory."""
    with torch.device("meta"):
        words = [nn.Embedding(size, 1024) for size in (30522, 512, 2)]
        layers = [nn.TransformerEncoderLayer(1024, 16, 4096) for _ in range(24)]
        return nn.ModuleList([*words, nn.LayerNorm(1024), *layers])


def plans() -> dict[str, StepPlan]:
    found = {}
    for name in PUBLISHED:
        os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = str(BUCKETS.get(name, 10 * 2**20))
        found[name] = plan_of(Algorithm.init(name, **OPTIONS.get(name, {})), Parameters(bert_large()), NODES)
    return found


def seconds(plan: StepPlan, network: str, steps: float) -> float:
    """Return those of an epoch of so many steps."""
    machine = Machine(LinkCosts.parse(f"{network},{INSIDE}"), compute=PUBLISHED["async"][0] / steps, codec={"": 1e-11})
    return steps * predict(plan, machine).seconds


def fitted(plan: StepPlan, network: str, epoch: float) -> float:
    """Return the steps with which an epoch takes so long; more steps take longer."""
    low, high = 1.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(plan, network, middle) < epoch else (low, middle)
    return low


def main() -> int:
    args = common.arguments(__doc__.partition("\n")[0])
    found = plans()
    steps = fitted(found[DDP], NETWORKS["1 Gbit/s"], PUBLISHED[DDP][0])
    rows = []
    for place, (link, network) in enumerate(NETWORKS.items()):
        for name, published in PUBLISHED.items():
            row = common.Row(
                f"{name}, {link}", "s", seconds(found[name], network, steps), {"published": published[place]}, "published"
            )
            rows.append(row)
    off = [abs(row.ratio - 1) for row in rows if "async" not in row.work][1:]  # but for what was fitted
    print(f"{steps:.0f} steps an epoch; off by {statistics.median(off):.0%} in the median, {max(off):.0%} at most")
    return common.report("published_times", rows, args)


if __name__ == "__main__":
    sys.exit(main())
