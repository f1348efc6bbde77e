"""``bagua-ref balance``: the effect of balancing on samples of given lengths, without any training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

from bagua_ref.base.not_provided import install_command
from bagua_ref.cli.command import CommandError, Commands, add_command, add_json_options, is_installed, print_rows, write_json
from bagua_ref.contrib.load_balancing_data_loader import LoadBalancingDistributedSampler

__all__ = ["Epoch", "add_parser", "as_json", "draw_epochs", "print_epochs", "read_lengths", "simulate_epochs"]

_LARGEST = 1e18  # sums of these still fit into floats
_DRAWN = 60  # steps in the plot: more would be unreadable
_COLORS = ("#d55e00", "#0072b2")  # Okabe and Ito's


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``balance`` to the commands of ``bagua-ref``."""
    balance = add_command(
        commands,
        "balance",
        _balance,
        help="compare the work per step and replica with and without the balanced sampler",
        description="Distribute samples of the given lengths over replicas, once with torch's DistributedSampler and once with "
        "LoadBalancingDistributedSampler. Print and plot how much work each replica has in each step, taking a sample's length as "
        "its cost.",
    )
    balance.add_argument(
        "--lengths",
        type=Path,
        required=True,
        metavar="FILE",
        help="lengths of the samples: a text file with one number per line, or a one-dimensional .npy array",
    )
    balance.add_argument("--replicas", type=int, required=True, metavar="N", help="number of training processes")
    balance.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="samples per replica and step (default: %(default)s)"
    )
    balance.add_argument(
        "--random-level", type=float, default=0.0, metavar="X", help="random_level of the sampler, 0 to 1 (default: %(default)s)"
    )
    balance.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of both samplers (default: %(default)s)")
    balance.add_argument("--steps", type=int, default=8, metavar="N", help="number of steps to print (default: %(default)s)")
    balance.add_argument("--output", type=Path, metavar="FILE", help="where to save the plot (default: balance.png)")
    add_json_options(balance)


