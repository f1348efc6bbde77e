"""A worker process of the demo, which trains with each algorithm in turn; rank 0 records every step for the parent process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import bagua_ref
from bagua_ref.cli.recipes import ALONE, RECIPES, Digits, Settings, make_model, make_optimizer
from bagua_ref.cli.report import TrainingOutcome
from bagua_ref.integrations.trained_module import call_if_there

__all__ = ["main", "train"]


def train(name: str, settings: Settings, digits: Digits, report: Callable[..., None]) -> TrainingOutcome:
    """Train with algorithm ``name``, or alone, from the seed; every rank of the world calls it, and gets the same outcome.

    Args:
        name: a name in `RECIPES`, or `ALONE` for one process that takes whole batches.
        settings: the settings of the demo.
        digits: the data.
        report: called with this rank's ``loss`` and ``bytes_sent`` (so far, by formula) after each step.
    """
    alone = name == ALONE
    torch.manual_seed(settings.seed)
    model: Any = make_model()
    optimizer = make_optimizer(name, model.parameters())
    if not alone:
        RECIPES[name].wrap(model, [optimizer])
    rank, ranks = (0, 1) if alone else (bagua_ref.get_rank(), bagua_ref.get_world_size())
    losses, sent = [], []
    begin = time.perf_counter()
    for images, labels in digits.batches(settings, rank, ranks):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sent.append(0 if alone else model.bagua_metrics()["bytes_sent"])
        report(loss=losses[-1], bytes_sent=sent[-1])
    seconds = torch.tensor([time.perf_counter() - begin])
    call_if_there("abort", model)  # async averages in the background until it is stopped
    model.eval()
    shared = nullcontext if alone else getattr(model.bagua_algorithm, "global_weights", nullcontext)
    with torch.no_grad(), shared():
        accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).double().mean().item()
    means = torch.tensor([accuracy, *losses, *sent], dtype=torch.float64)
    highest = parameters_to_vector(model.parameters()).detach().clone()
    lowest = highest.clone()
    if not alone:
        for values, operation in ((means, "AVG"), (seconds, "MAX"), (highest, "MAX"), (lowest, "MIN")):
            bagua_ref.allreduce_inplace(values, bagua_ref.ReduceOp[operation])
    accuracy, *both = means.tolist()
    losses, sent = both[: settings.steps], both[settings.steps :]
    last_epoch = losses[-settings.steps_per_epoch :]
    full = 2 * (ranks - 1) / ranks * 4 * len(highest)  # of a float32 all-reduce of all gradients, on each rank
    return TrainingOutcome(
        algorithm=name,
        test_accuracy=accuracy,
        final_loss=sum(last_epoch) / len(last_epoch),
        bytes_per_step=sent[-1] / settings.steps,
        ratio=sent[-1] / settings.steps / full if full else None,
        steps_per_second=settings.steps / seconds.item(),
        weight_difference=float((highest - lowest).max()),
        losses=losses,
        bytes_sent=sent,
    )


def main(directory: str) -> None:
    """Train with the settings in ``directory/settings.json``; rank 0 writes one JSON object per line to ``progress.jsonl``."""
    torch.set_num_threads(1)  # there may be more workers than cores
    exchange = Path(directory)
    known = json.loads((exchange / "settings.json").read_text())
    settings = Settings(**{**known, "algorithms": tuple(known["algorithms"])})
    digits = Digits(*torch.load(exchange / "digits.pt"))
    parent = os.getppid()
    # Rank 0 trains alone while the others wait, some milliseconds per step.
    bagua_ref.init_process_group(backend="gloo", timeout=60 + settings.steps)
    rank = bagua_ref.get_rank()
    # The first optimizer makes torch import many modules, which must not count as training time.
    make_optimizer(ALONE, make_model().parameters())
    bagua_ref.barrier()
    with (exchange / "progress.jsonl").open("a", buffering=1) as stream:
        for name in (ALONE, *settings.algorithms):

            def report(name: str = name, **news: Any) -> None:
                if rank == 0:
                    stream.write(json.dumps({"algorithm": name, **news}) + "\n")
                if os.getppid() != parent:
                    os._exit(1)  # a parent that was killed with SIGKILL cannot end its workers

            if name != ALONE or rank == 0:
                report(outcome=asdict(train(name, settings, digits, report)))
            bagua_ref.barrier()
    bagua_ref.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort a process at its normal exit


if __name__ == "__main__":
    main(sys.argv[1])
