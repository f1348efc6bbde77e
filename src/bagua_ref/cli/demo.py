"""``bagua-ref demo``: train on handwritten digits with every algorithm, and compare the results."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace
from base64 import b64encode
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from html import escape
from inspect import signature
from io import BytesIO
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import bagua_ref
from bagua_ref.algorithms import GlobalAlgorithmRegistry, QAdamOptimizer
from bagua_ref.base.utils import readable_bytes
from bagua_ref.cli.command import (
    COLORS,
    CommandError,
    Outcome,
    become_rank,
    check_choice,
    require,
    table,
)
from bagua_ref.data_parallel.wrapping import Recipe, call_if_there

__all__ = [
    "ALONE",
    "RECIPES",
    "Digits",
    "Settings",
    "TrainingOutcome",
    "make_model",
    "make_optimizer",
    "run",
    "train",
]

ALONE = "single process"
"""The name of the baseline: the same batches in one process, with plain torch."""

GLOBAL_BATCH = 64
TRAINING_IMAGES = 1437  # four fifths of the images; the other 360 are the test set

_OPTIONS: dict[str, dict[str, Any]] = {
    "async": {"sync_interval_ms": 50},
    "local_sgd": {"period": 8},
    "diloco": {"period": 16, "fragments": 4, "delay": 2, "mix": 0.5},
    "powersgd": {"matrix_approximation_rank": 4, "warmup_steps": 10},
    "topk": {"ratio": 0.05, "warmup_steps": 10},
}
"""Options that suit this task, by algorithm; algorithms without an entry use their defaults."""
# on one node, hierarchical communication saves no traffic, so it is off
RECIPES = {
    name: Recipe(
        name,
        ({"hierarchical": False} if "hierarchical" in signature(kind).parameters else {})
        | _OPTIONS.get(name, {}),
        "the demo",
    )
    for name, (kind, _) in sorted(
        GlobalAlgorithmRegistry.items(), key=lambda item: item[0] != "gradient_allreduce"
    )
}
"""Algorithms by name; the first is the baseline of the comparison."""


@dataclass(frozen=True)
class Settings:
    """Options of the demo: number of processes, passes over the data, seed and algorithms."""

    ranks: int = 4
    epochs: int = 10
    seed: int = 0
    algorithms: tuple[str, ...] = tuple(RECIPES)
    quick: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per pass over the training images; an incomplete last batch is
        dropped.
        """
        return 10 if self.quick else TRAINING_IMAGES // (GLOBAL_BATCH // self.ranks * self.ranks)

    @property
    def steps(self) -> int:
        """Number of steps per algorithm."""
        return self.steps_per_epoch * (1 if self.quick else self.epochs)


