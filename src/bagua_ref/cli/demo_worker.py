"""A worker process of the demo, which trains with each algorithm in turn; rank 0 reports every step to the parent process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import bagua_ref
from bagua_ref.cli.recipes import ALONE, RECIPES, Digits, Settings, make_model, make_optimizer
from bagua_ref.cli.report import TrainingOutcome
from bagua_ref.integrations.trained_module import call_if_there

__all__ = ["train", "work"]


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


def work(rank: int, port: int, settings: Settings, arrays: list[Any], events: Any) -> None:
    """Train with each algorithm in turn, as ``rank`` of a group whose store is at ``port``.

    Rank 0 puts a dict into the queue ``events`` after each step and at the end of each algorithm.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings would appear among the progress bars; errors are raised
    torch.set_num_threads(1)  # there may be more workers than cores
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": settings.workers, "LOCAL_WORLD_SIZE": settings.workers, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in environment.items()})
    digits = Digits(*map(torch.from_numpy, arrays))
    # Rank 0 trains alone while the others wait, some milliseconds per step.
    bagua_ref.init_process_group(backend="gloo", timeout=60 + settings.steps)
    # The first optimizer makes torch import many modules, which must not count as training time.
    make_optimizer(ALONE, make_model().parameters())
    bagua_ref.barrier()
    for name in (ALONE, *settings.algorithms):

        def report(name: str = name, **news: Any) -> None:
            if rank == 0:
                events.put({"algorithm": name, **news})

        if name != ALONE or rank == 0:
            report(outcome=train(name, settings, digits, report))
        bagua_ref.barrier()
    bagua_ref.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process at its normal exit
