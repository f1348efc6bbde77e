"""Training steps per second against torch's DistributedDataParallel: 2 processes of one thread,
gloo.

All of them train the same model in turns in the same two processes: torch's wrapper with its
defaults, and with gradient_as_bucket_view and static_graph, which is what gradient_allreduce is
compared with. Beside them bytegrad, and what no
wrapper can beat: the training alone, without communication, and one all-reduce of the gradients
alone. Multilayer perceptrons show a whole training; models that hardly compute anything show what
each parameter costs. Two models with the shapes of real ones are also trained with other algorithms. Further rows show memory, in fresh processes, and what it costs that the ranks
compare in each step what they are about to do.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import common
import torch
import torch.distributed as dist
import workers
from shapes import gpt2, mixture, resnet50
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bagua_ref.algorithms import (
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from bagua_ref.scheduling.engine import Round

BATCH = 32
Loss = Callable[[nn.Module], Tensor]


def perceptron(*sizes: int) -> tuple[nn.Sequential, Loss]:
    """Return linear layers, and their loss on one random batch."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    x, y = torch.randn(BATCH, sizes[0]), torch.randint(sizes[-1], (BATCH,))
    return nn.Sequential(*layers[:-1]), lambda module: nn.functional.cross_entropy(module(x), y)


class Squares(nn.Module):
    """Parameters of given shapes; the output is the sum of all their squares, so that a step
    computes next to nothing.
    """

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self) -> Tensor:
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


def squares(*shapes: tuple[int, ...]) -> tuple[nn.Module, Loss]:
    return Squares(*shapes), lambda module: module()


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Loss]], float, int, int]] = {
    "perceptron, 991,072 elements in 14": (lambda: perceptron(64, *[432] * 6, 64), 1.0, 40, 21),
    "perceptron, 25e6 elements in 8": (lambda: perceptron(1024, *[3072] * 3, 1000), 1.0, 4, 15),
    "160 parameters of 20,000": (lambda: squares(*[(20000,)] * 160), 0.97, 20, 21),
    "1,000 parameters of 1,000": (lambda: squares(*[(1000,)] * 1000), 0.97, 20, 21),
    "4,000 parameters of 250": (lambda: squares(*[(250,)] * 4000), 0.97, 5, 21),
    "ResNet-50, 25.6e6 elements in 161": (lambda: squares(*resnet50()), 0.97, 4, 15),
    "GPT-2, 124e6 elements in 148": (lambda: squares(*gpt2()), 0.97, 1, 11),
    "mixture of experts, 15.9e6 elements in 2,000": (lambda: squares(*mixture()), 0.97, 4, 15),
}
"""A model and its loss, the least ratio to DDP at its best, steps in a turn and turns."""

REAL: dict[str, tuple[Callable[[], tuple[nn.Module, Loss]], int, int]] = {
    "GPT-2, 2.7e6 elements in 148": (lambda: squares(*gpt2(128, vocabulary=1500)), 10, 21),
    "ResNet-50, 25.6e6 elements in 161": (lambda: squares(*resnet50()), 2, 15),
}
"""The models of the rows about other algorithms, steps in a turn and turns."""

Wrap = Callable[[nn.Module, torch.optim.Optimizer], nn.Module]
WRAPPERS: dict[str, Wrap] = {
    "ours": lambda module, optimizer: module.with_bagua([optimizer], GradientAllReduceAlgorithm()),
    "DDP": lambda module, optimizer: DistributedDataParallel(module),
    "DDP, best settings": lambda module, optimizer: DistributedDataParallel(
        module, gradient_as_bucket_view=True, static_graph=True
    ),
    "bytegrad": lambda module, optimizer: module.with_bagua(
        [optimizer], ByteGradAlgorithm(hierarchical=False)
    ),
    "no communication": lambda module, optimizer: module,
}


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-6, foreach=True)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-6, foreach=True)


def with_qadam(module: nn.Module, optimizer: QAdamOptimizer) -> nn.Module:
    return module.with_bagua([optimizer], QAdamAlgorithm(optimizer, hierarchical=False))


ALGORITHMS: dict[str, tuple[Optimizer, Wrap, str, common.Limit]] = {
    "bytegrad": (sgd, WRAPPERS["bytegrad"], "DDP, SGD", common.at_least(0.8)),
    "low_precision_decentralized": (
        sgd,
        lambda module, optimizer: module.with_bagua(
            [optimizer], LowPrecisionDecentralizedAlgorithm(hierarchical=False)
        ),
        "DDP, SGD",
        common.at_least(0.6),
    ),
    "decentralized": (
        sgd,
        lambda module, optimizer: module.with_bagua(
            [optimizer], DecentralizedAlgorithm(hierarchical=False)
        ),
        "DDP, SGD",
        common.NO_LIMIT,
    ),
    "qadam, warm-up": (
        lambda parameters: QAdamOptimizer(parameters, lr=1e-6, warmup_steps=10**9),
        with_qadam,
        "DDP, Adam",
        common.at_least(0.95),
    ),
    "qadam, compressed": (
        lambda parameters: QAdamOptimizer(parameters, lr=1e-6, eps=1e-3, warmup_steps=2),
        with_qadam,
        "DDP, Adam",
        common.at_least(0.75),
    ),
}
"""For each algorithm, its optimizer, the peer and the least ratio to it."""


def stepper(model: str, wrap: Wrap, optimizer_of: Optimizer = sgd) -> Callable[[], None]:
    torch.manual_seed(0)
    module, loss = {**MODELS, **REAL}[model][0]()
    optimizer = optimizer_of(module.parameters())
    wrapped = wrap(module, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped).backward()
        optimizer.step()

    return step


Times = dict[str, list[float]]
"""Each contender's seconds per step in each turn."""