class Digits(NamedTuple):
    """Training and test set: images (m, 1, 8, 8) from 0 to 1 and labels (m,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @staticmethod
    def load() -> Digits:
        """Load the 1797 digits of scikit-learn, with a fixed split."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
        labels = torch.tensor(digits.target, dtype=torch.int64)[order]
        train, test = slice(TRAINING_IMAGES), slice(TRAINING_IMAGES, None)
        return Digits(images[train], labels[train], images[test], labels[test])

    def batches(
        self, settings: Settings, share: int, shares: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield part ``share`` of ``shares`` of each step's batch; batches depend on the seed."""
        whole = GLOBAL_BATCH // settings.ranks * settings.ranks
        size = whole // shares
        for step in range(settings.steps):
            epoch, index = divmod(step, settings.steps_per_epoch)
            generator = torch.Generator().manual_seed(settings.seed + epoch)
            order = torch.randperm(TRAINING_IMAGES, generator=generator)
            own = order[index * whole + share * size :][:size]
            yield self.train_images[own], self.train_labels[own]


def make_model() -> nn.Module:
    """Return a convolutional network with 38,282 parameters for images of 8 x 8 pixels."""
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1)]
    dense = [nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), *dense)


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return a new optimizer for training with algorithm ``name``, or `ALONE`."""
    if name == "qadam":
        # The variance freezes early: with Adam's eps of 1e-8, weights whose gradients were almost
        # zero until then get huge steps.
        return QAdamOptimizer(parameters, lr=2e-3, warmup_steps=50, eps=1e-3)
    if name == "demo":  # applies signs, of a momentum of its own
        return torch.optim.SGD(parameters, lr=1e-2)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class TrainingOutcome:
    """Result of training with one algorithm, averaged over ranks.

    Attributes:
        algorithm: name of the algorithm, or `ALONE`.
        test_accuracy: share of the test images that are classified correctly.
        final_loss: training loss over the last epoch.
        bytes_per_step: bytes sent per step and rank.
        ratio: bytes_per_step divided by those of a float32 all-reduce of the gradients; None if
            that needs no communication.
        steps_per_second: steps per second of the slowest rank.
        weight_difference: largest difference of a weight between two ranks after the last step.
        losses: loss of each step.
        bytes_sent: bytes sent up to each step.
        warmup_steps: number of first steps that all-reduce full gradients.
    """

    algorithm: str
    test_accuracy: float
    final_loss: float
    bytes_per_step: float
    ratio: float | None
    steps_per_second: float
    weight_difference: float
    losses: list[float]
    bytes_sent: list[float]
    warmup_steps: int = 0


def train(name: str, settings: Settings, digits: Digits) -> TrainingOutcome:
    """Train with algorithm ``name``, or alone; every rank calls this and gets the same result.

    Args:
        name: a name in `RECIPES`, or `ALONE` for one process that takes whole batches.
        settings: the settings of the demo.
        digits: the data.
    """
    alone = name == ALONE
    torch.manual_seed(settings.seed)
    model: Any = make_model()
    optimizer = make_optimizer(name, model.parameters())
    rank, ranks, warmup = 0, 1, 0
    if not alone:
        recipe = RECIPES[name]
        recipe.wrap(model, [optimizer])
        rank, ranks = bagua_ref.get_rank(), bagua_ref.get_world_size()
        warmup = getattr(optimizer, "warmup_steps", recipe.options.get("warmup_steps", 0))
    losses, sent = list[float](), list[float]()
    begin = time.perf_counter()
    for images, labels in digits.batches(settings, rank, ranks):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sent.append(0 if alone else model.bagua_metrics()["bytes_sent"])
    seconds = torch.tensor([time.perf_counter() - begin])
    call_if_there("abort", model)  # async averages in the background until it is stopped
    model.eval()
    shared = nullcontext if alone else getattr(model.bagua_algorithm, "global_weights", nullcontext)
    with torch.no_grad(), shared():
        right = model(digits.test_images).argmax(1) == digits.test_labels
    means = torch.tensor([right.double().mean(), *losses, *sent], dtype=torch.float64)
    highest = parameters_to_vector(model.parameters()).detach().clone()
    lowest = highest.clone()
    if not alone:
        bagua_ref.allreduce_inplace(means, bagua_ref.ReduceOp.AVG)
        bagua_ref.allreduce_inplace(seconds, bagua_ref.ReduceOp.MAX)
        bagua_ref.allreduce_inplace(highest, bagua_ref.ReduceOp.MAX)
        bagua_ref.allreduce_inplace(lowest, bagua_ref.ReduceOp.MIN)
    accuracy, *rest = means.tolist()
    losses, sent = rest[: settings.steps], rest[settings.steps :]
    last_epoch = losses[-settings.steps_per_epoch :]
    full = 2 * (ranks - 1) / ranks * 4 * len(highest)  # an all-reduce of all gradients in float32
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
        warmup_steps=warmup,
    )


def run(arguments: Namespace) -> Outcome:
    """Train with all algorithms, and write the report."""
    check_choice("--algorithms", arguments.algorithms or (), RECIPES)
    chosen = tuple(dict.fromkeys(arguments.algorithms or RECIPES))
    settings = Settings(arguments.ranks, arguments.epochs, arguments.seed, chosen, arguments.quick)
    require("the demo", "demo", "sklearn", "matplotlib")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"output={str(arguments.output)!r} must be a writable folder: {error.strerror}"
        ) from None
    # workers are ended as after Ctrl-C
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.default_int_handler)
    print(f"starting {settings.ranks} workers", flush=True)
    outcomes: list[TrainingOutcome] = []
    try:
        with closing(_run_workers(settings)) as ended:
            for outcome in ended:
                outcomes.append(outcome)
                print(_line(outcome), flush=True)
    except ProcessException as error:
        message = f"bagua-ref demo: worker {error.error_index}: {error.msg.strip()}"
        print(message, file=sys.stderr)
        return Outcome("", None, 1)
    title = (
        f"{settings.ranks} workers, {settings.steps} steps of {GLOBAL_BATCH} images; sent by each"
        " rank, as part of full precision"
    )
    text = table(title, _HEADERS, map(_cells, outcomes))
    results = {
        "settings": {**asdict(settings), "steps": settings.steps},
        "versions": {"torch": torch.__version__, "bagua_ref": bagua_ref.__version__},
        "results": [asdict(outcome) for outcome in outcomes],
    }
    page = arguments.output / "index.html"
    text += f"\nCurves: {page}"
    text += "\nNext: bagua-ref advise, which predicts times for your model and network"
    files = {
        arguments.output / "results.json": json.dumps(results, indent=2) + "\n",
        page: _page(title, outcomes, settings),
    }
    return Outcome(text, results, files=files)


def _line(outcome: TrainingOutcome) -> str:
    sent = f", {readable_bytes(outcome.bytes_sent[-1])} sent" if outcome.algorithm != ALONE else ""
    accuracy = f"test accuracy {outcome.test_accuracy:.1%}"
    return f"{outcome.algorithm}: {accuracy}, loss {outcome.losses[-1]:.3f}{sent}"


def _run_workers(settings: Settings) -> Generator[TrainingOutcome, None, None]:
    """Run the workers and yield outcomes as they arrive; raise ProcessException if a worker fails.
    Closing the generator ends all workers.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    processes = multiprocessing.get_context("forkserver")
    # which imports torch once for all workers
    processes.set_forkserver_preload(["torch._dynamo", "bagua_ref.cli"])
    outcomes = processes.SimpleQueue()
    arguments = store.port, settings, [tensor.numpy() for tensor in Digits.load()], outcomes
    running = start_processes(
        _work, arguments, settings.ranks, join=False, start_method="forkserver"
    )
    assert running is not None
    try:
        ended = False
        while not ended:
            ended = running.join(timeout=0.1)
            while not outcomes.empty():
                yield outcomes.get()
    finally:
        for process in running.processes:
            process.kill()
            process.join()


