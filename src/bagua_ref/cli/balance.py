"""``bagua-ref balance``: padding and waiting in an epoch of given lengths, without training."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from bagua_ref.cli.command import (
    COLORS,
    Commands,
    add_command,
    load_object,
    number,
    print_rows,
    write_json,
    write_picture,
)
from bagua_ref.contrib.budget_batch_sampler import BudgetBatchSampler
from bagua_ref.contrib.load_balancing_sampler import LoadBalancingDistributedSampler

__all__ = ["add_parser", "read_lengths", "work_of_epochs"]

COSTS: dict[str, Callable[[int, float], float]] = {
    "padded": lambda size, longest: size * longest,
    "attention": lambda size, longest: size * longest * longest,
}
"""Name -> cost of a batch by its size and the length of its longest sample."""
_DRAWN = 60  # steps in the plot: more would be unreadable


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``balance`` to the commands of ``bagua-ref``."""
    balance = add_command(
        commands,
        "balance",
        _balance,
        examples=("bagua-ref balance --lengths lengths.txt --ranks 8 --batch-size 16",),
        description=(
            "Distribute samples of the given lengths over ranks: with torch's DistributedSampler,"
            " with LoadBalancingDistributedSampler and with BudgetBatchSampler. Print and plot how"
            " much of the work is padding, and how long ranks wait for the slowest one."
        ),
    )
    for name, kind, default, metavar, text in (
        ("lengths", Path, None, "FILE", "a number per line, a .npy array, or package:name"),
        ("ranks", int, None, "N", "number of training processes"),
        ("batch-size", int, 8, "N", "samples per rank and step"),
        ("random-level", float, 0.0, "X", "random_level of the sampler, 0 to 1"),
        ("seed", number(0, 2**32 - 1, integer=True), 0, "N", "random seed of all samplers"),
    ):
        note = "" if default is None else f" (default: {default})"
        needed = default is None
        balance.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            required=needed,
            metavar=metavar,
            help=text + note,
        )
    balance.add_argument("--max-cost", type=float, metavar="X", help="budget of a batch")
    balance.add_argument(
        "--cost",
        choices=list(COSTS),
        default="padded",
        help="of m samples, the longest of length h: padded, m * h (the default); attention, m * h * h",
    )
    balance.add_argument("--png", type=Path, metavar="FILE", help="draw it; needs matplotlib")


def _balance(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        epochs = work_of_epochs(
            read_lengths(str(arguments.lengths)),
            arguments.ranks,
            arguments.batch_size,
            seed=arguments.seed,
            random_level=arguments.random_level,
            cost=arguments.cost,
            max_cost=arguments.max_cost,
        )
    except OSError as error:
        parser.error(f"cannot read {str(arguments.lengths)!r}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    best = min(epochs, key=lambda name: epochs[name]["time"])
    if not arguments.json:
        rows = [
            (
                name,
                f"{epoch['steps']:,}",
                f"{epoch['padding']:.1%}",
                f"{epoch['waiting']:.1%}",
                f"{epoch['time']:.1%}",
            )
            for name, epoch in epochs.items()
        ]
        print_rows(f"{arguments.ranks} ranks", ("", "steps", "padding", "waiting", "time"), rows)
        print(f"Next: sample as in {best!r}, and compare seconds per epoch")
    write_picture(lambda: _draw(epochs), arguments.png)
    write_json(arguments, {"ranks": arguments.ranks, "ways": epochs})
    return 0


def read_lengths(source: str) -> list[int | float]:
    """Return the positive numbers in a file or of an importable list or dataset.

    Raises:
        ValueError: something is no positive number below 1e18, or there are none.
        OSError: the file cannot be read.
        CommandError: ``package:name`` cannot be imported.
    """
    if ":" in source and not Path(source).exists():
        found = load_object(source)
        found = list(found() if callable(found) else found)
        found = [len(item) if hasattr(item, "__len__") else item for item in found]
    elif source.endswith(".npy"):
        try:
            found = np.load(source, allow_pickle=False).tolist()
        except EOFError as error:
            raise ValueError(f"lengths={source!r} is no .npy file: {error}") from None
    else:
        lines = Path(source).read_text(encoding="utf-8-sig").splitlines()
        found = np.loadtxt(lines, ndmin=1).tolist()
        found = [int(length) if length % 1 == 0 else length for length in found]
    if not isinstance(found, list) or not found:
        raise ValueError(f"lengths={source!r} contains no list of lengths")
    for index, length in enumerate(found):
        if not isinstance(length, (int, float)) or not 0 < length < 1e18:
            raise ValueError(
                f"lengths={source!r}: length {index} of {len(found)} is {length!r}; it must be a"
                " number above 0 and below 1e18"
            )
    return found


def work_of_epochs(
    lengths: Sequence[int | float],
    ranks: int,
    batch_size: int = 8,
    *,
    seed: int = 0,
    random_level: float = 0.0,
    cost: str = "padded",
    max_cost: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the work of one epoch by each way to distribute the samples.

    Args:
        lengths: of the samples.
        ranks: the number of training processes.
        batch_size: samples per rank and step.
        seed: of all samplers.
        random_level: of the balanced sampler.
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
    for name, value in (("ranks", ranks), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    of_batch, mean = COSTS[cost], sum(lengths) / len(lengths)
    if max_cost is None:
        max_cost = max(1.0, of_batch(1, max(lengths)), of_batch(batch_size, mean))
    samples: Any = lengths
    options: Any = {"num_replicas": ranks, "seed": seed}
    level = {"random_level": random_level, "complexities": samples}
    ways: dict[str, Callable[..., Any]] = {
        "without balancing": lambda rank: DistributedSampler(samples, rank=rank, **options),
        "with balancing": lambda rank: LoadBalancingDistributedSampler(
            samples, None, rank=rank, **level, **options
        ),
    }
    for mix in (1, 8, 32):
        ways[f"budget mix={mix}"] = partial(
            BudgetBatchSampler, samples, max_cost, of_batch, ranks, mix=mix, seed=seed
        )
    epochs: dict[str, dict[str, Any]] = {}
    unbalanced: float | None = None
    for name, make in ways.items():
        drawn = [list(make(rank=rank)) for rank in range(ranks)]
        if not name.startswith("budget"):
            drawn = [
                [own[start : start + batch_size] for start in range(0, len(own), batch_size)]
                for own in drawn
            ]
        batches = [[[lengths[index] for index in batch] for batch in own] for own in drawn]
        work = np.array([[of_batch(len(b), max(b)) for b in own] for own in batches], dtype=float).T
        real = sum(sum(batch) for own in batches for batch in own)
        padded = sum(len(batch) * max(batch) for own in batches for batch in own)
        slowest = float(work.max(axis=1).sum())
        unbalanced = slowest if unbalanced is None else unbalanced
        epochs[name] = {
            "steps": len(work),
            "padding": 1 - real / padded,
            "waiting": 1 - float(work.mean(axis=1).sum()) / slowest,
            "time": slowest / unbalanced,
            "work": work.tolist(),
        }
    return epochs


def _draw(epochs: dict[str, dict[str, Any]]) -> Any:
    """Return a matplotlib Figure with a panel for each way to distribute samples."""
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
