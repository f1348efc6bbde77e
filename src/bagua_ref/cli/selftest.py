"""``bagua-ref selftest``: short training runs with four algorithms in two processes on this
machine.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import bagua_ref
from bagua_ref.algorithms import Algorithm
from bagua_ref.cli.command import CommandError, Outcome, become_rank, table

__all__ = ["run"]

_RANKS, _STEPS, _TIMEOUT = 2, 24, 60.0
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"hierarchical": False},
    "decentralized": {"hierarchical": False},
    "local_sgd": {"period": 4},
}
_EQUAL = ("gradient_allreduce", "bytegrad", "local_sgd")
"""Algorithms with equal weights on all ranks after the last step."""


def run(arguments: Namespace) -> Outcome:
    """Run the self-test in new processes."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        try:
            # the port stays taken
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            spawn(_train, (store.port, str(path)), nprocs=_RANKS)
        except Exception as error:
            raise CommandError(
                f"a rank failed; bagua-ref doctor says what this machine has. {error}"
            ) from None
        rows = json.loads(path.read_text(encoding="utf-8"))
    failed = [row["algorithm"] for row in rows if row["problem"]]
    title = f"{_RANKS} ranks over gloo, {_STEPS} steps each, {time.perf_counter() - began:.0f} s"
    cells = [
        (row["algorithm"], f"{row['first']:.3g}", f"{row['last']:.3g}", row["problem"] or "ok")
        for row in rows
    ]
    then = "OK. Next: bagua-ref advise, to choose an algorithm for your network"
    if failed:
        then = f"FAILED: {', '.join(failed)}. Next: bagua-ref doctor"
    text = table(title, ("", "first loss", "last loss", ""), cells)
    return Outcome(f"{text}\n{then}", {"passed": not failed, "rows": rows}, int(bool(failed)))


def _train(rank: int, port: int, path: str) -> None:
    """Run all training runs on one rank; rank 0 writes the results."""
    become_rank(rank, _RANKS, port)
    bagua_ref.init_process_group(backend="gloo", timeout=_TIMEOUT)
    rows = [_row(name, options, rank) for name, options in _ALGORITHMS.items()]
    bagua_ref.destroy_process_group()
    if rank == 0:
        Path(path).write_text(json.dumps(rows), encoding="utf-8")


def _row(name: str, options: dict[str, Any], rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(16, 4)
    target = torch.randn(16, 4)
    x = torch.randn(_RANKS, 64, 16)[rank]
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    model.with_bagua(sgd, Algorithm.init(name, **options))
    losses = []
    for _ in range(_STEPS):
        sgd.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x @ target)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
    others = torch.empty(_RANKS * weights.numel())
    bagua_ref.communication.allgather(weights, others)
    problem = ""
    if not losses[-1] < losses[0] / 2:
        problem = "the loss has not fallen"
    elif name in _EQUAL and not all(other.equal(weights) for other in others.view(_RANKS, -1)):
        problem = "ranks have different weights"
    return {"algorithm": name, "first": losses[0], "last": losses[-1], "problem": problem}
