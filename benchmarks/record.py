"""The cost of digests: against a copy of memory, and their share of a training step on the shapes of ResNet-50 and GPT-2.

A step is a real one, on one process, with batches that people use: 32 images, and 8 x 512 tokens. GPT-2 is that of transformers,
and left out without it. Memory is the growth of the process's peak.
"""

from __future__ import annotations

import contextlib
import resource
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
from bagua_ref.conformance.trace import digest

SIZES = {"4 KB": 2**10, "1 MB": 2**18, "64 MB": 2**24}
SHARE = common.at_most(1.03)


def speed(quick: bool) -> list[common.Row]:
    """Return GB/s of digests and copies."""
    rows = []
    for name, size in SIZES.items():
        x = torch.randn(size)
        medians = common.alternate({"digest": lambda x=x: digest(x), "copy": lambda x=x: x.clone()}, 3 if quick else 30)
        rate = {kind: 4 * size / seconds / 1e9 for kind, seconds in medians.items()}
        rows.append(common.Row(f"digest of {name}", "GB/s", rate["digest"], {"copy": rate["copy"]}, "copy"))
    return rows


class Bottleneck(torch.nn.Module):
    """A block of ResNet-50, with the shapes that the paper gives (He et al., arXiv:1512.03385, table 1)."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for before, after, size, step in ((inside, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)):
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
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU()]
    layers.append(torch.nn.MaxPool2d(3, 2, 1))
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inside, width, 2 if block == 0 and width > 64 else 1))
            inside = 4 * width
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(2048, 1000)]
    model = torch.nn.Sequential(*layers)
    assert sorted(tuple(p.shape) for p in model.parameters()) == sorted(map(tuple, shapes.resnet50()))
    x = torch.randn(2 if quick else 32, 3, 224, 224)
    return model, lambda model: model(x).square().mean(), f"batch of {len(x)} images"


def gpt2(quick: bool) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor], str]:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(50257, (1, 16) if quick else (8, 512))
    model = GPT2LMHeadModel(GPT2Config(n_layer=2 if quick else 12))
    return model, lambda model: model(tokens, labels=tokens).loss, f"batch of {tokens.shape[0]} x {tokens.shape[1]} tokens"


def step_times(make: Callable[..., tuple], quick: bool, folder: Path) -> tuple[dict[str, float], float, str]:
    """Return the median seconds of a step with and without recording, the peak memory that recording adds in MiB, and the work."""
    model, loss_of, work = make(quick)
    optimizer = (torch.optim.AdamW if make is gpt2 else torch.optim.SGD)(model.parameters(), lr=1e-3)
    if make is resnet50:
        optimizer.param_groups[0]["momentum"] = 0.9
    times: dict[str, list[float]] = {"without": [], "recorded": []}
    peak = {}
    for turn in range(2 if quick else 4):
        for kind, found in times.items():
            context = bagua_ref.record(model, optimizer, folder / str(turn)) if kind == "recorded" else contextlib.nullcontext()
            with context:
                for step in range(2 if quick else 4):
                    start = time.perf_counter()
                    optimizer.zero_grad()
                    loss_of(model).backward()
                    optimizer.step()
                    if step:  # the first one records the weights before it
                        found.append(time.perf_counter() - start)
            peak.setdefault(kind, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return {kind: sorted(found)[len(found) // 2] for kind, found in times.items()}, peak["recorded"] - peak["without"], work


def main() -> int:
    args = common.arguments(__doc__)
    rows = speed(args.quick)
    for name, package, make in (("ResNet-50", "torch", resnet50), ("GPT-2", "transformers", gpt2)):
        if find_spec(package) is None:
            print(f"{name} needs {package}: left out")
            continue
        with tempfile.TemporaryDirectory() as folder:
            medians, memory, work = step_times(make, args.quick, Path(folder))
        extra = {"MiB of memory that recording adds to the peak": memory}
        peers = {"without": 1e3 * medians["without"]}
        rows.append(common.Row(f"{name}, {work}", "ms a step", 1e3 * medians["recorded"], peers, "without", SHARE, extra))
    return common.report("record", rows, args)


if __name__ == "__main__":
    sys.exit(main())