def against_ddp(model: str, steps: int, rounds: int) -> Times:
    contenders = {name: stepper(model, wrap) for name, wrap in WRAPPERS.items()}
    flat = torch.zeros(sum(p.numel() for p in MODELS[model][0]()[0].parameters()))
    contenders["all-reduce alone"] = lambda: dist.all_reduce(flat)
    return measure(contenders, steps, rounds)


def agreement(model: str, steps: int, rounds: int) -> Times:
    """Measure one module whose rounds are compared in every other turn: two modules would differ by
    where their memory lies.
    """
    engines = []

    def wrap(module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        wrapped = WRAPPERS["ours"](module, optimizer)
        engines.append(wrapped._bagua.engine)
        return wrapped

    step, (engine,) = stepper(model, wrap), engines
    agreed = engine.new_round

    def step_with(new_round: Callable[[], Round]) -> None:
        engine.new_round = new_round
        step()

    return measure(
        {"ours": lambda: step_with(agreed), "without agreement": lambda: step_with(Round)},
        steps,
        rounds,
    )


def algorithms(model: str, steps: int, rounds: int) -> Times:
    ddp = WRAPPERS["DDP, best settings"]
    contenders = {"DDP, SGD": stepper(model, ddp), "DDP, Adam": stepper(model, ddp, adam)}
    contenders.update(
        {
            name: stepper(model, wrap, optimizer_of)
            for name, (optimizer_of, wrap, _, _) in ALGORITHMS.items()
        }
    )
    return measure(contenders, steps, rounds)


def measure(contenders: dict[str, Callable[[], None]], steps: int, rounds: int) -> Times:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            # not counted: it pays for the memory that the one before has used or given back
            contender()
            workers.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                contender()
            workers.barrier()
            if turn:  # the first is for warming up
                times[name].append((time.perf_counter() - start) / steps)
    return times


def memory(model: str, wrapper: str) -> float:
    """Return by how many MiB this process has grown at most in some steps."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = stepper(model, WRAPPERS[wrapper])
    for _ in range(10):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


class Contest:
    """The times of all contenders, whose slowest rank counts in each turn."""

    def __init__(self, function: Callable[..., Times], *args: Any, ranks: int = 2) -> None:
        per_rank = workers.launch(function, ranks, *args)
        self.times = {
            name: list(map(max, zip(*(rank[name] for rank in per_rank), strict=True)))
            for name in per_rank[0]
        }
        self.rates = {name: 1 / statistics.median(times) for name, times in self.times.items()}

    def row(
        self, work: str, ours: str, peers: Iterable[str], rivals: Iterable[str], limit: common.Limit
    ) -> common.Row:
        """Return the row of ``ours``; its ratio to the best of ``rivals`` is the median of the
        turns' ratios.
        """
        best = max(rivals, key=self.rates.__getitem__)
        paired = statistics.median(
            theirs / own for own, theirs in zip(self.times[ours], self.times[best], strict=True)
        )
        return common.Row(
            work,
            "steps/s",
            self.rates[ours],
            {peer: self.rates[peer] for peer in peers},
            best,
            limit,
            paired=paired,
        )


DDP = ("DDP", "DDP, best settings")


def rows_of_real_model(name: str, quick: bool, turns: int) -> list[common.Row]:
    """Return the rows about other algorithms."""
    steps, rounds = (1, 2) if quick else (REAL[name][1], min(REAL[name][2], turns))
    contest = Contest(algorithms, name, steps, rounds)
    return [
        contest.row(f"{algorithm}, {name}", algorithm, [peer], [peer], limit)
        for algorithm, (_, _, peer, limit) in ALGORITHMS.items()
    ]


def main() -> int:
    args = common.arguments(
        __doc__.partition("\n\n")[0],
        only={"default": "", "help": "only models whose name contains this"},
        turns={
            "type": int,
            "default": 1000,
            "metavar": "N",
            "help": "N turns at most, for a shorter run",
        },
    )
    models = {name: model for name, model in MODELS.items() if args.only in name}
    rows = []
    for name, (_, limit, steps, rounds) in models.items():
        if args.quick:
            steps, rounds = 1, 2
        contest = Contest(against_ddp, name, steps, min(rounds, args.turns))
        rows.append(
            contest.row(
                name,
                "ours",
                [peer for peer in contest.rates if peer != "ours"],
                DDP,
                common.at_least(limit),
            )
        )
    for name in [name for name in REAL if args.only in name]:
        rows += rows_of_real_model(name, args.quick, args.turns)
    for name in [name for name in models if "perceptron" in name]:
        # Short turns, and many where steps are short: the machine's speed changes by more than what
        # is measured.
        steps, rounds = (1, 2) if args.quick else (8, 400) if models[name][2] > 8 else (1, 100)
        contest, off = Contest(agreement, name, steps, rounds), ["without agreement"]
        # 2 % or 0.2 ms, whichever is more
        allowed = max(0.02, 0.2e-3 * contest.rates["without agreement"])
        rows.append(
            contest.row(f"agreement, {name}", "ours", off, off, common.at_least(1 - allowed))
        )
    name = next(iter(MODELS)) if args.quick else "perceptron, 25e6 elements in 8"
    if name in models:
        grown = {wrapper: max(workers.launch(memory, 2, name, wrapper)) for wrapper in WRAPPERS}
        peers = {wrapper: size for wrapper, size in grown.items() if wrapper != "ours"}
        rows.append(
            common.Row(
                f"memory, {name}",
                "MiB",
                grown["ours"],
                peers,
                "DDP, best settings",
                common.at_most(1.05),
            )
        )
    return common.report("allreduce_step", rows, args)


if __name__ == "__main__":
    sys.exit(main())
