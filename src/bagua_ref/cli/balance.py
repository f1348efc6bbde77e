"""``bagua-ref balance``: padding and waiting time in an epoch of samples of given lengths, without
training.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from bagua_ref.cli.command import COLORS, CommandError, Outcome, load_object, table, write_picture
from bagua_ref.contrib.budget_batch_sampler import BudgetBatchSampler
from bagua_ref.contrib.load_balancing_sampler import LoadBalancingDistributedSampler

__all__ = ["read_lengths", "run", "work_of_epochs"]

COSTS: dict[str, Callable[[int, float], float]] = {
    "padded": lambda size, longest: size * longest,
    "attention": lambda size, longest: size * longest * longest,
}
"""Name -> function of batch size and longest sample that returns a batch's cost."""
_DRAWN = 60  # steps in the plot: more would be unreadable


def run(arguments: Namespace) -> Outcome:
    """Compare ways of distributing the samples."""
    try:
        epochs = work_of_epochs(
            read_lengths(arguments.lengths),
            arguments.ranks,
            arguments.batch_size,
            seed=arguments.seed,
            random_level=arguments.random_level,
            cost=arguments.cost,
            max_cost=arguments.max_cost,
        )
    except OSError as error:
        raise CommandError(f"cannot read {arguments.lengths!r}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(str(error)) from None
    rows = [
        (name, epoch["steps"], *(f"{epoch[part]:.1%}" for part in ("padding", "waiting", "time")))
        for name, epoch in epochs.items()
    ]
    text = table(f"{arguments.ranks} ranks", ("", "steps", "padding", "waiting", "time"), rows)
    best = min(epochs, key=lambda name: epochs[name]["time"])
    text += f"\nNext: sample as in {best!r}, and compare seconds per epoch"
    picture = write_picture(lambda: _draw(epochs), arguments.png)
    return Outcome(text + picture, {"ranks": arguments.ranks, "ways": epochs})


def read_lengths(source: str) -> list[float]:
    """Read positive numbers from a file, or from an importable list or dataset.

    Raises:
        ValueError: an entry is not a positive number below 1e18, or there are no entries.
        OSError: the file cannot be read.
        CommandError: ``package:name`` cannot be imported.
    """
    if ":" in source and not Path(source).exists():
        found = load_object(source)
        found = list(found() if callable(found) else found)
        found = [len(item) if hasattr(item, "__len__") else item for item in found]
    elif source.endswith(".npy"):
        found = np.load(source, allow_pickle=False)
    else:
        found = np.loadtxt(Path(source).read_text(encoding="utf-8-sig").splitlines(), ndmin=1)
    numbers = np.asarray(found, dtype=float)
    if numbers.ndim != 1 or not numbers.size:
        raise ValueError(f"lengths={source!r} contains no list of lengths")
    for index in np.flatnonzero(~((numbers > 0) & (numbers < 1e18)))[:1]:
        raise ValueError(
            f"lengths={source!r}: length {index} of {len(numbers)} is {numbers[index]:g}; it must be a"
            " number above 0 and below 1e18"
        )
    return [int(length) if length % 1 == 0 else length for length in numbers.tolist()]


def work_of_epochs(
    lengths: Sequence[float],
    ranks: int,
    batch_size: int = 8,
    *,
    seed: int = 0,
    random_level: float = 0.0,
    cost: str = "padded",
    max_cost: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the work of one epoch for each way of distributing the samples.

    Args:
        lengths: lengths of the samples.
        ranks: the number of training processes.
        batch_size: samples per rank and step.
        seed: seed of all samplers.
        random_level: random_level of the balanced sampler.
        cost: a name in `COSTS`.
        max_cost: the budget of a batch; None: the cost of a batch of mean lengths, or of the
            longest sample.

    Returns:
        By name: ``steps``; ``padding``, the share of padding in batches padded to their longest
        sample; ``waiting``, the share of the ranks' time spent waiting for the slowest one;
        ``time``, that of the epoch divided by the time without balancing, if each step takes as
        long as its slowest rank; ``work``, the cost of each rank's batch in each step.

    Raises:
        ValueError: an option is out of range.
    """
    of_batch, mean = COSTS[cost], sum(lengths) / len(lengths)
    if max_cost is None:
        max_cost = max(1.0, of_batch(1, max(lengths)), of_batch(batch_size, mean))
    samples: Any = lengths
    options: Any = {"num_replicas": ranks, "seed": seed}

    def in_batches(sampler: Any) -> list[list[int]]:
        own = list(sampler)
        return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]

    ways: dict[str, Callable[[int], Any]] = {
        "without balancing": lambda rank: in_batches(
            DistributedSampler(samples, rank=rank, **options)
        ),
        "with balancing": lambda rank: in_batches(
            LoadBalancingDistributedSampler(
                samples,
                None,
                rank=rank,
                random_level=random_level,
                complexities=samples,
                **options,
            )
        ),
        **{
            f"budget mix={mix}": lambda rank, mix=mix: BudgetBatchSampler(  # type: ignore[misc]
                samples, max_cost, of_batch, ranks, rank, mix=mix, seed=seed
            )
            for mix in (1, 8, 32)
        },
    }
    epochs: dict[str, dict[str, Any]] = {}
    for name, batches_of in ways.items():
        batches = [
            [[lengths[index] for index in batch] for batch in batches_of(rank)]
            for rank in range(ranks)
        ]
        work = np.array([[of_batch(len(b), max(b)) for b in own] for own in batches], dtype=float).T
        real = sum(sum(batch) for own in batches for batch in own)
        padded = sum(len(batch) * max(batch) for own in batches for batch in own)
        slowest = float(work.max(axis=1).sum())
        epochs[name] = {
            "steps": len(work),
            "padding": 1 - real / padded,
            "waiting": 1 - float(work.mean(axis=1).sum()) / slowest,
            "time": slowest,
            "work": work.tolist(),
        }
    unbalanced = epochs["without balancing"]["time"]
    for epoch in epochs.values():
        epoch["time"] /= unbalanced
    return epochs


def _draw(epochs: dict[str, dict[str, Any]]) -> Any:
    """Return a matplotlib Figure with one panel per way of distributing the samples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 * len(epochs)), layout="constrained")
    panels = figure.subplots(len(epochs), 1, sharey=True)
    for axes, (name, epoch), color in zip(panels, epochs.items(), COLORS, strict=False):
        work = np.array(epoch["work"][:_DRAWN])
        steps = range(len(work))
        axes.vlines(steps, work.min(axis=1), work.max(axis=1), color=color, alpha=0.35, linewidth=3)
        axes.plot(steps, work, linestyle="", marker="o", markersize=2.5, color=color)
        axes.plot(steps, work.mean(axis=1), color="#1c1e21", linewidth=1, drawstyle="steps-mid")
        title = f"{name}: {epoch['padding']:.1%} padding, {epoch['waiting']:.1%} waiting"
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel("work of a rank")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#d5d8dd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(f"step (the first {_DRAWN} at most); the line is the mean of the ranks")
    return figure
