"""``bagua-ref balance``: the effect of balancing on samples of given lengths, without any
training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from bagua_ref.cli.command import (
    COLORS,
    CommandError,
    Commands,
    add_command,
    add_json_options,
    add_older_name,
    print_rows,
    require,
    write_json,
    write_picture,
)
from bagua_ref.cli.lengths import LARGEST, read_lengths
from bagua_ref.contrib.budget_batch_sampler import BudgetBatchSampler
from bagua_ref.contrib.load_balancing_sampler import LoadBalancingDistributedSampler
from bagua_ref.contrib.resumable_sampler import ResumableSampler, epoch_of

__all__ = [
    "COSTS",
    "Epoch",
    "Setting",
    "add_parser",
    "as_json",
    "change_replicas",
    "draw_epochs",
    "print_epochs",
    "simulate_epochs",
]

_DRAWN = 60  # steps in the plot: more would be unreadable

COSTS: dict[str, Callable[[int, float, float], float]] = {
    "padded": lambda size, longest, total: size * longest,
    "sum": lambda size, longest, total: total,
    "attention": lambda size, longest, total: size * longest * longest,
}
"""Name -> cost of a batch by its size, the length of its longest sample and the sum of lengths."""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``balance`` to the commands of ``bagua-ref``."""
    balance = add_command(
        commands,
        "balance",
        _balance,
        tables=True,
        examples=("bagua-ref balance --lengths lengths.txt --ranks 8 --batch-size 16",),
        help="compare ways to distribute samples of different lengths over replicas",
        description=(
            "Distribute samples of the given lengths over replicas: with torch's"
            " DistributedSampler, with LoadBalancingDistributedSampler, in groups of similar"
            " length, and with BudgetBatchSampler. Print and plot how much of the work is padding,"
            " how long replicas wait for the slowest one, and the time of an epoch."
        ),
    )
    balance.add_argument(
        "--lengths",
        type=Path,
        required=True,
        metavar="FILE",
        help=(
            "lengths of the samples: a text file with one number per line, a one-dimensional .npy"
            " array, a .csv file (with --column), or package:name, an importable list of numbers or"
            " a dataset whose samples have a length"
        ),
    )
    balance.add_argument("--column", metavar="NAME", help="the column of a .csv file")
    ranks = balance.add_argument(
        "--ranks", type=int, required=True, metavar="N", help="number of training processes"
    )
    add_older_name(balance, ranks, "--replicas")
    balance.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="samples per replica and step (default: %(default)s)",
    )
    balance.add_argument(
        "--random-level",
        type=float,
        default=0.0,
        metavar="X",
        help="random_level of the sampler, 0 to 1 (default: %(default)s)",
    )
    balance.add_argument(
        "--max-cost",
        type=float,
        metavar="X",
        help="budget of a batch (default: of --batch-size mean lengths, or the longest)",
    )
    balance.add_argument(
        "--cost",
        choices=list(COSTS),
        default="padded",
        help=(
            "cost of m samples, the longest of length h: padded, m * h; sum, of their lengths;"
            " attention, m * h * h (default: %(default)s)"
        ),
    )
    balance.add_argument(
        "--per-second",
        type=float,
        default=1e6,
        metavar="X",
        help="cost that a replica computes per second (default: %(default)g)",
    )
    balance.add_argument(
        "--then",
        type=int,
        metavar="N",
        help="show what it costs to continue with N replicas after half of the epoch",
    )
    balance.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed of both samplers (default: %(default)s)",
    )
    balance.add_argument(
        "--steps",
        type=int,
        default=8,
        metavar="N",
        help="number of steps to print (default: %(default)s)",
    )
    picture = balance.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="where to save the plot (default: balance.png, if matplotlib is installed)",
    )
    add_older_name(balance, picture, "--output")
    add_json_options(balance)