def _balance(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        lengths = read_lengths(arguments.lengths)
        epochs = simulate_epochs(lengths, arguments.replicas, arguments.batch_size, arguments.seed, arguments.random_level)
    except OSError as error:
        parser.error(f"cannot read {str(arguments.lengths)!r}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    if not arguments.json and not is_installed("rich"):
        raise CommandError(f"printing tables needs rich; install with: {install_command('demo')}")
    picture: Path | None = arguments.output or Path("balance.png")
    if is_installed("matplotlib"):
        try:
            draw_epochs(*epochs).savefig(picture, dpi=120, metadata={"Software": None})
        except (OSError, ValueError) as error:  # no such folder or format
            parser.error(f"output={str(picture)!r} must be a writable image file: {error}")
    else:
        complaint = f"the picture needs matplotlib; install with: {install_command('demo')}"
        if arguments.output is not None:
            raise CommandError(complaint)
        print(f"{parser.prog}: warning: {complaint}", file=sys.stderr)
        picture = None
    if not arguments.json:
        print_epochs(*epochs, arguments.steps)
        if picture is not None:
            print(f"Picture: {picture}")
    write_json(arguments, as_json(*epochs, picture))
    return 0


@dataclass(frozen=True)
class Epoch:
    """The work of one epoch under one sampler.

    Attributes:
        name: "with balancing" or "without balancing".
        work: an array of steps x replicas: the sum of the lengths in each replica's batch.
    """

    name: str
    work: np.ndarray[Any, Any]

    @property
    def imbalance(self) -> float:
        """The slowest replica's work divided by the mean, averaged over steps: how much longer a step takes than necessary."""
        return float((self.work.max(axis=1) / self.work.mean(axis=1)).mean())

    @property
    def worst(self) -> float:
        """The slowest replica's work divided by the mean, in the worst step."""
        return float((self.work.max(axis=1) / self.work.mean(axis=1)).max())

    @property
    def idle(self) -> float:
        """The share of the replicas' time spent waiting for the slowest one."""
        return 1 - float(self.work.mean(axis=1).sum() / self.work.max(axis=1).sum())


def read_lengths(path: Path) -> list[int | float]:
    """Read positive numbers: a ``.npy`` array, or text with one number per line; empty lines and comments after # are skipped.

    Raises:
        ValueError: a line is not a positive number, or there are none; the message names file and line.
        OSError: the file cannot be read.
    """
    found: list[int | float] = []
    if path.suffix == ".npy":
        array = _load_array(path)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise ValueError(f"{path} has shape {array.shape} of {array.dtype}; it must be a one-dimensional array of numbers")
        found = array.tolist()
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is neither text in UTF-8 nor named .npy: {error}") from None
        for place, line in enumerate(lines, start=1):
            if text := line.partition("#")[0].strip():
                found.append(_number(text, f"{path}, line {place}"))
    if not found:
        raise ValueError(f"{path} contains no lengths")
    for place, number in enumerate(found, start=1):
        if not 0 < number < _LARGEST:
            raise ValueError(f"{path}: length {place} of {len(found)} is {number}; it must be above 0 and below {_LARGEST}")
    return found


def simulate_epochs(
    lengths: list[int | float], replicas: int, batch_size: int, seed: int, random_level: float
) -> tuple[Epoch, Epoch]:
    """Return one epoch's work under torch's DistributedSampler and under `LoadBalancingDistributedSampler`.

    Raises:
        ValueError: an argument is out of range.
    """
    for name, value in (("replicas", replicas), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    samplers: dict[str, list[Iterable[int]]] = {"without balancing": [], "with balancing": []}
    for rank in range(replicas):
        samplers["without balancing"].append(DistributedSampler(lengths, replicas, rank, seed=seed))  # type: ignore[arg-type]
        samplers["with balancing"].append(
            LoadBalancingDistributedSampler(
                lengths, None, replicas, rank, seed=seed, random_level=random_level, complexities=lengths
            )
        )
    costs = np.array(lengths, dtype=float)
    before, after = (
        Epoch(name, np.array([_work(costs[list(sampler)], batch_size) for sampler in of_ranks]).T)
        for name, of_ranks in samplers.items()
    )
    return before, after


def as_json(before: Epoch, after: Epoch, picture: Path | None) -> dict[str, Any]:
    """Return both epochs, with the work of each replica in every step, as JSON values."""
    steps, replicas = before.work.shape
    epochs = {
        epoch.name.replace(" ", "_"): {
            "mean_work_per_step": float(epoch.work.mean()),
            "slowest_over_mean": epoch.imbalance,
            "worst_step": epoch.worst,
            "time_spent_waiting": epoch.idle,
            "work": epoch.work.tolist(),
        }
        for epoch in (before, after)
    }
    return {"replicas": replicas, "steps": steps, "picture": None if picture is None else str(picture), **epochs}


def print_epochs(before: Epoch, after: Epoch, steps: int, console: Any = None) -> None:
    """Print a summary of both epochs, and the work of each replica in the first ``steps`` steps."""
    count, replicas = before.work.shape
    rows = [
        (epoch.name, f"{epoch.work.mean():,.1f}", f"{epoch.imbalance:.3f}", f"{epoch.worst:.3f}", f"{epoch.idle:.1%}")
        for epoch in (before, after)
    ]
    headers = ("", "mean work\nper step", "slowest\n/ mean", "worst\nstep", "time spent\nwaiting")
    print_rows(f"{replicas} replicas, {count} steps", headers, rows, console)
    work = [(str(step), _listed(before.work[step]), _listed(after.work[step])) for step in range(min(steps, count))]
    print_rows("Work of each replica", ("step", before.name, after.name), work, console)


def draw_epochs(before: Epoch, after: Epoch) -> Any:
    """Return a matplotlib Figure of each replica's work in the first steps, without and with balancing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.2), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, epoch, color in zip(panels, (before, after), _COLORS, strict=True):
        work = epoch.work[:_DRAWN]
        steps = np.arange(len(work))
        axes.vlines(steps, work.min(axis=1), work.max(axis=1), color=color, alpha=0.35, linewidth=3)
        axes.plot(steps, work, linestyle="", marker="o", markersize=2.5, color=color)
        axes.plot(steps, work.mean(axis=1), color="#1c1e21", linewidth=1, drawstyle="steps-mid", label="mean of the replicas")
        verdict = f"the slowest replica has {epoch.imbalance:.3f} times the mean work; {epoch.idle:.1%} of the time is waiting"
        axes.set_title(f"{epoch.name[0].upper()}{epoch.name[1:]}: {verdict}", fontsize=10, loc="left")
        axes.set_ylabel("work of a replica")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#d5d8dd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", frameon=False)
    count = len(before.work)
    panels[1].set_xlabel("step" if count <= _DRAWN else f"step (the first {_DRAWN} of {count})")
    return figure


def _load_array(path: Path) -> np.ndarray[Any, Any]:
    """Return the array in a ``.npy`` file, without making room for elements that the file does not have."""
    with path.open("rb") as file:
        magic = file.read(len(np.lib.format.MAGIC_PREFIX))
    if not magic:
        raise ValueError(f"{path} is empty")
    if magic != np.lib.format.MAGIC_PREFIX:
        raise ValueError(f"{path} is not a .npy file")
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a forged header makes NumPy raise many kinds
        raise ValueError(f"{path} is not a valid .npy file: {type(error).__name__}: {error}") from None


def _number(text: str, where: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ValueError(f"{where}: {text!r} is not a number")


def _work(costs: np.ndarray[Any, Any], batch_size: int) -> np.ndarray[Any, Any]:
    """Return the sum of each batch; the last one may be shorter."""
    return np.add.reduceat(costs, np.arange(0, len(costs), batch_size))


def _listed(work: np.ndarray[Any, Any]) -> str:
    if len(work) <= 4:
        return "  ".join(f"{value:,.10g}" for value in work)
    return f"{work.min():,.10g} to {work.max():,.10g}"
