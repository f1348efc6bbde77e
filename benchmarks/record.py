"""The cost of digests: against a copy of memory, and their share of a training step on the shapes of ResNet-50 and GPT-2.

A step is a real one, on one process, with batches that people use: 32 images, and 8 x 512 tokens. The models are those of torchvision and
transformers; one whose library is missing is left out. Memory is the growth of the process's peak.
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


def resnet50(quick: bool) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor], str]:
    from torchvision.models import resnet50

    x = torch.randn(2 if quick else 32, 3, 224, 224)
    return resnet50(), lambda model: model(x).square().mean(), f"batch of {len(x)} images"


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
    for name, package, make in (("ResNet-50", "torchvision", resnet50), ("GPT-2", "transformers", gpt2)):
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
