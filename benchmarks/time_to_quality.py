"""Seconds and bytes until a training over a slow link reaches the loss that averaging gradients
reaches.

Four ranks, each behind a link of its own, train a small network on digits and a language model on
the text of Python's help. Losses are on held-out data; the weights that are judged are copied while
the clock runs, and judged when it has stopped.
Peers in the same run, with the same optimizers and settings: torch's DistributedDataParallel, its
PeriodicModelAverager, and torchft's DiLoCo (pip install torchft). It needs Linux with iproute2 and
permission to create network namespaces.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import contenders
import links
import namespaces
import torch
from contenders import Outer, Training
from torch import Tensor, nn

from bagua_ref.cli.demo import Digits, make_model

RANKS = 4
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A layer of a decoder with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y: Tensor = self.layer(x, src_mask=mask, is_causal=True)
        return y


class Embedding(nn.Module):
    """Characters and their places."""

    def __init__(self, characters: int, length: int, width: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.characters(x) + self.places.weight[: x.shape[1]]
        return y


@dataclass(frozen=True)
class Task:
    """What is learned.

    Args:
        name: of the task.
        make: makes the model.
        batches: yields the batches of one of the ranks for ever, from a seed.
        held_out: the batch to be judged.
        optimizer: makes the inner optimizer.
        steps: what averaging gradients gets; its loss after them is to be reached.
        most: steps that others may take.
        every: steps between two judgements.
        period: of those that communicate less often.
    """

    name: str
    make: Callable[[], nn.Sequential]
    batches: Callable[[int], Iterator[Batch]]
    held_out: Batch
    optimizer: contenders.Make
    steps: int
    most: int
    every: int
    period: int

    def loss(self, model: nn.Module) -> float:
        x, y = self.held_out
        model.eval()
        with torch.no_grad():
            return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).item()


def digits() -> Task:
    data = Digits.load()

    def batches(rank: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(rank)
        while True:
            chosen = torch.randint(len(data.train_labels), (16,), generator=generator)
            yield data.train_images[chosen], data.train_labels[chosen]

    held_out = data.test_images, data.test_labels
    sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    return Task(
        "digits", make_model, batches, held_out, sgd, steps=200, most=1200, every=8, period=32
    )


def language(width: int = 128, layers: int = 5) -> Task:
    text = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    alphabet = {character: place for place, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    length, size = 64, 8
    training, held_out = codes[: 9 * len(codes) // 10], codes[9 * len(codes) // 10 :]

    def cut(codes: Tensor, starts: Tensor) -> Batch:
        pieces = torch.stack([codes[start : start + length + 1] for start in starts.tolist()])
        return pieces[:, :-1], pieces[:, 1:]

    def batches(rank: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(rank)
        while True:
            yield cut(training, torch.randint(len(training) - length, (size,), generator=generator))

    def make() -> nn.Sequential:
        blocks = [Block(width, 4) for _ in range(layers)]
        return nn.Sequential(
            Embedding(len(alphabet), length, width),
            *blocks,
            nn.LayerNorm(width),
            nn.Linear(width, len(alphabet)),
        )

    judged = cut(held_out, torch.arange(0, len(held_out) - length, (len(held_out) - length) // 128))
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    return Task(
        "language model", make, batches, judged, adamw, steps=64, most=256, every=8, period=32
    )


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "language model": language}
PEERS = ("DDP", "PeriodicModelAverager", "torchft DiLoCo", "torchft DiLoCo, streaming")
STREAMING = "diloco, streaming"
EVERY_STEP = ("gradient_allreduce", "DDP", "bytegrad")
SMOKE = ("gradient_allreduce", "DDP", "diloco")
CONTENDERS = (
    *EVERY_STEP,
    "local_sgd",
    "PeriodicModelAverager",
    "diloco",
    "torchft DiLoCo",
    STREAMING,
    "torchft DiLoCo, streaming",
)


def make(name: str, task: Task, model: nn.Sequential, rank: links.Rank) -> Training:
    """Return the contender ``name``."""
    gap = task.period // 4
    outer = (
        Outer(task.period, fragments=4, delay=gap - 1, mix=0.5)
        if "streaming" in name
        else Outer(task.period)
    )
    if name == "DDP":
        return contenders.ddp(
            model, task.optimizer, gradient_as_bucket_view=True, static_graph=True
        )
    if name == "PeriodicModelAverager":
        return contenders.averager(model, task.optimizer, task.period)
    if name.startswith("torchft"):
        return contenders.TorchFT(rank.address, rank.rank, rank.ranks, rank.store).diloco(
            model, task.optimizer, outer
        )
    if name.startswith("diloco"):
        return contenders.our_diloco(model, task.optimizer, outer)
    return contenders.ours(
        name,
        model,
        task.optimizer,
        **({"period": task.period} if name == "local_sgd" else {"hierarchical": False}),
    )


def train(rank: links.Rank, request: dict[str, Any]) -> dict[str, Any] | str:
    """Train one contender over the link; return seconds, bytes and held-out loss at each judgement
    on rank 0.
    """
    task = TASKS[request["task"]]()
    torch.manual_seed(0)
    model = task.make()
    try:
        training = make(request["contender"], task, model, rank)
    except ImportError as error:
        return str(error)
    batches = task.batches(rank.rank)
    steps = task.steps if request["contender"] in EVERY_STEP else task.most
    if request["quick"]:
        steps = task.every
    shots: list[tuple[float, int, list[Tensor]]] = []
    rank.slow_down(request["rate"])
    start, sent = time.perf_counter(), namespaces.bytes_sent()
    for step in range(1, steps + 1):
        training.step(*next(batches))
        if step % task.every == 0 and rank.rank == 0:
            seconds, count = time.perf_counter() - start, namespaces.bytes_sent() - sent
            with training.weights():
                shots.append(
                    (
                        seconds,
                        count,
                        [tensor.detach().clone() for tensor in model.state_dict().values()],
                    )
                )
    rank.slow_down(None)
    training.stop()
    judged = task.make()
    curve = []
    for seconds, count, weights in shots:
        for tensor, value in zip(judged.state_dict().values(), weights, strict=True):
            tensor.copy_(value)
        curve.append((seconds, count, task.loss(judged)))
    return {"curve": curve, "every": task.every}


def reached(row: dict[str, Any], target: float) -> tuple[float, float, int] | None:
    """Return seconds, bytes and steps of the first judgement at which the loss is at most
    ``target``.
    """
    for place, (seconds, count, loss) in enumerate(row["curve"]):
        if loss <= target:
            return seconds, count, (place + 1) * row["every"]
    return None


def target(result: dict[str, Any], task: str) -> float:
    """Return the loss that averaging gradients has reached in the end."""
    ends = [
        row["curve"][-1][2]
        for row in result["rows"]
        if row["task"] == task and row["contender"] in EVERY_STEP[:2]
    ]
    return float(max(ends))


def judged(result: dict[str, Any]) -> list[common.Row]:
    """Return what the curves come to, and what the project requires of them."""
    return [
        row
        for task in TASKS
        for row in _judged(task, [row for row in result["rows"] if row["task"] == task])
    ]


def _judged(task: str, measured: list[dict[str, Any]]) -> Iterator[common.Row]:
    curves = {(row["link"], row["contender"]): row for row in measured}
    goal = target({"rows": measured}, task)
    for link in links.RATES:
        found = {
            name: reached(curves[link, name], goal) for name in CONTENDERS if (link, name) in curves
        }
        seconds = {name: place[0] for name, place in found.items() if place is not None}
        for name, place in found.items():
            work, extra = (
                f"{task}, {link}: {name}",
                {"task": task, "link": link, "contender": name, "target": goal},
            )
            if place is None:
                lowest = min(loss for *_, loss in curves[link, name]["curve"])
                yield common.Row(
                    f"{work}, not reached",
                    "loss",
                    lowest,
                    {"target": goal},
                    "target",
                    common.NO_LIMIT,
                    extra,
                )
                continue
            extra |= {"bytes": place[1], "steps": place[2]}
            sooner = (
                common.at_most(0.1)
                if name == STREAMING and link == "10 Mbit/s"
                else common.NO_LIMIT
            )
            yield common.Row(work, "s", place[0], seconds, "DDP", sooner, extra)
            peer = name.replace("diloco", "torchft DiLoCo")
            if peer != name and peer in seconds:
                yield common.Row(work, "s", place[0], seconds, peer, common.at_most(1.05), extra)


def report(args: argparse.Namespace) -> int:
    path = args.json or common.path_of("time_to_quality")
    order = [(task, link, name) for task in TASKS for link in links.RATES for name in CONTENDERS]

    def keep(task: str, link: str, name: str, **figures: Any) -> None:
        row = {"task": task, "link": link, "contender": name, **figures}
        common.merge(path, "time_to_quality", [row], ("task", "link", "contender"), order)

    for task in TASKS:
        for link in list(links.RATES)[-1 if args.quick else 0 :]:
            for name in SMOKE if args.quick else CONTENDERS:
                if args.only not in f"{task}, {link}, {name}":
                    continue
                rate = links.RATES[link][0]
                result = links.launch(
                    RANKS, {"task": task, "contender": name, "rate": rate, "quick": args.quick}
                )
                if isinstance(result, str):
                    print(f"{name} was not measured: {result}")
                    continue
                keep(task, link, name, **result)
                seconds, count, loss = result["curve"][-1]
                print(
                    f"{task}, {link}, {name}: {seconds:.1f} s, {count / 1e6:.1f} MB, loss"
                    f" {loss:.3f}",
                    flush=True,
                )
    rows = judged(json.loads(path.read_text(encoding="utf-8")))
    common.show(rows)
    return 0 if args.quick else int(any(not row.limit.holds(row.ratio) for row in rows))


if __name__ == "__main__":
    only = {
        "default": "",
        "metavar": "TEXT",
        "help": "run those with TEXT in '<task>, <link>, <contender>'; keep the other rows",
    }
    sys.exit(links.main(__doc__, train, report, only=only))
