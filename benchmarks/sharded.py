"""Time per training step of GPT-2's shapes in FSDP2 and HSDP, plain and with `bagua_ref.install`,
over a slow link: two processes in network namespaces, joined by veth and tbf.

FSDP2 shards over both ranks, so that it gathers weights over the link, too, which stays as it is;
in bfloat16, they are half as many bytes. In HSDP, each rank is a node that shards over itself, and
only gradients cross the link. It needs Linux with iproute2 and permission to create network
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
import links
import namespaces
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bagua_ref

LINKS = {**links.RATES, "not slowed": (None, math.inf)}
del LINKS["10 Mbit/s"]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {"FSDP2": {}, "FSDP2, weights in bfloat16": {"mp_policy": HALF}, "HSDP": {}}
OURS = ("plain", "gradient_allreduce", "bytegrad")
FASTER = {("100 Mbit/s", "HSDP"): 2.5, ("1 Gbit/s", "HSDP"): 1.5}
"""For links and kinds, how many times as fast as plain torch bytegrad is to be."""


class GPT2(nn.Module):
    """An encoder of GPT-2's depth and proportions, with the loss of its own input."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
                for _ in range(12)
            )
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def make(kind: str, ours: str, sizes: tuple[int, int]) -> tuple[Any, float]:
    """Return the model, and the seconds that `install` took."""
    torch.manual_seed(0)
    model, mesh = GPT2(*sizes), init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "shard"))
    options: dict[str, Any] = dict(KINDS[kind])
    if kind == "HSDP":
        options["mesh"] = mesh if ours == "plain" else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    begin = time.perf_counter()
    if ours != "plain":
        bagua_ref.install(model, ours, mesh["node"] if kind == "HSDP" else None)
    return model, time.perf_counter() - begin


def measure(rank: links.Rank, request: tuple[str | None, list[int], int, int]) -> dict[str, Any]:
    """Time the steps of each contender and count the bytes that it sends, one after the other."""
    rate, sizes, steps, passes = request
    tokens = torch.randint(sizes[1], (1, 32), generator=torch.Generator().manual_seed(rank.rank))
    found: dict[str, dict[str, list[float]]] = {}
    for name in [f"{kind}: {ours}" for kind in KINDS for ours in OURS] * passes:
        model, installing = make(*name.split(": "), sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(model: Callable[..., Any] = model, optimizer: Any = optimizer) -> None:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        rank.slow_down(rate)
        before = namespaces.bytes_sent()
        of_name = found.setdefault(name, {"seconds": [], "bytes": [], "installing": [installing]})
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            of_name["seconds"].append(time.perf_counter() - begin)
        of_name["bytes"].append((namespaces.bytes_sent() - before) / steps)
        rank.slow_down(None)
        dist.barrier()
    return {
        name: {what: statistics.median(values) for what, values in of_name.items()}
        for name, of_name in found.items()
    }


def report(args: argparse.Namespace) -> int:
    rows = []
    for link, (rate, bits) in list(LINKS.items())[-1 if args.quick else 0 :]:
        work = (1, 1) if args.quick else (3, 1) if bits < 5e8 else (7, 3)
        measured = links.launch(2, (rate, (32, 90) if args.quick else (256, 4608), *work))
        for kind in KINDS:
            plain = measured[f"{kind}: plain"]
            for ours in OURS[1:]:
                figure = measured[f"{kind}: {ours}"]
                times = FASTER.get((link, kind)) if ours == "bytegrad" else None
                bar = common.NO_LIMIT if times is None else common.at_most(1 / times)
                extra = {
                    "link": link,
                    "kind": kind,
                    "ours_is": ours,
                    "bytes_per_step": figure["bytes"],
                    "plain_bytes_per_step": plain["bytes"],
                    "install_ms": 1e3 * figure["installing"],
                }
                name = f"{kind}, {ours}, {link}, {figure['bytes'] / 1e6:.1f} MB"
                name += f" (plain {plain['bytes'] / 1e6:.1f})"
                milliseconds = [1e3 * times["seconds"] for times in (figure, plain)]
                peers = {"plain": milliseconds[1]}
                rows.append(
                    common.Row(name, "ms/step", milliseconds[0], peers, "plain", bar, extra)
                )
    return common.report("sharded", rows, args)


if __name__ == "__main__":
    sys.exit(links.main(__doc__, measure, report))
