"""Training steps per second against torch's DistributedDataParallel: 2 processes of one thread, gloo.

All of them train the same model in turns in the same two processes: torch's wrapper with its defaults, and with
gradient_as_bucket_view and static_graph, which is what gradient_allreduce is compared with. Beside them bytegrad, and what no
wrapper can beat: the training alone, without communication, and one all-reduce of the gradients alone. Multilayer perceptrons show
a whole training; models that hardly compute anything show what each parameter costs. The last row is memory, in fresh processes.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
import time
from collections.abc import Callable

import common
import torch
import torch.distributed as dist
import workers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bagua_ref.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm

BATCH = 32
Loss = Callable[[nn.Module], Tensor]


def perceptron(*sizes: int) -> tuple[nn.Module, Loss]:
    """Return linear layers, and their loss on one random batch."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    x, y = torch.randn(BATCH, sizes[0]), torch.randint(sizes[-1], (BATCH,))
    return nn.Sequential(*layers[:-1]), lambda module: nn.functional.cross_entropy(module(x), y)


class Squares(nn.Module):
    """Parameters of given shapes; the output is the sum of all their squares, so that a step computes next to nothing."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self) -> Tensor:
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


def squares(*shapes: tuple[int, ...]) -> tuple[nn.Module, Loss]:
    return Squares(*shapes), lambda module: module()


def resnet50() -> list[tuple[int, ...]]:
    """The shapes of the parameters of ResNet-50 on ImageNet."""

    def convolution(inputs: int, outputs: int, kernel: int) -> list[tuple[int, ...]]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]  # and its batch norm

    shapes, channels = convolution(3, 64, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(channels, width, 1) + convolution(width, width, 3) + convolution(width, 4 * width, 1)
            if not block:
                shapes += convolution(channels, 4 * width, 1)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def gpt2(width: int = 768, layers: int = 12) -> list[tuple[int, ...]]:
    """The shapes of the parameters of the smallest GPT-2."""
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    perceptron = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *layers * [*norm, *attention, *norm, *perceptron], *norm]


def mixture(width: int = 64, layers: int = 10, experts: int = 64) -> list[tuple[int, ...]]:
    """The shapes of the parameters of a small transformer with a mixture of gated experts."""
    shared = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (experts, width)]
    expert = [(2 * width, width), (2 * width, width), (width, 2 * width)]
    return layers * [*shared, *experts * expert]


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

Wrap = Callable[[nn.Module, torch.optim.Optimizer], nn.Module]
WRAPPERS: dict[str, Wrap] = {
    "ours": lambda module, optimizer: module.with_bagua([optimizer], GradientAllReduceAlgorithm()),
    "DDP": lambda module, optimizer: DistributedDataParallel(module),
    "DDP, best settings": lambda module, optimizer: DistributedDataParallel(
        module, gradient_as_bucket_view=True, static_graph=True
    ),
    "bytegrad": lambda module, optimizer: module.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=False)),
    "no communication": lambda module, optimizer: module,
}


def stepper(model: str, wrap: Wrap) -> Callable[[], None]:
    torch.manual_seed(0)
    module, loss = MODELS[model][0]()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6, foreach=True)
    wrapped = wrap(module, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped).backward()
        optimizer.step()

    return step


def measure(model: str, steps: int, rounds: int) -> dict[str, float]:
    """Return each contender's median seconds per step on this rank."""
    contenders = {name: stepper(model, wrap) for name, wrap in WRAPPERS.items()}
    flat = torch.zeros(sum(p.numel() for p in MODELS[model][0]()[0].parameters()))
    contenders["all-reduce alone"] = lambda: dist.all_reduce(flat)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            workers.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                contender()
            workers.barrier()
            if turn:  # the first is for warming up
                times[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(values) for name, values in times.items()}


def memory(model: str, wrapper: str) -> float:
    """Return by how many MiB this process has grown at most in some steps."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = stepper(model, WRAPPERS[wrapper])
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> int:
    args = common.arguments(__doc__.partition("\n")[0], only={"default": "", "help": "only models whose name contains this"})
    models = {name: model for name, model in MODELS.items() if args.only in name}
    rows = []
    for name, (_, limit, steps, rounds) in models.items():
        if args.quick:
            steps, rounds = 1, 2
        per_rank = workers.launch(measure, 2, name, steps, rounds)
        rates = {contender: 1 / max(seconds[contender] for seconds in per_rank) for contender in per_rank[0]}
        peers = {contender: rate for contender, rate in rates.items() if contender != "ours"}
        better = max(("DDP", "DDP, best settings"), key=rates.__getitem__)
        rows.append(common.Row(name, "steps/s", rates["ours"], peers, better, common.at_least(limit)))
    name = next(iter(models)) if args.quick else "perceptron, 25e6 elements in 8"
    if name in models:
        grown = {wrapper: max(workers.launch(memory, 2, name, wrapper)) for wrapper in WRAPPERS}
        peers = {wrapper: size for wrapper, size in grown.items() if wrapper != "ours"}
        rows.append(common.Row(f"memory, {name}", "MiB", grown["ours"], peers, "DDP, best settings", common.at_most(1.05)))
    return common.report("allreduce_step", rows, args)


if __name__ == "__main__":
    sys.exit(main())