def _work(rank: int, port: int, settings: Settings, arrays: list[Any], outcomes: Any) -> None:
    """Train with each algorithm in turn; rank 0 puts each outcome into a queue."""
    # warnings would appear among the lines; errors are raised
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    become_rank(rank, settings.ranks, port)
    digits = Digits(*map(torch.from_numpy, arrays))
    # Rank 0 trains alone while the others wait, some milliseconds per step.
    bagua_ref.init_process_group(backend="gloo", timeout=60 + settings.steps)
    # The first optimizer makes torch import many modules, which must not count as training time.
    make_optimizer(ALONE, make_model().parameters())
    for name in (ALONE, *settings.algorithms):
        bagua_ref.barrier()
        outcome = train(name, settings, digits) if name != ALONE or rank == 0 else None
        if rank == 0:
            outcomes.put(outcome)
    bagua_ref.barrier()
    bagua_ref.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process at its normal exit


_HEADERS = (
    "algorithm",
    "test\nacc.",
    "final\nloss",
    "sent per\nstep",
    "of\nfull",
    "weight\ndiff.",
    "ms per\nstep",
)


def _cells(outcome: TrainingOutcome) -> list[str]:
    """Return the table cells of an outcome."""
    alone = outcome.algorithm == ALONE
    return [
        outcome.algorithm,
        f"{outcome.test_accuracy:.1%}",
        f"{outcome.final_loss:.4f}",
        "-" if alone else readable_bytes(outcome.bytes_per_step),
        "-" if outcome.ratio is None else f"{outcome.ratio:.1%}",
        "-" if alone else f"{outcome.weight_difference:.2g}",
        f"{1e3 / outcome.steps_per_second:.1f}",
    ]


def _page(title: str, outcomes: Sequence[TrainingOutcome], settings: Settings) -> str:
    """Format the report as a self-contained HTML page."""
    headers = "".join(f"<th>{escape(header)}</th>" for header in _HEADERS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(outcome)) + "</tr>\n"
        for outcome in outcomes
    )
    figure = BytesIO()
    _draw(outcomes, settings).savefig(figure, format="svg", metadata={"Date": None})
    picture = b64encode(figure.getvalue()).decode()
    descriptions = {
        name: GlobalAlgorithmRegistry[name][1].replace("`", "") for name in settings.algorithms
    }
    about = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>\n" for name, text in descriptions.items()
    )
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bagua_ref demo</title>
<style>
body {{ margin: 2rem auto; max-width: 76rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }}
div {{ overflow-x: auto; }}
td, th {{ padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ccc; }}
td:first-child, th:first-child {{ text-align: left; }}
img {{ width: 100%; min-width: 40rem; }}
dt {{ font-weight: bold; }}
</style>
<h1>Training on handwritten digits</h1>
<p>{escape(title)}. The same network was trained from the same weights on the same batches, in a single
process and then with each algorithm. An algorithm does well if its loss falls as fast as the single
process's, its accuracy is the same, and it sends less than full precision.</p>
<div><table><tr>{headers}</tr>
{body}</table></div>
<div><img src="data:image/svg+xml;base64,{picture}" alt="Training loss by step and by bytes sent"></div>
<p>Losses are means over ranks and over the epoch that ends at each step. A dot marks the end of warm-up.
One test image is 0.3 % of accuracy. Do not judge speed by this run: messages between processes of one
machine cost almost nothing. <code>bagua-ref advise</code> predicts times for your model and network.</p>
<dl>{about}</dl>
</html>
"""


def _draw(outcomes: Sequence[TrainingOutcome], settings: Settings) -> Any:
    """Return a matplotlib Figure of losses by step and by bytes sent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    window = settings.steps_per_epoch
    for index, outcome in enumerate(outcomes):
        parts = [outcome.losses[max(0, i - window) : i] for i in range(1, settings.steps + 1)]
        losses = [sum(part) / len(part) for part in parts]
        # curves that coincide remain visible
        style: dict[str, Any] = {
            "color": COLORS[index % len(COLORS)],
            "linestyle": "-" if index < len(COLORS) else "--",
            "linewidth": max(1.2, 3 - 0.2 * index),
            "marker": "o" if outcome.warmup_steps else "",
            "markevery": [min(outcome.warmup_steps, settings.steps) - 1],
        }
        by_step.plot(range(1, settings.steps + 1), losses, label=outcome.algorithm, **style)
        if outcome.algorithm != ALONE:
            by_bytes.plot([count / 1e6 for count in outcome.bytes_sent], losses, **style)
    by_step.set(xlabel="step", ylabel="training loss", yscale="log")
    by_bytes.set(xlabel="MB sent by each rank")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    figure.legend(*by_step.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
