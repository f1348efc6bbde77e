"""A worker process of the demo: it trains with each algorithm in turn and records every step for the parent process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import bagua_ref
from bagua_ref.cli.recipes import ALONE, RECIPES, Digits, Recipe, Settings, make_model

__all__ = ["main", "train"]


def train(name: str, settings: Settings, digits: Digits, report: Callable[..., None]) -> None:
    """Train with algorithm ``name``, or alone, from the seed; every rank of the world calls it.

    Args:
        name: a name in `RECIPES`, or `ALONE` for one process that takes whole batches.
        settings: the settings of the demo.
        digits: the data.
        report: called with ``loss`` and ``bytes_sent`` (so far) after each step and with the ``result`` at the end.
    """
    alone = name == ALONE
    recipe = Recipe() if alone else RECIPES[name]
    torch.manual_seed(settings.seed)
    model: Any = make_model()
    optimizer = recipe.make_optimizer(model.parameters())
    if not alone:
        model.with_bagua([optimizer], recipe.make_algorithm(name, optimizer))
    share, shares = (0, 1) if alone else (bagua_ref.get_rank(), bagua_ref.get_world_size())
    begin = time.perf_counter()
    for images, labels in digits.batches(settings, share, shares):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        report(loss=loss.item(), bytes_sent=_bytes_sent(model))
    seconds = time.perf_counter() - begin
    if not alone and hasattr(model.bagua_algorithm, "abort"):
        model.bagua_algorithm.abort(model)  # it averages in the background until it is stopped
    model.eval()
    shared = nullcontext if alone else getattr(model.bagua_algorithm, "global_weights", nullcontext)
    with torch.no_grad(), shared():
        accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).double().mean().item()
    report(result={"accuracy": accuracy, "seconds": seconds, "weight_difference": 0.0 if alone else _weight_difference(model)})


def _bytes_sent(model: Any) -> int:
    """Return the bytes that this rank has sent for the model so far, by formula; 0 if it trains alone."""
    return model.bagua_metrics()["bytes_sent"] if hasattr(model, "bagua_algorithm") else 0


def _weight_difference(model: torch.nn.Module) -> float:
    """Return the largest difference of any weight between two ranks."""
    highest = parameters_to_vector(model.parameters()).detach().clone()
    lowest = highest.clone()
    bagua_ref.allreduce_inplace(highest, bagua_ref.ReduceOp.MAX)
    bagua_ref.allreduce_inplace(lowest, bagua_ref.ReduceOp.MIN)
    return float((highest - lowest).max())


@record
def main(directory: str) -> None:
    """Train with the settings in ``directory/settings.json``; write one JSON object per line to ``rank<r>.jsonl``."""
    torch.set_num_threads(1)  # there may be more workers than cores
    exchange = Path(directory)
    known = json.loads((exchange / "settings.json").read_text())
    settings = Settings(**{**known, "algorithms": tuple(known["algorithms"])})
    digits = Digits.restore(exchange / "digits.npz")
    parent = os.getppid()
    bagua_ref.init_process_group(
        backend="gloo", timeout=60 + settings.steps
    )  # rank 0 trains alone while the others wait, some milliseconds per step
    rank = bagua_ref.get_rank()
    Recipe().make_optimizer(
        make_model().parameters()
    )  # the first optimizer makes torch import many modules, which must not count as training time
    bagua_ref.barrier()
    with (exchange / f"rank{rank}.jsonl").open("w", buffering=1) as stream:
        for name in (ALONE, *settings.algorithms):

            def report(name: str = name, **news: Any) -> None:
                stream.write(json.dumps({"algorithm": name, **news}) + "\n")
                if os.getppid() != parent:
                    os._exit(1)  # a launcher that was killed with SIGKILL cannot end its workers

            if name != ALONE or rank == 0:
                train(name, settings, digits, report)
            bagua_ref.barrier()
    bagua_ref.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort a process at its normal exit


if __name__ == "__main__":
    main(sys.argv[1])
