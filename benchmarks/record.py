"""The cost of digests: against a copy of memory, and their share of a training step on the shapes
of ResNet-50 and GPT-2.

A step is a real one, on one process, with batches that people use: 32 images, and 8 x 512 tokens.
GPT-2 is that of transformers, and left out without it. Memory is the growth of the process's peak.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import common
import shapes
import torch

import bagua_ref
from bagua_ref.conformance.trace import Recording, digest

SIZES = {"4 KB": 2**10, "1 MB": 2**18, "64 MB": 2**24}
SHARE = common.at_most(1.03)


def speed(quick: bool) -> list[common.Row]:
    """Return GB/s of digests and copies."""
    rows = []
    for name, size in SIZES.items():
        x = torch.randn(size)
        there = torch.empty_like(x)  # new memory costs more than the copy
        functions = {
            "digest": lambda x=x: digest(x),
            "copy": lambda x=x, there=there: there.copy_(x),
        }
        medians = common.alternate(functions, 3 if quick else 30)
        rate = {kind: 4 * size / seconds / 1e9 for kind, seconds in medians.items()}
        rows.append(
            common.Row(f"digest of {name}", "GB/s", rate["digest"], {"copy": rate["copy"]}, "copy")
        )
    return rows


class Bottleneck(torch.nn.Module):
    """A block of ResNet-50, with the shapes that the paper gives (He et al., arXiv:1512.03385,
    table 1).
    """

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for before, after, size, step in (
            (inside, width, 1, 1),
            (width, width, 3, stride),
            (width, 4 * width, 1, 1),
        ):
            layers += [
                torch.nn.Conv2d(before, after, size, step, size // 2, bias=False),
                torch.nn.BatchNorm2d(after),
                torch.nn.ReLU(),
            ]
        self.layers = torch.nn.Sequential(*layers[:-1])
        self.shortcut = torch.nn.Sequential()
        if stride > 1 or inside != 4 * width:
            convolution = torch.nn.Conv2d(inside, 4 * width, 1, stride, bias=False)
            self.shortcut = torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) + self.shortcut(x)).relu()


def resnet50(quick: bool) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor], str]:
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
    ]
    layers.append(torch.nn.MaxPool2d(3, 2, 1))
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inside, width, 2 if block == 0 and width > 64 else 1))
            inside = 4 * width
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(2048, 1000)]
    model = torch.nn.Sequential(*layers)
    assert sorted(tuple(p.shape) for p in model.parameters()) == sorted(
        map(tuple, shapes.resnet50())
    )
    x = torch.randn(2 if quick else 32, 3, 224, 224)
    return model, lambda model: model(x).square().mean(), f"batch of {len(x)} images"


def gpt2(quick: bool) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor], str]:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(50257, (1, 16) if quick else (8, 512))
    model = GPT2LMHeadModel(GPT2Config(n_layer=2 if quick else 12))
    return (
        model,
        lambda model: model(tokens, labels=tokens).loss,
        f"batch of {tokens.shape[0]} x {tokens.shape[1]} tokens",
    )


class Timed(Recording):
    """A recording that counts the seconds inside its hooks; hooks within hooks count once."""

    seconds = 0.0
    depth = 0


def _count(name: str) -> None:
    right = getattr(Recording, name)

    def counted(self: Timed, *args: object) -> object:
        self.depth += 1
        start = time.perf_counter()
        try:
            return right(self, *args)
        finally:
            self.depth -= 1
            self.seconds += 0.0 if self.depth else time.perf_counter() - start

    setattr(Timed, name, counted)


for hook in ("_before_forward", "_after_forward", "_add", "_before_optimizer", "_end_step"):
    _count(hook)


def step_times(
    make: Callable[..., tuple], quick: bool, folder: Path
) -> tuple[dict[str, float], float, float, str]:
    """Return seconds of a step with and without recording, the ratio, the peak memory that
    recording adds in MiB, and the work.

    The ratio is that of a recorded step to what is left of it without its hooks: steps take
    seconds, and two of them differ by more than what is measured.
    """
    model, loss_of, work = make(quick)
    optimizer = (torch.optim.AdamW if make is gpt2 else torch.optim.SGD)(
        model.parameters(), lr=1e-3
    )
    if make is resnet50:
        optimizer.param_groups[0]["momentum"] = 0.9

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        return time.perf_counter() - start

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    step()  # fills caches and makes the optimizer's state
    times = {"without": step()}
    before, ratios = peak(), []
    recording = bagua_ref.record(model, optimizer, folder)
    recording.__class__ = Timed
    assert isinstance(recording, Timed)
    with recording:
        for _ in range(2):
            recording.seconds = 0.0
            times["recorded"] = step()
            ratios.append(times["recorded"] / (times["recorded"] - recording.seconds))
    return times, statistics.median(ratios), peak() - before, work


def main() -> int:
    args = common.arguments(__doc__)
    rows = speed(args.quick)
    for name, package, make in (("ResNet-50", "torch", resnet50), ("GPT-2", "transformers", gpt2)):
        if find_spec(package) is None:
            print(f"{name} needs {package}: left out")
            continue
        with tempfile.TemporaryDirectory() as folder:
            times, ratio, memory, work = step_times(make, args.quick, Path(folder))
        extra = {"MiB of memory that recording adds to the peak": memory}
        print(f"{name}: recording takes {ratio - 1:.2%} of a step, and {memory:.0f} MiB")
        peers = {"without": 1e3 * times["without"]}
        rows.append(
            common.Row(
                f"{name}, {work}",
                "ms a step",
                1e3 * times["recorded"],
                peers,
                "without",
                SHARE,
                extra,
                ratio,
            )
        )
    return common.report("record", rows, args)


if __name__ == "__main__":
    sys.exit(main())
