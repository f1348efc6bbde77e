"""fuse_step on one thread against the same optimizer's step() as a for-loop, foreach, fused, and on
one flat parameter.

    python benchmarks/fuse_step.py [--quick] [--json PATH] [--models small resnet50 gpt2 ...]
    [--optimizers SGD Adam ...]

"flat" is the floor: a single parameter with the same number of elements. "gradients kept" means
gradients that zero_grad(set_to_none=False) leaves in place, "gradients new" those that autograd
allocates in each step, which is not timed. On the shapes of real models, a step must be at least
0.97 times as fast as the better of loop and foreach. Lion is lion-pytorch's.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common  # beside this file
import shapes
import torch
from torch import Tensor

from bagua_ref.contrib import fuse_optimizer

try:
    from lion_pytorch import Lion
except ImportError:
    sys.exit("this needs lion-pytorch: pip install '.[bench]'")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params, **flags: torch.optim.SGD(params, lr=1e-3, momentum=0.9, **flags),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Lion": Lion,
}
LOOP_LIMITS = {"SGD": 5.5, "Adam": 4.5}
NEW_LIMITS = {"SGD": 5.0, "Adam": 3.8}
MODEL_LIMIT = 0.97
JUDGED = ("SGD", "Adam", "AdamW", "RMSprop", "Lion")
"""On real models, their steps are compared with the better of loop and foreach."""


def small() -> shapes.Shapes:
    return [(1000,)] * 500


MODELS = {
    "small": small,
    "resnet50": shapes.resnet50,
    "gpt2": lambda: shapes.gpt2(256, vocabulary=4608),
    "mixture": shapes.mixture,
}
TITLES = {
    "small": "500 x 1,000",
    "resnet50": "ResNet-50",
    "gpt2": "GPT-2, width 256",
    "mixture": "mixture of 2,000",
}


@dataclass
class Contender:
    """An optimizer with its own parameters, and the function that takes a step."""

    parameters: list[Tensor]
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]

    def time(self, steps: int, new_gradients: bool = False) -> float:
        """Return the mean time of a step in ms: of this thread, so that it takes no notice of
        others on the machine.
        """
        total = 0.0
        for _ in range(steps if new_gradients else 1):
            if new_gradients:
                for parameter in self.parameters:
                    parameter.grad = parameter.grad.clone()
            start = time.thread_time()
            for _ in range(1 if new_gradients else steps):
                self.step()
            total += time.thread_time() - start
        return 1e3 * total / steps


def contender(kind: str, name: str, sizes: shapes.Shapes) -> Contender | None:
    """Return a contender, None if this optimizer has no such kind."""
    if kind in ("flat", "flat fused"):
        sizes = [(sum(torch.Size(shape).numel() for shape in sizes),)]
    parameters: list[Tensor] = [torch.nn.Parameter(torch.full(shape, 0.1)) for shape in sizes]
    flags: dict[str, Any] = {} if name == "Lion" else {"foreach": kind == "foreach"}
    if kind in ("fused", "flat fused", "fuse_step fused"):
        flags = {"fused": True}
    try:
        optimizer = OPTIMIZERS[name](parameters, **flags)
    except TypeError:  # no such flag: no such kind
        return None
    if kind == "foreach" and name == "Lion":
        return None
    if kind.startswith("fuse_step"):
        fuse_optimizer(optimizer, allow_inexact=kind == "fuse_step fused")
    for parameter in parameters:
        parameter.grad = torch.full(parameter.shape, 0.01)
    return Contender(
        parameters,
        optimizer,
        optimizer.fuse_step if kind.startswith("fuse_step") else optimizer.step,
    )


def turns(
    contenders: dict[str, Contender], rounds: int, steps: int, new_gradients: bool = False
) -> dict[str, list[float]]:
    """Return times in ms. Contenders alternate after several steps each, so that a step finds its
    data in the cache as usual.
    """
    times: dict[str, list[float]] = {kind: [] for kind in contenders}
    for turn in range(rounds + 1):
        for kind, entry in contenders.items():
            if turn == 0:  # warm up: touch memory, create state, move gradients
                entry.time(max(steps, 3), new_gradients)
            else:
                times[kind].append(entry.time(steps, new_gradients))
    return times


def alternate(
    contenders: dict[str, Contender], rounds: int, steps: int, new_gradients: bool = False
) -> dict[str, float]:
    """Return the medians of `turns`."""
    return {
        kind: statistics.median(times)
        for kind, times in turns(contenders, rounds, steps, new_gradients).items()
    }


def small_rows(name: str, rounds: int) -> list[common.Row]:
    kinds = ("for-loop", "foreach", "fused", "flat", "flat fused", "fuse_step", "fuse_step fused")
    contenders = {
        kind: entry for kind in kinds if (entry := contender(kind, name, small())) is not None
    }
    kept = alternate(contenders, rounds, 20)
    ours = kept["fuse_step"]
    peers = {kind: kept[kind] for kind in ("for-loop", "foreach", "fused", "flat") if kind in kept}

    def row(
        work: str, ours: float, peers: dict[str, float], against: str, at_least: float | None
    ) -> common.Row:
        limit = common.at_most(1 / at_least) if at_least else common.NO_LIMIT
        extra = {"times faster": peers[against] / ours, "asked for": at_least}
        return common.Row(
            f"{name} {TITLES['small']}, {work}", "ms", ours, peers, against, limit, extra
        )

    rows = [row("gradients kept", ours, peers, "for-loop", LOOP_LIMITS.get(name))]
    if "fused" in kept:
        inexact = {"fused": kept["fused"], "flat": kept["flat fused"]}
        rows.append(row("fused=True, inexact", kept["fuse_step fused"], inexact, "fused", None))
    new = alternate(
        {kind: contenders[kind] for kind in ("for-loop", "fuse_step")},
        rounds,
        10,
        new_gradients=True,
    )
    rows.append(
        row(
            "gradients new",
            new["fuse_step"],
            {"for-loop": new["for-loop"]},
            "for-loop",
            NEW_LIMITS.get(name),
        )
    )
    return rows


def model_rows(model: str, name: str, rounds: int) -> list[common.Row]:
    """Compare with the better of loop and foreach, gradients kept and new."""
    kinds = ("for-loop", "foreach", "fused", "fuse_step")
    contenders = {
        kind: entry
        for kind in kinds
        if (entry := contender(kind, name, MODELS[model]())) is not None
    }
    rows = []
    for new in (False, True):
        times = turns(contenders, rounds, 1 if new else 2, new)
        medians = {kind: statistics.median(taken) for kind, taken in times.items()}
        peers = {kind: median for kind, median in medians.items() if kind != "fuse_step"}
        better = min(peers.keys() - {"fused"}, key=peers.__getitem__)
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(times["fuse_step"], times[better], strict=True)
        )
        work = f"{name} {TITLES[model]}, gradients {'new' if new else 'kept'}"
        limit = (
            common.at_most(1 / MODEL_LIMIT)
            if name in JUDGED and model in ("resnet50", "gpt2")
            else common.NO_LIMIT
        )
        extra = {"times faster": 1 / ratio, "asked for": MODEL_LIMIT}
        rows.append(
            common.Row(work, "ms", medians["fuse_step"], peers, better, limit, extra, paired=ratio)
        )
    return rows


def main() -> int:
    args = common.arguments(
        "fuse_step on one thread against the same optimizer's step().",
        models={"nargs": "+", "choices": tuple(MODELS), "default": tuple(MODELS)},
        optimizers={"nargs": "+", "choices": tuple(OPTIMIZERS)},
    )
    torch.set_num_threads(1)
    rows: list[common.Row] = []
    for model in ["small", "gpt2"] if args.quick else args.models:
        for name in args.optimizers or list(OPTIMIZERS)[: 1 if args.quick else None]:
            if model == "small":
                rows += small_rows(name, 2 if args.quick else 7)
            else:
                rows += model_rows(model, name, 2 if args.quick else 11)
            gc.collect()
    return common.report("fuse_step", rows, args)


if __name__ == "__main__":
    sys.exit(main())