def _balance(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        lengths = read_lengths(arguments.lengths, arguments.column)
        setting = Setting(
            lengths,
            arguments.ranks,
            arguments.batch_size,
            arguments.seed,
            arguments.random_level,
            arguments.cost,
            arguments.max_cost,
            arguments.per_second,
        )
        epochs = simulate_epochs(setting)
        changed = [] if arguments.then is None else change_replicas(setting, arguments.then)
    except OSError as error:
        parser.error(f"cannot read {str(arguments.lengths)!r}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    picture: Path | None = arguments.png or Path("balance.png")
    try:
        require("the picture", "demo", "matplotlib")
    except CommandError as error:
        print(f"{parser.prog}: warning: {error}", file=sys.stderr)
        picture = None
    if not arguments.json:
        print_epochs(epochs, changed, arguments.steps)
    write_picture(lambda: draw_epochs(epochs), picture)
    write_json(arguments, as_json(epochs, changed, picture))
    return 0


@dataclass(frozen=True)
class Setting:
    """The samples and how they are to be distributed; ValueError if an option is out of range."""

    lengths: list[int | float]
    replicas: int
    batch_size: int = 8
    seed: int = 0
    random_level: float = 0
    cost: str = "padded"
    max_cost: float | None = None
    per_second: float = 1e6

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.replicas), ("batch_size", self.batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        epoch_of(self.seed, 0)
        if not 0 < self.per_second < LARGEST:
            raise ValueError(f"per_second={self.per_second} must be above 0 and below {LARGEST}")

    @property
    def budget(self) -> float:
        """The largest cost of a batch."""
        if self.max_cost is not None:
            return self.max_cost
        longest, mean = max(self.lengths), sum(self.lengths) / len(self.lengths)
        return max(
            1.0,
            COSTS[self.cost](1, longest, longest),
            COSTS[self.cost](self.batch_size, mean, self.batch_size * mean),
        )

    def balanced(self, replicas: int) -> list[ResumableSampler[Any, Any]]:
        """Return the balanced sampler of each replica."""
        return [
            LoadBalancingDistributedSampler(
                self.lengths,
                None,
                replicas,
                rank,
                seed=self.seed,
                random_level=self.random_level,
                complexities=self.lengths,
            )
            for rank in range(replicas)
        ]

    def budgeted(self, replicas: int, mix: int = 8) -> list[ResumableSampler[Any, Any]]:
        """Return the sampler of batches under the budget of each replica."""
        padded: Any = {"padded": True, "sum": False}.get(
            self.cost, lambda size, longest: COSTS[self.cost](size, longest, 0)
        )
        return [
            BudgetBatchSampler(
                self.lengths, self.budget, padded, replicas, rank, seed=self.seed, mix=mix
            )
            for rank in range(replicas)
        ]

    def epoch(self, name: str, samplers: Sequence[Iterable[Any]]) -> Epoch:
        """Return the work of an epoch that the replicas' samplers draw, of samples or of
        batches.
        """
        drawn = [list(sampler) for sampler in samplers]
        if drawn[0] and not isinstance(drawn[0][0], list):
            drawn = [
                [
                    own[place : place + self.batch_size]
                    for place in range(0, len(own), self.batch_size)
                ]
                for own in drawn
            ]
        lengths = [[[self.lengths[index] for index in batch] for batch in own] for own in drawn]
        work = [
            [COSTS[self.cost](len(batch), max(batch), sum(batch)) for batch in own]
            for own in lengths
        ]
        real = sum(sum(batch) for own in lengths for batch in own)
        padded = sum(len(batch) * max(batch) for own in lengths for batch in own)
        repeats = sum(len(batch) for own in lengths for batch in own) - len(
            {i for own in drawn for batch in own for i in batch}
        )
        return Epoch(
            name,
            np.array(work, dtype=float).T,
            1 - real / max(padded, 1e-300),
            repeats,
            self.per_second,
        )


@dataclass(frozen=True)
class Epoch:
    """The work of one epoch under one sampler.

    Attributes:
        name: of the way to distribute samples.
        work: an array of steps x replicas: the cost of each replica's batch.
        padding: the share of padding in batches that are padded to their longest sample.
        repeats: the number of samples that are drawn once more.
        per_second: the cost that a replica computes per second.
    """

    name: str
    work: np.ndarray[Any, Any]
    padding: float = 0
    repeats: int = 0
    per_second: float = 1e6

    @property
    def imbalance(self) -> float:
        """The slowest replica's work divided by the mean, averaged over steps: how much longer a
        step takes than necessary.
        """
        return float((self.work.max(axis=1) / self.work.mean(axis=1)).mean())

    @property
    def worst(self) -> float:
        """The slowest replica's work divided by the mean, in the worst step."""
        return float((self.work.max(axis=1) / self.work.mean(axis=1)).max())

    @property
    def idle(self) -> float:
        """The share of the replicas' time spent waiting for the slowest one."""
        return 1 - float(self.work.mean(axis=1).sum() / self.work.max(axis=1).sum())

    @property
    def seconds(self) -> float:
        """The time of the epoch, in which each step takes as long as its slowest replica."""
        return float(self.work.max(axis=1).sum() / self.per_second)

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "steps": len(self.work),
            "mean_work_per_step": float(self.work.mean()),
            "slowest_over_mean": self.imbalance,
            "worst_step": self.worst,
            "time_spent_waiting": self.idle,
            "padding": self.padding,
            "drawn_twice": self.repeats,
            "seconds": self.seconds,
            "work": self.work.tolist(),
        }


def simulate_epochs(setting: Setting) -> list[Epoch]:
    """Return an epoch's work under each way to distribute the samples: first without balancing,
    then with the balanced sampler.

    Raises:
        ValueError: an option is out of range.
    """
    replicas = setting.replicas
    lengths: Any = setting.lengths
    plain = [
        DistributedSampler[Any](lengths, replicas, rank, seed=setting.seed)
        for rank in range(replicas)
    ]
    return [
        setting.epoch("without balancing", plain),
        setting.epoch("with balancing", setting.balanced(replicas)),
        setting.epoch("grouped by length", _grouped_by_length(setting)),
        *(
            setting.epoch(f"budget mix={mix}", setting.budgeted(replicas, mix))
            for mix in (1, 8, 32)
        ),
    ]


def change_replicas(setting: Setting, replicas: int) -> list[Epoch]:
    """Return the work of the second half of an epoch if it continues with other replicas (S7.6).

    Raises:
        ValueError: replicas is below 1.
    """
    if replicas < 1:
        raise ValueError(f"then={replicas} must be at least 1")
    found = []
    for name, ways in (("with balancing", setting.balanced), ("budget mix=8", setting.budgeted)):
        first = ways(setting.replicas)[0]
        state = {**first._state(None), first.unit: len(first) // 2}
        samplers = ways(replicas)
        for sampler in samplers:
            sampler.load_state_dict(state)
        if len(samplers[0]):
            found.append(setting.epoch(name, samplers))
    return found


def _grouped_by_length(setting: Setting) -> list[list[int]]:
    """Return the samples of each replica as Hugging Face's ``group_by_length`` draws them: sorted
    within each 50 random batches.
    """
    generator = torch.Generator().manual_seed(setting.seed)
    drawn = torch.randperm(len(setting.lengths), generator=generator).tolist()
    size = setting.batch_size * max(1, min(len(drawn) // (setting.batch_size * 4), 50))
    megabatches = [drawn[place : place + size] for place in range(0, len(drawn), size)]
    order = [
        index
        for samples in megabatches
        for index in sorted(samples, key=lambda index: -setting.lengths[index])
    ]
    order += (order * setting.replicas)[: -len(order) % setting.replicas]
    return [order[rank :: setting.replicas] for rank in range(setting.replicas)]


def as_json(
    epochs: Sequence[Epoch], changed: Sequence[Epoch], picture: Path | None
) -> dict[str, Any]:
    """Return all epochs, with the work of each replica in every step, as JSON values."""
    steps, replicas = epochs[0].work.shape
    return {
        "replicas": replicas,
        "steps": steps,
        "picture": None if picture is None else str(picture),
        **{epoch.name.replace(" ", "_"): epoch.as_json() for epoch in epochs},
        "second_half_with_other_replicas": {
            epoch.name.replace(" ", "_"): epoch.as_json() for epoch in changed
        },
    }


def print_epochs(
    epochs: Sequence[Epoch], changed: Sequence[Epoch], steps: int, console: Any = None
) -> None:
    """Print a summary of the epochs, and the work of each replica in the first ``steps`` steps of
    the first two.
    """
    _, replicas = epochs[0].work.shape
    headers = (
        "",
        "steps",
        "padding",
        "slowest\n/ mean",
        "worst\nstep",
        "wait",
        "drawn\ntwice",
        "seconds",
    )
    for title, some in (
        (f"{replicas} replicas", epochs),
        ("Second half of the epoch, with other replicas", changed),
    ):
        rows = [
            (
                epoch.name,
                f"{len(epoch.work):,}",
                f"{epoch.padding:.1%}",
                f"{epoch.imbalance:.3f}",
                f"{epoch.worst:.3f}",
                f"{epoch.idle:.1%}",
                str(epoch.repeats),
                f"{epoch.seconds:,.3g}",
            )
            for epoch in some
        ]
        if rows:
            print_rows(title, headers, rows, console)
    plain, balanced, *_ = epochs
    work = [
        (str(step), _listed(plain.work[step]), _listed(balanced.work[step]))
        for step in range(min(steps, len(plain.work)))
    ]
    print_rows("Work of each replica", ("step", plain.name, balanced.name), work, console)


def draw_epochs(epochs: Sequence[Epoch]) -> Any:
    """Return a matplotlib Figure of each replica's work in the first steps, a panel for each way to
    distribute samples.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 * len(epochs)), layout="constrained")
    panels = figure.subplots(len(epochs), 1, sharey=True)
    for axes, epoch, color in zip(panels, epochs, COLORS, strict=False):
        work = epoch.work[:_DRAWN]
        steps = np.arange(len(work))
        axes.vlines(steps, work.min(axis=1), work.max(axis=1), color=color, alpha=0.35, linewidth=3)
        axes.plot(steps, work, linestyle="", marker="o", markersize=2.5, color=color)
        axes.plot(
            steps,
            work.mean(axis=1),
            color="#1c1e21",
            linewidth=1,
            drawstyle="steps-mid",
            label="mean of the replicas",
        )
        verdict = (
            f"{epoch.padding:.1%} padding, {epoch.idle:.1%} of the time is waiting,"
            f" {epoch.seconds:,.3g} s an epoch"
        )
        axes.set_title(
            f"{epoch.name[0].upper()}{epoch.name[1:]}: {verdict}", fontsize=10, loc="left"
        )
        axes.set_ylabel("work of a replica")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#d5d8dd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", frameon=False)
    panels[-1].set_xlabel(f"step (the first {_DRAWN} at most)")
    return figure


def _listed(work: np.ndarray[Any, Any]) -> str:
    if len(work) <= 4:
        return "  ".join(f"{value:,.10g}" for value in work)
    return f"{work.min():,.10g} to {work.max():,.10g}"
