"""Predicted against published times: epochs of BERT-Large, and the bandwidth that Streaming DiLoCo
needs.

BERT-Large on 16 nodes of 8 GPUs, five algorithms, three networks: the figures are those of Gan et
al., "BAGUA", VLDB 2022. One constant is fitted, the steps of an epoch, to plain data parallelism at
1 Gbit/s; compute is the epoch of asynchronous averaging, which waits for nothing.

The bandwidth at which compute is busy for 50 % to 99 % of the time, models of three sizes, five
methods: Table 4 of Douillard et al., "Streaming DiLoCo with overlapping communication", 2025
(arXiv:2501.18512). One constant is fitted, the part of the nominal number of parameters that is
sent. Nothing runs: these are formulas (S14).
"""

from __future__ import annotations

import os
import statistics
import sys
from bisect import bisect_left
from collections.abc import Sequence

import common
import torch
from torch import nn

from bagua_ref.algorithms import Algorithm
from bagua_ref.formulas.costs import LinkCost, LinkCosts, all_reduce, chunk_bytes
from bagua_ref.planning import (
    Cluster,
    Exchange,
    Machine,
    Parameters,
    StepPlan,
    plan_of,
    predict,
    step_seconds,
)

NODES = (8,) * 16
INSIDE = "1000Gbit,5us"
NETWORKS = {
    "1 Gbit/s": "1Gbit,50us",
    "100 Gbit/s": "100Gbit,50us",
    "100 Gbit/s, +5 ms": "100Gbit,5.05ms",
}
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

BUSY = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The parts of the time for which compute is to be busy."""
GRID = [0.1 * 10 ** (4 * place / 49) for place in range(50)]
"""The bandwidths in Gbit/s that Table 4 names: 50 from 0.1 to 1000, evenly spaced in logarithm."""
SHOWN = [round(round(gbits, 2), 1) for gbits in GRID]
"""These as the table has them, which were rounded twice: 86.85 became 86.8, and 323.745 became
323.8.
"""
METHODS = {
    "data parallel": (1, 16, 0),
    "diloco": (100, 16, 0),
    "streaming": (100, 16, 0),
    "overlapped": (100, 16, 1),
}
METHODS["overlapped, FP4"] = (100, 4, 1)
"""Steps between two exchanges of a parameter, bits that are sent of it, and steps by which its
result may be late.
"""
MODELS = {"1B": (1e9, 24, 0.1), "10B": (1e10, 48, 0.8), "100B": (1e11, 108, 4.9)}
"""Parameters, layers, and seconds of a step's compute."""
TABLE_4 = {
    "1B": (
        (86.8, 152.6, 184.2, 222.3, 569.0),
        (1.4, 6.2, 13.3, 23.3, 86.8),
        (1.4, 5.2, 9.1, 16.0, 28.1),
        (1.4, 4.3, 6.2, 9.1, 11.0),
        (0.4, 0.9, 1.7, 2.0, 3.0),
    ),
    "10B": (
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (1.7, 7.5, 16.0, 33.9, 104.8),
        (1.7, 5.2, 9.1, 13.3, 19.3),
        (1.7, 3.6, 5.2, 6.2, 7.5),
        (0.4, 0.9, 1.4, 1.4, 1.7),
    ),
    "100B": (
        (184.2, 323.8, 390.7, 390.7, 471.5),
        (3.0, 11.0, 23.3, 49.4, 184.2),
        (2.4, 6.2, 9.1, 11.0, 19.3),
        (1.7, 3.6, 4.3, 5.2, 5.2),
        (0.5, 0.9, 1.1, 1.1, 1.4),
    ),
}
"""Gbit/s by model, method and part."""


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
        found[name] = plan_of(
            Algorithm.init(name, **OPTIONS.get(name, {})), Parameters(bert_large()), NODES
        )
    return found


def seconds(plan: StepPlan, network: str, steps: float) -> float:
    """Return those of an epoch of so many steps."""
    links, compute = LinkCosts.parse(f"{network},{INSIDE}"), PUBLISHED["async"][0] / steps
    machine = Machine(links, compute, codec={"": 1e-11}, at_once=True)  # as NCCL sends
    return steps * predict(plan, machine).seconds


def fitted(plan: StepPlan, network: str, epoch: float) -> float:
    """Return the steps with which an epoch takes so long; more steps take longer."""
    low, high = 1.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(plan, network, middle) < epoch else (low, middle)
    return low


def synchronizations(model: str, method: str, sent_part: float) -> list[list[Exchange]]:
    """Return the exchanges of each step that has any: two ranks all-reduce each layer once its
    gradients are ready.
    """
    elements, layers, _ = MODELS[model]
    cluster, nbytes = Cluster((1, 1)), round(elements / layers * sent_part * METHODS[method][1] / 8)
    sent = Exchange(all_reduce(chunk_bytes(nbytes, 1, 2)), cluster, nbytes)
    kept = Exchange([], cluster, nbytes)
    # of three layers, a third of the model apart
    fragments = 1 if method in ("data parallel", "diloco") else layers // 3
    return [
        [sent if layer % fragments == own else kept for layer in reversed(range(layers))]
        for own in range(fragments)
    ]


def busy(model: str, method: str, steps: Sequence[list[Exchange]], gbits: float) -> float:
    """Return the part of the time for which compute is busy."""
    compute, (period, _, late) = MODELS[model][2], METHODS[method]
    link = LinkCost(0.0, 8e-9 / gbits)
    machine = Machine(LinkCosts(link, link), compute)
    exposed = sum(
        max(0.0, step_seconds(exchanges, machine)[1] - late * compute) for exchanges in steps
    )
    return period * compute / (period * compute + exposed)


def table_4(sent_part: float) -> list[common.Row]:
    """Return a row for each of its entries."""
    rows = []
    for model, published in TABLE_4.items():
        for method, entries in zip(METHODS, published, strict=True):
            steps = synchronizations(model, method, sent_part)
            for part, entry in zip(BUSY, entries, strict=True):
                place = bisect_left(GRID, part, key=lambda gbits: busy(model, method, steps, gbits))
                off = min(
                    (place - other for other, shown in enumerate(SHOWN) if shown == entry), key=abs
                )
                work, extra = f"{model}, {method}, busy {part:.0%}", {"grid_steps": off}
                rows.append(
                    common.Row(
                        work, "Gbit/s", SHOWN[place], {"published": entry}, "published", extra=extra
                    )
                )
    return rows


def main() -> int:
    args = common.arguments(__doc__.partition("\n\n")[0])
    found = plans()
    steps = fitted(found[DDP], NETWORKS["1 Gbit/s"], PUBLISHED[DDP][0])
    rows = []
    for place, (link, network) in enumerate(NETWORKS.items()):
        for name, published in PUBLISHED.items():
            row = common.Row(
                f"{name}, {link}",
                "s",
                seconds(found[name], network, steps),
                {"published": published[place]},
                "published",
            )
            rows.append(row)
    # but for what was fitted
    off = [abs(row.ratio - 1) for row in rows if "async" not in row.work][1:]
    print(
        f"{steps:.0f} steps an epoch; off by {statistics.median(off):.0%} in the median,"
        f" {max(off):.0%} at most"
    )
    tables = {percent / 100: table_4(percent / 100) for percent in range(70, 101)}
    equal = {
        part: sum(row.extra["grid_steps"] == 0 for row in table) for part, table in tables.items()
    }
    part = max(equal, key=lambda part: equal[part])
    near = sum(abs(row.extra["grid_steps"]) <= 1 for row in tables[part])
    print(
        f"Table 4, {part:.0%} of the parameters: {equal[part]} of {len(tables[part])} equal, {near}"
        " within a step of the grid"
    )
    return common.report("published_times", rows + tables[part], args)


if __name__ == "__main__":
    sys.exit(main())
